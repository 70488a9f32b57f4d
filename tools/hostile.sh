#!/bin/sh
# hostile.sh — everything in C again, under builds that look for faults. Bounded: about 35 minutes on two cores; ends in "hostile: ok".
#
#   tools/hostile.sh [warnings] [valgrind] [sanitize] [threads]     (nothing: the first three)
#
#   warnings   gcc and clang, -O2 -Wall -Wextra -Wpedantic -Werror, over the library, the command and the C tests
#   valgrind   the C unit tests, every read of memory that nobody wrote and every lost block is a failure
#   sanitize   the extension with address and undefined-behaviour sanitizers, debug level 3 (whole structures checked at each step, first
#              capacity 1) and asserts; then the Python tests that give it the most trouble
#   threads    the C units that run without Python's lock, and the extension, with the thread sanitizer; then tests/python/thread_stress.py for
#              STRESS_SECONDS (600). The interpreter and torch are not instrumented: Python's lock is seen as a lock, races inside torch are not
#              looked for. So a report is about memory of this extension alone.
#
# PYTHON: an interpreter with torch and the test requirements (default: .venv/bin/python). JOBS: 2. BUILD: where to build (default: build-hostile).
# A compiler or valgrind that is not there is said and skipped.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
JOBS=${JOBS:-2}
BUILD=${BUILD:-build-hostile}
if [ -x "$PYTHON" ]; then # meson and ninja may live beside it
    PYTHON=$(cd "$(dirname "$PYTHON")" && pwd)/$(basename "$PYTHON")
    PATH=$(dirname "$PYTHON"):$PATH
fi
mkdir -p "$BUILD"
BUILD=$(cd "$BUILD" && pwd)
export OMP_NUM_THREADS=1

has() { command -v "$1" >/dev/null 2>&1 || { echo "hostile: no $1 here, skipped"; return 1; }; }

warnings() {
    for cc in gcc clang; do
        has $cc || continue
        rm -rf "$BUILD/$cc"
        CC=$cc meson setup "$BUILD/$cc" -Dbuildtype=plain -Doptimization=2 -Dwerror=true -Db_ndebug=false -Ddebug_level=3 >"$BUILD/$cc.log" 2>&1 || { cat "$BUILD/$cc.log"; exit 1; }
        timeout 600 ninja -C "$BUILD/$cc" -j "$JOBS" >"$BUILD/$cc.log" 2>&1 || { grep -A5 -E "error|FAILED" "$BUILD/$cc.log"; exit 1; }
        echo "hostile: $cc builds without a warning"
    done
}

valgrind_units() {
    has valgrind || return 0
    rm -rf "$BUILD/valgrind"
    meson setup "$BUILD/valgrind" -Dbuildtype=debugoptimized -Db_ndebug=false -Ddebug_level=3 >"$BUILD/valgrind.log" 2>&1 || { cat "$BUILD/valgrind.log"; exit 1; }
    timeout 600 ninja -C "$BUILD/valgrind" -j "$JOBS" >"$BUILD/valgrind.log" 2>&1 || { cat "$BUILD/valgrind.log"; exit 1; }
    timeout 1500 meson test -C "$BUILD/valgrind" --suite unit --num-processes "$JOBS" -t 10 --print-errorlogs \
        --wrap "valgrind -q --error-exitcode=9 --leak-check=full --errors-for-leak-kinds=definite --fair-sched=yes"
}

# The interpreter loads both run-time libraries first; it frees little at its end, so leaks are not looked for (test_leaks.py does).
# Steps of thousands of operators are left out: debug level 3 checks the whole graph at each of them.
sanitize() {
    site=$BUILD/site
    rm -rf "$site"
    "$PYTHON" -m pip install -q --no-deps --no-build-isolation --target="$site" --upgrade . \
        -Csetup-args=-Db_sanitize=address,undefined -Csetup-args=-Db_lundef=false -Csetup-args=-Ddebug_level=3 -Csetup-args=-Db_ndebug=false \
        -Csetup-args=-Dbuildtype=debugoptimized -Ccompile-args=-j"$JOBS"
    rm -f "$BUILD"/ubsan.*
    for file in exactness_losses exactness_programs bad_input wild capture_doors plan_ahead rules_of_users layers together random interrupts factories reads samples threads any_failure known_backwards cuda_planning; do
        [ -e "tests/python/test_$file.py" ] || continue
        few=""
        [ "$file" != plan_ahead ] || few="not gpt and not llama and not vit"
        LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)" PYTHONPATH="$site" PYTHONMALLOC=malloc \
            ASAN_OPTIONS=detect_leaks=0:abort_on_error=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1:log_path="$BUILD/ubsan" \
            timeout 900 "$PYTHON" -m pytest -q -x -p no:cacheprovider "tests/python/test_$file.py" -k "$few" || { echo "hostile: test_$file.py failed"; exit 1; }
    done
    if ls "$BUILD"/ubsan.* >/dev/null 2>&1; then
        cat "$BUILD"/ubsan.*
        echo "hostile: undefined behaviour"
        exit 1
    fi
}

threads() {
    tsan=$BUILD/tsan
    core=_core.$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX")[1:])')
    rm -rf "$tsan" "$BUILD"/tsan.report.*
    meson setup "$tsan" -Dpython=true -Db_sanitize=thread -Db_lundef=false -Dbuildtype=debugoptimized -Db_ndebug=false -Ddebug_level=2 >"$tsan.log" 2>&1 || { cat "$tsan.log"; exit 1; }
    timeout 1200 ninja -C "$tsan" -j "$JOBS" "$core" test_account test_copy test_ledger test_resident >"$tsan.log" 2>&1 || { cat "$tsan.log"; exit 1; }
    for unit in account copy ledger resident; do
        "$tsan/test_$unit" || { echo "hostile: test_$unit failed under the thread sanitizer"; exit 1; }
    done
    mkdir -p "$tsan/site"
    cp -r python/koila "$tsan/site/"
    rm -f "$tsan"/site/koila/_core*.so
    cp "$tsan/$core" "$tsan/site/koila/"
    LD_PRELOAD="$(gcc -print-file-name=libtsan.so)" PYTHONPATH="$tsan/site" KOILA_STRESS_LIMIT=600 \
        TSAN_OPTIONS="ignore_noninstrumented_modules=1 report_signal_unsafe=0 exitcode=0 log_path=$BUILD/tsan.report" \
        "$PYTHON" tests/python/thread_stress.py --runs 1000000 --seconds "${STRESS_SECONDS:-600}" || { echo "hostile: thread_stress.py found something"; exit 1; }
    if ls "$BUILD"/tsan.report.* >/dev/null 2>&1; then
        cat "$BUILD"/tsan.report.*
        echo "hostile: data races"
        exit 1
    fi
}

for what in ${*:-warnings valgrind sanitize}; do
    case $what in
        warnings | sanitize | threads) $what ;;
        valgrind) valgrind_units ;;
        *) echo "hostile: expected warnings, valgrind, sanitize or threads, got $what" >&2 && exit 2 ;;
    esac
done
echo "hostile: ok"

#!/bin/sh
# Runs every case here: <case>.sh, whose output must be <case>.stdout and whose exit code is in <case>.exit (0 if there is none).
#   run.sh KOILA|BUILD_DIR [--update] [case ...]        KOILA: the command; --update writes what came out
set -u
here=$(cd "$(dirname "$0")" && pwd)
koila=${1:?which koila?}; shift
[ -d "$koila" ] && koila=$koila/koila
KOILA=$(cd "$(dirname "$koila")" && pwd)/$(basename "$koila"); export KOILA
DATA=$here/../data; export DATA
update=no
[ "${1:-}" = --update ] && { update=yes; shift; }
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
passed=0; failed=0
[ $# -gt 0 ] || set -- $(cd "$here" && ls ./*.sh | sed 's|^\./||; s|\.sh$||' | grep -v '^run$')
for name in "$@"; do
    mkdir "$work/$name"
    for f in "$DATA"/*; do [ -f "$f" ] && cp "$f" "$work/$name"; done
    (cd "$work/$name" && sh "$here/$name.sh" >../out 2>&1); code=$?
    if [ $update = yes ]; then
        cp "$work/out" "$here/$name.stdout"; rm -f "$here/$name.exit"
        [ $code = 0 ] || echo $code >"$here/$name.exit"
    fi
    want=0; [ -f "$here/$name.exit" ] && want=$(cat "$here/$name.exit")
    if [ "$code" = "$want" ] && cmp -s "$work/out" "$here/$name.stdout"; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1)); echo "FAILED $name: exit $code, expected $want"; diff "$here/$name.stdout" "$work/out"
    fi
done
echo "$passed passed, $failed failed"
[ $failed = 0 ]

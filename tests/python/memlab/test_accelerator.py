"""The accelerator back ends without an accelerator: a small libc10_cuda.so of our own calls the
function that the real one calls for every block, and torch is told that there are two devices. What
only hardware can show is not claimed here."""

import os
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch

SOURCE = """
#include <stddef.h>
#include <stdint.h>
#define report _ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE
void report(void *, int64_t, size_t, size_t, uint16_t);
int cudaFree(void *);
static size_t held[2], reserved[2], waiting[2];
void block(int device, long delta, long more)
{
    held[device] += delta; reserved[device] += more;
    report((void *)4096, delta, held[device], reserved[device], (uint16_t)(1 | device << 8));
}
/* another stream still uses it: no longer allocated, still active */
void free_later(int device, long n)
{
    waiting[device] += n;
    block(device, -n, 0);
}
/* that stream is done; nobody is told */
void let_go(int device, long n) { waiting[device] -= n; }
/* of a segment that expands: nobody is told */
void unmap(int device, long n) { reserved[device] -= n; }
void empty_cache(int device, long n) { cudaFree(0); reserved[device] -= n; }
size_t allocated(int device) { return held[device]; }
size_t active(int device) { return held[device] + waiting[device]; }
size_t all(int device) { return reserved[device]; }
"""
RUNTIME = "static int n; int cudaFree(void *p) { n++; return 0; } int n_freed(void) { return n; }"

HEAD = """
import ctypes, sys, warnings, torch
fake = ctypes.CDLL(sys.argv[1])
fake.block.argtypes = [ctypes.c_int, ctypes.c_long, ctypes.c_long]
fake.allocated.restype = fake.active.restype = fake.all.restype = ctypes.c_size_t
for f in (fake.free_later, fake.let_go, fake.unmap, fake.empty_cache):
    f.argtypes = [ctypes.c_int, ctypes.c_long]
def block(device, delta, more=0): fake.block(device, delta, more)
n_reads = 0
def stats(device):
    global n_reads
    n_reads += 1
    pools = "all", "large_pool", "small_pool"
    one = lambda v: {p: dict(current=v, peak=v, allocated=v, freed=0) for p in pools}
    held, active = fake.allocated(device), fake.active(device)
    return {"allocated_bytes": one(held), "allocation": one(1),
            "reserved_bytes": one(fake.all(device)),
            "active_bytes": one(active), "active": one(1 + (active > held)),
            "requested_bytes": one(held - 100 if held else 0), "segment": one(3),
            "inactive_split": one(2), "inactive_split_bytes": one(1 << 20)}
torch._C._cuda_memoryStats = stats
torch.cuda.device_count = lambda: 2
torch.cuda.current_device = lambda: 1
torch.cuda.memory.get_allocator_backend = lambda: BACKEND
import koila._core as core
from koila import memlab
from koila._errors import UnsupportedError
def rows(p, f, *columns, device=None):
    found = p.records(f, device=device)
    first = found[0]["line"]
    ran = [r for r in found if r["hits"] is not None]
    return {r["line"] - first: tuple(r.get(c) for c in columns) for r in ran}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    cc = shutil.which("cc") or shutil.which("gcc")
    if cc is None or torch.cuda.is_available():
        pytest.skip("needs a C compiler, and no real accelerator")
    folder = tmp_path_factory.mktemp("fake")
    (folder / "fake.c").write_text(SOURCE)
    (folder / "runtime.c").write_text(RUNTIME)
    lib = os.path.join(os.path.dirname(torch.__file__), "lib")
    out = folder / "libc10_cuda.so"
    shared = [cc, "-shared", "-fPIC", "-O1", f"-L{lib}", f"-L{folder}"]
    subprocess.run(
        [*shared, str(folder / "runtime.c"), "-o", str(folder / "libcudart.so")], check=True
    )
    subprocess.run(
        [
            *shared,
            str(folder / "fake.c"),
            "-o",
            str(out),
            "-lc10",
            "-lcudart",
            f"-Wl,-rpath,{lib}:{folder}",
        ],
        check=True,
    )
    return str(out)


def run(library, body, backend="native"):
    code = HEAD.replace("BACKEND", repr(backend)) + textwrap.dedent(body)
    p = subprocess.run(
        [sys.executable, "-c", code, library], capture_output=True, text=True, timeout=120
    )
    assert p.returncode == 0, p.stdout + p.stderr
    return p.stdout


def test_lines_show_allocated_and_reserved_peaks_of_their_device(library):
    run(
        library,
        """
        block(1, 5000, 1 << 21)                     # before we listen
        def work():
            block(0, 4096, 2 << 20)
            block(0, 2 << 20, 2 << 20); block(0, -(2 << 20))
            block(1, 512)
            block(0, -4096)
        with memlab.LineProfiler(work) as p: work()
        assert memlab.backend()["cuda"] == "hook"
        peaks = "active_bytes.all.peak", "reserved_bytes.all.peak"
        got = rows(p, work, *peaks, "alloc", "freed", "rise")
        assert got == {
            0: (0, 0, 0, 0, 0), 1: (4096, 2 << 20, 4096, 0, 4096),
            2: (4096 + (2 << 20), 4 << 20, 2 << 20, 2 << 20, 2 << 20),
            3: (4096, 4 << 20, 0, 0, 0), 4: (4096, 4 << 20, 0, 4096, 0)}, got
        other = rows(p, work, "active_bytes.all.peak", "alloc", device="cuda:1")
        assert other == {
            0: (5000, 0), 1: (5000, 0), 2: (5000, 0), 3: (5512, 512), 4: (5512, 0)}, other
        assert rows(p, work, "alloc", device="cpu") == {i: (0,) for i in range(5)}
        assert rows(p, work, "active_bytes.large_pool.allocated")[2] == (2 << 20,)
        assert rows(p, work, "requested_bytes.all.peak", "segment.all.current")[1] == (3996, 3)
        assert "larger end of the line" in str(p.display(columns=["requested_bytes.all.peak"]))
        with memlab.measure("cuda:1") as m: block(1, 1000); block(1, -1000)
        assert (m.start, m.rise, m.alloc, m.freed) == (5512, 1000, 1000, 1000)
    """,
    )


WAITING = """
    M = 1 << 20
    block(0, 9 * M, 64 * M)
    def work():
        fake.free_later(0, 4 * M)
        block(0, 2 * M); block(0, -2 * M)
        fake.let_go(0, 1 * M)
        pass
        block(0, 3 * M)
        fake.let_go(0, 3 * M); block(0, 1)
        block(0, -1)
    with memlab.LineProfiler(work, stats=MODE) as p: work()
    active = "active_bytes.all.peak", "active_bytes.all.current"
    found = rows(p, work, *active, "allocated_bytes.all.peak")
    got = {line: tuple(v / M for v in r) for line, r in found.items()}
"""


def test_full_statistics_are_read_at_the_end_of_every_line(library):
    run(
        library,
        """
        block(0, 4096)
        def work():
            a = 1
            block(0, 512)
            b = 2
        found = {}
        for stats in "auto", "full":
            with memlab.LineProfiler(work, stats=stats) as p: work()
            found[stats] = rows(p, work, "requested_bytes.all.current")
        assert found["auto"] == {0: (None,), 1: (None,), 2: (4508,), 3: (None,)}, found
        assert found["full"] == {0: (4508,), 1: (4508,), 2: (5020,), 3: (5020,)}, found
    """,
    )


def test_an_exception_passes_a_line_whose_statistics_are_read(library):
    run(
        library,
        """
        def work():
            block(0, 512)
            raise KeyError("mine")
        def several():
            try:
                yield block(0, 512)
            finally:
                fake.free_later(0, 512)            # read at every line from now on
        for stats in "auto", "full":
            with memlab.LineProfiler(work, several, stats=stats) as p:
                try: work()
                except KeyError as error: assert error.args == ("mine",)
                else: raise AssertionError
                for made in several(), several():
                    next(made)
                    made.close()
            found = rows(p, work, "alloc", "requested_bytes.all.current")
            assert found[1][0] == 512 and found[1][1] > 0, found
    """,
    )


def test_what_waits_for_another_stream_is_active_and_not_allocated(library):
    run(
        library,
        WAITING.replace("MODE", "'auto'")
        + """
    assert got == {
        0: (9, 9, 9), 1: (9, 9, 9), 2: (11, 9, 7), 3: (9, 8, 5), 4: (8, 8, 5), 5: (11, 11, 8),
        6: (11, 8 + 1 / M, 8 + 1 / M), 7: (8 + 1 / M, 8, 8 + 1 / M)}, got
    found = p.records(work, device="cuda:0")
    assert found[2]["active.all.peak"] == found[2]["allocation.all.peak"] + 1
    assert found[7]["active.all.current"] == found[7]["allocation.all.current"]
    for r in p.records(work, device="cpu") + p.records(work, device="cuda:1"):
        assert r["active_bytes.all.peak"] == r["allocated_bytes.all.peak"], r
        assert r["active.all.current"] == r["allocation.all.current"], r
    def later():
        fake.free_later(0, 2 * M)
    def outer():
        later()
        block(0, 5 * M); block(0, -5 * M)
    with memlab.LineProfiler(outer, later) as p: outer()
    got = rows(p, outer, *active)
    assert got == {0: (8 * M, 8 * M), 1: (8 * M, 8 * M), 2: (13 * M, 8 * M)}, got
    fake.let_go(0, 2 * M)
    """,
    )


def test_what_waits_is_read_once_a_call_and_at_every_line_only_while_it_waits(library):
    run(
        library,
        WAITING.replace("MODE", "'hook'")
        + """
    # it began to wait inside the only call
    assert all(r[0] == r[2] for r in got.values()), got
    fake.free_later(0, M)
    n = n_reads
    with memlab.LineProfiler(work, stats="hook") as p: work()
    assert {line: tuple(v / M for v in r) for line, r in rows(p, work, *active).items()} == {
        0: (8, 8), 1: (8, 8), 2: (10, 8), 3: (8, 7), 4: (7, 7), 5: (10, 10),
        6: (10, 7 + 1 / M), 7: (7 + 1 / M, 7)}
    assert n_reads - n == 9, n_reads - n     # enter, seven lines, return
    def quiet():
        pass
        pass
    fake.let_go(0, M)
    for reads in (1, 1, 1):                  # the first finds that nothing waits any more
        n = n_reads
        with memlab.LineProfiler(quiet, stats="hook") as p: quiet()
        assert n_reads - n == reads, n_reads - n
        assert rows(p, quiet, "active_bytes.all.peak")[1] == (6 * M,)
    """,
    )


def test_reserved_bytes_after_the_cache_was_emptied(library):
    run(
        library,
        """
        M = 1 << 20
        block(0, 30 * M, 30 * M); block(0, -30 * M)
        def work():
            fake.empty_cache(0, 20 * M)
            pass
            fake.unmap(0, 10 * M)
            block(0, 5, 2 * M)
        for mode in ("hook", "auto"):
            with memlab.LineProfiler(work, stats=mode) as p: work()
            got = rows(p, work, "reserved_bytes.all.peak", "reserved_bytes.all.current")
            assert got == {                      # who unmaps does not tell
                0: (30 * M, 30 * M), 1: (30 * M, 10 * M), 2: (10 * M, 10 * M),
                3: (10 * M, 10 * M), 4: (10 * M, 2 * M)}, got
            fake.unmap(0, M)
            assert core.memlab_now(1) == (5, M), core.memlab_now(1)
            fake.unmap(0, M)
            def quiet(): pass
            with memlab.LineProfiler(quiet, stats=mode) as p: quiet()
            assert rows(p, quiet, "reserved_bytes.all.peak")[0] == (0,)
            block(0, -5, 30 * M)
        # else torch's own runtime is loaded too, and is the original
        if torch.version.cuda is None:
            assert fake.n_freed() == 2           # we told the original
            core.memlab_stop()
            fake.empty_cache(0, 1)
            assert fake.n_freed() == 3
    """,
    )


def test_a_switch_of_the_target_inside_a_function(library):
    run(
        library,
        """
        def work():
            block(0, 1000)
            block(1, 70)
            p.target_gpu = 1
            block(0, 5000)
            block(1, 500)
        p = memlab.LineProfiler(work)
        with p: work()
        assert rows(p, work, "active_bytes.all.peak") == {
            0: (0,), 1: (1000,), 2: (1000,), 3: (70,), 4: (70,), 5: (570,)}
    """,
    )


def test_statistics_are_read_as_asked(library):
    run(
        library,
        """
        def work():
            for _ in range(1500):
                block(0, 512); block(0, -512)
        reads = {}
        for mode in ("hook", "auto", "full"):
            before = n_reads
            with memlab.LineProfiler(work, stats=mode) as p: work()
            reads[mode] = n_reads - before
        assert reads["hook"] <= 4 and 2000 <= reads["auto"] <= 2 * 2100, reads
        assert reads["full"] >= 2 * 1500, reads
        with memlab.LineProfiler(work, stats="hook") as p: work()
        try:
            p.display(columns=["requested_bytes.all.peak"])
        except UnsupportedError as e:
            assert "stats" in str(e)
        else: raise AssertionError
    """,
    )


def test_keys_of_five_parts_are_ignored_and_a_wrong_column_is_still_refused(library):
    """Private pools of CUDA graphs have statistics of their own, deeper than the others."""
    run(
        library,
        """
        three = stats
        def five(device):
            much = dict.fromkeys(("current", "peak", "allocated", "freed"), 1 << 40)
            pool = {"(0, 7)": {p: dict(much) for p in ("all", "large_pool", "small_pool")}}
            def deeper(pools):
                return pools | {"private_pools": pool, "all": pools["all"] | {"private": pool}}
            nested = {metric: deeper(pools) for metric, pools in three(device).items()}
            return nested | {
                "private_pools": {"(0, 7)": three(device)},
                "active_bytes.private_pools.(0, 7).all.current": 1 << 40, 5: 6}
        def flat(d, *path):
            if not isinstance(d, dict): return [".".join(path)]
            return [key for k, v in d.items() for key in flat(v, *path, str(k))]
        assert sum(key.count(".") == 4 for key in flat(five(0))) > 100
        def work():
            block(0, 4096, 2 << 20)
            block(0, 2 << 20, 2 << 20)
            block(0, -4096)
        metrics = ("active", "active_bytes", "allocation", "allocated_bytes", "requested_bytes",
                   "reserved_bytes", "inactive_split", "inactive_split_bytes", "segment")
        columns = [f"{m}.{p}.{s}" for m in metrics for p in ("all", "large_pool", "small_pool")
                   for s in ("current", "peak", "allocated", "freed")]
        def table(mode):
            with memlab.LineProfiler(work, stats=mode) as p: work()
            block(0, -(2 << 20), -(4 << 20))
            return str(p.display(columns=columns)), p.records(work), p
        torch._C._cuda_memoryStats = lambda device: (five if deep else three)(device)
        deep = False
        expected = table("full")
        deep = True
        text, records, p = table("full")
        timed = {"time", "rss"}
        assert text == expected[0] and "1024.00G" not in text and "1.00T" not in text
        def untimed(records):
            return [{k: v for k, v in r.items() if k not in timed} for r in records]
        assert untimed(records) == untimed(expected[1])
        assert all(key.count(".") in (0, 2) for r in records for key in r)
        reasons = {
            "active_bytes.private_pools.(0, 7).all.current": "three dot-separated parts",
            "a.b.c.d.e": "three dot-separated parts",
            "active_bytes.private_pools.current": "no such pool",
            "private_pools.all.current": "no such metric",
            "active_bytes.all.(0, 7)": "no such stat"}
        for wrong, why in reasons.items():
            for use in (lambda: p.display(columns=[wrong]), lambda: p.print_stats(columns=wrong),
                        lambda: memlab.profile(columns=[wrong])):
                try: use()
                except ValueError as e: assert why in str(e) and wrong[:60] in str(e), e
                else: raise AssertionError(wrong)
    """,
    )


def test_other_allocators_fall_back_to_statistics(library):
    run(
        library,
        """
        def work():
            block(0, 4096, 1 << 20)
            block(0, 100); block(0, -100)
        with memlab.LineProfiler(work) as p: work()
        b = memlab.backend()
        assert b["cuda"] == "stats" and "cudaMallocAsync" in b["why"]["cuda"]
        assert rows(p, work, "active_bytes.all.peak")[1] == (4096,)
        try: memlab.measure("cuda:0")
        except UnsupportedError as e: assert "cudaMallocAsync" in str(e)
        else: raise AssertionError
    """,
        backend="cudaMallocAsync",
    )


def test_indices_and_current_device(library):
    run(
        library,
        """
        from koila.memlab import devices
        try: memlab.LineProfiler(target_gpu=2)
        except ValueError as e: assert "there are 2 devices" in str(e), e
        else: raise AssertionError
        assert devices.resolve("cuda", "x") == 2 and devices.current() == 2
        assert devices.resolve(torch.device("cuda", 0), "x") == 1
    """,
    )


def test_books_of_an_accelerator_itemise_the_rest(library):
    run(
        library,
        """
        from koila.memlab import tensors
        block(0, 512 + 1024 + 2048 + 4096, 1 << 21)
        memlab.start()
        def segment(device, *blocks):
            names = "address", "size", "state"
            blocks = [dict(zip(names, block)) for block in blocks]
            return dict(device=device, address=0, blocks=blocks)
        torch.cuda.memory_snapshot = lambda: [
            segment(
                0,
                (1000, 512, "active_allocated"), (2000, 1024, "active_allocated"),
                (4000, 2048, "active_allocated"), (9000, 4096, "active_awaiting_free"),
                (20000, 1 << 20, "inactive")),
            segment(1, (1, 7, "active_allocated"))]
        def row(name, n, data):
            place = "cuda:0", n, n, data, data, 0, None, "allocator"
            return (name, "tensor", (n,), n, "u8", *place)
        b = tensors.books([row("a", 10, 1000), row("b", 512, 2000)], "cuda:0")
        assert b == dict(listed=1024, truth=7680, loose=(2048, 1), rounding=512, waiting=4096,
                         unexplained=0, borrowed=0), b
    """,
    )

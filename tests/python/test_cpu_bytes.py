"""The count of torch's CPU memory against what torch itself says, under both plans, threads, forks,
limits and refusals.

Every claim runs in a fresh process, once under plan A and once under plan B: a plan is chosen once
per process, and numbers are exact only from the installation on.
"""

import os
import subprocess
import sys
import textwrap

import pytest

PRELUDE = """
import gc, os, random, sys, threading
import torch
import koila._core as c
torch.set_num_threads(1)
assert c.cpu_bytes_install({plan!r}) == {plan!r}, c.cpu_bytes_install()

def storages(tensors):
    return {{t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}}

def make_step(n=40):
    torch.manual_seed(0)
    nn = torch.nn
    first, second, third = nn.Linear(n, 64), nn.Linear(64, 64), nn.Linear(64, 3)
    model = nn.Sequential(first, nn.Tanh(), second, nn.ReLU(), third)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(100, n), torch.randint(0, 3, (100,))
    def step():
        opt.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return float(loss.detach())
    return step
"""


@pytest.fixture(params=["A", "B"])
def run(request):
    def run_(body, **env):
        code = PRELUDE.format(plan=request.param) + textwrap.dedent(body)
        p = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, **env},
        )
        assert p.returncode == 0, p.stdout + p.stderr
        return p.stdout

    return run_


def test_current_is_the_sum_of_unique_storages_at_any_moment(run):
    run("""
        rng, live = random.Random(1), []
        for i in range(6000):
            k = rng.random()
            if k < 0.35 or not live:
                live.append(
                    torch.empty(
                        [rng.randint(0, 40) for _ in range(rng.randint(0, 3))],
                        dtype=rng.choice(
                            [torch.float64, torch.int8, torch.bfloat16, torch.complex64]
                        ),
                    )
                )
            elif k < 0.5:
                t = rng.choice(live)
                if t.untyped_storage().nbytes() >= t.numel() * t.element_size():
                    live.append(t.reshape(-1)[: rng.randint(0, 5)])
            elif k < 0.6:
                rng.choice(live).untyped_storage().resize_(rng.choice([0, 1, 100, 5000]))
            elif k < 0.7:
                t = rng.choice(live)
                if t.untyped_storage().nbytes() >= t.numel() * t.element_size():
                    live.append(t.clone())
            else:
                live.pop(rng.randrange(len(live)))
            if i % 30 == 0:
                assert c.cpu_bytes_current() == sum(storages(live).values()), i
        live.clear()
        t = None
        assert c.cpu_bytes_current() == 0 and c.cpu_bytes_n_allocs() == c.cpu_bytes_n_frees() > 2000
    """)


def test_a_lost_event_is_caught_by_the_oracle(run):
    run("""
        a = torch.empty(100)
        c.cpu_bytes_uninstall()
        b = torch.empty(100)   # not seen
        assert not c.cpu_bytes_ok()
        assert c.cpu_bytes_current() == 400 != sum(storages([a, b]).values())
        assert len(c.cpu_bytes_install()) == 1 and c.cpu_bytes_ok()
        del a
        assert c.cpu_bytes_current() == 0
        del b                   # a free of an unknown block changes nothing
        assert c.cpu_bytes_current() == 0
    """)


def test_step_is_counted_as_by_the_profiler(run):
    run("""
        step = make_step()
        step()
        gc.collect()
        n0, start = c.cpu_bytes_n_allocs(), c.cpu_bytes_current()
        c.cpu_bytes_reset_peak()
        step()
        n1, peak, end = (
            c.cpu_bytes_n_allocs() - n0,
            c.cpu_bytes_peak() - start,
            c.cpu_bytes_current(),
        )
        from torch.profiler import profile, ProfilerActivity

        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
            step()
        events = [e.nbytes() for e in p.profiler.kineto_results.events() if e.name() == "[memory]"]
        live = top = 0
        for n in events:
            live += n
            top = max(top, live)
        assert n1 == sum(n > 0 for n in events), (n1, len(events))
        # blocks older than the session die unseen by the profiler, so its running sum may only be
        # higher
        assert start == end and top >= peak > 0
    """)


def test_limit_raises_torch_s_own_error_and_is_exact(run):
    run("""
        c.cpu_bytes_set_limit(c.cpu_bytes_current() + 4000)
        a = torch.empty(1000)
        try:
            torch.empty(1)
        except RuntimeError as e:
            assert (
                type(e) is RuntimeError
                and "can't allocate memory" in str(e)
                and "tried to allocate 4 bytes" in str(e)
            ), e
        else:
            raise AssertionError("not refused")
        assert c.cpu_bytes_get_limit() == 4000
        c.cpu_bytes_set_limit(None)
        assert c.cpu_bytes_get_limit() is None
        torch.empty(1)
    """)


def test_smallest_limit_that_lets_a_step_finish_is_the_measured_peak_to_the_byte(run):
    run("""
        step = make_step()
        step(); gc.collect()
        start = c.cpu_bytes_current()
        c.cpu_bytes_reset_peak(); step(); gc.collect()
        peak = c.cpu_bytes_peak()
        def passes(limit):
            c.cpu_bytes_set_limit(limit)
            try:
                step()
                return True
            except RuntimeError as e:
                assert "can't allocate memory" in str(e)
                return False
            finally:
                c.cpu_bytes_set_limit(None); gc.collect()
        lo, hi = start, peak + 100000
        while lo < hi:
            mid = (lo + hi) // 2
            lo, hi = (lo, mid) if passes(mid) else (mid + 1, hi)
        assert lo == peak, (lo, peak)
    """)


def test_every_allocation_of_a_step_may_fail_and_nothing_leaks(run):
    run("""
        step = make_step()
        step(); step(); gc.collect()
        base, n0 = c.cpu_bytes_current(), c.cpu_bytes_n_allocs()
        step()
        n = c.cpu_bytes_n_allocs() - n0
        assert n > 20
        for k in range(1, n + 1):
            c.cpu_bytes_fail_nth(k)
            try:
                step()
            except RuntimeError as e:
                assert "can't allocate memory" in str(e), e
                del e
            else:
                raise AssertionError(k)
            finally:
                c.cpu_bytes_fail_nth(0)
            gc.collect()
            step()      # gradients a failed step dropped are there again
            assert c.cpu_bytes_current() == base, (k, c.cpu_bytes_current(), base)
    """)


def test_threads_never_exceed_the_limit_and_every_refusal_is_an_error(run):
    run("""
        refused, limit = [0] * 6, 150_000
        c.cpu_bytes_set_limit(limit)


        def work(i):
            rng, live = random.Random(i), []
            for _ in range(1500):
                try:
                    live.append(torch.empty(rng.randint(1, 100000), dtype=torch.uint8))
                except RuntimeError:
                    refused[i] += 1
                if len(live) > 5 or rng.random() < 0.4:
                    live.clear() if rng.random() < 0.2 else live and live.pop()


        ts = [threading.Thread(target=work, args=(i,)) for i in range(6)]
        [t.start() for t in ts]
        [t.join() for t in ts]
        assert 0 < c.cpu_bytes_peak() <= limit, c.cpu_bytes_peak()
        assert c.cpu_bytes_current() == 0
        assert sum(refused) > 0
    """)


def test_blocks_freed_on_another_thread_are_taken_off(run):
    run("""
        live = [torch.empty(100) for _ in range(2000)]
        t = threading.Thread(target=live.clear); t.start(); t.join()
        assert c.cpu_bytes_current() == 0
    """)


def test_a_forked_child_counts_for_itself(run):
    run("""
        a = torch.empty(1000)
        c.cpu_bytes_set_limit(10000)
        pid = os.fork()
        if pid == 0:
            ok = c.cpu_bytes_current() == 0 and c.cpu_bytes_get_limit() is None and c.cpu_bytes_ok()
            b = torch.empty(5000)
            ok = ok and c.cpu_bytes_current() == 20000
            del a       # the parent's block
            ok = ok and c.cpu_bytes_current() == 20000
            os._exit(0 if ok else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert c.cpu_bytes_current() == 4000 and c.cpu_bytes_get_limit() == 10000
    """)


def test_forking_while_threads_allocate_does_not_hang(run):
    run("""
        stop = False
        def churn():
            while not stop: torch.empty(1000)
        ts = [threading.Thread(target=churn) for _ in range(3)]
        [t.start() for t in ts]
        for i in range(15):
            pid = os.fork()
            if pid == 0:
                torch.empty(10); os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
        stop = True
        [t.join() for t in ts]
        assert c.cpu_bytes_current() == 0
    """)


def test_workers_of_a_loader_leave_no_trace(run):
    run("""
        from torch.utils.data import DataLoader, TensorDataset

        x = torch.randn(64, 8)
        base = c.cpu_bytes_current()
        for workers in (0, 2):
            # forked: where workers start otherwise (Python 3.14), x itself moves to shared
            # memory, which is not the allocator's
            for (b,) in DataLoader(
                TensorDataset(x),
                batch_size=8,
                num_workers=workers,
                multiprocessing_context="fork" if workers else None,
            ):
                pass
        del b
        gc.collect()
        assert c.cpu_bytes_current() == base, (c.cpu_bytes_current(), base)
    """)


def test_other_kinds_of_tensors_balance(run):
    run("""
        import io, numpy as np


        def kinds():
            a = torch.randn(64, 64)
            b = torch.from_numpy(a.numpy() * 1)
            a.to_mkldnn()
            a.to_sparse().coalesce()
            torch.utils.dlpack.from_dlpack(a)
            f = io.BytesIO()
            torch.save(a, f)
            f.seek(0)
            torch.load(f)
            torch.empty(100).share_memory_()
            torch.UntypedStorage(10)
            torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)])
            v = a.numpy()
            del a
            assert c.cpu_bytes_current() > base


        base = c.cpu_bytes_current()
        for _ in range(2):
            kinds()
            gc.collect()
            assert c.cpu_bytes_current() == base, c.cpu_bytes_current()
    """)


def test_overwritten_slots_are_noticed_and_the_count_starts_again():
    """What a memory profiler of another maker does: write libc10's slots. Planted by hand through a
    second copy of the patching code."""
    code = PRELUDE.format(plan="A") + textwrap.dedent("""
        import ctypes, struct

        libc = ctypes.CDLL(None)
        a = torch.empty(1000)
        # find our slot: the pages of libc10 that hold a pointer to our hook are where the
        # original posix_memalign went
        path = next(l.split()[-1] for l in open("/proc/self/maps") if "/libc10.so" in l)
        spans = [
            (*(int(v, 16) for v in l.split()[0].split("-")), l.split()[1])
            for l in open("/proc/self/maps")
            if path in l
        ]
        core = [
            tuple(int(v, 16) for v in l.split()[0].split("-"))
            for l in open("/proc/self/maps")
            if "_core." in l and "x" in l.split()[1]
        ]
        slots = []
        for lo, hi, mode in spans:
            if mode[0] != "r" or mode[2] == "x":
                continue
            words = (ctypes.c_uint64 * ((hi - lo) // 8)).from_address(lo)
            slots += [
                (words, i, mode) for i, w in enumerate(words) if any(x <= w < y for x, y in core)
            ]
        # posix_memalign, strerror_r, free, and where free is also passed by its address
        assert len(slots) in (3, 4), slots
        hits = [(words, i) for words, i, mode in slots if mode[1] == "w"]
        if not hits:
            sys.exit(print("bound when loaded: every slot is in a read-only page"))
        assert len(hits) == 3, hits  # the fourth is in a read-only page
        before = [w[i] for w, i in hits]
        for (w, i), name in zip(hits, ("free", "posix_memalign", "strerror_r")):
            w[i] = ctypes.cast(getattr(libc, name), ctypes.c_void_p).value
        assert not c.cpu_bytes_ok()
        b = torch.empty(1000)
        assert c.cpu_bytes_install() == "A" and c.cpu_bytes_ok() and c.cpu_bytes_generation() == 1
        assert c.cpu_bytes_current() == 0
        d = torch.empty(10)
        del a, b
        assert c.cpu_bytes_current() == 40
    """)
    p = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert p.returncode == 0, p.stdout + p.stderr
    if p.stdout:
        pytest.skip(p.stdout)


@pytest.mark.parametrize("env", [{"LD_BIND_NOW": "1"}, {"THP_MEM_ALLOC_ENABLE": "1"}])
def test_environment_that_changes_the_allocator_s_path(run, env):
    run(
        """
        a = torch.empty(3 << 20, dtype=torch.uint8)
        assert c.cpu_bytes_current() == 3 << 20
        del a
        assert c.cpu_bytes_current() == 0
    """,
        **env,
    )


def test_without_torch_it_says_so():
    code = """
import importlib.util, pathlib

# found, not imported: the package itself needs torch
folder = importlib.util.find_spec("koila").submodule_search_locations[0]
spec = importlib.util.spec_from_file_location(
    "koila._core", next(map(str, pathlib.Path(folder).glob("_core*.so")))
)
c = importlib.util.module_from_spec(spec)
spec.loader.exec_module(c)
print(c.cpu_bytes_install(), c.cpu_bytes_ok())
"""
    p = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert p.stdout.strip() == "unsupported: torch is not imported False"


def test_free_memory_names_what_binds(tmp_path):
    import koila._core as c

    f = c.free_memory()
    assert f["free"] == f[f["bound"]] > 0
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable:  7 kB\n")
    assert c.free_memory(str(tmp_path)) == dict(
        cgroup=None, rlimit_data=None, rlimit_as=None, available=7168, free=7168, bound="available"
    )
    code = (
        "import resource as r, koila._core as c; r.setrlimit(r.RLIMIT_DATA, (1 << 30, -1)); "
        "d = c.free_memory(); "
        "assert d['bound'] == 'rlimit_data' and 0 < d['free'] < 1 << 30, d"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

"""MemReporter, snapshot, diff, on_oom, measure: names, sizes, and books that balance to the
byte."""

import gc
import io
import json
import random
import re
import subprocess
import sys
import textwrap
import time
import weakref

import memlab_helpers
import pytest
import torch

import koila._core as core
from koila import memlab
from koila._errors import KoilaError, OutOfMemory, UnsupportedError
from koila.memlab import MemReporter, tensors

memlab.start()


def collected(reporter):
    reporter.collect_tensor()
    reporter.get_stats()
    return reporter.text()


def fresh(body, code=0):
    return memlab_helpers.fresh(
        "import numpy as np\nmemlab.start()\n" + textwrap.dedent(body), code
    )


def table(text):
    """{name: used} of a report"""
    return {
        line[:40].strip(): line[60:].strip()
        for line in text.splitlines()
        if re.match(r".{60} *[-\d.]+[BKMG]?$", line) and line[40] == " " and len(line) == 70
    }


def test_report_of_a_layer_prints_exactly():
    out = fresh("""
        m = torch.nn.Linear(1024, 1024)
        x = torch.randn(512, 1024)
        y = m(x).mean()
        y.backward()
        MemReporter(m).report()
    """)
    assert out == memlab_helpers.LAYER_REPORT.format(device="cpu", mean="4.00B")


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64]
)
def test_bytes_are_right_for_every_dtype(dtype):
    t = torch.zeros(100, 7, dtype=dtype)
    r = MemReporter()
    r.collect_tensor()
    r.get_stats()
    mine = [s for s in r.device_tensor_stat[torch.device("cpu")] if s[1] == (100, 7)]
    assert any(s[2] == 700 and s[3] == 700 * dtype.itemsize for s in mine)
    del t


def test_two_reports_in_a_row_print_the_same():
    out = fresh("""
        m = torch.nn.Linear(5, 5); o = torch.optim.Adam(m.parameters())
        h = m(torch.randn(3, 5)).exp().tanh()
        h.sum().backward(retain_graph=True); o.step()
        s = torch.eye(3).to_sparse(); c = torch.eye(4).to_sparse_csr()
        r = MemReporter(m); r.add_optimizer(o)
        a = (r.collect_tensor(), r.get_stats(), r.text(True))[2]
        b = (r.collect_tensor(), r.get_stats(), r.text(True))[2]
        assert a == b, a + b
        print(a)
    """)
    names = table(out)
    assert {"Adam.weight.exp_avg", "Adam.bias.step"} <= names.keys()
    assert (
        len([n for n in names if n.endswith(".indices")]) == 1
        and len([n for n in names if "crow_indices" in n]) == 1
    )


def test_what_only_the_graph_holds_is_listed():
    out = fresh("""
        x = torch.randn(524288, requires_grad=True)
        y = (x * (x + 2)).exp().tanh().sum()
        MemReporter().report()
        MemReporter().report()
        y.backward()
        del y
        MemReporter().report()
    """)
    first, second, third = (part for part in out.split("Element type") if part)
    assert {"TanhBackward0.result", "ExpBackward0.result", "MulBackward0.other"} <= table(
        first
    ).keys()
    assert "Used Memory: 8.00M" in first and "allocated memory on cpu: 8.00M" in first
    assert table(first).keys() == table(second).keys()
    assert "Backward0" not in third and "Used Memory: 4.00M" in third


def test_verbose_names_the_row_a_shared_storage_belongs_to():
    out = fresh("""
        t = torch.zeros(1000)
        v = t[5:]
        r = MemReporter(); r.report(verbose=False)
        r.report(verbose=True)
    """)
    plain, verbose = (p for p in out.split("Element type") if p)
    assert "(->" not in plain and "(->Tensor" in verbose


def test_saved_again_shares_when_verbose():
    out = fresh("""
        x = torch.randn(10, requires_grad=True)
        y = x * x
        r = MemReporter(); r.report(verbose=True)
        r.print_stats()
    """)
    verbose, plain = (p for p in out.split("Element type") if p)
    assert "MulBackward0.self(->Tensor0)" in verbose and "Backward" not in plain


def test_frozen_heap_and_grad_of_plain_leaves():
    out = fresh("""
        x = torch.randn(1000, requires_grad=True); (x * 2).sum().backward()
        holder = {"deep": [torch.randn(77)]}
        def inner():
            local = torch.randn(55)
            gc.collect(); gc.freeze()
            MemReporter().report()
            return local
        inner()
    """)
    assert re.search(r"Tensor\d+\.grad", out) and "(77,)" in out and "(55,)" in out
    assert "Unexplained" not in out and "Not held" not in out


def test_a_frozen_heap_with_objects_that_wait_to_be_used_again():
    out = fresh("""
        import asyncio
        async def wait():
            loop = asyncio.get_running_loop()
            futures = [loop.create_future() for _ in range(50)]
            for f in futures: loop.call_soon(f.set_result, 1)
            return [await f for f in futures]
        # leaves iterators of futures in a free list, which _asyncio lets the collector visit
        asyncio.run(wait())
        kept = torch.randn(77)
        gc.freeze()
        for _ in range(3):
            assert len([r for r in memlab.tensors.Names().collect() if r[2] == (77,)]) == 1
        print(sum(asyncio.run(wait())))
    """)
    assert out == "50\n"


def test_what_was_frozen_before_torch_came_hides_no_tensor_and_costs_nothing():
    script = """
        import gc
        gc.freeze()
        import torch
        from koila.memlab import tensors
        def inner():
            t = torch.randn(55)
            n = sum(r[2] == (55,) for r in tensors.Names().collect())
            del t                # no frame's locals were looked at, which some Pythons would keep
            return n, sum(r[2] == (55,) for r in tensors.Names().collect())
        print(gc.get_freeze_count() > 0, len(gc.get_objects()) > 40_000, inner())
    """
    p = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120
    )
    assert p.stdout == "True True (1, 0)\n", p.stdout + p.stderr


def test_zoo_of_odd_objects_survives_and_runs_no_foreign_code():
    out = fresh("""
        import weakref, warnings
        class Foreign:
            @property
            def __class__(self): raise SystemExit("foreign code ran")
        class Loud(torch.Tensor):
            @property
            def shape(self): raise SystemExit("shape ran")
            @classmethod
            def __torch_function__(cls, f, t, a=(), k=None): raise SystemExit("torch_function ran")
            def __repr__(self): raise SystemExit("repr ran")
        class C: pass
        dead = weakref.proxy(C())
        f = Foreign()
        loud = torch.randn(8).as_subclass(Loud)
        csr, csc = torch.eye(4).to_sparse_csr(), torch.eye(4).to_sparse_csc()
        coo = torch.eye(4).to_sparse(); unco = torch.sparse_coo_tensor([[0, 0]], [1., 2.], (3,))
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        mk = torch.ones(3, 3).to_mkldnn()
        meta = torch.empty(10, device="meta")
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv
        with FakeTensorMode(shape_env=ShapeEnv()) as mode:
            fake = torch.empty(1000)
            sym = mode.from_tensor(torch.empty(4, 5), static_shapes=False)
        quant = torch.quantize_per_tensor(torch.randn(100), .1, 0, torch.qint8)
        lazy = torch.nn.LazyLinear(3)
        empty = torch.randn(100)[:0]
        scalar = torch.tensor(1.)
        r = MemReporter()
        r.report(verbose=True)
        r.report()
    """)
    rows = table(out)
    for part in ("crow_indices", "ccol_indices", "row_indices", "offsets", "indices"):
        assert any(n.endswith("." + part) for n in rows), part
    assert any(n.startswith("Loud") for n in rows) and "-" in rows.values()
    assert re.search(r"\(0,\) +400.00B", out) and re.search(r"\(1,\) +4.00B", out)
    assert re.search(r"FakeTensor\d+ .*0.00B", out)
    assert "Storage on meta" in out
    assert "Unexplained" not in out


def test_checkpoint_does_not_run_again_and_save_on_cpu_is_left_alone():
    out = fresh("""
        from torch.utils.checkpoint import checkpoint
        runs = []
        def block(x):
            runs.append(1)
            return x.exp().tanh()
        x = torch.randn(1000, requires_grad=True)
        y = checkpoint(block, x, use_reentrant=False).sum()
        with torch.autograd.graph.save_on_cpu():
            z = x.exp().sum()
        MemReporter().report(verbose=True)
        assert len(runs) == 1
        (y + z).backward()
    """)
    assert "Unexplained" not in out


def test_numbers_stay_and_are_never_used_again():
    r = MemReporter()
    a, b = torch.zeros(11), torch.zeros(12)

    def names():
        collected(r)
        return {row[1]: row[0] for row in r.device_tensor_stat[torch.device("cpu")]}

    first = names()
    del a
    c = torch.zeros(13)
    second = names()
    assert second[(12,)] == first[(12,)] and second[(13,)] not in first.values()
    del b, c


def test_names_of_buffers_tied_weights_and_optimizers():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Linear(4, 4, bias=False)
            self.b = torch.nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight
            self.bn = torch.nn.BatchNorm1d(4)

    net, other = Net(), torch.nn.Parameter(torch.zeros(9))
    opt = torch.optim.SGD([{"params": net.parameters()}, {"params": [other]}], lr=0.1, momentum=0.9)
    r = MemReporter(net)
    r.add_optimizer(opt)  # before its first step
    (net.bn(net.b(net.a(torch.randn(3, 4)))).sum() + other.sum()).backward()
    opt.step()
    text = collected(r)
    rows = table(text)
    assert {
        "a.weight",
        "a.weight.grad",
        "bn.running_mean",
        "bn.num_batches_tracked",
        "SGD.a.weight.momentum_buffer",
        "SGD.group1.param0.momentum_buffer",
    } <= rows.keys()
    assert "b.weight" not in rows
    order = list(rows)
    assert (
        order.index("a.weight.grad")
        == order.index("a.weight") + 1
        < order.index("bn.running_mean")
        < order.index("SGD.a.weight.momentum_buffer")
    )
    second = torch.nn.Linear(2, 2)
    two = MemReporter({"one": net, "two": second})
    assert {"one.a.weight", "two.bias"} <= table(collected(two)).keys()


def test_subclass_inner_tensors():
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        def __init__(self, inner):
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, *args, **kwargs):
            raise AssertionError("foreign code ran")

    w = Wrapper(torch.zeros(333))
    rows = table(collected(MemReporter()))
    assert any(
        re.fullmatch(r"Wrapper\d+\.inner", n) and used == "1.30K" for n, used in rows.items()
    ), rows
    del w


def test_borrowed_memory_is_summed_apart_and_counted_once():
    out = fresh("""
        a = np.zeros(1000)
        x, y = torch.from_numpy(a), torch.from_numpy(a[100:])
        s = torch.zeros(500).share_memory_()
        t = torch.zeros(10)
        MemReporter().report()
    """)
    assert "Borrowed memory: 9.77K" in out  # 8000 + 2000 bytes, y inside x
    assert "The allocated memory on cpu: 40.00B" in out and "Used Memory: 40.00B" in out


def test_devices_that_have_nothing():
    r = MemReporter()
    assert collected(r) and "No tensors on cuda" in r.text(target_device="cuda")
    assert "Storage on cpu" in r.text(target_device="cpu") and "Storage on cpu" in r.text(
        target_device=torch.device("cpu")
    )
    for bad in (1.5, []):
        with pytest.raises((TypeError, ValueError)):
            r.text(target_device=bad)


def test_before_anything_was_collected_is_the_header_only(capsys):
    MemReporter().print_stats()
    assert capsys.readouterr().out.splitlines() == [
        f"{'Element type':<40s}{'Size':>20s}{'Used MEM':>10s}",
        "-" * 79,
    ]


@pytest.mark.parametrize("bad", [3, "model", torch.zeros(1), {"a": 3}])
def test_what_is_no_model_or_optimizer(bad):
    with pytest.raises(TypeError, match="Module"):
        MemReporter(bad)
    with pytest.raises(TypeError, match="param_groups"):
        MemReporter().add_optimizer(bad)


def test_reporter_and_snapshot_keep_nothing_alive():
    m = torch.nn.Linear(100, 100)
    r = MemReporter(m)
    collected(r)
    s = memlab.snapshot(m)
    refs = [weakref.ref(m), weakref.ref(m.weight)]
    gc.collect()
    base = core.cpu_bytes_current()
    del m
    gc.collect()
    assert [ref() for ref in refs] == [None, None] and core.cpu_bytes_current() == base - 40400
    collected(r)
    assert s.total() > 0


def test_books_balance_over_random_programs():
    """truth == storages listed + itemised rest, at random points; a planted error is caught."""
    rng, keep = random.Random(3), []
    names = memlab.MemReporter()._names
    for step in range(15):
        k = rng.randrange(6)
        if k == 0:
            lstm = torch.nn.LSTM(8, 8)
            keep.append(lstm(torch.randn(3, 2, 8)))
        elif k == 1:
            att = torch.nn.MultiheadAttention(8, 2)
            q = torch.randn(4, 1, 8)
            keep.append(att(q, q, q))
        elif k == 2:
            keep.append(torch.randn(50, 50, requires_grad=True).softmax(0).cumsum(1))
        elif k == 3:
            keep.append(torch.eye(rng.randint(2, 9)).to_sparse())
        elif k == 4:
            keep.append(torch.randn(9, 9)[::2].t())
        elif keep:
            keep.pop(rng.randrange(len(keep)))
        rows = names.collect(shared_saved=True)
        b = tensors.books(rows, "cpu")
        assert b["unexplained"] == 0, (step, b)
        assert b["truth"] == b["listed"] + b["loose"][0]
        wrong = [
            (*r[: tensors.BYTES], r[tensors.BYTES] + 1, *r[tensors.BYTES + 1 :]) if i == 0 else r
            for i, r in enumerate(rows)
        ]
        assert tensors.books(wrong, "cpu")["unexplained"] != 0 or rows[0][tensors.BYTES] < 0


def test_storages_older_than_the_hook_count():
    code = (
        "import torch\nx=torch.zeros(1000)\n"
        "from koila.memlab import MemReporter\nMemReporter().report()"
    )
    p = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (
        "allocated memory on cpu: 3.91K" in p.stdout
        and "Unexplained" not in p.stdout
        and "Borrowed" not in p.stdout
    ), p.stdout + p.stderr


def test_the_time_of_a_report_grows_no_faster_than_the_number_of_tensors():
    """How long it takes is measured in bench/bench_memlab.py."""
    seconds, many = [], []
    for n in (10_000, 100_000):
        many += [torch.empty(4) for _ in range(n - len(many))]
        r = MemReporter()
        took = []
        for _ in range(3):
            start = time.process_time()
            collected(r)
            took.append(time.process_time() - start)
        seconds.append(min(took))
    assert seconds[1] < 30 * seconds[0], "one that compares each with each takes 100 times as long"


# ---- snapshot, diff


def test_snapshot_kinds_modules_and_files(tmp_path):
    m = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.BatchNorm1d(10))
    m[0].tied = m[0].weight
    o = torch.optim.Adam(m.parameters())
    h = m(torch.randn(4, 10)).exp()
    h.sum().backward(retain_graph=True)
    o.step()
    s = memlab.snapshot(m, o)
    row = {r.name: r for r in s.rows}
    assert (
        row["0.weight"].aliases == ("0.tied",)
        and row["0.weight"].kind == "parameter"
        and row["0.weight"].bytes == 400
    )
    assert (
        row["1.running_mean"].kind == "buffer"
        and row["0.weight.grad"].kind == "grad"
        and row["Adam.0.weight.exp_avg"].kind == "optimizer"
    )
    assert {"parameter", "buffer", "grad", "optimizer", "tensor"} <= s.by_kind().keys()
    assert s.by_module()["0"] == 4 * (400 + 40) + 8
    assert s.total() == sum(s.by_kind().values()) and s.total("cpu") == s.total()
    for suffix in ("txt", "html", "json", "csv"):
        s.save(tmp_path / f"s.{suffix}")
    assert json.loads((tmp_path / "s.json").read_text())["by_kind"]["parameter"] == 520
    page = (tmp_path / "s.html").read_text()
    assert "http" not in page and "<script" not in page
    with pytest.raises(ValueError, match=".csv"):
        s.save("x.foo")


def test_names_are_written_into_a_snapshot_of_the_caching_allocator():
    m = torch.nn.Linear(100, 100)
    m(torch.ones(2, 100)).sum().backward()
    s = memlab.snapshot(m)
    # as if the tensors were on a GPU
    s._at = [("cuda:1" if device == "cpu" else device, *rest) for device, *rest in s._at]
    w, g, stray = m.weight.data_ptr(), m.weight.grad.data_ptr(), 1 << 50
    frames = [dict(filename="train.py", line=3, name="step")]
    first = min(w, g)

    def block(address, state="active_allocated"):
        # a fixed size: on the CPU two tensors may lie side by side
        return dict(address=address, size=40_000, requested_size=40_000, state=state, frames=frames)

    def event(action, address):
        return dict(action=action, addr=address, size=40_448, stream=0, time_us=1, frames=frames)

    blocks = [block(first), block(max(w, g)), block(stray), block(stray + 50_000, "inactive")]
    traces = [
        [event("alloc", w)],
        [
            event("alloc", w),
            event("free_completed", w),
            event("alloc", w),
            event("alloc", g),
            event("alloc", stray),
        ],
    ]
    recorded = dict(
        segments=[
            dict(
                device=1,
                address=first,
                total_size=1 << 60,
                stream=0,
                segment_type="large",
                blocks=blocks,
            )
        ],
        device_traces=traces,
    )
    assert s.annotate(recorded) is recorded
    named = {b["address"]: [f["name"] for f in b["frames"]] for b in blocks}
    assert (
        named[w] == ["weight (parameter)", "step"]
        and named[g] == ["weight.grad (grad)", "step"]
        and named[stray] == ["step"]
    )
    assert (
        [len(e["frames"]) for e in traces[1]] == [1, 1, 2, 2, 1]
        and len(traces[0][0]["frames"]) == 1
        and len(frames) == 1
    )
    for bad in (None, [], {}):
        with pytest.raises(TypeError, match="_snapshot"):
            s.annotate(bad)


def test_diff_of_snapshots_and_of_records():
    m = torch.nn.Linear(10, 10)
    gone = torch.zeros(77)
    a = memlab.snapshot(m)
    del gone
    m.bias = torch.nn.Parameter(torch.zeros(20))
    new = torch.zeros(1000)
    b = memlab.snapshot(m)
    d = b - a
    assert (
        any(n == 4000 for _, n in d.new)
        and any(n == -308 for _, n in d.gone)
        and ("bias", 40) in d.grown
    )
    assert d.total == b.total() - a.total() and "bias" in str(d)
    a.pid = 1
    assert "compared by name only" in str(memlab.diff(a, b))

    def work(n):
        return torch.empty(n, dtype=torch.uint8)

    p = memlab.LineProfiler(work, target_gpu="cpu")
    with p:
        work(100)
    first = p.records()
    with p:
        work(5000)
    assert memlab.diff(first, p.records()).grown[0][1] == 4900
    with pytest.raises(TypeError, match="diff"):
        memlab.diff(1, a)
    del new


def test_trace_says_who_made_a_tensor():
    out = fresh("""
        import linecache
        src = (
            "def make():\\n    x = torch.zeros(1000)\\n"
            "    y = torch.nn.functional.relu(x)\\n    return x, y\\n"
        )
        exec(compile(src, "/tmp/user_code.py", "exec"))
        memlab.start(trace=True)
        x, y = make()
        s = memlab.snapshot()
        print([r.line for r in s.rows])
    """)
    assert "['/tmp/user_code.py:2', '/tmp/user_code.py:3']" in out


# ---- measure


def test_measure_is_exact_and_nests():
    with memlab.measure("cpu") as m:
        a = torch.empty(1000, dtype=torch.uint8)
        with memlab.measure("cpu") as inner:
            b = torch.empty(500, dtype=torch.uint8)
            assert inner.end - inner.start == 500
            del b
        del a
        torch.empty(3, dtype=torch.uint8)
    assert (m.rise, m.alloc, m.freed, m.allocs, m.frees, m.end - m.start) == (
        1500,
        1503,
        1503,
        3,
        3,
        0,
    )
    assert (inner.rise, inner.alloc, inner.freed, inner.peak - inner.start) == (500, 500, 500, 500)
    with m:
        pass
    assert m.alloc == 0
    with pytest.raises(AttributeError):
        memlab.measure().peak
    with pytest.raises(RuntimeError, match="already open"), m, m:
        pass
    with pytest.raises((TypeError, ValueError)):
        memlab.measure(device=1.5)


def test_measure_sees_other_threads():
    import threading

    with memlab.measure("cpu") as m:
        t = threading.Thread(target=lambda: torch.empty(100, dtype=torch.uint8))
        t.start()
        t.join()
    assert m.alloc == 100


def test_truth_of_a_measure_is_the_sum_of_storages():
    with memlab.measure("cpu") as m:
        live = [torch.empty(n, dtype=torch.uint8) for n in range(1, 1000)]
    assert m.alloc == sum(t.untyped_storage().nbytes() for t in live) == 499500


# ---- on_oom


@pytest.fixture
def little_room():
    core.cpu_bytes_set_limit(core.cpu_bytes_current() + 50_000)
    yield
    core.cpu_bytes_set_limit(None)


def test_oom_says_what_where_and_who_and_the_same_error_goes_on(little_room):
    def train():
        activations = torch.zeros(10_000, dtype=torch.uint8)
        return activations, torch.zeros(10**6, dtype=torch.uint8)

    stream = io.StringIO()
    gc.collect()
    base = core.cpu_bytes_current()
    try:
        with memlab.on_oom(top=3, stream=stream):
            train()
    except RuntimeError as error:
        assert type(error) is RuntimeError and "can't allocate memory" in str(error)
    text = stream.getvalue()
    assert (
        "1000000 bytes" in text
        and "test_tensors.py" in text
        and "train: activations" in text
        and "unexplained 0.00B" in text
    )
    gc.collect()
    assert core.cpu_bytes_current() == base


def test_oom_as_decorator_nested_and_other_errors(little_room):
    stream = io.StringIO()

    @memlab.on_oom(stream=stream)
    def work(error):
        with memlab.on_oom(stream=stream):
            raise error

    with pytest.raises(torch.OutOfMemoryError):
        work(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert stream.getvalue().count("Out of memory: asked for 2.00 GiB") == 1
    with pytest.raises(OutOfMemory) as caught:
        work(OutOfMemory("one sample"))
    assert isinstance(caught.value, KoilaError) and isinstance(caught.value, torch.OutOfMemoryError)
    n = len(stream.getvalue())
    for other in (ValueError(), RuntimeError("shape"), KeyboardInterrupt()):
        with pytest.raises(type(other)):
            work(other)
    assert len(stream.getvalue()) == n


def test_oom_as_a_decorator_without_brackets(capsys):
    @memlab.on_oom
    def work(error=None):
        if error:
            raise error
        return 3

    assert work() == 3 and work.__name__ == "work"
    with pytest.raises(torch.OutOfMemoryError):
        work(torch.OutOfMemoryError("Tried to allocate 2.00 GiB."))
    assert "asked for 2.00 GiB" in capsys.readouterr().err


def test_a_broken_stream_never_hides_the_error(little_room):
    closed = io.StringIO()
    closed.close()
    with pytest.raises(RuntimeError, match="can't allocate memory"), memlab.on_oom(stream=closed):
        torch.zeros(10**6)


# ---- backend


def test_backend_and_unsupported():
    assert memlab.backend()["cpu"] == "hook"
    out = fresh("""
        memlab.stop()
        assert not core.cpu_bytes_ok()
        from koila.memlab.control import measure
        with measure("cpu") as m:       # first use installs again
            torch.empty(10)
        assert m.alloc == 40
    """)
    assert out == ""
    assert issubclass(UnsupportedError, KoilaError) and issubclass(UnsupportedError, RuntimeError)

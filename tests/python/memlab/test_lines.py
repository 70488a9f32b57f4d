"""The line profiler, whose every number is exact: expected tables are written by hand. They hold on
the CPU and, with KOILA_DEVICE=cuda, on a GPU."""

import asyncio
import gc
import json
import os
import subprocess
import sys
import textwrap
import threading
from fractions import Fraction
from functools import partial, wraps

import pytest
import torch
from memlab_helpers import HERE, block, bytes_now, python, rows

import koila._core as core
from koila import memlab
from koila.memlab import profile_every

# a GPU that is beside the tensors is not the target
LineProfiler = partial(memlab.LineProfiler, target_gpu=HERE)
KIB = 1024


@pytest.fixture(autouse=True)
def quiet():
    gc.collect()
    yield
    memlab.clear_global_line_profiler()
    assert core.lines_check()


def kib(n):
    return torch.empty(n * KIB, dtype=torch.uint8, device=HERE)


def peaks_above(p, func, base):
    return {k: (v[0] - base) / KIB for k, v in rows(p, func, "active_bytes.all.peak").items()}


def run_script(body, *args, env=None, code=0, flags=()):
    return python(*flags, "-c", textwrap.dedent(body), *args, code=code, **(env or {}))


# ---- the table


def test_sample_of_the_contract_prints_exactly():
    out = run_script("""
        import torch, linecache
        from koila.memlab import LineProfiler
        src = '''
        def inner():
            torch.nn.Linear(100, 100)

        def outer():
            a = torch.nn.Linear(100, 100)
            b = torch.nn.Linear(100, 100)
            inner()
        '''
        src = "\\n\\n" + src.replace("\\n        ", "\\n").lstrip("\\n")
        linecache.cache["sample.py"] = (len(src), None, src.splitlines(True), "sample.py")
        exec(compile(src, "sample.py", "exec"))
        with LineProfiler(outer, target_gpu="cpu") as p:
            outer()
        p.print_stats()
    """).stdout
    assert out == textwrap.dedent("""\
        ## outer

        active_bytes reserved_bytes line code
                 all            all
                peak           peak
               0.00B          0.00B    6 def outer():
              39.45K         39.45K    7     a = torch.nn.Linear(100, 100)
              78.91K         78.91K    8     b = torch.nn.Linear(100, 100)
             118.36K        118.36K    9     inner()
        """)


def test_every_column_of_a_line():
    big = 2 << 20

    def work():
        a = kib(1)
        b = torch.empty(big, dtype=torch.uint8)
        del a
        return b

    base = bytes_now()
    with LineProfiler(work) as p:
        work()
    r = {x["line"] - p.records()[0]["line"]: x for x in p.records()}
    assert (r[2]["alloc"], r[2]["freed"], r[2]["delta"], r[2]["rise"], r[2]["hits"]) == (
        big,
        0,
        big,
        big,
        1,
    )
    assert (r[3]["alloc"], r[3]["freed"], r[3]["delta"], r[3]["rise"]) == (0, KIB, -KIB, 0)
    assert (
        r[2]["active_bytes.large_pool.allocated"] == big
        and r[2]["active_bytes.small_pool.allocated"] == 0
    )
    assert r[1]["allocation.small_pool.allocated"] == 1
    assert r[2]["active_bytes.all.peak"] == base + KIB + big
    if HERE == "cpu":  # it has no cache and rounds nothing
        assert r[3]["segment.small_pool.freed"] == 1
        assert r[2]["requested_bytes.all.current"] == base + KIB + big
        assert r[2]["reserved_bytes.all.peak"] == base + KIB + big
        assert r[2]["inactive_split_bytes.all.peak"] == 0
    assert r[2]["rss"] > 0 and r[2]["time"] > 0
    assert r[2]["active.large_pool.peak"] >= 1


def test_recursion_sees_the_sum_and_counts_an_event_once():
    def rec(n):
        x = kib(1)
        if n:
            rec(n - 1)
        return x

    base = bytes_now()
    with LineProfiler(rec) as p:
        rec(2)
    assert peaks_above(p, rec, base) == {0: 2, 1: 3, 2: 3, 3: 3, 4: 3}
    assert rows(p, rec, "hits", "alloc", "freed") == {
        0: (3, 0, 0),
        1: (3, 3 * KIB, 0),
        2: (3, 0, 0),
        3: (2, 2 * KIB, 2 * KIB),
        4: (3, 0, 0),
    }


def test_a_caller_sees_the_peaks_of_every_line_it_calls():
    def inner():
        x = kib(9)
        del x
        return kib(1)

    def outer():
        y = inner()
        return y

    base = bytes_now()
    with LineProfiler(outer, inner) as p:
        outer()
    assert peaks_above(p, outer, base) == {0: 0, 1: 9, 2: 1}
    assert peaks_above(p, inner, base) == {0: 0, 1: 9, 2: 9, 3: 1}


def test_maximum_over_hits_and_hits_of_a_loop():
    def loop():
        for n in (1, 5, 2):
            x = kib(n)
            del x

    base = bytes_now()
    with LineProfiler(loop) as p:
        loop()
    assert peaks_above(p, loop, base) == {0: 0, 1: 0, 2: 5, 3: 5}
    assert rows(p, loop, "hits", "alloc", "rise") == {
        0: (1, 0, 0),
        1: (4, 0, 0),
        2: (3, 8 * KIB, 5 * KIB),
        3: (3, 0, 0),
    }


def test_first_row_is_what_was_live_on_entry():
    def work():
        return kib(1)

    held = kib(7)
    base = bytes_now()
    with LineProfiler(work) as p:
        work()
    assert rows(p, work, "active_bytes.all.peak")[0] == (base,)
    del held


def test_generator_closes_its_window_while_suspended():
    def gen():
        a = kib(1)
        yield a
        b = kib(3)
        yield b

    base = bytes_now()
    with LineProfiler(gen) as p:
        for _ in gen():
            big = kib(1000)
            del big
    assert peaks_above(p, gen, base) == {0: 0, 1: 1, 2: 1, 3: 4, 4: 4}
    assert rows(p, gen, "alloc")[2] == (0,)


def test_generators_closed_or_thrown_into_keep_their_rows():
    def gen():
        try:
            x = kib(2)
            yield x
        finally:
            y = kib(5)
            del y

    for end in (lambda g: g.close(), lambda g: pytest.raises(KeyError, g.throw, KeyError())):
        base = bytes_now()
        with LineProfiler(gen) as p:
            g = gen()
            next(g)
            end(g)
            del g
        assert peaks_above(p, gen, base)[5] == 7 and core.lines_check()


def test_coroutines_interleaved():
    async def work(n):
        a = kib(n)
        await asyncio.sleep(0)
        del a

    async def main():
        await asyncio.gather(work(1), work(2), work(4))

    with LineProfiler(work) as p:
        asyncio.run(main())
    assert rows(p, work, "alloc", "hits")[1] == (7 * KIB, 3)
    assert rows(p, work, "freed")[3] == (7 * KIB,)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_line_left_by_an_exception_keeps_its_record(error):
    def work():
        x = kib(1)
        x = [x, kib(2), fail()]

    def fail():
        raise error

    base = bytes_now()
    with LineProfiler(work) as p:
        with pytest.raises(error):
            work()
    assert peaks_above(p, work, base) == {0: 0, 1: 1, 2: 3}


def test_threads_started_before_and_after_are_seen_and_do_not_mix():
    go, out = threading.Event(), []

    def work(n):
        x = kib(n)
        del x
        return 1

    def before():
        go.wait()
        out.append(work(3))

    t = threading.Thread(target=before)
    t.start()
    with LineProfiler(work) as p:
        go.set()
        t.join()
        t2 = threading.Thread(target=work, args=(5,))
        t2.start()
        t2.join()
        work(1)
    assert rows(p, work, "hits", "alloc")[1] == (3, 9 * KIB)


def test_worker_events_with_two_profiled_threads_mark_the_row():
    def work(barrier, worker):
        barrier.wait()
        worker()
        barrier.wait()

    barrier = threading.Barrier(2)

    def worker():
        if threading.current_thread() is threading.main_thread():
            t = threading.Thread(target=lambda: kib(1))
            t.start()
            t.join()

    with LineProfiler(work) as p:
        t = threading.Thread(target=work, args=(barrier, worker))
        t.start()
        work(barrier, worker)
        t.join()
    assert "*" in str(p.display()) and "several threads" in str(p.display())


def test_backward_on_a_worker_thread_belongs_to_the_line():
    def work():
        t = threading.Thread(target=lambda: kib(4))
        t.start()
        t.join()

    with LineProfiler(work) as p:
        work()
    assert sum(v[0] for v in rows(p, work, "alloc").values()) == 4 * KIB


def test_several_profilers_record_the_same_function():
    def work():
        return kib(1)

    with LineProfiler(work) as p, LineProfiler(work) as q:
        work()
    work()
    assert (
        rows(p, work, "hits", "alloc") == rows(q, work, "hits", "alloc") == {0: (1, 0), 1: (1, KIB)}
    )


def test_enabled_inside_and_disabled_inside_leaves_a_clean_state():
    def work():
        p.disable()
        kib(1)

    p = LineProfiler(work)
    p.enable()
    work()
    assert not p.enabled and core.lines_check()
    p.enable()
    p.add_function(test_every_column_of_a_line)
    p.disable()


def test_functions_of_equal_name_are_told_apart():
    def make():
        def work():
            return kib(1)

        return work

    def other():
        def work():
            return kib(2)

        return work

    a, b = make(), other()
    b.__qualname__ = a.__qualname__ = "work"
    with LineProfiler(a, b) as p:
        a(), b()
    text = str(p.display())
    assert text.count("## work (") == 2 and f":{a.__code__.co_firstlineno})" in text


def test_profiling_changes_no_number():
    def step():
        torch.manual_seed(0)
        m = torch.nn.Linear(10, 10)
        y = m(torch.randn(3, 10)).sum()
        y.backward()
        return m.weight.grad.clone(), torch.rand(1)

    plain = step()
    core.cpu_bytes_reset_peak()
    with LineProfiler(step):
        seen = step()
    assert all(torch.equal(a, b) for a, b in zip(plain, seen))


def test_line_cost_and_memory_do_not_grow_with_hits():
    def loop(n):
        i = 0
        while i < n:
            i += 1

    with LineProfiler(loop) as p:
        loop(1000)
        import psutil

        rss = psutil.Process().memory_info().rss
        loop(300_000)
        assert psutil.Process().memory_info().rss - rss < 1 << 20
    assert rows(p, loop, "hits")[3] == (301_000,)


def test_cpu_truth_equals_storages_at_line_ends():
    def work():
        a = kib(3)
        b = a.view(-1)[5:]
        c = b.clone()
        return a, c

    base = bytes_now()
    with LineProfiler(work) as p:
        work()
    assert [v[0] - base for v in rows(p, work, "active_bytes.all.current").values()] == [
        0,
        3072,
        3072,
        3072 + block(3067),
        3072 + block(3067),
    ]


# ---- what may be given


class Things(torch.nn.Module):
    def forward(self):
        return kib(1)

    @staticmethod
    def static():
        return kib(2)

    @classmethod
    def klass(cls):
        return kib(3)

    @property
    def prop(self):
        return kib(4)


def test_everything_with_code_is_accepted():
    def plain():
        return kib(1)

    @wraps(plain)
    def wrapped():
        return plain()

    things = Things()
    p = LineProfiler(
        things,
        Things.static,
        Things.klass,
        vars(Things)["prop"],
        vars(Things)["static"],
        partial(plain),
        wrapped,
    )
    with p:
        things(), Things.static(), Things.klass(), things.prop, plain()
    assert p.names == [
        "Things.forward",
        "Things.static",
        "Things.klass",
        "Things.prop",
        plain.__qualname__,
    ]
    assert all(sum(r["hits"] or 0 for r in p.records(n)) >= 2 for n in p.names)


@pytest.mark.parametrize("thing", [3, "x", len, object()])
def test_object_without_code_is_a_warning_and_ignored(thing):
    p = LineProfiler()
    with pytest.warns(UserWarning, match="no code behind"):
        p.add_function(thing)
    with pytest.warns(UserWarning, match="no code behind"):
        assert LineProfiler(thing, kib).names == ["kib"]
    with pytest.warns(UserWarning, match="no code behind"):
        assert profile_every(2)(thing) is thing
    with pytest.warns(UserWarning, match="no code behind"):
        assert memlab.profile(thing) is thing
    assert p.names == []


@pytest.mark.parametrize("column", ["active", "a.b", "active_bytes.all.peak.x", "", ".."])
def test_column_that_is_no_column(column):
    with pytest.raises(ValueError, match="three dot-separated parts.*hits, time, rise"):
        memlab.profile(columns=(column,))
    with pytest.raises(ValueError, match="three dot-separated parts"):
        LineProfiler(kib).display(columns=[column])


@pytest.mark.parametrize(
    "column, lists",
    [
        ("nope.all.peak", "reserved_bytes"),
        ("active.nope.peak", "large_pool"),
        ("active.all.nope", "freed"),
    ],
)
def test_unknown_parts_list_what_exists(column, lists):
    with pytest.raises(ValueError, match=lists):
        profile_every(1, columns=(column,))


def test_one_string_is_one_column_and_no_column_is_line_and_code():
    def work():
        return kib(1)

    with LineProfiler(work) as p:
        work()
    assert str(p.display(columns="hits")).splitlines()[2] == "hits line code"
    assert str(p.display(columns=())).splitlines()[2] == "line code"


def test_func_of_display():
    def a():
        return kib(1)

    def b():
        return kib(1)

    with LineProfiler(a, b) as p:
        a()
    assert str(p.display(b)) == "No data collected\n" == str(p.display([b]))
    assert str(p.display(a)) == str(p.display(a.__qualname__)) == str(p.display([b, a]))
    with pytest.raises(KeyError, match="nope.*registered: .*a"):
        p.display("nope")
    with pytest.raises(KeyError, match="kib"):
        p.display(kib)
    p.clear()
    assert p.names == [] and str(p.display()) == "No data collected\n"


@pytest.mark.parametrize(
    "interval, error",
    [(0, ValueError), (-1, ValueError), (1.5, TypeError), ("1", TypeError), (True, TypeError)],
)
def test_output_interval(interval, error):
    with pytest.raises(error, match="profile_every"):
        profile_every(interval)


def test_targets_and_devices():
    p = LineProfiler(target_gpu="cpu")
    p.target_gpu = torch.device("cpu")
    p.target_gpu = 0
    for bad in (1.5, None, [], True):
        with pytest.raises(TypeError, match="an index, a torch.device"):
            p.target_gpu = bad
    for bad in ("gpu", "cuda:x", torch.device("meta")):
        with pytest.raises(ValueError, match="an index, a torch.device"):
            p.target_gpu = bad
    with pytest.raises(ValueError, match="hook, auto, full"):
        LineProfiler(stats="some")
    with pytest.raises(TypeError):
        p.display(device=1.5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="claims about machines without CUDA")
def test_index_without_cuda_is_the_cpu_with_one_warning():
    out = run_script("""
        import warnings, torch
        from koila.memlab import LineProfiler, set_target_gpu
        with warnings.catch_warnings(record=True) as w:
            warnings.simplefilter("always")
            LineProfiler(target_gpu=1); set_target_gpu(2); set_target_gpu(0)
        print([str(x.category.__name__) for x in w])
    """)
    assert out.stdout == "['UserWarning']\n" and out.stderr == ""


def test_source_unreadable_or_changed(tmp_path):
    space = {"kib": kib}
    exec(compile("def work():\n    return kib(1)\n", "<nowhere>", "exec"), space)
    with LineProfiler(space["work"]) as p:
        space["work"]()
    assert [len(line.split()) for line in str(p.display(columns=["hits"])).splitlines()[5:]] == [
        2,
        2,
    ]
    file = tmp_path / "mod.py"
    file.write_text("def work():\n    return 1\n")
    space = {}
    exec(compile(file.read_text(), str(file), "exec"), space)
    p = LineProfiler(space["work"])
    file.write_text("# other\n" * 50)
    with p:
        space["work"]()
    assert "return 1" in str(p.display())
    file.write_text("def work():\n    pass\n")  # shorter now: no row that ran is lost
    space = {}
    exec(compile("def work():\n    x = 1\n    return x\n", str(file), "exec"), space)
    with LineProfiler(space["work"]) as p:
        space["work"]()
    assert [r["hits"] for r in p.records()] == [1, 1, 1]


# ---- formats


def test_html_is_escaped_self_contained_and_has_bars():
    def work():
        x = kib(1) if 1 < 2 else "<script>&"
        return x

    with LineProfiler(work) as p:
        work()
    page = p.display()._repr_html_()
    assert (
        "&lt;script&gt;&amp;" in page
        and "<script" not in page
        and "src=" not in page
        and "http" not in page
    )
    assert page.startswith('<h3><span style="font-family: monospace">') and "&lt;locals&gt;" in page
    assert "linear-gradient" in page and "white-space: pre" in page
    from html.parser import HTMLParser

    class Balanced(HTMLParser):
        stack = []

        def handle_starttag(self, tag, attrs):
            self.stack.append(tag)

        def handle_endtag(self, tag):
            assert self.stack.pop() == tag

    parser = Balanced()
    parser.feed(page)
    assert not parser.stack
    p.clear()
    assert p.display()._repr_html_() == "<p>No data collected</p>"


def test_save_by_suffix(tmp_path):
    def work():
        return kib(1)

    with LineProfiler(work) as p:
        work()
    d = p.display(columns=["alloc", "active_bytes.all.peak"])
    for suffix in ("txt", "html", "json", "csv"):
        d.save(tmp_path / f"t.{suffix}")
    assert (tmp_path / "t.txt").read_text() == str(d)
    data = json.loads((tmp_path / "t.json").read_text())
    assert (
        data[0]["lines"][1]["alloc"] == KIB
        and data[0]["lines"][1]["code"].strip() == "return kib(1)"
    )
    import csv

    table = list(csv.reader(open(tmp_path / "t.csv")))
    assert (
        table[0] == ["function", "file", "line", "alloc", "active_bytes.all.peak", "code"]
        and table[2][3] == "1024"
    )
    with pytest.raises(ValueError, match=".txt, .html, .json, .csv"):
        d.save(tmp_path / "t.foo")


def test_display_stays_as_it_was():
    def work():
        return kib(1)

    with LineProfiler(work) as p:
        work()
        d = p.display(columns=["hits"])
        text = str(d)
        work()
        p.clear()
    assert str(d) == text and "1" in text


def test_readable_size():
    from koila.memlab.utils import readable_size

    small = {0: "0.00B", 1023: "1023.00B", 1024: "1.00K", 40400: "39.45K", -40400: "-39.45K"}
    large = {4 << 20: "4.00M", 3 << 30: "3.00G", 1 << 40: "1.00T", 5 << 50: "5.00P"}
    for size, text in {**small, **large, float("nan"): "", None: ""}.items():
        assert readable_size(size) == text
    assert [readable_size(s) for s in ("s0", "4M", "")] == ["s0", "4M", ""]
    for n in [
        *(3**k for k in range(40)),
        *(-(7**k) / 3 for k in range(20)),
        1023.995,
        1023.9949,
        (1 << 20) - 1,
        float("inf"),
        Fraction(10001, 2),
        True,
    ]:
        assert readable_size(n) == core.size_text(n), n


def test_readable_size_goes_through_calmsize_as_in_the_old_package(monkeypatch):
    from koila.memlab import utils

    size = utils.calmsize(40_400)
    assert (f"{size:.1f}", f"{size}", str(size), f"{size:>8.3f}") == (
        "39.5K",
        "39K",
        "39K",
        "  39.453K",
    )
    assert (
        str(utils.calmsize("s0")),
        str(utils.calmsize(float("nan"))),
        str(utils.calmsize(1 << 30)),
    ) == ("s0", "", "1G")

    class Symbolic:
        def __format__(self, spec):
            raise TypeError(spec)

        def __str__(self):
            return "s0 bytes"

    monkeypatch.setattr(utils, "calmsize", lambda n: Symbolic())
    assert utils.readable_size(object()) == "s0 bytes"
    monkeypatch.setattr(utils, "calmsize", lambda n: 1.23456)
    assert utils.readable_size(7) == "1.23"


# ---- decorators


def test_profile_returns_the_same_object_and_prints_once_at_exit():
    out = run_script(
        """
        import torch
        from koila.memlab import profile
        def f(): return torch.empty(100)
        assert profile(f) is f and profile(f) is f
        @profile(columns=["hits"])
        def g(): return f()
        @profile
        def never(): pass
        g(); f()
        raise SystemExit(3)
    """,
        code=3,
    ).stdout
    assert out.count("## f") == out.count("## g") == 1 and out.index("## f") < out.index("## g")
    assert out.endswith("## never\n\nNo data collected\n")


@pytest.mark.parametrize(
    "end",
    [
        "raise ValueError",
        "raise KeyboardInterrupt",
        "import sys; sys.stdout.close()",
        "import sys; sys.stdout = None",
        "clear_global_line_profiler()",
        "del sys.modules['torch']",
    ],
)
def test_exit_is_never_an_exception(end):
    p = subprocess.run([sys.executable, "-c", "import sys, torch\nfrom koila.memlab import "
                                              f"*\n@profile\ndef f(): torch.empty(9)\nf()\n{end}"],
                       capture_output=True, text=True, timeout=60)  # fmt: skip
    assert "Error" not in p.stderr.replace("ValueError\n", "") or "ValueError: I/O" not in p.stderr
    assert "Exception ignored" not in p.stderr and "atexit" not in p.stderr, p.stderr


def test_what_was_cleared_says_so_at_exit_once():
    out = run_script("""
        import torch
        from koila.memlab import clear_global_line_profiler, profile
        @profile
        def f(): return torch.empty(9)
        f()
        clear_global_line_profiler()
        @profile
        def g(): return torch.empty(9)
        g()
    """).stdout
    assert (
        out.startswith("## f\n\nNo data collected\n\n\n## g\n\nactive_bytes")
        and out.count("##") == 2
    )


def test_a_forked_child_prints_what_it_decorated_itself():
    out = run_script("""
        import os, torch
        from koila.memlab import profile
        @profile
        def f(): return torch.empty(100)
        f()
        if os.fork() == 0:
            @profile
            def child(): return torch.empty(100)
            child()
            raise SystemExit
        os.wait()
    """).stdout
    assert out.count("## f") == out.count("## child") == 1 and out.index("## child") < out.index(
        "## f"
    )


def test_warnings_name_the_line_of_the_user():
    with pytest.warns(UserWarning) as caught:
        LineProfiler(3)
        LineProfiler().add_function(3)
        memlab.profile(3)
        memlab.profile_every(2)(3)
    assert {w.filename for w in caught} == {__file__}


def test_only_the_process_that_decorated_prints():
    out = run_script("""
        import os, torch
        from koila.memlab import profile
        @profile
        def f(): return torch.empty(100)
        f()
        if os.fork() == 0:
            f()
            raise SystemExit
        os.wait()
    """).stdout
    assert out.count("## f") == 1


def test_forked_child_counts_for_itself():
    run_script("""
        import os, torch
        from koila import memlab
        def f():
            x = torch.empty(1000)
            return x
        keep = torch.empty(5000)
        with memlab.LineProfiler(f, target_gpu="cpu") as p:
            if os.fork() == 0:
                f()
                rows = p.records(f)
                ok = rows[1]["active_bytes.all.peak"] == 4000 and rows[1]["alloc"] == 4000
                os._exit(0 if ok else 1)
            assert os.wait()[1] == 0
    """)


def test_profile_every_prints_every_nth_and_keeps_the_kind(capsys):
    @profile_every(2, columns=["hits"])
    def plain():
        return kib(1)

    @profile_every(1)
    def gen():
        yield 1
        return 5

    @profile_every(1)
    async def coro():
        return 7

    @profile_every(1)
    async def agen():
        got = yield 1
        yield got

    plain()
    assert capsys.readouterr().out == ""
    plain()
    text = capsys.readouterr().out
    assert text.startswith("## ") and text.splitlines()[5].split()[0] == "2"

    def outer():
        return (yield from gen())

    g = outer()
    next(g)
    with pytest.raises(StopIteration) as stop:
        next(g)
    assert stop.value.value == 5 and "## " in capsys.readouterr().out
    assert asyncio.run(coro()) == 7 and "## " in capsys.readouterr().out

    async def use():
        a = agen()
        assert await a.asend(None) == 1 and await a.asend(9) == 9
        with pytest.raises(StopAsyncIteration):
            await a.asend(None)

    asyncio.run(use())
    assert "## " in capsys.readouterr().out
    assert plain.__name__ == "plain"

    def f():
        pass

    assert profile_every(1, enable=False)(f) is f


def test_profile_every_does_not_count_calls_that_raised(capsys):
    @profile_every(1)
    def boom():
        raise ValueError

    with pytest.raises(ValueError):
        boom()
    assert capsys.readouterr().out == ""
    memlab.clear_global_line_profiler()


def test_clear_in_between(capsys):
    @profile_every(1)
    def work():
        return kib(1)

    work()
    memlab.clear_global_line_profiler()
    work()
    assert capsys.readouterr().out.count("## ") == 1


def test_environment_switches():
    out = run_script(
        """
        import torch
        from koila.memlab import profile, profile_every
        def f(): return torch.empty(3)
        assert profile(f) is f and profile_every(1)(f) is f
        f()
    """,
        env={"KOILA_MEMLAB": "0"},
    )
    assert out.stdout == ""
    run_script(
        "import koila.memlab, koila._core as c; assert c.cpu_bytes_ok()", env={"KOILA_MEMLAB": "1"}
    )


def test_names_and_the_old_package_s_paths():
    from importlib import import_module

    old = (
        "LineProfiler profile profile_every set_target_gpu clear_global_line_profiler "
        "MemReporter Courtesy load_ipython_extension"
    )
    new = "DEFAULT_COLUMNS measure snapshot diff on_oom start stop backend unload_ipython_extension"
    assert {*old.split(), *new.split()} <= {*memlab.__all__} <= {*dir(memlab)} and all(
        getattr(memlab, name) is not None for name in memlab.__all__
    )
    assert memlab.DEFAULT_COLUMNS == ("active_bytes.all.peak", "reserved_bytes.all.peak")
    paths = {
        "line_profiler": "LineProfiler profile profile_every set_target_gpu "
        "clear_global_line_profiler",
        "line_profiler.line_profiler": "LineProfiler DEFAULT_COLUMNS",
        "line_profiler.extension": "load_ipython_extension",
        "mem_reporter": "MemReporter",
        "courtesy": "Courtesy",
        "utils": "readable_size calmsize",
    }
    for path, names in paths.items():
        module = import_module(f"koila.memlab.{path}")
        assert all(
            getattr(module, name) is getattr(memlab, name, getattr(module, name))
            for name in names.split()
        )
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        memlab.nothing_of_that_name
    from koila.memlab.utils import readable_size

    assert readable_size(40_400) == "39.45K"


def test_import_does_nothing_but_import():
    out = run_script("""
        import sys, torch, koila       # koila itself refuses a missing torch
        before = set(sys.modules)
        import koila.memlab as m
        import koila.memlab.line_profiler, koila.memlab.line_profiler.line_profiler
        import koila.memlab.line_profiler.extension
        import koila.memlab.mem_reporter, koila.memlab.courtesy, koila.memlab.utils
        assert not {"pandas", "IPython", "koila._engine"} & set(sys.modules) - before
        import atexit, threading
        assert sys.gettrace() is None and threading.active_count() == 1
        for name in m.__all__: getattr(m, name)
        import koila._core as c
        assert not c.cpu_bytes_ok() and not torch.cuda.is_initialized()
        assert "koila._engine" not in sys.modules
    """)
    assert out.stdout == out.stderr == ""


# ---- coexistence


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="settrace tracers and ours meet only below 3.12"
)
def test_a_debugger_keeps_its_tracer_and_sees_its_lines():
    seen = []

    def tracer(frame, event, arg):
        if frame.f_code is work.__code__:
            seen.append((event, frame.f_lineno))
        return tracer

    def work():
        x = kib(1)
        return x

    sys.settrace(tracer)
    try:
        work()
        alone, seen[:] = list(seen), []
        with LineProfiler(work) as p:
            work()
            assert sys.gettrace() is tracer
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(None)
    assert seen == alone and rows(p, work, "hits") == {0: (1,), 1: (1,), 2: (1,)}


def test_cprofile_is_undisturbed():
    import cProfile
    import pstats

    def inner():
        return kib(1)

    def work():
        for _ in range(3):
            inner()

    c = cProfile.Profile()
    with LineProfiler(work) as p:
        c.runcall(work)
    calls = {k[2]: v[0] for k, v in pstats.Stats(c).stats.items()}
    assert calls["inner"] == 3 and calls["work"] == 1
    assert rows(p, work, "hits")[2] == (3,)


def test_code_that_sets_a_tracer_inside_keeps_it():
    def work():
        sys.settrace(tracer)
        kib(1)

    def tracer(frame, event, arg):
        return None

    try:
        with LineProfiler(work):
            work()
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(None)


def test_target_switch_inside_and_display_of_a_device():
    def work():
        memlab.set_target_gpu("cpu")
        return kib(1)

    memlab.profile(work)
    work()
    from koila.memlab.line_profiler import profile as module  # noqa: F401

    text = str(sys.modules["koila.memlab.line_profiler.profile"]._profiler.display(device="cpu"))
    assert "return kib(1)" in text


def test_lost_hook_is_said():
    out = run_script("""
        import warnings, torch, koila._core as c
        from koila import memlab
        def f(): return torch.empty(10)
        with memlab.LineProfiler(f, target_gpu="cpu") as p:
            f()
            c.cpu_bytes_uninstall()
        assert memlab.LineProfiler is not None
        try:
            str(p.display())
        except memlab.LineProfiler and RuntimeError as e:
            print(type(e).__name__)
        print(p.display(columns=["hits"]))
        print(memlab.backend())
    """)
    assert out.stdout.startswith("UnsupportedError\n## f")
    assert "'cpu': 'hook'" in out.stdout  # backend() installs again


def test_memray_is_noticed_and_the_numbers_are_void():
    pytest.importorskip("memray")
    out = run_script("""
        import tempfile, warnings, torch, memray
        from koila import memlab
        def f(): return torch.empty(10)
        caught = warnings.catch_warnings(record=True)
        with tempfile.TemporaryDirectory() as d, memlab.LineProfiler(f) as p, caught as w:
            warnings.simplefilter("always")
            with memlab.measure() as m, memray.Tracker(d + "/x.bin"): f()
            for _ in range(2):
                try: p.display()
                except RuntimeError as e: print(type(e).__name__)
        print(len(w), p.records(f)[0]["hits"])
        print(memlab.backend()["cpu"])
    """).stdout
    assert out.splitlines() == [
        "UnsupportedError",
        "UnsupportedError",
        "2",
        "1",
        "hook",
    ] or out.splitlines() == ["UnsupportedError"] * 2 + ["2 1", "hook"]


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="the frame-evaluation hook is for 3.10 and 3.11"
)
def test_torch_compile_and_the_profiler_work_together():
    out = run_script("""
        import torch
        from koila.memlab import LineProfiler
        def inner(x): return x * 2 + 1
        compiled = torch.compile(inner, backend="eager")
        def work(x):
            y = compiled(x)
            return y
        x = torch.ones(100)
        with LineProfiler(work, target_gpu="cpu") as p:
            a = work(x)
            b = work(x)
        assert torch.equal(a, x * 2 + 1) and torch.equal(a, b)
        print([r["hits"] for r in p.records(work)], p.records(work)[1]["delta"])
    """).stdout
    assert out == "[2, 2, 2] 800\n"


def test_coverage_is_undisturbed(tmp_path):
    pytest.importorskip("coverage")
    (tmp_path / "s.py").write_text(
        textwrap.dedent("""
        import coverage, sys, torch
        c = coverage.Coverage(data_file=None); c.start()
        from koila.memlab import LineProfiler
        def work(n):
            x = torch.empty(n)
            if n > 5:
                return 1
            return x
        with LineProfiler(work) as p: work(10)
        c.stop()
        _, lines, missing, _ = c.analysis(__file__)
        print({6, 7, 8} & set(missing), 9 in missing, [r["hits"] for r in p.records(work)])
    """)
    )
    p = subprocess.run(
        [sys.executable, "s.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert p.stdout == "set() True [1, 1, 1, 1, None]\n", p.stdout + p.stderr


@pytest.mark.parametrize("how", ["", "all-taken"])
def test_oracle_without_torch_prints_the_table_written_by_hand(how):
    here = os.path.dirname(__file__)
    p = subprocess.run(
        [sys.executable, os.path.join(here, "lines_oracle.py"), how],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert p.returncode == 0 and "1 passed, 0 failed" in p.stdout, p.stdout + p.stderr


# ---- work done for other lines


def test_backward_s_memory_is_credited_to_the_forward_line_that_made_the_node():
    x = torch.ones(1000, dtype=torch.float32, requires_grad=True)

    def inner(v):
        return v.exp()  # ExpBackward allocates one gradient

    def work():
        y = x.neg()  # NegBackward: one
        z = inner(y)
        w = z.view(10, 100)  # a view: nothing
        s = w.sum()  # an expanded scalar: nothing
        s.backward()

    with LineProfiler(work, inner) as p:
        work()
    with LineProfiler(work) as q:
        work()
    column = rows(p, work, "backward", "alloc")
    one = block(4000)
    assert [column[i][0] for i in range(1, 6)] == [one, one, 0, 0, 0]
    assert rows(p, inner, "backward")[1] == (one,)
    assert column[5][1] >= sum(column[i][0] for i in range(1, 5)) and rows(q, work, "backward")[
        2
    ] == (one,)
    assert "backward" in str(p.display(columns="backward"))


def test_backward_of_leaves_made_outside_profiled_code_is_nobody_s():
    x = torch.ones(1000, requires_grad=True)
    before = x.exp()

    def work():
        y = before.neg()
        y.sum().backward()

    with LineProfiler(work) as p:
        work()
    # ExpBackward's 4000 are nobody's
    assert rows(p, work, "backward") == {
        0: (0,),
        1: (block(4000),),
        2: (0,),
    }


def test_node_numbers_of_threads_do_not_mix():
    def work(n):
        x = torch.ones(n, requires_grad=True, device=HERE)
        y = x.exp()
        y.sum().backward()
        return x

    done = []
    with LineProfiler(work) as p:
        for n in (100, 300):
            t = threading.Thread(target=lambda n=n: done.append(work(n)))
            t.start()
            t.join()
    assert len(done) == 2 and rows(p, work, "backward")[2] == (block(400) + block(1200),)


def test_a_lazy_step_s_memory_is_credited_to_the_lines_that_were_captured():
    from koila import last_plan, lazy, micro_batch

    net = torch.nn.Sequential(
        torch.nn.Linear(100, 1000), torch.nn.ReLU(), torch.nn.Linear(1000, 10)
    )
    data, labels = torch.randn(64, 100), torch.randint(0, 10, (64,))

    def step(x, y):
        hidden = net[1](net[0](x))
        out = net[2](hidden)
        loss = torch.nn.functional.cross_entropy(out, y)
        loss.backward()
        return hidden

    with micro_batch(16), LineProfiler(step) as p:
        hidden = step(*lazy(data, labels))
    assert last_plan().n_micro_batches == 4
    del hidden
    alloc, peak = rows(p, step, "alloc"), rows(p, step, "active_bytes.all.peak")
    # all slices of hidden, though no line of the forward ran an operator
    assert alloc[1][0] >= 64 * 1000 * 4
    assert 0 < alloc[2][0] < alloc[1][0] and alloc[4][0] >= alloc[1][0] + alloc[2][0]
    assert peak[4][0] == max(v for (v,) in peak.values()) and peak[1][0] > peak[0][0]
    measured = last_plan().measured_peak_bytes
    assert measured == peak[4][0] or (HERE != "cpu" and measured is None)
    # Operators captured by the nodes of a line count for that line, although all ran at the end.
    backward = rows(p, step, "backward")
    assert (
        backward[1][0] >= 1000 * 100 * 4 + 1000 * 4
        and backward[2][0] >= 1000 * 10 * 4
        and backward[3][0] > 0
    )
    assert backward[4][0] == 0 and sum(v for (v,) in backward.values()) <= alloc[4][0]

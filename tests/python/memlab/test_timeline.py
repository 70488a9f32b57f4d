"""The timeline: every event of a block, by line; its numbers against measure(), snapshots and the
allocations written down here."""

import json
import os
import pickle
import re
import subprocess
import sys
import threading
from functools import partial
from html.parser import HTMLParser

import pytest
import torch
from memlab_helpers import HERE as DEVICE
from memlab_helpers import block, cli

from koila import memlab
from koila.memlab import timeline as timeline_of

measure = partial(memlab.measure, DEVICE)
timeline = partial(timeline_of, device=DEVICE)  # not a GPU that is beside the tensors
HERE = os.path.abspath(__file__)


def line_of(text):
    """'file:line' of the line of this file that contains `text`"""
    with open(HERE, encoding="utf-8") as f:
        found = (n for n, line in enumerate(f, 1) if text in line and "line_of" not in line)
        return f"{HERE}:{next(found)}"


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(100, 1000)

    def forward(self, x):
        h = self.a(x)
        return torch.relu(h)  # the block's own


needs_lines = pytest.mark.skipif(
    sys.version_info >= (3, 15), reason="lines of allocations cannot be known on this version"
)


@needs_lines
@pytest.mark.about_the_cpu("lines of its allocations")
@pytest.mark.parametrize("folder", ["koila", "torch"])
def test_a_program_in_a_folder_that_is_called_as_a_library_is_a_program(folder, tmp_path):
    (tmp_path / folder).mkdir()
    program = tmp_path / folder / "train.py"
    program.write_text(
        """
import io
import torch
from koila.memlab import on_oom, timeline

with timeline() as t:
    kept = torch.empty(1_000_000)
    del kept
print(list(t.by_line())[0].rpartition("/")[2])
text = io.StringIO()
try:
    with on_oom(stream=text):
        raise RuntimeError("can't allocate memory: you tried to allocate 8 bytes.")
except RuntimeError:
    print("train.py:13" in text.getvalue())
"""
    )
    ran = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["train.py:7", "True"]


@needs_lines
def test_who_held_what_at_the_peak_by_line_kind_and_module():
    memlab.start()
    net = torch.nn.Sequential(Block(), torch.nn.Linear(1000, 10))
    x = torch.empty(50, 100)
    kept = []
    with timeline(net) as t, measure() as m:
        y = net(x)  # everything
        kept.append(torch.empty(5_000_000, dtype=torch.uint8))  # the large one
        del y
        kept.append(torch.empty(1000, dtype=torch.uint8))  # after the peak
    large, own = line_of("# the large one"), line_of("# the block's own")
    assert (
        (t.start, t.peak, t.end) == (m.start, m.peak, m.end)
        and t.n_lost == 0
        and t.n_events == m.allocs + m.frees
    )
    assert (
        sum(r["bytes"] for r in t.at_peak)
        == sum(t.by_kind().values())
        == sum(t.by_module().values())
        == sum(t.by_line().values())
        == t.peak
    )
    assert t.by_line()[large] == block(5_000_000) and line_of("# after the peak") not in t.by_line()
    assert t.by_line()[own] == block(
        50 * 1000 * 4
    )  # relu's result; the linear's own is the line before
    assert (
        t.by_kind()["parameter"] == sum(block(p.nbytes) for p in net.parameters())
        and t.by_kind()["gone"] >= 50 * 1000 * 4
    )
    modules = t.by_module()
    assert (
        modules["0"] == block(200_000)
        and modules["0.a"] == block(100 * 1000 * 4) + block(4000)
        and modules["1"] == block(1000 * 40) + block(40) + block(2000)
    )
    assert modules[None] >= 5_000_000
    assert [r["kind"] for r in t.at_peak if r["line"] == large] == ["tensor"]


def test_a_million_events_are_one_small_page(tmp_path):
    import koila._core as core

    with timeline(limit=10**6) as t:
        for _ in range(60_000):
            torch.empty(10)
    assert t.n_events == 120_000
    t.save(tmp_path / "a.html")
    few = len((tmp_path / "a.html").read_text())
    assert few < 300_000  # the picture's size is that of the picture
    with timeline(limit=100) as t:
        for _ in range(200):
            torch.empty(10)
    assert (t.n_events, t.n_lost) == (100, 300) and "300 later ones not recorded" in str(t)
    t.save(tmp_path / "b.html")
    assert "300 later events are not in it" in (tmp_path / "b.html").read_text()
    assert not core.memlab_tracing()  # as it was before


def test_the_curve_begins_with_what_was_held_and_counts_each_event_once():
    """PyTorch's viewer is given what was held before as events: the curve's beginning has that."""
    memlab.start()
    before = torch.empty(4_000_000, dtype=torch.uint8)
    with timeline() as t:
        torch.empty(3_000_000, dtype=torch.uint8)
        del before
    seconds, held = zip(*t.curve(), strict=True)
    assert (held[0], max(held), held[-1]) == (t.start, t.peak, t.end)
    assert t.start >= 4_000_000 and t.end < t.start < t.peak and len(held) == 1 + t.n_events
    assert list(seconds) == sorted(seconds) and seconds[0] == 0


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.paths = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            assert name not in {"src", "href", "onload", "onclick"}, (tag, name)
        if tag == "path":
            self.paths.append(dict(attrs)["d"])


def test_files(tmp_path):
    with timeline() as t:
        a = torch.empty(3_000_000, dtype=torch.uint8)
        b = torch.empty(1_000_000, dtype=torch.uint8)
        del a
        torch.empty(500_000, dtype=torch.uint8)
    for suffix in ("html", "txt", "json", "csv", "pickle"):
        t.save(tmp_path / f"t.{suffix}")
    page = Page()
    page.feed((tmp_path / "t.html").read_text())
    assert "script" not in page.tags and "link" not in page.tags and page.tags.count("svg") == 1
    highest = min(float(y) for d in page.paths for y in re.findall(r"\d+ (-?[\d.]+) ", d))
    assert abs(highest) <= 0.1  # the curve touches the top of the picture: the peak
    data = json.loads((tmp_path / "t.json").read_text())
    assert (
        data["peak"] == t.peak
        and sum(data["by_line"].values()) == t.peak
        and (tmp_path / "t.txt").read_text() == str(t)
    )
    assert (tmp_path / "t.csv").read_text().count("\n") == 1 + len(t.at_peak)
    trace = pickle.loads((tmp_path / "t.pickle").read_bytes())["device_traces"][0]
    now = peak = 0
    for e in trace:
        now += {"alloc": e["size"], "free_completed": -e["size"]}.get(e["action"], 0)
        peak = max(peak, now)
    assert (peak, now) == (t.peak, t.end)
    with pytest.raises(ValueError, match="pickle"):
        t.save(tmp_path / "t.foo")
    assert b.numel() == 1_000_000


def test_pytorch_s_own_viewer_opens_the_pickle(tmp_path):
    from torch.cuda import _memory_viz as viewer

    with timeline() as t:
        x = torch.empty(1_000_000)
    t.save(tmp_path / "t.pickle")
    data = pickle.loads((tmp_path / "t.pickle").read_bytes())
    assert "3.8MiB" in viewer.trace(data) and "add_local_files" in viewer.trace_plot(data)
    del x


def test_threads_are_all_in_it():
    def work():
        for _ in range(300):
            torch.empty(100, device=DEVICE)

    with timeline() as t, measure() as m:
        threads = [threading.Thread(target=work) for _ in range(4)]
        [one.start() for one in threads]
        [one.join() for one in threads]
    assert t.n_events == m.allocs + m.frees == 2400 and t.end == t.start


def test_one_at_a_time_and_only_when_it_is_over():
    t = timeline()
    with pytest.raises(RuntimeError, match="nothing was recorded"):
        t.peak
    with t:
        with pytest.raises(RuntimeError, match="another one"), timeline():
            pass
        with pytest.raises(RuntimeError, match="not over"):
            t.peak
    assert t.peak >= 0
    with pytest.raises(ValueError, match="1 or more"), timeline(limit=0):
        pass
    with pytest.raises(TypeError, match="Module"):
        timeline(3)
    with pytest.raises(TypeError, match="param_groups"):
        timeline(None, 3)


def test_trace_stays_on_when_it_was_on():
    import koila._core as core

    memlab.start(trace=True)
    with timeline():
        pass
    assert core.memlab_tracing() or sys.version_info >= (3, 15)
    memlab.stop()
    memlab.start()


def test_command_writes_a_timeline(tmp_path):
    (tmp_path / "s.py").write_text(
        "import torch\ndef f():\n    x = torch.empty(1_000_000)\n    return x\nf()\n"
    )
    cli("run", "-g", "cpu", "-t", "t.json", "s.py", cwd=tmp_path)
    assert json.loads((tmp_path / "t.json").read_text())["peak"] == 4_000_000


def allocate(keep, n):  # bytes, whole blocks of a GPU too
    keep.append(torch.empty(n, dtype=torch.uint8))


def allocate_by(keep):
    allocate(keep, 3_072_000)
    allocate(keep, 1_024_000)


def test_what_is_held_at_the_peak_is_told_with_the_lines_that_called(tmp_path):
    keep = []
    with timeline() as t:
        allocate_by(keep)
        allocate(keep, 512_000)
    found = {r["bytes"]: r["stack"] for r in t.at_peak if r["bytes"] >= 512_000}
    first = allocate.__code__.co_firstlineno + 1
    outer = allocate_by.__code__.co_firstlineno + 1
    here = test_what_is_held_at_the_peak_is_told_with_the_lines_that_called.__code__
    for n, called in ((3_072_000, [outer, first]), (1_024_000, [outer + 1, first])):
        lines = [int(line.rpartition(":")[2]) for line in found[n]]
        assert lines[-3:] == [here.co_firstlineno + 3, *called], found[n]
    assert [int(line.rpartition(":")[2]) for line in found[512_000]][-2:] == [
        here.co_firstlineno + 4,
        first,
    ]
    # one line is one group for all who call it
    assert t.by_line()[found[512_000][-1]] == 4_608_000
    t.save(tmp_path / "t.html")
    page = (tmp_path / "t.html").read_text()
    box = r'width:([\d.]+)%;top:\d+px;background:hsl[^>]*title="[^"]*:(\d+): '
    shares = {int(line): float(width) for width, line in re.findall(box, page)}
    assert shares[outer] == pytest.approx(100 * 3_072_000 / t.peak, abs=0.01)

"""Plans, lists of plans and predictions as people, notebooks and programs read them."""

import html.parser
import importlib.util
import json
import math
import re

import pytest
import torch
from conftest import DEVICE
from torch import nn
from torch.nn import functional as F

import koila
from koila import _cells, _core, _pages, lazy

ITEMSIZE = {"f32": 4, "f64": 8, "i64": 8, "bool": 1}


def model_with_norms():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 16, 10))


def model_without():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.Tanh(), nn.Linear(64, 10))


def batch():
    torch.manual_seed(1)
    return torch.randn(60, 3, 8, 8), torch.randint(0, 10, (60,))


def run(model, rows=16, given=None):
    x, y = lazy(*(given or batch()))
    with koila.micro_batch(rows):
        F.cross_entropy(model(x), y).backward()
    return koila.last_plan()


@pytest.mark.about_the_cpu("torch's own bytes are counted exactly there")
@pytest.mark.parametrize("make", [model_with_norms, model_without])
def test_plain_needs_what_plain_pytorch_takes(make):
    model = make()
    x, y = batch()
    for _ in range(2):  # the first time loads what stays
        model.zero_grad()
        _core.cpu_bytes_reset_peak()
        before = _core.cpu_bytes_current()
        F.cross_entropy(model(x), y).backward()
        plain = _core.cpu_bytes_peak()
    model.zero_grad()
    run(model, given=(x, y))  # what operators use inside is known from here on
    model.zero_grad()
    told = run(model, given=(x, y))
    model.zero_grad()
    whole = run(model, rows=60, given=(x, y))
    assert told.n_micro_batches == 4 and whole.n_micro_batches == 1
    assert told.plain_peak_bytes - told.base_bytes == pytest.approx(plain - before, rel=0.01)
    assert whole.plain_peak_bytes - whole.base_bytes == pytest.approx(plain - before, rel=0.01)


@pytest.mark.parametrize("make", [model_with_norms, model_without])
def test_bytes_and_shape_of_a_tensor_are_of_the_same_thing(make):
    told = run(make())
    assert {t.held for t in told.largest} >= {"slice", "whole"}
    for t in told.largest:
        size = ITEMSIZE[t.dtype]
        assert t.whole_bytes == math.prod(t.shape) * size, t
        if t.held in ("slice", "whole"):
            assert t.n_bytes == math.prod(t.held_shape) * size, t
        if t.held == "slice":
            assert (t.shape[0] // 60, t.held_shape[0] // 16) in ((1, 1), (8, 8)), t
    text = str(told)
    assert "f32[16, " in text and "f32[60, " in text and "held" in text


def test_a_loop_names_the_operator_and_the_line_that_end_it():
    told = run(model_with_norms())
    assert "batch_norm" in told.loops[0].ends_for
    assert re.search(r"test_readable_plans\.py:\d+$", told.loops[0].ends_at)
    assert f"+{round(100 * (told.replay_ratio - 1))} % work" in str(told)
    assert "computed again    nothing" in str(run(model_without()))


def test_a_run_takes_the_seconds_that_it_tells():
    told = run(model_without())
    assert 0 < told.seconds < 5 and " ms" in str(told)
    x, y = lazy(*batch())
    planned = koila.explain(F.cross_entropy(model_without()(x), y))
    assert planned.seconds is None and planned.plain_peak_bytes > 0


def test_data_is_what_the_attributes_say_and_goes_through_json(tmp_path):
    for told in (
        run(model_with_norms()),
        koila.plan(lambda x: model_without()(x).sum(), batch()[0]),
        koila.plan(lambda x: model_without()(x).sum(), batch()[0], device="a100-40gb"),
    ):
        told.save(tmp_path / "plan.json")
        data = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
        assert data == json.loads(json.dumps(told.to_dict()))
        for name in koila.Plan.__annotations__:
            assert name == "axis" or data[name] == getattr(told, name), name
        assert [loop["n_slices"] for loop in data["loops"]] == [p.n_slices for p in told.loops]
        assert [t["whole_bytes"] for t in data["largest"]] == [t.whole_bytes for t in told.largest]
        assert [tuple(p) for p in data["curve"]] == told.curve
    assert data["prediction"]["device"] == told.prediction["device"] and data["fits"] is told.fits


def test_a_list_of_plans_is_a_table():
    run(model_without())
    listed = koila.plans()
    assert isinstance(listed, list) and isinstance(listed[-1], koila.Plan)
    assert repr(listed).splitlines()[0].split() == "asked by at batch peak measured time".split()
    assert "4 × 16 rows of 60, the last 12" in repr(listed).splitlines()[-1]
    assert repr(type(listed)()) == "no plans"


def test_a_prediction_says_one_number_first_and_what_the_others_are():
    model = model_without()
    for budget, answer in (("1GiB", "fits"), ("430MiB", "does not fit")):
        ahead = koila.plan(lambda x: model(x).sum(), batch()[0], device="a100-40gb", budget=budget)
        p = ahead.prediction
        most = max(p["first"]["device"][2], p["steady"]["device"][2])
        first = str(ahead).splitlines()[0]
        assert first.startswith(f"needs at most {koila._budget.readable(most)} of ")
        assert answer in first and first in repr(ahead)
        assert (most <= p["memory_bytes"]) == ahead.fits
        assert "what tensors hold" in str(ahead) and "plain PyTorch" in str(ahead)


# ---- module names


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 64)
        self.layers = nn.ModuleList([nn.Sequential(nn.Tanh(), nn.Linear(64, 64))])
        self.sorts = False

    def forward(self, x):
        x = self.layers[0](self.stem(x))
        return x.sort(0).values if self.sorts else x * 2


def run_net(net):
    with koila.micro_batch(4):
        net(lazy(torch.randn(12, 8))).square().sum().backward()
    return koila.last_plan()


def test_modules_are_named_beside_lines_only_where_that_is_wanted(tmp_path):
    net = Net()
    assert {t.module for t in run_net(net).largest} == {""}
    with koila.module_names():
        told = run_net(net)
    told.save(tmp_path / "step.kgraph")
    recorded = set(
        re.findall(r"readable_plans\.py \(([^)]*)\)", (tmp_path / "step.kgraph").read_text())
    )
    assert {"stem", "layers.0.0", "layers.0.1", "Net"} == recorded
    assert {t.module for t in told.largest} & recorded
    assert all(re.search(r"readable_plans\.py:\d+$", t.line) for t in told.largest if t.line)
    assert re.search(r"readable_plans\.py:\d+ \(layers\.0\.0\)", str(told))
    assert told.to_dict()["largest"][0]["module"] == told.largest[0].module
    koila._core.forget()
    assert {t.module for t in run_net(net).largest} == {""}
    assert koila._core.module_is(None) is None


def test_a_gather_names_its_module_and_a_module_that_raises_leaves_nothing():
    net = Net()
    net.sorts = True
    with koila.module_names():
        [gather] = [g for g in run_net(net).gathers if g.operator.startswith("aten::sort")]
        assert gather.module == "Net" and gather.line.endswith(f"py:{gather.line.split(':')[-1]}")
        with koila.strict(), pytest.raises(koila.GatherError, match=r"\(Net\):\d+"):
            run_net(net)
        with pytest.raises(RuntimeError):
            net(torch.randn(12, 9))
        assert koila._core.module_is(None) is None


@pytest.mark.parametrize("line", ["train.py:12", "In [3]:5", "", "a (b).py:3"])
def test_a_line_without_a_module_stays_as_it_is(line):
    assert koila._plan.line_and_module(line) == (line, "")


# ---- pages


class Checker(html.parser.HTMLParser):
    """Every tag is closed, and nothing is loaded."""

    VOID = {"meta", "line", "polyline", "polygon", "rect", "circle"}

    def __init__(self, text):
        super().__init__()
        self.open, self.texts = [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert not {"src", "href"} & {k for k, _ in attrs} and tag != "script"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.mark.parametrize("bad", ["<p>open", "<script></script>", '<p><a href="x"></a></p>'])
def test_a_planted_fault_of_a_page_is_found(bad):
    with pytest.raises((AssertionError, IndexError)):
        Checker(bad)


def shown():
    """Whatever a notebook may show."""
    plan = run(model_with_norms())
    ahead = koila.plan(lambda x: model_without()(x).sum(), batch()[0], device="a100-40gb")
    return [plan, koila.plans(), ahead]


def test_a_cell_shows_what_the_page_shows(tmp_path):
    for result in shown():
        cell = result._repr_html_()
        texts = Checker(cell).texts
        assert cell.startswith('<div class="koila"><style>')
        if isinstance(result, koila.Plan):
            result.save(tmp_path / "page.html")
            page = Checker((tmp_path / "page.html").read_text(encoding="utf-8")).texts
            assert [t for t in texts if t.strip() and "{" not in t] == [
                t for t in page if t.strip() and "{" not in t and "step's memory" not in t
            ]


def test_every_rule_of_the_style_stays_within_koilas_own_elements():
    """A cell must not change the notebook around it."""
    rules = re.sub(r"@media[^{]*\{(.*?\}) \}", r"\1", _pages.STYLE)
    selectors = [s.strip() for head in re.findall(r"([^{}]+)\{", rules) for s in head.split(",")]
    assert len(selectors) > 20
    assert [s for s in selectors if not re.match(r"(body\S* ?)?\.?koila|body\.koila", s)] == [
        s for s in selectors if s == ""
    ]


def test_the_axis_has_few_round_steps():
    for most in (1, 5, 700, 1 << 20, 3_000_000, 18_000_000_000):
        step = _pages.round_step(most)
        assert most / step <= 6 and (step == 1 or most / step > 2.9)
        power = step
        while power % 1024 == 0:
            power //= 1024
        assert power & (power - 1) == 0
    svg = _pages.curve([("a", 0), ("<b>", 3 << 20)], koila._budget.readable, "along", 4 << 20)
    assert "2.0 MiB" in svg and "budget 4.0 MiB" in svg and "&lt;b&gt;: 3.0 MiB" in svg


# ---- notebooks


def test_a_cell_goes_by_its_number(monkeypatch):
    class Compiler:
        def format_code_name(self, name):
            return ("Cell", "In[3]") if name == "/tmp/ipykernel_1/2.py" else None

    class Shell:
        compile = Compiler()

    class IPython:
        get_ipython = staticmethod(lambda: Shell())

    monkeypatch.setitem(_cells.sys.modules, "IPython", IPython)
    assert _cells.file_shown("/tmp/ipykernel_1/2.py") == "In [3]"
    assert _cells.file_shown("train.py") == "train.py" and _cells.cell_of("train.py") is None
    assert koila._capture.user_file("/tmp/ipykernel_1/2.py") == "In [3]"
    Shell.compile = None
    assert _cells.cell_of("/tmp/ipykernel_1/2.py") is None


def addresses(text):
    return re.findall(r"\b0x[0-9a-f]{6,}|ipykernel_\d+", text)


def test_a_planted_address_is_found():
    assert addresses(repr(object())) and addresses("/tmp/ipykernel_12/345.py:1")


CELLS = (
    "import torch, koila\nfrom koila import lazy, memlab\nm = torch.nn.Linear(50, 40)",
    "x = lazy(torch.randn(64, 50))\nloss = m(x).square().mean()",
    "koila.explain(loss)",
    "seen = []\nlistener = koila.on_step(seen.append)\nlistener",
    "with koila.micro_batch(16):\n    loss.backward()\nseen[0]",
    "koila.last_plan()",
    "koila.plans()",
    "koila.plans()[-1].largest",
    "koila.last_plan().loops, koila.last_plan().gathers",
    "koila.plan(lambda x: m(x).sum(), torch.randn(64, 50), device='h100-80gb')",
    "koila.budget('1GiB'), koila.micro_batch(4), koila.axes('batch'), koila.strict()",
    "koila.host_memory('off'), koila.opaque(m)",
    "with memlab.timeline(m) as t:\n    m(torch.randn(64, 50)).sum().backward()\nt",
    "with memlab.measure('cpu') as counted:\n    y = torch.ones(1000) + 1\ncounted",
    "before = memlab.snapshot(m)\nbefore",
    "z = torch.ones(1000)\nmemlab.diff(before, memlab.snapshot(m))",
    "reporter = memlab.MemReporter(m)\nreporter",
    "reporter.report()",
    "memlab.on_oom(), memlab.Courtesy(), memlab.LineProfiler()",
    "memlab.backend()",
    "loader = torch.utils.data.DataLoader(torch.randn(8, 50))\nkoila.lazy(loader)",
    "koila.step_aside(False), koila.OutOfMemory('too much'), memlab.LineProfiler(m).display()",
    "koila.plans()[-1].largest[0], koila.module_names()",
    *(
        f"from koila.integrations.{library} import KoilaCallback\nKoilaCallback(batch=1)"
        for library in ("transformers", "lightning")
        if importlib.util.find_spec(library)
    ),
)


@pytest.mark.skipif(DEVICE != "cpu", reason="a kernel of its own: once is enough")
def test_a_notebook_shows_every_result_without_an_address(tmp_path):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    nbclient.NotebookClient(
        book, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    texts = []
    for cell in book.cells:
        for o in cell.outputs:
            data = o.get("data", {"text/plain": o.get("text", "")})
            texts.append("\n".join(data.values()))
            assert addresses(texts[-1]) == [], cell.source
            if "text/html" in data:
                Checker(data["text/html"])
    for i in (6, 7, 10, 13, 15):
        assert "text/html" in book.cells[i - 1].outputs[0].data, book.cells[i - 1].source
    assert "In [5]:2" in texts[3] + texts[4] + texts[5] and "In [2]:2" in "".join(texts)

"""What people see: the table, explain() before running, the page, the graph file."""

import html.parser
import re

import pytest
import torch
from conftest import DEVICE
from helpers import written_buffers
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import koila
from koila import lazy


def step(m=4, n=10):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 3))
    x, y = lazy(torch.randn(n, 5), torch.randint(0, 3, (n,)))
    with koila.micro_batch(m):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
    return model


def test_the_numbers_of_a_step():
    step()
    p = koila.last_plan()
    assert (p.batch, p.micro_batch, p.n_micro_batches, p.retries) == (10, 4, 3, 0)
    assert (
        p.predicted_peak_bytes > 0
        and (p.budget_bytes is None or p.budget_bytes > p.predicted_peak_bytes)
        and p.n_recorded > 5
        and p.n_run >= p.n_recorded
    )
    assert p.loops and all(loop.n_nodes > 0 for loop in p.loops) and p.gathers == []
    assert p.curve and max(n for _, n in p.curve) <= p.predicted_peak_bytes
    assert p.largest and p.largest == sorted(p.largest, key=lambda t: -t.n_bytes)
    assert any("test_plan_report.py:" in t.line for t in p.largest)


def test_a_plan_names_the_lines_of_the_step_that_ran_not_of_an_equal_one_before():
    def lines():
        plan = koila.last_plan()
        return {t.line.rpartition(":")[0] for t in plan.largest}

    code = compile("m.weight.mul(x.unsqueeze(1)).sum().backward()", "elsewhere.py", "exec")
    for name in ("here.py", "there.py"):
        code = code.replace(co_filename=name)
        with koila.micro_batch(4):
            exec(code, {"m": nn.Linear(5, 3), "x": lazy(torch.randn(10, 5))})
        assert {line.rpartition("/")[2] for line in lines()} == {name}


def test_the_table_is_one_a_person_reads():
    step()
    text = str(koila.last_plan())
    assert (
        "3 × 4 rows of 10, the last 2" in text
        and "predicted peak" in text
        and "loops" in text
        and "largest at the peak" in text
    )
    assert max(map(len, text.splitlines())) < 160
    assert "koila.Plan" in repr(koila.last_plan())


def test_explain_runs_nothing_and_agrees_with_the_step():
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    calls = []
    x, y = lazy(torch.randn(10, 5), torch.randint(0, 3, (10,)))
    with koila.micro_batch(4):
        loss = F.cross_entropy(model(x), y)
        koila.explain(loss)  # torch's shape functions make scalars, for a call never seen before
        before = koila._core.cpu_bytes_n_allocs()
        p = koila.explain(loss)
        assert model.weight.grad is None and not calls
        assert p.measured_peak_bytes is None and "not run" in str(p)
        assert (p.batch, p.micro_batch, p.n_micro_batches) == (10, 4, 3)
        assert koila._core.cpu_bytes_n_allocs() <= before + 1  # a copy of the random state
        loss.backward()
        assert koila.last_plan().micro_batch == 4
        assert koila.explain({"out": model(x)}).batch == 10


def test_explain_of_a_checkpointed_step_leaves_statistics_and_random_state_alone():
    """Its backward runs the forward again: batch norm's statistics and counter, and dropout's
    numbers."""

    def step(explain):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2)
        ).double()
        with koila.micro_batch(5):
            loss = (
                checkpoint(
                    model, lazy(torch.randn(12, 4, dtype=torch.float64)), use_reentrant=False
                )
                .square()
                .mean()
            )
            if explain:
                assert koila.explain(loss).n_micro_batches == 3
            loss.backward()
        return [torch.rand(1), *model.state_dict().values(), *(p.grad for p in model.parameters())]

    assert all(torch.equal(a, b) for a, b in zip(step(False), step(True), strict=True))


def test_explain_of_a_checkpointed_step_leaves_no_default_device_behind(no_default_device):
    """Torch's checkpoint enters the default device of its forward once more; where it is still on
    the stack, torch.set_default_device(None) could not take it off any more."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    torch.set_default_device("cpu")
    try:
        x = torch.randn(12, 4)
        loss = checkpoint(model, lazy(x), use_reentrant=False).square().mean()
        assert koila.explain(loss).batch == 12
    finally:
        torch.set_default_device(None)
    assert torch._C._len_torch_function_stack() == 0
    loss.backward()


@pytest.mark.parametrize("rows", [None, 4])
def test_explain_of_a_loss_tells_the_whole_step_and_leaves_no_trace(rows, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 3)).double()
    x0, y0 = torch.randn(10, 5, dtype=torch.float64), torch.randint(0, 3, (10,))
    F.cross_entropy(model(x0), y0).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    fired = []
    model[0].weight.register_hook(lambda g: fired.append(g.shape))
    step()
    last = str(koila.last_plan())
    with koila.micro_batch(rows):
        x, y = lazy(x0, y0)
        loss = F.cross_entropy(model(x), y)
        told = koila.explain(loss)
        told.save(tmp_path / "told.kgraph")
        assert str(koila.last_plan()) == last and not fired and model[0].weight.grad is None
        loss.backward()
    ran = koila.last_plan()
    ran.save(tmp_path / "ran.kgraph")
    assert (told.micro_batch, told.n_recorded, len(told.loops)) == (
        ran.micro_batch,
        ran.n_recorded,
        len(ran.loops),
    )
    assert (
        abs(
            told.predicted_peak_bytes
            - told.base_bytes
            - (ran.predicted_peak_bytes - ran.base_bytes)
        )
        <= 64
    )
    assert (
        "backward" in (tmp_path / "told.kgraph").read_text()
        and "backward" in (tmp_path / "ran.kgraph").read_text()
    )
    assert len(fired) == 1 and all(
        torch.allclose(p.grad, e, rtol=1e-12) for p, e in zip(model.parameters(), expected)
    )


def test_a_gather_is_told_with_its_line():
    x = lazy(torch.randn(12, 5))
    with koila.micro_batch(4):
        float((x * 2).sort(0).values[:, 0].sum())
    p = koila.last_plan()
    assert any("sort" in g.operator for g in p.gathers), p.gathers
    g = next(g for g in p.gathers if "sort" in g.operator)
    assert (
        g.shape == (12, 5)
        and g.n_bytes == 240
        and "test_plan_report.py:" in g.line
        and g.dtype == "f32"
    )
    operator, shape, n_bytes, line = g
    assert (operator, shape, n_bytes, line) == (g.operator, g.shape, g.bytes, g.line)
    assert "aten::sort" in str(p) and "f32[12, 5]" in str(p)


def test_an_operator_that_ran_while_recording_is_told_of_too():
    """Its result's size depends on values, so it ran before the step did, on the whole."""
    w = torch.randn(5, 5, requires_grad=True)
    with koila.micro_batch(4):
        h = lazy(torch.randn(12, 5)) @ w
        n_positive = (h[:, 0] > 0).nonzero().shape[0]
        n_unique = torch.unique(h.detach().round()).numel()
        loss = h[h.detach()[:, 1] > 0].square().sum() + (h * n_positive + n_unique).square().sum()
        loss.backward()
        p = koila.last_plan()
        told = {g.operator: (g.shape, g.dtype, g.n_bytes) for g in p.gathers}
        assert told["aten::nonzero"] == ((12,), "bool", 12) and told["aten::_unique2"] == (
            (12, 5),
            "f32",
            240,
        )
        assert told["aten::index.Tensor"] in (((12,), "bool", 12), ((12, 5), "f32", 240))
        assert all("test_plan_report.py:" in g.line for g in p.gathers) and "aten::nonzero" in str(
            p
        )
        (lazy(torch.randn(12, 5)) @ w).square().sum().backward()  # the next step has its own
        assert koila.last_plan().gathers == []


def test_strict_refuses_a_gather_by_name_and_runs_the_rest():
    with koila.strict(), koila.micro_batch(4):
        x = lazy(torch.randn(12, 5))
        assert isinstance(float((x * 2).sum()), float)
        with pytest.raises(koila.GatherError) as e:
            float((x * 2).sort(0).values[:, 0].sum())
    assert (
        "sort" in str(e.value)
        and "[12, 5]" in str(e.value)
        and "test_plan_report.py:" in str(e.value)
    )
    assert isinstance(e.value, koila.KoilaError)


def unique_values(h):
    return torch.unique(h.detach().round())


def rows_by_mask(h):
    return h[h.detach()[:, 1] > 0]


def a_write_by_mask(h):
    h = h * 1
    h[h.detach()[:, 1] > 0] = torch.arange(5.0)
    return h


ON_VALUES = {  # what runs while the step is recorded, and what it needs
    "aten::nonzero": (lambda h: (h[:, 0] > 0).nonzero(), "bool[12]"),
    "aten::_unique2": (unique_values, "f32[12, 5]"),
    "aten::equal": (lambda h: torch.equal(h, h.detach() * 2), "f32[12, 5]"),
    "aten::index.Tensor": (rows_by_mask, "bool[12]"),
    "aten::index_put_": (a_write_by_mask, "bool[12]"),
}


@pytest.mark.parametrize("name", ON_VALUES)
def test_strict_refuses_what_runs_while_the_step_is_recorded(name):
    """Before anything has run: no statistics of a batch norm, no random numbers, nothing told of a
    gather that did not happen. What is not cut is not refused."""
    operator, needs = ON_VALUES[name]
    w, x, norm = torch.randn(5, 5, requires_grad=True), torch.randn(12, 5), torch.nn.BatchNorm1d(5)
    before, version = {k: v.clone() for k, v in norm.state_dict().items()}, w._version
    random = torch.get_rng_state()
    with koila.micro_batch(4):
        h = lazy(x)
        with koila.strict():
            h = norm(h) @ w
            with pytest.raises(koila.GatherError, match=re.escape(name)) as e:
                operator(h)
            line = operator.__code__.co_firstlineno
            assert (
                needs in str(e.value)
                and re.search(r"test_plan_report\.py:(\d+)", str(e.value))
                and "one slice is" in str(e.value)
            )
            assert (
                line <= int(re.search(r"test_plan_report\.py:(\d+)", str(e.value))[1]) <= line + 3
            )
            assert (
                torch.equal(dict(written_buffers(norm))["running_mean"], before["running_mean"])
                and w.grad is None
                and w._version == version
                and torch.equal(torch.get_rng_state(), random)
            )
        operator(h)  # the step goes on, and without strict() it runs
        h.square().sum().backward()
    assert (
        w.grad is not None
        and norm.num_batches_tracked == 1
        and not torch.equal(norm.running_mean, before["running_mean"])
    )
    assert [g.operator for g in koila.last_plan().gathers].count(name) >= 1
    h = lazy(x)
    with koila.micro_batch(12), koila.strict():
        operator(norm(h) @ w)


def test_a_gather_that_was_refused_is_not_told_of():
    w = torch.randn(5, 5, requires_grad=True)
    h = lazy(torch.randn(12, 5))
    with koila.micro_batch(4), koila.strict():
        h = h @ w
        with pytest.raises(koila.GatherError):
            h.detach().nonzero()
        h.square().sum().backward()
    assert koila.last_plan().gathers == [] and koila.last_plan().n_micro_batches == 3


def test_what_a_caught_gather_error_leaves_behind_is_not_raised_by_the_next_lazy():
    """It is raised by who asks for it again; and what else is held is made."""
    w, norm = torch.randn(5, 5), torch.nn.BatchNorm1d(5)
    x = torch.randn(12, 5)
    with torch.no_grad(), koila.micro_batch(4), koila.strict():
        h = lazy(x) @ w
        ordered, total = h.sort(0).values, h.sum()
        del h
        with pytest.raises(koila.GatherError):
            koila.run(ordered)
        for _ in range(2):
            lazy(x)
        w.zero_()  # what is made does not need it any more
        assert total.item() != 0
        with pytest.raises(koila.StaleValueError):
            koila.run(ordered)
        h = norm(lazy(x))
        g = h.sort(0).values
        lazy(x)
        assert norm.running_mean.any()  # it happened, though what is made of it is refused
        g = (lazy(x) * 2).sort(0).values
        h = lazy(x) * 2
        with pytest.raises(koila.GatherError):
            koila.run(g)
        lazy(x)
        with pytest.raises(koila.GatherError):
            koila.run(g)
    assert torch.equal(koila.run(g), (x * 2).sort(0).values) and torch.equal(koila.run(h), x * 2)


def test_strict_lets_pass_what_is_whole_already():
    w, x = torch.randn(5, 5), torch.randn(12, 5)
    y = lazy(x)
    with koila.micro_batch(4), koila.strict():
        assert torch.equal(y.nonzero(), x.nonzero())  # the batch as it was given
        h = y @ w
        total = h.sum()
        assert torch.allclose(total.unique(), (x @ w).sum())  # one value for all slices
        koila.run(h)
        assert h.nonzero().shape == (60, 2)


class Checker(html.parser.HTMLParser):
    VOID = {"meta", "br", "line", "polyline", "polygon"}

    def __init__(self):
        super().__init__()
        self.open, self.tags = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        assert not {"src", "href"} & {k for k, _ in attrs}, "the page must need nothing else"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing(tmp_path):
    step()
    p = koila.last_plan()
    p.save(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(page)
    assert checker.open == [] and "svg" in checker.tags and "table" in checker.tags
    assert "http" not in page and "@import" not in page and "<script" not in page
    assert (
        "loops" in page
        and "largest at the peak" in page
        and re.search(r"test_plan_report\.py:\d+", page)
    )
    points = re.search(r'<polyline points="([^"]+)"', page)[1].split()
    assert len(points) == len(p.curve) or len(points) >= 1000


def test_text_in_the_page_is_escaped(tmp_path):
    raw = koila.last_plan()._raw if koila.last_plan() else None
    if raw is None:
        step()
        raw = koila.last_plan()._raw
    evil = dict(
        raw,
        gathers=[("<script>alert(1)</script>", "f32", (2, 3), 24, "a&b.py:1")],
        curve=[("<b>", 1), ("x", 2)],
    )
    koila.Plan(evil).save(tmp_path / "evil.html")
    page = (tmp_path / "evil.html").read_text(encoding="utf-8")
    assert (
        "<script>" not in page
        and "&lt;script&gt;" in page
        and "a&amp;b.py:1" in page
        and "<b>" not in page
    )


def test_graph_and_text_files(tmp_path):
    step()
    p = koila.last_plan()
    p.save(tmp_path / "step.kgraph")
    assert (tmp_path / "step.kgraph").stat().st_size > 100
    p.save(tmp_path / "step.txt")
    assert (tmp_path / "step.txt").read_text(encoding="utf-8") == str(p) + "\n"
    for bad in ("step", "step.png"):
        with pytest.raises(ValueError, match="html"):
            p.save(tmp_path / bad)
    for _ in range(17):
        step(m=5)
    with pytest.raises(ValueError, match="older step"):
        p.save(tmp_path / "old.kgraph")


def test_a_plan_keeps_no_step_in_memory(tmp_path):
    x = lazy(torch.randn(10, 5))
    y = (x * 2).sum()
    p = koila.explain(y)
    p.save(tmp_path / "before.kgraph")
    del y, x
    with pytest.raises(ValueError, match="gone"):
        p.save(tmp_path / "after.kgraph")


def test_fastest_settles_on_a_size_that_fits_and_stays_exact():
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    x0, y0 = torch.randn(64, 5, dtype=torch.float64), torch.randint(0, 3, (64,))
    F.cross_entropy(model(x0), y0).backward()
    expected = model.weight.grad.clone()
    sizes = []
    # on a GPU the budget holds the products' workspaces too
    with koila.micro_batch("fastest"), koila.budget("64MiB" if DEVICE == "cpu" else "256MiB"):
        while len(sizes) < 8 or len(set(sizes[-5:])) > 1:
            model.zero_grad()
            x, y = lazy(x0, y0)
            F.cross_entropy(model(x), y).backward()
            assert torch.allclose(model.weight.grad, expected, rtol=1e-12)
            sizes.append(koila.last_plan().micro_batch)
            assert len(sizes) < 100, "the sizes are tried without end"

"""koila.compile(): loops of a plan as one compiled function give what their operators give. Most
tests run the graph that Inductor would get as it is, for that is made at once."""

import collections
import contextlib
import os
import threading

import pytest
import torch
import zoo
from helpers import run_python
from memory_helpers import installed
from torch import nn
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import koila
from koila import _compile, _core, lazy
from koila._torch import VERSION

pytestmark = pytest.mark.about_the_cpu("loops are compiled there alone")
ROWS, WIDTH = 4, 1024


@pytest.fixture
def instead(monkeypatch):
    """Set `.run(graph, given)` to run something else than the graph."""

    class Instead:
        run = staticmethod(lambda graph, given: graph(*given))
        n_compiled = 0
        seconds = 0.0  # by the clock that compiled slices and others are compared with

    def compile_fx_inner(graph, inputs):
        Instead.n_compiled += 1
        return lambda given: Instead.run(graph, given)

    def clock():
        Instead.seconds += 1
        return Instead.seconds

    _core.forget()  # plans of other tests, with their bodies
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", compile_fx_inner)
    _core.plant_clock(clock)
    yield Instead
    _core.plant_clock(None)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(inplace=True), nn.LayerNorm(16), nn.Linear(16, 8)
    ).double()


def batch(rows=13):
    torch.manual_seed(1)
    return torch.randn(rows, 8).double(), torch.randint(0, 8, (rows,))


def mean(model, x, y):
    return F.cross_entropy(model(x), y)


def weighted(model, x, y):
    weight = torch.arange(1.0, 9, dtype=torch.float64)
    return F.cross_entropy(model(x), y, weight=weight) + model(x).exp().mean()


def contrastive(model, x, y):
    """In two loops: rows are kept in between, and all of them are needed whole."""
    a, b = F.normalize(model(x), dim=1), F.normalize(model(x.flip(1)), dim=1)
    return F.cross_entropy(a @ b.t() / 0.1, torch.arange(len(x)))


def positions(model, x, y):
    return (model(x) * torch.arange(len(x))[:, None]).square().mean()


def normalized(model, x, y):
    return F.cross_entropy(F.batch_norm(model(x), None, None, training=True), y)


def step(model, loss, batch, lazily=True):
    model.zero_grad()
    x, y = lazy(*batch) if lazily else batch
    found = loss(model, x, y)
    found.backward()
    return [found.detach().clone(), *(p.grad.clone() for p in model.parameters())]


def compiled_step(model, loss, batch, rows=ROWS):
    with koila.compile("on"), koila.micro_batch(rows):
        found = step(model, loss, batch)
    assert _compile.wait(120)
    return found


def until_compiled(model, loss, batch):
    """The third step, whose loops are compiled, if they can be."""
    for _ in range(2):
        compiled_step(model, loss, batch)
        assert not any(loop.compiled for loop in koila.last_plan().loops)
    return compiled_step(model, loss, batch)


def are_alike(found, expected):
    return all(torch.allclose(f, e, 1e-12, 1e-14) for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("loss", [mean, weighted, contrastive, normalized, positions])
@pytest.mark.parametrize("rows", [13, 12])
def test_a_step_whose_loops_are_compiled_is_that_of_plain_torch(instead, loss, rows):
    model = mlp()
    expected = step(model, loss, batch(rows), lazily=False)
    assert are_alike(until_compiled(model, loss, batch(rows)), expected)
    loops = koila.last_plan().loops
    assert loops and all(loop.compiled for loop in loops)
    assert instead.n_compiled == len(loops)
    other = [t * 2 if t.is_floating_point() else t for t in batch(rows)]
    expected = step(model, loss, other, lazily=False)
    assert are_alike(compiled_step(model, loss, other), expected)
    assert instead.n_compiled == len(loops), "compiled once"


def test_a_body_that_computes_something_else_is_noticed_by_these_tests(instead):
    model = mlp()
    expected = step(model, mean, batch(), lazily=False)
    instead.run = lambda graph, given: [graph(*given), graph(*given)][0]  # each sum twice
    assert not are_alike(until_compiled(model, mean, batch()), expected)


def one_row(model, x, y):
    return model(x)[5].square().sum() + mean(model, x, y)


def test_what_differs_from_slice_to_slice_is_not_compiled(instead):
    model = mlp()
    expected = step(model, one_row, batch(), lazily=False)
    for _ in range(4):
        assert are_alike(compiled_step(model, one_row, batch()), expected)
    assert not koila.last_plan().loops[-1].compiled


class Noisy(nn.Module):
    """Draws with factories, with writes in other orders of memory, and in place."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        h = self.first(x) + torch.randn(len(x), 16, dtype=x.dtype)
        h = F.dropout(h.t(), 0.3).t() * torch.rand_like(h)
        h = F.dropout(h, 0.2, inplace=True) * torch.rand(len(x), 1, dtype=x.dtype).add(0.8).floor()
        return torch.native_dropout(self.last(h), 0.2, True)[0]


def dropped_convolutions():
    return nn.Sequential(
        nn.Unflatten(1, (2, 2, 2)),
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Dropout2d(0.3),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(16, 8),
        nn.AlphaDropout(0.1),
    )


def gpt2(n_layer=2):
    return zoo.gpt2(dropout=0.1, n_positions=32, n_embd=16, n_layer=n_layer)


def language(rows=13, length=8):
    torch.manual_seed(1)
    return torch.randint(0, 31, (rows, length)), torch.randint(0, 31, (rows, length))


def language_loss(model, x, y):
    return F.cross_entropy(model(input_ids=x).logits.flatten(0, 1), y.flatten())


DROPPED = {
    "GPT-2": (gpt2, language_loss, language),
    "convolutions": (dropped_convolutions, mean, batch),
    "noise": (Noisy, mean, batch),
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(), nn.BatchNorm1d(16), nn.Linear(16, 8)),
        mean,
        batch,
    ),
}


def seeded(run, model, loss, data, **how):
    """What a step finds, and where it leaves the generator."""
    torch.manual_seed(2)
    found = run(model, loss, data, **how)
    return [*found, torch.get_rng_state().double()]


@pytest.mark.parametrize("name", DROPPED)
def test_compiled_loops_draw_the_numbers_of_plain_torch(instead, name):
    """With 3 rows the last slice has one row alone, and runs as it was."""
    make, loss, data = DROPPED[name]
    torch.manual_seed(0)
    model = make().double().train()
    expected = seeded(step, model, loss, data(), lazily=False)
    for rows in (2, 3, 6):
        for _ in range(3):  # the first may teach what the next plan needs
            seeded(compiled_step, model, loss, data(), rows=rows)
        assert are_alike(seeded(compiled_step, model, loss, data(), rows=rows), expected)
        assert all(loop.compiled for loop in koila.last_plan().loops)


def test_numbers_of_other_rows_are_noticed_by_these_tests(instead, monkeypatch):
    model, draw = dropped_convolutions().double(), _core.body_draw
    expected = seeded(step, model, mean, batch(), lazily=False)
    for fault in (lambda drawn: drawn, lambda drawn: drawn.roll(1, 0)):
        _core.forget()
        monkeypatch.setattr(_core, "body_draw", lambda node, fault=fault: fault(draw(node)))
        for _ in range(3):
            seeded(compiled_step, model, mean, batch())
        found = seeded(compiled_step, model, mean, batch())
        assert koila.last_plan().loops[-1].compiled
        assert are_alike(found, expected) == torch.equal(fault(torch.eye(2)), torch.eye(2))


@pytest.mark.usefixtures("inductor")
@pytest.mark.skipif(not installed(), reason="torch's CPU memory cannot be counted here")
def test_a_compiled_loop_that_computes_results_again_has_the_same_numbers(monkeypatch):
    """Without memory for the results of one row. What is drawn again is what was drawn."""
    _core.forget()
    torch.manual_seed(0)
    model, data, draw, drawn = gpt2(6).double().train(), language(4, 32), _core.body_draw, []
    expected = seeded(step, model, language_loss, data, lazily=False)
    with koila.micro_batch(1):
        seeded(step, model, language_loss, data)
    plan = koila.last_plan()
    room = (plan.measured_peak_bytes - plan.base_bytes) * 8 // 10
    monkeypatch.setattr(_core, "body_draw", lambda node: (drawn.append(node), draw(node))[1])
    for _ in range(4):
        drawn.clear()
        model.zero_grad()
        with (
            koila.compile("on"),
            koila.axes("batch"),
            koila.budget(_core.cpu_bytes_current() + room),
        ):
            found = seeded(step, model, language_loss, data)
        assert are_alike(found, expected)
        assert _compile.wait(300)
    plan, n_dropouts = koila.last_plan(), 1 + 3 * 6
    assert all(loop.compiled for loop in plan.loops) and plan.n_recomputed
    too_much = plan.predicted_peak_bytes - plan.measured_peak_bytes
    # 2.1 % too much, with torch 2.11 9 %, 2.12 14 %: what Inductor makes needs less
    assert -0.02 * room <= too_much <= (0.03 if VERSION >= (2, 13) else 0.15) * room
    assert plan.loops[-1].n_slices == 4 and 4 * n_dropouts < len(drawn) <= 2 * 4 * n_dropouts


def test_loops_that_run_calls_of_one_before_draw_the_same_numbers(instead, monkeypatch):
    """The batch norm's statistics are made in a loop of their own, and its input in each."""
    norm = nn.BatchNorm1d(256), nn.GELU(), nn.Linear(256, 8)
    model = nn.Sequential(nn.Linear(8, 256), nn.Dropout(), *norm).double()
    data, draw, drawn = batch(64), _core.body_draw, []

    def noted(node):
        drawn.append(draw(node))
        return drawn[-1].clone()

    monkeypatch.setattr(_core, "body_draw", noted)
    expected = seeded(step, model, mean, data, lazily=False)
    for _ in range(4):
        drawn.clear()
        assert are_alike(seeded(compiled_step, model, mean, data), expected)
    n = len(data[0]) // ROWS
    assert len(drawn) == 3 * n
    for i in range(n):
        assert torch.equal(drawn[i], drawn[n + i]) and torch.equal(drawn[i], drawn[2 * n + i])


def test_loops_that_run_for_a_read_are_compiled(instead):
    """Torch has dispatched `.item()` to koila there, and operators are not a program's."""
    model, x = mlp(), batch(12)[0]
    with torch.no_grad(), koila.compile("on"), koila.micro_batch(ROWS):
        expected = model(x).square().sum().item()
        for _ in range(4):
            assert model(lazy(x)).square().sum().item() == pytest.approx(expected, rel=1e-12)
            _compile.wait()
    assert instead.n_compiled == 1 and koila.last_plan().loops[0].compiled


def test_nobody_draws_where_no_loop_runs():
    with pytest.raises(RuntimeError, match="a loop that does not run"):
        _core.body_draw(0)


def test_a_body_that_ran_out_of_memory_is_tried_again_where_there_is_an_eighth_more(instead):
    def run(graph, given):
        ran.append(room)
        if room < 10 << 20:
            raise torch.OutOfMemoryError("the slice")
        return graph(*given)

    ran, used = [], []
    little, hardly_more, more = 8 << 20, 17 << 19, 10 << 20
    model = mlp()
    expected = step(model, mean, batch(), lazily=False)
    instead.run = run
    for room in [little] * 6 + [hardly_more, more, little, more]:
        with koila.budget(_core.cpu_bytes_current() + room):
            assert are_alike(compiled_step(model, mean, batch()), expected)
        used.append(koila.last_plan().loops[-1].compiled)
    assert used == [False] * 7 + [True, False, True]
    assert ran.count(little) == 1 and hardly_more not in ran


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, AssertionError])
def test_where_a_body_raises_the_step_runs_without_it(instead, error, caplog):
    def run(graph, given):
        found = graph(*given)  # the sums have changed
        ran.append(given)
        if len(ran) == 2:
            raise error("the second slice")
        return found

    ran = []
    model = mlp()
    expected = step(model, mean, batch(), lazily=False)
    instead.run = run
    caplog.set_level("INFO", "koila")
    for run_step in (until_compiled, compiled_step):
        assert are_alike(run_step(model, mean, batch()), expected)
        assert koila.last_plan().retries == 0, "nothing was made smaller"
        assert not any(loop.compiled for loop in koila.last_plan().loops)
    assert len(ran) == 2
    told = [r.getMessage() for r in caplog.records if "koila.compile()" in r.getMessage()]
    what = "is dropped" if error is AssertionError else "waits for more memory"
    assert told == [
        f"koila.compile(): a compiled loop {what}, for it raised {error.__name__}: the second slice"
    ]


def test_what_cannot_be_traced_or_compiled_stays_as_it_is_and_is_told(instead, monkeypatch, caplog):
    def refuse(*given):
        raise TypeError("not this one")

    caplog.set_level("INFO", "koila")
    model = mlp()
    expected = step(model, mean, batch(), lazily=False)
    for patched in ("torch._inductor.compile_fx.compile_fx_inner", "koila._compile._traced"):
        _core.forget()
        monkeypatch.setattr(patched, refuse)
        assert are_alike(until_compiled(model, mean, batch()), expected)
        assert not any(loop.compiled for loop in koila.last_plan().loops)
    told = [r.getMessage() for r in caplog.records if "koila.compile()" in r.getMessage()]
    reason = "koila.compile(): a loop stays as it is: TypeError: not this one"
    assert told == [reason] * 4, "two loops, twice"


def test_steps_of_several_threads_share_the_compiled_loops(instead):
    expected = step(mlp(), mean, batch(), lazily=False)
    until_compiled(mlp(), mean, batch())
    data, found = batch(), [[] for _ in range(3)]

    def work(model, results):
        for _ in range(4):
            results.append(compiled_step(model, mean, data))
            assert all(loop.compiled for loop in koila.last_plan().loops)

    threads = [threading.Thread(target=work, args=(mlp(), results)) for results in found]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [len(results) for results in found] == [4, 4, 4]
    assert all(are_alike(f, expected) for results in found for f in results)
    assert instead.n_compiled == len(koila.last_plan().loops)


def test_a_forked_process_goes_on_without_what_was_being_compiled(instead, monkeypatch):
    """And its tuning does not wait for that for ever."""
    is_forked = threading.Event()

    def compile_fx_inner(graph, inputs):
        assert is_forked.wait(60)
        return lambda given: graph(*given)

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", compile_fx_inner)
    model = mlp()
    expected = step(model, mean, batch(), lazily=False)
    with koila.compile("on"), koila.micro_batch(ROWS):
        for _ in range(3):
            step(model, mean, batch())
        child = os.fork()
        if not child:
            is_right = False
            with contextlib.suppress(BaseException):
                is_right = _compile.wait(0) and are_alike(step(model, mean, batch()), expected)
                torch.compile(torch.sin, backend="eager")(torch.ones(1))
            os._exit(0 if is_right else 1)
        assert os.waitpid(child, 0)[1] == 0
        is_forked.set()
        assert _compile.wait(60)
        assert are_alike(step(model, mean, batch()), expected)
        assert koila.last_plan().loops[-1].compiled


def test_loops_with_modules_that_run_as_they_are_stay_and_others_of_the_plan_are_compiled(instead):
    model, smooth = mlp(), koila.opaque(nn.Softplus())

    def loss(model, x, y):
        return F.cross_entropy(smooth(model(x)), y)  # counts its labels in a loop before

    def plain(model, x, y):
        return F.cross_entropy(F.softplus(model(x)), y)

    expected = step(model, plain, batch(), lazily=False)
    assert are_alike(until_compiled(model, loss, batch()), expected)
    assert [loop.compiled for loop in koila.last_plan().loops] == [True, False]


def test_on_step_and_the_text_of_a_plan_tell_of_compiled_loops(instead):
    told = []
    with koila.on_step(lambda step: told.append(step.plan.loops[-1].compiled)):
        until_compiled(mlp(), mean, batch())
    assert told == [False, False, True]
    plan = koila.last_plan()
    assert f"{plan.loops[-1].n_nodes}, compiled" in str(plan)


CLOCK = {"now": 0.0}  # of test_sizes_of_slices...


@torch.library.custom_op("compile::slow", mutates_args=())
def slow(x: torch.Tensor) -> torch.Tensor:
    CLOCK["now"] += len(x) * {16: 1, 8: 4}.get(len(x), 99)
    return x.clone()


slow.register_fake(torch.empty_like)
torch.library.register_autograd("compile::slow", lambda ctx, g: g)
koila.register_rule(slow, "S0->S0")


def wide(model, x, y):
    return slow(model(x)).exp().square().mean()


def test_sizes_of_slices_are_compared_as_they_run_once_they_are_compiled(instead, monkeypatch):
    """Slices of 8 rows are slower until they are compiled, which takes six steps."""
    compiler, gate = torch._inductor.compile_fx.compile_fx_inner, threading.Semaphore(0)

    def compile_fx_inner(graph, inputs):
        assert gate.acquire(timeout=60)
        return compiler(graph, inputs)

    def run(graph, given):
        began = CLOCK["now"]
        found = graph(*given)
        rows = max(t.shape[0] for t in given if t.shape[1:] == (8,) and t.shape[0] < WIDTH)
        CLOCK["now"] = began + rows * {16: 1, 8: 0.5}.get(rows, 9)
        return found

    instead.run = run
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", compile_fx_inner)
    model = nn.Linear(8, WIDTH).double()
    data = torch.randn(64, 8, dtype=torch.float64), None
    expected = step(model, wide, data, lazily=False)
    ran, n_waits = [], 0
    _core.plant_clock(lambda: CLOCK["now"])
    try:
        for _ in range(100):
            model.zero_grad()
            with koila.compile("on"), koila.budget(_core.cpu_bytes_current() + (7 << 17)):
                wide(model, lazy(data[0]), None).backward()
            plan = koila.last_plan()
            ran.append((plan.micro_batch, plan.loops[-1].compiled))
            assert torch.allclose(model.weight.grad, expected[1], 1e-12, 1e-14)
            n_waits = 0 if _compile.wait(0) else n_waits + 1
            if n_waits == 6:
                gate.release()
                assert _compile.wait(60)
    finally:
        _core.plant_clock(None)
    assert ran[0] == (16, False) and (16, True) in ran
    assert ran.count((8, False)) >= 6, "while its loop was compiled it was not judged"
    assert ran[-5:] == [(8, True)] * 5


def test_ctrl_c_in_a_body_leaves_everything_as_it_was(instead):
    def run(graph, given):
        graph(*given)
        raise KeyboardInterrupt

    model = mlp()
    expected = step(model, mean, batch(), lazily=False)
    whole, instead.run = instead.run, run
    with pytest.raises(KeyboardInterrupt):
        until_compiled(model, mean, batch())
    assert all(p.grad is None for p in model.parameters())
    instead.run = whole
    assert are_alike(compiled_step(model, mean, batch()), expected)


def test_auto_compiles_steps_that_repeat_and_off_stops_it(instead):
    model = mlp()
    used = []
    for mode in ["auto"] * 5 + ["off", "auto"]:
        with koila.compile(mode), koila.micro_batch(ROWS):
            step(model, mean, batch())
        assert _compile.wait(120)
        used.append(all(loop.compiled for loop in koila.last_plan().loops))
    assert used == [False] * 4 + [True, False, True]


@pytest.mark.usefixtures("inductor")
def test_results_of_a_compiled_loop_share_no_memory(monkeypatch):
    """A later loop may write one of them in place. Inductor leaves out the copies."""

    def body(x):
        product = x @ x
        return [product.clone(), product.clone(), product.t().clone()]

    def n_memories():
        with torch.no_grad(), FakeTensorMode():
            inputs = [torch.empty(8, 8)]
            graph = make_fx(torch.func.functionalize(body), select_decomp_table())(*inputs)
        x = torch.rand(8, 8)
        results = _compile._compiled(graph, inputs)([x])
        assert all(map(torch.equal, results, body(x)))
        return len({t.data_ptr() for t in results})

    assert n_memories() == 3
    monkeypatch.setattr(_compile, "_apart", lambda results: results)
    assert n_memories() < 3


def test_under_deterministic_algorithms_nothing_depends_on_when_inductor_is_done(instead):
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(4):
            compiled_step(mlp(), mean, batch())
        assert instead.n_compiled == 0
    finally:
        torch.use_deterministic_algorithms(False)
    until_compiled(mlp(), mean, batch())
    assert all(loop.compiled for loop in koila.last_plan().loops)
    torch.use_deterministic_algorithms(True)
    try:
        compiled_step(mlp(), mean, batch())
        assert not any(loop.compiled for loop in koila.last_plan().loops)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("n_slow", [1, 3])
def test_a_body_is_dropped_that_is_slower_than_the_operators_three_times(instead, n_slow):
    """Once is chance: another process used the machine. Three full slices run in a step, twelve are
    compared with the operators', in a step of their own."""

    def run(graph, given):
        runs[graph] += 1
        instead.seconds += 5 if runs[graph] <= 12 * n_slow else 0
        return graph(*given)

    instead.run, runs = run, collections.Counter()
    model, used = mlp(), []
    until_compiled(model, weighted, batch())
    for _ in range(20):
        used.append(koila.last_plan().loops[-1].compiled)
        compiled_step(model, weighted, batch())
    once = [True] * 4 + [False]
    assert used == (once + [True] * 15 if n_slow == 1 else once * 3 + [False] * 5)


def test_what_a_body_needs_is_measured_and_not_taken_where_it_does_not_fit(instead):
    def run(graph, given):
        much = torch.zeros(1 << 22)
        return graph(*given) if len(much) else []

    instead.run = run
    model = mlp()
    until_compiled(model, mean, batch())
    assert koila.last_plan().measured_peak_bytes - koila.last_plan().base_bytes > 16 << 20
    compiled_step(model, mean, batch())
    plan = koila.last_plan()
    assert plan.loops[-1].compiled and plan.predicted_peak_bytes == plan.measured_peak_bytes
    with koila.budget(_core.cpu_bytes_current() + (8 << 20)):
        for _ in range(4):
            compiled_step(model, mean, batch())
            assert koila.last_plan().measured_peak_bytes - koila.last_plan().base_bytes < 8 << 20


def test_a_plan_tells_that_it_foretold_a_first_compiled_run_as_an_uncompiled_one(instead):
    instead.run = lambda graph, given: graph(*given) if len(torch.zeros(1 << 20)) else []
    model = mlp()
    plans = []
    with koila.on_step(lambda step: plans.append(step.plan)):
        until_compiled(model, mean, batch())
        compiled_step(model, mean, batch())
    *walked, first, second = plans
    assert not any(p.predicted_uncompiled or p.loops[-1].compiled for p in walked)
    assert first.loops[-1].compiled and first.predicted_uncompiled
    assert first.predicted_peak_bytes == walked[-1].predicted_peak_bytes
    assert "of the loops uncompiled" in str(first)
    assert second.loops[-1].compiled and not second.predicted_uncompiled
    assert second.predicted_peak_bytes == second.measured_peak_bytes
    assert "of the loops uncompiled" not in str(second)


def test_compile_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match='expected "on", "auto" or "off", got True'):
        koila.compile(True)


def convolutions():
    image = nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)
    return nn.Sequential(*image, nn.ReLU(), nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(16, 8))


def wide_mlp():
    return nn.Sequential(nn.Linear(8, 512), nn.GELU(), nn.Linear(512, 8))


@pytest.mark.usefixtures("inductor")
@pytest.mark.parametrize("make", [wide_mlp, convolutions, dropped_convolutions, gpt2])
def test_inductors_loops_are_exact_and_their_memory_is_predicted(make):
    torch.manual_seed(0)
    model = make().double().train()
    loss, data = (language_loss, language()) if make is gpt2 else (mean, batch())
    expected = seeded(step, model, loss, data, lazily=False)
    for _ in range(3):
        seeded(compiled_step, model, loss, data)
    assert are_alike(seeded(compiled_step, model, loss, data), expected)
    plan = koila.last_plan()
    assert all(loop.compiled for loop in plan.loops)
    most_off = 0 if make in (wide_mlp, convolutions) else 0.01  # the model is tiny
    off = abs(plan.predicted_peak_bytes - plan.measured_peak_bytes)
    assert off <= most_off * plan.measured_peak_bytes


@pytest.mark.parametrize("whose", ["a compiled function", "a module"])
def test_while_inductor_traces_other_threads_call_what_they_like(instead, monkeypatch, whose):
    """torch alone refuses: it is as if all threads traced. From 2.15 on compiled functions know
    which thread does."""
    called = {
        "a compiled function": torch.compile(torch.sin, backend="eager"),
        "a module": nn.Sequential(nn.Tanh()),
    }[whose]
    called(torch.ones(2))
    is_tracing, is_done, found = threading.Event(), threading.Event(), []

    def traced(x):
        is_tracing.set()
        assert is_done.wait(60)
        return x + 1

    def compile_fx_inner(graph, inputs):
        found.append(torch.fx.symbolic_trace(traced))
        return lambda given: graph(*given)

    refuses = whose == "a module" or hasattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag")

    def apart(planted):
        refused = pytest.raises((RuntimeError, NameError))
        with refused if planted and refuses else contextlib.nullcontext():
            assert called(torch.ones(2)).shape == (2,)

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", compile_fx_inner)
    for planted in (False, True):
        _core.forget()
        is_tracing.clear()
        is_done.clear()
        if planted:
            monkeypatch.setattr(_compile, "_traced_apart", contextlib.nullcontext)
        with koila.compile("on"), koila.micro_batch(ROWS):
            for _ in range(2):
                step(mlp(), mean, batch())
        assert is_tracing.wait(60)
        try:
            apart(planted)
        finally:
            is_done.set()
            assert _compile.wait(60)
    assert len(found) == 4


def test_a_program_that_ends_waits_for_what_is_being_compiled_and_no_more():
    """The interpreter stops other threads where they take the GIL again, and aborts the process if
    that is in C++."""
    out = run_python("""
        import threading
        import time

        from koila import _compile, _core

        def compiled(*traced):
            print("begun", flush=True)
            while threading.main_thread().is_alive():
                time.sleep(0.01)
            print("compiled", flush=True)

        _compile._compiled, _core.body_is = compiled, lambda body, function: None
        for _ in range(3):
            _compile._work.add(object(), (None, []))
        print("the end", flush=True)
    """)
    assert out.count("begun") == out.count("compiled") == out.count("the end") == 1, out
    assert out.endswith("compiled\n")


def test_loops_wait_while_something_else_is_compiled(instead):
    from torch._dynamo.convert_frame import compile_lock

    model, is_held, is_done = mlp(), threading.Event(), threading.Event()

    def hold():
        with compile_lock:
            is_held.set()
            is_done.wait(60)

    other = threading.Thread(target=hold)
    other.start()
    assert is_held.wait(60)
    for _ in range(4):
        compiled_step(model, mean, batch())
    n_compiled = instead.n_compiled
    is_done.set()
    other.join()
    assert n_compiled == 0
    compiled_step(model, mean, batch())
    compiled_step(model, mean, batch())
    assert all(loop.compiled for loop in koila.last_plan().loops)

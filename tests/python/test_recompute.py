"""A step that fits in no slices drops results of the forward pass and computes them again: the
numbers are those of eager, the peak is below the budget, and a smaller budget never needs more."""

import copy

import pytest
import torch
import zoo
from conftest import DEVICE, LONG
from helpers import assert_same, model_state, plain
from memory_helpers import collect_garbage, installed, out_of_memory
from torch import nn

import koila
from koila import _core, lazy

pytestmark = pytest.mark.skipif(not installed(), reason="torch's CPU memory cannot be counted here")
counted = pytest.mark.about_the_cpu("its peaks are counted to the byte")

MIB = 2**20


class Block(nn.Module):
    def __init__(self, width, norm, dropout, bias=True):
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=bias),
            norm(width),
            nn.SiLU(),
            nn.Dropout(dropout),
            nn.Conv2d(width, width, 3, padding=1, bias=bias),
            norm(width),
        )

    def forward(self, x):
        return x + self.inner(x)


def tower(n=12, width=8, norm=lambda c: nn.GroupNorm(2, c), dropout=0.0, bias=True):
    blocks = [Block(width, norm, dropout, bias) for _ in range(n)]
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten()
    ).double()


def encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    return nn.Sequential(
        nn.Linear(3, 16), nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
    ).double()


class Strided(nn.Module):
    """The gradient of as_strided() is written through such a view, which each slice has adapted."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 6)

    def forward(self, x):
        h = self.first(x)
        for _ in range(6):
            made = h[:, 0].sin()
            h = (h + 0.7 * made.as_strided((len(x), 6), (6, 1))[:, None]).tanh()
        return h


MODELS = {
    "convolutions": (tower, (3, 32, 32)),
    "dropout": (lambda: tower(dropout=0.3), (3, 32, 32)),
    # a bias before batch norm has no gradient but what rounding leaves
    "batch norm": (lambda: tower(6, norm=nn.BatchNorm2d, bias=False), (3, 32, 32)),
    "in place": (
        lambda: nn.Sequential(tower(4), nn.Linear(8, 8), nn.ReLU(inplace=True)).double(),
        (3, 32, 32),
    ),
    "u-net": (lambda: zoo.UNet().double(), (3, 32, 32)),
    "encoder": (encoder, (64, 3)),
    "strided": (lambda: Strided().double(), (64, 3)),
}


def step(make, shape, rows, wrap, budget=None):
    """What a step leaves, and its peak above what is held before it, in bytes."""
    torch.manual_seed(1)
    model = make()
    x = torch.randn(rows, *shape, dtype=torch.float64)
    collect_garbage()
    held = _core.cpu_bytes_current()
    _core.cpu_bytes_reset_peak()
    with koila.budget(None if budget is None else held + budget), koila.axes("batch"):
        out = model(wrap(x))
        loss = out.square().mean()
        loss.backward()
    peak = _core.cpu_bytes_peak() - held
    return {"loss:loss": plain(loss), **model_state(model)}, peak


def document_step(dropout, wrap, budget=None):
    """As step(), of one sequence through a deep language model, whose tokens may be cut."""
    torch.manual_seed(1)
    kw = dict(embd_pdrop=dropout, resid_pdrop=0.0, attn_pdrop=0.0)
    model = zoo.gpt2(n_positions=128, n_embd=32, n_head=4, n_layer=8, **kw).double().train()
    ids = torch.randint(0, 31, (1, 128))
    collect_garbage()
    held = _core.cpu_bytes_current()
    _core.cpu_bytes_reset_peak()
    with koila.budget(None if budget is None else held + budget):
        logits = model(input_ids=wrap(ids)).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
    peak = _core.cpu_bytes_peak() - held
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    return {"loss:loss": plain(loss), **model_state(model)}, peak, gradients


@counted
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_along_another_axis_loops_and_their_barriers_run_again(dropout):
    expected, whole, gradients = document_step(dropout, lambda x: x)
    both = []
    for share in (100, 80, 75, 70, 65, 60):  # of 1,000
        budget = gradients + (whole - gradients) * share // 1000
        try:
            got, peak, _ = document_step(dropout, lazy, budget)
        except koila.OutOfMemory:
            break
        plan = koila.last_plan()
        assert peak <= budget
        assert_same(expected, got, 1e-12, f"{share} of 1,000")
        assert abs(plan.predicted_peak_bytes - plan.base_bytes - peak) <= 0.03 * peak
        if plan.axis is not None and plan.n_recomputed:
            both.append(share)
    assert both or dropout, "nothing was cut along the tokens and computed again"


def gradient_bytes(make):
    return sum(p.numel() * p.element_size() for p in make().parameters())


@counted
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_below_one_row_a_step_leaves_what_eager_leaves(name, rows):
    make, shape = MODELS[name]
    expected, _ = step(make, shape, rows, lambda x: x)
    _, one_row = step(make, shape, 1, lazy)
    gradients = gradient_bytes(make)
    n_recomputed = 0
    for share in (0.8, 0.6, 0.45):
        budget = gradients + int(share * (one_row - gradients))
        try:
            got, peak = step(make, shape, rows, lazy, budget)
        except koila.OutOfMemory:
            continue
        plan = koila.last_plan()
        n_recomputed += plan.n_recomputed
        assert peak <= budget
        assert_same(expected, got, 1e-12 if rows > 1 else 0, f"{name}, {share}")
        # of the run: before the first one, calls may be probed with the rest of the budget
        assert abs(plan.predicted_peak_bytes - plan.measured_peak_bytes) <= 0.02 * peak
    assert n_recomputed or rows > 1, "it never fitted"


class Written(Block):
    """Adds to what it has made, in place, as many residual nets do."""

    def forward(self, x):
        y = self.inner(x)
        y += x
        return y.relu_()


def written():
    blocks = [Written(8, lambda c: nn.GroupNorm(2, c), 0.3) for _ in range(12)]
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten()
    ).double()


class Cells(nn.Module):
    """A loop over time, of cells that write to their gates in place."""

    def __init__(self, kind):
        super().__init__()
        self.cell = kind(8, 16)
        self.out = nn.Linear(16, 3)

    def forward(self, x):
        h = None
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return self.out(h[0] if isinstance(h, tuple) else h)


DRAWN_AGAIN = {  # with the part of the activations in which it trains, and did not
    "masks of dropout": (encoder, (64, 3), 0.2),
    "of images": (lambda: tower(dropout=0.3), (3, 32, 32), 0.36),
    "and written": (written, (3, 32, 32), 0.36),
    "gates of a GRU": (lambda: Cells(nn.GRUCell).double(), (96, 8), 0.2),
    "gates of an LSTM": (lambda: Cells(nn.LSTMCell).double(), (96, 8), 0.3),
}


@counted
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", DRAWN_AGAIN)
def test_what_is_drawn_or_written_runs_again_with_the_same_numbers(name, rows):
    make, shape, share = DRAWN_AGAIN[name]
    expected, _ = step(make, shape, rows, lambda x: x)
    _, one_row = step(make, shape, 1, lazy)
    gradients = gradient_bytes(make)
    budget = gradients + int(share * (one_row - gradients))
    if rows > 1:  # another accumulator beside what one row needs
        budget += gradients
    got, peak = step(make, shape, rows, lazy, budget)
    assert peak <= budget and koila.last_plan().n_recomputed
    assert_same(expected, got, 0 if rows == 1 else 1e-12, name)


class Inverted(nn.Module):
    """As those of a MobileNet: four times as wide inside, batch norm behind each convolution."""

    def __init__(self, width):
        super().__init__()
        wide = 4 * width
        self.inner = nn.Sequential(
            nn.Conv2d(width, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.SiLU(),
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.SiLU(),
            nn.Conv2d(wide, width, 1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x):
        return x + self.inner(x)


WITH_BATCH_NORM = {  # parts of what plain PyTorch holds beside the gradients
    "residual": (lambda: tower(8, norm=nn.BatchNorm2d, bias=False), (0.27, 0.22)),
    "inverted": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            *[Inverted(8) for _ in range(6)],
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        ).double(),
        (0.12, 0.11),
    ),
}


@counted
@pytest.mark.parametrize("name", WITH_BATCH_NORM)
def test_rows_that_wait_between_many_loops_are_dropped_too(name):
    """All rows wait between the loops of batch norm. Where they did not fit nothing was tried any
    more, and where they fitted only if each loop computed all again that took 12 times the work."""
    make, shares = WITH_BATCH_NORM[name]
    expected, whole = step(make, (3, 32, 32), 8, lambda x: x)
    gradients = gradient_bytes(make)
    for share in shares:
        budget = gradients + int(share * (whole - gradients))
        got, peak = step(make, (3, 32, 32), 8, lazy, budget)
        plan = koila.last_plan()
        assert peak <= budget
        assert_same(expected, got, 1e-12, f"{name}, {share}")
        assert abs(plan.predicted_peak_bytes - plan.measured_peak_bytes) <= 0.02 * peak
        assert plan.n_recomputed and plan.n_micro_batches > 1 and len(plan.loops) > 8
        assert plan.replay_ratio < 3


@counted
@pytest.mark.parametrize("name", WITH_BATCH_NORM)
def test_rows_that_fit_are_compared_with_dropping_where_their_loops_compute_again(name):
    """Slices of a net with batch norm that fitted were taken up to three times the work, and the
    whole batch with results dropped was less in half of the memory."""
    make = WITH_BATCH_NORM[name][0]
    expected, whole = step(make, (3, 32, 32), 8, lambda x: x)
    gradients = gradient_bytes(make)
    before = 1.0
    for share in (0.8, 0.6, 0.5):
        budget = gradients + int(share * (whole - gradients))
        got, peak = step(make, (3, 32, 32), 8, lazy, budget)
        plan = koila.last_plan()
        assert peak <= budget
        assert_same(expected, got, 1e-12, f"{name}, {share}")
        assert before <= plan.replay_ratio <= 4 / 3
        before = plan.replay_ratio
    assert plan.n_recomputed and plan.n_micro_batches == 1


def deep():
    return tower(24)


@counted
def test_half_and_a_third_of_the_activations_of_a_deep_net():
    _, whole = step(deep, (3, 32, 32), 1, lazy)
    gradients = gradient_bytes(deep)
    for share in (0.5, 0.3):
        step(deep, (3, 32, 32), 1, lazy, gradients + int(share * (whole - gradients)))
        plan = koila.last_plan()
        assert plan.n_recomputed and 1 < plan.replay_ratio <= 1.35
        assert f"{plan.n_recomputed} results that were dropped" in str(plan)


@counted
def test_a_smaller_budget_never_needs_more_memory_or_less_work():
    _, whole = step(tower, (3, 32, 32), 1, lazy)
    before, work = whole + 1, 0.0
    for i in range(50, 4, -1):
        try:
            _, peak = step(tower, (3, 32, 32), 1, lazy, whole * i // 50)
        except koila.OutOfMemory:
            break
        assert peak <= before
        assert koila.last_plan().replay_ratio >= work
        before, work = peak, koila.last_plan().replay_ratio
    assert before < 0.5 * whole


@counted
def test_with_more_memory_nothing_is_computed_again():
    _, whole = step(tower, (3, 32, 32), 1, lazy)
    step(tower, (3, 32, 32), 1, lazy, whole // 2)
    assert koila.last_plan().n_recomputed
    step(tower, (3, 32, 32), 1, lazy, 2 * whole)
    assert not koila.last_plan().n_recomputed and koila.last_plan().replay_ratio == 1


@counted
def test_what_does_not_fit_even_so_says_so():
    _, whole = step(tower, (3, 32, 32), 1, lazy)
    with pytest.raises(koila.OutOfMemory, match="1 row"):
        step(tower, (3, 32, 32), 1, lazy, whole // 20)


@counted
@pytest.mark.parametrize("name", ["dropout", "batch norm"])
def test_every_refused_allocation_ends_well(name):
    make, shape = MODELS[name]
    expected, whole = step(make, shape, 1, lambda x: x)
    budget = gradient_bytes(make) + int(0.6 * whole)
    torch.manual_seed(1)
    model = make()
    x = torch.randn(1, *shape, dtype=torch.float64)
    start, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()

    def again():
        model.zero_grad(set_to_none=True)
        model.load_state_dict(start)
        torch.set_rng_state(generator)

    def run():
        with koila.budget(_core.cpu_bytes_current() + budget), koila.axes("batch"):
            model(lazy(x)).square().mean().backward()

    again()
    run()
    assert koila.last_plan().n_recomputed
    again()
    before = _core.cpu_bytes_n_allocs()
    run()
    n_allocs = _core.cpu_bytes_n_allocs() - before
    finished = raised = 0
    for n in range(1, n_allocs + 2, 1 if LONG else max(1, n_allocs // 40)):
        again()
        _core.cpu_bytes_fail_nth(n)
        try:
            run()
            finished += 1
        except (RuntimeError, MemoryError, koila.KoilaError) as e:
            assert out_of_memory(e), f"allocation {n}: {type(e).__name__}: {e}"
            raised += 1
            assert all(p.grad is None for p in model.parameters()), f"allocation {n}: a part"
            continue
        finally:
            _core.cpu_bytes_fail_nth(0)
        got = {"loss:loss": expected["loss:loss"], **model_state(model)}
        assert_same(expected, got, 1e-12, f"allocation {n}")
    assert finished and raised


@pytest.mark.skipif(DEVICE == "cpu", reason="about a GPU's allocator")
def test_on_a_gpu_a_deep_net_trains_in_half_of_what_one_sample_needs():
    def make():
        return tower(16, dropout=0.2).cuda()

    model = make()
    x = torch.randn(1, 3, 32, 32, dtype=torch.float64)

    def run(wrap):
        model.zero_grad(set_to_none=True)
        torch.cuda.manual_seed(3)
        model(wrap(x)).square().mean().backward()
        return model_state(model)

    with torch.backends.cudnn.flags(enabled=False):
        expected = run(lambda t: t)
        run(lazy)
        whole = koila.last_plan()
        assert not whole.n_recomputed
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        budget = whole.base_bytes + (whole.predicted_peak_bytes - whole.base_bytes) // 2
        # The measured speed of host memory decides where results wait, if they may.
        with koila.budget({"cuda": budget}), koila.axes("batch"), koila.host_memory("off"):
            got = run(lazy)
    plan = koila.last_plan()
    assert plan.n_recomputed and plan.n_micro_batches == 1
    assert plan.predicted_peak_bytes <= budget
    assert_same(expected, got, 0)

"""A loop over time in Python, x[:, t] and a state that goes from step to step: one sample that does
not fit trains in slices of time, and the step is eager's."""

import gc

import loop_programs
import pytest
import torch
from conftest import DEVICE, LONG
from helpers import model_state
from memory_helpers import clear, installed, koila_step, needs, only, out_of_memory
from torch import nn

import koila
from koila import _core

pytestmark = pytest.mark.skipif(not installed(), reason="torch's CPU memory cannot be counted here")
counted = pytest.mark.about_the_cpu("its peaks are counted to the byte")
WIDTH, STATES = 16, 6


class Scan(nn.Module):
    """`over` makes values for each time of a [B, T, WIDTH, STATES], b the same and h of a time."""

    def __init__(self, over, width=WIDTH):
        super().__init__()
        self.over = over
        self.first, self.last = nn.Linear(4, width), nn.Linear(width, 3)
        self.a = nn.Parameter(torch.randn(width, STATES))
        self.b = nn.Parameter(torch.randn(width, STATES))
        self.w = nn.Parameter(torch.randn(STATES, STATES) / STATES)
        if over in CELLS:
            self.cell = CELLS[over](width, width)

    def forward(self, x):
        h = self.first(x).sigmoid()
        a = torch.exp(-h[..., None] * self.a.square())
        b = h[..., None].sin() * self.b
        out = self.over(self, a, b, torch.zeros(len(x), *self.a.shape, dtype=x.dtype))
        return self.last(out)


def forward_in_time(m, a, b, h):
    outs = []
    for t in range(a.shape[1]):
        h = a[:, t] * h + b[:, t]
        outs.append((h @ m.w).sum(-1))
    return torch.stack(outs, 1)


def backward_in_time(m, a, b, h):
    outs = []
    for t in reversed(range(a.shape[1])):
        h = torch.tanh(a[:, t] * h + b[:, t] @ m.w)
        outs.append(h.sum(-1))
    return torch.stack(outs[::-1], 1)


def both_ways(m, a, b, h):
    return forward_in_time(m, a, b, h) + backward_in_time(m, a, b, h)


def one_after_the_other(m, a, b, h):
    out = forward_in_time(m, a, b, h)
    return backward_in_time(m, a * out[..., None].tanh(), b, h)


def of_unbound(m, a, b, h):
    outs = []
    for x, y in zip(a.unbind(1), b.unbind(1), strict=True):
        h = x * h + y
        outs.append(h.sum(-1))
    return torch.stack(outs, 1)


def of_neighbours(m, a, b, h):
    """Reads each time three times, and one before the first, which is the last."""
    outs = []
    for t in range(a.shape[1]):
        h = a[:, t] * h + b[:, t] * b[:, t - 1]
        outs.append((h + a[:, t].sin()).sum(-1))
    return torch.stack(outs, -1).transpose(1, 2)


def of_the_last(m, a, b, h):
    for t in range(a.shape[1]):
        h = a[:, t] * h + b[:, t]
    return h.sum(-1)


def of_every_other(m, a, b, h):
    outs = []
    for t in range(0, a.shape[1], 2):
        h = a[:, t] * h + b[:, t]
        outs += [h.sum(-1), h.prod(-1)]
    return torch.stack(outs[: a.shape[1]], 1) * b.sum(-1)


def of_a_mean(m, a, b, h):
    """The state begins with means over all times, of which dimensions are expanded."""
    h = h + a.mean((1, 2))[:, None, :].expand(-1, WIDTH, -1)
    first = a.mean((1, 3))[..., None].expand(-1, -1, STATES)
    outs = []
    for t in range(a.shape[1]):
        h = a[:, t] * h + b[:, t] * first
        outs.append(h.sum(-1))
    return torch.stack(outs, 1)


def with_noise(m, a, b, h):
    """Draws each time, and first of all one that waits for a mean over all times."""
    noise = torch.rand_like(a.mean(1)).sum(-1)
    outs = []
    for t in range(a.shape[1]):
        h = nn.functional.dropout(a[:, t] * h + b[:, t], 0.2)
        outs.append(h.sum(-1) + noise)
    return torch.stack(outs, 1)


def in_place(m, a, b, h):
    outs = []
    for t in range(a.shape[1]):
        g = a[:, t] * h
        g += b[:, t]
        h = g.tanh()
        outs.append(h.sum(-1))
    return torch.stack(outs, 1)


def of_cells(m, a, b, h):
    x, outs = a.sum(-1), []
    state = x[:, 0] if isinstance(m.cell, nn.GRUCell) else (x[:, 0], x[:, 0])
    for t in range(x.shape[1]):
        state = m.cell(x[:, t], state)
        outs.append(state[0] if isinstance(state, tuple) else state)
    return torch.stack(outs, 1)


def of_lstm_cells(m, a, b, h):
    return of_cells(m, a, b, h)


CELLS = {of_cells: nn.GRUCell, of_lstm_cells: nn.LSTMCell}
# the share of what one row needs at which each trains: two loops hold the gradients of both
SCANS = {
    forward_in_time: 0.5,
    backward_in_time: 0.5,
    both_ways: 0.75,
    one_after_the_other: 0.8,
    of_unbound: 0.6,
    of_neighbours: 0.5,
    of_the_last: 0.45,
    of_every_other: 0.6,
    of_a_mean: 0.6,
    with_noise: 0.6,
    in_place: 0.5,
    of_cells: 0.5,
    of_lstm_cells: 0.5,
}


def loss_of(model, *batch):
    torch.manual_seed(3)
    return model(*batch).square().mean()


class Step:
    """A model, its batch, and what plain PyTorch's step leaves."""

    def __init__(self, make, samples, *times):
        torch.manual_seed(7)
        self.model = make().double()
        self.batch = [torch.randn(samples, n, 4).double() for n in times]
        loss_of(self.model, *self.batch).backward()
        self.expected = model_state(self.model)
        clear(self.model)
        gc.collect()  # what is garbage already is not to be freed in the middle
        base = _core.cpu_bytes_current()
        koila_step(self.model, loss_of, self.batch, 1)
        self.gradients = sum(p.numel() * p.element_size() for p in self.model.parameters())
        self.room = koila.last_plan().measured_peak_bytes - base - self.gradients

    def least_along_rows(self):
        """The share below which no step trains that only drops results."""
        clear(self.model)
        try:
            with koila.axes("batch"), only(int(self.gradients + 0.1 * self.room)):
                koila_step(self.model, loss_of, self.batch)
        except koila.OutOfMemory as e:
            return 0.1 + e.missing_bytes / self.room
        except RuntimeError as e:  # a plain tensor of the forward pass was refused
            assert out_of_memory(e)
        return 0.7

    def run_at(self, share):
        """The step at that share of what one row needs above the gradients."""
        clear(self.model)
        with only(int(self.gradients + share * self.room)):
            koila_step(self.model, loss_of, self.batch)

    def compare_at(self, share, tamper=lambda got: got):
        """Its plan; what it leaves is eager's."""
        self.run_at(share)
        return self.compare(tamper)

    def compare(self, tamper=lambda got: got):
        plan, got = koila.last_plan(), tamper(model_state(self.model))
        assert self.expected.keys() == got.keys()
        for k, e in self.expected.items():
            if e is None or got[k] is None:
                assert e is got[k], k
                continue
            scale = max(1e-3, float(e.abs().max()))
            assert float((e - got[k]).abs().max()) <= 1e-12 * scale, k
        assert plan.measured_peak_bytes <= plan.budget_bytes
        assert 0.99 <= plan.predicted_peak_bytes / plan.measured_peak_bytes <= 1.02
        return plan


@counted
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("times", [96, 67])
@pytest.mark.parametrize("over", SCANS, ids=lambda f: f.__name__)
def test_a_loop_over_time_trains_in_slices_of_time(over, times, samples):
    plan = Step(lambda: Scan(over), samples, times).compare_at(SCANS[over] + 0.15 * (samples > 1))
    assert plan.n_micro_batches == samples
    if samples == 1:
        assert plan.n_recomputed or plan.axis
        # gathered there, which takes less time
        assert plan.axis is None or over in (of_unbound, of_cells)


@counted
@pytest.mark.parametrize("times", [300, 1000, 1024])
@pytest.mark.parametrize("over", [forward_in_time, of_neighbours], ids=lambda f: f.__name__)
def test_a_loop_over_many_times_trains_in_slices_of_time(over, times):
    """Gradients of x[:, t] are added up in a chain as long as the loop."""
    step = Step(lambda: Scan(over), 1, times)
    for share in (0.5, 0.3):
        plan = step.compare_at(share)
        assert plan.n_recomputed and plan.axis is None


@counted
@pytest.mark.parametrize("over", [forward_in_time, in_place, with_noise], ids=lambda f: f.__name__)
def test_every_refused_allocation_of_a_loop_over_time_ends_well(over):
    step = Step(lambda: Scan(over), 1, 48)
    assert step.compare_at(0.6).n_recomputed  # shapes and plans are known from here on
    before = _core.cpu_bytes_n_allocs()
    step.run_at(0.6)
    n_allocs = _core.cpu_bytes_n_allocs() - before
    n_finished = n_raised = 0
    for n in range(1, n_allocs + 2, 1 if LONG else max(1, n_allocs // 60)):
        _core.cpu_bytes_fail_nth(n)
        try:
            step.run_at(0.6)
        except (RuntimeError, MemoryError, koila.KoilaError) as e:
            assert out_of_memory(e), f"allocation {n}: {type(e).__name__}: {e}"
            assert all(p.grad is None for p in step.model.parameters()), f"allocation {n}: a part"
            n_raised += 1
            continue
        finally:
            _core.cpu_bytes_fail_nth(0)
        step.compare()
        n_finished += 1
    assert n_finished and n_raised


@counted
def test_a_planted_fault_is_caught():
    def lose_a_time(got):
        got["grad:a"] = got["grad:a"] * (1 - 1 / 96)
        return got

    with pytest.raises(AssertionError):
        Step(lambda: Scan(forward_in_time), 1, 96).compare_at(0.5, tamper=lose_a_time)


@pytest.mark.skipif(DEVICE == "cpu", reason="about a GPU's allocator")
def test_a_loop_over_time_that_does_not_fit_a_gpu_trains():
    torch.manual_seed(7)
    model, x = Scan(forward_in_time, 128), torch.randn(1, 192, 4)
    loss_of(model, x).backward()
    expected = model_state(model)
    clear(model)
    koila_step(model, loss_of, (x,))
    whole = koila.last_plan()
    clear(model)
    with koila.budget(whole.base_bytes + (whole.predicted_peak_bytes - whole.base_bytes) // 2):
        koila_step(model, loss_of, (x,))
    plan = koila.last_plan()
    assert plan.n_recomputed and plan.axis is None
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    for k, e in expected.items():
        assert e is None or torch.allclose(e, model_state(model)[k], rtol=1e-4, atol=1e-6), k


class Speaks(nn.Module):
    """A loop over time before the words of a vocabulary, whose table is used at both ends."""

    def __init__(self, words=1500, width=48):
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.into, self.on = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, ids):
        x = self.table(ids)
        h, outs = torch.zeros_like(x[:, 0]), []
        for t in range(ids.shape[1]):
            h = torch.tanh(self.into(x[:, t]) + self.on(h))
            outs.append(h)
        return torch.stack(outs, 1) @ self.table.weight.t()


def next_word(model, ids):
    return nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@counted
@pytest.mark.parametrize("samples, share", [(1, 0.5), (1, 0.2), (2, 0.5), (2, 0.35)])
def test_a_loop_over_time_is_whole_where_what_is_large_is_behind_it(samples, share):
    """Slices of time for the words alone: no gradient of x[:, t] is as large as x."""
    torch.manual_seed(5)
    model, batch = Speaks().double(), (torch.randint(0, 1500, (samples, 64)),)
    next_word(model, *batch).backward()
    expected = model_state(model)
    clear(model)
    room, gradients = needs(model, batch, next_word)
    with only(int(gradients + share * room)):
        koila_step(model, next_word, batch)
    plan = koila.last_plan()
    assert plan.axis is not None and plan.axis.size == 64 and plan.replay_ratio < 1.3
    assert 0.99 <= plan.predicted_peak_bytes / plan.measured_peak_bytes <= 1.02
    for k, e in expected.items():
        torch.testing.assert_close(model_state(model)[k], e, rtol=1e-11, atol=1e-13)


class Translates(nn.Module):
    """A loop over the source, and one over the target that begins with its state."""

    def __init__(self):
        super().__init__()
        self.source, self.target = Scan(None), Scan(None)

    @staticmethod
    def states(m, x, h):
        f, outs = m.first(x).sigmoid(), []
        a, b = torch.exp(-f[..., None] * m.a.square()), f[..., None].sin() * m.b
        for t in range(x.shape[1]):
            h = torch.tanh(a[:, t] * h + b[:, t] @ m.w)
            outs.append(h.sum(-1))
        return h, outs

    def forward(self, xs, ys):
        h = torch.zeros(len(xs), WIDTH, STATES, dtype=xs.dtype)
        h, _ = self.states(self.source, xs, h)
        return self.target.last(torch.stack(self.states(self.target, ys, h)[1], 1))


@counted
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("lengths, share", [((96, 64), 0.5), ((67, 101), 0.4), ((64, 400), 0.3)])
def test_loops_over_two_lengths_are_each_cut_along_their_own(lengths, share, samples):
    plan = Step(Translates, samples, *lengths).compare_at(share + 0.3 * (samples > 1))
    if samples == 1:
        assert plan.n_recomputed and plan.axis is None


class TranslatesCells(nn.Module):
    """The same of cells, which write to their gates in place: what is written never runs again."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.source, self.target = nn.GRUCell(4, width), nn.GRUCell(4, width)
        self.first, self.last = nn.Linear(4, width), nn.Linear(width, 3)

    def forward(self, xs, ys):
        h, outs = self.first(xs).mean(1), []
        for t in range(xs.shape[1]):
            h = self.source(xs[:, t], h)
        for t in range(ys.shape[1]):
            h = self.target(ys[:, t], h)
            outs.append(h)
        return self.last(torch.stack(outs, 1))


@counted
@pytest.mark.parametrize("make", [Translates, TranslatesCells])
@pytest.mark.parametrize("lengths", [(96, 64), (67, 101)])
def test_loops_over_two_lengths_are_exact_or_do_not_fit(lengths, make):
    step, trained = Step(make, 1, *lengths), []
    for share in (0.9, 0.7, 0.5, 0.3, 0.2):
        try:
            step.compare_at(share)
        except koila.OutOfMemory:
            continue
        trained.append(share)
    assert trained


@counted
@pytest.mark.filterwarnings("ignore")
def test_random_loops_over_time_below_one_row_are_eager_s_or_raise():
    """At shares of the least that dropping results alone needs: another axis is cut, or slices of
    time are calls of their own."""
    n_trained = n_raised = 0
    for seed in range(100, 500 if LONG else 112):
        step = Step(lambda seed=seed: loop_programs.Model(seed), *loop_programs.sizes(seed))
        least = step.least_along_rows()
        for share in (0.97, 0.8):
            clear(step.model)
            before = model_state(step.model)
            try:
                step.compare_at(share * least)
                n_trained += 1
            except (koila.OutOfMemory, RuntimeError) as e:
                assert out_of_memory(e), (seed, e)
                n_raised += 1
                for k, v in model_state(step.model).items():
                    assert v is before[k] or torch.equal(v, before[k]), (seed, k)
    assert n_trained > 2 and n_raised > 2, (n_trained, n_raised)

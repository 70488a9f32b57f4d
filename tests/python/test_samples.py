"""Loops over samples: what is taken from rows of one slice stays in that slice.

`for row in x`, `chunk`, `split`, `x[i]`, `x[a:b]`, of the batch itself and of features. Each
program equals eager to 1e-12 in whole, even, ragged and single-row slices, and nothing is gathered.
"""

import program_generator
import pytest
import torch
from conftest import DEVICE
import torch.nn.functional as F
from helpers import EVEN, ONE, RAGGED, WHOLE, compare
from torch import nn

import koila
from koila import lazy

B, T, D = 9, 32, 6
PROGRAMS = {}


def program(f):
    PROGRAMS[f.__name__] = f
    return f


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(D, 16), nn.GELU(), nn.Linear(16, D))
        self.head = nn.Sequential(nn.Linear(D, 24), nn.GELU(), nn.Linear(24, 4))


def step(of_features, loop):
    def loss(net, x, y):
        return loop(net.head, net.body(x) if of_features else x, y)

    return loss


def batch():
    g = torch.Generator(DEVICE).manual_seed(3)
    return torch.randn(B, T, D, generator=g), torch.randint(4, (B, T), generator=g)


@program
def added_up(f, h, y):
    loss = 0
    for row, label in zip(h, y):
        loss = loss + F.cross_entropy(f(row), label)
    return loss / len(h)


@program
def added_in_place(f, h, y):
    loss = torch.zeros(())
    for i in range(len(h)):
        loss += F.cross_entropy(f(h[i]), y[i])
    return loss


@program
def stacked(f, h, y):
    return F.cross_entropy(torch.stack([f(row) for row in h]).flatten(0, 1), y.flatten())


@program
def stacked_along_another_dimension(f, h, y):
    return F.cross_entropy(torch.stack([f(row) for row in h], 1).transpose(1, 2), y.t())


@program
def joined_after_unsqueeze(f, h, y):
    out = torch.cat([f(h[i]).unsqueeze(0) for i in range(len(h))])
    return F.cross_entropy(out.flatten(0, 1), y.flatten())


@program
def some_rows_in_another_order(f, h, y):
    return sum(f(h[i]).pow(2).mean() for i in (5, -1, 0, 3, 5))


@program
def rows_of_different_lengths(f, h, y):
    lengths = [3, 32, 1, 8, 20, 5, 7, 31, 2]
    return sum(F.cross_entropy(f(h[i, :n]), y[i, :n]) for i, n in enumerate(lengths))


@program
def parts_of_rows_that_lie_as_rows_do(f, h, y):
    """Rows i of 9 and positions 3 i .. of 27: each tells a dimension that could be the batch."""
    h = h[:, : 3 * B]
    return sum(f(h[i, 3 * i : 3 * i + 2]).pow(2).mean() for i in range(B)) + sum(
        f(h[i : i + 1, 3 * i]).sum() for i in range(B)
    )


@program
def dropout(f, h, y):
    return sum(F.cross_entropy(F.dropout(f(row), 0.3), y[i]) for i, row in enumerate(h))


@program
def a_moving_average(f, h, y):
    mean = torch.zeros(T, 4)
    for row in h:
        mean = 0.9 * mean + 0.1 * f(row)
    return mean.pow(2).sum()


@program
def sorts_each_row(f, h, y):
    return sum(f(row).sort(0).values[: T // 2].pow(2).mean() for row in h)


@program
def rows_written_in_place(f, h, y):
    loss = 0
    for row in h:
        z = f(row) * 2
        z[3:5] = 0
        loss = loss + z.relu_().mean()
    return loss


@program
def beside_the_batch(f, h, y):
    return f(h).pow(2).mean() + sum(f(row).sum() for row in h) / len(h)


@pytest.mark.parametrize("of_features", [False, True], ids=["of the batch", "of features"])
@pytest.mark.parametrize("loop", PROGRAMS.values(), ids=PROGRAMS)
def test_a_loop_over_rows_equals_eager_and_gathers_nothing(loop, of_features):
    # with 6 of 9 rows in a slice it can take less memory to gather the features after all
    for slices, gather_bytes_per_row in (((WHOLE, EVEN, ONE), 0), ((RAGGED,), None)):
        compare(
            lambda: Net().double(),
            lambda: (batch()[0].double(), batch()[1]),
            step(of_features, loop),
            slices,
            gather_bytes_per_row=gather_bytes_per_row,
        )


PARTS = {
    "chunk": lambda h: h.chunk(4),
    "split": lambda h: h.split(2),
    "split with sizes": lambda h: h.split([1, 4, 1, 3]),
    "slices": lambda h: [h[i : i + 2] for i in range(0, len(h), 2)],
    "from the end": lambda h: [h[:4], h[-5:-2], h[-2:]],
}


@pytest.mark.parametrize("of_features", [False, True], ids=["of the batch", "of features"])
@pytest.mark.parametrize("joined", [False, True], ids=["losses", "joined"])
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_parts_of_several_rows_equal_eager(parts, joined, of_features):
    def loop(f, h, y):
        if joined:
            out = torch.cat([f(part) for part in parts(h)])
            return F.cross_entropy(out.flatten(0, 1), y.flatten())
        losses = [
            F.cross_entropy(f(part).flatten(0, 1), label.flatten())
            for part, label in zip(parts(h), parts(y))
        ]
        return torch.stack(losses).mean()

    compare(
        lambda: Net().double(),
        lambda: (batch()[0].double(), batch()[1]),
        step(of_features, loop),
        split=False,
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block", range(4))
def test_random_programs_with_loops_over_samples(block):
    """Loops over a dimension of whatever a random program has made, written in place, joined, added
    up: 15 programs a block, each in 5 slicings."""
    for seed in range(50_000 + 100 * block, 50_000 + 100 * block + 15):
        options = {"kinds": "vvwllllf", "steps": 6, "dtype": torch.float64}
        eager = program_generator.run(seed, seed % 2, **options)
        for n in (6, 4, 3, 2, 1):
            with koila.micro_batch(n):
                ours = program_generator.run(seed, seed % 2, lazy, **options)
            wrong = program_generator.compare(eager, ours, exact=n == 6, tolerance=1e-11)
            assert not wrong, f"program {seed} in slices of {n}: {wrong}"


def test_no_slice_cuts_a_part():
    net = Net()
    x, y = batch()
    with koila.micro_batch(4):
        (x, y) = lazy(x, y, batch=0)
        out = torch.cat([net.head(part) for part in x.split([3, 3, 3])])
        F.cross_entropy(out.flatten(0, 1), y.flatten()).backward()
    plan = koila.last_plan()
    assert plan.n_micro_batches == 3 and not plan.gathers


def test_each_row_s_operators_run_once():
    net = Net()
    x, y = batch()
    with koila.micro_batch(1):
        (x, y) = lazy(x, y, batch=0)
        added_up(net.head, x, y).backward()
    plan = koila.last_plan()
    assert plan.n_micro_batches == B and plan.n_run < 1.2 * plan.n_recorded


def test_a_value_read_in_the_loop_is_eager_s():
    def run(wrap):
        torch.manual_seed(0)
        net = Net().double()
        x, y = wrap(batch()[0].double(), batch()[1])
        loss, seen = 0, []
        for row, label in zip(x, y):
            one = F.cross_entropy(net.head(row), label)
            seen.append(one.item())
            loss = loss + one * (2 if seen[-1] > 1.4 else 1)
        loss.backward()
        return seen, [p.grad for p in net.head.parameters()]

    expected, gradients = run(lambda *v: v)
    for rows in (1, 2, 4):
        with koila.micro_batch(rows):
            seen, got = run(lambda *v: lazy(*v, batch=0))
        assert seen == pytest.approx(expected, rel=1e-12)
        for a, b in zip(gradients, got):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_a_loop_over_samples_fits_half_of_plain_s_memory():
    torch.manual_seed(0)
    n, d = 32, 128
    net = nn.Sequential(nn.Linear(d, d), nn.GELU(), nn.Linear(d, d), nn.GELU(), nn.Linear(d, 4))
    x = torch.randn(n, 256, d)

    def loss(x):
        return sum(net(row).pow(2).mean() for row in x) / n

    loss(lazy(x, batch=0)).backward()
    whole = koila.last_plan()
    assert whole.n_micro_batches == 1
    expected = [p.grad.clone() for p in net.parameters()]
    net.zero_grad(set_to_none=False)
    held = whole.base_bytes
    with koila.budget(held + (whole.predicted_peak_bytes - held) // 2):
        loss(lazy(x, batch=0)).backward()
    plan = koila.last_plan()
    assert plan.n_micro_batches > 1 and not plan.gathers
    assert plan.predicted_peak_bytes <= held + (whole.predicted_peak_bytes - held) // 2
    assert plan.n_run < 1.2 * plan.n_recorded
    for a, p in zip(expected, net.parameters()):
        torch.testing.assert_close(a, p.grad, rtol=1e-4, atol=1e-6)

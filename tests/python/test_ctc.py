"""`F.ctc_loss`: each row is a sample, whether its targets are padded or lie one after another."""

import koila
import pytest
import torch
from helpers import Cut, compare, plain, run_python
from koila import lazy
from torch import nn
from torch.nn import functional as F

B, T, C, LONGEST = 6, 9, 5, 4
D = torch.float64
OF_INPUT, OF_TARGET = (9, 4, 9, 7, 8, 5), (2, 0, 4, 1, 3, 2)
# the targets of all rows, one after another
JOINED = torch.tensor([1, 2, 4, 4, 1, 3, 2, 3, 3, 1, 2, 4])


def table():
    return nn.Linear(3, C).double()


def scores(m, x):
    """[T, B, C], of x [B, T, 3]"""
    return m(x).log_softmax(-1).transpose(0, 1)


def batch():
    x, y = torch.randn(B, T, 3, dtype=D), torch.randint(1, C, (B, LONGEST))
    return x, y, torch.tensor(OF_INPUT), torch.tensor(OF_TARGET)


def padded(m, x, y, n, k, **how):
    return F.ctc_loss(scores(m, x), y, n, k, **how)


def as_transformers(m, x, y, n, k):
    """The targets and their number from labels that are padded with -100."""
    y = y.masked_fill(torch.arange(LONGEST) >= k[:, None], -100)
    is_label = y >= 0
    return F.ctc_loss(
        scores(m, x),
        y.masked_select(is_label),
        n,
        is_label.sum(-1),
        reduction="sum",
        zero_infinity=True,
    )


WAYS = {
    "mean": padded,
    "sum": lambda *a: padded(*a, reduction="sum"),
    "none": lambda *a: (padded(*a, reduction="none") * torch.arange(1.0, B + 1, dtype=D)).sum(),
    "another blank": lambda m, x, y, n, k: padded(m, x, y - 1, n, k, blank=C - 1),
    "no way": lambda m, x, y, n, k: padded(m, x, y, n.clamp(max=3), k, zero_infinity=True),
    "narrow numbers": lambda m, x, y, n, k: padded(m, x, y.int(), n.int(), k.int()),
    "lengths computed": lambda m, x, y, n, k: padded(m, x, y, (n + 1) // 2 + 3, k.clamp(max=3)),
    "lengths of the program": lambda m, x, y, n, k: padded(
        m, x, y, torch.full((B,), T), torch.full((B,), 2)
    ),
    "lengths on the host": lambda m, x, y, n, k: padded(
        m, x, y, torch.tensor(OF_INPUT, device="cpu"), torch.tensor(OF_TARGET, device="cpu")
    ),
    "a list": lambda m, x, y, n, k: padded(m, x, y, list(OF_INPUT), OF_TARGET),
    "one after another": lambda m, x, y, n, k: padded(m, x, JOINED, n, k),
    "one after another, a list": lambda m, x, y, n, k: padded(m, x, JOINED, (T,) * B, OF_TARGET),
    "as transformers do": as_transformers,
    "the module": lambda m, x, y, n, k: nn.CTCLoss(zero_infinity=True)(scores(m, x), y, n, k),
    "twice": lambda m, x, y, n, k: padded(m, x, y, n, k) + padded(m, -x, y, n, k),
}


@pytest.mark.parametrize("way", WAYS)
def test_rows_are_cut_and_no_scores_are_gathered(way):
    compare(table, batch, WAYS[way], gather_bytes_per_row=8 * LONGEST)
    plan = koila.last_plan()
    assert len(plan.loops) == 1 and plan.replay_ratio < 1.2  # labels alone are read before


def test_a_planted_fault_is_found():
    def tamper(got):
        key = next(k for k in got if k.endswith("weight"))
        return {**got, key: got[key] * (1 + 1e-9)}

    with pytest.raises(AssertionError):
        compare(table, batch, padded, tamper=tamper)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_along_time_the_loss_is_whole(n):
    """Each step of time needs the one before it."""
    torch.manual_seed(0)
    x, y, of_input, of_target = batch()
    plain_model, model = table(), table()
    model.load_state_dict(plain_model.state_dict())
    expected = padded(plain_model, x, y, of_input, of_target)
    expected.backward()
    with Cut(n):
        loss = padded(model, lazy(x), y, of_input, of_target)
        loss.backward()
    assert koila.last_plan().axis is not None
    torch.testing.assert_close(plain(loss), expected, rtol=1e-12, atol=0)
    for a, b in zip(model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-15)


def test_only_the_scores_may_be_lazy():
    x, y, of_input, of_target = batch()
    m = table()
    with koila.micro_batch(2):
        padded(m, lazy(x), y, of_input, of_target).backward()
    got = [p.grad.clone() for p in m.parameters()]
    m.zero_grad()
    padded(m, x, y, of_input, of_target).backward()
    for a, b in zip(got, m.parameters(), strict=True):
        torch.testing.assert_close(a, b.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    "broken",
    {
        "too long": lambda x, y, n, k: (x, y, n + 1, k),
        "more targets than there are": lambda x, y, n, k: (x, y, n, k + 1),
        "fewer lengths": lambda x, y, n, k: (x, y, n[1:], k),
        "fractions": lambda x, y, n, k: (x, y, n.double(), k),
        "targets of three dimensions": lambda x, y, n, k: (x, y[None], n, k),
    }.items(),
    ids=lambda item: item[0],
)
def test_what_eager_refuses_is_refused_and_nothing_is_written(broken):
    x, *rest = broken[1](*batch())
    m = table()
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        padded(m, x, *rest)
    with pytest.raises((RuntimeError, IndexError, ValueError)), koila.micro_batch(2):
        padded(m, lazy(x), *rest).backward()
    assert all(p.grad is None for p in m.parameters())


def test_the_forecast_of_a_step_is_right():
    """Ahead, in the first step, and in the next: of time and targets as long as those of speech,
    where the tables of sums are large."""
    told = run_python(
        """
        import torch, koila
        from torch import nn
        from torch.nn import functional as F
        torch.manual_seed(0)
        m = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 32))
        x, y = torch.randn(16, 200, 8), torch.randint(1, 32, (16, 40))
        k = torch.randint(20, 41, (16,)).clamp(min=1)
        k[::2] = 40
        n = torch.full((16,), 200)

        def step(x, y, n, k):
            return F.ctc_loss(m(x).log_softmax(-1).transpose(0, 1), y, n, k)

        inputs = sum(t.nbytes for t in (x, y, n, k))
        ahead = koila.plan(step, x, y, n, k, micro_batch=4).predicted_peak_bytes - inputs
        for _ in range(2):
            with koila.step_aside(False), koila.micro_batch(4):
                step(*koila.lazy(x, y, n, k)).backward()
            plan = koila.last_plan()
            most = plan.measured_peak_bytes
            print(plan.n_micro_batches, plan.predicted_peak_bytes / most, ahead / most)
        """
    )
    for line in told.splitlines():
        slices, *ratios = line.split()
        assert int(slices) == 4 and all(abs(float(r) - 1) < 0.02 for r in ratios), told


def test_the_function_can_still_be_scripted():
    def loss(scores, y, n, k):
        return F.ctc_loss(scores, y, n, k)

    lazy(torch.zeros(1))  # installs koila's
    x, *rest = batch()
    given = (scores(table(), x), *rest)
    assert torch.equal(torch.jit.script(loss)(*given), loss(*given))

"""torch.arange between lazy() and backward: a table of tokens by tokens made from it is cut along
the tokens of a sample, and in all else it is the plain tensor that was asked for."""

import copy
import pickle

import numpy as np
import pytest
import torch
from helpers import plain
from torch import nn
from torch.nn import functional as F

import koila
from koila import _core, lazy

T, C = 128, 4  # tokens of a sample, numbers of a token


def column(numbers):
    return numbers.double()[None, :, None]


USES = {
    "numpy": lambda h, n: float(n.cpu().numpy().sum()),
    "asarray": lambda h, n: float(np.asarray(n.cpu()).sum()),
    "tolist": lambda h, n: sum(n.tolist()),
    "a loop": lambda h, n: sum(int(i) for i in n),
    "a loop over items": lambda h, n: sum(n[i].item() for i in range(0, T, 7)),
    "an index": lambda h, n: h[:, n.flip(0)],
    "a permutation": lambda h, n: h[:, (n * 5) % T],
    "a mask": lambda h, n: h * (n < 40)[None, :, None],
    "a selection": lambda h, n: h[:, n < 40].sum(),
    "in place": lambda h, n: h * column(n.add_(1)),
    "an item set": lambda h, n: (n.__setitem__(3, 77), h * column(n))[1],
    "lazy data written": lambda h, n: (lambda f: (f.__setitem__(3, h[0, 3, 0]), h * column(f))[1])(
        n.double()
    ),
    "a table of sines": lambda h, n: h * torch.sin(column(n) / 9).expand(len(h), T, C),
    "a causal table": lambda h, n: torch.where(n[:, None] >= n[None], 0.1, 0.0).double() @ h,
    "a sum along it": lambda h, n: h * column(n.cumsum(0)),
    "one hot": lambda h, n: F.one_hot(n, T).double() @ h,
    "an embedding": lambda h, n: (
        h + F.embedding(n, torch.linspace(0, 1, T * C).double().view(T, C))
    ),
    "gather": lambda h, n: h.gather(1, n.flip(0)[None, :, None].expand(len(h), T, C)),
    "scatter": lambda h, n: torch.zeros_like(h).scatter(
        1, n.flip(0)[None, :, None].expand(len(h), T, C), h
    ),
    "an if": lambda h, n: h if n[3] == 3 else -h,
    "all": lambda h, n: h if (n >= 0).all() else -h,
    "a copy": lambda h, n: h * column(copy.deepcopy(n)),
    "pickled": lambda h, n: h * column(pickle.loads(pickle.dumps(n))),
    "its memory": lambda h, n: float(n.data_ptr() != 0),
    "a gradient": lambda h, n: h * column(n).requires_grad_(),
    "split": lambda h, n: torch.cat([h[:, c] for c in n.split(32)], 1),
    "many pieces": lambda h, n: h * column(torch.cat([n[i : i + 1] for i in range(T)])),
    "a bound": lambda h, n: torch.cat([h[:, : n[64]], h[:, n[64] :]], 1),
    "vmap": lambda h, n: h * column(torch.vmap(lambda i: i * 2)(n)),
}


@pytest.mark.parametrize(
    ("samples", "cut", "axes"),
    [
        (1, None, "any"),
        (1, 16, "other"),
        (1, 7, "other"),
        (3, None, "any"),
        (3, 2, "batch"),  # rows
        (3, 7, "other"),
        (3, 16, "both"),
    ],
)
@pytest.mark.parametrize("use", USES)
def test_numbers_of_a_sample_s_tokens_are_used_like_plain_ones(use, samples, cut, axes):
    torch.manual_seed(3)
    x = torch.randn(samples, T, C, dtype=torch.float64)

    def run(wrap):
        weight = torch.eye(C, dtype=torch.float64).requires_grad_()
        h = wrap(x) @ weight
        out = USES[use](h, torch.arange(T))
        (h * out).square().mean().backward()
        return plain(out), weight.grad

    expected, gradient = run(lambda v: v)
    before = _core.configure(micro_batch=cut, axes=axes)
    try:
        got, got_gradient = run(lazy)
    finally:
        _core.configure(micro_batch=before["micro_batch"], axes=before["axes"])
    tolerance = 1e-12 if cut else 0
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got_gradient, gradient, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("sample", "make"),
    [
        ((T, T, C), lambda: torch.arange(T)),  # perhaps the numbers of the rows
        ((T, C), lambda: torch.arange(T)),
        ((1, T, C), lambda: torch.arange(T - T // 16 - 1)),
        ((1, T, C), lambda: torch.arange(T + T // 16 + 1)),
        ((1, T, C), lambda: torch.arange(C)),  # a table of so few is small
        ((1, T, C), lambda: torch.arange(T, dtype=torch.float32)),
        ((1, T, C), lambda: torch.arange(0, 2 * T, 2)),
        ((1, T, C), lambda: torch.arange(T, requires_grad=False, out=None, device="meta")),
    ],
)
def test_other_numbers_are_plain(sample, make):
    x = lazy(torch.randn(sample))
    assert not _core.is_lazy(make())
    del x
    assert not _core.is_lazy(torch.arange(T))


def test_numbers_that_are_kept_for_the_next_step_stay_right():
    x = torch.randn(1, T, C)
    model = nn.Linear(C, C)
    kept = []
    for _ in range(3):
        h = lazy(x)
        assert not kept or not _core.is_lazy(kept[0]) or kept[0].tolist() == list(range(T))
        kept.append(torch.arange(T))
        (model(h) * kept[0][None, :, None]).sum().backward()
    assert all(torch.equal(plain(n), torch.arange(T)) for n in kept)


def test_a_step_that_reads_them_is_planned_ahead():
    model, x = nn.Linear(C, C), torch.randn(1, T, C)

    def step(x):
        numbers = torch.arange(T)
        sign = 1 if (numbers[1:] > numbers[:-1]).all() else -1
        (sign * model(x)).sum().backward()

    assert koila.plan(step, x).n_recorded > 2


def written_in_a_loop(x, n):
    """Known data in a loop over samples, into the rows of a buffer and into a table."""
    rows, table = torch.zeros(len(x), T), torch.arange(T)
    for i in range(len(x)):
        rows[i] = 1.0
        rows[i, : n[i]] = 2.0
        table[n[i]] = 0
    return (x * rows[..., None] * table[None, :, None]).square().sum()


@pytest.mark.parametrize("samples", [1, 3])
def test_known_data_is_written_into_numbers_and_rows_as_it_is_without_koila(samples):
    x = torch.randn(samples, T, C).double()
    weight = torch.ones(C).double().requires_grad_()
    written_in_a_loop(x * weight, [9] * samples).backward()
    expected, weight.grad = weight.grad, None
    for cut, axes in ((None, "any"), (1, "batch"), (7, "other")):
        before = _core.configure(micro_batch=cut, axes=axes)
        try:
            written_in_a_loop(lazy(x) * weight, [9] * samples).backward()
        finally:
            _core.configure(micro_batch=before["micro_batch"], axes=before["axes"])
        torch.testing.assert_close(weight.grad, expected, rtol=1e-12, atol=1e-12)
        weight.grad = None


class Biased(nn.Module):
    """Attention with a learned number for each distance between tokens."""

    def __init__(self):
        super().__init__()
        self.inner, self.distances = nn.Linear(C, 3 * C).double(), nn.Embedding(T, 2).double()

    def forward(self, x):
        q, k, v = self.inner(x).view(len(x), T, 3, 2, C // 2).permute(2, 0, 3, 1, 4)
        numbers = torch.arange(T)
        bias = self.distances((numbers[:, None] - numbers[None]).abs()).permute(2, 0, 1)[None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


@pytest.mark.about_the_cpu("its peaks are counted to the byte")
@pytest.mark.parametrize(("samples", "axes"), [(1, "other"), (2, "other")])
def test_a_learned_table_of_positions_is_never_whole(samples, axes):
    model, x = Biased(), torch.randn(samples, T, C).double()
    model(x).square().mean().backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    before = _core.configure(micro_batch=8, axes=axes)
    try:
        model(lazy(x)).square().mean().backward()
    finally:
        _core.configure(micro_batch=before["micro_batch"], axes=before["axes"])
    plan = koila.last_plan()
    assert plan.axis.size == T
    assert plan.measured_peak_bytes - plan.base_bytes < T * T * 2 * 8
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[n], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n", [T - T // 16, T - 1, T + 1, T + T // 16])
def test_the_numbers_of_a_few_tokens_more_or_less_are_lazy_too(n):
    x = lazy(torch.randn(1, T, C))
    assert _core.is_lazy(torch.arange(n)) and len(x) == 1
    assert torch.equal(plain(torch.arange(n)), plain(torch.arange(2 * T))[:n])

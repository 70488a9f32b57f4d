"""The oracle itself: planted faults must be caught, or every other test could pass on wrong
numbers."""

import pytest
import torch
from helpers import SLICES, WHOLE, assert_same, compare, compare_programs, rows, step_program
from torch import nn
from torch.nn import functional as F

import koila


def mlp():
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def data():
    return torch.randn(6, 5, dtype=torch.float64), torch.randint(0, 3, (6,))


def loss(model, x, y):
    return F.cross_entropy(model(x), y)


def test_the_unharmed_program_passes():
    compare(mlp, data, loss)


def test_a_gradient_off_by_one_part_in_1e10_is_caught():
    def tamper(got):
        return {k: v * (1 + 1e-10) if k == "grad:0.weight" else v for k, v in got.items()}

    with pytest.raises(AssertionError, match=r"grad:0\.weight"):
        compare(mlp, data, loss, tamper=tamper)


def test_a_doubled_gradient_and_a_missing_gradient_are_caught():
    with pytest.raises(AssertionError, match="grad:2.bias"):
        compare(mlp, data, loss, tamper=lambda got: {**got, "grad:2.bias": 2 * got["grad:2.bias"]})
    with pytest.raises(AssertionError, match="grad:2.bias"):
        compare(mlp, data, loss, tamper=lambda got: {**got, "grad:2.bias": None})


def test_one_bit_is_caught_when_the_slice_is_the_whole():
    def tamper(got):
        g = got["grad:0.weight"].clone()
        g[0, 0] = torch.nextafter(g[0, 0], g[0, 0] + 1)
        return {**got, "grad:0.weight": g}

    with pytest.raises(AssertionError, match="not bit-equal"):
        compare(mlp, data, loss, slices=(WHOLE,), tamper=tamper)


def test_a_missing_row_is_caught():
    torch.manual_seed(7)
    program = step_program(mlp, data, loss)
    dropping = lambda *v: koila.lazy(*(t[:-1] for t in v))  # noqa: E731

    def fault(wrap):
        probe = wrap(torch.zeros(6))
        return program(dropping if isinstance(probe, koila.LazyTensor) else wrap)

    with pytest.raises(AssertionError, match="loss"):
        compare_programs(fault, 6, split=False)


def test_a_changed_random_state_is_caught():
    def program(wrap):
        x = wrap(torch.ones(6, dtype=torch.float64))
        if isinstance(x, koila.LazyTensor):
            torch.rand(1)
        y = x.sum()
        return {
            "value:y": y.detach().clone() if not isinstance(y, koila.LazyTensor) else koila.run(y)
        }

    with pytest.raises(AssertionError, match="random state"):
        compare_programs(program, 6)


def test_nan_in_another_place_is_caught():
    a, b = torch.tensor([1.0, float("nan")]), torch.tensor([float("nan"), 1.0])
    for tol in (0, 1e-3):
        with pytest.raises(AssertionError):
            assert_same({"x": a}, {"x": b}, tol)
        assert_same({"x": a}, {"x": a.clone()}, tol)


@pytest.mark.parametrize("batch", [5, 6, 7, 8, 12])
def test_slice_kinds_are_what_they_say(batch):
    sizes = {kind: rows(kind, batch) for kind in SLICES}
    assert sizes["whole"] == batch and sizes["one"] == 1
    assert batch % sizes["even"] == 0 and sizes["even"] < batch
    assert batch % sizes["ragged"] != 0

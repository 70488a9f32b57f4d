"""Modules and functions that run as they are: their forward once a slice, and compiled ones with
their compiled kernels."""

import pytest
import torch
from conftest import DEVICE
from torch import nn
from torch.nn import functional as F

import koila
from koila import lazy

B = 12


class Counts(nn.Module):
    """Counts its calls: with a graph, and without."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls = inner, []

    def forward(self, x):
        self.calls.append("graph" if torch.is_grad_enabled() else "none")
        return self.inner(x)


def mlp(hidden=64):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, hidden), nn.GELU(), nn.Linear(hidden, 32), nn.Tanh()
    ).double()


def batch(rows=B):
    torch.manual_seed(1)
    return torch.randn(rows, 32).double(), torch.randn(rows, 32).double()


def gradients(model, step):
    model.zero_grad()
    step().backward()
    return [p.grad.clone() for p in model.parameters()]


def assert_alike(found, expected):
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e, rtol=1e-12, atol=1e-14)


def test_forward_runs_once_a_slice_where_its_backward_is_in_the_same_loop():
    model = Counts(mlp())
    opaque = koila.opaque(model)
    x, y = batch()
    expected = gradients(model, lambda: F.mse_loss(model(x), y))
    for _ in range(2):
        with koila.micro_batch(4):
            a, b = lazy(x, y)
            loss = F.mse_loss(opaque(a), b)
            model.calls.clear()
            assert_alike(gradients(model, lambda loss=loss: loss), expected)
        assert model.calls == ["graph"] * 3


def test_a_loop_that_has_no_backward_runs_the_forward_without_a_graph():
    """A contrastive loss: one encoder runs for its embeddings alone, and again for its backward."""
    model = Counts(mlp())
    opaque = koila.opaque(model)

    def loss(f, x, y):
        scores = F.normalize(f(x), dim=1) @ F.normalize(f(y), dim=1).t()
        return F.cross_entropy(scores, torch.arange(B, device=DEVICE))

    x, y = batch()
    expected = gradients(model, lambda: loss(model, x, y))
    with koila.micro_batch(4):
        lazy_loss = loss(opaque, *lazy(x, y))
        model.calls.clear()
        assert_alike(gradients(model, lambda: lazy_loss), expected)
    # two encoders of three slices have a graph each once; what runs before them has none
    assert model.calls.count("graph") == 6 and model.calls.count("none") > 0


def test_a_second_backward_through_a_retained_graph_runs_the_module_again():
    model = Counts(mlp())
    opaque = koila.opaque(model)
    x, y = batch()
    expected = gradients(model, lambda: F.mse_loss(model(x), y))
    with koila.micro_batch(4):
        a, b = lazy(x, y)
        loss = F.mse_loss(opaque(a), b)
        loss.backward(retain_graph=True)
        model.zero_grad()
        assert_alike(gradients(model, lambda: loss), expected)


def test_a_value_that_is_read_in_the_middle_leaves_the_gradients_as_they_are():
    model = mlp()
    opaque = koila.opaque(model)
    x, y = batch()
    expected = gradients(model, lambda: F.mse_loss(model(x), y))

    def step():
        a, b = lazy(x, y)
        out = opaque(a)
        assert torch.allclose(out.sum().torch(), model(x).sum())
        return F.mse_loss(out, b)

    with koila.micro_batch(4):
        assert_alike(gradients(model, step), expected)


def test_dropout_in_a_slice_is_the_same_forward_and_backward():
    """Its gradient is that of the mask which made its result."""
    drop = koila.opaque(nn.Dropout(0.5))
    x, _ = batch()
    scale = torch.ones((), dtype=x.dtype, device=x.device, requires_grad=True)
    with koila.micro_batch(4):
        out = drop(lazy(x) * scale)
        out.sum().backward()
    assert scale.grad.isfinite()
    w = torch.ones_like(x, requires_grad=True)
    with koila.micro_batch(4):
        made = []
        drop.module.register_forward_hook(lambda m, i, o: made.append(o.detach().clone()))
        drop(lazy(x) * w[:1].expand(1, 32)).sum().backward()
    whole = torch.cat(made[-3:])
    assert torch.allclose(w.grad[0], whole.sum(0))


@pytest.mark.about_the_cpu("predicted bytes are compared with those of the CPU's allocator")
@pytest.mark.parametrize("rows", [2, 4, 12])
def test_what_waits_for_the_backward_is_planned_with_from_the_second_step_on(rows):
    model = mlp(1024)
    opaque = koila.opaque(model)
    x, y = batch()
    for _ in range(3):
        with koila.micro_batch(rows):
            a, b = lazy(x, y)
            F.mse_loss(opaque(a), b).backward()
    plan = koila.last_plan()
    assert abs(plan.predicted_peak_bytes / plan.measured_peak_bytes - 1) <= 0.02


def test_a_result_that_the_graph_shares_is_not_overwritten():
    """tanh's backward reads its result, which the step goes on to write in place."""
    model = mlp()
    opaque = koila.opaque(model)
    x, y = batch()
    expected = gradients(model, lambda: F.mse_loss(model(x).mul(2), y))
    for _ in range(3):
        with koila.micro_batch(4):

            def step():
                a, b = lazy(x, y)
                out = opaque(a).clone()
                return F.mse_loss(out.mul_(2), b)

            assert_alike(gradients(model, step), expected)

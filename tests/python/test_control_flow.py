"""torch.cond, while_loop, map and scan of lazy tensors equal eager's; what cannot be recorded is
refused in koila's words."""

import pytest
import torch
from helpers import SLICES, plain, rows
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention

import koila
from koila import lazy

B = 6
is_recorded = pytest.mark.skipif(
    not hasattr(torch._higher_order_ops.utils, "_hop_compile_and_call"),
    reason="before torch 2.13 control flow on lazy tensors ends in torch's compiler, by name",
)


def branch(x, w):
    return torch.cond(x.sum() > 0, lambda a: (a @ w).tanh(), lambda a: a @ w, (x,))


def other_branch(x, w):
    return torch.cond(x.sum() > 1e9, lambda a, b: (a @ b).tanh(), lambda a, b: a @ b, (x, w))


def branch_on_a_plain_value(x, w):
    return torch.cond(w.sum() < 1e9, lambda: x @ w, lambda: x * 2)


def several_results(x, w):
    a, (b, c) = torch.cond(
        x.mean() > 0, lambda t: (t + 1, [t * 2, t @ w]), lambda t: (t * 1, [t * 3, t @ w]), (x,)
    )
    return a + b * c


def loop(x, w):
    return while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a @ w), (torch.tensor(0), x))[1]


def loop_that_does_not_run(x, w):
    return while_loop(lambda i, a: i < 0, lambda i, a: (i + 1, a @ w), (torch.tensor(0), x))[1]


def loop_until_a_value(x, w):
    return while_loop(lambda a: a.norm() < 50, lambda a: (a * 1.5,), (x,))[0]


def mapped(x, w):
    return torch_map(lambda row, m: (row @ m).sin(), x, w)


def mapped_trees(x, w):
    out = torch_map(lambda t: {"a": t[0] + t[1], "b": t[0].exp()}, [x, x * 2])
    return out["a"] * out["b"]


def scanned(x, w):
    last, out = scan(lambda c, r: ((c + r) * 0.5, c.sin()), torch.zeros(4, dtype=x.dtype), x)
    return out + last


def scanned_over_features(x, w):
    return scan(lambda c, r: (c + r, c * r), x[:, 0] * 1, x, dim=1, reverse=True)[1]


def associative(x, w):
    return associative_scan(lambda a, b: a + b, x, 0, combine_mode="generic")


RIGHT = {
    f.__name__: f
    for f in (
        branch, other_branch, branch_on_a_plain_value, several_results, loop,
        loop_that_does_not_run, loop_until_a_value, mapped, mapped_trees, scanned,
        scanned_over_features, associative,
    )
}  # fmt: skip
WITHOUT_GRADIENT = {"loop", "loop_until_a_value", "loop_that_does_not_run"}


def program(f, wrap, grad):
    torch.manual_seed(0)
    w = torch.randn(4, 4, dtype=torch.float64, requires_grad=grad)
    x = wrap(torch.randn(B, 4, dtype=torch.float64) + 0.5)
    out = f(x, w)
    if out.requires_grad:
        out.square().mean().backward()
    return [plain(out.detach()), *([w.grad] if w.grad is not None else [])]


@is_recorded
@pytest.mark.parametrize("name", RIGHT)
def test_control_flow_equals_eager(name):
    f, grad = RIGHT[name], name not in WITHOUT_GRADIENT
    expected = program(f, lambda t: t, grad)
    for slices in SLICES:
        with koila.micro_batch(rows(slices, B)):
            got = program(f, lazy, grad)
        for e, g in zip(expected, got, strict=True):
            assert torch.allclose(e, g, rtol=1e-12, atol=1e-12)


@is_recorded
def test_what_a_branch_records_is_sliced():
    with koila.strict(), koila.micro_batch(2):
        program(several_results, lazy, True)
        assert koila.last_plan().n_micro_batches == 3


def attend(x):
    q = x.view(-1, 1, 2, 2)
    return flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s * 0.5)


def test_flex_attention_is_refused_with_what_to_do():
    with pytest.raises(koila.UnsupportedError, match=r"flex_attention\(\).*x\.torch\(\)"):
        attend(lazy(torch.randn(B, 4)))


def test_what_the_refusal_says_works():
    x = torch.randn(B, 4)
    assert torch.allclose(attend(lazy(x).torch()), attend(x))


@is_recorded
def test_an_operator_that_is_not_known_is_refused():
    from torch._higher_order_ops import utils

    x = lazy(torch.randn(B, 4))
    for call in (
        lambda: utils._hop_compile_and_call(torch.sin, (x,)),
        lambda: torch.ops.higher_order.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
    ):
        with pytest.raises(koila.UnsupportedError, match=r"higher-order.*x\.torch\(\)"):
            call()


@is_recorded
def test_torch_goes_its_own_way_without_lazy_tensors():
    x = torch.ones(B, 4)
    held = lazy(x) * 2
    assert torch.equal(torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), x.sin())
    assert torch.equal(torch_map(lambda r: r + 1, x), x + 1)
    del held

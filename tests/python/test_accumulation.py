"""Where nobody watches, koila sets `.grad` itself, as torch's engine would. Claims: what is left is
what the engine leaves, bit by bit and stride by stride; who watches is called; what koila does not
know, the engine does."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import koila
from koila import _backward, _core, lazy


@pytest.fixture
def set_by_koila(monkeypatch):
    """[was it koila, ...] of each backward."""
    found = []

    def set_at_once(*args, right=_backward._set_at_once):
        found.append(right(*args))
        return found[-1]

    monkeypatch.setattr(_backward, "_set_at_once", set_at_once)
    return found


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)
    )


def images():
    torch.manual_seed(1)
    return torch.randn(6, 3, 6, 6), torch.randint(0, 5, (6,))


def backward(model, before=lambda loss: None):
    x, y = lazy(*images())
    with koila.step_aside(False):
        loss = F.cross_entropy(model(x), y)
        before(loss)
        loss.backward()


def left(model):
    return [(p.grad.clone(), p.grad.stride(), p.grad.requires_grad) for p in model.parameters()]


def are_equal(a, b):
    return all(torch.equal(x[0], y[0]) and x[1:] == y[1:] for x, y in zip(a, b, strict=True))


CASES = {
    "as made": (lambda m: m, True),
    "channels last": (lambda m: m.to(memory_format=torch.channels_last), True),
    "a gradient already": (lambda m: (backward(m), m)[1], False),
    "a frozen layer": (lambda m: (m[0].requires_grad_(False), m)[1], True),
    "a transposed weight": (
        lambda m: (
            setattr(m[4], "weight", nn.Parameter(torch.randn(64, 5).t().mul(0.1))),
            m,
        )[1],
        None,
    ),
    "an expanded weight": (
        lambda m: (setattr(m[4], "weight", nn.Parameter(torch.randn(5, 1).expand(5, 64))), m)[1],
        False,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_left_is_what_the_engine_leaves(name, set_by_koila, monkeypatch):
    change, is_koila = CASES[name]

    def left_in(model):
        del set_by_koila[:]
        model = change(model)
        backward(model)
        frozen = [p for p in model.parameters() if p.grad is None]
        assert all(not p.requires_grad for p in frozen)
        for p in frozen:
            p.grad = torch.zeros_like(p)
        return left(model)

    mine = left_in(network())
    assert is_koila is None or set_by_koila[-1] == is_koila
    monkeypatch.setattr(_core, "accumulate", lambda *_: False)
    assert are_equal(mine, left_in(network()))
    assert not any(set_by_koila)


def test_a_stride_that_means_nothing_needs_no_engine(set_by_koila, monkeypatch):
    """The weight of one column has a stride along its one entry that its gradient has not."""

    def left_in():
        torch.manual_seed(0)
        w = nn.Parameter(torch.empty_strided((5, 1), (1, 7)).copy_(torch.randn(5, 1)))
        with koila.step_aside(False):
            (lazy(torch.randn(6, 5)) @ w).square().sum().backward()
        assert w.grad.stride() != w.stride()
        return w.grad, w.grad.stride()

    mine = left_in()
    assert set_by_koila == [True]
    monkeypatch.setattr(_core, "accumulate", lambda *_: False)
    engines = left_in()
    assert torch.equal(mine[0], engines[0]) and mine[1] == engines[1]


def of_the_weight(model):
    return model[4].weight


def node_of_the_weight(model):
    """It lives as long as somebody holds it."""
    weight = of_the_weight(model)
    with torch.enable_grad():
        return weight.view_as(weight).grad_fn.next_functions[0][0]


def watch_node(model, seen):
    node = node_of_the_weight(model)
    node.register_hook(lambda *_: seen.append("node"))
    return node


def watch_before_node(model, seen):
    node = node_of_the_weight(model)
    node.register_prehook(lambda gradients: seen.append("before"))
    return node


WATCHERS = {
    "a tensor hook": lambda m, seen: of_the_weight(m).register_hook(lambda g: seen.append(g)),
    "a hook for afterwards": lambda m, seen: of_the_weight(m).register_post_accumulate_grad_hook(
        lambda p: seen.append(p.grad)
    ),
    "a hook of the node": watch_node,
    "a hook before the node": watch_before_node,
    "a hook of several tensors": lambda m, seen: torch.autograd.graph.register_multi_grad_hook(
        list(m.parameters()), lambda gs: seen.append(gs)
    ),
}


@pytest.mark.parametrize("name", WATCHERS)
def test_who_watches_is_called_once(name, set_by_koila):
    model, seen = network(), []
    backward(model)
    assert set_by_koila == [True]
    model.zero_grad()
    kept = WATCHERS[name](model, seen)
    backward(model)
    assert len(seen) == 1 and set_by_koila == [True, False] and kept is not None


def test_a_hook_that_is_registered_while_the_backward_runs_is_called(set_by_koila):
    model, seen, kept = network(), [], []

    def before(loss):
        loss.register_hook(lambda g: kept.append(watch_node(model, seen)))

    backward(model, before)
    assert seen == ["node"] and set_by_koila == [False]


def test_a_backward_under_anomaly_detection_is_looked_at_by_torch(set_by_koila):
    model = network()
    with torch.no_grad():
        model[4].bias[0] = float("nan")
    with torch.autograd.set_detect_anomaly(True), pytest.raises(RuntimeError, match="nan"):
        backward(model)
    assert not any(set_by_koila)


def test_a_profiler_sees_the_accumulation(set_by_koila):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        backward(network())
    assert any("AccumulateGrad" in e.name for e in profile.events()) and set_by_koila == [False]


def test_a_gradient_that_somebody_else_owns_is_not_shared():
    w = nn.Parameter(torch.ones(3))
    x = lazy(torch.ones(4, 3))
    with koila.step_aside(False):
        out = (x * w).sum()
        (mine,) = torch.autograd.grad(out, w, retain_graph=True)
        out.backward()
    w.grad.mul_(0)
    assert mine.tolist() == [4, 4, 4]


def test_two_leaves_with_one_gradient_get_memory_of_their_own():
    a, b = (nn.Parameter(torch.ones(3)) for _ in range(2))
    with koila.step_aside(False):
        (lazy(torch.ones(4, 3)) * (a + b)).sum().backward()
    a.grad.mul_(0)
    assert b.grad.tolist() == [4, 4, 4]


def test_where_one_leaf_needs_the_engine_it_does_all(set_by_koila):
    model = network()
    model[4].bias.grad = torch.ones(5)
    backward(model)
    other = network()
    backward(other)
    assert set_by_koila == [False, True]
    assert torch.equal(model[4].bias.grad, other[4].bias.grad + 1)
    assert torch.equal(model[0].weight.grad, other[0].weight.grad)


def test_a_subclass_sees_its_own_gradient_set():
    class Loud(torch.Tensor):
        seen: list = []

        @classmethod
        def __torch_function__(cls, f, types, args=(), kwargs=None):
            cls.seen.append(getattr(f, "__name__", f))
            return super().__torch_function__(f, types, args, kwargs or {})

    w = torch.ones(3).as_subclass(Loud).requires_grad_()
    with koila.step_aside(False):
        (lazy(torch.ones(4, 3)) * w).sum().backward()
    assert w.grad.tolist() == [4, 4, 4]

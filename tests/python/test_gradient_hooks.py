"""Hooks of gradients are called as often, in the order and with the gradients that eager calls them
with: those of several tensors at once, those of lazy leaves, and those that are told of no
gradient."""

import pytest
import torch

import koila
from koila import lazy

SLICES = [None, 2]


def numbers(seed, *shape):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def plain(t):
    t = koila.run(t) if isinstance(t, torch.Tensor) else t
    return t.detach().clone() if isinstance(t, torch.Tensor) else t


def same(a, b):
    if isinstance(a, (list, tuple)):
        return (
            isinstance(b, (list, tuple))
            and len(a) == len(b)
            and all(same(p, q) for p, q in zip(a, b))
        )
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.allclose(a, b, rtol=1e-12, atol=1e-12)
    return a == b


def in_slices(program, rows):
    with koila.micro_batch(rows):
        return program(lazy)


# ---- torch.autograd.graph.register_multi_grad_hook

TENSORS = {
    "a leaf and an inner tensor": "w y",
    "an inner tensor and a leaf": "y w",
    "leaves": "w b",
    "inner tensors": "y z",
    "all": "w b h y z",
    "one that is not met": "w u y",
    "an inner one that is not met": "q w y",
    "one twice": "w w y",
    "a leaf whose gradient is first": "h b",
}


def several(names, mode, backwards=2):
    def program(wrap):
        t = {n: numbers(i, 4, 4).requires_grad_() for i, n in enumerate("wu")}
        t["b"] = numbers(2, 4).requires_grad_()
        x = wrap(numbers(3, 6, 4))
        t["h"] = x @ t["w"]
        t["y"] = t["h"].tanh() + t["b"]
        t["z"] = t["h"].sin()
        t["q"] = t["z"] * 1
        calls = []

        def hook(gradients):
            several = gradients if isinstance(gradients, (list, tuple)) else [gradients]
            calls.append([plain(g) for g in several])

        handle = torch.autograd.graph.register_multi_grad_hook(
            [t[n] for n in names.split()], hook, mode=mode
        )
        for _ in range(backwards):
            (t["y"] ** 2 + t["z"]).sum().backward(retain_graph=True)
        handle.remove()
        (t["y"] ** 2 + t["z"]).sum().backward()
        return calls, t["w"].grad, t["b"].grad

    return program


@pytest.mark.parametrize("rows", SLICES)
@pytest.mark.parametrize("mode", ["all", "any"])
@pytest.mark.parametrize("which", TENSORS)
def test_a_hook_of_several_tensors_is_called_once(which, mode, rows):
    program = several(TENSORS[which], mode)
    expected = program(lambda t: t)
    assert len(expected[0]) == 2
    assert same(expected, in_slices(program, rows))


@pytest.mark.parametrize("rows", SLICES)
def test_a_hook_of_several_tensors_that_raises_changes_nothing(rows):
    w, x = numbers(0, 4, 4).requires_grad_(), numbers(1, 6, 4)

    def hook(gradients):
        raise ValueError("no")

    with koila.micro_batch(rows):
        y = lazy(x) @ w
        handle = torch.autograd.graph.register_multi_grad_hook([w, y], hook)
        with pytest.raises(ValueError, match="no"):
            y.sin().sum().backward()
        assert w.grad is None
        handle.remove()
        (lazy(x) @ w).sin().sum().backward()
    twin = w.detach().clone().requires_grad_()
    (x @ twin).sin().sum().backward()
    assert same(twin.grad, w.grad)


def test_a_backward_of_torch_in_such_a_hook_is_one_of_its_own():
    def program(wrap):
        w, v = numbers(0, 4, 4).requires_grad_(), numbers(1, 4, 4).requires_grad_()
        calls = []

        def hook(gradients):
            calls.append([plain(g) for g in gradients])
            if len(calls) == 1:
                with torch.enable_grad():
                    (v * 2).sum().backward()

        y = wrap(numbers(2, 6, 4)) @ w @ v
        torch.autograd.graph.register_multi_grad_hook([w, v], hook)
        y.sin().sum().backward()
        return calls, w.grad, v.grad

    expected = program(lambda t: t)
    assert len(expected[0]) == 2
    assert same(expected, in_slices(program, 2))


# ---- leaves that are lazy

LEAVES = {
    "the batch itself": lambda x, w: x.requires_grad_(),
    "a lazy leaf": lambda x, w: (x * 1).requires_grad_(),
    "a parameter": lambda x, w: w,
}


def watched(leaf_of, kinds, backwards=3, create=False):
    def program(wrap):
        log = []
        w, x = numbers(0, 4, 4).requires_grad_(), wrap(numbers(1, 6, 4))
        leaf = leaf_of(x, w)

        def note(name):
            def hook(*args):
                g = args[0][0] if isinstance(args[0], tuple) else args[0]
                log.append((name, plain(g), plain(leaf.grad)))

            return hook

        node = leaf.view_as(leaf).grad_fn.next_functions[0][0]
        if "tensor" in kinds:
            leaf.register_hook(note("tensor"))
        if "post" in kinds:
            leaf.register_post_accumulate_grad_hook(note("post"))
        if "node" in kinds:
            node.register_prehook(note("before the node"))
            node.register_hook(lambda given, got: log.append(("node", len(given), len(got))))
        first = None
        for _ in range(backwards):
            product = x @ w if leaf is w else leaf @ w
            product.sin().sum().backward(create_graph=create)
            first = leaf.grad if first is None else first
        return log, first is leaf.grad, plain(first), plain(leaf.grad), w.grad

    return program


@pytest.mark.parametrize("rows", SLICES)
@pytest.mark.parametrize("kinds", ["", "tensor", "post", "node", "tensor post node"])
@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.filterwarnings("ignore")
def test_gradients_of_leaves_are_accumulated_as_eager_does(leaf, kinds, rows):
    """In place, where the first one stays the object it is, and with all hooks."""
    program = watched(LEAVES[leaf], kinds)
    expected = program(lambda t: t)
    assert len(expected[0]) == 3 * (len(kinds.split()) + ("node" in kinds)) and expected[1]
    assert same(expected, in_slices(program, rows))


@pytest.mark.parametrize("rows", SLICES)
@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.filterwarnings("ignore")
def test_gradients_with_a_graph_of_their_own_are_added_out_of_place(leaf, rows):
    program = watched(LEAVES[leaf], "", create=True)
    expected = program(lambda t: t)
    assert not expected[1]
    assert same(expected, in_slices(program, rows))


@pytest.mark.parametrize("rows", SLICES)
def test_a_gradient_that_the_user_set_is_added_to_in_place(rows):
    def program(wrap):
        leaf = (wrap(numbers(1, 6, 4)) * 1).requires_grad_()
        mine = numbers(2, 6, 4)
        leaf.grad = mine
        (leaf @ numbers(0, 4, 4)).sin().sum().backward()
        return plain(mine), plain(leaf.grad)

    assert same(program(lambda t: t), in_slices(program, rows))


@pytest.mark.parametrize("rows", SLICES)
def test_a_lazy_leafs_gradient_lies_as_the_leaf_does(rows):
    def program(wrap):
        leaf = (wrap(numbers(1, 6, 4)) * 1).requires_grad_()
        (leaf.t() * numbers(0, 4, 6)).sin().sum().backward()
        return leaf.grad.stride(), plain(leaf.grad)

    assert same(program(lambda t: t), in_slices(program, rows))


# ---- no gradient at all


class _First(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


@pytest.mark.parametrize("rows", SLICES)
@pytest.mark.parametrize("with_another", [False, True])
def test_a_hook_is_told_that_there_is_no_gradient(with_another, rows):
    def program(wrap):
        w, v = numbers(0, 4, 4).requires_grad_(), numbers(1, 4, 4).requires_grad_()
        told = []
        w.register_hook(lambda g: told.append(plain(g)))
        x = wrap(numbers(2, 6, 4))
        _First.apply(x @ v if with_another else x, w).sin().sum().backward()
        return told, w.grad, v.grad

    expected = program(lambda t: t)
    assert expected[0] == [None]
    assert same(expected, in_slices(program, rows))


# ---- writes after the step


@pytest.mark.parametrize("rows", SLICES)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("views", [0, 1, 2])
def test_what_became_a_view_of_itself_can_be_written_after_the_step(views, grad, rows):
    """`unsqueeze_()` leaves no tensor that is the base; the base is kept for the write."""

    def program(wrap):
        w = numbers(0, 4, 4).requires_grad_()
        x = wrap(numbers(1, 6, 4))
        with torch.set_grad_enabled(grad):
            h = x @ w
            others = [h.view(-1), h[1:3]][:views]
            h.unsqueeze_(0)
        ((h if grad else x @ w).sin()).sum().backward()
        with torch.no_grad():
            h.mul_(2)
        return plain(h), [plain(o) for o in others], w.grad

    assert same(program(lambda t: t), in_slices(program, rows))


@pytest.mark.parametrize("rows", SLICES)
@pytest.mark.parametrize("view", ["none", "gone", "kept"])
@pytest.mark.parametrize("write", [lambda h: h.mul_(2), lambda h: h.t_().mul_(2)])
def test_a_write_after_the_step_that_a_plain_view_would_not_see_is_refused(write, view, rows):
    def program(wrap):
        w, x = numbers(0, 4, 4).requires_grad_(), wrap(numbers(1, 6, 4))
        h = x @ w
        h.sin().sum().backward()
        h = h.detach()
        row = None if view == "none" else h[0]
        if view == "gone":
            row = plain(row)
        write(h)
        return plain(h), None if row is None else plain(row)

    expected = program(lambda t: t)
    if view == "kept":
        with pytest.raises(koila.UnsupportedError, match="view"):
            in_slices(program, rows)
    else:
        assert same(expected, in_slices(program, rows))


@pytest.mark.parametrize("rows", SLICES)
def test_a_tensor_that_lies_where_a_freed_one_lay_is_another(rows):
    """Addresses are used again at once, also of what a step that has run let go of."""
    with koila.micro_batch(rows):
        for _ in range(20):
            leaf = (lazy(numbers(1, 6, 4)) * 1).requires_grad_()
            (leaf @ numbers(0, 4, 4)).sum().backward()
            gradient = leaf.grad
            torch.add(numbers(2, 6, 4), 1, out=gradient)
            total = gradient.sin().sum() + leaf.sin().sum()
            total.backward()
            expected = numbers(2, 6, 4) + 1 + numbers(1, 6, 4).cos()
            assert same(expected, plain(gradient))


def test_a_backward_is_not_known_by_one_whose_saved_tensors_were_written_behind():
    """The same graph, once with a write by `data`, which torch does not see, and once with one of
    what detach() gives, which it refuses."""
    w = numbers(0, 4, 4).requires_grad_()

    def step(alias):
        h = lazy(numbers(1, 6, 4)) @ w
        y = h.sin()
        alias(h).mul_(2)
        y.sum().backward()

    for _ in range(2):
        step(lambda h: h.data)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(lambda h: h.detach())

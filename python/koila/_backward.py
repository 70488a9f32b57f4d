"""Backward through lazy values.

`torch.autograd.backward` and `torch.autograd.grad` end in one function, `_engine_run_backward`,
which is replaced at import. A backward that meets nothing lazy goes on to torch's own at
once (which ones do is decided in whose.c); of the others:

1. Autograd itself takes the gradients of the *leaves* of the graph. Nothing is computed: operators
   on lazy values are recorded. Tensor hooks of real leaves wait for pass 2.
2. All gradients are made concrete in one run (sliced as planned), together with the values that the
   user still holds.
3. Autograd's engine accumulates them: one backward from a node that hands its gradients over
   without a copy, so AccumulateGrad, its hooks, DistributedDataParallel and fused optimizers see
   one ordinary backward. Until here nothing outside has changed.

Pass 1 below is step 1, pass 2 is step 3.

`torch.autograd.grad` without `create_graph` makes the gradients of real tensors concrete at once
(the next line may change the parameters); gradients of lazy tensors stay lazy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import graph as _graph

from . import _core, _hooks, _known_backward, _lazy, _multi_hooks, _sharded
from ._torch import GRAD, ModesAside, run_backward, use_count


def _original(*args: Any, **kwargs: Any) -> Any:
    """torch's own backward of lazy outputs: all that it meets is recorded, and no more."""
    outer = _core.backward_begins(_core.context())
    try:
        return run_backward(*args, **kwargs)
    finally:
        _core.backward_ends(outer)


class _HandOver(torch.autograd.Function):
    """A node whose backward returns the gradients that it was given and keeps no reference to them,
    so that AccumulateGrad can take them as they are."""

    @staticmethod
    def forward(ctx: Any, box: list[Any], callbacks: list[Any], *leaves: torch.Tensor) -> Any:
        ctx.box, ctx.callbacks = box, callbacks
        ctx.set_materialize_grads(False)
        with ModesAside():
            return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        gradients, ctx.box[:] = tuple(ctx.box), []
        for callback in ctx.callbacks:
            torch.autograd.Variable._execution_engine.queue_callback(callback)
        return (None, None, *gradients)


class _Through(torch.autograd.Function):
    """A node that does nothing, on the thread that autograd has for a device."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient


def _let_go(gradients: Sequence[torch.Tensor]) -> None:
    """Wait until no thread of autograd's holds these, which pass 1 has returned.

    The thread of a GPU ends a backward before it drops its own reference to what that found. A
    gradient that is still held when it is handed over is copied, at a time when running out of
    memory can no longer be undone. When the thread gets to the next node, it has dropped it."""
    if not _core.has_device_threads():
        return
    held = {g.device for g in gradients if g.device.type != "cpu" and use_count(g) > 1}
    for device in held:
        with ModesAside(), torch.enable_grad():
            tensor = torch.empty(0, device=device)  # takes no memory
            through: Any = _Through.apply(tensor.requires_grad_())  # type: ignore[no-untyped-call]
            run_backward((through,), (tensor.detach(),), False, False, (tensor,))


class _Depth:
    """How deep one context is inside pass 1, where a nested backward is part of the recording.

    The gradients of its real leaves are collected here, for the outer step. Its caller may read
    `.grad` of a leaf at once (a checkpoint does, of its detached arguments), so until pass 1 ends
    `.grad` holds the lazy gradient. (Set through GRAD: torch.Tensor's own is guarded and keeps
    `.grad` of a plain tensor plain.)
    """

    def __init__(self) -> None:
        self.level = 0
        self.nested: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]] = []
        # leaves that show a lazy gradient, with their `.grad` of before
        self.shown: list[tuple[weakref.ref[torch.Tensor], torch.Tensor | None]] = []
        # leaves whose `.grad` autograd itself accumulates at the moment
        self.accumulating: list[torch.Tensor] = []
        self.callbacks: list[Any] = []  # queued for the end of backward
        # the backward that runs, for hooks of several tensors; it ends after pass 2
        self.round: _multi_hooks.Round | None = None
        # leaves without a gradient whose hooks are told so in pass 2, as torch tells them
        self.unset: list[torch.Tensor] = []
        # torch's backward; _dry.py puts its own in front of it for a while
        self.engine: Any = run_backward

    def show(self, leaf: torch.Tensor, gradient: torch.Tensor) -> None:
        if any(leaf is known for known in self.accumulating):
            return
        self.shown.append((weakref.ref(leaf), leaf.grad))
        with torch.no_grad():
            GRAD.__set__(leaf, gradient if leaf.grad is None else leaf.grad + gradient)

    def hide(self) -> None:
        for ref, before in reversed(self.shown):
            leaf = ref()
            if leaf is not None:
                GRAD.__set__(leaf, before)
        self.shown = []


class _Engine:
    """torch's engine. Callbacks that are queued for the end of backward during pass 1
    (the all-reduce of DistributedDataParallel's static graph) wait for the end of pass 2."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def queue_callback(self, callback: Any) -> None:
        context = _core.backward_context((), None)
        depth = None if context is None else depth_of(context)
        if depth is not None and depth.level:
            depth.callbacks.append(callback)
        else:
            self._engine.queue_callback(callback)


def depth_of(context: _core.Context) -> _Depth:
    if context.backward is None:
        context.backward = _Depth()
    depth: _Depth = context.backward
    return depth


def _leaves(outputs: Sequence[Any]) -> tuple[list[torch.Tensor], bool]:
    """(leaves, nested). leaves: the variables of AccumulateGrad nodes behind outputs, in autograd's
    order, without those that were frozen since: to them the node adds nothing. nested: some node
    runs a backward of its own (a reentrant checkpoint), which autograd allows only without
    `inputs`."""
    found: dict[int, torch.Tensor] = {}
    roots = []
    for o in outputs:
        is_tensor = isinstance(o, torch.Tensor)
        node = o.grad_fn if is_tensor else getattr(o, "node", None)
        if node is not None:
            roots.append(node)
        elif is_tensor and o.requires_grad:
            found.setdefault(id(o), o)
    told = _core.leaves_behind(roots) if _nodes_are_known else None
    behind, reentrant = told or _leaves_behind(roots)
    for leaf in behind:
        if leaf.requires_grad:
            found.setdefault(id(leaf), leaf)
    return list(found.values()), reentrant


_nodes_are_known = False  # may C walk graphs?


def _leaves_behind(roots: list[Any]) -> tuple[list[torch.Tensor], bool]:
    """What _core.leaves_behind() finds, where torch's nodes lie in memory in an unknown way. Each
    node that is looked at here gets a Python object, see autograd_nodes.h."""
    found: list[torch.Tensor] = []
    reentrant = False
    seen: set[Any] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and not node.next_functions:
            found.append(variable)
            continue
        reentrant |= type(node).__name__ == "CheckpointFunctionBackward"
        for up, _ in reversed(node.next_functions):
            if up is not None and up not in seen:
                stack.append(up)
    return found, reentrant


def _learn_nodes() -> bool:
    """Show C a few nodes and what Python says of them. Is that enough to walk any graph?"""
    with torch.enable_grad():
        a, b = (torch.ones(1, device="cpu", requires_grad=True) for _ in range(2))
        product = (a * b).grad_fn
        function: Any = _HandOver.apply([], a, b)  # type: ignore[no-untyped-call]
        sum_ = (function + a).grad_fn
        root = torch.cat([function + a, function, b * a])
    assert product is not None and sum_ is not None
    (leaf, _), (other, _) = product.next_functions
    known = _core.learn_nodes(
        torch.Tensor,
        torch._C._FunctionBase,
        a,
        leaf,
        other,
        product,
        function.grad_fn,
        sum_,
    )
    if not known:
        return False
    # both walks find the same leaves, the same objects
    roots = [root.grad_fn, function.grad_fn]
    walked, _ = _leaves_behind(roots)
    told = _core.leaves_behind(roots)
    return told is not None and [id(t) for t in told[0]] == [id(t) for t in walked]


def _learn_accumulation() -> None:
    """Show C what a leaf looks like that a hook watches. Where it cannot tell, the engine
    accumulates."""
    plain, hooked, later = (torch.ones(1, device="cpu", requires_grad=True) for _ in range(3))
    hooked.register_hook(lambda g: g)
    later.register_post_accumulate_grad_hook(lambda t: None)
    _core.learn_accumulation(torch.nn.Parameter, plain, hooked, later)


def _accumulate_lazy(
    depth: _Depth, leaves: list[torch.Tensor], gradients: list[torch.Tensor], create: bool
) -> None:
    """`.grad` of a lazy leaf is lazy too. Autograd's engine accumulates it, which is recorded, and
    calls hooks. `gradients` is emptied. Hooks of the gradient were called in pass 1."""
    quiet = _hooks.quiet_hooks(leaves, _hooks.BEFORE, of_lazy=True)
    try:
        with ModesAside():
            one = torch.empty(0)
        with torch.enable_grad():
            root = _HandOver.apply(gradients, [], *leaves)  # type: ignore[no-untyped-call]
        depth.engine(
            (root,), (one,), create, create, (), allow_unreachable=True, accumulate_grad=True
        )
    finally:
        _hooks.wake_hooks(quiet)


def _lazies(values: Iterable[Any]) -> list[torch.Tensor]:
    return [v for v in values if isinstance(v, torch.Tensor) and _core.is_lazy(v)]


def _any_lazy(values: Sequence[Any]) -> bool:
    return any(_core.is_lazy(v) for v in values if isinstance(v, torch.Tensor))


def _own_layout(leaf: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient with the leaf's strides, which AccumulateGrad takes without a copy. It would
    copy any other gradient, at a time when running out of memory can no longer be undone."""
    if (
        gradient.layout is not torch.strided
        or gradient.stride() == leaf.stride()
        or leaf.grad is not None
    ):
        return gradient
    if leaf.is_contiguous():
        return gradient if gradient.is_contiguous() else gradient.contiguous()
    return torch.empty_like(leaf, dtype=gradient.dtype).copy_(gradient)


def _lay_as_leaves(leaves: list[torch.Tensor], gradients: list[torch.Tensor]) -> bool:
    """Gives each gradient its leaf's layout. Was any copied?"""
    any_copied = False
    with torch.no_grad():
        for i, leaf in enumerate(leaves):
            gradient = gradients[i]
            gradients[i] = _own_layout(leaf, gradient)
            any_copied |= gradients[i] is not gradient
    return any_copied


def _hand_over(
    depth: _Depth, leaves: list[torch.Tensor], gradients: list[torch.Tensor], create: bool
) -> None:
    """Pass 2: autograd's engine accumulates gradients that lie as their leaves do. If a hook
    raises, every `.grad` is as before. create: the gradients have a graph behind them, which is
    kept."""
    ends = [_sharded.ends_in(leaf) for leaf in leaves]
    hooked = any(_hooks.has_hooks(t) for t in ends)
    with torch.no_grad():
        contents = [
            t.grad.detach().clone() if hooked and t.grad is not None else None for t in ends
        ]
        before = [t.grad for t in ends]
        with ModesAside():
            one = torch.empty(0)  # takes no memory: from here on nothing may run out of it
    with torch.enable_grad():
        callbacks, depth.callbacks = depth.callbacks, []
        root = _HandOver.apply(gradients, callbacks, *leaves)  # type: ignore[no-untyped-call]
    if depth.round is not None:
        depth.round.leaves = [*depth.round.leaves, *leaves]
    _core.hold_factories(True)  # hooks run here, and an optimizer in one of them makes its state
    try:
        depth.engine(
            (root,), (one,), create, create, (), allow_unreachable=True, accumulate_grad=True
        )
    except BaseException:
        for leaf, end, grad, old in zip(leaves, ends, before, contents):
            leaf.grad = None
            end.grad = grad
            if grad is not None and old is not None:
                with torch.no_grad():
                    grad.copy_(old)
        raise
    finally:
        _core.hold_factories(False)


def _set_at_once(
    depth: _Depth, call: _Call, leaves: list[torch.Tensor], gradients: list[torch.Tensor]
) -> bool:
    """Set `.grad` of all leaves, if that is all that a run of the engine would do: nobody watches,
    and no leaf has a gradient yet. False: nothing was done."""
    return (
        not call.create
        and not depth.callbacks
        and _known_backward.nothing_around()
        and not torch._C._autograd._profiler_enabled()
        and _core.accumulate(tuple(call.outputs), leaves, gradients)
    )


class _Call(NamedTuple):
    """A call of torch's backward: of `outputs`, with the gradients `grads` of them. retain: the
    graph is kept; create: the gradients get a graph of their own."""

    outputs: Sequence[Any]
    grads: Any
    retain: bool
    create: bool


def _by_accumulation(
    depth: _Depth, call: _Call, leaves: list[torch.Tensor]
) -> list[torch.Tensor | None]:
    """The gradients of leaves, accumulated into empty `.grad`s and taken out again."""
    before = [leaf.grad for leaf in leaves]
    after_hooks = _hooks.quiet_hooks(leaves, _hooks.AFTER)
    outer, depth.accumulating = depth.accumulating, [*depth.accumulating, *leaves]
    try:
        for leaf in leaves:
            leaf.grad = None
        depth.engine(*call, (), allow_unreachable=True, accumulate_grad=True)
        return [leaf.grad for leaf in leaves]
    finally:
        depth.accumulating = outer
        for leaf, grad in zip(leaves, before):
            leaf.grad = grad
        _hooks.wake_hooks(after_hooks)


_Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def _record(
    depth: _Depth, call: _Call, leaves: list[torch.Tensor], reentrant: bool
) -> _Pairs | None:
    """Pass 1: (leaf, gradient) of the real and the lazy leaves; None: they belong to an outer
    step."""
    saved = _hooks.quiet_hooks(leaves, _hooks.BEFORE)
    if not depth.level:
        depth.callbacks = []
        _core.line_waits(True)  # a GPU's backward runs on another thread
    depth.level += 1
    outer_nested, depth.nested = depth.nested, []
    try:
        watched = _hooks.any_of_several(saved)
        given = _gradients(depth, call, leaves, reentrant, watched)
        nested = depth.nested
    except BaseException as e:
        if depth.level == 1:
            _sharded.withdraw(call.outputs, e)
        raise
    finally:
        depth.level -= 1
        depth.nested = outer_nested
        _hooks.wake_hooks(saved)
        if not depth.level:
            _core.line_waits(False)
            depth.hide()
    own = [(leaf, g) for leaf, g in zip(leaves, given) if g is not None]
    pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    # A leaf that is gone was a detached copy that its backward has read and dropped.
    alive = [(leaf, g) for ref, g in nested if (leaf := ref()) is not None]
    for leaf, gradient in [*own, *alive]:
        known = pairs.get(id(leaf))
        pairs[id(leaf)] = (leaf, gradient if known is None else known[1] + gradient)
    if not depth.level:
        depth.unset = [leaf for leaf in leaves if id(leaf) not in pairs and _is_told(leaf)]
        return list(pairs.values())
    _pass_on(depth, own, list(pairs.values()), call.create)
    return None


def _is_told(leaf: torch.Tensor) -> bool:
    """Are hooks of the gradient of a real leaf told where there is none?"""
    return bool(getattr(leaf, _hooks.BEFORE, None)) and not _core.is_lazy(leaf)


def _gradients(
    depth: _Depth, call: _Call, leaves: list[torch.Tensor], reentrant: bool, watched: bool
) -> Sequence[torch.Tensor | None]:
    """torch's backward, recorded: the gradient of each leaf. watched: hooks see in which order the
    gradients of leaves come."""
    if reentrant:
        return _by_accumulation(depth, call, leaves)
    if depth.level == 1 and not _core.is_planning() and not watched:
        return _known_backward.gradients(depth.engine, call, leaves)
    found: Sequence[torch.Tensor | None] = depth.engine(
        *call, tuple(leaves), allow_unreachable=True, accumulate_grad=False
    )
    return found


def _pass_on(depth: _Depth, own: _Pairs, pairs: _Pairs, create: bool) -> None:
    """A backward inside a recorded one: its gradients belong to the outer step. `own`: those that
    it found itself; `pairs`: with those of backwards inside it."""
    for leaf, gradient in own:
        if not _core.is_lazy(leaf):
            depth.show(leaf, gradient)
    lazy_ones = [(leaf, g) for leaf, g in pairs if _core.is_lazy(leaf)]
    for leaf, gradient in pairs:
        if not _core.is_lazy(leaf):
            depth.nested.append((weakref.ref(leaf), gradient))
    if lazy_ones:
        leaves: list[torch.Tensor] = [leaf for leaf, _ in lazy_ones]
        _accumulate_lazy(depth, leaves, [g for _, g in lazy_ones], create)


def _leave_lazy(depth: _Depth, pairs: _Pairs, create: bool) -> _Pairs:
    """Gradients of lazy leaves are left in them, lazy; a tensor that was handed to lazy() gets its
    gradient too: those pairs. `pairs` is emptied, so that autograd can take gradients as they
    are."""
    leaves, gradients = [leaf for leaf, _ in pairs], [g for _, g in pairs]
    pairs.clear()
    given = [
        (origin, leaf, None if _takes(leaf, create) else g)
        for leaf, g in zip(leaves, gradients)
        if (origin := _lazy.given_for(leaf)) is not None
    ]
    _accumulate_lazy(depth, leaves, gradients, create)
    return [(origin, _grad_of(leaf) if g is None else g) for origin, leaf, g in given]


def _takes(leaf: torch.Tensor, create: bool) -> bool:
    """Will `.grad` of a lazy leaf be the gradient that comes now?"""
    return leaf.grad is None and not create and not _hooks.has_hooks(leaf)


def _grad_of(leaf: torch.Tensor) -> torch.Tensor:
    assert leaf.grad is not None
    return leaf.grad.detach()


def _backward(depth: _Depth, call: _Call, inputs: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """`backward()`, perhaps in one that is recorded."""
    outer = depth.round, depth.unset
    try:
        _three_steps(depth, call, inputs, kwargs)
    finally:
        depth.round, depth.unset = outer


def _three_steps(depth: _Depth, call: _Call, inputs: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """`backward()`, all three steps. Whole because they share what a failure must undo.

    No local may hold a gradient when it is handed over: autograd copies every gradient that
    somebody else holds too."""
    known = None if inputs else _known_at_once(depth, call)
    if known is not None:
        _run_known(depth, call, *known)
        return
    if inputs:
        leaves, reentrant = [i for i in inputs if isinstance(i, torch.Tensor)], False
    else:
        leaves, reentrant = _leaves(call.outputs)
    if not leaves:
        depth.engine(*call, inputs, **kwargs)
        return
    if not depth.level:
        depth.round = _multi_hooks.Round(leaves)
    real = _record(depth, call, leaves, reentrant)
    if real is None:
        return
    if inputs:  # the others are not met
        depth.unset = []
    lazies = []
    if any(_core.is_lazy(leaf) for leaf, _ in real):
        lazy_ones: _Pairs = [(leaf, g) for leaf, g in real if _core.is_lazy(leaf)]
        real = [(leaf, g) for leaf, g in real if not _core.is_lazy(leaf)]
        lazy_leaves = [leaf for leaf, _ in lazy_ones]
        real += _leave_lazy(depth, lazy_ones, call.create)
        lazies = _lazies(leaf.grad for leaf in lazy_leaves)
    lazies = _lazies(g for _, g in real) + lazies or _lazies(call.outputs)
    targets, wanted = [leaf for leaf, _ in real], [g for _, g in real]
    del real
    _run_and_hand_over(depth, call, targets, wanted, lazies)


def _known_at_once(depth: _Depth, call: _Call) -> tuple[list[torch.Tensor], object] | None:
    """Pass 1 of a backward that was recorded before, without a look at each leaf: (real leaves,
    their gradients). None: it is recorded as any other."""
    if depth.level or _core.is_planning():
        return None
    depth.callbacks = []
    try:
        return _known_backward.at_once(call)
    except BaseException as e:
        _sharded.withdraw(call.outputs, e)
        raise


def _run_known(depth: _Depth, call: _Call, targets: list[torch.Tensor], known: object) -> None:
    """Steps 2 and 3 of a backward that was recorded before."""
    step, gradients = _core.run_known(known, not call.retain)
    try:
        _accumulate(depth, call, targets, gradients)
    except BaseException:
        if not call.retain:
            _core.finish_step(step, False)
        raise
    if not call.retain:
        _core.finish_step(step, True)


def _accumulate(
    depth: _Depth, call: _Call, targets: list[torch.Tensor], gradients: list[torch.Tensor]
) -> None:
    if not depth.unset and _set_at_once(depth, call, targets, gradients):
        return
    any_copied = not call.create and _lay_as_leaves(targets, gradients)
    if depth.unset or not any_copied or not _set_at_once(depth, call, targets, gradients):
        unset, depth.unset = depth.unset, []
        gradients.extend(_none_for(unset))
        _hand_over(depth, targets + unset, gradients, call.create)


def _none_for(leaves: list[torch.Tensor]) -> list[Any]:
    return [None] * len(leaves)


def _run_and_hand_over(
    depth: _Depth,
    call: _Call,
    targets: list[torch.Tensor],
    wanted: list[torch.Tensor],
    lazies: list[torch.Tensor],
) -> None:
    """Steps 2 and 3: computes the gradients `wanted` of the leaves `targets`, and hands them over.
    lazies: what is made concrete, for them. It and `wanted` are emptied."""
    step = _core.run_all(lazies, not call.retain) if lazies else None
    if _core.is_planning():  # koila.plan(): nothing was computed
        return
    # Gradients first, then buffers: a hook that raises or Ctrl-C in between leaves both as they
    # were.
    try:
        if lazies is not wanted:
            lazies.clear()
        _let_go(wanted)
        if targets or depth.unset:
            _accumulate(depth, call, targets, _computed(wanted, call.create))
        else:
            _computed(wanted, call.create)
    except BaseException:
        if step is not None and not call.retain:
            _core.finish_step(step, False)
        raise
    if step is not None and not call.retain:
        _core.finish_step(step, True)


def _computed(gradients: list[torch.Tensor], create: bool) -> list[torch.Tensor]:
    """The gradients as plain tensors. `create`: they are differentiable, with the lazy graph behind
    them; else the given list is emptied."""
    if not create:
        return _core.take_all(gradients)
    with torch.enable_grad():
        return [g.torch() if _core.is_lazy(g) else g for g in gradients]


def _run_lazily(depth: _Depth, t_outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    grads, retain, create, inputs = args[:4]
    if kwargs.get("accumulate_grad"):
        call = _Call(t_outputs, grads, retain, create)
        return _backward(depth, call, inputs or (), kwargs)
    result = depth.engine(t_outputs, *args, **kwargs)
    if create or depth.level or not _any_lazy(result):
        return result
    # gradients of real tensors
    wanted = [
        isinstance(g, torch.Tensor) and _core.is_lazy(g) and not _core.is_lazy(i)
        for g, i in zip(result, inputs, strict=True)
    ]
    if not any(wanted):
        return result
    step = _core.run_all([g for g, wants in zip(result, wanted) if wants], not retain)
    if _core.is_planning():
        return result
    found = tuple(
        _core.concrete(g) if wants else g for g, wants in zip(result, wanted, strict=True)
    )
    if not retain:
        _core.finish_step(step, True)
    return found


# Called with the number of each run of a backward when all of it is done; koila.on_step() sets it.
after_step: Callable[[int], None] | None = None


def _engine_run_backward(t_outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    context = _core.backward_context(t_outputs, args[0] if args else None)
    if after_step is not None:
        return _run_and_tell(context, t_outputs, *args, **kwargs)
    if context is None:
        return run_backward(t_outputs, *args, **kwargs)
    return _run_shielded(context, t_outputs, *args, **kwargs)


def _run_and_tell(context: _core.Context | None, *args: Any, **kwargs: Any) -> Any:
    """A backward while somebody listens: koila's, or torch's own, perhaps of a step that torch does
    alone."""
    if context is not None and depth_of(context).level:
        return _run_shielded(context, *args, **kwargs)
    is_inside = torch._C._current_graph_task_id() != -1  # a backward of a checkpoint, or of a hook
    before = _core.last_backward()
    if context is None:
        result = run_backward(*args, **kwargs)
    else:
        result = _run_shielded(context, *args, **kwargs)
    number = _core.last_backward()
    if number == before:
        number = 0 if is_inside else _core.ends_alone()
    if number and after_step is not None:
        after_step(number)
    return result


def _run_shielded(
    context: _core.Context, t_outputs: Sequence[Any], *args: Any, **kwargs: Any
) -> Any:
    # Ctrl-C stops the run inside, or waits until gradients and buffers are both done.
    with _core.shield:
        before = _core.lend(context)  # to a thread of torch's, which has none itself
        outer = _core.backward_begins(context)
        try:
            return _run_lazily(depth_of(context), t_outputs, *args, **kwargs)
        finally:
            _core.backward_ends(outer)
            _core.give_back(before)


def install() -> None:
    """Route every backward through here. Idempotent; without lazy values torch's own function is
    called at once."""
    global _nodes_are_known
    try:
        _nodes_are_known = _learn_nodes()
    except Exception:  # another torch, or a mode of somebody else's: Python walks
        _nodes_are_known = False
    if _nodes_are_known:
        _known_backward.install()
        _learn_accumulation()
    _multi_hooks.install()
    torch.autograd._engine_run_backward = _engine_run_backward  # type: ignore[attr-defined]
    _graph._engine_run_backward = _engine_run_backward
    engine = torch.autograd.Variable._execution_engine
    if not isinstance(engine, _Engine):
        torch.autograd.Variable._execution_engine = _Engine(engine)  # type: ignore[assignment]

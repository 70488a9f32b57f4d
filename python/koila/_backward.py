"""Backward through lazy values.

`torch.autograd.backward` and `torch.autograd.grad` end in one function, `_engine_run_backward`,
which is replaced at import:

1. The gradients of the *leaves* of the graph are taken with autograd itself. Nothing is computed:
operators on lazy values are recorded.
   Tensor hooks of real leaves wait for pass 2.
2. All gradients are made concrete in one run (sliced as planned), together with the values the user
still holds. 3. Autograd's engine accumulates them: one backward from a node whose gradients are
handed over without a copy, so AccumulateGrad, its
   hooks, DistributedDataParallel and fused optimizers see one ordinary backward. Until here nothing
   outside has changed.

`torch.autograd.grad` without `create_graph` makes the gradients of real tensors concrete at once
(the next line may change the parameters); gradients of lazy tensors stay lazy.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd import graph as _graph

from . import _core, _lazy, _sharded
from ._torch import GRAD

_original = _graph._engine_run_backward


class _HandOver(torch.autograd.Function):
    """A node whose backward returns the gradients given, and keeps no reference to them:
    AccumulateGrad can take them as they are."""

    @staticmethod
    def forward(ctx: Any, box: list[Any], *leaves: torch.Tensor) -> torch.Tensor:
        ctx.box = box
        ctx.set_materialize_grads(False)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        gradients, ctx.box[:] = tuple(ctx.box), []
        callbacks, _depth.callbacks = _depth.callbacks, []
        for callback in callbacks:
            torch.autograd.Variable._execution_engine.queue_callback(callback)
        return (None, *gradients)


class _Depth:
    """Are we inside pass 1 (a nested backward is then part of what is recorded)? Its real leaves'
    gradients are collected here, for the outer step. Whoever runs a nested backward may read
    `.grad` of a leaf of his own at once (a checkpoint its detached arguments), so until pass 1 ends
    it is there to be seen, lazy (GRAD: torch.Tensor's own is guarded, `.grad` of a plain tensor is
    plain)."""

    def __init__(self) -> None:
        self.level = 0
        self.nested: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]] = []
        self.shown: list[
            tuple[weakref.ref[torch.Tensor], torch.Tensor | None]
        ] = []  # with their `.grad` of before
        self.accumulating: list[
            torch.Tensor
        ] = []  # leaves whose `.grad` is autograd's own at the moment
        self.callbacks: list[Any] = []

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
    """torch's engine. What is queued for the end of backward during pass 1
    (DistributedDataParallel's static graph: its all-reduce) waits for the end of pass 2."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def queue_callback(self, callback: Any) -> None:
        if _depth.level:
            _depth.callbacks.append(callback)
        else:
            self._engine.queue_callback(callback)


_depth = _Depth()


def _leaves(outputs: Sequence[Any]) -> tuple[list[torch.Tensor], bool]:
    """The leaves behind outputs, in the order autograd meets them: variables of the AccumulateGrad
    nodes; and whether some node runs a backward of its own (a reentrant checkpoint), which autograd
    allows only when no `inputs` are named."""
    found: list[torch.Tensor] = []
    reentrant = False
    seen: set[Any] = set()
    stack = []
    for o in outputs:
        node = getattr(o, "node", None) or getattr(o, "grad_fn", None)
        if node is not None:
            stack.append(node)
        elif isinstance(o, torch.Tensor) and o.requires_grad and not any(o is f for f in found):
            found.append(o)
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


def _accumulate_lazy(leaf: torch.Tensor, gradient: torch.Tensor, create: bool) -> None:
    """`.grad` of a lazy leaf is lazy too."""
    with torch.set_grad_enabled(create):
        leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient


def _any_lazy(values: Sequence[Any]) -> bool:
    return any(_core.is_lazy(v) for v in values if isinstance(v, torch.Tensor))


BEFORE, AFTER = "_backward_hooks", "_post_accumulate_grad_hooks"


def quiet_hooks(tensors: Iterable[torch.Tensor], kind: str) -> list[tuple[Any, dict[int, Any]]]:
    """Take the hooks of that kind away from real tensors; returns what wake_hooks needs."""
    saved = []
    for t in tensors:
        hooks = getattr(t, kind, None)
        if hooks and not _core.is_lazy(t):
            saved.append((hooks, dict(hooks)))
            hooks.clear()
    return saved


def wake_hooks(saved: list[tuple[Any, dict[int, Any]]]) -> None:
    for hooks, kept in saved:
        hooks.update(kept)


def _has_hooks(leaf: torch.Tensor) -> bool:
    return bool(leaf._backward_hooks) or bool(getattr(leaf, AFTER, None))


def _own_layout(leaf: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient with the leaf's strides: AccumulateGrad then takes it as it is, and does not
    have to copy it when it can no longer fail safely."""
    if (
        leaf.grad is not None
        or gradient.layout is not torch.strided
        or gradient.stride() == leaf.stride()
    ):
        return gradient
    if leaf.is_contiguous():
        return gradient if gradient.is_contiguous() else gradient.contiguous()
    return torch.empty_like(leaf, dtype=gradient.dtype).copy_(gradient)


def _hand_over(leaves: list[torch.Tensor], gradients: list[torch.Tensor], create: bool) -> None:
    """Pass 2: autograd's engine accumulates. If a hook raises, every `.grad` is as before.
    `create`: the gradients have a graph behind them, which goes on."""
    ends = [_sharded.ends_in(leaf) for leaf in leaves]
    hooked = any(_has_hooks(t) for t in ends)
    with torch.no_grad():
        for i, leaf in enumerate(leaves if not create else ()):
            gradients[i] = _own_layout(leaf, gradients[i])
        contents = [
            t.grad.detach().clone() if hooked and t.grad is not None else None for t in ends
        ]
        before = [t.grad for t in ends]
        one = torch.empty(0)  # no bytes: from here on nothing may fail for want of memory
    with torch.enable_grad():
        root = _HandOver.apply(gradients, *leaves)  # type: ignore[no-untyped-call]
    _core.hold_factories(True)  # hooks run here: an optimizer in one of them makes its state
    try:
        _original((root,), (one,), create, create, (), allow_unreachable=True, accumulate_grad=True)
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


def _by_accumulation(
    outputs: Sequence[Any], grads: Any, retain: bool, create: bool, leaves: list[torch.Tensor]
) -> list[torch.Tensor | None]:
    """The gradients of leaves, let into empty `.grad`s and taken out again."""
    before = [leaf.grad for leaf in leaves]
    after_hooks = quiet_hooks(leaves, AFTER)
    outer, _depth.accumulating = _depth.accumulating, [*_depth.accumulating, *leaves]
    try:
        for leaf in leaves:
            leaf.grad = None
        _original(outputs, grads, retain, create, (), allow_unreachable=True, accumulate_grad=True)
        return [leaf.grad for leaf in leaves]
    finally:
        _depth.accumulating = outer
        for leaf, grad in zip(leaves, before):
            leaf.grad = grad
        wake_hooks(after_hooks)


_Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def _record(
    outputs: Sequence[Any],
    grads: Any,
    retain: bool,
    create: bool,
    leaves: list[torch.Tensor],
    reentrant: bool,
) -> _Pairs | None:
    """Pass 1: (leaf, gradient) of the real and the lazy leaves; None: they belong to an outer
    step."""
    saved = quiet_hooks(leaves, BEFORE)
    if not _depth.level:
        _depth.callbacks = []
    _depth.level += 1
    outer_nested, _depth.nested = _depth.nested, []
    try:
        if reentrant:
            given: Sequence[torch.Tensor | None] = _by_accumulation(
                outputs, grads, retain, create, leaves
            )
        else:
            given = _original(
                outputs,
                grads,
                retain,
                create,
                tuple(leaves),
                allow_unreachable=True,
                accumulate_grad=False,
            )
        nested = _depth.nested
    except BaseException as e:
        if _depth.level == 1:
            _sharded.withdraw(outputs, e)
        raise
    finally:
        _depth.level -= 1
        _depth.nested = outer_nested
        wake_hooks(saved)
        if not _depth.level:
            _depth.hide()
    own = [(leaf, g) for leaf, g in zip(leaves, given) if g is not None]
    pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for leaf, gradient in [
        *own,
        *((leaf, g) for ref, g in nested if (leaf := ref()) is not None),
    ]:  # who is gone was a detached copy, read and done with
        known = pairs.get(id(leaf))
        pairs[id(leaf)] = (leaf, gradient if known is None else known[1] + gradient)
    if not _depth.level:
        return list(pairs.values())
    for (
        leaf,
        gradient,
    ) in own:  # a backward inside a recorded one: its gradients belong to the outer step
        if not _core.is_lazy(leaf):
            _depth.show(leaf, gradient)
    for leaf, gradient in pairs.values():
        if _core.is_lazy(leaf):
            _accumulate_lazy(leaf, gradient, create)
        else:
            _depth.nested.append((weakref.ref(leaf), gradient))
    return None


def _leave_lazy(pairs: _Pairs, create: bool) -> _Pairs:
    """Gradients of lazy leaves are left in them, lazy; a tensor that was handed to lazy() gets its
    gradient too: those pairs."""
    given = []
    for leaf, gradient in pairs:
        _accumulate_lazy(leaf, gradient, create)
        origin = _lazy.given_for(leaf)
        if origin is not None:
            given.append((origin, gradient))
    return given


def _backward(
    outputs: Sequence[Any],
    grads: Any,
    retain: bool,
    create: bool,
    inputs: Sequence[Any],
    kwargs: dict[str, Any],
) -> None:
    """No local may hold a gradient when it is handed over: autograd copies what it does not own
    alone."""
    leaves, reentrant = (
        ([i for i in inputs if isinstance(i, torch.Tensor)], False) if inputs else _leaves(outputs)
    )
    if not leaves:
        _original(outputs, grads, retain, create, inputs, **kwargs)
        return
    pairs = _record(outputs, grads, retain, create, leaves, reentrant)
    if pairs is None:
        return
    real = [(leaf, g) for leaf, g in pairs if not _core.is_lazy(leaf)]
    real += _leave_lazy([(leaf, g) for leaf, g in pairs if _core.is_lazy(leaf)], create)
    lazies = [g for _, g in pairs if _core.is_lazy(g)]
    if not lazies:
        lazies = [o for o in outputs if isinstance(o, torch.Tensor) and _core.is_lazy(o)]
    step = _core.run_all(lazies, not retain) if lazies else None
    if _core.configure()["dry"]:  # koila.plan(): nothing was computed
        return
    # gradients first, then buffers: a hook that raises or Ctrl-C in between leaves both as they
    # were
    try:
        targets, wanted = [leaf for leaf, _ in real], [g for _, g in real]
        del pairs, real, lazies
        if create:  # plain, and what is computed from them goes on into the lazy graph
            with torch.enable_grad():
                gradients = [g.torch() if _core.is_lazy(g) else g for g in wanted]
        else:
            gradients = _core.take_all(wanted)
        if targets:
            _hand_over(targets, gradients, create)
    except BaseException:
        if step is not None and not retain:
            _core.finish_step(step, False)
        raise
    if step is not None and not retain:
        _core.finish_step(step, True)


def _run_lazily(t_outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    grads, retain, create, inputs = args[:4]
    if kwargs.get("accumulate_grad"):
        return _backward(t_outputs, grads, retain, create, inputs or (), kwargs)
    result = _original(t_outputs, *args, **kwargs)
    if create or _depth.level or not _any_lazy(result):
        return result
    wanted = [
        g
        for g, i in zip(result, inputs)
        if isinstance(g, torch.Tensor) and _core.is_lazy(g) and not _core.is_lazy(i)
    ]
    if not wanted:
        return result
    step = _core.run_all(wanted, not retain)
    if _core.configure()["dry"]:
        return result
    found = tuple(
        _core.concrete(g)
        if isinstance(g, torch.Tensor) and _core.is_lazy(g) and not _core.is_lazy(i)
        else g
        for g, i in zip(result, inputs)
    )
    if not retain:
        _core.finish_step(step, True)
    return found


def _engine_run_backward(t_outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    if not _core.is_recording():
        return _original(t_outputs, *args, **kwargs)
    with (
        _core.shield
    ):  # Ctrl-C stops the run inside, or waits until gradients and buffers are both done
        return _run_lazily(t_outputs, *args, **kwargs)


def install() -> None:
    """Route every backward through here. Idempotent; without lazy values torch's own function is
    called at once."""
    torch.autograd._engine_run_backward = _engine_run_backward  # type: ignore[attr-defined]
    _graph._engine_run_backward = _engine_run_backward
    engine = torch.autograd.Variable._execution_engine
    if not isinstance(engine, _Engine):
        torch.autograd.Variable._execution_engine = _Engine(engine)  # type: ignore[assignment]

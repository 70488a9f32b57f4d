"""``loss.backward()`` with lazy values behind it.

The engine runs once over the graph and leaves lazy gradients of the leaves; then the step runs, all gradients together; then the engine runs again, only from the leaves, so
that it accumulates plain gradients into ``.grad`` and every hook on that (DistributedDataParallel's too) fires once. ``torch.autograd.grad`` returns lazy gradients.
"""

from __future__ import annotations

from typing import Any

from ._torch import torch
from . import _core
from ._tensor import _Concrete, plain

_engine = torch.autograd._engine_run_backward
_installed = False


def install() -> None:
    """Ask for the gradients of lazy values through us. Once, at the first lazy()."""
    global _installed
    if _installed:
        return
    _installed = True
    torch.autograd._engine_run_backward = _run_backward  # type: ignore[attr-defined]
    torch.autograd.graph._engine_run_backward = _run_backward


def _leaves(roots: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Every tensor whose `.grad` a backward from `roots` would change, in the order in which they are met."""
    found: dict[int, torch.Tensor] = {}
    seen: set[Any] = set()
    stack = [torch.autograd.graph.get_gradient_edge(r).node for r in roots if r.requires_grad]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.setdefault(id(variable), variable)
        stack.extend(n for n, _ in reversed(node.next_functions))
    return list(found.values())


def _run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
    # args: grad_tensors, retain_graph, create_graph, inputs; see torch/autograd/__init__.py
    if not kwargs.get("accumulate_grad", False) or not _core.any_lazy():
        return _engine(t_outputs, *args, **kwargs)
    grad_tensors, retain_graph, create_graph, inputs = args
    roots = tuple(t_outputs)
    tensors = tuple(r for r in roots if isinstance(r, torch.Tensor))
    if len(tensors) != len(roots):  # gradient edges: no tensor to start from
        return _engine(t_outputs, *args, **kwargs)
    retained: list[tuple[torch.Tensor, torch.Tensor]] = []
    if inputs:
        targets = [i for i in inputs if isinstance(i, torch.Tensor)]
        if len(targets) != len(inputs):
            return _engine(t_outputs, *args, **kwargs)
    else:
        targets = _leaves(tensors)
    if not targets:
        return _engine(t_outputs, *args, **kwargs)
    if not inputs and not any(_core.is_lazy(t) for t in tensors) and not any(_core.is_lazy(t) for t in targets) and not _meets_lazy(tensors):
        return _engine(t_outputs, *args, **kwargs)
    gradients = _engine(roots, grad_tensors, retain_graph, create_graph, tuple(targets), allow_unreachable=True, accumulate_grad=False)
    pairs = [(t, g) for t, g in zip(targets, gradients) if g is not None]
    if not pairs:
        return ()
    _finish(pairs, create_graph, retain_graph)
    return ()


def _meets_lazy(roots: tuple[torch.Tensor, ...]) -> bool:
    """Whether a lazy tensor may lie behind plain roots. Not knowable from outside, so: while any lazy tensor that autograd could have saved is alive, yes."""
    return _core.any_lazy()


def _finish(pairs: list[tuple[torch.Tensor, torch.Tensor]], create_graph: bool, retain_graph: bool) -> None:
    lazy = [g for _, g in pairs if _core.is_lazy(g)]
    tapes = list({id(t): t for t in map(_core.tape_of, lazy)}.values())
    for tape in tapes:
        _core.run(tape, [g for g in lazy if _core.tape_of(g) is tape], True)
    ready = []
    for t, g in pairs:
        if not _core.is_lazy(g):
            ready.append((t, g))
        elif create_graph and g.requires_grad:
            ready.append((t, _Concrete.apply(g)))
        else:
            ready.append((t, plain(g)))
    if not retain_graph:
        for tape in tapes:
            tape.close()
    # The hooks of the leaves saw the lazy gradients already: autograd ran them before it handed the gradients out.
    put_back = []
    for t, _ in ready:
        hooks = t._backward_hooks
        if hooks:
            put_back.append((hooks, list(hooks.items())))
            hooks.clear()
    try:
        leaves = [(t, g) for t, g in ready if t.is_leaf]
        if leaves:
            _engine(
                tuple(t for t, _ in leaves), tuple(g for _, g in leaves), create_graph, create_graph, (), allow_unreachable=True, accumulate_grad=True
            )
    finally:
        for hooks, items in put_back:
            hooks.update(items)
    for t, g in ready:
        if not t.is_leaf:  # backward(inputs=[a non-leaf])
            with torch.no_grad():
                t.grad = g if t.grad is None else t.grad + g

"""Which backwards may be recognised as recorded before.

How one is recognised and copied is in known_backward.c. Here: what torch keeps where a backward
graph does not show it, and what this torch's nodes look like.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import _core
from ._torch import ModesAside

_understood = False  # does C understand the nodes of this torch?


def gradients(engine: Any, call: Any, leaves: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
    """The gradients of all real leaves behind `call.outputs`: recorded by torch's engine, or copied
    from a backward that was recorded before."""
    known = None
    if _understood and not call.create and nothing_around():
        known = _core.backward_known(
            tuple(call.outputs), tuple(call.grads), leaves, bool(call.retain)
        )
        if isinstance(known, list):
            return known
    found: Sequence[torch.Tensor | None] = engine(
        *call, tuple(leaves), allow_unreachable=True, accumulate_grad=False
    )
    if known is not None:
        _core.backward_remember(known, found)
    return found


def at_once(call: Any) -> tuple[list[torch.Tensor], object] | None:
    """(leaves, gradients) of a backward to all leaves that was recorded before, where these are
    plain tensors without hooks. None: it is to be looked at more closely, and nothing has
    changed."""
    if not _understood or call.create or not nothing_around():
        return None
    return _core.backward_at_once(tuple(call.outputs), tuple(call.grads), bool(call.retain))


def nothing_around() -> bool:
    """Is a backward, here and now, what its graph says, and nothing else?"""
    return not (
        torch.is_anomaly_enabled()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._is_torch_function_mode_enabled()
        or torch.is_inference_mode_enabled()
        or torch._C._is_any_autocast_enabled()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _see_what_is_saved() -> None:
    """Tell C of functions that pack what autograd saves (`saved_tensors_hooks`, which checkpoints
    use too, and hooks of one saved tensor), and of versions that are counted without a write: a
    backward calls or compares them, and its graph does not show them."""
    autograd: Any = torch._C._autograd
    push, pop = (
        autograd._push_saved_tensors_default_hooks,
        autograd._pop_saved_tensors_default_hooks,
    )
    register = autograd.SavedTensor.register_hooks
    increment: Any = torch._C._increment_version

    def pushed(*hooks: Any) -> Any:
        _core.saved_hooks(True)
        return push(*hooks)

    def popped() -> Any:
        _core.saved_hooks(False)
        return pop()

    def registered(saved: Any, *hooks: Any) -> Any:
        _core.saved_hooks(True)
        _core.saved_hooks(False)
        return register(saved, *hooks)

    def incremented(tensors: Any) -> None:
        _core.saved_hooks(True)
        _core.saved_hooks(False)
        increment(tensors)

    torch._C._increment_version = incremented
    autograd._push_saved_tensors_default_hooks = pushed
    autograd._pop_saved_tensors_default_hooks = popped
    _core.replace_method(autograd.SavedTensor, "register_hooks", registered)


def _learn() -> bool:
    """Show C a few nodes and what Python says of them. Is that enough to know any graph's form?"""

    def nothing(*_: Any) -> None:
        return None

    with torch.enable_grad(), ModesAside():
        a, b = (torch.ones(2, 2, device="cpu", requires_grad=True) for _ in range(2))
        tensors = [a * b, a + b, a @ b, a.sum(), torch.cat([a, b]), a * b, a * b]
        plain: list[Any] = [t.grad_fn for t in tensors]
        hooked = [a * b for _ in range(4)]
        nodes: list[Any] = [t.grad_fn for t in hooked]
        nodes[0].register_prehook(nothing)
        nodes[1].register_hook(nothing)
        hooked[2].register_hook(nothing)
        hooked[3].retain_grad()
        slices = a + b
        slices[0].mul_(2)
        spent: Any = (a * b).grad_fn
    numbers = tuple(n._sequence_nr() for n in plain)
    if not _core.learn_forms(tuple(plain), numbers, tuple(nodes), slices.grad_fn, spent):
        return False
    try:
        spent._saved_self
    except RuntimeError:  # it was let go of, as after a backward
        return True
    return False


def install() -> None:
    """Look at torch's nodes, once. Where they are not understood, every backward is recorded."""
    global _understood
    try:
        _understood = _learn()
        if _understood:
            _see_what_is_saved()
    except Exception:  # another torch
        _understood = False

"""Fully sharded modules (FSDP): what they compute is not recorded, because their parameters are gathered for a moment and let go again.

On a lazy batch such a module is refused, by name; `koila.opaque(module)` runs it as it is on real slices, and what is here then lets its gradients,
one shard a rank, go the way of all others: summed over slices, handed over at the end of the step.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from . import _core
from ._errors import UnsupportedError

_guarded = False


def refuse_recording() -> None:
    """From now on a fully sharded module raises when it meets a lazy argument. Called by `lazy()`; does nothing in programs that do not shard."""
    global _guarded
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if _guarded or fsdp is None:
        return
    _guarded = True
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    for owner, name, advice in (
        (FSDPState, "_root_pre_forward", _WRAP),  # the first thing in a call: nothing is half done when it raises
        (FSDPParamGroup, "pre_forward", _WRAP),  # and what comes after it, where an earlier call broke off
        (fsdp.FullyShardedDataParallel, "forward", _USE_FSDP2),
    ):
        setattr(owner, name, _refusing(getattr(owner, name), advice))


_WRAP = "Wrap it once, after sharding: model = koila.opaque(model)"
_USE_FSDP2 = "Shard it with torch.distributed.fsdp.fully_shard(), then wrap it: model = koila.opaque(model)"


def _refusing(method: Any, what_to_do: str) -> Any:
    @functools.wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(_core.is_lazy(x) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)):
            if hasattr(self, "_training_state"):
                self._training_state = type(self._training_state).IDLE  # the next call is a first one again
            raise UnsupportedError(
                f"a fully sharded module (FSDP) on a lazy batch: its parameters are there only while it runs, so it cannot be recorded. {what_to_do}"
            )
        return method(self, *args, **kwargs)

    return checked


def _parts(module: torch.nn.Module) -> list[Any]:
    """The modules inside that fully_shard() was called on."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    if any(isinstance(m, fsdp.FullyShardedDataParallel) for m in module.modules()):
        raise UnsupportedError(f"opaque() of a FullyShardedDataParallel module. {_USE_FSDP2}")
    return [m for m in module.modules() if isinstance(m, fsdp.FSDPModule)]


def is_sharded(module: torch.nn.Module) -> bool:
    return bool(_parts(module))


def shards(module: torch.nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The module's sharded parameters that need gradients, and for each a plain leaf over this rank's part of it, whose gradient goes on into the
    parameter's `.grad` when it is handed over."""
    for part in _parts(module):
        part.reshard()
    parameters = [p for p in module.parameters() if p.requires_grad]
    return parameters, [_leaf(p) for p in parameters]


def _leaf(parameter: Any) -> torch.Tensor:
    leaf: torch.Tensor = parameter.detach().to_local().detach().requires_grad_()

    def hand_on(leaf: torch.Tensor) -> None:
        from torch.distributed.tensor import DTensor

        assert leaf.grad is not None
        p = parameter
        gradient = DTensor.from_local(leaf.grad, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())
        leaf.grad = None
        p.grad = gradient if p.grad is None else p.grad + gradient
        for hook in (getattr(p, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(p)

    leaf.register_post_accumulate_grad_hook(hand_on)
    return leaf


def gradients(parameters: Sequence[Any], pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Backward of one slice through a sharded module: the gradients of `inputs`, then of this rank's part of every parameter, reduced over the ranks.
    `.grad` of the parameters is as before."""
    from ._backward import _original

    before = [p.grad for p in parameters]
    try:
        for p in parameters:
            p.grad = None
        _original(tuple(r for r, _ in pairs), tuple(g for _, g in pairs), False, False, (), allow_unreachable=True, accumulate_grad=True)
        with torch.no_grad():
            return [*(t.grad for t in inputs), *(None if p.grad is None else p.grad.to_local() for p in parameters)]
    finally:
        for p, grad in zip(parameters, before):
            p.grad = grad

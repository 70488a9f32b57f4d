"""Fully sharded modules (FSDP): what they compute is not recorded, because their parameters are gathered for a moment and let go again.

On a lazy batch such a module is refused, by name; `koila.opaque(module)` runs it as it is on real slices, and what is here then lets its gradients,
one shard a rank, go the way of all others: summed over slices, handed over at the end of the step.
"""

from __future__ import annotations

import functools
import sys
import zlib
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
    _core.ranks_ask(agree)
    for part in _parts(module):
        part.reshard()
    parameters = [p for p in module.parameters() if p.requires_grad]
    return parameters, [_leaf(p) for p in parameters]


def agree(keys: list[int], calls: list[tuple[int, int, bool]], n_slices: int, settled: bool) -> int | None:
    """Asked by the executor before a step with opaque calls runs (ranks.c): are all ranks about to make the same calls of their sharded modules?

    keys: of the calls in what was recorded; calls: of the plan, in its order: how often, which, and whether it is its backward. n_slices: 0 when there is
    no plan. settled: the rows were forced or agreed on. Returns: None, nothing here is sharded; 0, go on; or the number of slices that all take now.
    Raises, on all ranks: OutOfMemory, one of them cannot plan the step; UnsupportedError, they cannot be brought to make the same calls.
    """
    import torch.distributed as dist

    from ._rules import _calls

    of = {k: c.shards for k in keys if (c := _calls.get(k)) is not None and c.shards}
    meshes: list[Any] = []
    for p in (p for shards in of.values() for p in shards):
        if not any(p.device_mesh is m for m in meshes):
            meshes.append(p.device_mesh)
    if not meshes:
        return None
    number = {k: i for i, k in enumerate(of)}
    mine = [n_slices, zlib.crc32(repr([(n, number[k], backward) for n, k, backward in calls if k in number]).encode()), int(settled)]
    both = torch.tensor(mine + [-x for x in mine], device=meshes[0].device_type)  # the largest, and the smallest negated: one all-reduce for each dimension of a mesh
    for mesh in meshes:
        for d in range(mesh.ndim):
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=mesh.get_group(d))
    largest, smallest = both.tolist()[:3], [-x for x in both.tolist()[3:]]
    if smallest[0] == 0:
        from ._errors import OutOfMemory

        raise OutOfMemory("another rank of this sharded module has no memory for one row of its batch, so no rank runs the step; that rank's error says what is missing")
    if smallest[1] == largest[1]:
        return 0
    if not largest[2]:
        return int(largest[0])
    slices = f"{smallest[0]} and {largest[0]} slices" if smallest[0] != largest[0] else f"{largest[0]} slices each, and different values asked for"
    raise UnsupportedError(
        f"the ranks of a sharded module cannot run this step together: they would call it a different number of times ({slices}; {n_slices} on this rank), and wait for each other "
        "for ever. Give every rank a batch of the same size (drop_last=True), the same koila.micro_batch(n), and read the same values (print, .item()) on all ranks"
    )


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

"""Fully sharded modules (FSDP). They cannot be recorded, because their parameters are gathered only
for a moment.

On a lazy batch such a module is refused, by name. `koila.opaque(module)` runs it unchanged on real
slices. This module then treats its gradients, one shard a rank, like all others: they are summed
over slices and handed over at the end of the step.

Invariant: a rank tells the others its own decisions and events (a plan, a failure, new shapes)
before they could wait for it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from . import _core, _run
from ._errors import KoilaError, OutOfMemory, UnsupportedError
from ._hooks import AFTER, quiet_hooks, wake_hooks
from ._torch import run_backward

MODULE = "torch.distributed.fsdp"  # imported by programs that shard
_guarded = False


def refuse_recording() -> None:
    """Make fully sharded modules raise on a lazy argument. Called by `lazy()`; does nothing in
    programs that do not shard."""
    global _guarded
    fsdp = sys.modules.get(MODULE)
    if _guarded or fsdp is None:
        return
    _guarded = True
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    for owner, name, advice in (
        # The first function of a call: it raises before anything is done.
        (FSDPState, "_root_pre_forward", _WRAP),
        # The function after it, reached if an earlier call was aborted.
        (FSDPParamGroup, "pre_forward", _WRAP),
        (fsdp.FullyShardedDataParallel, "forward", _USE_FSDP2),
    ):
        setattr(owner, name, _refusing(getattr(owner, name), advice))


_WRAP = "Wrap it once, after sharding: model = koila.opaque(model)"
_USE_FSDP2 = (
    "Shard it with torch.distributed.fsdp.fully_shard(), then wrap it: model = koila.opaque(model)"
)


def _refusing(method: Any, what_to_do: str) -> Any:
    @functools.wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = (x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
        if any(_core.is_lazy(x) for x in tensors):
            if hasattr(self, "_training_state"):
                # So that the next call counts as a first one.
                self._training_state = type(self._training_state).IDLE
            raise UnsupportedError(
                "a fully sharded module (FSDP) on a lazy batch: its parameters are there only "
                f"while it runs, so it cannot be recorded. {what_to_do}"
            )
        return method(self, *args, **kwargs)

    return checked


def _parts(module: torch.nn.Module) -> list[Any]:
    """The modules inside that fully_shard() was called on."""
    fsdp = sys.modules.get(MODULE)
    if fsdp is None:
        return []
    if any(isinstance(m, fsdp.FullyShardedDataParallel) for m in module.modules()):
        raise UnsupportedError(f"opaque() of a FullyShardedDataParallel module. {_USE_FSDP2}")
    return [m for m in module.modules() if isinstance(m, fsdp.FSDPModule)]


def is_sharded(module: torch.nn.Module) -> bool:
    return bool(_parts(module))


def shards(module: torch.nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The module's sharded parameters that need gradients, and for each a plain leaf over this
    rank's part of it, whose gradient goes on into the parameter's `.grad` when it is handed
    over."""
    for part in _parts(module):
        part.reshard()
    parameters: list[torch.Tensor] = [p for p in module.parameters() if p.requires_grad]
    return parameters, [_leaf(p) for p in parameters]


@contextlib.contextmanager
def _no_limit() -> Iterator[None]:
    """Lift the budget inside: a refusal on one rank would leave the others waiting."""
    _core.cpu_bytes_lift_limit(True)
    try:
        yield
    finally:
        _core.cpu_bytes_lift_limit(False)


def _meshes_of(parameters: Iterable[Any]) -> list[Any]:
    meshes: list[Any] = []
    for p in parameters:
        if not any(p.device_mesh is m for m in meshes):
            meshes.append(p.device_mesh)
    return meshes


def _largest(meshes: list[Any], mine: list[int]) -> list[int]:
    """The largest of each number over all ranks: one all-reduce for each dimension of a mesh."""
    import torch.distributed as dist

    with _no_limit():
        numbers = torch.tensor(mine, device=meshes[0].device_type)
        for mesh in meshes:
            for d in range(mesh.ndim):
                dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=mesh.get_group(d))
        found: list[int] = numbers.tolist()
        return found


def rows_shapes(call: Any, inputs: list[torch.Tensor], find: Callable[[], Any]) -> None:
    """Make sure that `call.shapes` has the results for these inputs. If not, `find()` runs the
    module to learn them. If one rank must run it, all do, because it communicates. Ranks may see
    different shapes (a last batch of fewer rows, longer sentences)."""
    kind = shapes_key(inputs)
    if _largest(_meshes_of(call.shards), [kind not in call.shapes])[0]:
        with looking_up(), _no_limit():
            call.shapes[kind] = find()


@contextlib.contextmanager
def looking_up() -> Iterator[None]:
    """For a run that is no part of the program: nothing of it is recorded, or seen by a mode."""
    guards = _run.guards()
    _core.hold_factories(True)
    try:
        yield
    finally:
        _core.hold_factories(False)
        del guards


def shapes_key(inputs: list[torch.Tensor]) -> Any:
    return tuple((tuple(t.shape), t.dtype) for t in inputs)


# States of a rank. The largest over all ranks is the state of the step. After a lack of memory it
# is tried again with more slices, if nothing worse happened on any rank.
_FINE, _NO_MEMORY, _FAILED = 0, 1, 2


class Ranks:
    """The ranks that share the sharded modules of one step, for the executor (ranks.c).

    Each method but `shares` is a collective, one small all-reduce. If one rank calls `withdraw`,
    the others call `agree`; if one calls `failed`, the others call `meet`."""

    def __init__(self, shards: dict[int, list[Any]]) -> None:
        self._number = {key: i for i, key in enumerate(shards)}
        self._meshes = _meshes_of(p for parameters in shards.values() for p in parameters)

    def shares(self, key: int) -> bool:
        return key in self._number

    def agree(self, calls: list[tuple[int, int, bool]], n_slices: int, decided: bool) -> int:
        """Are all ranks about to make the same calls of their sharded modules?

        calls: (how often, key, is it the backward) of each call of the plan, in its order.
        decided: the rows of a slice were forced or agreed on, and cannot change.

        Returns: 0, go on; or the number of slices that all take now.
        Raises, on all ranks: UnsupportedError when they cannot make the same calls; KoilaError or
            OutOfMemory when one of them withdrew.
        """
        mine = [(n, self._number[k], backward) for n, k, backward in calls if k in self._number]
        code = zlib.crc32(repr(mine).encode())
        largest, smallest = self._exchange(_FINE, n_slices, code, decided)
        if smallest[0] == largest[0] and smallest[1] == largest[1]:
            return 0
        if not largest[2]:
            return int(largest[0])
        slices = (
            f"{smallest[0]} and {largest[0]} slices"
            if smallest[0] != largest[0]
            else f"{largest[0]} slices each, and different values asked for"
        )
        raise UnsupportedError(
            "the ranks of a sharded module cannot run this step together: they would call it a "
            f"different number of times ({slices}; {n_slices} on this rank), and wait for each "
            "other for ever. Give every rank a batch of the same size (drop_last=True), the same "
            "koila.micro_batch(n), and read the same values (print, .item()) on all ranks"
        )

    def _exchange(self, state: int, *mine: int) -> tuple[list[int], list[int]]:
        """The largest of each number, and the smallest."""
        found = _largest(self._meshes, [state, *mine, *(-x for x in mine)])
        self._raise(found[0], "so no rank runs the step")
        return found[1 : 1 + len(mine)], [-x for x in found[1 + len(mine) :]]

    def withdraw(self, memory: bool) -> None:
        self._exchange(_NO_MEMORY if memory else _FAILED, 0, 0, 0)

    def meet(self) -> None:
        self._raise(
            _largest(self._meshes, [_FINE])[0], "so all ranks stopped in the middle of the step"
        )

    def failed(self, memory: bool) -> bool:
        """Returns: is want of memory all that happened, on any rank?"""
        return _largest(self._meshes, [_NO_MEMORY if memory else _FAILED])[0] == _NO_MEMORY

    def _raise(self, worst: int, so: str) -> None:
        if worst == _NO_MEMORY:
            raise OutOfMemory(
                "another rank of this sharded module has no memory for its part of this step, "
                f"{so}; that rank's error says what is missing"
            )
        if worst == _FAILED:
            raise KoilaError(
                f"another rank of this sharded module failed, {so}; that rank's error says why"
            )


def withdraw(outputs: Sequence[Any], error: BaseException) -> None:
    """Handle a backward of `outputs` that could not be recorded on this rank. If the step calls
    sharded modules, tell the other ranks, which are about to run it."""
    lazies = [t for t in outputs if isinstance(t, torch.Tensor) and _core.is_lazy(t)]
    if lazies:
        with contextlib.suppress(Exception):  # the others may be gone; `error` is what counts
            ranks = _core.ranks_of(lazies)
            if ranks is not None:
                ranks.withdraw(isinstance(error, (MemoryError, torch.OutOfMemoryError)))


def _leaf(parameter: Any) -> torch.Tensor:
    leaf: torch.Tensor = parameter.detach().to_local().detach().requires_grad_()

    def hand_on(leaf: torch.Tensor) -> None:
        from torch.distributed.tensor import DTensor

        assert leaf.grad is not None
        p = parameter
        gradient = DTensor.from_local(
            leaf.grad,
            p.device_mesh,
            p.placements,
            run_check=False,
            shape=p.shape,
            stride=p.stride(),
        )
        leaf.grad = None
        p.grad = gradient if p.grad is None else p.grad + gradient
        for hook in (getattr(p, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(p)

    leaf.register_post_accumulate_grad_hook(hand_on)
    leaf._koila_parameter = parameter  # type: ignore[attr-defined]
    return leaf


def ends_in(leaf: torch.Tensor) -> Any:
    """The tensor whose `.grad` receives a leaf's gradient: the leaf, or its sharded parameter."""
    return getattr(leaf, "_koila_parameter", leaf)


def gradients(
    parameters: Sequence[Any],
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    inputs: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """Backward of one slice through a sharded module. Returns the gradients of `inputs`, then of
    this rank's part of every parameter, reduced over the ranks. It leaves `.grad` of the
    parameters unchanged; their hooks, which FSDP would call, run at the end of the step."""
    before, after_hooks = [p.grad for p in parameters], quiet_hooks(parameters, AFTER)
    outer = _core.backward_begins(_core.context())
    try:
        for p in parameters:
            p.grad = None
        run_backward(
            tuple(r for r, _ in pairs),
            tuple(g for _, g in pairs),
            False,
            False,
            (),
            allow_unreachable=True,
            accumulate_grad=True,
        )
        with torch.no_grad():
            return [
                *(t.grad for t in inputs),
                *(None if p.grad is None else p.grad.to_local() for p in parameters),
            ]
    finally:
        _core.backward_ends(outer)
        wake_hooks(after_hooks)
        for p, grad in zip(parameters, before):
            p.grad = grad

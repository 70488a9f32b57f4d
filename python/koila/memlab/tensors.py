"""All tensors with their names, for MemReporter and Snapshot. The walk itself is in C
(report.c)."""

from __future__ import annotations

import gc
import inspect
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Union

from .. import _core
from .._torch import second_owner_adds_reference
from . import devices

if TYPE_CHECKING:
    import torch

Models = Union["torch.nn.Module", "Mapping[str, torch.nn.Module]", None]
Row = tuple[Any, ...]
(
    NAME,
    KIND,
    SHAPE,
    NUMEL,
    DTYPE,
    DEVICE,
    BYTES,
    STORAGE_BYTES,
    STORAGE,
    DATA,
    OFFSET,
    FIRST,
    OWNER,
) = range(13)
_both_owners: bool | None = None


def _counts_both_owners() -> bool:
    global _both_owners
    if _both_owners is None:
        _both_owners = second_owner_adds_reference()
    return _both_owners


class Optimizer(Protocol):
    """True for an optimizer of torch or a wrapper of one."""

    @property
    def param_groups(self) -> Any: ...
    @property
    def state(self) -> Any: ...


def check_models(model: Models, call: str) -> list[tuple[str, weakref.ref[torch.nn.Module]]]:
    """[(prefix, weakref)] of a Module, a dict of Modules, or None."""
    if model is None:
        return []
    torch = sys.modules.get("torch")
    named: dict[str, Any] = model if isinstance(model, dict) else {"": model}
    for one in named.values():
        if torch is None or not isinstance(one, torch.nn.Module):
            raise TypeError(
                f"{call}: expected a torch.nn.Module or a dict of them, got {type(one).__name__}"
            )
    return [(f"{name}." if name else "", weakref.ref(one)) for name, one in named.items()]


def check_optimizer(optimizer: Optimizer, call: str) -> weakref.ref[Optimizer]:
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"{call}: expected an optimizer with param_groups, got {type(optimizer).__name__}"
        )
    return weakref.ref(optimizer)


def check_optimizers(
    optimizers: Optimizer | Sequence[Optimizer], call: str
) -> list[weakref.ref[Optimizer]]:
    several: Sequence[Any] = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    return [check_optimizer(o, call) for o in several]


class Names:
    """The names of tensors, from models and optimizers; anonymous tensors get numbers. Holds weak
    references only."""

    def __init__(
        self,
        models: Iterable[tuple[str, weakref.ref[torch.nn.Module]]] = (),
        optimizers: Iterable[weakref.ref[Optimizer]] = (),
    ) -> None:
        self.models = list(models)  # (prefix, the module)
        self.optimizers = list(optimizers)
        self.numbers: dict[Any, Any] = {}
        self.counter = [0]

    def roots(self) -> list[tuple[str, str, Any]]:
        """[(name, kind, tensor)]: parameters in model order, buffers, optimizer states."""
        found: list[tuple[str, str, Any]] = []
        buffers: list[tuple[str, str, Any]] = []
        parameter_names: dict[int, str] = {}
        for prefix, ref in self.models:
            model = ref()
            if model is None:
                continue
            for name, p in model.named_parameters():
                parameter_names.setdefault(id(p), prefix + name)
                found.append((prefix + name, "parameter", p))
            buffers += [(prefix + name, "buffer", b) for name, b in model.named_buffers()]
        found += buffers
        for each in self.optimizers:
            optimizer = each()
            if optimizer is None:
                continue
            kind = type(optimizer).__name__
            known = {}
            for g, group in enumerate(optimizer.param_groups):
                for i, p in enumerate(group["params"]):
                    known[id(p)] = parameter_names.get(id(p), f"group{g}.param{i}")
            for p, state in list(optimizer.state.items()):
                if not isinstance(state, dict):
                    continue
                for key, value in state.items():
                    found.append((f"{kind}.{known.get(id(p), 'param')}.{key}", "optimizer", value))
        return found

    def collect(self, shared_saved: bool = False, with_tensors: bool = False) -> list[Row]:
        """Rows of all tensors that exist now; see report.c. with_tensors: each row ends with its
        tensor."""
        torch = sys.modules.get("torch")
        if torch is None:
            return []
        devices.listen()
        both = _counts_both_owners()
        with torch._C.DisableTorchFunction(), torch.no_grad():
            return _mark_borrowed(
                _core.collect(
                    torch,
                    self.roots(),
                    self.numbers,
                    self.counter,
                    shared_saved,
                    both,
                    with_tensors,
                )
            )


def _mark_borrowed(rows: list[Row]) -> list[Row]:
    """Mark borrowed storages on accelerators: a storage that lies in no block of the allocator, or
    in a block that another storage has (DLPack), is borrowed."""
    ours = {devices.name(1 + i) for i in range(_core.memlab_devices()[1])}
    live: dict[str, set[int] | None] = {}  # by device: addresses of blocks without a row so far
    for i, r in enumerate(rows):
        if r[DEVICE] not in ours or r[BYTES] <= 0:
            continue
        if r[DEVICE] not in live:
            live[r[DEVICE]] = {
                address
                for address, _, state in blocks_of(devices.index(r[DEVICE]))
                if state == "active_allocated"
            } or None
        free = live[r[DEVICE]]
        if free is not None and r[DATA] not in free:
            rows[i] = (*r[:OWNER], "borrowed", *r[OWNER + 1 :])
        elif free is not None:
            free.discard(r[DATA])
    return rows


def books(rows: list[Row], device: str) -> dict[str, Any]:
    """Account for the bytes of the allocator of `device`: truth == listed + loose + rounding +
    waiting + unexplained.

    Keys: listed (bytes in rows), truth (bytes of the allocator), loose (bytes, blocks), rounding,
    waiting, unexplained, borrowed.
    """
    if device == "cpu":
        listed, older, borrowed, n_loose, blocks = _core.cpu_books(rows)
        loose = n_loose, blocks
        truth = _core.memlab_now(0)[0] + older
        rounding = waiting = 0
    else:
        here = [r for r in rows if r[DEVICE] == device and r[BYTES] > 0]
        mine = [r for r in here if r[OWNER] != "borrowed"]
        listed = sum(-(-r[BYTES] // 512) * 512 for r in mine)
        borrowed = sum(r[BYTES] for r in here if r[OWNER] == "borrowed")
        truth, loose, rounding, waiting = _accelerator(device, mine)
    left = truth - listed - loose[0] - rounding - waiting
    return dict(
        listed=listed,
        truth=truth,
        loose=loose,
        rounding=rounding,
        waiting=waiting,
        unexplained=left,
        borrowed=borrowed,
    )


def _accelerator(device: str, mine: list[Row]) -> tuple[int, tuple[int, int], int, int]:
    """(allocator bytes, (loose bytes, blocks), rounding, waiting) of an accelerator, from the
    blocks that its allocator lists."""
    number = devices.index(device)
    truth = _core.memlab_now(number)[0]
    found = {r[DATA]: -(-r[BYTES] // 512) * 512 for r in mine}
    loose_bytes = loose_blocks = rounding = waiting = 0
    for address, size, state in blocks_of(number):
        if state == "active_allocated" and address in found:
            rounding += size - found[address]
        elif state == "active_allocated":
            loose_bytes += size
            loose_blocks += 1
        elif state == "active_awaiting_free":
            waiting += size
    return (
        truth,
        (loose_bytes, loose_blocks),
        rounding,
        waiting if truth >= sum(found.values()) + loose_bytes + rounding + waiting else 0,
    )


def blocks_of(device: int) -> list[tuple[int, int, str]]:
    """[(address, bytes, state)] of the blocks that an accelerator's allocator lists, with its names
    of states; [] if it lists none."""
    torch, (kind, _) = sys.modules["torch"], _core.memlab_devices()
    try:
        snapshot = getattr(torch, str(kind)).memory_snapshot
        segments = (
            snapshot(include_traces=False)
            if "include_traces" in inspect.signature(snapshot).parameters
            else snapshot()
        )
    except (RuntimeError, AttributeError):
        return []
    found = []
    for segment in segments:
        if segment.get("device", 0) != device - 1:
            continue
        at = segment["address"]
        for block in segment["blocks"]:
            at = block.get("address", at)
            found.append((at, block["size"], block["state"]))
            at += block["size"]
    return found


def ready() -> None:
    """Prepare now for a report when no memory is left: the look-ups here need a few bytes."""
    torch = sys.modules.get("torch")
    devices.listen()
    if torch is not None:
        _counts_both_owners()
        _core.report_prepare(torch)


def names_around() -> Names:
    """Names for a report without a model: from all modules without a parent, and all
    optimizers."""
    torch = sys.modules["torch"]
    objects = gc.get_objects()
    modules = [o for o in objects if issubclass(type(o), torch.nn.Module)]
    optimizers = [weakref.ref(o) for o in objects if issubclass(type(o), torch.optim.Optimizer)]
    children = {id(c) for m in modules for c in m.__dict__.get("_modules", {}).values()}
    tops = [m for m in modules if id(m) not in children and any(True for _ in m.parameters())]
    return Names(
        [
            ("" if len(tops) == 1 else f"{type(m).__name__}{i or ''}.", weakref.ref(m))
            for i, m in enumerate(tops)
        ],
        optimizers,
    )

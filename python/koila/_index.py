"""Indexing: by masks, by an arange of the program, and bags of one length."""

from __future__ import annotations

from typing import Any

from ._torch import torch
from . import _core
from ._calls import gather, redispatch, run_on_reals
from ._special import special
from ._tensor import plain

aten = torch.ops.aten

_MASKS = (torch.bool, torch.uint8)


def special_index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Index with a mask: only the mask is made concrete, and its positions are recorded. To write
    one number needs no positions, see _filled(). For `x[torch.arange(B), i]` see _as_factory()."""
    filled = _filled(func, args, kwargs)
    if filled is not None:
        return filled
    self, indices = args[0], list(args[1])
    gather(func, [i for i in indices if i is not None and i.dtype in _MASKS], {})
    own = _core.is_lazy(self) and _core.tape_of(self) is _core.current_tape()
    flat: list[Any] = []
    for i, index in enumerate(indices):
        if index is None:
            flat.append(None)
        elif index.dtype in _MASKS:
            _check_mask(self, index, len(flat))
            flat.extend(plain(index).nonzero().unbind(1))
        else:
            flat.append(_as_factory(index) if own and i == 0 else index)
    return _core.record(func, (self, flat, *args[2:]), kwargs)


@special("masked_select")
def _masked_select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As `x[mask]` of x and mask broadcast: only the mask is made concrete."""
    self, mask = args[:2] if len(args) > 1 else (None, None)
    if not _core.is_lazy(self) or mask.dtype != torch.bool or mask.device != self.device or kwargs:
        return run_on_reals(func, args, kwargs)
    try:
        size = torch.broadcast_shapes(self.size(), mask.size())
    except RuntimeError:  # the operator's own error says more
        return run_on_reals(func, args, kwargs)
    if not size or 0 in size:
        return run_on_reals(func, args, kwargs)
    gather(func, [mask], {})
    known = plain(mask).expand(size)
    rest = len(size)  # the dimensions from here on have one value of the mask
    while rest and (size[rest - 1] == 1 or known.stride(rest - 1) == 0):
        rest -= 1
    if not rest:
        return run_on_reals(func, args, kwargs)
    first = known.flatten(rest)[..., 0] if rest < len(size) else known
    positions = first.nonzero().unbind(1)
    if self.size() != size:
        self = redispatch(aten.expand.default, (self, list(size)), {})
    taken = _core.record(aten.index.Tensor, (self, list(positions)), {})
    return taken if rest == len(size) else redispatch(aten.reshape.default, (taken, [-1]), {})


def _filled(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x[mask] = number` is recorded as masked_fill, which needs no positions. Returns its result;
    None: the call is not of that form."""
    name = func._schema.name.removeprefix("aten::")
    if name not in ("index_put", "index_put_", "_index_put_impl_"):
        return None
    self, indices, value = args[0], args[1], args[2]
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    if len(indices) != 1 or indices[0].dtype != torch.bool or value.numel() != 1 or accumulate:
        return None
    mask = indices[0]
    if not _core.is_lazy(self) or tuple(mask.size()) != tuple(self.size()[: mask.dim()]):
        return None
    mask = mask.reshape(tuple(mask.size()) + (1,) * (self.dim() - mask.dim()))
    target = aten.masked_fill.Tensor if name == "index_put" else aten.masked_fill_.Tensor
    return redispatch(target, (self, mask, value.reshape(())), {})


def _check_mask(self: torch.Tensor, mask: torch.Tensor, at: int) -> None:
    """Raise eager's IndexError when the mask does not have the sizes of `self` from dimension `at`
    on."""
    if tuple(mask.size()) == tuple(self.size()[at : at + mask.dim()]):
        return
    for j in range(mask.dim()):
        if mask.size(j) != self.size(at + j):
            raise IndexError(
                f"The shape of the mask {list(mask.size())} at index {j} does not match the shape "
                f"of the indexed tensor {list(self.size())} at index {at + j}"
            )


def _can_be_read(t: torch.Tensor) -> bool:
    """Is it on the host, or on a GPU that can be waited for? (Not in the capture of a graph.)"""
    if t.device.type == "cuda":
        return not torch.cuda.is_current_stream_capturing()
    return t.device.type == "cpu"


def _as_factory(index: torch.Tensor) -> Any:
    """Record a plain tensor with the values 0, 1, 2, ... as the arange that makes it, so that each
    slice makes its own. Only the values count, not their origin."""
    n = index.numel()
    if _core.is_lazy(index) or n not in index.size() or not _can_be_read(index):
        return index
    count = torch.arange(n, dtype=index.dtype, device="cpu")
    if not torch.equal(index.flatten().cpu(), count):
        return index
    rows = _core.record(aten.arange.default, (n,), {"dtype": index.dtype, "device": index.device})
    if index.dim() == 1:
        return rows
    return redispatch(aten.view.default, (rows, list(index.size())), {})


@special(
    "_embedding_bag",
    "_embedding_bag_forward_only",
    "_embedding_bag_backward",
    "_embedding_bag_per_sample_weights_backward",
)
def _embedding_bag(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record the offsets of bags of one length (an index of two dimensions) as the operator that
    makes them, like _as_factory(): each slice makes the offsets of its own bags."""
    name = func._schema.name.removeprefix("aten::")
    if name == "_embedding_bag_backward" and args[9]:  # a sparse gradient
        return run_on_reals(func, args, kwargs)
    at = 3 if name.endswith("weights_backward") else 2  # the offsets; before them the indices
    indices, offsets = args[at - 1 : at + 1]
    n, n_bags = indices.numel(), offsets.numel()
    if not _core.is_lazy(offsets) and n and n_bags and n % n_bags == 0:
        step = n // n_bags
        made = {"dtype": offsets.dtype, "device": offsets.device}
        # On meta, where a step is only planned, there are no values to compare.
        if offsets.is_meta or torch.equal(offsets, torch.arange(0, n, step, **made)):
            regular = _core.record(aten.arange.start_step, (0, n, step), made)
            args = (*args[:at], regular, *args[at + 1 :])
    return _core.record(func, args, kwargs)

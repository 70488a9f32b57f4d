"""Settled factories: tensors of torch.zeros and its like, called within a step, that became plain
tensors in a lazy wrapper. See Note [Settling] in factories.c."""

from __future__ import annotations

from typing import Any

from ._torch import set_data, torch
from . import _core
from ._calls import lazies_of, map_call, map_tensors, redispatch, tensors_of, with_strides
from ._tensor import plain


def settled_views(
    base: torch.Tensor, meta: tuple[Any, ...], fresh: bool, places: list[tuple[Any, ...]]
) -> list[torch.Tensor]:
    """Memory for a factory that settles: the contents of `base`, one view for each place (size,
    stride, offset)."""
    with torch.inference_mode(False), torch.no_grad():
        memory = base if fresh and tuple(base.stride()) == meta[3] else with_strides(base, meta)
        return [memory.as_strided(*place) for place in places]


def alias_of(x: torch.Tensor) -> torch.Tensor:
    """A plain tensor with the memory and the version counter of `x`, which has memory."""
    # This key's kernel shares the version counter; the key is excluded while operators are
    # recorded.
    key = torch._C.DispatchKey.ADInplaceOrView
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
    guard = torch._C._DisableTorchDispatch()
    try:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
        with torch.inference_mode(False):
            return torch._C.TensorBase.detach(x)
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, excluded)
        del guard


def on_settled(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on a settled factory: a plain tensor that is dispatched here because of its
    class only. See Note [Settling] in factories.c."""
    if lazies_of(args, kwargs):
        back = {id(s): t for t in tensors_of(args, kwargs) if (s := _core.settled(t)) is not None}
        a, k = map_call(lambda t: t if _core.is_lazy(t) else plain(t), args, kwargs)
        result = redispatch(func, tuple(a), k)
        for t in back.values():
            if (s := plain(t)).size() != t.size():  # out= of another size
                set_data(t, s)
        return map_tensors(lambda t: back.get(id(t), t), result)
    written = [(t, t._version) for t in _in_written_lists(func, args) if not t.is_inference()]
    guard = torch._C._DisableTorchDispatch()
    try:
        result = func(*args, **kwargs)
    finally:
        del guard
    if (
        torch.Tag.inplace_view in func.tags
        or func._schema.name in ("aten::resize_", "aten::resize_as_", "aten::set_")
        or "out" in kwargs
    ):
        for t in tensors_of(args, kwargs):
            if _core.settled(t) is not None:
                _core.resettle(t, alias_of(t))
    # kernels that take whole lists on a GPU count themselves
    count_write([t for t, version in written if t._version == version])
    return result


def _in_written_lists(func: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    return [
        t
        for write, a in zip(func._schema.arguments, args)
        if write.alias_info is not None and write.alias_info.is_write
        if isinstance(a, (list, tuple))
        for t in a
    ]


def count_write(tensors: Any) -> None:
    """Count the versions of the tensors in a list, which torch does not do."""
    counted = tuple(t for t in tensors if not t.is_inference())
    torch._C._autograd._unsafe_set_version_counter(counted, tuple(t._version + 1 for t in counted))

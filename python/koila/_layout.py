"""Operators that change a tensor's memory layout or depend on it: `t_` and its like, `squeeze`,
`as_strided`."""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any
from collections.abc import Callable

from ._torch import second_owner_adds_reference, set_data, torch, use_count
from . import _core
from ._calls import redispatch
from ._errors import UnsupportedError
from ._shapes import check_plain_views, layout_of, real_error, shared_places
from ._special import special
from ._tensor import LazyTensor, plain

aten = torch.ops.aten


def as_strided(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("self", "size", "stride", "storage_offset")
    full = list(args) + [kwargs.get(n) for n in names[len(args) :]]
    if full[3] is None:
        full[3] = full[0].storage_offset()
    elif _core.begins_within(full[0]):
        raise UnsupportedError(
            f"as_strided(storage_offset={full[3]}) counts from where the memory begins, and the "
            "batch is a view that begins later: what lies before it is no part of the step. Leave "
            "the offset out, or pass lazy() a clone() of the view"
        )
    return _core.record(func, tuple(full), {})


_twins = {
    "aten::t_": aten.t.default,
    "aten::squeeze_": aten.squeeze.default,
    "aten::squeeze_.dim": aten.squeeze.dim,
    "aten::squeeze_.dims": aten.squeeze.dims,
    "aten::unsqueeze_": aten.unsqueeze.default,
    "aten::transpose_": aten.transpose.int,
    "aten::swapdims_": aten.swapdims.default,
    "aten::swapaxes_": aten.swapaxes.default,
    "aten::as_strided_": aten.as_strided.default,
}


class _SharedLayout(UnsupportedError):
    """The layout of a tensor with views, or of a view, would change below autograd, which would
    then replay the views on the changed tensor."""


class _Changing(threading.local):
    tensor: torch.Tensor | None = None  # may change its layout although it has views


_changing = _Changing()  # _in_place() looks after the views


def metadata_write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`t_` and its like: the wrapper becomes a view of itself. With other wrappers of the same
    memory alive, autograd would replay their views on the changed base and give a wrong gradient:
    see _in_place()."""
    overload = func._schema.overload_name
    name = f"{func._schema.name}.{overload}" if overload else func._schema.name
    self = args[0]
    if name not in _twins:
        raise UnsupportedError(
            f"{func} on a lazy tensor changes its memory layout. Use the version without "
            "underscore, or x.torch()"
        )
    _, n, _ = _core.group_info(self)
    shared = self._is_view() or (n > 1 and self is not _changing.tensor)
    try:
        twin = redispatch(_twins[name], args, kwargs)
    except UnsupportedError:
        raise
    except Exception:
        real_error(func, args, kwargs)  # eager's error, which names func and not its twin
        raise
    if shared:
        raise _SharedLayout(
            f"{func} on a lazy tensor that shares memory with a view or an alias of it. Use the "
            "version without underscore"
        )
    if not _core.is_lazy(twin):  # the step has run, and with it what `self` stands for
        if n > 1:
            raise UnsupportedError(
                f"{func} on a lazy tensor of a step that has run, whose memory others share. Use "
                "the version without underscore"
            )
        check_plain_views(func, plain(self), 3)
        _core.tape_open()
        twin = _core.lazy_leaf(twin.detach(), None, 0)
    if name == "aten::as_strided_":  # adaptive pooling calls it on its fresh result
        set_data(self, twin)
    else:
        guard = torch._C._DisableTorchDispatch()
        func(*args, **kwargs)
        del guard
    _core.become(self, twin)
    return self


# Tensors of a failed self-test: their reference counts are wrong, so they must never be freed.
_kept: list[torch.Tensor] = []


@functools.cache
def _can_swap() -> bool:
    """Can two tensors that C++ also owns exchange their contents? Tried once: the references that
    C++ holds must move along."""
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(2, 3, requires_grad=True) * 1
        view, twin = x.view(-1), x.t()
        counts = sys.getrefcount(x), sys.getrefcount(twin)
        uses = use_count(x), use_count(twin)
        torch._C._swap_tensor_impl(x, twin)
        expected = (counts[0] - 1, counts[1] + 1) if second_owner_adds_reference() else counts
        works = (sys.getrefcount(x), sys.getrefcount(twin)) == expected
        works = works and (use_count(x), use_count(twin)) == uses[::-1]
        if not works:  # pragma: no cover - another torch
            _kept.extend((x, twin, view))
    return works


def _in_place(name: str) -> Callable[..., Any]:
    """A method like `t_`, also where memory is shared.

    For a plain tensor autograd remembers where a view lies in its base's memory. For a subclass it
    remembers the view's function, and would replay it on the changed base. So after the change
    every view of a base is replaced by a view by memory, as plain autograd would make it. The
    oldest comes first: autograd adds the gradients of the newest first, and the order decides the
    last bit of the sum. (Plain autograd makes each view at its next use; if views are used in
    another order than they were made, the last bit differs.) A view `v` itself becomes `v.t()`, in
    the same object, by torch's own exchange of contents.
    """
    write, make = getattr(torch.Tensor, name), getattr(torch.Tensor, name[:-1])

    def method(self: LazyTensor, *args: Any, **kwargs: Any) -> Any:
        if _core.settled(self) is not None:
            return write(self, *args, **kwargs)
        if self.is_inference():  # no autograd
            return _change(write, self, args, kwargs)
        if not self._is_view():
            return _change_base(write, self, args, kwargs)
        try:
            return write(self, *args, **kwargs)  # autograd objects before it asks us
        except _SharedLayout:
            if not _exchangeable(self):
                raise
        torch._C._autograd._unsafe_set_version_counter((self,), (self._version + 1,))
        with torch.enable_grad():
            twin = make(self, *args, **kwargs)
        self._v, twin._v = twin._v, self._v  # type: ignore[attr-defined]
        torch._C._swap_tensor_impl(self, twin)
        _core.rewrap(self)
        _core.rewrap(twin)
        _core.stand_beside(self, twin)  # the order of the wrappers by age stays as it was
        return self

    method.__name__, method.__doc__ = name, write.__doc__
    return method


def _change_base(write: Callable[..., Any], self: LazyTensor, args: Any, kwargs: Any) -> Any:
    """`write` the layout of a tensor that is no view of another; its views keep their places."""
    wrappers = reversed(_core.group_wrappers(self))  # oldest first
    views = [v for v in wrappers if v is not self and v._base is self and _follows(v)]
    if not views:
        return _change(write, self, args, kwargs)
    inference = torch.is_inference_mode_enabled()
    lawful = not inference and (torch.is_grad_enabled() or not self.requires_grad)
    if not lawful or not all(
        _exchangeable(v) and shared_places(layout_of(self), layout_of(v))[1] for v in views
    ):
        return write(self, *args, **kwargs)  # raises
    _change(write, self, args, kwargs)
    for v in views:
        torch._C._swap_tensor_impl(v, view_by_memory(self, v))
    return self


def view_by_memory(base: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """The memory that `view` looks at, as a view of `base`, whose layout has just been written. If
    `base` got a gradient function and nobody has looked at `view` since, torch takes `view` for a
    leaf and refuses to write it, until somebody looks; so it does with the new view then."""
    place = view.size(), view.stride(), view.storage_offset()
    if not (base.requires_grad and aten.is_leaf(view)):  # the attribute `is_leaf` is a look
        with torch.enable_grad():
            return base.as_strided(*place)
    autograd, version = torch._C._autograd, base._version
    autograd._unsafe_set_version_counter((base,), (version - 1,))
    try:
        with torch.no_grad():
            made = base.as_strided(*place)
    finally:
        autograd._unsafe_set_version_counter((base,), (version,))
    autograd._set_creation_meta(made, autograd.CreationMeta.DEFAULT)
    return made


def _change(write: Callable[..., Any], self: LazyTensor, args: Any, kwargs: Any) -> Any:
    """Call `write`, and let it change the layout of `self` although other wrappers share it."""
    _changing.tensor = self
    try:
        return write(self, *args, **kwargs)
    finally:
        _changing.tensor = None


def _follows(view: torch.Tensor) -> bool:
    """Does autograd let the view follow a write to its base? For the others (outputs of unbind or
    split, views made under no_grad) it raises eager's error at their next use."""
    return torch._C._autograd._get_creation_meta(view) == torch._C._autograd.CreationMeta.DEFAULT


def _exchangeable(view: torch.Tensor) -> bool:
    """Can another view of the same base replace this one? Not if it has hooks or retains its
    gradient. Reads nothing that makes autograd replay the view."""
    if (
        view._backward_hooks
        or view.retains_grad
        or torch.is_inference_mode_enabled()
        or not _can_swap()
    ):
        return False
    return not view.requires_grad or (
        torch.is_grad_enabled() and view._base is not None and view._base.requires_grad
    )


for _name in ("t_", "squeeze_", "unsqueeze_", "transpose_", "swapdims_", "swapaxes_"):
    setattr(LazyTensor, _name, _in_place(_name))


@special("squeeze")
def _squeeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record squeeze() with the dimensions it removes: a slice of one row also has size 1 in its
    batch dimension, which must stay."""
    x, dims = args[0], list(args[1:]) + list(kwargs.values())
    if not dims:
        named = list(range(x.dim()))
    else:
        given = [dims[0]] if isinstance(dims[0], int) else list(dims[0])
        named = [d % x.dim() for d in given if -x.dim() <= d < x.dim()]
        if len(named) != len(given):  # out of range: eager's error
            return _core.record(func, args, kwargs)
    return _core.record(aten.squeeze.dims, (x, [d for d in named if x.size(d) == 1]), {})

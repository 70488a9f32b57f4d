"""Operators that need a decision, in Python: data-dependent ones, composites, masks, layouts in
place, BatchNorm, foreach."""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any, Callable

from ._torch import DATA, second_owner_adds_reference, torch, use_count
from . import _core
from ._calls import gather, redispatch, run_on_reals, tensors_of, write_now, write_real
from ._errors import UnsupportedError
from ._settled import count_write, on_settled
from ._shapes import layout_of, real_error, shared_places
from ._tensor import LazyTensor, plain

aten = torch.ops.aten

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
handlers: dict[str, Handler] = {}  # by "namespace::name", any overload


def special(*names: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        for name in names:
            handlers["aten::" + name] = handler
        return handler

    return register


def collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.distributed: every rank calls it at the same place of its program, so it happens now,
    on values. Schemas do not say what is written: it is the first argument."""
    writes = func._schema.name.removeprefix("c10d::") not in (
        "send",
        "barrier",
        "monitored_barrier_",
    )
    first = len(tensors_of(args[:1], {}))
    rest = len(tensors_of(args[1:], kwargs))
    return write_now(func, args, kwargs, [writes] * first + [False] * rest)


@special(
    "_local_scalar_dense",
    "equal",
    "nonzero",
    "nonzero_numpy",
    "masked_select",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
)
@special(
    "unique_dim_consecutive",
    "bincount",
    "repeat_interleave.Tensor",
    "is_nonzero",
    "_assert_async",
    "_linalg_check_errors",
    "multinomial",
    "is_set_to",
)
def _data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return run_on_reals(func, args, kwargs)


@special("is_pinned")
def _is_pinned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return False


@special("_pin_memory", "pin_memory")
def _pin(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _core.record(aten.alias.default, args[:1], {})


@special("record_stream")
def _nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    return None


@special("set_", "as_strided_scatter", "as_strided_copy")
def _refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func._schema.name == "aten::set_" and _core.settle(args[0]):
        return on_settled(func, args, kwargs)
    raise UnsupportedError(
        f"{func} on a lazy tensor addresses memory that it does not have. Use x.torch()"
    )


@special("resize_", "resize_as_")
def _resize(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    size = args[1].size() if isinstance(args[1], torch.Tensor) else tuple(args[1])
    if tuple(args[0].size()) == tuple(size):
        return args[0]
    if _core.settle(args[0]):
        return on_settled(func, args, kwargs)
    raise UnsupportedError(
        f"{func}: a lazy tensor cannot be resized from {tuple(args[0].size())} to {tuple(size)}"
    )


def decompose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = func.decompose(*args, **kwargs)
    return _core.record(func, args, kwargs) if result is NotImplemented else result


def as_strided(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("self", "size", "stride", "storage_offset")
    full = list(args) + [kwargs.get(n) for n in names[len(args) :]]
    if full[3] is None:
        full[3] = full[0].storage_offset()
    return _core.record(func, tuple(full), {})


def special_index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Index with a mask: make only the mask concrete and record its positions; a write of one
    number needs not even that. And `x[torch.arange(B), i]`: see _as_factory()."""
    self, indices = args[0], list(args[1])
    masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
    name = func._schema.name.removeprefix("aten::")
    if (
        name in ("index_put", "index_put_", "_index_put_impl_")
        and len(indices) == 1
        and indices[0].dtype == torch.bool
    ):
        value = args[2]
        accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
        mask = indices[0]
        if (
            value.numel() == 1
            and not accumulate
            and tuple(mask.size()) == tuple(self.size()[: mask.dim()])
        ):
            mask = mask.reshape(tuple(mask.size()) + (1,) * (self.dim() - mask.dim()))
            target = aten.masked_fill.Tensor if name == "index_put" else aten.masked_fill_.Tensor
            if _core.is_lazy(self):
                return redispatch(target, (self, mask, value.reshape(())), {})
    gather(func, masks, {})
    flat: list[Any] = []
    for i, index in enumerate(indices):
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            own = (
                i == 0
                and index is not None
                and _core.is_lazy(self)
                and _core.tape_of(self) is _core.current_tape()
            )
            flat.append(_as_factory(index) if own else index)
            continue
        at = sum(1 if f is None else 1 for f in flat)
        expected = self.size()[at : at + index.dim()]
        if tuple(index.size()) != tuple(expected):
            for j in range(index.dim()):
                if index.size(j) != self.size(at + j):
                    raise IndexError(
                        f"The shape of the mask {list(index.size())} at index {j} does not match "
                        f"the shape of the indexed tensor {list(self.size())} at index {at + j}"
                    )
        flat.extend(_positions(plain(index)))
    return _core.record(func, (self, flat, *args[2:]), kwargs)


def _as_factory(index: torch.Tensor) -> Any:
    """A plain tensor that now holds 0, 1, 2, ... is recorded as the operator that makes them, so
    that a slice can make its own. By value: where it comes from does not matter."""
    n = index.numel()
    if (
        _core.is_lazy(index)
        or index.device.type != "cpu"
        or n not in index.size()
        or not torch.equal(index.flatten(), torch.arange(n, dtype=index.dtype))
    ):
        return index
    rows = _core.record(aten.arange.default, (n,), {"dtype": index.dtype, "device": index.device})
    return (
        rows if index.dim() == 1 else redispatch(aten.view.default, (rows, list(index.size())), {})
    )


@special(
    "_embedding_bag",
    "_embedding_bag_forward_only",
    "_embedding_bag_backward",
    "_embedding_bag_per_sample_weights_backward",
)
def _embedding_bag(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Offsets of bags of one length (an index of two dimensions) are recorded as the operator that
    makes them, as in _as_factory(): a slice makes those of its own bags."""
    name = func._schema.name.removeprefix("aten::")
    if name == "_embedding_bag_backward" and args[9]:  # a sparse gradient
        return run_on_reals(func, args, kwargs)
    at = 3 if name.endswith("weights_backward") else 2  # the offsets; before them the indices
    indices, offsets = args[at - 1 : at + 1]
    n, n_bags = indices.numel(), offsets.numel()
    if not _core.is_lazy(offsets) and n and n_bags and n % n_bags == 0:
        step = n // n_bags
        made = {"dtype": offsets.dtype, "device": offsets.device}
        if offsets.is_meta or torch.equal(
            offsets, torch.arange(0, n, step, **made)
        ):  # what is only planned has no values
            args = (
                *args[:at],
                _core.record(aten.arange.start_step, (0, n, step), made),
                *args[at + 1 :],
            )
    return _core.record(func, args, kwargs)


def _positions(mask: torch.Tensor) -> list[torch.Tensor]:
    return list(mask.nonzero().unbind(1))


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
    """The layout of a tensor with views, or of a view, would change below autograd, which would go
    on to replay the views on it."""


_settled: torch.Tensor | None = (
    None  # the tensor whose layout may change: _in_place() looks after its views
)


def metadata_write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`t_` and its like: the wrapper becomes a view of itself. With other wrappers of the same
    memory alive, autograd would replay their views on the changed base and give a wrong gradient:
    see _in_place()."""
    name = func._schema.name + (
        "." + func._schema.overload_name if func._schema.overload_name else ""
    )
    self = args[0]
    if name not in _twins:
        raise UnsupportedError(
            f"{func} on a lazy tensor changes its memory layout. Use the version without "
            "underscore, or x.torch()"
        )
    _, n, _ = _core.group_info(self)
    shared = self._is_view() or (n > 1 and self is not _settled)
    try:
        twin = redispatch(_twins[name], args, kwargs)
    except UnsupportedError:
        raise
    except Exception:
        real_error(func, args, kwargs)  # names itself, not its twin
        raise
    if shared:
        raise _SharedLayout(
            f"{func} on a lazy tensor that shares memory with a view or an alias of it. Use the "
            "version without underscore"
        )
    if name == "aten::as_strided_":  # adaptive pooling does it to what it just made
        DATA.__set__(self, twin)
    else:
        guard = torch._C._DisableTorchDispatch()
        func(*args, **kwargs)
        del guard
    _core.become(self, twin)
    return self


_kept: list[
    torch.Tensor
] = []  # of a failed self-test: their reference counts are wrong, so they live on


@functools.cache
def _can_swap() -> bool:
    """May two tensors that C++ also owns exchange what they stand for? Tried once: the references
    that C++ holds must move along."""
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(2, 3, requires_grad=True) * 1
        view, twin = x.view(-1), x.t()
        counts, uses = (sys.getrefcount(x), sys.getrefcount(twin)), (use_count(x), use_count(twin))
        torch._C._swap_tensor_impl(x, twin)
        expected = (counts[0] - 1, counts[1] + 1) if second_owner_adds_reference() else counts
        works = (sys.getrefcount(x), sys.getrefcount(twin)) == expected and (
            use_count(x),
            use_count(twin),
        ) == uses[::-1]
        if not works:  # pragma: no cover - another torch
            _kept.extend((x, twin, view))
    return works


def _in_place(name: str) -> Callable[..., Any]:
    """A method like `t_`, where memory is shared.

    Plain autograd remembers where a view lies in its base's memory; of a subclass it remembers the
    function, and would replay it on the changed base. So after the change every view of a base is
    made the view by memory that plain autograd would take it for, the oldest first: autograd adds
    the gradients of what was made last first, and three numbers in another order are another sum in
    the last bit. (Plain autograd makes each when it is used next; those that are used in another
    order than they were made in differ.) A view `v` itself becomes `v.t()`, in the same object, by
    torch's own exchange of contents.
    """
    write, make = getattr(torch.Tensor, name), getattr(torch.Tensor, name[:-1])

    def method(self: LazyTensor, *args: Any, **kwargs: Any) -> Any:
        if _core.settled(self) is not None:
            return write(self, *args, **kwargs)
        if self.is_inference():  # no autograd
            return settled(self, args, kwargs)
        if not self._is_view():
            views = [
                v
                for v in reversed(_core.group_wrappers(self))
                if v is not self and v._base is self and _follows(v)
            ]  # oldest first
            if not views:
                return settled(self, args, kwargs)
            lawful = not torch.is_inference_mode_enabled() and (
                torch.is_grad_enabled() or not self.requires_grad
            )
            if not lawful or not all(
                _exchangeable(v) and shared_places(layout_of(self), layout_of(v))[1] for v in views
            ):
                return write(self, *args, **kwargs)  # raises
            settled(self, args, kwargs)
            with torch.enable_grad():
                for v in views:
                    torch._C._swap_tensor_impl(
                        v, self.as_strided(v.size(), v.stride(), v.storage_offset())
                    )
            return self
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
        _core.stand_beside(self, twin)  # it is no younger for what was done to it
        return self

    def settled(self: LazyTensor, args: Any, kwargs: Any) -> Any:
        global _settled
        _settled = self
        try:
            return write(self, *args, **kwargs)
        finally:
            _settled = None

    method.__name__, method.__doc__ = name, write.__doc__
    return method


def _follows(view: torch.Tensor) -> bool:
    """Does autograd let the view follow a write to its base? Of the others (outputs of unbind or
    split, views made under no_grad) it raises eager's error when they are used."""
    return torch._C._autograd._get_creation_meta(view) == torch._C._autograd.CreationMeta.DEFAULT


def _exchangeable(view: torch.Tensor) -> bool:
    """May another view of the same base take the place of this one, all that hangs on it included?
    Looks at nothing that would have autograd replay it."""
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
    """By name: a slice of one row has a batch dimension of size 1 that the whole does not have."""
    x, dims = args[0], list(args[1:]) + list(kwargs.values())
    try:
        named = (
            range(x.dim())
            if not dims
            else [
                d % x.dim()
                for d in ([dims[0]] if isinstance(dims[0], int) else dims[0])
                if -x.dim() <= d < x.dim()
            ]
        )
        valid = not dims or len(named) == (1 if isinstance(dims[0], int) else len(dims[0]))
    except ZeroDivisionError:  # no dimension
        named, valid = [], False
    if not valid:
        return _core.record(func, args, kwargs)
    return _core.record(aten.squeeze.dims, (x, [d for d in named if x.size(d) == 1]), {})


# -- BatchNorm


# False while explain() records a backward that nobody called: a checkpoint in it runs its forward
# again
effects_count = True


_counted: weakref.WeakKeyDictionary[Any, list[tuple[torch.Tensor, int]]] = (
    weakref.WeakKeyDictionary()
)  # tape -> counters of its forwards, with their versions
_counts = {
    torch.nn.modules.batchnorm._BatchNorm.forward.__code__,
    torch.nn.SyncBatchNorm.forward.__code__,
}  # where torch itself does `num_batches_tracked.add_(1)`


def _remember_count(value: Any, mean: torch.Tensor) -> None:
    """The module that called has counted this batch already, in plain torch; its statistics come
    when the step is complete. Both or neither: see uncount()."""
    frame: Any = sys._getframe(2)
    for _ in range(16):
        if frame is None:
            return
        if frame.f_code in _counts:
            module = frame.f_locals["self"]
            counter = module.num_batches_tracked
            if module.running_mean is mean and counter is not None and not _core.is_lazy(counter):
                _counted.setdefault(_core.tape_of(value), []).append((counter, counter._version))
            return
        frame = frame.f_back


def uncount(tape: Any) -> None:
    """The step failed, its statistics do not happen: the batches it counted were none. What has
    been written since stays as written."""
    for counter, version in reversed(_counted.pop(tape, ())):
        if counter._version == version:
            with torch.no_grad():
                counter.sub_(1)
            torch._C._autograd._unsafe_set_version_counter((counter,), (version - 1,))


@special(
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_batch_norm_with_update",
    "cudnn_batch_norm",
    "miopen_batch_norm",
)
def _batch_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In training mode: the functional form; the new running statistics are written when the step
    ends, exactly once."""
    if func._schema.overload_name not in ("", "default") or kwargs:
        return _core.record(func, args, kwargs)
    name = func._schema.name.removeprefix("aten::")
    if name == "_batch_norm_with_update":
        x, weight, bias, mean, var, momentum, eps = args
        training = True
    else:
        x, weight, bias, mean, var, training, momentum, eps = args
    vendor = name in ("cudnn_batch_norm", "miopen_batch_norm")
    if training and vendor and mean is None:
        results = _core.record(aten.native_batch_norm.default, args, kwargs)
        return (
            (*results, torch.empty(0, dtype=torch.uint8)) if name == "cudnn_batch_norm" else results
        )
    if not training or mean is None or var is None:
        return _core.record(func, args, kwargs)
    out, saved_mean, saved_invstd, new_mean, new_var = _core.record(
        aten._native_batch_norm_legit_functional.default,
        (x, weight, bias, mean, var, True, momentum, eps),
        {},
    )
    for buffer, value in ((mean, new_mean), (var, new_var)):
        if _core.is_lazy(buffer):
            redispatch(aten.copy_.default, (buffer, value), {})
        elif not _core.is_lazy(value):
            write_real(aten.copy_.default, (buffer, value), {})
        elif effects_count:
            _core.effect(value, buffer)
            if buffer is mean:
                _remember_count(value, mean)
    if x.size(0) == 1 and _core.is_lazy(
        new_mean
    ):  # instance_norm: its statistics are temporaries that it reads at once
        _core.run(_core.tape_of(new_mean), [], True)
    if name in (
        "_batch_norm_with_update",
        "cudnn_batch_norm",
    ):  # the last is workspace of a backward kernel that is not used
        return out, saved_mean, saved_invstd, torch.empty(0, dtype=torch.uint8)
    return out, saved_mean, saved_invstd


@special("cudnn_batch_norm_backward", "miopen_batch_norm_backward")
def _batch_norm_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The vendors' kernels save what the native ones do, mean and inverse deviation; only the
    native backward can be cut."""
    x, gradient, weight, mean, var, saved_mean, saved_invstd, eps = args[:8]
    return _core.record(
        aten.native_batch_norm_backward.default,
        (
            gradient,
            x,
            weight,
            mean,
            var,
            saved_mean,
            saved_invstd,
            True,
            eps,
            [True, weight is not None, weight is not None],
        ),
        {},
    )


# -- foreach


def foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One ordinary operator per tensor, as the kernel without a fast path does; then the version
    counters, which nobody else counts."""
    name = func._schema.name.removeprefix("aten::_foreach_")
    overload = func._schema.overload_name
    packet: Any = getattr(aten, name, None)
    n = len(args[0])
    results = []
    if name in ("zero_",):
        packet = aten.zero_
    for i in range(n):
        one = []
        for a, spec in zip(args, func._schema.arguments):
            one.append(a[i] if isinstance(a, (list, tuple)) and "List" in str(spec.type) else a)
        kw = {k: v[i] if isinstance(v, (list, tuple)) else v for k, v in kwargs.items()}
        if name in ("addcmul", "addcmul_", "addcdiv", "addcdiv_"):
            value = one.pop() if len(one) > 3 else 1
            results.append(
                packet(*one, value=value if not isinstance(value, torch.Tensor) else value[i])
            )
        elif name in ("copy", "copy_"):
            results.append(
                aten.copy_.default(one[0], *one[1:]) if name == "copy_" else aten.copy.default(*one)
            )
        elif name in (
            "maximum",
            "minimum",
            "maximum_",
            "minimum_",
            "clamp_min",
            "clamp_max",
            "clamp_min_",
            "clamp_max_",
        ):
            plain_name = {"maximum": "clamp_min", "minimum": "clamp_max"}.get(
                name.rstrip("_"), name.rstrip("_")
            )
            if overload == "List":
                out = getattr(aten, {"clamp_min": "maximum", "clamp_max": "minimum"}[plain_name])(
                    one[0], one[1]
                )
            else:
                out = getattr(aten, plain_name)(one[0], one[1])
            results.append(aten.copy_.default(one[0], out) if name.endswith("_") else out)
        elif name == "norm":
            p = one[1] if len(one) > 1 else 2
            results.append(aten.linalg_vector_norm.default(one[0], p, dtype=kw.get("dtype")))
        elif name == "max":
            results.append(aten.max.default(one[0]))
        elif packet is None:
            raise UnsupportedError(f"{func} on lazy tensors")
        elif (
            overload in ("List", "ScalarList")
            and name.rstrip("_") in ("add", "sub")
            and len(one) > 2
        ):
            results.append(packet(one[0], one[1], alpha=one[2]))
        else:
            results.append(packet(*one, **kw))
    if name.endswith("_"):
        count_write(args[0])
        return None
    return results

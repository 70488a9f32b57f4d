"""The shapes of results of new calls, from FakeTensor with its errors corrected (:func:`shape`).
Also factories, and checks that a write overlaps no memory that it reads."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from typing import Any

from ._torch import VERSION, torch, untyped_storage
from . import _core
from ._calls import is_dense, lazies_of, map_call, tensors_of, value_dependent, which_written
from ._errors import UnsupportedError
from ._settled import on_settled

aten = torch.ops.aten

_MOST_TRIED = 1 << 28  # bytes of zeros on which a call is tried for its error
_MOST_CHECKED = 1 << 24  # bytes of memory on which eager checks for overlaps
_MOST_MARKED = 1 << 26  # elements that are marked to find shared ones
_ALIGNED = 16  # bytes


@functools.cache
def _mode_class() -> Any:
    """Where there is no GPU, torch's CUDA build would pretend to have eight from the first fake on.
    Autograd starts a thread for each of them then, and no forked process can run a backward."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    if not torch.backends.cuda.is_built():
        return FakeTensorMode
    return type("FakeTensorMode", (FakeTensorMode,), {"avoid_device_init": False})


class _Here(threading.local):
    """One for each thread: a mode is entered in one at a time."""

    def __init__(self) -> None:
        self.fake_mode = _mode_class()(allow_non_fake_inputs=True)
        # Each call comes here once. Torch's own cache would keep each for ever.
        self.fake_mode.cache_enabled = False
        self.quiet = False  # its log is not told what fails now


@functools.cache
def _here() -> _Here:
    here = _Here()
    _fake_log().addFilter(lambda _: not here.quiet)
    return here


def fake_mode() -> Any:
    return _here().fake_mode


def _fake_call(func: Any, args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
    """Run on fakes. Returns the result and the fakes of the tensor arguments, in order. Shielded: a
    mode that Ctrl-C keeps from ending would make a fake of each tensor that the program makes."""
    fakes: list[Any] = []
    here = _here()
    # The mode logs every failure. Ours are the user's shape errors, and they are raised.
    quiet, here.quiet = here.quiet, True
    try:
        with _core.shield, here.fake_mode:

            def fake(t: torch.Tensor) -> Any:
                fakes.append(
                    torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device)
                )
                return fakes[-1]

            a, k = map_call(fake, args, kwargs)
            return _shape_functions.get(func, func)(*a, **k), fakes
    finally:
        here.quiet = quiet


def _cudnn_rnn_backward(*args: Any) -> Any:
    """Torch would run the kernel, on zeros of all rows."""
    x, weights, hx, cx, batch_first, batch_sizes = *args[:2], *args[4:6], args[14], args[18]
    gx = x.new_empty(x.size())
    if batch_first and not batch_sizes:
        gx = x.new_empty((x.size(1), x.size(0), x.size(2))).transpose(0, 1)
    gcx = None if cx is None else cx.new_empty(cx.size())
    return gx, hx.new_empty(hx.size()), gcx, [w.new_empty(w.size()) for w in weights]


def _grouped_mm(a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """Torch's is for bfloat16 alone, and for a CPU lacks the padding of rows to 16 bytes."""
    is_known = {a.dim(), b.dim()} <= {2, 3} and a.shape[-1] == b.shape[-2] and a.dtype == b.dtype
    of_rows, of_terms = a.dim() == 2, b.dim() == 2
    if torch.version.hip or not is_known or (offs is None and (of_rows or of_terms)):
        return aten._grouped_mm.default(a, b, offs, bias, out_dtype)
    groups = [] if of_rows != of_terms else [offs.shape[0] if of_rows else a.shape[0]]
    rows, columns, dtype = a.shape[-2], b.shape[-1], out_dtype or a.dtype
    padded = -(-columns * dtype.itemsize // _ALIGNED) * _ALIGNED // dtype.itemsize
    strides = [rows * padded, padded, 1][-2 - len(groups) :]
    return torch.empty_strided([*groups, rows, columns], strides, dtype=dtype, device=a.device)


# Where torch has none, or not the right one.
_shape_functions: dict[Any, Any] = {aten._cudnn_rnn_backward.default: _cudnn_rnn_backward}
if hasattr(aten, "_grouped_mm"):
    _shape_functions[aten._grouped_mm.default] = _grouped_mm


def _fake_log() -> Any:
    from torch._subclasses import fake_tensor

    return fake_tensor.log


def _meta_of_result(t: torch.Tensor) -> tuple[Any, ...]:
    if t.layout is not torch.strided:
        raise UnsupportedError(
            f"a result of layout {t.layout} cannot be lazy. Make the argument plain with x.torch()"
        )
    if t.device.type == "cuda" and not torch.cuda.is_available():
        torch.empty(0, device=t.device)  # raises what eager raises
    return t.dtype, t.device, tuple(t.size()), tuple(t.stride()), t.storage_offset()


def real_error(func: Any, args: Any, kwargs: Any) -> bool:
    """Raise eager's error for these shapes, by running the call on zeros of the same kind. True: it
    works; False: not tried, because it is too large or not safe on zeros."""
    tensors = tensors_of(args, kwargs)
    if sum(t.numel() * t.element_size() for t in tensors) > _MOST_TRIED or not _harmless(func):
        return False
    a, k = map_call(
        lambda t: torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device).zero_(),
        args,
        kwargs,
    )
    names = [s.name for s in func._schema.arguments]
    if "generator" in names[len(a) :]:  # the user's does not move
        k = {**k, "generator": torch.Generator()}
    elif torch.Tag.nondeterministic_seeded in func.tags:
        state = torch.default_generator.get_state()
        try:
            func(*a, **k)
            return True
        finally:
            torch.default_generator.set_state(state)
    func(*a, **k)
    return True


# Kinds of results, as memo.c reads them.
_ONE, _TUPLE, _LIST, _NOTHING, _ENDS_IN_LIST = range(5)
# Kinds of one result in it.
_NONE, _TENSOR, _CONSTANT = range(3)
_Out = list[tuple[int, Any]]


def _unreported(f: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """`f`, unseen by a profiler: its calls compute nothing."""

    @functools.wraps(f)
    def call(func: Any, args: Any, kwargs: Any) -> Any:
        if not torch._C._autograd._profiler_enabled():
            return f(func, args, kwargs)
        torch._C._autograd._enable_record_function(False)
        try:
            return f(func, args, kwargs)
        finally:
            torch._C._autograd._enable_record_function(True)

    return call


@_unreported
def shape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call gives: (result kind, [(0, None) | (1, meta) | (2, constant)]) of the fresh
    results, or a callable to call instead."""
    described = _describe(func, args, kwargs)
    if described is None:
        return value_dependent
    result, fakes = described
    _dtype_error(func, args, kwargs)
    if _unlike(func, args, kwargs):
        try:
            real_error(func, args, kwargs)
        except Exception as e:
            raise e.with_traceback(None) from None
    written = _numbers_of_written(func, args, kwargs)
    _type_error(func, args, kwargs, written)
    instead = _instead_of_write(func, args, kwargs, fakes, written)
    if instead is not None:
        return instead
    kind, results = _flat(func, args, result)
    if any(isinstance(r, torch.Tensor) and not is_dense(r) for r in results):
        return value_dependent  # how many elements it stores is known only when it exists
    returned = {id(fakes[i]) for i in written}
    out = [_out_of(func, r) for r in results if id(r) not in returned]
    return kind, _corrected(func, args, fakes, out)


def _describe(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """The result of a call on fakes, and the fakes of its tensors; None: only values can tell.
    Raises eager's error when the call is wrong."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedOperatorException,
    )

    try:
        result, fakes = _fake_call(func, args, kwargs)
        if func in (aten.view.default, aten._unsafe_view.default):
            # FakeTensor lets pass what cannot be viewed, as [4, 1, 5] with strides 30, 5, 1 in one
            # dimension.
            func(torch.empty_strided(args[0].size(), args[0].stride(), device="meta"), *args[1:])
        return result, fakes
    except (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedOperatorException,
    ):
        return None
    except UnsupportedError:
        raise
    except (NotImplementedError, ZeroDivisionError):
        # No shape function; or one that divides by the number of elements, of which there are none
        # (backward of a mean loss: no NaN in Python).
        return None
    except Exception as e:
        if func.namespace != "aten":
            # A custom operator without a shape function says so in its own way. With one, a call
            # that is wrong is wrong on values too.
            return None
        error: BaseException = e
        try:
            if real_error(func, args, kwargs):
                # The shape function is at fault, or cannot describe the result (a nested one).
                return None
        except Exception as real:
            error = real
        if "allocate memory" in str(error):
            _core.held_fits(str(func))
        raise error.with_traceback(None) from None


def _numbers_of_written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Of the tensors of the call in order. Most operators write none, which their schema tells."""
    if not any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments):
        return []
    return [i for i, w in enumerate(which_written(func, args, kwargs)) if w]


def _instead_of_write(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], fakes: list[Any], written: list[int]
) -> Any:
    """A function to call instead if the tensors `written` (their numbers in the call) cannot be
    written as recorded, because they would be resized or have elements that share memory. Else
    None."""
    tensors = tensors_of(args, kwargs) if written else []
    for i in written:
        if fakes[i].size() != tensors[i].size():
            if _core.settle(tensors[i]):
                return on_settled
            raise UnsupportedError(
                f"{func}: the tensor to write would be resized from {tuple(tensors[i].size())} to "
                f"{tuple(fakes[i].size())}; give one of the right size"
            )
        if torch._debug_has_internal_overlap(fakes[i]) == 1:
            if func is aten.copy_.default and _same_memory(args[0], args[1]):
                return _itself  # nothing happens, also where elements share memory
            # Most operators refuse to write such a tensor, and the shape functions do not look.
            real_error(func, args, kwargs)
    return None


def _flat(func: Any, args: tuple[Any, ...], result: Any) -> tuple[int, list[Any]]:
    """What kind of result it is, and its items one after the other."""
    if result is None:
        return _NOTHING, []
    if not isinstance(result, (list, tuple)):
        return _ONE, [result]
    if len(func._schema.returns) == 0:
        return _NOTHING, list(result)
    if isinstance(result, list):
        return _LIST, result
    if result and isinstance(result[-1], list):  # cuDNN's recurrent layers: gradients of weights
        return _ENDS_IN_LIST, [*result[:-1], *_unmasked(func, args, result[-1])]
    return _TUPLE, list(result)


def _unmasked(func: Any, args: tuple[Any, ...], results: list[Any]) -> list[Any]:
    """The last of a call's results, a list: it is empty where the output mask leaves it out."""
    for argument, value in zip(func._schema.arguments, args):
        if argument.name == "output_mask" and not value[-1]:
            return []
    return results


def _out_of(func: Any, result: Any) -> tuple[int, Any]:
    if isinstance(result, torch.Tensor):
        return _TENSOR, _meta_of_result(result)
    if result is None:
        return _NONE, None
    if isinstance(result, (int, float, bool, complex, str)):
        return _CONSTANT, result
    raise UnsupportedError(f"{func} returns {type(result).__name__} within its result")


def _corrected(func: Any, args: tuple[Any, ...], fakes: list[Any], out: _Out) -> _Out:
    """Correct results for which shape functions and kernels differ: as the kernels make them."""
    device_type = fakes[0].device.type if fakes else ""
    if func is aten._native_batch_norm_legit_functional.default:
        # New running statistics are clones of the old; the shape function widens half precision.
        out[3:] = [(_TENSOR, _meta_of_result(f)) for f in fakes[-2:]]
    if device_type == "cuda":
        _correct_on_cuda(func, args, out)
    if func is _attention_of_the_cpu and fakes[0].dtype == torch.float64:
        # The kernel sums in the type of the scores; the shape function before torch 2.13 says f32.
        out[1] = (_TENSOR, (torch.float64, *out[1][1][1:]))
    if func in _of_promoted_operands:
        out[0] = (_TENSOR, (torch.result_type(*fakes), *out[0][1][1:]))
    if func is aten.mkldnn_rnn_layer.default:
        out[3] = (_TENSOR, _rnn_workspace(args, out[3][1]))
    if func is aten.mkldnn_rnn_layer_backward.default and VERSION < (2, 13):
        # Gradients of half precision are float32, and autograd casts them.
        out = [(kind, value and (torch.float32, *value[1:])) for kind, value in out]
    out = _laid_out(func, args, fakes, out, device_type)
    for argument, value in zip(func._schema.arguments, args):
        # Shape functions may describe results that the mask leaves out.
        if argument.name == "output_mask":
            out = [o if m else (_NONE, None) for o, m in zip(out, value)] + out[len(value) :]
    return out


def _laid_out(
    func: Any, args: tuple[Any, ...], fakes: list[Any], out: _Out, device_type: str
) -> _Out:
    """Results with the strides that the kernels give them."""
    memory_format = _format_of(func, args, fakes, device_type) if out and out[0][0] else None
    if memory_format is not None:
        dtype, device, size, _, offset = out[0][1]
        like = torch.empty(size, device="meta", memory_format=memory_format)
        out[0] = _TENSOR, (dtype, device, size, tuple(like.stride()), offset)
    order = _laid_out_by.get(func)
    if order is not None and max(order) < len(fakes):  # an operand may be a number
        stride = _stride_by([fakes[i] for i in order])
        out = [(kind, value and (*value[:3], stride, value[4])) for kind, value in out]
    return out


def _correct_on_cuda(func: Any, args: tuple[Any, ...], out: _Out) -> None:
    if func is _efficient_attention and (VERSION < (2, 14) or any(args[5:6])):
        # The state of the generator, numbers of the host; from 2.14 on only where it is drawn from.
        out[2:4] = [(_TENSOR, (o[0], torch.device("cpu"), *o[2:])) for _, o in out[2:4]]
    if func is aten._cudnn_rnn.default:
        dtype, device, size, stride, offset = out[0][1]
        if args[10] and not args[14]:  # batch_first, not packed: memory has time first
            stride = (size[2], size[0] * size[2], 1)
        out[0] = (_TENSOR, (dtype, device, size, stride, offset))
        if args[5] is None:
            out[2] = (_TENSOR, (dtype, *out[2][1][1:]))
        out[3] = (_TENSOR, _cudnn_reserve(args, out[3][1]))


def _stride_by(operands: list[torch.Tensor]) -> tuple[int, ...]:
    """The strides that TensorIterator gives the result of these operands. The operators that are
    asked name them in order, and their shape functions are the kernels' own."""
    metas = [torch.empty_strided(t.size(), t.stride(), device="meta") for t in operands]
    asked = aten.neg, aten.add, aten.addcmul
    return tuple(asked[len(metas) - 1](*metas).stride())


def _format_of(func: Any, args: tuple[Any, ...], fakes: list[Any], device_type: str) -> Any:
    """The memory format in which the kernel makes result 0, where the shape function has another;
    else None."""
    if func in _contiguous.get(device_type, ()):
        return torch.contiguous_format
    if device_type == "cuda":
        if func is _norm_backward and not args[7]:
            return torch.contiguous_format
        like = _laid_out_as_on_cuda.get(func)
    else:
        like = _laid_out_as.get(func) if device_type == "cpu" else None
    return None if like is None else torch._prims_common.suggest_memory_format(fakes[like])


_efficient_attention = aten._scaled_dot_product_efficient_attention.default
_norm_backward = aten.native_batch_norm_backward.default
_attention_of_the_cpu = aten._scaled_dot_product_flash_attention_for_cpu.default
# Their kernels compute in the dtype to which both tensors are promoted. The shape functions name
# another one (of hardtanh's, before torch 2.13).
_of_promoted_operands = {aten.threshold_backward.default, aten.hardtanh_backward.default}
# The CPU's kernels lay result 0 out in the memory format that this input suggests, contiguous where
# it suggests none. The shape functions follow any strides (batch norm), or forget channels_last
# (unpooling, torch 2.14's group norm).
_laid_out_as = {
    aten.max_unpool2d.default: 0,
    aten.native_group_norm.default: 0,
    aten.native_batch_norm.default: 0,
    aten._native_batch_norm_legit.default: 0,
    aten._native_batch_norm_legit.no_stats: 0,
    aten._native_batch_norm_legit_functional.default: 0,
    aten._native_batch_norm_legit_no_training.default: 0,
    _norm_backward: 1,
}
# The same of CUDA's. (Batch norm's gradient is contiguous in evaluation.)
_laid_out_as_on_cuda = {
    _norm_backward: 1,
    aten.upsample_bilinear2d.default: 0,
    aten.upsample_trilinear3d.default: 0,
}
# Whatever the inputs' strides are, which the shape functions follow. (Where a kernel differs that
# is not named here, the run copies its result: settle_results() of python/ext/run/exec_node.c.)
_contiguous_everywhere = {
    aten._log_softmax_backward_data.default,
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
    aten.native_layer_norm_backward.default,
    aten.pow.Scalar,
    aten.isin.Tensor_Tensor,
}
# Element by element: all results are laid out by these operands, in this order. Shape functions in
# Python take the order of the arguments, and where one input is expanded, other strides [tried:
# tests/python/test_layouts.py].
_laid_out_by: dict[Any, tuple[int, ...]] = {
    **dict.fromkeys(
        (
            aten.copysign.Tensor,
            aten.floor_divide.default,
            aten.heaviside.default,
            aten.logaddexp.default,
            aten.logaddexp2.default,
            aten.logical_and.default,
            aten.logical_or.default,
            aten.logical_xor.default,
            aten.special_xlog1py.default,
            aten.xlogy.Tensor,
            aten.complex.default,
            aten.polar.default,
            aten.elu_backward.default,
            aten.hardtanh_backward.default,
            aten.softplus_backward.default,
            aten.hardsigmoid_backward.default,
            aten.hardswish_backward.default,
            aten.logit_backward.default,
        ),
        (0, 1),
    ),
    aten.threshold_backward.default: (1, 0),
    aten.leaky_relu_backward.default: (1, 0),
    aten._prelu_kernel_backward.default: (1, 2, 0),
    aten.ldexp.Tensor: (0,),
    aten.log_sigmoid_backward.default: (0,),
    aten.binary_cross_entropy_backward.default: (1,),
    aten.soft_margin_loss_backward.default: (2,),
}
_contiguous = {
    "cpu": _contiguous_everywhere | {aten.log_sigmoid_forward.default},
    "cuda": _contiguous_everywhere,
}


def _rnn_workspace(args: tuple[Any, ...], said: tuple[Any, ...]) -> tuple[Any, ...]:
    """oneDNN's recurrent layers hand backward a workspace several times the size of their results,
    and the shape function says it is empty. Its bytes grow linearly with the rows (in whole pages),
    so two calls on a few rows of zeros give them."""
    x, weights, constants = args[0], args[1:5], args[7:]
    rows, batch_sizes, train = x.size(1), args[8], args[15]
    if not train or batch_sizes or rows == 0 or x.device.type != "cpu":
        return said

    def n_bytes(n: int) -> int:
        with torch._C._AutoDispatchBelowAutograd():
            sizes = [
                (x.size(0), n, x.size(2)),
                *(w.size() for w in weights),
                *((n, h.size(1)) for h in args[5:7]),
            ]
            return int(
                aten.mkldnn_rnn_layer.default(
                    *(torch.zeros(s, dtype=x.dtype) for s in sizes), *constants
                )[3].numel()
            )

    more = min(rows, 2 * max(4, torch.get_num_threads()))
    return _with_workspace(said, n_bytes, rows, more)


def _with_workspace(
    said: tuple[Any, ...], n_bytes: Callable[[int], int], rows: int, more: int
) -> tuple[Any, ...]:
    """`said`, with the size that `n_bytes(rows)` would tell: it is asked for at most `more` rows,
    beyond which the size grows linearly."""
    few = (more + 1) // 2
    try:
        size = n_bytes(more)
        if more < rows:
            size += (size - n_bytes(few)) * (rows - more) // (more - few)
    except RuntimeError:
        # No memory for a few rows: the plan is then less exact, and the step may still run.
        return said
    return said[0], said[1], (size,), (1,), 0


def _cudnn_reserve(args: tuple[Any, ...], said: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same of cuDNN's recurrent layers in training."""
    x, weights, buffer, hidden = args[0], args[1], args[3], args[4:6]
    batch_first, train, batch_sizes = args[10], args[12], args[14]
    at = 0 if batch_first else 1
    if not train or batch_sizes or x.dim() != 3 or x.size(at) == 0:
        return said

    def n_bytes(n: int) -> int:
        def zeros(t: torch.Tensor | None, dim: int | None = None) -> torch.Tensor | None:
            if t is None:
                return None
            size = [n if d == dim else s for d, s in enumerate(t.size())]
            return torch.zeros(size, dtype=t.dtype, device=t.device)

        with torch._C._AutoDispatchBelowAutograd():
            state = [zeros(h, 1) for h in hidden]
            call = (zeros(x, at), [zeros(w) for w in weights], args[2], zeros(buffer), *state)
            return int(aten._cudnn_rnn.default(*call, *args[6:])[3].numel())

    return _with_workspace(said, n_bytes, x.size(at), min(x.size(at), 8))


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Do two lazy tensors have the same elements, in the same order?"""
    alike = (
        a.size() == b.size()
        and a.stride() == b.stride()
        and a.storage_offset() == b.storage_offset()
        and a.dtype == b.dtype
    )
    return a is b or (alike and any(w is b for w in _core.group_wrappers(a)))


def _itself(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]


def _harmless(func: Any) -> bool:
    """May it run on zeros? An operator that takes a workspace which another call must have filled
    would crash."""
    name = func._schema.name
    return func.namespace == "aten" and not any(
        word in name
        for word in (
            "mkldnn",
            "rnn",
            "backward",
            "cudnn",
            "miopen",
            "mps",
            "quantized",
            "fbgemm",
            "embedding_bag",
        )
    )


def _dtype_error(func: Any, args: Any, kwargs: Any) -> None:
    """Shape functions know nothing of dtypes without a kernel ('"softmax" not implemented for
    'Long''): try a few elements. Only calls with one tensor, of whole numbers: with several, a
    shrunken call may not fit together, and kernels trust their callers."""
    tensors = tensors_of(args, kwargs)
    if (
        not _harmless(func)
        or len(tensors) != 1
        or tensors[0].dtype.is_floating_point
        or torch.Tag.nondeterministic_seeded in func.tags
    ):
        return
    try:
        a, k = map_call(
            lambda t: torch.zeros([min(s, 4) for s in t.size()], dtype=t.dtype, device=t.device),
            args,
            kwargs,
        )
        func(*a, **k)
    except Exception as e:  # the shrunken call may be wrong in itself; only a missing kernel counts
        if "not implemented for" in str(e):
            raise e.with_traceback(None) from None


# Of a kernel's errors, those that tell of types.
_OF_TYPES = ("can't be cast to", "not implemented for", "not supported for")


def _type_error(func: Any, args: Any, kwargs: Any, written: list[int]) -> None:
    """Shape functions let an elementwise operator write a tensor of whole numbers, or of real ones,
    with what it cannot hold: a few elements are tried."""
    tensors = tensors_of(args, kwargs)
    usual = all(tensors[i].dtype.is_floating_point for i in written)
    if (
        not written
        or (usual and not any(t.is_complex() for t in tensors))
        or not (torch.Tag.pointwise in func.tags and _harmless(func))
        or torch.Tag.nondeterministic_seeded in func.tags
    ):
        return
    a, k = map_call(
        lambda t: torch.ones([min(s, 2) for s in t.size()], dtype=t.dtype, device=t.device),
        args,
        kwargs,
    )
    try:
        func(*a, **k)
    except Exception as e:
        if any(text in str(e) for text in _OF_TYPES):
            raise e.with_traceback(None) from None


_ALIKE = frozenset(
    "linear matmul mm bmm addmm addbmm baddbmm mv addmv dot vdot ger addr convolution conv1d "
    "conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d complex"
    " native_layer_norm native_group_norm binary_cross_entropy nll_loss_forward "
    "nll_loss2d_forward nll_loss_nd index_add scatter_reduce prelu grid_sampler_2d".split()
)


_LONG, _WHOLE = (torch.int64,), (torch.int64, torch.int32)
# Where the index is, and of which dtypes.
_INDEX_AT = {
    "embedding": (1, _WHOLE),
    "index_add": (2, _WHOLE),
    "index_copy": (2, _LONG),
    "index_fill": (2, _LONG),
    "index_reduce": (2, _WHOLE),
    "index_select": (2, _WHOLE),
}


def _unlike(func: Any, args: Any, kwargs: Any) -> bool:
    """Kernels of _ALIKE need operands of one dtype, which their shape functions do not check, as
    little as the dtype of an index; a few accept wrong shapes. Then eager is tried, which nearly
    always raises."""
    name = func._schema.name.removeprefix("aten::").rstrip("_")
    dtypes = {t.dtype for t in tensors_of(args, kwargs)}
    if name.startswith("bitwise"):
        return any(d.is_floating_point or d.is_complex for d in dtypes)
    if name == "avg_pool3d":
        return 0 in args[6:]  # the divisor, before torch 2.13
    if name in _INDEX_AT:
        at, taken = _INDEX_AT[name]
        if args[at].dtype not in taken:
            return True
    if name == "bucketize":
        return isinstance(args[0], torch.Tensor) and args[1].dim() != 1
    if name == "index_add":
        sizes = [
            [n for i, n in enumerate(t.size()) if i != args[1] % max(1, t.dim())]
            for t in (args[0], args[3])
        ]
        if sizes[0] != sizes[1]:
            return True
    if name not in _ALIKE or len(dtypes) == 1:
        return False
    if name.startswith("nll_loss"):
        dtypes.discard(torch.int64)
    elif name in ("index_add", "scatter_reduce"):
        dtypes -= {torch.int64, torch.int32}  # the index
    return len(dtypes) > 1


def check_overlap(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A written tensor shares memory with another argument: run eager's own check, on memory of the
    same shape and device, for each device has its own order of checks. Large tensors are left out,
    because their memory would cost as much as theirs: check_shared() then refuses real overlaps."""
    memory: dict[int, torch.Tensor] = {}
    sizes: dict[int, int] = {}
    for t in lazies_of(args, kwargs):
        group = _core.group_info(t)[2]
        sizes[group] = max(sizes.get(group, 0), _end(t) * t.element_size())
    if sum(sizes.values()) > _MOST_CHECKED:
        return
    planned = _core.is_planning()  # perhaps for a device that is not here

    def stand_in(t: torch.Tensor) -> torch.Tensor:
        if not _core.is_lazy(t):
            return torch.zeros_like(t, device="cpu" if planned else t.device)
        group = _core.group_info(t)[2]
        if group not in memory:
            memory[group] = torch.zeros(
                sizes[group] + 15 & ~15,
                dtype=torch.uint8,
                device="cpu" if planned else t.device,
            )
        return memory[group].view(t.dtype).as_strided(t.size(), t.stride(), t.storage_offset())

    a, k = map_call(stand_in, args, kwargs)
    func(*a, **k)


def _end(t: torch.Tensor) -> int:
    """One beyond the last place of t in its storage, in elements."""
    return (
        int(t.storage_offset()) + 1 + sum((s - 1) * d for s, d in zip(t.size(), t.stride()))
        if t.numel()
        else 0
    )


Layout = tuple[int, tuple[int, ...], tuple[int, ...]]  # offset, sizes, strides


def layout_of(t: torch.Tensor) -> Layout:
    return int(t.storage_offset()), tuple(t.size()), tuple(t.stride())


def _dims(layout: Layout) -> list[tuple[int, int]]:
    """(stride, size), the smallest stride first; what lies one after the other is one dimension."""
    dims: list[tuple[int, int]] = []
    for stride, size in sorted((d, s) for s, d in zip(*layout[1:]) if s != 1):
        if dims and stride == dims[-1][0] * dims[-1][1]:
            stride, size = dims[-1][0], dims.pop()[1] * size
        dims.append((stride, size))
    return dims


@functools.lru_cache(maxsize=1024)
def shared_places(a: Layout, b: Layout) -> tuple[bool, bool]:
    """Of two layouts in one storage: (do they share an element, does a hold every element of b
    without holding one twice). Where finding out would take long: (True, False), which callers
    refuse. Whole because each case stands on the ones before it."""
    dims_a, dims_b = _dims(a), _dims(b)
    if any(s == 0 for _, s in dims_a + dims_b):
        return False, any(s == 0 for _, s in dims_b)
    first = min(a[0], b[0])
    at_a, at_b = a[0] - first, b[0] - first

    def last(at: int, dims: list[tuple[int, int]]) -> int:
        return at + sum((s - 1) * d for d, s in dims)

    while dims_a and dims_b and dims_a[-1] == dims_b[-1]:
        # The same outer dimension; when its steps jump over all the rest, one step tells it all.
        if max(last(at_a, dims_a[:-1]), last(at_b, dims_b[:-1])) >= dims_a[-1][0]:
            break
        dims_a, dims_b = dims_a[:-1], dims_b[:-1]
    end_a, end_b = last(at_a, dims_a), last(at_b, dims_b)
    if end_a < at_b or end_b < at_a:
        return False, False
    if not dims_a or (len(dims_a) == 1 and dims_a[0][0] == 1):  # a has no gaps
        within = at_a <= at_b and end_b <= end_a
        if within or at_a <= at_b <= end_a or at_a <= end_b <= end_a:
            return True, within
    end = 1 + max(end_a, end_b)
    if end > _MOST_MARKED:
        return True, False
    mark = torch.zeros(end, dtype=torch.uint8)
    mark.as_strided([s for _, s in dims_a], [d for d, _ in dims_a], at_a).fill_(1)
    once = int(mark.sum()) == math.prod(s for _, s in dims_a)
    of_b = mark.as_strided([s for _, s in dims_b], [d for d, _ in dims_b], at_b)
    return bool(of_b.any()), once and bool(of_b.all())


def check_shared(func: Any, written: torch.Tensor, other: torch.Tensor) -> None:
    """Refuse writes such as `y.mul_(y[:, :1])` and `y.addmm_(y, y)`. Eager allows some of them and
    then reads elements that it has just written, in an order that koila cannot reproduce."""
    if (
        written.element_size() != other.element_size()
        or shared_places(layout_of(written), layout_of(other))[0]
    ):
        raise UnsupportedError(
            f"{func} writes elements of a lazy tensor that another argument, which shares its "
            "memory, reads: the result depends on the order. "
            "Use .clone() of that argument"
        )


def _lie_apart(sizes: Any, strides: Any) -> bool:
    """Is each element one element of memory? False for `expand`, and windows by `unfold`."""
    reach = 0
    for stride, size in sorted((d, s) for s, d in zip(sizes, strides) if s != 1):
        if stride <= reach:
            return False
        reach += (size - 1) * stride
    return True


def check_apart_from_itself(func: Any, x: torch.Tensor) -> None:
    """Refuse `x.add_(x)` where elements of x lie on each other: eager reads some that it has just
    written. A copy of itself is nothing."""
    if func is aten.copy_.default or _lie_apart(x.size(), x.stride()):
        return
    raise UnsupportedError(
        f"{func} reads and writes a lazy tensor of which several elements are one element "
        "of memory: the result depends on the order. Use .clone() of what it reads"
    )


def check_plain_views(func: Any, real: torch.Tensor, own: int = 2) -> None:
    """Refuse a write of a lazy tensor whose step has run, `real` is what it was, where plain views
    of that live: they would not see the write. own: who else holds that memory, with `real` and the
    object that asks."""
    if torch._C._storage_Use_Count(untyped_storage(real)._cdata) > own:
        raise UnsupportedError(
            f"{func} writes a lazy tensor whose step has run, and a view of it, which is plain, "
            "would not see that. Write x.torch() instead, or a clone()"
        )


def check_elements_apart(func: Any, given: Layout) -> None:
    """Refuse to write into a batch whose elements lie on each other: eager changes several of them
    at once, koila's batch has them one by one."""
    if not _lie_apart(*given[1:]):
        raise UnsupportedError(
            f"{func} writes into a batch of which several elements are one element of memory "
            f"(sizes {given[1]}, strides {given[2]}): in eager all of them change. Pass lazy() "
            "a clone() of it, or write into one"
        )


def check_apart(func: Any, written: Layout, other: Layout | None) -> None:
    """Refuse to write into a batch that shares elements with another one that lazy() was given:
    eager changes both. other: None where their elements are of other sizes."""
    if other is None or shared_places(written, other)[0]:
        raise UnsupportedError(
            f"{func} writes into a batch that shares memory with another one of this step: in "
            "eager both change. Pass lazy() a clone() of one, or write into one"
        )


def check_strided(view: torch.Tensor, size: Any, stride: Any, offset: int) -> None:
    """as_strided of a view that requires grad. Plain autograd sends its gradient to the view's
    elements; but once the memory was written, to all elements that are addressed. Replaying the
    call cannot tell the two apart, so elements beyond the view's are allowed only while nothing was
    written."""
    if (
        view._version
        and not shared_places(layout_of(view), (offset, tuple(size), tuple(stride)))[1]
    ):
        raise UnsupportedError(
            "as_strided beyond a lazy view that requires grad, in memory that was written: its "
            "gradient depends on what views share. Use select, narrow, unfold or diagonal, or "
            "as_strided of the tensor that it is a view of"
        )


@_unreported
def factory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """A factory that reads only metadata as (func, args, kwargs, meta, fill): a call without
    tensors, and the call that fills its result, or None."""
    result, _ = _fake_call(func, args, kwargs)
    meta = _meta_of_result(result)[:4]
    dtype, device, size, stride = meta
    base = func._schema.name.removeprefix("aten::")
    value: Any = None
    fill: Any = None
    if base in ("zeros_like", "new_zeros"):
        value = 0
    elif base in ("ones_like", "new_ones"):
        value = 1
    elif base == "full_like":
        value = args[1]
    elif base == "new_full":
        value = args[2]
    elif base == "rand_like":
        fill = (aten.uniform_.default, (0.0, 1.0), {})
    elif base == "randn_like":
        fill = (aten.normal_.default, (0.0, 1.0), {})
    elif base == "randint_like":
        bounds = [a for a in args[1:] if isinstance(a, int)]
        fill = (
            getattr(aten.random_, "from"),
            (bounds[0] if len(bounds) > 1 else 0, bounds[-1]),
            {},
        )
    made = {"dtype": dtype, "device": device}
    if value is not None:
        if result.is_contiguous():
            return aten.full.default, (list(size), value), made, meta, None
        fill = (aten.fill_.Scalar, (value,), {})
    n = 1 + sum((s - 1) * d for s, d in zip(size, stride)) if result.numel() else 0
    if n < result.numel():
        raise UnsupportedError(f"{func}: strides {stride} of sizes {size} overlap")
    return aten.empty_strided.default, (list(size), list(stride)), made, meta, fill

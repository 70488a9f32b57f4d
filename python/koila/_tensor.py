"""The lazy tensor, and what capture asks of Python: once per operator, once per new call, and for the rare operators that need a decision.

The hot path is C (``koila._core.dispatch``). Here live the facts about operators (:func:`describe`), the shapes of a call never seen before
(:func:`shape`, by FakeTensor), the special cases, and the doors: methods of a tensor that never reach the dispatcher.
"""

from __future__ import annotations

import copy
import functools
import math
import os
import sys
from types import SimpleNamespace
from typing import Any, Callable

from ._torch import second_owner_adds_reference, torch
from . import _core
from ._errors import StaleValueError, UnsupportedError

aten = torch.ops.aten

# ---------------------------------------------------------------------------------------------------------------- the class


class LazyTensor(torch.Tensor):
    """A tensor of the full batch that is not computed yet. It becomes concrete by itself when a Python value is needed."""

    __slots__ = ("_v",)
    __torch_function__ = torch._C._disabled_torch_function_impl
    __torch_dispatch__ = _core.dispatch

    # -- becoming concrete

    def torch(self) -> torch.Tensor:
        """The plain tensor. Differentiable: gradients flow from it into the lazy graph."""
        if self.requires_grad and torch.is_grad_enabled():
            return _Concrete.apply(self)
        return plain(self)

    run = torch

    # torch.tensor([x.sum(), ...]) asks its items with the dispatcher switched off, so these five do not go through it
    def __float__(self) -> float:
        return float(plain(self))

    def __int__(self) -> int:
        return int(plain(self))

    def __index__(self) -> int:
        return plain(self).__index__()

    def __bool__(self) -> bool:
        return bool(plain(self))

    def __complex__(self) -> complex:
        return complex(plain(self))

    def numpy(self, *, force: bool = False) -> Any:
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        return plain(self).numpy(force=force)

    def tolist(self) -> Any:
        return plain(self).tolist()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        if self.requires_grad:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        return plain(self).__array__(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        text = repr(plain(self))
        if self.grad_fn is not None:
            suffix = f"grad_fn=<{type(self.grad_fn).__name__}>"
        elif self.requires_grad:
            suffix = "requires_grad=True"
        else:
            return text
        text = text[:-1]  # one more suffix, by torch's rule for breaking the line
        last_line = len(text) - text.rfind("\n") + 1
        full = last_line + len(suffix) + 2 > torch._tensor_str.PRINT_OPTS.linewidth
        return f"{text},\n{' ' * len('tensor(')}{suffix})" if full else f"{text}, {suffix})"

    def __str__(self) -> str:
        return repr(self)

    def __format__(self, spec: str) -> str:
        return plain(self).__format__(spec) if self.dim() == 0 else object.__format__(repr(self), spec) if spec else repr(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _with_grad_flag(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment. Use x.detach() first"
            )
        return copy.deepcopy(_with_grad_flag(self), memo)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.torch().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return plain(self).__dlpack_device__()

    def as_subclass(self, cls: type) -> Any:
        return self.torch().as_subclass(cls)

    # -- what has no meaning without memory

    def data_ptr(self) -> int:
        raise UnsupportedError("data_ptr() of a lazy tensor: it has no memory yet. Use x.torch().data_ptr()")

    def share_memory_(self) -> Any:
        raise UnsupportedError("share_memory_() of a lazy tensor: it has no memory yet. Use x.torch().share_memory_()")

    def apply_(self, *args: Any) -> Any:
        raise UnsupportedError("apply_() of a lazy tensor: use x.torch().apply_(f)")

    def map_(self, *args: Any) -> Any:
        raise UnsupportedError("map_() of a lazy tensor: use x.torch().map_(y, f)")

    def map2_(self, *args: Any) -> Any:
        raise UnsupportedError("map2_() of a lazy tensor: use x.torch().map2_(y, z, f)")

    def untyped_storage(self) -> Any:
        raise UnsupportedError("untyped_storage() of a lazy tensor: it has no memory yet. Use x.torch().untyped_storage()")

    def storage(self) -> Any:
        raise UnsupportedError("storage() of a lazy tensor: it has no memory yet. Use x.torch().storage()")

    _typed_storage = storage

    def is_shared(self) -> bool:
        return False

    def pin_memory(self, *args: Any) -> Any:
        return self

    def is_pinned(self, *args: Any) -> bool:
        return False

    def new(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.empty(0, dtype=self.dtype, device=self.device).new(*args, **kwargs)

    def new_tensor(self, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.empty(0, dtype=self.dtype, device=self.device).new_tensor(
            data, dtype=dtype, device=device, requires_grad=requires_grad, **kwargs
        )


class _Concrete(torch.autograd.Function):
    """The identity from a lazy tensor to the plain one."""

    @staticmethod
    def forward(ctx: Any, lazy: torch.Tensor) -> torch.Tensor:
        return plain(lazy).detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def plain(x: torch.Tensor) -> torch.Tensor:
    """The concrete tensor behind `x`, without autograd; a plain tensor is returned as it is."""
    return _core.concrete(x) if _core.is_lazy(x) else x


def _with_grad_flag(x: LazyTensor) -> torch.Tensor:
    t = plain(x)
    return t.detach().requires_grad_() if x.requires_grad else t


_core.setup(LazyTensor, second_owner_adds_reference())

# -------------------------------------------------------------------------------------------------- what C asks now and then

use_count = torch._C.TensorBase._use_count
_LIBRARY = (os.path.dirname(os.path.abspath(torch.__file__)) + os.sep, os.path.dirname(os.path.abspath(__file__)) + os.sep)


def user_file(filename: str) -> str | None:
    """The name to show for a source file, or None for torch, koila and code without a file."""
    if filename.startswith("<") or os.path.abspath(filename).startswith(_LIBRARY):
        return None
    return filename


def op_by_name(name: str) -> Any:
    """``"aten::sum.dim_IntList"`` → the OpOverload."""
    space, rest = name.split("::", 1)
    if space == "koila":  # an operator that only rewrites use
        from ._run import PSEUDO

        return SimpleNamespace(_op=PSEUDO[name])
    base, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, space), base), overload or "default")


def is_dense(t: torch.Tensor) -> bool:
    """Do sizes and strides say all of it?"""
    return t.layout is torch.strided and not t.is_nested


def real_meta(t: torch.Tensor) -> tuple[Any, ...]:
    """(dtype, device, sizes, strides) of a plain tensor."""
    if not is_dense(t):
        kind = "nested" if t.is_nested else str(t.layout)
        raise UnsupportedError(f"a {kind} tensor cannot be part of a recorded step. Use t.to_dense() or t.to_padded_tensor(0)")
    return t.dtype, t.device, tuple(t.size()), tuple(t.stride())


def check_type(func: Any, cls: type) -> None:
    """Another class of tensor is among the arguments."""
    if issubclass(cls, LazyTensor) or cls.__torch_dispatch__ in (torch._C._disabled_torch_dispatch_impl,):
        return
    if func is None:
        raise UnsupportedError(f"a {cls.__name__} cannot be lazy: it has a dispatch of its own")
    raise UnsupportedError(f"{func} mixes a lazy tensor with a {cls.__name__}, which has a dispatch of its own. Make the lazy one plain with x.torch()")


def leave_inference(like: torch.Tensor) -> Any:
    """In inference mode a view of a normal tensor is a normal tensor: a context, entered, under which its wrapper is made; None when there is nothing to leave."""
    if like.is_inference() or not torch.is_inference_mode_enabled():
        return None
    context = torch._C._InferenceMode(False)
    context.__enter__()
    return context


def raise_stale(real: torch.Tensor, meta: tuple[Any, ...], then: int, now: int) -> None:
    raise StaleValueError(
        f"a lazy value is asked for, but a tensor {_text(meta)} that it is computed from has been changed since (version {then}, now {now}). "
        "Ask for the value (print, item, .torch()) before the change, for example before optimizer.step()"
    )


def _text(meta: tuple[Any, ...]) -> str:
    return f"{str(meta[0]).removeprefix('torch.')}[{', '.join(map(str, meta[2]))}]"


def with_strides(t: torch.Tensor, meta: tuple[Any, ...]) -> torch.Tensor:
    return torch.empty_strided(meta[2], meta[3], dtype=meta[0], device=meta[1]).copy_(t)


def clone_exactly(t: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, also where they overlap."""
    n = 1 + sum((s - 1) * d for s, d in zip(t.size(), t.stride())) if t.numel() else 0
    return t.as_strided((n,), (1,)).clone().as_strided(t.size(), t.stride(), 0)


def empty_like_exactly(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device)


def enter_modes() -> Any:
    """Guards under which recorded calls run: below autograd, no autocast, no dispatch of Python. They end when the result dies."""
    return _Guards()


class _Guards:
    __slots__ = ("below", "cast", "python")

    def __init__(self) -> None:
        self.below = torch._C._AutoDispatchBelowAutograd()
        self.cast = torch._C._DisableAutocast()
        self.python = torch._C._DisableTorchDispatch()

    def __del__(self) -> None:
        self.python = None
        self.cast = None
        self.below = None


def commit_effects(pairs: list[tuple[torch.Tensor, torch.Tensor, int]]) -> None:
    """Write what the step computed for tensors outside, once. Checks all versions before the first write."""
    for real, _, version in pairs:
        if not real.is_inference() and real._version != version:
            raise StaleValueError("a running statistic was changed between the forward pass and the end of the step")
    with torch.no_grad():
        for real, value, _ in pairs:
            real.copy_(value)


# ----------------------------------------------------------------------------------------------------- facts about operators

PLAIN, VIEW, SAME, WRITE, SPECIAL, STRIDED, FACTORY, INDEX = range(8)
_F_VIEW, _F_INPLACE, _F_RANDOM, _F_FACTORY, _F_OPAQUE = 1, 2, 4, 8, 16

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_special: dict[str, Handler] = {}  # by "namespace::name", any overload
_overwriting = {"copy_", "fill_", "zero_", "bernoulli_", "normal_", "uniform_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_"}
_elementwise = {"copy_", "where", "masked_fill_", "floor_divide_", "eq_", "ne_", "lt_", "le_", "gt_", "ge_"}  # some that lack the tag
_factories = {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_empty", "new_zeros", "new_ones"}
_factories |= {"new_full", "new_empty_strided"}
_not_really_random = {"_scaled_dot_product_flash_attention_for_cpu"}


def special(*names: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        for name in names:
            _special["aten::" + name] = handler
        return handler

    return register


def describe(func: Any) -> tuple[Any, ...]:
    """What C needs to know about an operator, see Note [Kinds] in capture.c."""
    schema = func._schema
    name = schema.name + ("." + schema.overload_name if schema.overload_name else "")
    base = schema.name.removeprefix("aten::")
    written, names, sets = 0, [], []
    at = 0
    for argument in schema.arguments:
        info = argument.alias_info
        if info is not None and info.is_write:
            if argument.kwarg_only:
                names.append(argument.name)
                sets.append((info.before_set, -1 - len(names)))
            else:
                written |= 1 << at
                sets.append((info.before_set, at))
        at += not argument.kwarg_only
    source = []
    for result in schema.returns:
        info = result.alias_info
        source.append(next((s for labels, s in sets if info is not None and info.before_set & labels), -1))
    writes = bool(written or names)
    random = torch.Tag.nondeterministic_seeded in func.tags and base not in _not_really_random
    flags = _F_VIEW * func.is_view | _F_INPLACE * writes | _F_RANDOM * random
    if schema.name in ("aten::empty_strided", "aten::full"):
        flags |= _F_FACTORY
    if base in ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn"):
        flags |= _F_OPAQUE
    if len(schema.returns) == 0:
        result_kind = 3
    elif len(schema.returns) > 1:
        result_kind = 1
    else:
        result_kind = 2 if "List" in str(schema.returns[0].type) else 0
    overwrites = base in _overwriting or bool(names)
    kind, handler = PLAIN, None
    if schema.name in _special:
        kind, handler = SPECIAL, _special[schema.name]
    elif base.startswith("_foreach_"):
        kind, handler = SPECIAL, _foreach
    elif func.namespace == "c10d":
        kind, handler = SPECIAL, _collective
    elif base in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"):
        kind, handler = INDEX, _special_index
    elif base in ("detach", "alias", "lift_fresh", "lift"):
        kind = SAME
    elif base == "as_strided":
        kind, handler = STRIDED, _as_strided
    elif base in _factories and not writes and "aten::" in schema.name:
        kind = FACTORY
    elif torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd") and not any(
        torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in ("CPU", "CUDA")  # silu_backward has both: its own kernel is what eager runs
    ):
        kind, handler = SPECIAL, _decompose
    elif torch.Tag.inplace_view in func.tags:
        kind, handler = SPECIAL, _metadata_write
    elif random and writes:
        kind, handler = SPECIAL, _random_write if base in _overwriting else value_dependent
    elif random:
        kind, handler = SPECIAL, run_on_reals
    elif func.is_view:
        kind = VIEW
    elif writes:
        kind = WRITE
    elementwise = torch.Tag.pointwise in func.tags or base in _elementwise
    return name, flags, kind, written, tuple(names), tuple(source), result_kind, overwrites, elementwise, handler


# ------------------------------------------------------------------------------------------------------- calls never seen

_fake_mode: Any = None


def fake_mode() -> Any:
    global _fake_mode
    if _fake_mode is None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        _fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    return _fake_mode


def _map(f: Callable[[torch.Tensor], Any], x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return f(x)
    if isinstance(x, (list, tuple)):
        return type(x)(_map(f, i) for i in x) if type(x) in (list, tuple) else [_map(f, i) for i in x]
    return x


def _map_call(f: Callable[[torch.Tensor], Any], args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
    return [_map(f, a) for a in args], {k: _map(f, a) for k, a in kwargs.items()}


def _tensors(args: Any, kwargs: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _map_call(lambda t: found.append(t), args, kwargs)
    return found


def _lazies(args: Any, kwargs: Any) -> list[LazyTensor]:
    return [t for t in _tensors(args, kwargs) if _core.is_lazy(t)]


def _fake_call(func: Any, args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
    """Run on fakes. Returns the result and the fakes of the tensor arguments, in order."""
    fakes: list[Any] = []
    mode = fake_mode()
    log = _fake_log()
    quiet, log.disabled = log.disabled, True  # it prints every failure; ours are the user's shape errors, and they are raised
    try:
        with mode:

            def fake(t: torch.Tensor) -> Any:
                fakes.append(torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device))
                return fakes[-1]

            a, k = _map_call(fake, args, kwargs)
            return func(*a, **k), fakes
    finally:
        log.disabled = quiet


def _fake_log() -> Any:
    from torch._subclasses import fake_tensor

    return fake_tensor.log


def _meta_of_result(t: torch.Tensor) -> tuple[Any, ...]:
    if t.layout is not torch.strided:
        raise UnsupportedError(f"a result of layout {t.layout} cannot be lazy. Make the argument plain with x.torch()")
    if t.device.type == "cuda" and not torch.cuda.is_available():
        torch.empty(0, device=t.device)  # raises what eager raises
    return t.dtype, t.device, tuple(t.size()), tuple(t.stride()), t.storage_offset()


def _real_error(func: Any, args: Any, kwargs: Any) -> bool:
    """Raise what eager would raise for these shapes, by trying on zeros of the same kind. True: that works; False: too big to try."""
    tensors = _tensors(args, kwargs)
    if sum(t.numel() * t.element_size() for t in tensors) > 1 << 28 or not _harmless(func):
        return False
    a, k = _map_call(lambda t: torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device).zero_(), args, kwargs)
    state = torch.default_generator.get_state()
    try:
        func(*a, **k)
        return True
    finally:
        torch.default_generator.set_state(state)


def shape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call gives: (result kind, [(0, None) | (1, meta) | (2, constant)]) of the fresh results, or a callable to call instead."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException

    try:
        result, fakes = _fake_call(func, args, kwargs)
        if func in (aten.view.default, aten._unsafe_view.default):  # FakeTensor lets pass what cannot be viewed, as [4, 1, 5] with strides 30, 5, 1 in one dimension
            func(torch.empty_strided(args[0].size(), args[0].stride(), device="meta"), *args[1:])
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException):
        return value_dependent
    except UnsupportedError:
        raise
    except NotImplementedError:
        return value_dependent  # no shape function: a custom operator
    except Exception as e:
        error: BaseException = e
        try:
            if _real_error(func, args, kwargs):
                return value_dependent  # the shape function's own fault, or what it cannot describe: a nested result
        except Exception as real:
            error = real
        raise error.with_traceback(None) from None
    _dtype_error(func, args, kwargs)
    schema = func._schema
    written = {i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write}
    if written:
        mutated = [i for i, a in enumerate(_flat_written(func, args, kwargs)) if a]
        tensors = _tensors(args, kwargs)
        for i in mutated:
            if fakes[i].size() != tensors[i].size():
                raise UnsupportedError(f"{func}: the tensor to write would be resized from {tuple(tensors[i].size())} to {tuple(fakes[i].size())}; give one of the right size")
            if torch._debug_has_internal_overlap(fakes[i]) == 1:
                if func is aten.copy_.default and args[0] is args[1]:  # nothing happens, also where elements share memory
                    return _itself
                _real_error(func, args, kwargs)  # most operators refuse to write such a tensor, and the shape functions do not look
    many = isinstance(result, (list, tuple))
    if any(isinstance(r, torch.Tensor) and not is_dense(r) for r in (result if many else (result,))):
        return value_dependent  # how many elements it stores is known only when it is there
    kind = 3 if result is None or (many and len(schema.returns) == 0) else (2 if isinstance(result, list) else 1) if many else 0
    out: list[tuple[int, Any]] = []
    aliases = {id(f) for i, f in enumerate(fakes) if written and mutated.count(i)}
    for r in list(result) if many else [] if result is None else [result]:
        if isinstance(r, torch.Tensor):
            if id(r) in aliases:
                continue
            out.append((1, _meta_of_result(r)))
        elif r is None:
            out.append((0, None))
        elif isinstance(r, (int, float, bool, complex, str)):
            out.append((2, r))
        else:
            raise UnsupportedError(f"{func} returns {type(r).__name__} within its result")
    if func is aten._native_batch_norm_legit_functional.default:  # new running statistics are clones of the old; the shape function widens half precision
        out[3:] = [(1, _meta_of_result(fakes[i])) for i in range(len(fakes) - 2, len(fakes))]
    if func is aten.mkldnn_rnn_layer.default:
        out[3] = (1, _rnn_workspace(args, out[3][1]))
    if func is aten.native_group_norm.default and args[0].device.type == "cpu":  # torch 2.14's shape function forgets that the kernel keeps channels_last
        dtype, device, size, _, offset = out[0][1]
        like = torch.empty(size, device="meta", memory_format=torch._prims_common.suggest_memory_format(fakes[0]))
        out[0] = 1, (dtype, device, size, tuple(like.stride()), offset)
    for argument, value in zip(schema.arguments, args):
        if argument.name == "output_mask" and len(value) <= len(out):  # shape functions may describe what the kernel does not make
            out = [o if m else (0, None) for o, m in zip(out, value)] + out[len(value) :]
    return kind, out


def _rnn_workspace(args: tuple[Any, ...], said: tuple[Any, ...]) -> tuple[Any, ...]:
    """oneDNN's recurrent layers hand backward a workspace several times the size of their results; the shape function says it is empty. Its size is a line over
    the rows (in whole pages), so two calls on a few rows of zeros tell it."""
    x, weights, constants = args[0], args[1:5], args[7:]
    rows, batch_sizes, train = x.size(1), args[8], args[15]
    if not train or batch_sizes or rows == 0 or x.device.type != "cpu":
        return said

    def n_bytes(n: int) -> int:
        with torch._C._AutoDispatchBelowAutograd():
            sizes = [(x.size(0), n, x.size(2)), *(w.size() for w in weights), *((n, h.size(1)) for h in args[5:7])]
            return int(aten.mkldnn_rnn_layer.default(*(torch.zeros(s, dtype=x.dtype) for s in sizes), *constants)[3].numel())

    more = min(rows, 2 * max(4, torch.get_num_threads()))
    few = (more + 1) // 2
    try:
        size = n_bytes(more)
        if more < rows:
            size += (size - n_bytes(few)) * (rows - more) // (more - few)
    except RuntimeError:  # no memory for a few rows: the plan then knows less, and the step may still run
        return said
    return said[0], said[1], (size,), (1,), 0


def _itself(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]


def _harmless(func: Any) -> bool:
    """May it run on zeros? Not what takes a workspace that another call must have filled: that crashes."""
    name = func._schema.name
    return func.namespace == "aten" and not any(word in name for word in ("mkldnn", "rnn", "backward", "cudnn", "miopen", "mps", "quantized", "fbgemm", "embedding_bag"))


def _dtype_error(func: Any, args: Any, kwargs: Any) -> None:
    """Shape functions know nothing of dtypes without a kernel ('"softmax" not implemented for 'Long''): try a few elements. Only calls with one tensor, of
    whole numbers: with several, a shrunken call may not fit together, and kernels trust their callers."""
    tensors = _tensors(args, kwargs)
    if not _harmless(func) or len(tensors) != 1 or tensors[0].dtype.is_floating_point or torch.Tag.nondeterministic_seeded in func.tags:
        return
    try:
        a, k = _map_call(lambda t: torch.zeros([min(s, 4) for s in t.size()], dtype=t.dtype, device=t.device), args, kwargs)
        func(*a, **k)
    except Exception as e:  # the shrunken call may be wrong in itself; only a missing kernel counts
        if "not implemented for" in str(e):
            raise e.with_traceback(None) from None


def check_overlap(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A written tensor shares memory with another argument: let eager's own check speak, on memory of the same shape. With large ones it does not, for it would cost
    as much: check_shared() then refuses what really overlaps."""
    memory: dict[int, torch.Tensor] = {}
    sizes: dict[int, int] = {}
    for t in _lazies(args, kwargs):
        group = _core.group_info(t)[2]
        sizes[group] = max(sizes.get(group, 0), _end(t) * t.element_size())
    if sum(sizes.values()) > 1 << 24:
        return

    def stand_in(t: torch.Tensor) -> torch.Tensor:
        if not _core.is_lazy(t):
            return torch.zeros_like(t)
        group = _core.group_info(t)[2]
        if group not in memory:
            memory[group] = torch.zeros(sizes[group] + 15 & ~15, dtype=torch.uint8)
        return memory[group].view(t.dtype).as_strided(t.size(), t.stride(), t.storage_offset())

    a, k = _map_call(stand_in, args, kwargs)
    func(*a, **k)


def _end(t: torch.Tensor) -> int:
    """One beyond the last place of t in its storage, in elements."""
    return t.storage_offset() + 1 + sum((s - 1) * d for s, d in zip(t.size(), t.stride())) if t.numel() else 0


Layout = tuple[int, tuple[int, ...], tuple[int, ...]]  # offset, sizes, strides


def _layout(t: torch.Tensor) -> Layout:
    return t.storage_offset(), tuple(t.size()), tuple(t.stride())


def _dims(layout: Layout) -> list[tuple[int, int]]:
    """(stride, size), the smallest stride first; what lies one after the other is one dimension."""
    dims: list[tuple[int, int]] = []
    for stride, size in sorted((d, s) for s, d in zip(*layout[1:]) if s != 1):
        if dims and stride == dims[-1][0] * dims[-1][1]:
            stride, size = dims[-1][0], dims.pop()[1] * size
        dims.append((stride, size))
    return dims


@functools.lru_cache(maxsize=1024)
def _places(a: Layout, b: Layout) -> tuple[bool, bool]:
    """Of two layouts in one storage: (do they share an element, does a hold every element of b without holding one twice). Where that would take long to find out, the
    answers that get a refusal."""
    dims_a, dims_b = _dims(a), _dims(b)
    if any(s == 0 for _, s in dims_a + dims_b):
        return False, any(s == 0 for _, s in dims_b)
    first = min(a[0], b[0])
    at_a, at_b = a[0] - first, b[0] - first

    def last(at: int, dims: list[tuple[int, int]]) -> int:
        return at + sum((s - 1) * d for d, s in dims)

    while dims_a and dims_b and dims_a[-1] == dims_b[-1]:  # the same outer dimension, whose steps jump over all the rest: one step tells it all
        if max(last(at_a, dims_a[:-1]), last(at_b, dims_b[:-1])) >= dims_a[-1][0]:
            break
        dims_a, dims_b = dims_a[:-1], dims_b[:-1]
    end_a, end_b = last(at_a, dims_a), last(at_b, dims_b)
    if end_a < at_b or end_b < at_a:
        return False, False
    if not dims_a or (len(dims_a) == 1 and dims_a[0][0] == 1):  # a has no holes
        within = at_a <= at_b and end_b <= end_a
        if within or at_a <= at_b <= end_a or at_a <= end_b <= end_a:
            return True, within
    end = 1 + max(end_a, end_b)
    if end > 1 << 26:
        return True, False
    mark = torch.zeros(end, dtype=torch.uint8)
    mark.as_strided([s for _, s in dims_a], [d for d, _ in dims_a], at_a).fill_(1)
    once = int(mark.sum()) == math.prod(s for _, s in dims_a)
    of_b = mark.as_strided([s for _, s in dims_b], [d for d, _ in dims_b], at_b)
    return bool(of_b.any()), once and bool(of_b.all())


def check_shared(func: Any, written: torch.Tensor, other: torch.Tensor) -> None:
    """`y.mul_(y[:, :1])`, `y.addmm_(y, y)`: eager lets some such writes pass and then reads what it has just written, in an order that is its own. Values cannot
    follow that."""
    if written.element_size() != other.element_size() or _places(_layout(written), _layout(other))[0]:
        raise UnsupportedError(
            f"{func} writes elements of a lazy tensor that another argument, which shares its memory, reads: the result depends on the order. "
            "Use .clone() of that argument"
        )


def check_strided(view: torch.Tensor, size: Any, stride: Any, offset: int) -> None:
    """as_strided of a view that requires grad. Plain autograd sends its gradient to the view's elements, but once the memory is written, when it looks again, to whatever is
    addressed. We are asked again by the same call as the first time; so beyond the view's elements it can be had as long as nothing has been written."""
    if view._version and not _places(_layout(view), (offset, tuple(size), tuple(stride)))[1]:
        raise UnsupportedError(
            "as_strided beyond a lazy view that requires grad, in memory that was written: its gradient depends on what views share. Use select, narrow, unfold or diagonal, or "
            "as_strided of the tensor that it is a view of"
        )


def _flat_written(func: Any, args: Any, kwargs: Any) -> list[bool]:
    """For every tensor of the call in order: is it written?"""
    flags: list[bool] = []
    by_name = {a.name: a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments}
    positional = [a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments if not a.kwarg_only]
    for write, a in zip(positional, args):
        _map(lambda t, write=write: flags.append(write), a)
    for name, a in kwargs.items():
        _map(lambda t, write=by_name[name]: flags.append(write), a)
    return flags


def factory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """A factory that reads only metadata → (func, args, kwargs, meta, fill): a call without tensors, and how to fill what it makes, or None."""
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
        fill = (getattr(aten.random_, "from"), (bounds[0] if len(bounds) > 1 else 0, bounds[-1]), {})
    made = {"dtype": dtype, "device": device}
    if value is not None:
        if result.is_contiguous():
            return aten.full.default, (list(size), value), made, meta, None
        fill = (aten.fill_.Scalar, (value,), {})
    n = 1 + sum((s - 1) * d for s, d in zip(size, stride)) if result.numel() else 0
    if n < result.numel():
        raise UnsupportedError(f"{func}: strides {stride} of sizes {size} overlap")
    return aten.empty_strided.default, (list(size), list(stride)), made, meta, fill


def redispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _core.dispatch(func, (LazyTensor,), args, kwargs)


# ------------------------------------------------------------------------------------------------------------ special cases


def _call_plain(func: Any, args: Any, kwargs: Any) -> Any:
    a, k = _map_call(plain, args, kwargs)
    return func(*a, **k)


def run_on_reals(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make every lazy argument concrete, in one run, and call the operator now. The result is plain."""
    _core.concrete_all(_lazies(args, kwargs))
    return _call_plain(func, args, kwargs)


def value_dependent(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator whose result cannot be described before it runs. Lazy tensors that it writes get the written contents."""
    flags = _flat_written(func, args, kwargs)
    return _write_now(func, args, kwargs, flags) if any(flags) else run_on_reals(func, args, kwargs)


def _write_now(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], flags: list[bool]) -> Any:
    """Call the operator now. `flags`: of every tensor of the call in order, is it written? A lazy one gets what was written into a copy of it."""
    _core.concrete_all(_lazies(args, kwargs))
    at = iter(flags)
    copies: list[tuple[Any, torch.Tensor]] = []

    def real(t: torch.Tensor) -> torch.Tensor:
        written = next(at)
        if written and _core.is_lazy(t):
            copies.append((t, clone_exactly(plain(t))))
            return copies[-1][1]
        if written:
            unshare(t)
        return plain(t)

    a, k = _map_call(real, args, kwargs)
    result = func(*a, **k)
    if isinstance(result, torch.ScriptObject):
        result = _waited(result)
    elif isinstance(result, tuple):
        result = tuple(_waited(r) if isinstance(r, torch.ScriptObject) else r for r in result)
    for lazy, copied in copies:
        redispatch(aten.copy_.default, (lazy, copied), {})
    back = {id(c): t for t, c in copies}
    return _map(lambda t: back.get(id(t), t), result)


def _waited(work: Any) -> Any:
    """Wait for a collective; returns work that is done, for the caller to wait for: some kinds write once more, or hang, when waited for twice."""
    from torch._C import _distributed_c10d as c10d

    work.wait()
    done: Any = torch.futures.Future()
    done.set_result(None)
    return c10d._create_work_from_future(done).boxed()


def _collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.distributed: every rank calls it at the same place of its program, so it happens now, on values. Schemas do not say what is written: it is the first argument."""
    writes = func._schema.name.removeprefix("c10d::") not in ("send", "barrier", "monitored_barrier_")
    first = len(_tensors(args[:1], {}))
    rest = len(_tensors(args[1:], kwargs))
    return _write_now(func, args, kwargs, [writes] * first + [False] * rest)


@special("_local_scalar_dense", "equal", "nonzero", "nonzero_numpy", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive")
@special("unique_dim_consecutive", "bincount", "repeat_interleave.Tensor", "is_nonzero", "_assert_async", "_linalg_check_errors", "multinomial", "is_set_to")
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
    raise UnsupportedError(f"{func} on a lazy tensor addresses memory that it does not have. Use x.torch()")


@special("resize_", "resize_as_")
def _resize(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    size = args[1].size() if isinstance(args[1], torch.Tensor) else tuple(args[1])
    if tuple(args[0].size()) == tuple(size):
        return args[0]
    raise UnsupportedError(f"{func}: a lazy tensor cannot be resized from {tuple(args[0].size())} to {tuple(size)}")


def write_real(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Lazy data is written into a plain tensor: it becomes concrete now, and what was recorded from that memory keeps its contents."""
    flags = _flat_written(func, args, kwargs)
    tensors = _tensors(args, kwargs)
    written = [t for t, w in zip(tensors, flags) if w]
    if any(_core.is_lazy(t) for t in written):
        raise UnsupportedError(f"{func} writes a lazy and a plain tensor at once")
    _core.concrete_all(_lazies(args, kwargs))
    for t in written:
        unshare(t)
    return _call_plain(func, args, kwargs)


def unshare(real: torch.Tensor) -> None:
    """Leaves recorded from the memory of `real` keep their contents: each gets a copy of its own."""
    tape = _core.current_tape()
    if tape is None:
        return
    memory = real.untyped_storage().data_ptr()
    for v, leaf in _core.leaves_on(tape):
        if leaf is real or leaf.untyped_storage().data_ptr() == memory:
            with torch.no_grad():
                _core.replace_leaf(tape, v, clone_exactly(leaf.detach()))


def _decompose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = func.decompose(*args, **kwargs)
    return _core.record(func, args, kwargs) if result is NotImplemented else result


def _as_strided(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("self", "size", "stride", "storage_offset")
    full = list(args) + [kwargs.get(n) for n in names[len(args):]]
    if full[3] is None:
        full[3] = full[0].storage_offset()
    return _core.record(func, tuple(full), {})


def _special_index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Index with a mask: make only the mask concrete and record its positions; a write of one number needs not even that. And `x[torch.arange(B), i]`: see _as_factory()."""
    self, indices = args[0], list(args[1])
    masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
    name = func._schema.name.removeprefix("aten::")
    if name in ("index_put", "index_put_", "_index_put_impl_") and len(indices) == 1 and indices[0].dtype == torch.bool:
        value = args[2]
        accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
        mask = indices[0]
        if value.numel() == 1 and not accumulate and tuple(mask.size()) == tuple(self.size()[: mask.dim()]):
            mask = mask.reshape(tuple(mask.size()) + (1,) * (self.dim() - mask.dim()))
            target = aten.masked_fill.Tensor if name == "index_put" else aten.masked_fill_.Tensor
            if _core.is_lazy(self):
                return redispatch(target, (self, mask, value.reshape(())), {})
    _core.concrete_all([m for m in masks if _core.is_lazy(m)])
    flat: list[Any] = []
    for i, index in enumerate(indices):
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            own = i == 0 and index is not None and _core.is_lazy(self) and _core.tape_of(self) is _core.current_tape()
            flat.append(_as_factory(index) if own else index)
            continue
        at = sum(1 if f is None else 1 for f in flat)
        expected = self.size()[at : at + index.dim()]
        if tuple(index.size()) != tuple(expected):
            for j in range(index.dim()):
                if index.size(j) != self.size(at + j):
                    raise IndexError(
                        f"The shape of the mask {list(index.size())} at index {j} does not match the shape of the indexed tensor {list(self.size())} at index {at + j}"
                    )
        flat.extend(_positions(plain(index)))
    return _core.record(func, (self, flat, *args[2:]), kwargs)


def _as_factory(index: torch.Tensor) -> torch.Tensor:
    """A plain tensor that now holds 0, 1, 2, ... is recorded as the operator that makes them, so that a slice can make its own. By value: where it comes from does not matter."""
    n = index.numel()
    if _core.is_lazy(index) or index.device.type != "cpu" or n not in index.size() or not torch.equal(index.flatten(), torch.arange(n, dtype=index.dtype)):
        return index
    rows = _core.record(aten.arange.default, (n,), {"dtype": index.dtype, "device": index.device})
    return rows if index.dim() == 1 else redispatch(aten.view.default, (rows, list(index.size())), {})


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
    """The layout of a tensor with views, or of a view, would change below autograd, which would go on to replay the views on it."""


_settled: torch.Tensor | None = None  # the tensor whose layout may change: _in_place() looks after its views


def _metadata_write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`t_` and its like: the wrapper becomes a view of itself. With other wrappers of the same memory alive, autograd would replay their views on
    the changed base and give a wrong gradient: see _in_place()."""
    name = func._schema.name + ("." + func._schema.overload_name if func._schema.overload_name else "")
    self = args[0]
    if name not in _twins:
        raise UnsupportedError(f"{func} on a lazy tensor changes its memory layout. Use the version without underscore, or x.torch()")
    _, n, _ = _core.group_info(self)
    shared = self._is_view() or (n > 1 and self is not _settled)
    try:
        twin = redispatch(_twins[name], args, kwargs)
    except UnsupportedError:
        raise
    except Exception:
        _real_error(func, args, kwargs)  # names itself, not its twin
        raise
    if shared:
        raise _SharedLayout(f"{func} on a lazy tensor that shares memory with a view or an alias of it. Use the version without underscore")
    if name == "aten::as_strided_":  # adaptive pooling does it to what it just made
        torch._C.TensorBase.data.__set__(self, twin)
    else:
        guard = torch._C._DisableTorchDispatch()
        func(*args, **kwargs)
        del guard
    _core.become(self, twin)
    return self


_kept: list[torch.Tensor] = []  # of a failed self-test: their reference counts are wrong, so they live on


@functools.cache
def _can_swap() -> bool:
    """May two tensors that C++ also owns exchange what they stand for? Tried once: the references that C++ holds must move along."""
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(2, 3, requires_grad=True) * 1
        view, twin = x.view(-1), x.t()
        counts, uses = (sys.getrefcount(x), sys.getrefcount(twin)), (x._use_count(), twin._use_count())
        torch._C._swap_tensor_impl(x, twin)  # type: ignore[attr-defined]
        expected = (counts[0] - 1, counts[1] + 1) if second_owner_adds_reference() else counts
        works = (sys.getrefcount(x), sys.getrefcount(twin)) == expected and (x._use_count(), twin._use_count()) == uses[::-1]
        if not works:  # pragma: no cover - another torch
            _kept.extend((x, twin, view))
    return works


def _in_place(name: str) -> Callable[..., torch.Tensor]:
    """A method like `t_`, where memory is shared.

    Plain autograd remembers where a view lies in its base's memory; of a subclass it remembers the function, and would replay it on the changed base. So after the change every
    view of a base is made the view by memory that plain autograd would take it for. A view `v` itself becomes `v.t()`, in the same object, by torch's own exchange of contents.
    """
    write, make = getattr(torch.Tensor, name), getattr(torch.Tensor, name[:-1])

    def method(self: LazyTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.is_inference():  # no autograd
            return settled(self, args, kwargs)
        if not self._is_view():
            views = [v for v in reversed(_core.group_wrappers(self)) if v is not self and v._base is self and _follows(v)]  # oldest first
            if not views:
                return settled(self, args, kwargs)
            lawful = not torch.is_inference_mode_enabled() and (torch.is_grad_enabled() or not self.requires_grad)
            if not lawful or not all(_exchangeable(v) and _places(_layout(self), _layout(v))[1] for v in views):
                return write(self, *args, **kwargs)  # raises
            settled(self, args, kwargs)
            with torch.enable_grad():
                for v in views:
                    torch._C._swap_tensor_impl(v, self.as_strided(v.size(), v.stride(), v.storage_offset()))  # type: ignore[attr-defined]
            return self
        try:
            return write(self, *args, **kwargs)  # autograd objects before it asks us
        except _SharedLayout:
            if not _exchangeable(self):
                raise
        torch._C._autograd._unsafe_set_version_counter((self,), (self._version + 1,))  # type: ignore[attr-defined]
        with torch.enable_grad():
            twin = make(self, *args, **kwargs)
        self._v, twin._v = twin._v, self._v  # type: ignore[attr-defined]
        torch._C._swap_tensor_impl(self, twin)  # type: ignore[attr-defined]
        _core.rewrap(self)
        _core.rewrap(twin)
        return self

    def settled(self: LazyTensor, args: Any, kwargs: Any) -> torch.Tensor:
        global _settled
        _settled = self
        try:
            return write(self, *args, **kwargs)
        finally:
            _settled = None

    method.__name__, method.__doc__ = name, write.__doc__
    return method


def _follows(view: torch.Tensor) -> bool:
    """Does autograd let the view follow a write to its base? Of the others (outputs of unbind or split, views made under no_grad) it raises eager's error when they are used."""
    return torch._C._autograd._get_creation_meta(view) == torch._C._autograd.CreationMeta.DEFAULT  # type: ignore[attr-defined]


def _exchangeable(view: torch.Tensor) -> bool:
    """May another view of the same base take the place of this one, all that hangs on it included? Looks at nothing that would have autograd replay it."""
    if view._backward_hooks or view.retains_grad or torch.is_inference_mode_enabled() or not _can_swap():
        return False
    return not view.requires_grad or (torch.is_grad_enabled() and view._base is not None and view._base.requires_grad)


for _name in ("t_", "squeeze_", "unsqueeze_", "transpose_", "swapdims_", "swapaxes_"):
    setattr(LazyTensor, _name, _in_place(_name))


@special("squeeze")
def _squeeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """By name: a slice of one row has a batch dimension of size 1 that the whole does not have."""
    x, dims = args[0], list(args[1:]) + list(kwargs.values())
    try:
        named = range(x.dim()) if not dims else [d % x.dim() for d in ([dims[0]] if isinstance(dims[0], int) else dims[0]) if -x.dim() <= d < x.dim()]
        valid = not dims or len(named) == (1 if isinstance(dims[0], int) else len(dims[0]))
    except ZeroDivisionError:  # no dimension
        named, valid = [], False
    if not valid:
        return _core.record(func, args, kwargs)
    return _core.record(aten.squeeze.dims, (x, [d for d in named if x.size(d) == 1]), {})


# -- random

_advance_one: dict[Any, bool] = {}


def _generator(device: torch.device) -> Any:
    """The generator that draws on this device when nobody names another."""
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    raise UnsupportedError(f"a random operator on {device} is not captured yet")


def _random_write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record the state the generator had, then advance it exactly as eager would."""
    self = args[0]
    if not _core.is_lazy(self):
        return write_real(func, args, kwargs)
    if _core.configure()["dry"]:  # koila.plan(): nothing will be drawn, so no generator moves, and any device will do
        return _core.record(func, args, {k: v for k, v in kwargs.items() if k != "generator"})
    kwargs = dict(kwargs)
    given, default = kwargs.pop("generator", None), _generator(self.device)
    generator = default if given is None else given
    state = generator.get_state()
    result = _core.record(func, args, kwargs)
    words = _words(func, self.dtype, args[1:], kwargs) if self.device.type == "cpu" else 0
    _core.random(self, default, state, words)
    if words:
        after = generator.get_state()
        _core.generator_skip(after, words * self.numel())
        generator.set_state(after)
    else:
        _advance(generator, func, self, args, kwargs)
    return result


_in_order = (aten.bernoulli_.float, aten.uniform_.default)
_known_words: dict[Any, int] = {}


def _words(func: Any, dtype: torch.dtype, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How many 32-bit words of the CPU generator each element takes, one element after the other in memory; 0: not so here, or not known."""
    if func not in _in_order:
        return 0
    if (func, dtype) not in _known_words:
        _known_words[func, dtype] = next((n for n in (1, 2) if _takes(n, func, dtype, rest, kwargs)), 0)
    return _known_words[func, dtype]


def _takes(n_words: int, func: Any, dtype: torch.dtype, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tried on this build: a draw in parts is the draw of the whole, memory's order counts, and the state is where n_words an element bring it."""
    sizes = (1, 2, 13, 16, 31, 100, 311, 625, 2000)
    state = torch.Generator().manual_seed(20).get_state()

    def draw(like: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator()
        generator.set_state(at)
        func(like, *rest, **kwargs, generator=generator)
        return like, generator.get_state()

    whole, end = draw(torch.empty(sum(sizes), dtype=dtype, device="cpu"), state)
    turned, turned_end = draw(torch.empty(31, sum(sizes) // 31 + 1, dtype=dtype, device="cpu").t(), state)
    if not torch.equal(turned.t().flatten()[: len(whole)], whole):
        return False
    at = 0
    for size in sizes:
        skipped = state.clone()
        try:
            _core.generator_skip(skipped, n_words * at)
        except ValueError:  # another build's generator
            return False
        part, _ = draw(torch.empty(size, dtype=dtype, device="cpu"), skipped)
        if not torch.equal(part, whole[at : at + size]):
            return False
        at += size
    for reached, n in ((end, whole.numel()), (turned_end, turned.numel())):
        skipped = state.clone()
        _core.generator_skip(skipped, n_words * n)
        if not torch.equal(skipped, reached):
            return False
    return True


def _advance(generator: Any, func: Any, like: torch.Tensor, args: Any, kwargs: Any) -> None:
    """Draw as eager draws. Where one short draw provably leaves the same state, do that."""
    size, stride = tuple(like.size()), tuple(like.stride())
    if _draws_once(func, like.dtype) and like.numel() > 0:
        size, stride = (1,), (1,)
    dummy = torch.empty_strided(size, stride, dtype=like.dtype, device=like.device)
    rest = [torch.full(a.size(), 0.5, dtype=a.dtype) if isinstance(a, torch.Tensor) else a for a in args[1:]]
    func(dummy, *rest, **kwargs, generator=generator)


def _draws_once(func: Any, dtype: torch.dtype) -> bool:
    """bernoulli_(p) through MKL takes one number from the generator, whatever the size. Checked here, on this build, not assumed."""
    if func is not aten.bernoulli_.float:
        return False
    key = (func, dtype)
    if key not in _advance_one:
        _advance_one[key] = _self_test(func, dtype)
    return _advance_one[key]


def _self_test(func: Any, dtype: torch.dtype) -> bool:
    def after(make: Callable[[], torch.Tensor]) -> bytes:
        g = torch.Generator().manual_seed(20)
        func(make(), 0.3, generator=g)
        func(make(), 0.3, generator=g)
        return g.get_state().numpy().tobytes()

    makes: list[Callable[[], torch.Tensor]] = [
        lambda n=n: torch.empty(n, dtype=dtype) for n in (1, 2, 3, 7, 15, 16, 17, 31, 100, 623, 624, 625, 1000, 4097, 70001)  # type: ignore[misc]
    ]
    makes += [lambda: torch.empty(6, 8, dtype=dtype).t(), lambda: torch.empty(9, 9, dtype=dtype)[:, ::2], lambda: torch.empty(4, 5, 6, dtype=dtype)[:, :3]]
    first = after(makes[0])
    return all(after(m) == first for m in makes)


@special("bernoulli")
def _bernoulli(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    fresh = redispatch(aten.empty_like.default, args[:1], {"memory_format": torch.contiguous_format})
    p = args[1] if len(args) > 1 else kwargs.get("p", args[0])
    rest = {k: v for k, v in kwargs.items() if k == "generator"}
    write = aten.bernoulli_.Tensor if isinstance(p, torch.Tensor) else aten.bernoulli_.float
    return redispatch(write, (fresh, p), rest)


def _is_fused(device: torch.device) -> bool:
    return device.type != "cpu" and not _core.configure()["dry"]


@special("native_dropout")
def _native_dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, p, train = args[0], args[1], args[2] if len(args) > 2 else kwargs.get("train")
    if x.numel() == 0:
        return x, redispatch(aten.empty_like.default, (x,), {})
    if train is False:
        return redispatch(aten.clone.default, (x,), {}), redispatch(aten.ones_like.default, (x,), {"dtype": torch.bool})
    if _is_fused(x.device):  # one kernel that draws by position: its mask for anything of this shape is the mask for x
        like = redispatch(aten.empty_like.default, (x,), {})
        generator = _generator(x.device)
        state = generator.get_state()
        _, mask = _core.record(func, (like, p, True), {})
        _core.random(mask, generator, state, 0)
        aten.native_dropout(torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device), p, True)  # the generator moves as eager's
    else:
        mask = redispatch(aten.empty_like.default, (x,), {"dtype": torch.bool})
        mask = redispatch(aten.bernoulli_.float, (mask, 1 - p), {})
    out = redispatch(aten.mul.Tensor, (x, mask), {})
    return redispatch(aten.mul.Tensor, (out, 0.0 if p == 1 else 1.0 / (1.0 - p)), {}), mask


# -- BatchNorm


@special("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "cudnn_batch_norm", "miopen_batch_norm")
def _batch_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In training mode: the functional form; the new running statistics are written when the step ends, exactly once."""
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
        return (*results, torch.empty(0, dtype=torch.uint8)) if name == "cudnn_batch_norm" else results
    if not training or mean is None or var is None:
        return _core.record(func, args, kwargs)
    out, saved_mean, saved_invstd, new_mean, new_var = _core.record(
        aten._native_batch_norm_legit_functional.default, (x, weight, bias, mean, var, True, momentum, eps), {}
    )
    for buffer, value in ((mean, new_mean), (var, new_var)):
        if _core.is_lazy(buffer):
            redispatch(aten.copy_.default, (buffer, value), {})
        elif not _core.is_lazy(value):
            write_real(aten.copy_.default, (buffer, value), {})
        else:
            _core.effect(value, buffer)
    if x.size(0) == 1 and _core.is_lazy(new_mean):  # instance_norm: its statistics are temporaries that it reads at once
        _core.run(_core.tape_of(new_mean), [], True)
    if name in ("_batch_norm_with_update", "cudnn_batch_norm"):  # the last is workspace of a backward kernel that is not used
        return out, saved_mean, saved_invstd, torch.empty(0, dtype=torch.uint8)
    return out, saved_mean, saved_invstd


@special("cudnn_batch_norm_backward", "miopen_batch_norm_backward")
def _batch_norm_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The vendors' kernels save what the native ones do, mean and inverse deviation; only the native backward can be cut."""
    x, gradient, weight, mean, var, saved_mean, saved_invstd, eps = args[:8]
    return _core.record(
        aten.native_batch_norm_backward.default, (gradient, x, weight, mean, var, saved_mean, saved_invstd, True, eps, [True, weight is not None, weight is not None]), {}
    )


# -- foreach


def _foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One ordinary operator per tensor, as the kernel without a fast path does; then the version counters, which nobody else counts."""
    name = func._schema.name.removeprefix("aten::_foreach_")
    overload = func._schema.overload_name
    packet = getattr(aten, name, None)
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
            results.append(packet(*one, value=value if not isinstance(value, torch.Tensor) else value[i]))
        elif name in ("copy", "copy_"):
            results.append(aten.copy_.default(one[0], *one[1:]) if name == "copy_" else aten.copy.default(*one))
        elif name in ("maximum", "minimum", "maximum_", "minimum_", "clamp_min", "clamp_max", "clamp_min_", "clamp_max_"):
            plain_name = {"maximum": "clamp_min", "minimum": "clamp_max"}.get(name.rstrip("_"), name.rstrip("_"))
            if overload == "List":
                out = getattr(aten, {"clamp_min": "maximum", "clamp_max": "minimum"}[plain_name])(one[0], one[1])
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
        elif overload in ("List", "ScalarList") and name.rstrip("_") in ("add", "sub") and len(one) > 2:
            results.append(packet(one[0], one[1], alpha=one[2]))
        else:
            results.append(packet(*one, **kw))
    if name.endswith("_"):
        lazy = [t for t in args[0] if not t.is_inference()]
        torch._C._autograd._unsafe_set_version_counter(tuple(lazy), tuple(t._version + 1 for t in lazy))
        return None
    return results


# --------------------------------------------------------------------------------------------- doors of plain tensors

_installed = False


def install() -> None:
    """Guard the attributes of plain tensors through which a lazy tensor would pass unseen. Once, at the first lazy()."""
    global _installed
    if _installed:
        return
    _installed = True
    base = torch._C.TensorBase
    data, grad = base.data, base.grad

    def set_data(self: torch.Tensor, value: Any) -> None:
        if _core.is_lazy(self):
            _set_lazy_data(self, value, data)
        else:
            if _core.current_tape() is not None:
                _keep_leaf(self)
            data.__set__(self, plain(value) if isinstance(value, torch.Tensor) else value)

    def set_grad(self: torch.Tensor, value: Any) -> None:
        if value is not None and _core.is_lazy(value) and not _core.is_lazy(self):
            value = plain(value)
        grad.__set__(self, value)

    torch.Tensor.data = property(data.__get__, set_data, data.__delete__ if hasattr(data, "__delete__") else None, data.__doc__)  # type: ignore[method-assign,assignment]
    torch.Tensor.grad = property(grad.__get__, set_grad, grad.__delete__, grad.__doc__)  # type: ignore[method-assign,assignment]

    import torch.utils as utils

    swap = utils.swap_tensors

    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
        if _core.is_lazy(t1) != _core.is_lazy(t2):
            raise UnsupportedError("swap_tensors() of a lazy and a plain tensor. Make the lazy one plain with x.torch()")
        swap(t1, t2)
        _core.rewrap(t1)
        _core.rewrap(t2)

    utils.swap_tensors = swap_tensors

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError("a higher-order operator (torch.cond, flex_attention, ...) on lazy tensors. Make them plain with x.torch()")

    _lazy_states()
    for hop in list(getattr(torch._ops, "_higher_order_ops", {}).values()):
        try:
            hop.py_impl(LazyTensor)(refuse)
        except Exception:  # already there, or of a kind that takes no classes
            pass


def _lazy_states() -> None:
    """Recurrent layers start from `torch.zeros`, a plain tensor, and write the first step into it: everything after would be whole. Given a lazy input and no state, we
    pass the zeros as a lazy factory, which is sliced like the input."""
    import types

    def states(self: Any, x: Any) -> Any:
        data, sizes = (x.data, x.batch_sizes) if isinstance(x, torch.nn.utils.rnn.PackedSequence) else (x, None)
        if not _core.is_lazy(data) or (sizes is None and data.dim() not in (2, 3)):
            return None
        rows = int(sizes[0]) if sizes is not None else None if data.dim() == 2 else data.size(0 if self.batch_first else 1)
        n = self.num_layers * (2 if self.bidirectional else 1)
        lead = (n,) if rows is None else (n, rows)
        h = data.new_zeros(*lead, self.proj_size or self.hidden_size)
        return (h, data.new_zeros(*lead, self.hidden_size)) if self.mode == "LSTM" else h

    for cls in (torch.nn.RNN, torch.nn.GRU, torch.nn.LSTM):
        original = cls.forward

        def wrap(original: Any) -> Any:
            def forward(self, input, hx=None):  # type: ignore[no-untyped-def]
                return original(self, input, states(self, input) if hx is None else hx)

            # TorchScript compiles the source of what it unwraps, with the globals of what it is given: they must belong together
            at = original.__code__
            code = forward.__code__.replace(co_firstlineno=at.co_firstlineno, co_filename=at.co_filename)
            same = types.FunctionType(code, original.__globals__, "forward", (None,), forward.__closure__)
            for name in ("__module__", "__qualname__", "__doc__", "__annotations__"):
                setattr(same, name, getattr(original, name))
            same.__wrapped__ = original  # type: ignore[attr-defined]
            return same

        cls.forward = wrap(original)  # type: ignore[method-assign]


def _keep_leaf(real: torch.Tensor) -> None:
    tape = _core.current_tape()
    for v, leaf in _core.leaves_on(tape):
        if leaf is real:
            with torch.no_grad():
                _core.replace_leaf(tape, v, real.detach())


def _set_lazy_data(self: LazyTensor, value: torch.Tensor, data: Any) -> None:
    if _core.is_lazy(value):
        other = _core.record(aten.alias.default, (value.detach(),), {})
    else:
        _core.tape_open()
        other = _core.lazy_leaf(value.detach(), None, 0)
    data.__set__(self, other)
    _core.become(self, other)

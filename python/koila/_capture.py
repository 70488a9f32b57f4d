"""The functions that C calls by name (``koila__ask`` in helpers.c): :func:`describe`, once an
operator, for its facts; the others seldom."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from ._torch import set_data, torch, untyped_storage, use_count
from ._batch_norm import uncount
from ._calls import (
    empty_like_meta,
    clone_exactly,
    empty_like_exactly,
    enter_modes,
    in_order,
    is_dense,
    keep_contents,
    redispatch,
    run_on_reals,
    value_dependent,
    with_strides,
    write_real,
)
from ._cells import cell_of, library
from ._doors import install
from ._errors import StaleValueError, UnsupportedError
from ._fingerprint import device_print as device_print
from ._foreach import foreach
from ._index import special_index
from ._layout import as_strided, metadata_write
from . import _attention
from ._aside import steps_aside
from ._plain_part import plain_part
from ._random import random_write
from ._run import PSEUDO
from ._settled import alias_of, on_settled, settled_views
from ._shapes import (
    check_apart,
    check_apart_from_itself,
    check_elements_apart,
    check_overlap,
    check_plain_views,
    check_shared,
    check_strided,
    factory,
    shape,
)
from ._special import collective, decompose, handlers
from ._statistics import unguard
from ._tensor import LazyTensor

# C looks up these names here, and the functions below.
__all__ = [
    "UnsupportedError",
    "alias_of",
    "check_apart",
    "check_apart_from_itself",
    "check_elements_apart",
    "check_overlap",
    "check_plain_views",
    "check_shared",
    "check_strided",
    "clone_exactly",
    "empty_like_exactly",
    "enter_modes",
    "factory",
    "in_order",
    "inference_as",
    "install",
    "is_dense",
    "keep_contents",
    "on_settled",
    "plain_part",
    "redispatch",
    "run_on_reals",
    "set_data",
    "settled_views",
    "shape",
    "steps_aside",
    "uncount",
    "unguard",
    "untyped_storage",
    "use_count",
    "value_dependent",
    "empty_like_meta",
    "with_strides",
    "write_real",
]


_LIBRARY = library()


def user_file(filename: str) -> str | None:
    """The name to show for a source file, `In [3]` for a notebook's cell; None for torch, koila and
    code without a file."""
    cell = cell_of(filename)
    if cell is not None:
        return cell
    if filename.startswith("<") or os.path.abspath(filename).startswith(_LIBRARY):
        return None
    return filename


def op_by_name(name: str) -> Any:
    """``"aten::sum.dim_IntList"`` → the OpOverload."""
    space, rest = name.split("::", 1)
    if space == "koila":  # an operator that only rewrites use
        return SimpleNamespace(_op=PSEUDO[name])
    base, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, space), base), overload or "default")


def real_meta(t: torch.Tensor) -> tuple[Any, ...]:
    """(dtype, device, sizes, strides) of a plain tensor."""
    if not is_dense(t):
        kind = "nested" if t.is_nested else str(t.layout)
        raise UnsupportedError(
            f"a {kind} tensor cannot be part of a recorded step. Use t.to_dense() or "
            "t.to_padded_tensor(0)"
        )
    return t.dtype, t.device, tuple(t.size()), tuple(t.stride())


def check_type(func: Any, cls: type[torch.Tensor]) -> None:
    """Refuse a tensor class with a dispatch of its own. func: the operator; None: in lazy()."""
    if issubclass(cls, LazyTensor) or cls.__torch_dispatch__ in (
        torch._C._disabled_torch_dispatch_impl,
    ):
        return
    if func is None:
        raise UnsupportedError(f"a {cls.__name__} cannot be lazy: it has a dispatch of its own")
    raise UnsupportedError(
        f"{func} mixes a lazy tensor with a {cls.__name__}, which has a dispatch of its own. "
        "Make the lazy one plain with x.torch()"
    )


def set_torch(dtype: torch.dtype, deterministic: int) -> None:
    """Set the default dtype and deterministic algorithms (0 off, 1 on, 2 warn), see
    koila__call_mode."""
    torch._C._set_default_dtype(dtype)
    torch._C._set_deterministic_algorithms(deterministic > 0, warn_only=deterministic == 2)


def inference_as(like: torch.Tensor) -> Any:
    """A context, not yet entered, to wrap a view of `like`: outside inference mode for a normal
    tensor, whose views are normal too, and inside for an inference tensor. None: it is so here."""
    inside = like.is_inference()
    if inside == torch.is_inference_mode_enabled():
        return None
    return torch._C._InferenceMode(inside)


def raise_stale(real: torch.Tensor, meta: tuple[Any, ...], then: int, now: int) -> None:
    raise StaleValueError(
        f"a lazy value is asked for, but a tensor {_text(meta)} that it is computed from has "
        f"been changed since (version {then}, now {now}). "
        "Ask for the value (print, item, .torch()) before the change, for example before "
        "optimizer.step()"
    )


def _text(meta: tuple[Any, ...]) -> str:
    return f"{str(meta[0]).removeprefix('torch.')}[{', '.join(map(str, meta[2]))}]"


PLAIN, VIEW, SAME, WRITE, SPECIAL, STRIDED, FACTORY, INDEX = range(8)
_F_VIEW, _F_INPLACE, _F_RANDOM, _F_FACTORY, _F_OPAQUE = 1, 2, 4, 8, 16
_overwriting = {
    "copy_",
    "fill_",
    "zero_",
    "bernoulli_",
    "normal_",
    "uniform_",
    "random_",
    "exponential_",
    "geometric_",
    "cauchy_",
    "log_normal_",
}
# Elementwise operators that lack torch's tag.
_elementwise = {
    "copy_",
    "where",
    "masked_fill_",
    "floor_divide_",
    "eq_",
    "ne_",
    "lt_",
    "le_",
    "gt_",
    "ge_",
}
_factories = {
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "randint_like",
    "new_empty",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_empty_strided",
}
_indexing = {
    "index",
    "index_put",
    "index_put_",
    "_index_put_impl_",
    "_unsafe_index",
    "_unsafe_index_put",
}
_not_really_random = {
    "_cudnn_rnn",
    "_scaled_dot_product_flash_attention_for_cpu",
    *_attention.forwards,
    *_attention.backwards,
}
_WITH_A_VALUE_OF_EACH_SLICE = (
    "mkldnn_rnn_layer",
    "_cudnn_rnn",
    "miopen_rnn",
    "koila::packed_rnn",
    "koila::ctc_loss",
    "koila::opaque_kept",
)


def _rules_of(func: Any) -> dict[type, Any] | None:
    """Torch's functions for `func` by class of tensor: the live dict, so later registrations
    appear in it."""
    from torch._library.simple_registry import singleton

    rules = getattr(singleton.find(func.__qualname__).torch_dispatch_rules, "_data", None)
    return rules if isinstance(rules, dict) else None


def describe(func: Any) -> tuple[Any, ...]:
    """The facts that C needs about an operator, see Note [Kinds] in record.h."""
    schema = func._schema
    name = schema.name + ("." + schema.overload_name if schema.overload_name else "")
    base = schema.name.removeprefix("aten::")
    written, names, sets = _writes_of(schema)
    source = []
    for result in schema.returns:
        info = result.alias_info
        source.append(
            next((s for labels, s in sets if info is not None and info.before_set & labels), -1)
        )
    writes = bool(written or names)
    random = torch.Tag.nondeterministic_seeded in func.tags and base not in _not_really_random
    flags = _F_VIEW * func.is_view | _F_INPLACE * writes | _F_RANDOM * random
    if schema.name in ("aten::empty_strided", "aten::full"):
        flags |= _F_FACTORY
    if base in _WITH_A_VALUE_OF_EACH_SLICE:
        flags |= _F_OPAQUE
    if len(schema.returns) == 0:
        result_kind = 3
    elif len(schema.returns) > 1:
        result_kind = 1
    else:
        result_kind = 2 if "List" in str(schema.returns[0].type) else 0
    kind, handler = _handled_by(func) or _recorded_as(func, name, writes, random)
    return (
        name,
        flags,
        kind,
        written,
        tuple(names),
        tuple(source),
        result_kind,
        base in _overwriting or bool(names),
        torch.Tag.pointwise in func.tags or base in _elementwise,
        handler,
        _rules_of(func),
    )


def _writes_of(schema: Any) -> tuple[int, list[str], list[tuple[set[str], int]]]:
    """The arguments that an operator writes: (bits of positions, names, sets).

    sets: for each of them (its alias labels in the schema, its position; -1 - n for the n-th name,
    counted from 1)."""
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
    return written, names, sets


def _handled_by(func: Any) -> tuple[int, Any] | None:
    """(kind, handler) of an operator that is handled by its name, or None."""
    name, base = func._schema.name, func._schema.name.removeprefix("aten::")
    if name in handlers:
        return SPECIAL, handlers[name]
    if base.startswith("_foreach_"):
        return SPECIAL, foreach
    if func.namespace == "c10d":
        return SPECIAL, collective
    if base in _indexing:
        return INDEX, special_index
    if base in ("detach", "alias", "lift_fresh", "lift"):
        return SAME, None
    if base == "as_strided":
        return STRIDED, as_strided
    return None


def _recorded_as(func: Any, name: str, writes: bool, random: bool) -> tuple[int, Any]:
    """(kind, handler) of any other operator, by its properties."""
    base = func._schema.name.removeprefix("aten::")
    if base in _factories and not writes and "aten::" in func._schema.name:
        return FACTORY, None
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    # silu_backward has both a decomposition and a kernel of its own; eager runs the kernel.
    if has_kernel(name, "CompositeImplicitAutograd") and not any(
        has_kernel(name, key) for key in ("CPU", "CUDA")
    ):
        return SPECIAL, decompose
    if torch.Tag.inplace_view in func.tags:
        return SPECIAL, metadata_write
    if random and writes:
        return SPECIAL, random_write if base in _overwriting else value_dependent
    if random:
        return SPECIAL, run_on_reals
    if func.is_view:
        return VIEW, None
    return (WRITE if writes else PLAIN), None

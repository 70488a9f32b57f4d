"""The operators of optimizers that take lists of tensors, `aten::_foreach_*`."""

from __future__ import annotations

from typing import Any

from ._torch import counting_writes, torch
from ._errors import UnsupportedError
from ._settled import count_write

aten = torch.ops.aten

# The operator on one tensor with a list of tensors, and with a number.
_LIMITS = {
    "maximum": ("maximum", "clamp_min"),
    "clamp_min": ("maximum", "clamp_min"),
    "minimum": ("minimum", "clamp_max"),
    "clamp_max": ("minimum", "clamp_max"),
}


def foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one ordinary operator per tensor, like the kernel without a fast path. Then count the
    versions, which torch does not do for tensors in a list."""
    name = func._schema.name.removeprefix("aten::_foreach_")
    if name.endswith("_") and any(t.is_inference() for t in args[0]):
        _write_inference()
    results = []
    for i in range(len(args[0])):
        one = [
            a[i] if isinstance(a, (list, tuple)) and "List" in str(spec.type) else a
            for a, spec in zip(args, func._schema.arguments)
        ]
        named = {k: v[i] if isinstance(v, (list, tuple)) else v for k, v in kwargs.items()}
        results.append(_on_one(func, name, i, one, named))
    if name.endswith("_"):
        count_write(args[0])
        return None
    return results


def _write_inference() -> None:
    """Raises what torch raises where an inference tensor must not be written."""
    inside = torch.is_inference_mode_enabled()
    with torch.inference_mode():
        none = torch.empty(0, device="cpu")
    if not inside:
        with counting_writes():
            none.zero_()


def _on_one(func: Any, name: str, i: int, one: list[Any], kwargs: dict[str, Any]) -> Any:
    """The call for tensor `i` of the lists. `one`, `kwargs`: its arguments."""
    overload, base = func._schema.overload_name, name.rstrip("_")
    operator: Any = getattr(aten, name, None)
    if base in ("addcmul", "addcdiv"):
        value = one.pop() if len(one) > 3 else 1
        return operator(*one, value=value[i] if isinstance(value, torch.Tensor) else value)
    if name == "copy_":
        return aten.copy_.default(one[0], *one[1:])
    if name == "copy":
        return aten.copy.default(*one)
    if base in _LIMITS:
        limited = getattr(aten, _LIMITS[base][overload != "List"])(one[0], one[1])
        return aten.copy_.default(one[0], limited) if name.endswith("_") else limited
    if name == "norm":
        p = one[1] if len(one) > 1 else 2
        return aten.linalg_vector_norm.default(one[0], p, dtype=kwargs.get("dtype"))
    if name == "max":
        return aten.max.default(one[0])
    if operator is None:
        raise UnsupportedError(f"{func} on lazy tensors")
    if base in ("add", "sub") and overload in ("List", "ScalarList") and len(one) > 2:
        return operator(one[0], one[1], alpha=one[2])
    return operator(*one, **kwargs)

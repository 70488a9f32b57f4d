"""torch.cond, while_loop, map and scan on lazy tensors: the loops and branches that they stand for.

Torch compiles a call of them, also in eager, and its compiler knows no lazy tensors. All go through
one function of torch, which is wrapped here. Their functions are called as Python, so the operators
inside are recorded like any others; a predicate is read, as `if` reads it. (A parameter that only
the branch not taken uses gets no gradient, as behind `if`; torch.cond gives it zeros.)"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.utils import _pytree as pytree

from ._torch import torch
from . import _core
from ._errors import UnsupportedError


def install() -> None:
    """Wrap torch's functions, once in a process. Where this torch has others, nothing is wrapped
    and they fail in torch's compiler."""
    from torch._higher_order_ops import utils

    compiled: Any = getattr(utils, "_hop_compile_and_call", None)
    if compiled is not None:

        @functools.wraps(compiled)
        def call(fn: Any, args: Any, kwargs: Any = None) -> Any:
            if not _has_lazy((args, kwargs)):
                return compiled(fn, args, kwargs)
            name = getattr(fn, "__name__", "")
            if name not in _WAYS:
                raise UnsupportedError(refused("a higher-order operator"))
            return _WAYS[name](fn, *args)

        utils._hop_compile_and_call = call
    from torch.nn.attention import flex_attention as flex

    check: Any = getattr(flex, "_validate_sdpa_input", None)
    if check is not None:

        @functools.wraps(check)
        def validate(*args: Any, **kwargs: Any) -> Any:
            if _has_lazy((args, kwargs)):
                raise UnsupportedError(
                    "flex_attention() on lazy tensors: its scores come from functions of the "
                    "program that are compiled, not recorded. Use "
                    "torch.nn.functional.scaled_dot_product_attention() with a mask, which is "
                    "sliced, or make the tensors plain with x.torch()"
                )
            return check(*args, **kwargs)

        setattr(flex, "_validate_sdpa_input", validate)


def refused(what: str) -> str:
    return (
        f"{what} on lazy tensors: it runs functions of the program that are compiled, not "
        "recorded. Write it as Python's own `if` and `for`, or make the tensors plain with "
        "x.torch()"
    )


def _has_lazy(value: Any) -> bool:
    """Is a lazy tensor among the leaves of `value`, or in a variable that one of its functions
    uses?"""
    return any(
        _core.is_lazy(leaf) or (callable(leaf) and _uses_lazy(leaf))
        for leaf in pytree.tree_leaves(value)
    )


def _uses_lazy(f: Any) -> bool:
    while isinstance(f, functools.partial):
        if any(_core.is_lazy(v) for v in pytree.tree_leaves((f.args, f.keywords))):
            return True
        f = f.keywords.get("combine_fn", f.func)
    for cell in getattr(f, "__closure__", None) or ():
        try:
            inside = cell.cell_contents
        except ValueError:  # not set yet
            continue
        if _core.is_lazy(inside) or (callable(inside) and inside is not f and _closes_over(inside)):
            return True
    return False


def _closes_over(f: Any) -> bool:
    """The same one level deeper: torch wraps the program's functions in its own."""
    for cell in getattr(f, "__closure__", None) or ():
        try:
            if _core.is_lazy(cell.cell_contents):
                return True
        except ValueError:
            continue
    return False


def _cond(fn: Any, pred: Any, true_fn: Any, false_fn: Any, operands: Any) -> Any:
    return (true_fn if bool(pred) else false_fn)(*operands)


def _while(fn: Any, cond_fn: Any, body_fn: Any, carried: Any, more: Any) -> Any:
    first = carried
    while cond_fn(*carried, *more):
        carried = tuple(pytree.tree_leaves(body_fn(*carried, *more)))
    if carried is first:
        return tuple(c.clone() if isinstance(c, torch.Tensor) else c for c in carried)
    return carried


def _stacked(results: list[Any]) -> Any:
    """One tree whose leaves are the stacked leaves of the results."""
    flat = [pytree.tree_flatten(r) for r in results]
    leaves = [torch.stack(each) for each in zip(*(items for items, _ in flat), strict=True)]
    return pytree.tree_unflatten(leaves, flat[0][1])


def _map(fn: Any, f: Any, xs: list[torch.Tensor], args: list[Any]) -> Any:
    known = dict(zip(fn.__code__.co_freevars, fn.__closure__, strict=True))
    xs_spec, args_spec = (known[n].cell_contents for n in ("xs_spec", "args_spec"))
    more = pytree.tree_unflatten(args, args_spec)
    rows = zip(*(x.unbind(0) for x in xs), strict=True)
    return _stacked([f(pytree.tree_unflatten(list(row), xs_spec), *more) for row in rows])


def _scan(fn: Any, combine: Any, init: list[torch.Tensor], xs: list[torch.Tensor]) -> Any:
    carry, results = list(init), []
    nested: Any = None
    for row in zip(*(x.unbind(0) for x in xs), strict=True):
        nested, result = combine(*carry, *row)
        carry = pytree.tree_leaves(nested)
        results.append(result)
    return nested, _stacked(results)


# by the names of the functions that torch would compile
_WAYS: dict[str, Callable[..., Any]] = {
    "_cond_op_wrapper": _cond,
    "_while_loop_op_wrapper": _while,
    "run_flattened_map": _map,
    "run_flattened_scan": _scan,
}

"""Operators that need a decision in Python: the register of their handlers, and the short ones.

The long ones have modules of their own: `_index.py`, `_layout.py`, `_batch_norm.py`, `_foreach.py`,
`_random.py`.
"""

from __future__ import annotations

import contextlib
from typing import Any
from collections.abc import Callable

from ._torch import counting_writes, torch
from . import _core
from ._calls import run_on_reals, tensors_of, write_now
from ._errors import UnsupportedError
from ._settled import on_settled

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
    """An operator of torch.distributed. Every rank calls it at the same place of its program, so it
    runs now, on values. It writes its first argument, although its schema does not say so."""
    name = func._schema.name.removeprefix("c10d::")
    writes = name not in ("send", "barrier", "monitored_barrier_")
    first = len(tensors_of(args[:1], {}))
    rest = len(tensors_of(args[1:], kwargs))
    return write_now(func, args, kwargs, [writes] * first + [False] * rest)


@special(
    "_local_scalar_dense",
    "equal",
    "nonzero",
    "nonzero_numpy",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "unique_dim_consecutive",
    "bincount",
    "repeat_interleave.Tensor",
    "is_nonzero",
    "_assert_async",
    "_linalg_check_errors",
    "multinomial",
    "is_set_to",
)
def _read_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
    with _counting_versions(args):
        result = func.decompose(*args, **kwargs)
    return _core.record(func, args, kwargs) if result is NotImplemented else result


def _counting_versions(args: tuple[Any, ...]) -> Any:
    """In inference mode, and for inference tensors, a composite operator comes here whole, and its
    parts count the versions of what they write, or refuse it, only in here."""
    if torch.is_inference_mode_enabled() or any(t.is_inference() for t in tensors_of(args, {})):
        return counting_writes()
    return contextlib.nullcontext()

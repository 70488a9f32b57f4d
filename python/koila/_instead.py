"""Functions that torch wrote in Python, replaced for lazy tensors alone."""

from __future__ import annotations

import types
from typing import Any
from collections.abc import Callable

from ._tensor import LazyTensor


def instead(function: Any, replacement: Callable[..., Any], head: str, of: str) -> None:
    """`function`, also where it was imported by name before, calls `replacement(original,
    *arguments)` where one of the values `of` is lazy. Any other call sees torch's code alone: no
    frame of koila's, which torch.compile would try to compile.

    head: of its definition."""
    name, known = function.__name__, function.__globals__
    original = types.FunctionType(function.__code__, known, name)
    original.__defaults__, original.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    known[f"_koila_plain_{name}"] = original
    known[f"_koila_lazy_{name}"] = lambda *given: replacement(original, *given)
    known["_koila_LazyTensor"] = LazyTensor
    arguments = ", ".join(argument.partition("=")[0] for argument in head.split(", "))
    scope: dict[str, Any] = {}
    exec(
        f"def {name}({head}):\n"
        f"    for value in ({of},):\n"
        "        if isinstance(value, _koila_LazyTensor):\n"
        f"            return _koila_lazy_{name}({arguments})\n"
        f"    return _koila_plain_{name}({arguments})",
        scope,
    )
    at = function.__code__
    # TorchScript finds a function's source by its file and line
    function.__code__ = scope[name].__code__.replace(
        co_filename=at.co_filename, co_firstlineno=at.co_firstlineno
    )

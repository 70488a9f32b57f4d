"""The experts of transformers' mixtures, which run as they are on slices.

All tokens are sorted by their expert, so that a recorded layer would need those of the whole batch
before the next. But what a token gets depends on its own row, its experts, their weights and the
parameters alone: that is what `opaque()` takes."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any
from collections.abc import Callable

from ._torch import torch
from ._instead import instead
from ._opaque import Runner

MODULE = "transformers.integrations.moe"  # where they are, once it is imported
_FUNCTIONS = ("batched_mm_experts_forward", "grouped_mm_experts_forward")
_HEAD = "self, hidden_states, top_k_index, top_k_weights"
_ATTRIBUTE = "_koila_experts"


class _Experts:
    """A module's experts by the function that computes them. It lies in the module's dictionary;
    copies and pickles of the module have none."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self._runners: dict[Callable[..., Any], Runner] = {}

    def __call__(self, function: Callable[..., Any], *given: Any) -> Any:
        if function not in self._runners:
            call = functools.partial(function, self.module)
            self._runners[function] = Runner(call, self.module, pure=True)
        return self._runners[function](*given)

    def __reduce__(self) -> Any:
        return type(None), ()


def _on_slices(original: Callable[..., Any], module: torch.nn.Module, *given: Any) -> Any:
    is_parallel = getattr(module, "_is_expert_parallel", False)  # tokens go to other ranks
    if is_parallel or torch._C._functorch.peek_interpreter_stack() is not None:
        return original(module, *given)
    experts = module.__dict__.get(_ATTRIBUTE)
    if experts is None:
        experts = module.__dict__[_ATTRIBUTE] = _Experts(module)
    return experts(original, *given)


@functools.cache
def install() -> None:
    """Once `MODULE` is imported. Functions with other arguments are recorded as before."""
    for name in _FUNCTIONS:
        function = getattr(sys.modules[MODULE], name, None)
        if function is not None and ", ".join(inspect.signature(function).parameters) == _HEAD:
            instead(function, _on_slices, _HEAD, "hidden_states")

"""Hooks of tensors, disabled while koila runs a backward of its own. Other threads may run theirs
with the same tensors meanwhile: for them the hooks are there as always."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from . import _core, _multi_hooks

# The attributes in which torch keeps the hooks: those called with a gradient, and those called
# after it was accumulated.
BEFORE, AFTER = "_backward_hooks", "_post_accumulate_grad_hooks"


class _Hook:
    """A hook that does nothing in the backwards of some contexts."""

    def __init__(self, hook: Any) -> None:
        self.hook = hook
        self.quiet: list[Any] = []  # those contexts, as often as they asked

    def __call__(self, *args: Any) -> Any:
        here = _core.backward_context((), None)
        if here is not None and any(here is c for c in self.quiet):
            if isinstance(self.hook, _multi_hooks.Part):
                self.hook.passes(here)
            return None
        return self.hook(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.hook, name)


_Quiet = list[tuple[dict[int, Any], int, _Hook]]


def quiet_hooks(
    tensors: Iterable[torch.Tensor], kind: str, *, of_lazy: bool = False
) -> tuple[Any, _Quiet]:
    """Until wake_hooks(what this returns), the hooks of that kind of real tensors are not called in
    the backward that runs here. of_lazy: those of lazy tensors are not."""
    here = _core.context()
    saved: _Quiet = []
    for t in tensors:
        hooks: dict[int, Any] | None = getattr(t, kind, None)
        if not hooks or _core.is_lazy(t) != of_lazy:
            continue
        for key, hook in list(hooks.items()):
            quiet = hook if isinstance(hook, _Hook) else _Hook(hook)
            quiet.quiet.append(here)
            saved.append((hooks, key, quiet))
            if quiet is not hook and key in hooks:
                hooks[key] = quiet
    return here, saved


def wake_hooks(saved: tuple[Any, _Quiet]) -> None:
    here, hooks_of = saved
    for hooks, key, quiet in hooks_of:
        quiet.quiet.remove(here)
        if not quiet.quiet and hooks.get(key) is quiet:
            hooks[key] = quiet.hook


def any_of_several(saved: tuple[Any, _Quiet]) -> bool:
    """Is one of the hooks that quiet_hooks() made quiet a hook of several tensors?"""
    return any(isinstance(quiet.hook, _multi_hooks.Part) for _, _, quiet in saved[1])


def has_hooks(leaf: torch.Tensor) -> bool:
    return bool(getattr(leaf, BEFORE, None)) or bool(getattr(leaf, AFTER, None))

"""Hooks of tensors, disabled while koila runs a backward of its own. Other threads may run theirs
with the same tensors meanwhile: for them the hooks are there as always."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from . import _core

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
            return None
        return self.hook(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.hook, name)


_Quiet = list[tuple[dict[int, Any], int, _Hook]]


def quiet_hooks(tensors: Iterable[torch.Tensor], kind: str) -> tuple[Any, _Quiet]:
    """Until wake_hooks(what this returns), the hooks of that kind of real tensors are not called in
    the backward that runs here."""
    here = _core.context()
    saved: _Quiet = []
    for t in tensors:
        hooks: dict[int, Any] | None = getattr(t, kind, None)
        if not hooks or _core.is_lazy(t):
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


def has_hooks(leaf: torch.Tensor) -> bool:
    return bool(getattr(leaf, BEFORE, None)) or bool(getattr(leaf, AFTER, None))

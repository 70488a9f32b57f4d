"""Hooks of tensors, disabled while koila runs a backward of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from . import _core

# The attributes in which torch keeps the hooks: those called with a gradient, and those called
# after it was accumulated.
BEFORE, AFTER = "_backward_hooks", "_post_accumulate_grad_hooks"


def quiet_hooks(tensors: Iterable[torch.Tensor], kind: str) -> list[tuple[Any, dict[int, Any]]]:
    """Remove the hooks of that kind from real tensors. Returns the argument for wake_hooks."""
    saved = []
    for t in tensors:
        hooks = getattr(t, kind, None)
        if hooks and not _core.is_lazy(t):
            saved.append((hooks, dict(hooks)))
            hooks.clear()
    return saved


def wake_hooks(saved: list[tuple[Any, dict[int, Any]]]) -> None:
    for hooks, kept in saved:
        hooks.update(kept)


def has_hooks(leaf: torch.Tensor) -> bool:
    return bool(getattr(leaf, BEFORE, None)) or bool(getattr(leaf, AFTER, None))

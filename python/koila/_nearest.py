"""The known name that a wrong one was meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def _bare(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


def nearest(asked: str, known: Iterable[str]) -> str | None:
    """The name of `known` that is nearest to `asked`, or None where none is near. Underscores and
    case count for nothing: `microbatch` is `micro_batch`."""
    by_bare = {_bare(name): name for name in known}
    found = difflib.get_close_matches(_bare(asked), by_bare, n=1, cutoff=0.7)
    return by_bare[found[0]] if found else None


def did_you_mean(asked: object, known: Iterable[str]) -> str:
    """`. Did you mean 'micro_batch'?`, to end a message with, or nothing."""
    name = nearest(asked, known) if isinstance(asked, str) else None
    return "" if name is None else f". Did you mean {name!r}?"

"""The exceptions of koila. Each says what, where and what to do.

Importing this does not import torch: `OutOfMemory`, which is also torch's own, is made when first
asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any


class KoilaError(Exception):
    """The base of every error that is koila's own; an error of torch keeps its own type."""


class UnsupportedError(KoilaError, RuntimeError):
    """Something that koila cannot do exactly, and therefore does not do."""


class StaleValueError(KoilaError, RuntimeError):
    """A lazy value is asked for after a tensor it is computed from was changed."""


class GatherError(KoilaError, RuntimeError):
    """Under `strict()`: an operator needs a value of the whole batch at once."""


if TYPE_CHECKING:
    import torch

    class OutOfMemory(KoilaError, torch.OutOfMemoryError):
        missing_bytes: int


def __getattr__(name: str) -> Any:
    if name != "OutOfMemory":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torch

    class OutOfMemory(KoilaError, torch.OutOfMemoryError):
        """Even the smallest slice does not fit. `missing_bytes` says by how much, 0 when
        unknown."""

        missing_bytes = 0

    OutOfMemory.__module__ = __name__
    OutOfMemory.__qualname__ = "OutOfMemory"
    globals()["OutOfMemory"] = OutOfMemory
    return OutOfMemory

"""The exceptions of koila. Each text says what failed, where, and what to do.

Importing this does not import torch: `OutOfMemory`, a subclass of torch's own error, is made at its
first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any


class KoilaError(Exception):
    """The base of all errors of koila; an error of torch keeps its type.

    Example:
        >>> try:
        ...     lazy(images).data_ptr()
        ... except koila.KoilaError as error:
        ...     print(type(error).__name__)
        UnsupportedError
    """


class UnsupportedError(KoilaError, RuntimeError):
    """koila cannot do this exactly, and therefore refuses.

    Example:
        >>> lazy(images).data_ptr()
        Traceback (most recent call last):
            ...
        koila._errors.UnsupportedError: ...
    """


class StaleValueError(KoilaError, RuntimeError):
    """A lazy value is asked for, but a tensor it is computed from was changed in between.

    Example:
        >>> scores = model(lazy(images))
        >>> optimizer.zero_grad()
        >>> with torch.no_grad():
        ...     _ = model[0].weight.add_(1)
        >>> scores.sum().item()
        Traceback (most recent call last):
            ...
        koila._errors.StaleValueError: ...
    """


class GatherError(KoilaError, RuntimeError):
    """Under `strict()`: an operator needs a value of the whole batch at once.

    Example:
        >>> with strict(), micro_batch(4):
        ...     model(lazy(images)).sort(0).values[:2].sum().backward()
        Traceback (most recent call last):
            ...
        koila._errors.GatherError: ...
    """


if TYPE_CHECKING:
    import torch

    class OutOfMemory(KoilaError, torch.OutOfMemoryError):
        missing_bytes: int


def __getattr__(name: str) -> Any:
    if name != "OutOfMemory":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torch

    class OutOfMemory(KoilaError, torch.OutOfMemoryError):
        """Even the smallest slice does not fit. `missing_bytes`: the bytes short of the
        least budget that would do, 0 if unknown.

        Example:
            >>> wide = nn.Linear(4, 100_000)
            >>> with budget("2.5MB"):
            ...     wide(lazy(images)).sum().backward()
            Traceback (most recent call last):
                ...
            koila._errors.OutOfMemory: ...
        """

        missing_bytes = 0

    OutOfMemory.__module__ = __name__
    OutOfMemory.__qualname__ = "OutOfMemory"
    globals()["OutOfMemory"] = OutOfMemory
    return OutOfMemory

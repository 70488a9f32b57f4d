"""Sizes as people read them, and writing to files by suffix."""

from __future__ import annotations

import os
import sys
from typing import Any, Union

from .. import _core

Path = Union[str, "os.PathLike[str]"]

FORMATS = {".txt": "text", ".html": "html", ".json": "json", ".csv": "csv"}


class ByteSize:
    """A number of bytes that formats itself in a readable unit: `f"{ByteSize(40_400):.2f}"` is
    '39.45K', its str '39K'.

    NaN and None: ''. Anything that is no number (a symbolic size): its str.
    """

    def __init__(self, num_bytes: Any) -> None:
        self.num_bytes = num_bytes

    def __format__(self, spec: str) -> str:
        text = _core.size_text(self.num_bytes)
        power = "BKMGTP".find(text[-1:]) if text else -1
        try:
            return (
                text
                if power < 0
                else format(self.num_bytes / 1024**power, spec or ".0f") + text[-1]
            )
        except TypeError:  # a str that ends like a size
            return text

    def __str__(self) -> str:
        return format(self)

    def __repr__(self) -> str:
        return f"ByteSize({self.num_bytes!r})"


# pytorch_memlab's name for it. Its users replace it with their own, so readable_size looks it up.
calmsize = ByteSize


def readable_size(num_bytes: object) -> str:
    """'39.45K': two decimals, B K M G T P, base 1024. NaN and None: ''. Anything that is no number:
    its str."""
    size = calmsize(num_bytes)
    try:
        return format(size, ".2f")
    except TypeError:
        return str(size)


def format_of(path: Path, formats: dict[str, str] = FORMATS) -> str:
    """The format named by a path's suffix.

    Raises:
        ValueError: an unknown suffix.
    """
    suffix = os.path.splitext(os.fspath(path))[1].lower()
    if suffix not in formats:
        raise ValueError(
            f"save({os.fspath(path)!r}): expected a suffix of {', '.join(formats)}, got {suffix!r}"
        )
    return formats[suffix]


def write(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8", errors="replace") as f:
        f.write(text)


def user_level() -> int:
    """The `stacklevel` for which a warning of the caller names the first line outside of this
    package."""
    frame, level, package = sys._getframe(1), 1, __name__.rpartition(".")[0]
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(package):
        frame, level = frame.f_back, level + 1
    return level

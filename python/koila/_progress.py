"""A bar for steps that take longer than two seconds: slices done of all, by tqdm where that is
installed. C decides when (python/ext/run/slices_done.c); only terminals and notebooks get one."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from typing import Any

from . import _core

_wanted = False
_bar: Any = None
_make: Any = None  # tqdm.auto.tqdm; False: it is not installed


def progress(on: bool = True) -> None:
    """Show a bar while a step takes longer than two seconds, or not. It is on at first, unless the
    environment has `KOILA_PROGRESS=0`; it needs `tqdm`, and a terminal or a notebook.

    Example:
        >>> koila.progress(False)
    """
    global _wanted
    if not isinstance(on, bool):
        raise TypeError(f"progress({on!r}): expected True or False, got {on!r}")
    _wanted = on
    _core.progress_to(_show if on else None)


def _has_reader() -> bool:
    """Does somebody look: is stderr a terminal, or is this a notebook?"""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None and type(shell).__name__ == "ZMQInteractiveShell":
        return True
    return sys.stderr is not None and sys.stderr.isatty()


def _find_tqdm() -> Any:
    global _make
    if _make is None:
        try:
            with warnings.catch_warnings():  # in a notebook without widgets, whose bar is of text
                warnings.simplefilter("ignore")
                _make = importlib.import_module("tqdm.auto").tqdm
        except ImportError:
            _make = False
    return _make


def _show(done: int, all: int, is_over: bool) -> bool:
    """`done` of `all` slices (more, where some were halved). Returns: a bar is there."""
    global _bar
    if _bar is None:
        make = _find_tqdm() if not is_over and _has_reader() else None
        if not make:
            return False
        # from here on: those that are done took longer than the bar will see
        _bar = make(total=all, initial=done, desc="koila", unit="slice", leave=False, delay=0)
    _bar.total = max(all, done)
    _bar.update(done - _bar.n)
    if is_over:
        _bar.close()
        _bar = None
    return True


def from_environment() -> None:
    progress(os.environ.get("KOILA_PROGRESS", "").strip() != "0")

"""`module_names()`: lines of plans, logs and errors name the module, `layers.3.conv`."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from . import _core


class _Here(threading.local):
    def __init__(self) -> None:
        self.names: dict[int, str] = {}  # of the modules of the outermost one that runs
        self.outer: list[str | None] = []  # what was said before each that runs


_here = _Here()
_hooks: list[Any] = []
_n_entered = 0


def _begins(module: torch.nn.Module, _args: Any) -> None:
    if not _here.outer:
        of_all = module.named_modules()
        _here.names = {id(m): name or type(m).__name__ for name, m in of_all}
    name = _here.names.get(id(module), type(module).__name__)
    _here.outer.append(_core.module_is(name))


def _ends(_module: torch.nn.Module, _args: Any, _result: Any) -> None:
    if _here.outer:  # it began after the names were asked for
        _core.module_is(_here.outer.pop())
    if not _here.outer:
        _here.names = {}


class module_names(contextlib.ContextDecorator):
    """While it is entered, what is recorded in a module's forward is told with the module's name,
    as `named_modules()` of the outermost module has it, beside the line: by `Large.module`,
    `Gather.module`, tables, logs and errors. In all threads.

    It costs two Python calls for each module that runs, and nothing where it is not entered.

    Example:
        >>> with koila.module_names(), micro_batch(4):
        ...     F.cross_entropy(model(lazy(images)), labels).backward()
        >>> [large.module for large in last_plan().largest]
        [...]
    """

    def __enter__(self) -> None:
        global _n_entered
        _n_entered += 1
        if _n_entered == 1:
            _hooks.append(register_module_forward_pre_hook(_begins))
            _hooks.append(register_module_forward_hook(_ends, always_call=True))

    def __exit__(self, *exc: object) -> None:
        global _n_entered
        _n_entered -= 1
        if not _n_entered:
            for hook in _hooks:
                hook.remove()
            _hooks.clear()

    def __repr__(self) -> str:
        return f"<koila.module_names: {'on' if _n_entered else 'off'}>"

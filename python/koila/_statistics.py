"""Running statistics that are read before the step which moves them has run.

BatchNorm's buffers are written when the step ends. In between the module's dictionary of buffers is
another one, whose readers (a plain batch in the same step, `state_dict()`, a copy of the model) get
what eager would give them: the statistics of the step so far are computed first."""

from __future__ import annotations

import copy
import sys
import threading
import weakref
from collections.abc import MutableMapping
from typing import Any

from ._torch import torch
from . import _core
from ._errors import StaleValueError

_COUNTER = "num_batches_tracked"  # plain torch counts at once
_FRAMES_LOOKED_AT = 16  # from the operator up to the module that called it

# tape -> the modules whose buffers it will write
_guarded: weakref.WeakKeyDictionary[Any, list[torch.nn.Module]] = weakref.WeakKeyDictionary()


class _Buffers(dict[str, Any]):
    """The buffers of `module` while tapes have yet to write them. What is written here is written
    to the module's own dictionary `own`, too."""

    def __init__(self, module: torch.nn.Module, own: dict[str, Any]) -> None:
        super().__init__(own)
        self.own = own
        self.module = weakref.ref(module)
        self.thread = threading.get_ident()
        self.tapes: list[weakref.ref[Any]] = []

    def _current(self) -> dict[str, Any]:
        """The module's own buffers, with the statistics of what was recorded so far."""
        if self.thread != threading.get_ident() or _is_part_of_the_step(self.module()):
            return self.own
        for ref in list(self.tapes):
            tape = ref()
            if tape is not None and tape.n_effects:
                _compute(tape, type(self.module()).__name__)
        return self.own

    def __getitem__(self, key: str) -> Any:
        return (self.own if key == _COUNTER else self._current())[key]

    def get(self, key: str, default: Any = None) -> Any:
        return (self.own if key == _COUNTER else self._current()).get(key, default)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.own[key] = value

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        del self.own[key]

    # They go through the two above, so that both dictionaries change.
    pop = MutableMapping.pop
    popitem = MutableMapping.popitem
    clear = MutableMapping.clear
    update = MutableMapping.update
    setdefault = MutableMapping.setdefault

    def items(self) -> Any:
        return self._current().items()

    def values(self) -> Any:
        return self._current().values()

    def copy(self) -> dict[str, Any]:
        return dict(self._current())

    def __copy__(self) -> dict[str, Any]:
        return dict(self._current())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._current(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self._current()),)


def _compute(tape: Any, name: str) -> None:
    try:
        _core.run(tape, [], True)
    except StaleValueError as e:
        raise StaleValueError(
            f"the running statistics of a {name} are read before backward(), and cannot be "
            f"computed any more: {e}"
        ) from None


def _is_part_of_the_step(module: torch.nn.Module | None) -> bool:
    """Are the buffers read by koila, by who puts others there (torch.func.functional_call,
    load_state_dict), or by the module's own `forward` for a lazy tensor, which is recorded?"""
    frame: Any = sys._getframe(3)
    while frame is not None and frame.f_globals.get("__name__") == "torch.nn.modules.module":
        if frame.f_code.co_name == "_load_from_state_dict":
            return True
        frame = frame.f_back
    if frame is None:
        return False
    name = frame.f_globals.get("__name__") or ""
    if name.startswith("koila.") or name == "torch.nn.utils._named_member_accessor":
        return True
    code = frame.f_code
    if code.co_name != "forward" or not code.co_argcount:
        return False
    found = frame.f_locals
    arguments = code.co_varnames[: code.co_argcount]
    return found.get(arguments[0]) is module and any(
        _core.is_lazy(found.get(argument)) for argument in arguments[1:]
    )


def module_of(mean: torch.Tensor) -> tuple[torch.nn.Module | None, Any]:
    """The module whose `forward` calls the operator, if `mean` is its running mean, and the code of
    that `forward`; else None, None."""
    frame: Any = sys._getframe(3)
    for _ in range(_FRAMES_LOOKED_AT):
        if frame is None:
            break
        code = frame.f_code
        if code.co_name == "forward" and code.co_argcount:
            module = frame.f_locals.get(code.co_varnames[0])
            if isinstance(module, torch.nn.Module):
                buffers = module.__dict__.get("_buffers")
                own = buffers.own if type(buffers) is _Buffers else buffers
                if type(own) is dict and own.get("running_mean") is mean:
                    return module, code
        frame = frame.f_back
    return None, None


def guard(module: torch.nn.Module, tape: Any) -> None:
    """The buffers of `module` will be written when the step of `tape` ends: whoever reads them
    earlier has it computed."""
    buffers = module.__dict__["_buffers"]
    if type(buffers) is dict:
        buffers = module.__dict__["_buffers"] = _Buffers(module, buffers)
    elif type(buffers) is not _Buffers:
        return  # a dictionary of the program's
    if not any(ref() is tape for ref in buffers.tapes):
        buffers.tapes.append(weakref.ref(tape))
        _guarded.setdefault(tape, []).append(module)


def unguard(tape: Any) -> None:
    """The statistics of `tape` are written, or never will be."""
    for module in _guarded.pop(tape, ()):
        buffers = module.__dict__["_buffers"]
        if type(buffers) is _Buffers:
            buffers.tapes = [ref for ref in buffers.tapes if ref() not in (None, tape)]
            if not buffers.tapes:
                module.__dict__["_buffers"] = buffers.own

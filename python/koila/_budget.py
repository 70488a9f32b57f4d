"""The settings of memory and slices: texts and numbers are checked here and given to
`_core.configure`."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypedDict, TypeVar, cast

import torch
from torch.utils._contextlib import context_decorator

from . import _core
from ._nearest import did_you_mean
from ._switch import OFF

_F = TypeVar("_F", bound=Callable[..., Any])
_Amount = int | float | str | None
Budget = _Amount | Mapping[str, _Amount] | Mapping[torch.device, _Amount]


class _Amounts(TypedDict):
    """A budget in bytes, as `_core.configure` takes it."""

    budget: int | None
    cpu_budget: int | None
    resident: bool


_UNITS = {"": 1, "B": 1} | {
    prefix + unit: base**power
    for power, names in enumerate(("Kk", "M", "G", "T"), start=1)
    for prefix in names
    for unit, base in (("B", 1000), ("iB", 1024))
}
_UNITS |= {unit.lower(): n for unit, n in _UNITS.items()}
_TEXT = re.compile(r"([+-]?\d+(?:\.\d*)?|[+-]?\.\d+)\s*([A-Za-z]*|%)")


def readable(n_bytes: float) -> str:
    """`1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n_bytes) < 1024 or unit == "GiB":
            return f"{n_bytes:.0f} B" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    raise AssertionError


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = _core.free_memory()["free"]
    return _total(device) if free is None else int(free)


def _total(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _held(device: torch.device, resident: bool) -> int:
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return int(_core.resident()["with_files"] or 0) if resident else int(_core.cpu_bytes_current())


def _device_in_use() -> torch.device:
    """The device of steps: the current GPU if there is one. This does not start CUDA: until it is
    started, the first GPU is the current one."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else 0)


def _refuse(asked: object, expected: str, call: str, known: Iterable[str] = ()) -> ValueError:
    meant = did_you_mean(asked, known)
    return ValueError(f"{call}: expected {expected}, got {asked!r}{meant}")


# A number without a unit below this is hardly meant as bytes.
_FEW_BYTES = 1000


def _doubt(asked: Budget, call: str) -> None:
    """Warn of a number without a unit that is no plausible number of bytes, as in budget(2)."""
    amounts = list(asked.values()) if isinstance(asked, Mapping) else [asked]
    for amount in amounts:
        if amount is None or (isinstance(amount, str) and not amount.strip().isdigit()):
            continue
        n, fraction = _parsed(amount, call)
        if not fraction and n < _FEW_BYTES:
            unit = "GiB" if n <= 128 else "MiB"
            warnings.warn(
                f"{call}: a number without a unit is bytes, and {n:.0f} is too few for a tensor. "
                f'Did you mean "{n:.0f}{unit}"? (Say "{n:.0f}B" where bytes are meant.)',
                stacklevel=3,
            )


def _parsed(asked: object, call: str) -> tuple[float, bool]:
    """(amount, is it a fraction?) of a number or a text like "2GiB" or "80%"; else in bytes."""
    if isinstance(asked, str):
        m = _TEXT.fullmatch(asked.strip())
        unit = m[2] if m else "?"
        if m is None or (unit != "%" and unit not in _UNITS):
            bits = " (Gb and Mb are bits)" if re.fullmatch(r"[KMGT]b", unit) else ""
            raise _refuse(
                asked, f'a size like "512MB", "2GiB", "80%" or a number of bytes{bits}', call
            )
        amount = float(m[1])
        if unit == "%":
            return amount * 0.01, True
        if unit == "" and "." in m[1] and amount <= 1:
            return amount, True
        return amount * _UNITS[unit], False
    if isinstance(asked, bool) or not isinstance(asked, (int, float)):
        raise _refuse(
            asked, 'bytes, "512MB", "2GiB", a fraction like 0.8, or a dict by device', call
        )
    fraction = isinstance(asked, float) and asked <= 1
    if isinstance(asked, float) and not fraction and not asked.is_integer():
        raise _refuse(asked, "a fraction of at most 1, or whole bytes", call)
    return asked, fraction


def _bytes(
    asked: object, device: torch.device, call: str, *, here: bool = True, resident: bool = False
) -> int:
    """Bytes of `asked` on `device`. A fraction is of the bytes free there now, and is added to
    those that torch holds, or on the CPU to the `resident` ones. here: refuse more than the device
    has."""
    amount, fraction = _parsed(asked, call)
    if not math.isfinite(amount) or amount <= 0:
        raise _refuse(asked, "a budget above zero", call)
    if fraction and amount > 1:
        raise _refuse(asked, "at most 100% of what is free", call)
    if device.type == "cuda" and not fraction and not torch.cuda.is_initialized():
        return max(int(amount), 1)  # what the GPU has is not asked before somebody uses it
    total = _total(device)
    n = int(amount)
    if fraction:
        n = min(_held(device, resident) + int(amount * _free(device)), total)
    if here and n > total:
        raise _refuse(asked, f"at most what {device} has, {readable(total)}", call)
    return max(n, 1)


def _resolve(asked: Budget, call: str, resident: bool = False) -> _Amounts:
    """The budget for `_core.configure`: bytes for the device in use, and for the CPU beside a GPU.
    None: the bytes free when the step is planned. On a machine with a GPU a single amount is the
    GPU's: it does not limit the CPU, which holds the data sets. resident: the CPU's is a limit on
    the resident memory of the process."""
    chosen: _Amounts = {"budget": None, "cpu_budget": None, "resident": resident}
    if asked is None and not resident:
        return chosen
    here = _device_in_use()
    if isinstance(asked, Mapping):
        for name, amount in asked.items():
            try:
                device = torch.device(name)
            except (RuntimeError, TypeError):
                raise _refuse(name, 'a device like "cpu" or "cuda:0"', call) from None
            present = device.type == "cpu" or device.type == here.type
            limit = (
                _bytes(amount, device if present else torch.device("cpu"), call, resident=resident)
                if amount is not None
                else None
            )
            if device.type == here.type and device.index in (None, here.index):
                chosen["budget"] = limit
            if device.type == "cpu":
                chosen["cpu_budget"] = limit
    elif asked is not None:
        chosen["budget"] = _bytes(asked, here, call, resident=resident)
        if here.type == "cpu":
            chosen["cpu_budget"] = chosen["budget"]
    if resident and chosen["cpu_budget"] is None:
        raise _refuse(
            asked, 'an amount for the CPU, such as "2GiB" without a GPU, or {"cpu": "2GiB"}', call
        )
    return chosen


# Settings that are entered and not left, in this thread or task, the innermost first: (setting,
# what it put aside, the rest).
_Entered = tuple["_Setting", dict[str, Any], Any]
_entered: contextvars.ContextVar[_Entered | None] = contextvars.ContextVar(
    "koila settings entered", default=None
)


def _left(setting: _Setting, entered: _Entered | None) -> tuple[dict[str, Any] | None, Any]:
    """What `setting` put aside when it was entered last, and the rest. None: it was entered
    elsewhere (a generator is closed by another task)."""
    if entered is None:
        return None, None
    found, before, rest = entered
    if found is setting:
        return before, rest
    found_before, less = _left(setting, rest)
    return found_before, (found, before, less)


class _Setting(contextlib.ContextDecorator):
    """Set on entry, put back on exit; may be nested, reused, and used as a decorator.

    It holds in the thread or asyncio task that enters it, and in tasks made inside; one object may
    be entered in several of them at once."""

    def _settings(self) -> dict[str, Any]:
        raise NotImplementedError

    def __repr__(self) -> str:
        told = ", ".join(f"{k}={v!r}" for k, v in self._settings().items())
        return f"<koila.{type(self).__name__}: {told}>"

    def __enter__(self) -> None:
        if OFF:
            return
        new = self._settings()
        if "micro_batch" in new:
            new["own_micro_batch"] = True
        before = _core.configure(**new)
        _core.reads_fit()
        if "budget" in new:
            new["own_budget"] = True
        _entered.set((self, {name: before[name] for name in new}, _entered.get()))

    def __exit__(self, *exc: object) -> None:
        before, rest = _left(self, _entered.get())
        _entered.set(rest)
        if before is not None:
            _core.configure(**before)
            _core.reads_fit()

    def __call__(self, func: _F) -> _F:
        """As a decorator: the body runs under the setting. This holds for generators and coroutines
        too, whose body runs after the call."""
        if inspect.isgeneratorfunction(func):
            # around each resumption, as torch.no_grad() does
            return cast(_F, context_decorator(lambda: self, func))
        if not inspect.iscoroutinefunction(func):
            return super().__call__(func)

        @functools.wraps(func)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            with self:
                return await func(*args, **kwargs)

        return cast(_F, awaited)


class budget(_Setting):
    """Limit the memory that torch may hold, model and data included. Steps are cut to stay within
    it. On the CPU torch itself refuses requests beyond it. On a machine with a GPU one amount is
    the GPU's; a dict gives the CPU's too.

    Args:
        amount: bytes (int), `"512MB"`, `"2GiB"`, a fraction such as `0.8` of what is free on entry,
            a dict by device, or `None`: what is free when a step is planned.
        resident: the CPU's amount limits the resident memory of the process instead: torch's bytes,
            Python, libraries, and freed memory that the C library keeps. For where a process is
            killed beyond a limit. The limit of a control group (a container's) need not be told.

    Raises:
        ValueError: not a size, not above zero, or more than the machine has.

    Example:
        >>> with budget("512MB"):
        ...     pass
    """

    def __init__(self, amount: Budget, *, resident: bool = False) -> None:
        super().__init__()
        self._amount = amount
        self._resident = resident
        self._call = f"budget({amount!r}{', resident=True' if resident else ''})"
        _resolve(amount, self._call, resident)
        _doubt(amount, self._call)

    def _settings(self) -> dict[str, Any]:
        return {**_resolve(self._amount, self._call, self._resident)}


def set_budget(amount: Budget, *, resident: bool = False) -> None:
    """The budget of the process from here on, in all its threads: it holds wherever no `budget()`
    is entered (inside one, also there until it ends). resident: as in `budget()`. The environment
    variable `KOILA_BUDGET` does the same at import.

    Example:
        >>> set_budget("2GiB")
        >>> set_budget(None)  # what is free, the default
    """
    call = f"set_budget({amount!r}{', resident=True' if resident else ''})"
    amounts = _resolve(amount, call, resident)
    _doubt(amount, call)
    if OFF:
        return
    _core.configure_process(**amounts)
    if _core.configure()["own_budget"]:
        _core.configure(**amounts)
    _core.reads_fit()


class micro_batch(_Setting):
    """Cut the batch into slices of `size` rows (the last may be smaller).

    Args:
        size: rows; `None` (the default): the fewest slices that fit, in the first eight steps of a
            kind. Training steps on the CPU that are cut and repeat then try smaller sizes, each in
            a few steps, and keep one that is clearly faster. Which one depends on the clock, and
            the last bits of float32 sums depend on the size: under
            `torch.use_deterministic_algorithms(True)` none is tried.
            `"fewest"`: no other size is tried; the environment variable `KOILA_TUNE=0` does the
            same wherever `None` holds. `"fastest"`: sizes are tried from the second step on, also
            of a step that fits whole.

    Raises:
        ValueError: anything else.

    Example:
        >>> with micro_batch(5):
        ...     x, y = lazy(images, labels)
        ...     F.cross_entropy(model(x), y).backward()
        >>> last_plan().n_micro_batches
        3
    """

    def __init__(self, size: int | Literal["fewest", "fastest"] | None) -> None:
        super().__init__()
        rows = isinstance(size, int) and not isinstance(size, bool) and size >= 1
        if not (rows or size is None or size in ("fewest", "fastest")):
            expected = 'at least 1 row, None, "fewest" or "fastest"'
            raise _refuse(size, expected, f"micro_batch({size!r})", ["fewest", "fastest"])
        self._size = size

    def _settings(self) -> dict[str, Any]:
        if isinstance(self._size, str):
            return {"micro_batch": None, "slices": self._size}
        return {"micro_batch": self._size, "slices": "auto"}


class axes(_Setting):
    """Which dimensions of the batch may be cut.

    Args:
        which: `"any"` (the default): the rows; where no number of rows fits, another dimension that
            values of the batch have, such as the tokens of a sequence. `"batch"`: only the
            dimension that `lazy(..., batch=)` names.

    Raises:
        ValueError: anything else.

    Example:
        >>> with axes("batch"):
        ...     F.cross_entropy(model(lazy(images)), labels).backward()
        >>> last_plan().axis is None
        True
    """

    def __init__(self, which: Literal["any", "batch"]) -> None:
        super().__init__()
        if which not in ("any", "batch"):
            raise _refuse(which, '"any" or "batch"', f"axes({which!r})", ["any", "batch"])
        self._which = which

    def _settings(self) -> dict[str, Any]:
        return {"axes": self._which}


class host_memory(_Setting):
    """May results of the forward pass wait in host memory? Only on a GPU, and only where neither
    fewer rows nor another axis fit; there the cheaper of copying and computing again is taken.

    Args:
        use: `"auto"` (the default) or `"off"`. At most half of the host's free memory is taken, as
            pinned memory, which torch keeps for later steps
            (`torch.cuda.memory.host_memory_stats()` tells how much).

    Raises:
        ValueError: anything else.

    Example:
        >>> with host_memory("off"):
        ...     F.cross_entropy(model(lazy(images)), labels).backward()
        >>> last_plan().n_offloaded
        0
    """

    def __init__(self, use: Literal["auto", "off"]) -> None:
        super().__init__()
        if use not in ("auto", "off"):
            raise _refuse(use, '"auto" or "off"', f"host_memory({use!r})", ["auto", "off"])
        self._use = use

    def _settings(self) -> dict[str, Any]:
        return {"host_memory": self._use == "auto"}


class step_aside(_Setting):
    """May torch do steps alone that need no koila? It may by default: after 16 equal steps that
    were planned whole, with room to spare, `lazy()` returns plain tensors. See `lazy()`.

    Args:
        on: `False`: koila records and runs every step. The environment variable
            `KOILA_STEP_ASIDE=0` does so in the whole process, wherever no `step_aside()` is
            entered.

    Raises:
        ValueError: neither `True` nor `False`.

    Example:
        >>> with step_aside(False):
        ...     x = lazy(images)
        >>> isinstance(x, LazyTensor)
        True
    """

    def __init__(self, on: bool) -> None:
        super().__init__()
        if not isinstance(on, bool):
            raise _refuse(on, "True or False", f"step_aside({on!r})")
        self._on = on

    def _settings(self) -> dict[str, Any]:
        return {"step_aside": self._on}


class compile(_Setting):
    """Compile the loops of steps that are cut: what one slice does, forward and backward, becomes
    one function of Inductor's, where the steps run on the CPU. It is made in the background, while
    slices run as they do without it, and torch keeps it on disk for other processes. Under
    `torch.use_deterministic_algorithms(True)` nothing is compiled.

    Random numbers (dropout) are those of plain PyTorch. A loop stays as it is where slices differ
    from each other or call modules as they are (`opaque()`, compiled ones), and where Inductor
    cannot take it. One that raises, is slower than without, or needs more memory than there is, is
    given up. The log tells why (INFO), and `last_plan().loops` which loops ran compiled.

    Args:
        mode: `"on"`: of each step, after its second run; `"auto"`: of steps that repeat, after
            four runs; `"off"` (the default): of steps with code that `torch.compile()` made and
            that cannot run on slices as it is.

    Raises:
        ValueError: anything else.

    Example:
        >>> with compile("auto"), micro_batch(5):
        ...     for x, y in loader:
        ...         F.cross_entropy(model(lazy(x)), y).backward()
        >>> any(loop.compiled for loop in last_plan().loops)  # it was the first step
        False
    """

    def __init__(self, mode: Literal["on", "auto", "off"]) -> None:
        super().__init__()
        if mode not in ("on", "auto", "off"):
            raise _refuse(mode, '"on", "auto" or "off"', f"compile({mode!r})")
        self._mode = mode

    def _settings(self) -> dict[str, Any]:
        return {"compile": self._mode}


class strict(_Setting):
    """Make a gather larger than a slice raise `GatherError`, before anything has run. The error
    names operator, shape and line.

    Operators that run while the step is recorded (`nonzero`, `unique`, masks) raise too, if their
    input would be computed in slices. An input that is whole already (the batch as it was given, a
    value that you asked for before) costs no more memory and is not refused.

    Example:
        >>> with strict(), micro_batch(4):
        ...     model(lazy(images)).sort(0).values[:2].sum().backward()
        Traceback (most recent call last):
            ...
        koila._errors.GatherError: ...
    """

    def _settings(self) -> dict[str, Any]:
        return {"strict": True}


def _rows_of(text: str) -> int:
    """The rows of a slice that KOILA_MICRO_BATCH says; 0: the fastest."""
    if text == "fastest":
        return 0
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= sys.maxsize):
        call = f"KOILA_MICRO_BATCH={text}"
        raise _refuse(text, 'a number of rows, at least 1, or "fastest"', call, ["fastest"])
    return int(text)


def from_environment() -> None:
    """KOILA_BUDGET, KOILA_MICRO_BATCH and KOILA_STEP_ASIDE: as `set_budget()`, `micro_batch()` and
    `step_aside()`, in all threads. KOILA_TUNE=0: `micro_batch(None)` is `micro_batch("fewest")`."""
    aside = os.environ.get("KOILA_STEP_ASIDE", "").strip()
    if aside not in ("", "0", "1"):
        raise _refuse(aside, "0 or 1", f"KOILA_STEP_ASIDE={aside}")
    if aside:
        _core.configure_step_aside(aside == "1")
    asked = os.environ.get("KOILA_BUDGET", "").strip()
    if asked:
        call = f"KOILA_BUDGET={asked}"
        amounts = _resolve(asked, call)
        _doubt(asked, call)
        if not OFF:
            _core.configure_process(**amounts)
    tune = os.environ.get("KOILA_TUNE", "").strip()
    if tune not in ("", "0", "1"):
        raise _refuse(tune, "0 or 1", f"KOILA_TUNE={tune}")
    if tune == "0" and not OFF:
        _core.configure_process(slices="fewest")
    text = os.environ.get("KOILA_MICRO_BATCH", "").strip()
    if text:
        rows = _rows_of(text)
        if not OFF:
            _core.configure_process_rows(rows)
        if not (OFF or rows):
            _core.configure_process(slices="fastest")

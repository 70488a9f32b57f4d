"""LineProfiler: names, options and texts; line events are handled in C (monitor.c, linetab.c)."""

from __future__ import annotations

import functools
import inspect
import sys
import types
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, TextIO

from ... import _core, _pages
from ..._errors import UnsupportedError
from .. import control, devices, utils

if TYPE_CHECKING:
    from typing_extensions import Self

DEFAULT_COLUMNS = ("active_bytes.all.peak", "reserved_bytes.all.peak")
_Stats = Literal["hook", "auto", "full"]
_Columns = str | Iterable[str]
_STATS = {"hook": 0, "auto": 1, "full": 2}


def check_columns(columns: _Columns) -> tuple[str, ...]:
    """A tuple of column names; a plain string is one column.

    Raises:
        ValueError: not a column; the text lists the columns.
    """
    columns = (columns,) if isinstance(columns, str) else tuple(columns)
    _core.check_columns(columns)
    return columns


def codes_of(obj: Any) -> list[tuple[types.CodeType, str]]:
    """[(code, qualified name)] of any object with code; [] if it has none."""
    seen: set[int] = set()
    while id(obj) not in seen:
        seen.add(id(obj))
        if isinstance(obj, functools.partial):
            obj = obj.func
        elif isinstance(obj, (staticmethod, classmethod, types.MethodType)):
            obj = obj.__func__
        elif isinstance(obj, property):
            return [
                pair
                for f in (obj.fget, obj.fset, obj.fdel)
                if f is not None
                for pair in codes_of(f)
            ]
        elif _is_module(obj):
            obj = obj.forward
        elif isinstance(
            getattr(obj, "__wrapped__", None),
            (types.FunctionType, types.MethodType, functools.partial),
        ):
            obj = obj.__wrapped__
    if isinstance(obj, types.CodeType):
        return [(obj, obj.co_name)]
    code = getattr(obj, "__code__", None)
    if not isinstance(code, types.CodeType):
        return []
    return [(code, str(getattr(obj, "__qualname__", code.co_name)))]


def _is_module(obj: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and hasattr(torch, "nn") and isinstance(obj, torch.nn.Module)


def _source(code: types.CodeType) -> tuple[int, list[str] | None]:
    try:
        lines, first = inspect.getsourcelines(code)
    except (OSError, TypeError, IndexError, SyntaxError, UnicodeError):
        return code.co_firstlineno, None
    return first or 1, [line.rstrip("\n") for line in lines]


def _last_line(code: types.CodeType) -> int:
    return max(
        (line for _, _, line in code.co_lines() if line is not None), default=code.co_firstlineno
    )


class LineProfiler(_core.LineTable):
    """Record the memory use of each line of some functions, on every device.

    functions: any objects with code: functions, methods, properties, partials, modules (their
    forward), async and generator functions.
    target_gpu: the device that rows show: an index (without a GPU: the CPU), a torch.device,
    "cuda", "cuda:1", "cpu"; may be set at any time.
    stats: when the GPU allocator's own statistics are read: "auto" at the end of lines that
    allocate or free, at most 1000 times a line; "full" at the end of every line; "hook" never.
    As a context manager it enables and returns itself; leaving disables.

    >>> with LineProfiler(step) as p:
    ...     step()
    >>> p.print_stats(columns=("rise", "delta"))
    ## step
    ...

    It resets and empties nothing, and sees only lines of the functions given to it.
    """

    def __new__(
        cls, *functions: Any, target_gpu: devices.Device = 0, stats: _Stats = "auto"
    ) -> Self:
        return super().__new__(cls)

    def __init__(
        self, *functions: Any, target_gpu: devices.Device = 0, stats: _Stats = "auto"
    ) -> None:
        if stats not in _STATS:
            raise ValueError(f"LineProfiler(stats={stats!r}): expected one of {', '.join(_STATS)}")
        self.stats_mode = _STATS[stats]
        self._target: devices.Device = 0
        self._generation: int | None = None
        self._warned = False
        if target_gpu != 0:
            self.target_gpu = target_gpu
        elif "torch" in sys.modules:
            self.target_device = devices.resolve(0, "LineProfiler(target_gpu)")
        for function in functions:
            self.add_function(function)

    def __repr__(self) -> str:
        return f"<koila.memlab.LineProfiler of {devices.name(self.target_device)}>"

    @property
    def target_gpu(self) -> devices.Device:
        return self._target

    @target_gpu.setter
    def target_gpu(self, device: devices.Device) -> None:
        self.target_device = devices.resolve(device, "target_gpu")
        self._target = device

    def add_function(self, func: Any) -> None:
        """Record this function too, also while enabled. An object without code gives a UserWarning
        and is ignored."""
        found = codes_of(func)
        if not found:
            warnings.warn(
                f"LineProfiler.add_function: no code behind {_shown(func)}, ignored",
                UserWarning,
                stacklevel=utils.user_level(),
            )
        for code, name in found:
            self.add_code(code, name)

    def add_code(self, code: types.CodeType, name: str) -> None:
        """Record a code object, under this name."""
        first, lines = _source(code)
        n = max(_last_line(code) - first + 1, len(lines or ()))
        self.add(code, name, code.co_filename, first, n, lines)

    def enable(self) -> None:
        devices.listen()
        if self.target_device == 0 and self._target == 0:
            self.target_device = devices.resolve(0, "target_gpu")
        self._generation = _core.cpu_bytes_generation()
        super().enable()

    def __enter__(self) -> Self:
        self.enable()
        return self

    def __exit__(self, *exc: object) -> None:
        self.disable()

    def display(
        self,
        func: Any = None,
        columns: _Columns = DEFAULT_COLUMNS,
        device: devices.Device | None = None,
    ) -> RecordsDisplay:
        """The table as it is now.

        func: None (all, in order of registration), a callable, a qualified name, or a list of
        these.
        columns: names as in DEFAULT_COLUMNS, or hits, time, rise, delta, alloc, freed, rss,
        backward.
        device: show this device for every line, instead of the target that was set at each line.

        Raises:
            KeyError: a function that was never registered.
            ValueError: not a column.
            UnsupportedError: a column that this device cannot have.
        """
        columns = check_columns(columns)
        index = -1 if device is None else devices.resolve(device, "display(device)")
        which = self._which(func)
        self._check_truth(columns, index)
        return RecordsDisplay(self.frozen(which), columns, index)

    def print_stats(
        self,
        func: Any = None,
        columns: _Columns = DEFAULT_COLUMNS,
        stream: TextIO | None = None,
        device: devices.Device | None = None,
    ) -> None:
        """`display(...)` written to `stream` (None: sys.stdout of this moment)."""
        self.display(func, columns, device).print(stream)

    def records(
        self, func: Any = None, device: devices.Device | None = None
    ) -> list[dict[str, Any]]:
        """A list of dicts, one per source line: function, file, line, code, and every recorded
        column (bytes, counts; time in ns)."""
        index = -1 if device is None else devices.resolve(device, "records(device)")
        return self.table_records(index, self._which(func))

    def _which(self, func: Any) -> list[int] | None:
        if func is None:
            return None
        found: list[int] = []
        names, codes = self.names, self.codes
        for one in func if isinstance(func, (list, tuple)) else [func]:
            if isinstance(one, str):
                hits = [i for i, n in enumerate(names) if n == one]
            else:
                wanted = [code for code, _ in codes_of(one)]
                hits = [i for i, code in enumerate(codes) if any(code is w for w in wanted)]
            if not hits:
                raise KeyError(
                    f"display: {one if isinstance(one, str) else _shown(one)} is not registered; "
                    f"registered: {', '.join(names) or 'nothing'}"
                )
            found += hits
        return found

    def _check_truth(self, columns: tuple[str, ...], index: int) -> None:
        """Declare numbers void if another tool overwrote the hook in between; refuse columns that
        cannot be known then."""
        device = self.target_device if index < 0 else index
        if device and self.stats_mode == 0 and _core.check_columns(columns):
            raise UnsupportedError(
                'display: a column must be read from the allocator, which stats="hook" never '
                'does; use stats="auto"'
            )
        if self._generation is None or device or not set(columns) - {"hits", "time", "rss"}:
            return
        lost = _core.cpu_bytes_generation() != self._generation
        if _core.memlab_hooked(0) and not lost:
            return
        if (lost or "overwritten" in control.why_not_exact(0)) and not self._warned:
            self._warned = True
            warnings.warn(
                "koila.memlab: another tool overwrote the CPU allocator hook; numbers since then "
                "are void",
                UserWarning,
                stacklevel=utils.user_level(),
            )
        raise UnsupportedError(
            f"display: the CPU's memory is not counted here: {control.why_not_exact(0)}; only "
            "hits, time and rss can be shown"
        )


def _shown(obj: object) -> str:
    try:
        return f"{type(obj).__name__} object {getattr(obj, '__qualname__', None) or repr(obj)[:60]}"
    except Exception:
        return f"{type(obj).__name__} object"


class RecordsDisplay:
    """The line table at one moment: `str()`, `.print(stream)`, HTML in a notebook, `.save(path)` as
    .txt .html .json .csv."""

    def __init__(self, table: _core.LineTable, columns: tuple[str, ...], device: int = -1) -> None:
        self._table, self._columns, self._device = table, columns, device

    def render(self, format: str = "text", all: bool = False) -> str:
        return self._table.render(format, self._columns, self._device, None, all)

    def __repr__(self) -> str:
        return self.render()

    def _repr_html_(self) -> str:
        return self.render("html")

    def print(self, stream: TextIO | None = None) -> None:
        (sys.stdout if stream is None else stream).write(self.render())

    def save(self, path: utils.Path) -> None:
        format = utils.format_of(path)
        text = self.render(format)
        utils.write(
            path, _pages.page("koila.memlab: line by line", [text]) if format == "html" else text
        )

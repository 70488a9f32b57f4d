"""@profile and @profile_every: one global profiler, its tables printed at exit or every n calls."""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import sys
import warnings
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, TypeVar, overload

from ..devices import Device
from ..utils import user_level
from .line_profiler import DEFAULT_COLUMNS, LineProfiler, _Columns, _shown, check_columns, codes_of

_T = TypeVar("_T")
_profiler: LineProfiler | None = None
# (function, columns, process), in order of decoration
_at_exit: list[tuple[Any, tuple[str, ...], int]] = []
_target: Device = 0


def _off() -> bool:
    return os.environ.get("KOILA_MEMLAB") == "0"


def _global() -> LineProfiler:
    global _profiler
    if _profiler is None:
        _profiler = LineProfiler(target_gpu=_target)
    return _profiler


def set_target_gpu(gpu_id: Device) -> None:
    """Set the device that rows of `@profile` show from the running line on: an index, a
    torch.device, "cuda", "cuda:1", "cpu".

    >>> set_target_gpu("cpu")
    """
    global _target
    _global().target_gpu = gpu_id
    _target = gpu_id


def clear_global_line_profiler() -> None:
    """Drop all functions and records of `@profile` and `@profile_every`. At exit the table of a
    cleared function says that no data was collected.

    >>> clear_global_line_profiler()
    """
    if _profiler is not None:
        _profiler.disable()
        _profiler.clear()


def _register(func: Any, columns: tuple[str, ...], at_exit: bool) -> bool:
    if not codes_of(func):
        warnings.warn(
            f"profile: no code behind {_shown(func)}, ignored", UserWarning, stacklevel=user_level()
        )
        return False
    profiler = _global()
    profiler.add_function(func)
    profiler.enable()
    if at_exit:
        if not _at_exit:
            atexit.register(_print_at_exit)
        if not any(f is func for f, _, _ in _at_exit):
            _at_exit.append((func, columns, os.getpid()))
    return True


def _print_at_exit() -> None:
    mine = [(func, columns) for func, columns, process in _at_exit if process == os.getpid()]
    if not mine:
        return
    try:
        profiler = _global()
        profiler.disable()
        parts: list[str] = []
        seen: set[tuple[int, ...]] = set()
        for func, columns in mine:
            codes = codes_of(func)
            key = tuple(id(code) for code, _ in codes)
            if key in seen:
                continue
            seen.add(key)
            try:
                parts.append(profiler.display(func, columns).render(all=True))
            except KeyError:  # cleared since
                parts.append("\n\n".join(f"## {name}\n\nNo data collected\n" for _, name in codes))
        sys.stdout.write("\n\n".join(parts))
        sys.stdout.flush()
    except Exception as error:
        # At exit nobody can handle it: stdout is closed or replaced, functions are gone, the count
        # is lost.
        try:
            sys.stderr.write(f"koila.memlab: {error}\n")
        except Exception:
            return


@overload
def profile(func: None = None, columns: _Columns = DEFAULT_COLUMNS) -> Callable[[_T], _T]: ...
@overload
def profile(func: _T, columns: _Columns = DEFAULT_COLUMNS) -> _T: ...
def profile(func: Any = None, columns: _Columns = DEFAULT_COLUMNS) -> Any:
    """Profile a function line by line and print its table once at exit: `@profile`,
    `@profile(columns=...)`, `profile(f)`.

    Returns the same object. An object without code gives a UserWarning and is returned unchanged.
    With `KOILA_MEMLAB=0` it does nothing.

    >>> @profile
    ... def double(x):
    ...     return 2 * x
    >>> double(torch.ones(2))
    tensor([2., 2.])
    """
    names = check_columns(columns)
    if func is None:
        return functools.partial(profile, columns=names)
    if not _off():
        _register(func, names, True)
    return func


def profile_every(
    output_interval: int = 1, enable: bool = True, columns: _Columns = DEFAULT_COLUMNS
) -> Callable[[_T], _T]:
    """Decorate a function to print its table after every `output_interval`-th call that returns.
    Numbers are cumulative.

    Returns a wrapper of the same kind (plain, async, generator, async generator); with
    `enable=False` the function itself.

    Raises:
        TypeError, ValueError: `output_interval` is not an int, or below 1.

    >>> @profile_every(2, columns=("hits", "alloc"))
    ... def double(x):
    ...     return 2 * x
    >>> _ = double(torch.ones(250))
    >>> _ = double(torch.ones(250))
    ## double
    ...
       2 ...    3     return 2 * x
    """
    if isinstance(output_interval, bool) or not isinstance(output_interval, int):
        raise TypeError(f"profile_every(output_interval={output_interval!r}): expected an int")
    if output_interval < 1:
        raise ValueError(f"profile_every(output_interval={output_interval}): expected 1 or more")
    names = check_columns(columns)

    def decorate(func: Any) -> Any:
        if not enable or _off() or not _register(func, names, False):
            return func
        n_calls = 0

        wrapper: Any

        def returned() -> None:
            nonlocal n_calls
            n_calls += 1
            if n_calls % output_interval == 0 and _profiler is not None:
                try:
                    _profiler.print_stats(func, names)
                except KeyError:  # clear_global_line_profiler() in between
                    return

        if inspect.iscoroutinefunction(func):

            async def wrapper(*args: Any, **kwargs: Any) -> Any:
                result = await func(*args, **kwargs)
                returned()
                return result

        elif inspect.isasyncgenfunction(func):

            async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
                agen, sent, thrown = func(*args, **kwargs), None, None
                while True:
                    try:
                        value = await (agen.asend(sent) if thrown is None else agen.athrow(thrown))
                    except StopAsyncIteration:
                        returned()
                        return
                    try:
                        sent, thrown = (yield value), None
                    except GeneratorExit:
                        await agen.aclose()
                        raise
                    except BaseException as error:
                        thrown = error

        elif inspect.isgeneratorfunction(func):

            def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
                result = yield from func(*args, **kwargs)
                returned()
                return result

        else:

            def wrapper(*args: Any, **kwargs: Any) -> Any:
                result = func(*args, **kwargs)
                returned()
                return result

        return functools.wraps(func)(wrapper)

    return decorate

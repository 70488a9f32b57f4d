"""@profile and @profile_every: one global profiler, its tables printed at exit or every n calls."""

import atexit
import functools
import inspect
import os
import sys
import warnings

from ..utils import user_level
from .line_profiler import DEFAULT_COLUMNS, LineProfiler, _shown, check_columns, codes_of

_profiler = None
_at_exit = []  # [(function, columns, process)], in order of decoration
_target = 0


def _off() -> bool:
    return os.environ.get("KOILA_MEMLAB") == "0"


def _global() -> LineProfiler:
    global _profiler
    if _profiler is None:
        _profiler = LineProfiler(target_gpu=_target)
    return _profiler


def set_target_gpu(gpu_id) -> None:
    """From the line that is running on, rows of `@profile` show this device: an index, a torch.device, "cuda", "cuda:1", "cpu"."""
    global _target
    _global().target_gpu = gpu_id
    _target = gpu_id


def clear_global_line_profiler() -> None:
    """Drop what `@profile` and `@profile_every` registered and recorded: at exit a function cleared says that no data was collected."""
    if _profiler is not None:
        _profiler.disable()
        _profiler.clear()


def _register(func, columns, at_exit: bool) -> bool:
    if not codes_of(func):
        warnings.warn(f"profile: no code behind {_shown(func)}, ignored", UserWarning, stacklevel=user_level())
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
        _profiler.disable()
        parts, seen = [], set()
        for func, columns in mine:
            codes = codes_of(func)
            key = tuple(id(code) for code, _ in codes)
            if key in seen:
                continue
            seen.add(key)
            try:
                parts.append(_profiler.display(func, columns).render(all=True))
            except KeyError:  # cleared since
                parts.append("\n\n".join(f"## {name}\n\nNo data collected\n" for _, name in codes))
        sys.stdout.write("\n\n".join(parts))
        sys.stdout.flush()
    except Exception as error:  # at exit nobody can handle it: stdout closed or replaced, functions dropped, the count lost
        try:
            sys.stderr.write(f"koila.memlab: {error}\n")
        except Exception:
            return


def profile(func=None, columns=DEFAULT_COLUMNS):
    """Profile a function line by line and print its table once at exit: `@profile`, `@profile(columns=...)`, `profile(f)`.

    Returns the same object. An object without code is a UserWarning and returned unchanged. `KOILA_MEMLAB=0` makes this do nothing.
    """
    columns = check_columns(columns)
    if func is None:
        return functools.partial(profile, columns=columns)
    if not _off():
        _register(func, columns, True)
    return func


def profile_every(output_interval=1, enable=True, columns=DEFAULT_COLUMNS):
    """A decorator that prints the function's table after every `output_interval`-th call that returned; numbers are cumulative.

    Returns a wrapper of the same kind (plain, async, generator, async generator); with `enable=False` the function itself.

    Raises:
        TypeError, ValueError: `output_interval` is not an int, or below 1.
    """
    if isinstance(output_interval, bool) or not isinstance(output_interval, int):
        raise TypeError(f"profile_every(output_interval={output_interval!r}): expected an int")
    if output_interval < 1:
        raise ValueError(f"profile_every(output_interval={output_interval}): expected 1 or more")
    columns = check_columns(columns)

    def decorate(func):
        if not enable or _off() or not _register(func, columns, False):
            return func
        n_calls = 0

        def returned():
            nonlocal n_calls
            n_calls += 1
            if n_calls % output_interval == 0 and _profiler is not None:
                try:
                    _profiler.print_stats(func, columns)
                except KeyError:  # clear_global_line_profiler() in between
                    return

        if inspect.iscoroutinefunction(func):

            async def wrapper(*args, **kwargs):
                result = await func(*args, **kwargs)
                returned()
                return result

        elif inspect.isasyncgenfunction(func):

            async def wrapper(*args, **kwargs):
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

            def wrapper(*args, **kwargs):
                result = yield from func(*args, **kwargs)
                returned()
                return result

        else:

            def wrapper(*args, **kwargs):
                result = func(*args, **kwargs)
                returned()
                return result

        return functools.wraps(func)(wrapper)

    return decorate

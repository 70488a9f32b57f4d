"""koila.memlab: where the memory of a PyTorch program goes, with exact numbers, on a GPU and without one.

Which line needs it: `LineProfiler`, `@profile`, `%mlrun`. Which tensors fill it: `MemReporter`, `snapshot`, `diff`. What a block cost:
`measure`. What filled it when it ran out: `on_oom`. Lending the device for a while: `Courtesy`. Replaces pytorch_memlab: change the import.
Importing this installs nothing, prints nothing and starts nothing; all is set up at first use.
"""

import os as _os

_WHERE = {
    "LineProfiler": "line_profiler.line_profiler",
    "DEFAULT_COLUMNS": "line_profiler.line_profiler",
    "profile": "line_profiler.profile",
    "profile_every": "line_profiler.profile",
    "set_target_gpu": "line_profiler.profile",
    "clear_global_line_profiler": "line_profiler.profile",
    "load_ipython_extension": "line_profiler.extension",
    "unload_ipython_extension": "line_profiler.extension",
    "MemReporter": "mem_reporter",
    "snapshot": "snapshots",
    "diff": "snapshots",
    "on_oom": "oom",
    "Courtesy": "courtesy",
    "measure": "control",
    "start": "control",
    "stop": "control",
    "backend": "control",
    "timeline": "timelines",
}
__all__ = [*_WHERE]


def __getattr__(name):
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
    return value


def __dir__():
    return sorted({*globals(), *_WHERE})


if _os.environ.get("KOILA_MEMLAB") == "1":
    __getattr__("start")()

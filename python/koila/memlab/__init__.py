"""koila.memlab: where the memory of a PyTorch program goes, with exact numbers, with or without a
GPU.

- Which line needs it: `LineProfiler`, `@profile`, `%mlrun`.
- Which tensors fill it: `MemReporter`, `snapshot`, `diff`.
- Memory over time: `timeline`. The cost of a block: `measure`.
- What filled it when it ran out: `on_oom`. Lending the device for a while: `Courtesy`.

It replaces pytorch_memlab: change the import. Importing installs, prints and starts nothing; all is
set up at first use.
"""

from __future__ import annotations

import os as _os
from typing import TYPE_CHECKING, Any

from .._nearest import did_you_mean as _did_you_mean

if TYPE_CHECKING:
    from .control import backend as backend, measure as measure, start as start, stop as stop
    from .courtesy import Courtesy as Courtesy
    from .line_profiler.extension import (
        load_ipython_extension as load_ipython_extension,
        unload_ipython_extension as unload_ipython_extension,
    )
    from .line_profiler.line_profiler import (
        DEFAULT_COLUMNS as DEFAULT_COLUMNS,
        LineProfiler as LineProfiler,
    )
    from .line_profiler.profile import (
        clear_global_line_profiler as clear_global_line_profiler,
        profile as profile,
        profile_every as profile_every,
    )
    from .line_profiler.profile import set_target_gpu as set_target_gpu
    from .mem_reporter import MemReporter as MemReporter
    from .oom import on_oom as on_oom
    from .snapshots import diff as diff, snapshot as snapshot
    from .timelines import timeline as timeline

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


def _get(name: str) -> Any:
    if name not in _WHERE:
        said = _did_you_mean(name, _WHERE) if name[:1] != "_" else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{said}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
    return value


if not TYPE_CHECKING:  # a type checker must report unknown names
    __getattr__ = _get


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})


if _os.environ.get("KOILA_MEMLAB") == "1":
    _get("start")()

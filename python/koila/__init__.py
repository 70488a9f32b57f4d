"""koila: a training step that fits in memory, with exactly the gradients of the full batch.
`koila.memlab`: where the memory goes.

The engine starts at the first use of one of its names, so `import koila.memlab` stays cheap and
changes nothing.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import _torch  # noqa: F401  refuses a torch that is missing or too old
from . import _old_names

if TYPE_CHECKING:
    from ._budget import (
        axes as axes,
        budget as budget,
        compile as compile,
        host_memory as host_memory,
        micro_batch as micro_batch,
        set_budget as set_budget,
        step_aside as step_aside,
        strict as strict,
    )
    from ._errors import (
        GatherError as GatherError,
        KoilaError as KoilaError,
        OutOfMemory as OutOfMemory,
    )
    from ._errors import StaleValueError as StaleValueError, UnsupportedError as UnsupportedError
    from ._lazy import lazy as lazy, run as run
    from ._modules import module_names as module_names
    from ._on_step import Step as Step, on_step as on_step
    from ._plan import Plan as Plan, explain as explain, last_plan as last_plan, plans as plans
    from ._predict import measure_device as measure_device, plan as plan
    from ._opaque import opaque as opaque
    from ._progress import progress as progress
    from ._rules import register_rule as register_rule
    from ._tensor import LazyTensor as LazyTensor

    __version__: str

# Public name -> its module. The only list of koila's names.
_HOME = {
    "GatherError": "_errors",
    "KoilaError": "_errors",
    "LazyTensor": "_tensor",
    "OutOfMemory": "_errors",
    "Plan": "_plan",
    "StaleValueError": "_errors",
    "Step": "_on_step",
    "UnsupportedError": "_errors",
    "axes": "_budget",
    "budget": "_budget",
    "compile": "_budget",
    "explain": "_plan",
    "host_memory": "_budget",
    "last_plan": "_plan",
    "lazy": "_lazy",
    "measure_device": "_predict",
    "micro_batch": "_budget",
    "module_names": "_modules",
    "on_step": "_on_step",
    "opaque": "_opaque",
    "plan": "_predict",
    "plans": "_plan",
    "progress": "_progress",
    "register_rule": "_rules",
    "run": "_lazy",
    "set_budget": "_budget",
    "step_aside": "_budget",
    "strict": "_budget",
}
__all__ = list(_HOME)
_old_names.answer(__all__)


def _get(name: str) -> Any:
    if name == "__version__":
        return import_module("._core", __name__).__version__
    if name not in _HOME:
        said = _old_names.advice(name, __all__)
        raise AttributeError(f"module 'koila' has no attribute {name!r}{said}")
    if _HOME[name] != "_errors":
        import_module("._engine", __name__)
    value = getattr(import_module("." + _HOME[name], __name__), name)
    globals()[name] = value
    return value


if not TYPE_CHECKING:  # a type checker must report unknown names
    __getattr__ = _get


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


if any(os.environ.get(name) for name in ("KOILA", "KOILA_BUDGET", "KOILA_MICRO_BATCH")):
    import_module("._engine", __name__)
if os.environ.get("KOILA_MEMLAB") == "1":
    import_module(".memlab", __name__)

"""koila: a training step that fits in memory, with exactly the gradients of the full batch; and `koila.memlab`: where the memory went.

The engine is started when one of its names is first used, so that `import koila.memlab` stays cheap and changes nothing.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import _torch  # noqa: F401  refuses a torch that is missing or too old

if TYPE_CHECKING:
    from ._budget import budget, micro_batch, set_budget, strict
    from ._errors import GatherError, KoilaError, OutOfMemory, StaleValueError, UnsupportedError
    from ._lazy import lazy, run
    from ._plan import Plan, explain, last_plan
    from ._predict import measure_device, plan
    from ._rules import opaque, register_rule
    from ._tensor import LazyTensor

# name -> the module it lives in: the one list of what koila offers
_HOME = {
    "GatherError": "_errors",
    "KoilaError": "_errors",
    "LazyTensor": "_tensor",
    "OutOfMemory": "_errors",
    "Plan": "_plan",
    "StaleValueError": "_errors",
    "UnsupportedError": "_errors",
    "budget": "_budget",
    "explain": "_plan",
    "last_plan": "_plan",
    "lazy": "_lazy",
    "measure_device": "_predict",
    "micro_batch": "_budget",
    "opaque": "_rules",
    "plan": "_predict",
    "register_rule": "_rules",
    "run": "_lazy",
    "set_budget": "_budget",
    "strict": "_budget",
}
__all__ = list(_HOME)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from . import _core

        return _core.__version__
    if name not in _HOME:
        raise AttributeError(f"module 'koila' has no attribute {name!r}")
    if _HOME[name] != "_errors":
        import_module("._engine", __name__)
    value = getattr(import_module("." + _HOME[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


if os.environ.get("KOILA_BUDGET"):
    import_module("._engine", __name__)
if os.environ.get("KOILA_MEMLAB") == "1":
    import_module(".memlab", __name__)

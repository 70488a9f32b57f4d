"""koila: a training step that fits in memory, with exactly the gradients of the full batch."""

from . import _torch
from . import _core
from . import _backward
from ._budget import budget, from_environment, micro_batch, set_budget, strict
from ._errors import GatherError, KoilaError, OutOfMemory, StaleValueError, UnsupportedError
from ._lazy import lazy, run
from ._plan import Plan, explain, last_plan
from ._tensor import LazyTensor

__version__: str = _core.__version__
__all__ = [
    "GatherError",
    "KoilaError",
    "LazyTensor",
    "OutOfMemory",
    "Plan",
    "StaleValueError",
    "UnsupportedError",
    "budget",
    "explain",
    "last_plan",
    "lazy",
    "micro_batch",
    "run",
    "set_budget",
    "strict",
]

from_environment()

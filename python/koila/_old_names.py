"""Names that koila does not have: what those of koila 0.1 are said like now, and what a misspelt
one was meant to be."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from ._nearest import did_you_mean

_TENSOR = "a lazy value is a torch.Tensor now, of class koila.LazyTensor; lazy(x, batch=0) makes it"
_BATCH = "lazy(x, batch=0) names the batch dimension, and x.shape has its size"
_FREE = "koila.budget(...) says what a step may take; without one it is what is free"
_SLICES = "slices are planned from the memory that is free; koila.micro_batch(n) sets their rows"
_SHAPES = "shapes are PyTorch's own; a rule for your own operator is koila.register_rule(...)"

# Name of 0.1.1 -> how it is said now. Modules of it are among them.
_SAID_NOW = {
    "BatchInfo": _BATCH,
    "BatchedPair": _BATCH,
    "CallBack": _SHAPES,
    "EagerTensor": "pass the plain tensor; x.torch() is the plain tensor of a lazy x",
    "Evaluation": _TENSOR,
    "LazyFunction": "call functions of torch on lazy tensors, which are recorded by themselves",
    "MetaData": _SHAPES,
    "PrePass": _SHAPES,
    "PrePassFunc": _SHAPES,
    "Runnable": "koila.run(x), or x.torch()",
    "RunnableTensor": _TENSOR,
    "TensorMixin": _TENSOR,
    "constants": _SLICES,
    "eager": "pass the plain tensor; x.torch() is the plain tensor of a lazy x",
    "errors": "koila.UnsupportedError, and koila.KoilaError for all errors of koila",
    "free_memory": _FREE,
    "gpus": f"{_FREE}. {_SLICES[0].upper()}{_SLICES[1:]}",
    "interfaces": f"{_TENSOR}; koila.run(x) is its plain tensor",
    "maximum_batch": _SLICES,
    "prepasses": _SHAPES,
    "shapes": _SHAPES,
    "split_batch": _SLICES,
}


def advice(name: str, known: Sequence[str]) -> str:
    """What to say instead of `name`, to end a message with; empty where nothing is known."""
    if name in _SAID_NOW:
        return f". It is a name of koila 0.1. Now: {_SAID_NOW[name]}"
    return did_you_mean(name, known)


class _Finder:
    """Answers `from koila import NAME` and `import koila.NAME` where nobody else found NAME. Python
    would not show the text of an AttributeError there."""

    def __init__(self, known: Sequence[str]) -> None:
        self._known = known

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> Any:
        package, _, name = fullname.rpartition(".")
        said = advice(name, self._known) if package == "koila" and name[:1] != "_" else ""
        if said:
            raise ImportError(f"koila has no {name!r}{said}", name=fullname)
        return None


def answer(known: Sequence[str]) -> None:
    """From now on, imports of names that koila lacks are answered. known: those that it has."""
    if not any(type(finder).__name__ == _Finder.__name__ for finder in sys.meta_path):
        sys.meta_path.append(_Finder(known))

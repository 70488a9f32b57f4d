"""KOILA=0: one process runs plain PyTorch, to compare with or to debug. `lazy()` and `run()` hand
back what they are given, settings are checked and then do nothing, and nothing of torch is
replaced."""

from __future__ import annotations

import os

from ._errors import UnsupportedError
from ._torch import torch


def _asked() -> str:
    text = os.environ.get("KOILA", "").strip()
    if text not in ("", "0", "1"):
        raise ValueError(
            f'KOILA={text}: expected "0" (koila does nothing, this is plain PyTorch) or "1", got '
            f"{text!r}"
        )
    return text


OFF = _asked() == "0"


def _itself(self: torch.Tensor) -> torch.Tensor:
    """The tensor itself, which is plain. A lazy one is computed here."""
    return self


def answer_on_plain_tensors() -> None:
    """`x.torch()` and `x.run()`, which programs ask of lazy tensors, answer on plain ones: where
    koila is switched off, or has stepped aside."""
    for name in ("torch", "run"):
        if not hasattr(torch.Tensor, name):
            setattr(torch.Tensor, name, _itself)


def refuse_when_off(call: str) -> None:
    """Raise UnsupportedError for what has no meaning in plain PyTorch."""
    if OFF:
        raise UnsupportedError(f"{call}: koila is switched off. Unset KOILA, which is 0, for it")

"""Stepping aside: what Python adds to python/ext/run/aside.c, where the idea is told."""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch

from . import _core
from ._switch import answer_on_plain_tensors

_ready = False  # do plain tensors answer as lazy ones?
_gpus: set[int] = set()  # whose refusals are counted


def may() -> bool:
    """May torch do steps alone in this process? Ranks that share a step must all do the same, and
    none knows of the others whether they have stepped aside."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not hasattr(distributed, "is_initialized"):  # not built for ranks
        return True
    return not distributed.is_initialized()


def _is_refused(*_: Any) -> None:
    _core.gpu_refused()


def steps_aside(gpu: int) -> None:
    """koila is about to step aside, for steps on this GPU, or on the CPU (-1). Plain tensors get
    the methods `torch()` and `run()` of lazy ones, and a GPU tells when it runs out of memory."""
    global _ready
    if not _ready:
        answer_on_plain_tensors()
        _ready = True
    if gpu >= 0 and gpu not in _gpus:
        _gpus.add(gpu)
        observe = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
        if observe is not None and len(_gpus) == 1:
            observe(_is_refused)
    logging.getLogger("koila").info(
        "steps of the same inputs were whole, with room to spare: torch does the next ones alone "
        "(koila.step_aside(False) turns that off)"
    )

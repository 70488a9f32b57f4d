"""A GPU's memory for the planner (called by cuda_state.c): the bytes that torch's caching allocator
holds, and the bytes that the device has left. Uses only public functions of `torch.cuda`."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from typing import Any

import torch

from ._errors import UnsupportedError
from ._torch import VERSION

_STATE = [
    (what, pool)
    for what in (
        "allocation",
        "allocated_bytes",
        "active_bytes",
        "segment",
        "reserved_bytes",
        "inactive_split",
        "inactive_split_bytes",
    )
    for pool in ("small_pool", "large_pool")
]
_Count = tuple[int, int, int]


def index_of(code: int) -> int:
    """The index of the GPU of a step's tensors; -1: none. `code`: a device as in koila/graph.h."""
    return code & 0xFF if code >> 8 == 1 and torch.cuda.is_initialized() else -1


def _refuse_captures() -> None:
    """Raises:
    UnsupportedError: a CUDA graph is being captured. A plan depends on the memory that is free
        now, and a step that runs out is cut again: a captured graph can do neither.
    """
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "a lazy step cannot be captured into a CUDA graph, because its slices depend on the "
            "memory that is free when it runs. Capture the plain step, or run this one outside of "
            "torch.cuda.graph()"
        )


def _count(stats: dict[str, Any]) -> _Count:
    of_all = stats["allocated_bytes"]["all"]
    return of_all["current"], of_all["peak"], of_all["freed"]


def now(index: int) -> tuple[_Count, int, int, tuple[int, ...]]:
    """(as of `allocated()`, reserved bytes, free bytes of the device, state). `state` differs
    whenever the allocator's state differs. The driver is asked, which takes it long.

    Raises:
        UnsupportedError: a CUDA graph is being captured.
    """
    _refuse_captures()
    stats = torch.cuda.memory_stats_as_nested_dict(index)
    free, _ = torch.cuda.mem_get_info(index)
    stream = int(torch.cuda.current_stream(index).cuda_stream)
    state = (index, stream, int(free), *(stats[what][pool]["current"] for what, pool in _STATE))
    return _count(stats), stats["reserved_bytes"]["all"]["current"], int(free), state


def held(index: int) -> _Count:
    """As `allocated()`, for a step that begins.

    Raises:
        UnsupportedError: a CUDA graph is being captured.
    """
    _refuse_captures()
    return allocated(index)


def allocated(index: int) -> _Count:
    """Bytes of torch's allocator: handed out now, the most of them so far, given back in all."""
    return _count(torch.cuda.memory_stats_as_nested_dict(index))


class Clock:
    """The time that a GPU takes for what its current stream is given from here to `ends()`. Nobody
    waits for it."""

    def __init__(self, index: int) -> None:
        self._stream = torch.cuda.current_stream(index)
        self._begin = self._event()

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def ends(self) -> None:
        self._end = self._event()

    def seconds(self) -> float:
        """Negative: it has not come to the end."""
        return self._begin.elapsed_time(self._end) / 1000 if self._end.query() else -1.0


def settings(index: int) -> tuple[str, str, str, float, int, int, str, str]:
    """(device profile as JSON, torch's version, the allocator's settings, the fraction of the
    device that torch may use, the device's bytes, the stream, cuBLAS's setting, cuBLASLt's).

    Raises:
        RuntimeError: torch uses another allocator than the one that is modelled.
    """
    if (
        os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING")
        or torch.cuda.get_allocator_backend() != "native"
    ):
        raise RuntimeError("not the caching allocator")
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(index)
    conf = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or ""
    stream = int(torch.cuda.current_stream(index).cuda_stream)
    total = int(torch.cuda.get_device_properties(index).total_memory)
    return (
        profile(index, 0),  # no context bytes: the free bytes of now() are already without them
        torch.__version__,
        conf,
        float(fraction),
        total,
        stream,
        *_cublas_settings(),
    )


def _cublas_settings() -> tuple[str, str]:
    """As CUBLAS_WORKSPACE_CONFIG and CUBLASLT_WORKSPACE_SIZE say it; from 2.15 on programs may have
    set others."""
    if VERSION < (2, 15) or not hasattr(torch._C, "_cuda_getCublasWorkspaceSize"):
        return os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""), ""
    sizes = torch._C._cuda_getCublasWorkspaceSize(), torch._C._cuda_getCublasLtWorkspaceSize()
    cublas, cublaslt = (-(-int(size) // 1024) for size in sizes)
    return f":{cublas}:1", f"{cublaslt}"


def profile(index: int, context_bytes: int) -> str:
    """The profile of a present GPU, as JSON. context_bytes: bytes used on it outside of torch's
    allocator."""
    p = torch.cuda.get_device_properties(index)
    values = {
        "sm_count": p.multi_processor_count,
        "compute_capability": 10 * p.major + p.minor,
        "total_bytes": p.total_memory,
        "context_bytes": context_bytes,
    }
    fields = {k: {"value": int(v), "how": "measured"} for k, v in values.items()}
    return json.dumps(
        {
            "koila_device": 1,
            "name": "".join(c for c in p.name if c.isalnum() or c in " -")[:60],
            "fields": fields,
        }
    )


def profile_now(index: int) -> str:
    """The profile with the context bytes of now."""
    free, total = torch.cuda.mem_get_info(index)
    return profile(index, max(0, total - free - int(torch.cuda.memory_reserved(index))))


def segments(index: int) -> list[dict[str, Any]]:
    """The segments of one device from `torch.cuda.memory_snapshot()`, without traces if this torch
    can leave them out."""
    snapshot: Callable[..., list[dict[str, Any]]] = torch.cuda.memory_snapshot
    short = "include_traces" in inspect.signature(snapshot).parameters
    return [
        s
        for s in (snapshot(include_traces=False) if short else snapshot())
        if s.get("device", 0) == index
    ]

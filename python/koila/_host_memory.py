"""Values of a step that wait in host memory until the backward pass needs them: the koila::offload
family of src/placement/pseudo.def, and what a copy costs.

Copies run on a stream of their own, beside the kernels of the stream that runs the step. The plan
says when a value is dead, and so these operators make the running stream wait: before memory that
was copied is used again, and before what was copied back is read. No memory is handed to the
allocator's `record_stream`, which would give it back later than the plan says.

    offload    copies wait for the kernels so far (x is made)
    offloaded  kernels wait for the copy (the memory of x may be used again)
    fetch      copies wait for the kernels so far (the memory of y may still be read by them)
    fetched    kernels wait for the copy (y is complete)

A step that ends in the middle drops copies that still run. A copy to the host then reads what
nobody needs, and torch's pinned allocator keeps its target until it has ended. A copy to the device
is waited for, or it would write into memory that is somebody else's by then."""

from __future__ import annotations

import contextlib
from typing import Any

from ._torch import SETTING_UP, torch

# Work of a byte on the way, where it cannot be measured: the memory of an A100 moves 1,555 GB/s,
# PCIe 4.0 x16 about 25 [NVIDIA's data sheet; PCI-SIG: 31.5 without protocol].
FALLBACK_PRICE = 60.0
_SAMPLE_BYTES = 32 << 20
_N_SAMPLES = 4

_prices: dict[int, float] = {}  # by the GPU's index; 0: the host gave no memory
_streams: dict[int, Any] = {}


class _Way:
    """A copy on its way: the stream that it runs on, and the event at which it is complete."""

    __slots__ = ("event", "is_coming", "stream")

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.event: Any = None
        self.is_coming = False  # to the device, and nobody has waited for it

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            to.copy_(source, non_blocking=True)
            self.event = self.stream.record_event()

    def wait(self) -> None:
        torch.cuda.current_stream(self.stream.device).wait_event(self.event)
        self.is_coming = False

    def __del__(self) -> None:
        if self.is_coming:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


def _way_of(h: Any) -> _Way:
    way: _Way = h.koila_way  # the executor holds tensors, so the copy is one, and has its way on it
    return way


def _stream(device: torch.device) -> Any:
    index = device.index
    if index not in _streams:
        with SETTING_UP:
            _streams.setdefault(index, torch.cuda.Stream(device))
    return _streams[index]


def _empty_like(x: torch.Tensor, **where: Any) -> torch.Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, **where)


def _in_host(x: torch.Tensor) -> torch.Tensor:
    """Pinned memory; pageable, where the driver refuses that; later plans do without, where even
    that is refused."""
    with contextlib.suppress(RuntimeError):
        return _empty_like(x, device="cpu", pin_memory=True)
    try:
        return _empty_like(x, device="cpu")
    except (RuntimeError, MemoryError):
        _prices[x.device.index] = 0.0
        raise


def _offload(x: torch.Tensor, price: float) -> torch.Tensor:
    h: Any = _in_host(x)
    h.koila_way = _Way(_stream(x.device))
    h.koila_way.copy(h, x)
    return h  # type: ignore[no-any-return]


def _offloaded(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    _way_of(h).wait()
    return h


def _fetch(h: torch.Tensor, price: float) -> torch.Tensor:
    way = _way_of(h)
    y = _empty_like(h, device=way.stream.device)
    way.is_coming = True
    way.copy(y, h)
    return y


def _fetched(y: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    _way_of(h).wait()
    return y


PSEUDO: dict[str, Any] = {
    "koila::offload": _offload,
    "koila::offloaded": _offloaded,
    "koila::fetch": _fetch,
    "koila::fetched": _fetched,
}


def is_refused(index: int) -> bool:
    """Did the host give no memory to values of this GPU?"""
    return _prices.get(index) == 0


def price(index: int) -> float:
    """The time of a byte on the way to host memory or back, by that of a byte that goes through the
    GPU's memory: the slower of both ways, measured once. 0: host memory was refused."""
    if index not in _prices:
        _prices[index] = _measured(torch.device("cuda", index))
    return _prices[index]


def _measured(device: torch.device) -> float:
    try:
        here = torch.empty(_SAMPLE_BYTES, dtype=torch.uint8, device=device)
        beside = torch.empty_like(here)
        there = torch.empty(_SAMPLE_BYTES, dtype=torch.uint8, pin_memory=True)
        inside = _milliseconds(beside, here) / 2  # each byte is read and written
        outside = max(_milliseconds(there, here), _milliseconds(here, there))
    except RuntimeError:  # no memory to try with
        return FALLBACK_PRICE
    return outside / inside if inside > 0 and outside > inside else FALLBACK_PRICE


def _milliseconds(to: torch.Tensor, source: torch.Tensor) -> float:
    """Of the fastest copy."""
    times: list[float] = []
    for _ in range(_N_SAMPLES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        to.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return min(times)

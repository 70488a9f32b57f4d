"""measure, start, stop, backend: exact numbers, and which devices give them."""

from __future__ import annotations

from typing import Any

from .. import _core
from .._errors import UnsupportedError
from . import devices


def measure(device: devices.Device | None = None) -> _core.Measure:
    """Measure exactly how the `with` block changes a device's memory.

    device: as for `LineProfiler`; None: the current accelerator, else the CPU.
    Returns a context manager with ints, live inside the block and final after it: `.start .end
    .peak` (bytes on the device), `.rise` = peak - start, `.alloc .freed` (bytes allocated and freed
    inside), `.allocs .frees` (their numbers). Nestable; counts all threads.

    Raises:
        UnsupportedError: this device does not report every event, see `backend()`.

    >>> with measure("cpu") as m:
    ...     x = torch.ones(1000).relu()
    >>> m.rise, m.alloc, m.freed
    (8000, 8000, 4000)
    """
    index = devices.current() if device is None else devices.resolve(device, "measure(device)")
    check_hooked(index, "measure")
    return _core.Measure(index)


def check_hooked(index: int, call: str) -> None:
    """Raise UnsupportedError if the device does not report every event."""
    devices.listen()
    if not _core.memlab_hooked(index):
        raise UnsupportedError(
            f"{call}: {devices.name(index)} is not counted exactly: {why_not_exact(index)}"
        )


def start(trace: bool = False) -> None:
    """Install the allocator hooks now, for exact numbers from the first tensor.

    trace: also keep file and line of every CPU allocation from now on; reports then show them.

    >>> start(trace=True)
    >>> kept = torch.ones(1000)
    >>> any(row.line for row in snapshot().rows if row.shape == (1000,))
    True
    """
    devices.listen()
    if trace and not _core.memlab_trace(True):
        raise UnsupportedError("start(trace=True): lines cannot be kept on this version of Python")


def stop() -> None:
    """Remove the hooks. Blocks that were counted are still noticed when they are freed.

    >>> start()
    >>> stop()
    """
    _core.memlab_stop()


def why_not_exact(index: int) -> str:
    """Why a device does not report single blocks: text for an error."""
    if index == 0:
        plan = _core.cpu_bytes_install()
        return plan.partition(": ")[2] or "the hook was overwritten by another tool"
    return (
        "its allocator does not report single blocks (cudaMallocAsync, a pluggable allocator, or "
        "caching disabled)"
    )


def backend() -> dict[str, Any]:
    """How memory is counted: {"cpu": "hook" | None, "cuda": "hook" | "stats" | None, "why":
    {device: reason}}. "why" has every device that the hook does not count.

    >>> backend()["cpu"]
    'hook'
    """
    devices.listen()
    kind, count = _core.memlab_devices()
    answer: dict[str, Any] = {"cpu": "hook" if _core.memlab_hooked(0) else None, "cuda": None}
    why = {} if answer["cpu"] else {"cpu": why_not_exact(0)}
    if count and kind is not None:
        answer[kind] = "hook" if _core.memlab_hooked(1) else "stats"
        if answer[kind] == "stats":
            why[kind] = why_not_exact(1)
    else:
        why["cuda"] = "no accelerator"
    answer["why"] = why
    return answer

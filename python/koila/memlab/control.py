"""measure, start, stop, backend: the truth itself."""

from __future__ import annotations

from typing import Any

from .. import _core
from .._errors import UnsupportedError
from . import devices


def measure(device: devices.Device | None = None) -> _core.Measure:
    """What the block inside does to a device's memory, exactly.

    device: as for `LineProfiler`; None: the current accelerator, else the CPU.
    Returns a context manager with ints, live inside the block and final after it: `.start .end
    .peak` (bytes on the device), `.rise` = peak - start, `.alloc .freed` (bytes handed out and
    taken back inside), `.allocs .frees` (how often). Nestable; counts all threads.

    Raises:
        UnsupportedError: this device does not tell of every event, see `backend()`.

    >>> with measure("cpu") as m:
    ...     x = torch.ones(1000) + 1
    >>> m.rise, m.alloc, m.freed
    (8000, 8000, 4000)
    """
    index = devices.current() if device is None else devices.resolve(device, "measure(device)")
    check_hooked(index, "measure")
    return _core.Measure(index)


def check_hooked(index: int, call: str) -> None:
    """Raises UnsupportedError where the device does not tell of every event."""
    devices.listen()
    if not _core.memlab_hooked(index):
        raise UnsupportedError(
            f"{call}: {devices.name(index)} is not counted exactly: {_why(index)}"
        )


def start(trace: bool = False) -> None:
    """Put the allocator hooks in now: for programs that want the truth from the first tensor.

    trace: also keep file and line of every CPU block from now on; reports then say who asked for
    it.
    """
    devices.listen()
    if trace and not _core.memlab_trace(True):
        raise UnsupportedError("start(trace=True): lines cannot be kept on this version of Python")


def stop() -> None:
    """Take the hooks off again. Blocks already counted are still seen when they are freed."""
    _core.memlab_stop()


def _why(index: int) -> str:
    if index == 0:
        plan = _core.cpu_bytes_install()
        return plan.partition(": ")[2] or "the hook was overwritten by another tool"
    return "its allocator does not report single blocks (cudaMallocAsync, a pluggable allocator, or caching disabled)"


def backend() -> dict[str, Any]:
    """Which truth is in use: {"cpu": "hook" | None, "cuda": "hook" | "stats" | None}. "why" is
    there when one is not the hook."""
    devices.listen()
    kind, count = _core.memlab_devices()
    answer: dict[str, Any] = {"cpu": "hook" if _core.memlab_hooked(0) else None, "cuda": None}
    why = {} if answer["cpu"] else {"cpu": _why(0)}
    if count and kind is not None:
        answer[kind] = "hook" if _core.memlab_hooked(1) else "stats"
        if answer[kind] == "stats":
            why[kind] = _why(1)
    else:
        why["cuda"] = "no accelerator"
    answer["why"] = why
    return answer

"""Which device is meant. Inside memlab a device is a number: 0 the CPU, 1 + i accelerator i."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Union

from .. import _cells, _core
from .utils import user_level

if TYPE_CHECKING:
    import torch

Device = Union[int, str, "torch.device"]
_ACCEPTED = 'an index, a torch.device, "cpu", "cuda" or "cuda:1"'
_warned = False


def listen() -> None:
    """Import torch if it is installed, and install the allocator hooks."""
    try:
        import torch  # noqa: F401
    except ImportError:
        pass
    _core.memlab_library(_cells.library())
    _core.memlab_listen()


def resolve(device: Device | None, call: str) -> int:
    """The number of `device`. Without an accelerator an index means the CPU. call: for errors.

    Raises:
        TypeError, ValueError: not a device, not parsable, or an index too high.
    """
    global _warned
    listen()
    kind, count = _core.memlab_devices()
    index = None
    if isinstance(device, bool) or device is None:
        raise TypeError(f"{call}: expected {_ACCEPTED}, got {device!r}")
    if isinstance(device, int):
        index = device
    elif isinstance(device, str) or (hasattr(device, "type") and hasattr(device, "index")):
        name, colon, number = str(device).partition(":")
        if name not in {"cpu", "cuda", "hip", "xpu"} or (colon and not number.isdigit()):
            raise ValueError(f"{call}: expected {_ACCEPTED}, got {device!r}")
        if name == "cpu":
            return 0
        index = int(number) if number else current() - 1
        if kind is None:
            index = int(number or 0)
    else:
        raise TypeError(f"{call}: expected {_ACCEPTED}, got {type(device).__name__}")
    if kind is None:
        if index > 0 and not _warned:
            _warned = True
            warnings.warn(
                f"{call}: there is no accelerator here, showing the CPU",
                UserWarning,
                stacklevel=user_level(),
            )
        if index < 0:
            raise ValueError(f"{call}: expected {_ACCEPTED}, got {device!r}")
        return 0
    if not 0 <= index < count:
        raise ValueError(f"{call}: device index {index}, but there are {count} devices")
    return 1 + index


def current() -> int:
    """The current accelerator, else the CPU."""
    listen()
    kind, count = _core.memlab_devices()
    if not count or kind is None:
        return 0
    import torch

    return 1 + int(getattr(torch, kind).current_device())


def name(device: int) -> str:
    return "cpu" if device == 0 else f"{_core.memlab_devices()[0] or 'cuda'}:{device - 1}"


def index(name: str) -> int:
    """The device with this `name()`."""
    return 1 + int(name.partition(":")[2]) if ":" in name else 0

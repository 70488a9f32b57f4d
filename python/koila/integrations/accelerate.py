"""Accelerate, with lazy batches."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from .. import lazy, on_step
from .._on_step import Listener, Step


def prepare(accelerator: Any, *objects: Any, batch: Any = 0) -> Any:
    """`accelerator.prepare(*objects)`, where the loaders yield lazy batches.

    batch: as for `koila.lazy`. Returns: one object for one, a tuple for several, in their order.

    Example:
        >>> model, optimizer, loader = prepare(accelerator, model, optimizer, loader)
        >>> for x, y in loader:
        ...     accelerator.backward(loss(model(x), y))
    """
    prepared = accelerator.prepare(*objects)
    several = prepared if len(objects) > 1 else (prepared,)
    out = tuple(lazy(o, batch=batch) if isinstance(o, DataLoader) else o for o in several)
    return out if len(objects) > 1 else out[0]


def log_steps(accelerator: Any) -> Listener:
    """Log slices, peak and seconds of each step to the accelerator's trackers, from here on until
    `remove()` or the end of a `with` block.

    Example:
        >>> with log_steps(accelerator):
        ...     train()
    """

    def log(step: Step) -> None:
        peak = step.measured_peak_bytes or step.predicted_peak_bytes
        accelerator.log(
            {
                "koila/slices": step.slices,
                "koila/peak_mib": peak / 2**20,
                "koila/seconds": step.seconds,
            },
            step=step.number,
        )

    return on_step(log)

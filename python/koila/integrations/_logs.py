"""What the callbacks of training loops log of steps."""

from __future__ import annotations

from .. import on_step
from .._on_step import Listener, Step


class Logged:
    """The steps since the last log. `start()` and `stop()` may be called any number of times."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._listener: Listener | None = None

    def start(self) -> None:
        if self._listener is None:
            self._listener = on_step(self._steps.append)

    def stop(self) -> None:
        if self._listener is not None:
            self._listener.remove()
        self._listener = None

    def take(self) -> dict[str, float]:
        """Of the steps since the last call: the most slices, the highest peak, all gathers and
        retries; {} if there was none."""
        steps, self._steps[:] = list(self._steps), []
        if not steps:
            return {}
        return {
            "koila/slices": max(s.slices for s in steps),
            "koila/peak_mib": max(
                (s.measured_peak_bytes or s.predicted_peak_bytes) / 2**20 for s in steps
            ),
            "koila/seconds": sum(s.seconds for s in steps) / len(steps),
            "koila/gathers": sum(s.gathers for s in steps),
            "koila/retries": sum(s.retries for s in steps),
        }

"""`on_step()`: a function that is called after each backward, with what the step was."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

from . import _backward, _core
from ._budget import readable
from ._plan import Axis, Plan


class _Step(NamedTuple):
    slices: int
    micro_batch: int
    batch: int
    axis: Axis | None
    predicted_peak_bytes: int
    measured_peak_bytes: int | None
    budget_bytes: int | None
    seconds: float
    gathers: int
    retries: int
    number: int
    aside: bool = False


class Step(_Step):
    """How one step ran.

    Attributes:
        slices: of the rows, or along `axis` within them.
        micro_batch, batch, axis, predicted_peak_bytes, measured_peak_bytes, budget_bytes, retries:
            as in `Plan`.
        seconds: that the run of all slices took; where torch did the step alone, from `lazy()` to
            the end of `backward()`.
        gathers: operators for which values were made whole; `plan.gathers` names them.
        number: of all runs of the process, and steps that were told.
        aside: torch did it alone (see `lazy()`). `slices` is 1 then, and what was predicted is the
            plan of the last such step that was recorded.
        plan: the step's `Plan`, made when it is asked for: it takes longer than the rest. `None`
            once 16 newer runs have ended, or torch has done another such step alone, or in another
            thread.

    Example:
        >>> steps = []
        >>> with koila.on_step(steps.append), micro_batch(5):
        ...     F.cross_entropy(model(lazy(images)), labels).backward()
        >>> steps[0].slices, steps[0].micro_batch, steps[0].batch
        (3, 5, 12)
    """

    __slots__ = ()

    @property
    def plan(self) -> Plan | None:
        raw = _core.plan_numbered(self.number)
        return None if raw is None else Plan(raw)

    def __repr__(self) -> str:
        peak = readable(self.measured_peak_bytes or self.predicted_peak_bytes)
        return (
            f"<koila.Step: {self.slices} × {self.micro_batch} rows of {self.batch}, peak {peak}, "
            f"{self.seconds * 1e3:.1f} ms>"
        )


Callback = Callable[[Step], Any]


class Listener:
    """What `on_step()` returns: `remove()` ends it, or the end of a `with` block. Calling it calls
    the callback, so that a decorated function stays one."""

    def __init__(self, callback: Callback) -> None:
        functools.update_wrapper(self, callback)
        self._callback = callback
        _listeners.append(self)
        _backward.after_step = _tell
        _core.heard(True)

    def __call__(self, step: Step) -> Any:
        return self._callback(step)

    def remove(self) -> None:
        """The callback is not called any more. Once is enough, twice is fine."""
        if self in _listeners:
            _listeners.remove(self)
        if not _listeners:
            _backward.after_step = None
            _core.heard(False)

    def __enter__(self) -> Listener:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        name = getattr(self._callback, "__qualname__", type(self._callback).__name__)
        return f"<koila.on_step: {name}{'' if self in _listeners else ', removed'}>"


_listeners: list[Listener] = []


def _tell(number: int) -> None:
    raw = _core.step_facts(number)
    if raw is None:
        return
    axis = None if raw["axis"] is None else Axis(*raw["axis"])
    step = Step(
        slices=raw["n_micro_batches"] * (1 if axis is None else axis.n_slices),
        micro_batch=raw["micro_batch"],
        batch=raw["batch"],
        axis=axis,
        predicted_peak_bytes=raw["predicted_peak_bytes"],
        measured_peak_bytes=raw["measured_peak_bytes"],
        budget_bytes=raw["budget_bytes"],
        seconds=raw["seconds"] or 0.0,
        gathers=len(raw["gathers"]),
        retries=raw["retries"],
        number=number,
        aside=raw["n_aside"] > 0,
    )
    with contextlib.ExitStack() as calls:  # all are called, whichever of them raises
        for listener in reversed(_listeners):
            calls.callback(listener, step)


def on_step(callback: Callback) -> Listener:
    """Call `callback(step)` after each `backward()` (or `torch.autograd.grad()`) of a lazy step, in
    the thread that ran it, with a `Step`. In all threads of the process.

    Of a step that torch does alone (see `lazy()`), as many backwards are told as when it was
    recorded; `step.aside` says so.

    The step is complete by then: gradients and buffers are in place. What a callback raises comes
    out of `backward()`, after the other callbacks were called. Ctrl-C is not held back.

    Returns: a handle. `remove()` ends it; so does the end of `with koila.on_step(f):`. As a
    decorator the function stays what it was.

    Example:
        >>> with koila.on_step(lambda step: print(step.slices, step.gathers)), micro_batch(4):
        ...     F.cross_entropy(model(lazy(images)), labels).backward()
        3 0

    For TensorBoard and for Weights & Biases::

        @koila.on_step
        def log(step):
            writer.add_scalar("koila/slices", step.slices, step.number)

        koila.on_step(lambda step: wandb.log({"koila/seconds": step.seconds}, commit=False))
    """
    if not callable(callback):
        raise TypeError(f"on_step({callback!r}): expected a function of one step, got {callback!r}")
    return Listener(callback)

"""Hugging Face's Trainer, with lazy batches."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from .. import lazy
from ._logs import Logged


class KoilaCallback(TrainerCallback):
    """Make what the Trainer gives to the model lazy, in training and evaluation, and log
    `koila/slices`, `koila/peak_mib`, `koila/seconds` (a step), `koila/gathers` and `koila/retries`
    beside the loss: in `state.log_history` and by all of the Trainer's reporters (`report_to=`:
    TensorBoard, Weights & Biases, ...), its progress bar and its other callbacks.

    batch: the dimension that is the batch in every input of the model; or a dict by the name of the
        input, where names that are missing are not batched. Inputs that have no dimension are not.

    A hook on the model does it (`register_forward_pre_hook`), so a model that computes its loss
    itself and one whose loss the Trainer computes are both cut. It is there from the Trainer's
    construction, or from `train()` where the callback was added later; `detach()` removes it.

    Example:
        >>> trainer = Trainer(model, args, train_dataset=data, callbacks=[KoilaCallback()])
        >>> trainer.train()
    """

    def __init__(self, *, batch: int | Mapping[str, int | None] = 0) -> None:
        self._batch = batch
        self._hook: Any = None
        self._logged = Logged()

    def __repr__(self) -> str:
        return f"KoilaCallback(batch={self._batch!r})"

    def attach(self, model: torch.nn.Module) -> None:
        """Hook this model, in place of the one that was hooked before."""
        self.detach()
        self._hook = model.register_forward_pre_hook(self._make_lazy, with_kwargs=True)

    def detach(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook = None

    def _make_lazy(
        self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        batch = self._batch
        if isinstance(batch, Mapping):
            dims = {name: batch.get(name) for name in kwargs}
            return args, lazy(kwargs, batch=dims)
        args, kwargs = lazy((args, kwargs), batch=batch)
        return args, kwargs

    def _come_first(self) -> None:
        """Be the first of the Trainer's callbacks: each adds to the dict of a log what the later
        ones see, and the Trainer puts its reporters before the callbacks that it is given. No
        argument of a callback leads to their list, so it is taken from the handler that calls."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not isinstance(frame.f_locals.get("self"), CallbackHandler):
            frame = frame.f_back
        callbacks = frame.f_locals["self"].callbacks if frame is not None else []
        if self in callbacks[1:]:
            # in place: a handler that is walking through its list goes on with the one behind
            callbacks.insert(0, callbacks.pop(callbacks.index(self)))

    def on_init_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._come_first()
        if given.get("model") is not None:
            self.attach(given["model"])

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._come_first()
        if self._hook is None and given.get("model") is not None:
            self.attach(given["model"])
        self._logged.start()

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._logged.stop()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **given: Any
    ) -> None:
        found = self._logged.take()
        if logs is not None:
            logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)

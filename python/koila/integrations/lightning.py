"""Lightning's Trainer, with lazy batches."""

from __future__ import annotations

import functools
from typing import Any

from lightning.pytorch import Callback

from .. import lazy
from ._logs import Logged

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class KoilaCallback(Callback):
    """Make the batch that Lightning gives to `training_step`, `validation_step`, `test_step` and
    `predict_step` lazy, and log `koila/slices`, `koila/peak_mib`, `koila/seconds` (a step),
    `koila/gathers` and `koila/retries` with the module's logger.

    batch: the dimension that is the batch, or a structure like Lightning's batch, as for
        `koila.lazy`.

    Example:
        >>> trainer = lightning.Trainer(callbacks=[KoilaCallback()])
        >>> trainer.fit(module, loader)
    """

    def __init__(self, *, batch: Any = 0) -> None:
        self._batch = batch
        self._logged = Logged()

    def __repr__(self) -> str:
        return f"KoilaCallback(batch={self._batch!r})"

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        for name in _STEPS:
            step = getattr(pl_module, name, None)
            if callable(step) and name not in vars(pl_module):
                setattr(pl_module, name, self._with_lazy_batch(step))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._logged.stop()
        for name in _STEPS:
            if getattr(vars(pl_module).get(name), "_of_koila", None) is self:
                delattr(pl_module, name)

    def _with_lazy_batch(self, step: Any) -> Any:
        @functools.wraps(step)
        def with_lazy_batch(batch: Any, *args: Any, **kwargs: Any) -> Any:
            return step(lazy(batch, batch=self._batch), *args, **kwargs)

        with_lazy_batch._of_koila = self  # type: ignore[attr-defined]
        return with_lazy_batch

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._logged.start()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        found = self._logged.take()
        if found:
            pl_module.log_dict(found)

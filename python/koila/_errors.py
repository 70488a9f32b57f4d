"""The exceptions of koila. Each says what, where and what to do."""

import torch


class KoilaError(Exception):
    """The base of every error that is koila's own; an error of torch keeps its own type."""


class UnsupportedError(KoilaError, RuntimeError):
    """Something that koila cannot do exactly, and therefore does not do."""


class StaleValueError(KoilaError, RuntimeError):
    """A lazy value is asked for after a tensor it is computed from was changed."""


class GatherError(KoilaError, RuntimeError):
    """Under `strict()`: an operator needs a value of the whole batch at once."""


class OutOfMemory(KoilaError, torch.OutOfMemoryError):
    """Even the smallest slice does not fit. `missing_bytes` says by how much, 0 when unknown."""

    missing_bytes = 0

"""Recording a step that will not run: its writes are undone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import _core
from ._torch import untyped_storage


def _draws(func: Any, args: Any) -> bool:
    """Does this call move a generator? Planned ones of lazy tensors do not."""
    planned = _core.is_planning() and any(map(_core.is_lazy, args))
    return torch.Tag.nondeterministic_seeded in func.tags and not planned


class UndoWrites(TorchDispatchMode):
    """Undo the writes of a step that is only planned (or explained) into plain tensors (a batch
    norm's counter, a logged mean), and put the CPU's random state back. A tensor gets its contents
    and its version back, because an open step may have recorded it, or saved it for its backward.
    """

    def __enter__(self) -> UndoWrites:
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor, int | None]] = {}
        # Has autocast made a half-precision copy of a float32 parameter? The recording sees only
        # the copy.
        self.casts_parameters = False
        self._random = torch.get_rng_state()
        self._drew = False  # if nothing was drawn here, what other threads drew stays drawn
        TorchDispatchMode.__enter__(self)
        return self

    def wrote(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Was one of these written?"""
        memory = {untyped_storage(t).data_ptr() for t, _, _ in self._before.values()}
        return any(untyped_storage(t).data_ptr() in memory for t in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func is torch.ops.aten._to_copy.default
            and args[0].requires_grad
            and args[0].dtype is torch.float32
            and not _core.is_lazy(args[0])
        ):
            self.casts_parameters |= kwargs.get("dtype") in (torch.float16, torch.bfloat16)
        self._drew |= _draws(func, args)
        for given, declared in zip(
            [*args, *kwargs.values()],
            [
                *func._schema.arguments[: len(args)],
                *(a for n in kwargs for a in func._schema.arguments if a.name == n),
            ],
        ):
            if declared.alias_info is None or not declared.alias_info.is_write:
                continue
            for t in given if isinstance(given, (list, tuple)) else (given,):
                if (
                    isinstance(t, torch.Tensor)
                    and not _core.is_lazy(t)
                    and t.device.type != "meta"
                    and id(t) not in self._before
                ):
                    self._before[id(t)] = (
                        t,
                        t.detach().clone(),
                        None if t.is_inference() else t._version,
                    )
        return func(*args, **kwargs)

    def __exit__(self, *exc: Any) -> None:
        TorchDispatchMode.__exit__(self, *exc)
        with torch.no_grad():
            for t, was, version in reversed(self._before.values()):
                t.detach().copy_(was)
                if version is not None:
                    torch._C._autograd._unsafe_set_version_counter((t,), (version,))
        if self._drew:
            torch.set_rng_state(self._random)

"""BatchNorm: its running statistics are written when the step ends, exactly once."""

from __future__ import annotations

import weakref
from typing import Any

from ._torch import torch
from . import _core
from ._calls import redispatch, write_real
from ._special import special
from ._statistics import guard, module_of, unguard

aten = torch.ops.aten

# tape -> counters of its forwards, with their versions
_Counters = list[tuple[torch.Tensor, int]]
_counted: weakref.WeakKeyDictionary[Any, _Counters] = weakref.WeakKeyDictionary()

# Where torch itself calls `num_batches_tracked.add_(1)`.
_COUNTING = {
    torch.nn.modules.batchnorm._BatchNorm.forward.__code__,
    torch.nn.SyncBatchNorm.forward.__code__,
}


def _remember_count(module: Any, value: Any) -> None:
    """Remember the counter that the calling module has already increased, in plain torch. If the
    step fails, its statistics are not written and uncount() decreases the counter again."""
    counter = module.num_batches_tracked
    if counter is not None and not _core.is_lazy(counter):
        _counted.setdefault(_core.tape_of(value), []).append((counter, counter._version))


def uncount(tape: Any) -> None:
    """Take back the batches counted by a step that failed before its statistics were written. A
    counter that was written since is left alone."""
    unguard(tape)
    for counter, version in reversed(_counted.pop(tape, ())):
        if counter._version == version:
            with torch.no_grad():
                counter.sub_(1)
            torch._C._autograd._unsafe_set_version_counter((counter,), (version - 1,))


_Written = tuple[tuple[torch.Tensor, torch.Tensor], ...]


def _write_statistics(x: torch.Tensor, written: _Written) -> None:
    """Write the new running statistics of a batch norm of `x`, when the step ends if they are lazy.
    written: (buffer, value)."""
    module, code = module_of(written[0][0])
    for buffer, value in written:
        if _core.is_lazy(buffer):
            redispatch(aten.copy_.default, (buffer, value), {})
        elif not _core.is_lazy(value):
            write_real(aten.copy_.default, (buffer, value), {})
        elif not _core.context().explains:  # there a checkpoint's forward runs once more
            _core.effect(value, buffer)
            if module is not None and buffer is written[0][0]:
                if not _core.is_planning():
                    guard(module, _core.tape_of(value))
                if code in _COUNTING:
                    _remember_count(module, value)
    mean = written[0][1]
    if x.size(0) == 1 and module is None and _core.is_lazy(mean):
        # perhaps instance_norm, whose statistics are temporaries that it reads at once
        _core.run(_core.tape_of(mean), [value for _, value in written], True)


@special(
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_batch_norm_with_update",
    "cudnn_batch_norm",
    "miopen_batch_norm",
)
def _batch_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In training mode: the functional form; the new running statistics are written when the step
    ends, exactly once."""
    if func._schema.overload_name not in ("", "default") or kwargs:
        return _core.record(func, args, kwargs)
    name = func._schema.name.removeprefix("aten::")
    if name == "_batch_norm_with_update":
        x, weight, bias, mean, var, momentum, eps = args
        training = True
    else:
        x, weight, bias, mean, var, training, momentum, eps = args
    vendor = name in ("cudnn_batch_norm", "miopen_batch_norm")
    if vendor and (mean is None or not training):  # nothing is written: the native one as it is
        results = _core.record(aten.native_batch_norm.default, args, kwargs)
        return (*results, _no_workspace(x)) if name == "cudnn_batch_norm" else results
    if not training or mean is None or var is None:
        return _core.record(func, args, kwargs)
    out, saved_mean, saved_invstd, new_mean, new_var = _core.record(
        aten._native_batch_norm_legit_functional.default,
        (x, weight, bias, mean, var, True, momentum, eps),
        {},
    )
    _write_statistics(x, ((mean, new_mean), (var, new_var)))
    if name in ("_batch_norm_with_update", "cudnn_batch_norm"):
        return out, saved_mean, saved_invstd, _no_workspace(x)
    return out, saved_mean, saved_invstd


def _no_workspace(x: torch.Tensor) -> torch.Tensor:
    """A placeholder for the workspace of a backward kernel that is not used."""
    planned = _core.is_planning()  # perhaps for a device that is not here
    return torch.empty(0, dtype=torch.uint8, device="cpu" if planned else x.device)


@special("batch_norm_backward")
def _chosen_batch_norm_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """It chooses the kernel itself. On a GPU that is cuDNN's, which needs the workspace."""
    if not args[1].is_cuda or kwargs:
        return _core.record(func, args, kwargs)
    return _core.record(aten.native_batch_norm_backward.default, args[:10], {})


@special("cudnn_batch_norm_backward", "miopen_batch_norm_backward")
def _batch_norm_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record the native backward instead of a vendor's, which cannot be sliced. Both read the same
    saved mean and inverse deviation."""
    x, gradient, weight, mean, var, saved_mean, saved_invstd, eps = args[:8]
    return _core.record(
        aten.native_batch_norm_backward.default,
        (
            gradient,
            x,
            weight,
            mean,
            var,
            saved_mean,
            saved_invstd,
            True,
            eps,
            [True, weight is not None, weight is not None],
        ),
        {},
    )

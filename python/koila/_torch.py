"""The torch that koila runs on. A torch that is too old is refused; differences between versions
are tried out, not assumed."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

__all__ = ["torch"]
OLDEST = (2, 10)


def _version(text: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


try:
    import torch
except ImportError as e:  # pragma: no cover - needs an environment without torch
    raise ImportError(
        f"koila needs PyTorch {OLDEST[0]}.{OLDEST[1]} or newer, and there is none: pip install "
        "torch"
    ) from e

VERSION = _version(torch.__version__)
if VERSION < OLDEST:  # pragma: no cover - needs an old torch
    raise ImportError(
        f"koila needs PyTorch {OLDEST[0]}.{OLDEST[1]} or newer, this is {torch.__version__}: pip "
        "install -U torch"
    )


# Descriptors and a method that torch's annotations call plain values, or leave out. They are
# TensorBase's, because those of torch.Tensor itself are guarded, see _doors.py.
DATA: Any = torch._C.TensorBase.data
GRAD: Any = torch._C.TensorBase.grad


# These of torch.Tensor tell koila which memory was handed out, see _doors.py.
untyped_storage: Callable[[torch.Tensor], Any] = torch._C.TensorBase.untyped_storage
NUMPY: Any = torch._C.TensorBase.numpy


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """`tensor.data = data` by torch's own setter, which would hand it to modes of functions (a
    default device is one), and these to torch.Tensor's, which is guarded."""
    with torch._C.DisableTorchFunction():
        DATA.__set__(tensor, data)


# Held while something is set up that all threads use from then on.
SETTING_UP = threading.RLock()

# The number of a tensor's C++ owners.
use_count: Callable[[torch.Tensor], int] = torch._C.TensorBase._use_count  # type: ignore[attr-defined]

# torch's own backward: the function that `_backward.install()` replaces.
run_backward: Callable[..., Any] = torch.autograd.graph._engine_run_backward


def second_owner_adds_reference() -> bool:
    """Whether a second C++ owner of a tensor shows as one more Python reference to it.

    If so, a tensor with exactly one reference and several owners is kept by C++ alone (saved by
    autograd). Tried out, because it changed between versions.
    """
    with torch.inference_mode(False), torch.enable_grad():
        t = torch.ones(1, requires_grad=True)
        alone = torch.exp(t * 1)  # saved by autograd as its own output: no second owner
        before, owners = sys.getrefcount(alone), use_count(alone)
        keep = alone * t  # autograd saves `alone` for the gradient of t
        return (
            owners == 1
            and use_count(alone) == 2
            and sys.getrefcount(alone) == before + 1
            and keep is not None
        )


class ModesAside:
    """Takes the modes (TorchDispatchMode, TorchFunctionMode) off torch's stacks, until `back()`.
    Why: python/ext/run/modes.c. It is also a context."""

    __slots__ = ("_dispatch", "_functions")

    def __init__(self) -> None:
        functions = range(torch._C._len_torch_function_stack())
        self._functions = [torch._C._pop_torch_function_stack() for _ in functions]
        self._dispatch: Any = None
        if torch._C._len_torch_dispatch_stack():
            from torch.utils._python_dispatch import _disable_current_modes

            self._dispatch = _disable_current_modes()
            self._dispatch.__enter__()

    def back(self) -> None:
        if self._dispatch is not None:
            self._dispatch.__exit__(None, None, None)
        for mode in reversed(self._functions):
            torch._C._push_on_torch_function_stack(mode)
        self._dispatch, self._functions = None, []

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        self.back()


# What a thread dispatches to that is in no operator: koila is imported by one.
_KEYS = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def outside_operators() -> Any:
    """A context in which operators are dispatched as a program's are, also where koila runs within
    one that torch dispatched to it (`.item()`)."""
    return torch._C._ForceDispatchKeyGuard(*_KEYS)


_nothing = nullcontext()
_SEEN_ABOVE = tuple(
    getattr(torch._C.DispatchKey, k) for k in ("Conjugate", "Negative", "ZeroTensor")
)


def _bits(keys: Any) -> int:
    """The set of dispatch keys as a number; -1: this torch does not tell."""
    return int(keys.raw_repr()) if hasattr(keys, "raw_repr") else -1


def _seen_above() -> int:
    """Those of `_SEEN_ABOVE` as a number of `_bits()`."""
    bits = 0
    for key in _SEEN_ABOVE:
        bits |= _bits(torch._C.DispatchKeySet(key))
    return bits


_SEEN_ABOVE_BITS = _seen_above()
_excluded: Callable[[], Any] = torch._C._dispatch_tls_local_exclude_set


def view_flags() -> AbstractContextManager[Any]:
    """A context, not yet entered, in which conjugate and negative views are resolved inside
    `__torch_dispatch__` too. Each is a flag on the tensor, which torch resolves above and ignores
    inside. Torch's own context, in C: a guard that Ctrl-C keeps from ending in its turn puts back
    another time's state."""
    rest = _excluded()
    if not _bits(rest) & _SEEN_ABOVE_BITS:
        return _nothing
    ignored = [k for k in _SEEN_ABOVE if rest.has(k)]
    if not ignored:
        return _nothing
    for k in ignored:
        rest = rest.remove(k)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), rest)


def counting_writes() -> AbstractContextManager[Any]:
    """A context, not yet entered, in which writes count versions, and are refused to inference
    tensors, inside `__torch_dispatch__` too."""
    rest = _excluded().remove(torch._C.DispatchKey.ADInplaceOrView)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), rest)


class BelowAutograd:
    """Where recorded operators run: below autograd, with conjugate and negative views resolved, and
    under the guards that `more` make. Holds from construction until the object dies, both of which
    must lie in a shield (python/ext/ground/shield.c)."""

    __slots__ = ("_flags", "_guards")

    def __init__(self, *more: Callable[[], Any]) -> None:
        self._flags = view_flags()
        if self._flags is not _nothing:
            self._flags.__enter__()
        self._guards = [torch._C._AutoDispatchBelowAutograd()]
        for make in more:
            self._guards.append(make())

    def __del__(self) -> None:
        while self._guards:  # the last one first
            self._guards.pop()
        if self._flags is not _nothing:
            self._flags.__exit__(None, None, None)

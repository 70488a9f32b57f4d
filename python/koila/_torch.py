"""What koila knows about the torch it runs on: a polite refusal of a torch that is too old, and
facts that are learnt rather than assumed."""

from __future__ import annotations

import re
from collections.abc import Callable
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


# Descriptors and a method that torch's annotations call plain values, or leave out. TensorBase's:
# those of torch.Tensor itself are guarded, see _doors.py.
DATA: Any = torch._C.TensorBase.data
GRAD: Any = torch._C.TensorBase.grad
use_count: Callable[[torch.Tensor], int] = torch._C.TensorBase._use_count  # type: ignore[attr-defined]  # of C++ owners


def second_owner_adds_reference() -> bool:
    """Whether a second C++ owner of a tensor shows as one more Python reference to it.

    Then a tensor with exactly one reference and several owners is one that only C++ keeps (saved by
    autograd). Learnt, because it changed between versions.
    """
    import sys

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


_SEEN_ABOVE = tuple(
    getattr(torch._C.DispatchKey, k) for k in ("Conjugate", "Negative", "ZeroTensor")
)


class ViewFlags:
    """A conjugate or negative view is a flag on the tensor, which torch resolves above
    `__torch_dispatch__` and ignores inside it. Within this context it is resolved there too."""

    __slots__ = ("_guard",)

    def __enter__(self) -> None:
        ignored = [k for k in _SEEN_ABOVE if torch._C._dispatch_tls_local_exclude_set().has(k)]
        self._guard: Any = None
        if ignored:
            rest = torch._C._dispatch_tls_local_exclude_set()
            for k in ignored:
                rest = rest.remove(k)
            self._guard = torch._C._ForceDispatchKeyGuard(
                torch._C._dispatch_tls_local_include_set(), rest
            )
            self._guard.__enter__()

    def __exit__(self, *exception: object) -> None:
        if self._guard is not None:
            self._guard.__exit__(None, None, None)
            self._guard = None

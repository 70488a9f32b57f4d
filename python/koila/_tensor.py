"""The lazy tensor: a subclass of torch.Tensor whose operators are recorded in C
(``koila._core.dispatch``), with its own versions of the methods that never reach the dispatcher."""

from __future__ import annotations

import copy
import sys
from typing import Any

from ._torch import second_owner_adds_reference, torch, use_count
from . import _core
from ._errors import UnsupportedError


Tensor = torch.Tensor  # in the class below `torch` is its method


class LazyTensor(torch.Tensor):
    """A tensor of the full batch that is not computed yet. It is computed when Python needs its
    value.

    Example:
        >>> x = lazy(torch.ones(4, 2)) * 3
        >>> x.shape, isinstance(x, torch.Tensor)
        (torch.Size([4, 2]), True)
        >>> x.sum().item()
        24.0
    """

    __slots__ = ("_v",)
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    __torch_dispatch__ = _core.dispatch  # type: ignore[assignment]

    # -- becoming concrete

    def torch(self) -> torch.Tensor:
        """The plain tensor. Differentiable: gradients flow from it into the lazy graph."""
        if self.requires_grad and torch.is_grad_enabled():
            differentiable: Tensor = _Concrete.apply(self)  # type: ignore[no-untyped-call]
            return differentiable
        return plain(self)

    run = torch

    # torch.tensor([x.sum(), ...]) converts its items with the dispatcher switched off, so these
    # five do not go through the dispatcher.
    def __float__(self) -> float:
        return float(values_of(self))

    def __int__(self) -> int:
        return int(values_of(self))

    def __index__(self) -> int:
        return values_of(self).__index__()

    def __bool__(self) -> bool:
        return bool(values_of(self))

    def __complex__(self) -> complex:
        return complex(values_of(self))

    def numpy(self, *, force: bool = False) -> Any:
        _core.settle(self)
        if self.requires_grad and not force and torch.is_grad_enabled():
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() "
                "instead."
            )
        return values_of(self).numpy(force=force)

    def tolist(self) -> Any:
        return values_of(self).tolist()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        _core.settle(self)
        if self.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() "
                "instead."
            )
        return values_of(self).__array__(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        text = repr(plain(self))
        if self.grad_fn is not None:
            suffix = f"grad_fn=<{type(self.grad_fn).__name__}>"
        elif self.requires_grad:
            suffix = "requires_grad=True"
        else:
            return text
        text = text[:-1]  # one more suffix, by torch's rule for breaking the line
        last_line = len(text) - text.rfind("\n") + 1
        full = last_line + len(suffix) + 2 > torch._tensor_str.PRINT_OPTS.linewidth
        return f"{text},\n{' ' * len('tensor(')}{suffix})" if full else f"{text}, {suffix})"

    def __str__(self) -> str:
        return repr(self)

    def __format__(self, spec: str) -> str:
        if self.dim() == 0:
            return format(plain(self), spec)
        return object.__format__(repr(self), spec) if spec else repr(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _with_grad_flag(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if not self.is_leaf:
            super().__deepcopy__(memo)  # type: ignore[no-untyped-call] # raises as eager does
        return copy.deepcopy(_with_grad_flag(self), memo)

    def __dlpack__(self, **kwargs: Any) -> Any:
        _core.settle(self)
        return self.torch().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return plain(self).__dlpack_device__()

    def as_subclass(self, cls: type) -> Any:
        _core.settle(self)
        return self.torch().as_subclass(cls)

    # -- methods that need memory: only a tensor made by torch.zeros and its like can still get it,
    # see Note [Settling] in factories.c

    def data_ptr(self) -> int:
        return _with_memory(self, "data_ptr()").data_ptr()

    def share_memory_(self) -> Any:
        _with_memory(self, "share_memory_()").share_memory_()
        return self

    def fill_diagonal_(self, fill_value: Any, wrap: bool = False) -> Any:
        """Write a square matrix by index, one entry of each row, which can be sliced. Torch's own
        method writes through a view that spans the rows."""
        if (
            self.dim() != 2
            or self.size(0) != self.size(1)
            or not self.is_contiguous()
            or not isinstance(fill_value, (bool, int, float))
        ):
            return super().fill_diagonal_(fill_value, wrap)
        i = torch.arange(self.size(0))
        self[i, i] = fill_value
        return self

    def apply_(self, *args: Any) -> Any:
        _with_memory(self, "apply_()", "f").apply_(*args)
        return self

    def map_(self, *args: Any) -> Any:
        _with_memory(self, "map_()", "y, f").map_(*map(_plain_tensor, args))
        return self

    def map2_(self, *args: Any) -> Any:
        _with_memory(self, "map2_()", "y, z, f").map2_(*map(_plain_tensor, args))
        return self

    def untyped_storage(self) -> Any:
        return _with_memory(self, "untyped_storage()").untyped_storage()

    def storage(self) -> Any:
        return _with_memory(self, "storage()").storage()

    _typed_storage = storage

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        # a plain leaf gets a plain .grad; the attribute `is_leaf` is a look, see _layout.py
        if requires_grad and torch.ops.aten.is_leaf(self):
            _core.settle(self)
        return torch._C.TensorBase.requires_grad_(self, requires_grad)

    # A conjugate view is a flag of a plain tensor, which a wrapper lacks. A program that resolves
    # the view and then writes must not write into its base.

    def is_conj(self) -> bool:
        return _core.is_conjugated(self) or super().is_conj()

    def resolve_conj(self) -> Any:
        return self.clone() if _core.is_conjugated(self) else super().resolve_conj()

    def is_shared(self) -> bool:
        return self.is_cuda or (_core.settled(self) is not None and plain(self).is_shared())

    def pin_memory(self, *args: Any) -> Any:
        return plain(self).pin_memory(*args) if _core.settled(self) is not None else self

    def is_pinned(self, *args: Any) -> bool:
        return False

    def new(self, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return torch.empty(0, dtype=self.dtype, device=self.device).new(*args, **kwargs)

    def new_tensor(  # type: ignore[override]
        self,
        data: Any,
        *,
        dtype: Any = None,
        device: Any = None,
        requires_grad: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        return torch.empty(0, dtype=self.dtype, device=self.device).new_tensor(
            data, dtype=dtype, device=device, requires_grad=requires_grad, **kwargs
        )


class _Concrete(torch.autograd.Function):
    """The identity from a lazy tensor to the plain one."""

    @staticmethod
    def forward(ctx: Any, lazy: torch.Tensor) -> torch.Tensor:
        _core.has_exit(lazy)
        return plain(lazy).detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def plain(x: torch.Tensor) -> torch.Tensor:
    """The concrete tensor of `x`, without autograd; a plain tensor is returned unchanged."""
    if not isinstance(x, LazyTensor):
        return x
    settled = _core.settled(x)
    return _core.concrete(x) if settled is None else settled


_CPU = torch.device("cpu")


def values_of(x: torch.Tensor) -> torch.Tensor:
    """A tensor of the values of `x`, without autograd: the concrete one. On the `meta` device,
    where a step is planned, positions and masks whose values are known are computed on the CPU."""
    return _core.values_on(x, _CPU) if x.is_meta and _core.is_lazy(x) else plain(x)


def _plain_tensor(x: Any) -> Any:
    return plain(x) if isinstance(x, torch.Tensor) else x


def _with_memory(x: torch.Tensor, what: str, args: str = "") -> torch.Tensor:
    if _core.settle(x):
        return plain(x)
    raise UnsupportedError(
        f"{what} of a lazy tensor: it has no memory yet. Use x.torch().{what[:-1]}{args})"
    )


def _with_grad_flag(x: LazyTensor) -> torch.Tensor:
    _core.settle(x)  # so that copies of two views of one memory share memory too
    t = plain(x)
    return t.detach().requires_grad_() if x.requires_grad else t


_core.setup(LazyTensor, second_owner_adds_reference())


def learn_wrappers() -> bool:
    """Tell C where a tensor holds its dispatch keys. True if the quick construction of a LazyTensor
    (wrapper.c) gives exactly the tensor of `_make_wrapper_subclass`."""

    def keys(t: torch.Tensor) -> int:
        return int(torch._C._dispatch_keys(t).raw_repr())

    def facts(t: torch.Tensor) -> tuple[Any, ...]:
        return (
            type(t),
            t.dtype,
            t.device,
            t.layout,
            t.size(),
            t.stride(),
            t.storage_offset(),
            keys(t),
            t.requires_grad,
            t._version,
            use_count(t),
            sys.getrefcount(t),
        )

    def throws(t: torch.Tensor) -> bool:
        try:
            torch._C.TensorBase.data_ptr(t)
        except RuntimeError:
            return True
        return False

    meta = torch.float32, torch.device("cpu"), (2, 3), (1, 2), 5
    with torch.inference_mode(False):
        known, made = _core.wrapper_pair(meta)
        if (
            made is None
            or not hasattr(torch._C._dispatch_keys(known), "raw_repr")
            or not _core.learn_keys(known, keys(known), made, keys(made))
        ):
            return False
        known, made = _core.wrapper_pair(meta)
        return made is not None and facts(known) == facts(made) and throws(made)


_core.wrap_by_parts(learn_wrappers())

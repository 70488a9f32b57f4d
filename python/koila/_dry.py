"""Recording a step that will not run: its writes are undone, and a missing GPU is simulated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from . import _backward, _core


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
        TorchDispatchMode.__enter__(self)
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func is torch.ops.aten._to_copy.default
            and args[0].requires_grad
            and args[0].dtype is torch.float32
            and not _core.is_lazy(args[0])
        ):
            self.casts_parameters |= kwargs.get("dtype") in (torch.float16, torch.bfloat16)
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
        torch.set_rng_state(self._random)


_autocast: Any = torch.autocast  # whose methods are exchanged for a while


class AsOnCuda(TorchFunctionMode):
    """While a step is recorded for a GPU on a torch without one: moves to CUDA move nothing, and
    `torch.autocast("cuda")`, which would do nothing, casts as it does there.

    The CPU's autocast is turned on in its place (matrix products, convolutions and attention in
    half precision; a weight's cast is made once and lives until the outermost autocast ends), and
    what CUDA runs in float32, and a CPU does not, gets float32. Meta tensors have no autocast of
    their own: for them the mode casts, by the same lists."""

    _float32 = frozenset(
        "acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss "
        "cosine_similarity cross_entropy cumprod cumsum dist erfinv exp expm1 group_norm"
        " hinge_embedding_loss kl_div l1_loss layer_norm log log10 log1p log2 log_softmax "
        "margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss"
        " native_layer_norm nll_loss norm pdist poisson_nll_loss pow __pow__ __rpow__ prod "
        "reciprocal __rdiv__ renorm rms_norm rsqrt sinh smooth_l1_loss"
        " soft_margin_loss softmax softmin softplus sum tan triplet_margin_loss".split()
    )
    _half = frozenset(
        "conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d prelu "
        "addmm addmv addr matmul __matmul__ __rmatmul__ einsum mm mv linear addbmm"
        " baddbmm bmm chain_matmul multi_dot vecdot lstm gru rnn_tanh rnn_relu lstm_cell "
        "gru_cell rnn_tanh_cell rnn_relu_cell multi_head_attention_forward"
        " scaled_dot_product_attention".split()
    )
    _widest = frozenset(
        "addcdiv addcmul atan2 bilinear cross dot grid_sample index_put scatter_add tensordot "
        "cat stack".split()
    )

    def __init__(self, home: torch.device) -> None:
        super().__init__()
        self._home = home  # where tensors "moved" to CUDA stay
        self._moves = not torch.cuda.is_available()
        self.casts_parameters = False

    def __enter__(self) -> AsOnCuda:
        # The number of open CUDA autocasts. A backward counts as one: a checkpoint runs its forward
        # again there, under the CPU's autocast.
        self._depth = 0
        self._casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._plain = init, enter, leave = (
            _autocast.__init__,
            _autocast.__enter__,
            _autocast.__exit__,
        )
        mode = self

        def __init__(
            this: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any
        ) -> None:
            this._koila_for_cuda = device_type == "cuda"
            if this._koila_for_cuda:
                device_type, dtype = (
                    "cpu",
                    torch.get_autocast_dtype("cuda") if dtype is None else dtype,
                )
            init(this, device_type, dtype, *args, **kwargs)

        def __enter__(this: Any) -> Any:
            mode._depth += getattr(this, "_koila_for_cuda", False)
            return enter(this)

        def __exit__(this: Any, *exc: Any) -> Any:
            mode._depth -= getattr(this, "_koila_for_cuda", False)
            if not mode._depth:
                mode._casts.clear()
            return leave(this, *exc)

        _autocast.__init__, _autocast.__enter__, _autocast.__exit__ = __init__, __enter__, __exit__
        self._plain_engine, _backward._original = _backward._original, self._engine
        TorchFunctionMode.__enter__(self)
        return self

    def __exit__(self, *exc: Any) -> None:
        TorchFunctionMode.__exit__(self, *exc)
        self._casts.clear()
        _backward._original = self._plain_engine
        _autocast.__init__, _autocast.__enter__, _autocast.__exit__ = self._plain

    def _narrow(self, x: Any) -> Any:
        """Cast a meta tensor to half precision; the cast of a parameter is made once."""
        if not (
            isinstance(x, torch.Tensor) and x.device.type == "meta" and x.dtype is torch.float32
        ):
            return x
        dtype = torch.get_autocast_dtype("cpu")
        if not (x.is_leaf and x.requires_grad) or _core.is_lazy(x):
            return x.to(dtype)
        self.casts_parameters = True
        if id(x) not in self._casts:
            self._casts[id(x)] = (x, x.to(dtype))
        return self._casts[id(x)][1]

    def _engine(self, *args: Any, **kwargs: Any) -> Any:
        """Enter the mode once more for a backward. A mode is off inside the functions it handles,
        but the forward that a checkpoint runs again there must be cast too."""
        self._depth += 1
        TorchFunctionMode.__enter__(self)
        try:
            return self._plain_engine(*args, **kwargs)
        finally:
            TorchFunctionMode.__exit__(self, None, None, None)
            self._depth -= 1
            if not self._depth:
                self._casts.clear()

    def _stay(self, x: Any) -> Any:
        """Replace a CUDA device by the device on which the step is recorded."""
        if isinstance(x, torch.device):
            return self._home if x.type == "cuda" else x
        return self._home if isinstance(x, str) and x.split(":")[0] == "cuda" else x

    def _cast_of(self, name: str, args: Any, kwargs: Any) -> Callable[[Any], Any] | None:
        """The cast that CUDA's autocast applies to the arguments of a function, or None."""
        if name in self._float32:
            return _widen_half
        if name in self._half:
            return self._narrow
        if name in self._widest and any(
            t.device.type == "meta" and t.dtype is torch.float32
            for t in tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        ):
            return _widen_meta
        return None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self._moves:
            if name in ("cuda", "pin_memory") and args and isinstance(args[0], torch.Tensor):
                return args[0]
            if name == "to" and len(args) > 1 and type(args[1]) is int:  # the number of a GPU
                args = (args[0], self._home, *args[2:])
            if name == "to" or "device" in kwargs:
                args = tuple(self._stay(a) for a in args)
                kwargs = {k: self._stay(v) for k, v in kwargs.items()}
        if self._depth and torch.is_autocast_enabled("cpu"):
            cast = self._cast_of(name, args, kwargs)
            if cast is not None:
                args, kwargs = tree_map(cast, args), tree_map(cast, kwargs)
        return func(*args, **kwargs)


def _widen_half(x: Any) -> Any:
    half = isinstance(x, torch.Tensor) and x.dtype in (torch.float16, torch.bfloat16)
    return x.float() if half else x


def _widen_meta(x: Any) -> Any:
    if isinstance(x, torch.Tensor) and x.device.type == "meta" and x.is_floating_point():
        return x.float()
    return x

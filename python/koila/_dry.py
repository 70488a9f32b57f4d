"""Recording a step for a GPU that is not here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from . import _backward, _core


_plain_attention: Any = functional.scaled_dot_product_attention


class Attention:
    """`scaled_dot_product_attention` as a CUDA device runs it: the fused operator of the back end
    that torch chooses there (sdp_utils.cpp), where this machine would write it out."""

    HOPPER, BLACKWELL, AMPERE = 90, 100, 80
    CUDNN_SINCE, CUDNN_HEAD, FLASH_HEAD = 91501, 128, 256

    def __init__(self, capability: int, cudnn: int, back_end: str) -> None:
        """cudnn: its version, 0 when cuDNN comes last. back_end: as in `plan(sdpa=)`."""
        self._back_end = back_end
        self._has_flash = capability >= self.AMPERE
        self._has_cudnn = capability in (self.HOPPER, self.BLACKWELL) and cudnn >= self.CUDNN_SINCE

    def _chosen(self, q: torch.Tensor, mask: torch.Tensor | None, dropout: float) -> str:
        head = q.shape[-1]
        if self._back_end != "auto":
            return self._back_end
        if q.dtype not in (torch.float16, torch.bfloat16):
            return "efficient" if q.dtype is torch.float32 else "math"
        if self._has_cudnn and not dropout and head <= self.CUDNN_HEAD and head % 8 == 0:
            return "cudnn"
        if self._has_flash and mask is None and head <= self.FLASH_HEAD and head % 8 == 0:
            return "flash"
        return "efficient"

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        q, k, v, mask = query, key, value, attn_mask
        kind = self._chosen(q, mask, dropout_p) if q.ndim == 4 else "math"
        narrow = q.dtype in (torch.float16, torch.bfloat16)
        if (
            kind == "math"
            or not _core.is_lazy(q)
            or not q.dtype == k.dtype == v.dtype
            or (mask is not None and (mask.requires_grad or kind == "flash"))
            or (kind in ("flash", "cudnn") and not narrow)
        ):
            return _plain_attention(
                q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa and kind != "flash":
            k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
            v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        if kind == "flash":
            return torch.ops.aten._scaled_dot_product_flash_attention(
                q, k, v, dropout_p, is_causal, False, scale=scale
            )[0]
        if mask is not None:
            if mask.dtype is torch.bool:
                mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
            mask = mask.to(q.dtype).expand(*q.shape[:2], q.shape[2], k.shape[2])
        if kind == "cudnn":
            return torch.ops.aten._scaled_dot_product_cudnn_attention(
                q, k, v, mask, True, dropout_p, is_causal, False, scale=scale
            )[0]
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, mask, True, dropout_p, is_causal, scale=scale
        )[0]


class _Here(threading.local):
    mode: AsOnCuda | None = None  # that this thread is in


_here = _Here()


def _attention_here(*args: Any, **kwargs: Any) -> Any:
    mode = _here.mode
    chosen = None if mode is None else mode._attention
    return (chosen or _plain_attention)(*args, **kwargs)


class _Exchange:
    """Functions of torch that no mode sees are exchanged while any thread is in an `AsOnCuda`. In
    all other threads what stands in their place calls them as they were called."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_users = 0

    def begin(self) -> None:
        with self._lock:
            self._n_users += 1
            if self._n_users == 1:
                self._exchange()

    def end(self) -> None:
        with self._lock:
            self._n_users -= 1
            if self._n_users == 0:
                functional.scaled_dot_product_attention = _plain_attention
                _autocast.__init__, _autocast.__enter__, _autocast.__exit__ = self._plain

    def _exchange(self) -> None:
        self._plain = init, enter, leave = (
            _autocast.__init__,
            _autocast.__enter__,
            _autocast.__exit__,
        )

        def __init__(this: Any, *args: Any, **kwargs: Any) -> None:
            mode = _here.mode
            if mode is None:
                init(this, *args, **kwargs)
            else:
                mode.autocast_init(init, this, *args, **kwargs)

        def __enter__(this: Any) -> Any:
            if _here.mode is not None:
                _here.mode.depth += getattr(this, "_koila_for_cuda", False)
            return enter(this)

        def __exit__(this: Any, *exc: Any) -> Any:
            if _here.mode is not None:
                _here.mode.depth -= getattr(this, "_koila_for_cuda", False)
            return leave(this, *exc)

        _autocast.__init__, _autocast.__enter__, _autocast.__exit__ = __init__, __enter__, __exit__
        # also where functions of torch call it, inside which no mode is on
        functional.scaled_dot_product_attention = _attention_here


_autocast: Any = torch.autocast  # whose methods are exchanged for a while
_exchange = _Exchange()


class AsOnCuda(TorchFunctionMode):
    """While a step is recorded for a GPU on a torch without one: moves to CUDA move nothing, and
    `torch.autocast("cuda")`, which would do nothing, casts as it does there.

    The CPU's autocast is turned on in its place (matrix products, convolutions and attention in
    half precision; a weight's cast is made once and lives until the outermost autocast ends), and
    what CUDA runs in float32, and a CPU does not, gets float32. Meta tensors have no autocast of
    their own: for them the mode casts, by the same lists."""

    _float32 = frozenset(
        "acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss "
        "cosine_similarity cumprod cumsum dist erfinv exp expm1 group_norm"
        " hinge_embedding_loss kl_div l1_loss layer_norm log log10 log1p log2 log_softmax "
        "margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss"
        " native_layer_norm nll_loss norm pdist poisson_nll_loss pow __pow__ __rpow__ prod "
        "reciprocal __rdiv__ renorm rms_norm rsqrt sinh smooth_l1_loss square"
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

    def __init__(self, home: torch.device, attention: Attention | None) -> None:
        """attention: how the device chooses; None: attention stays as it is recorded here."""
        super().__init__()
        self._home = home  # where tensors "moved" to CUDA stay
        self._attention = attention
        self._moves = not torch.cuda.is_available()
        self.casts_parameters = False

    def __enter__(self) -> AsOnCuda:
        # The number of open CUDA autocasts. A backward counts as one: a checkpoint runs its forward
        # again there, under the CPU's autocast.
        self.depth = 0
        self._casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._depth_here = _backward.depth_of(_core.context())
        self._plain_engine, self._depth_here.engine = self._depth_here.engine, self._engine
        _exchange.begin()
        self._outer, _here.mode = _here.mode, self
        TorchFunctionMode.__enter__(self)
        return self

    def __exit__(self, *exc: Any) -> None:
        TorchFunctionMode.__exit__(self, *exc)
        _here.mode = self._outer
        _exchange.end()
        self._casts.clear()
        self._depth_here.engine = self._plain_engine

    def autocast_init(
        self, init: Any, this: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        """What `torch.autocast(device_type, ...)` does here. init: torch's own."""
        this._koila_for_cuda = device_type == "cuda"
        if this._koila_for_cuda:
            device_type = "cpu"
            dtype = torch.get_autocast_dtype("cuda") if dtype is None else dtype
        init(this, device_type, dtype, *args, **kwargs)

    def _narrow(self, x: Any) -> Any:
        """Cast a meta tensor to half precision. A plain tensor, such as a parameter, is cast once:
        what a checkpoint casts again is the same leaf (`src/predict/plain.c`)."""
        if not (
            isinstance(x, torch.Tensor) and x.device.type == "meta" and x.dtype is torch.float32
        ):
            return x
        dtype = torch.get_autocast_dtype("cpu")
        if _core.is_lazy(x):
            return x.to(dtype)
        self.casts_parameters |= x.is_leaf and x.requires_grad
        if id(x) not in self._casts:
            self._casts[id(x)] = (x, x.to(dtype))
        return self._casts[id(x)][1]

    def _engine(self, *args: Any, **kwargs: Any) -> Any:
        """Enter the mode once more for a backward. A mode is off inside the functions it handles,
        but the forward that a checkpoint runs again there must be cast too."""
        self.depth += 1
        TorchFunctionMode.__enter__(self)
        try:
            return self._plain_engine(*args, **kwargs)
        finally:
            TorchFunctionMode.__exit__(self, None, None, None)
            self.depth -= 1

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
        if self.depth and torch.is_autocast_enabled("cpu"):
            if func is functional.cross_entropy:
                return _cross_entropy(*args, **kwargs)
            cast = self._cast_of(name, args, kwargs)
            if cast is not None:
                args, kwargs = tree_map(_once(cast), (args, kwargs))
        if func is _plain_attention and self._attention is not None:
            func = self._attention
        return func(*args, **kwargs)


def _cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """As under CUDA's autocast: log_softmax, which is told its dtype, stays in half precision
    (cross_entropy_loss in LossNLL.cpp), and nll_loss runs in float32."""
    narrow = input.dtype in (torch.float16, torch.bfloat16)
    if not narrow or label_smoothing or target.dtype.is_floating_point:
        return functional.cross_entropy(
            input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )
    logs = functional.log_softmax(input, 1 if input.ndim > 1 else 0, dtype=input.dtype).float()
    return functional.nll_loss(logs, target, weight, size_average, ignore_index, reduce, reduction)


def _once(cast: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The cast that gives one result for one tensor: attention asks whether query is key."""
    made: dict[int, Any] = {}

    def memo(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return cast(x)
        if id(x) not in made:
            made[id(x)] = cast(x)
        return made[id(x)]

    return memo


def _widen_half(x: Any) -> Any:
    half = isinstance(x, torch.Tensor) and x.dtype in (torch.float16, torch.bfloat16)
    return x.float() if half else x


def _widen_meta(x: Any) -> Any:
    if isinstance(x, torch.Tensor) and x.device.type == "meta" and x.is_floating_point():
        return x.float()
    return x

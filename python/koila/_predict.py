"""Know before you run: `plan()` a step without computing anything, on this machine's memory or on a
GPU that is not here; `measure_device()`."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils._pytree import tree_map as pytree_map

from . import _backward, _core, _cuda
from ._budget import _Amount, _bytes, readable
from ._errors import UnsupportedError
from ._lazy import describe, lazy, tree_map
from ._plan import Plan


class Prediction(Plan):
    """A plan that was never run. With `device=`: `prediction` holds, in bytes, (low, expected,
    high) of `allocated`, `reserved` and `device` for the first and the steady step, `fits`,
    `spare_bytes`, `notes` (every assumption) and `not_modelled` (operators whose inner memory is
    not known)."""

    def __init__(self, raw: dict[str, Any], prediction: dict[str, Any] | None) -> None:
        super().__init__(raw)
        self.prediction = prediction

    @property
    def fits(self) -> bool:
        """Whether the step fits: on the device its high end, in every step; else the budget."""
        if self.prediction is not None:
            return bool(self.prediction["fits"])
        return self.budget_bytes is None or self.predicted_peak_bytes <= self.budget_bytes

    def __str__(self) -> str:
        text = super().__str__()
        if self.prediction is None:
            return text
        p = self.prediction
        lines = [
            text,
            "",
            f"on {p['device']}, {readable(p['memory_bytes'])}: "
            f"{'fits, ' + readable(p['spare_bytes']) + ' to spare' if p['fits'] else 'does not fit'}",
        ]
        for what in ("allocated", "reserved", "device"):
            low, expected, high = p["steady"][what]
            lines.append(
                f"  {what:<9}  {readable(expected)}   ({readable(low)} .. {readable(high)})"
            )
        return "\n".join(lines)


class UndoWrites(TorchDispatchMode):
    """What a step that is only planned (or explained) writes into plain tensors (a batch norm's
    counter, a logged mean) is put back, and so is the CPU's random state. With the contents the
    version: a step that is open may have recorded, or saved for its backward, the tensor as it
    is."""

    def __enter__(self) -> UndoWrites:
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor, int | None]] = {}
        # autocast made a half-precision copy of a float32 parameter, which is what the recording
        # then sees
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


class _AsOnCuda(TorchFunctionMode):
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
        self._home = home  # where what is "moved" to CUDA stays
        self._moves = not torch.cuda.is_available()
        self.casts_parameters = False

    def __enter__(self) -> _AsOnCuda:
        # CUDA autocasts that are open; a backward counts as one: what a checkpoint runs again there
        # is under the CPU's, which stood in for it
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
        """A meta tensor's cast; a parameter's is made once."""
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
        """A mode is not asked inside a function that it was asked about, such as backward(); what a
        checkpoint runs again there has to be cast all the same."""
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
        return (
            self._home
            if (isinstance(x, torch.device) and x.type == "cuda")
            or (isinstance(x, str) and x.split(":")[0] == "cuda")
            else x
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self._moves:
            if name in ("cuda", "pin_memory") and args and isinstance(args[0], torch.Tensor):
                return args[0]
            if (
                name == "to"
                and len(args) > 1
                and isinstance(args[1], int)
                and not isinstance(args[1], bool)
            ):
                args = (args[0], self._home, *args[2:])
            if name == "to" or "device" in kwargs:
                args, kwargs = (
                    tuple(self._stay(a) for a in args),
                    {k: self._stay(v) for k, v in kwargs.items()},
                )
        if self._depth and torch.is_autocast_enabled("cpu"):
            cast = None
            if name in self._float32:

                def cast(x: Any) -> Any:
                    return (
                        x.float()
                        if isinstance(x, torch.Tensor)
                        and x.dtype in (torch.float16, torch.bfloat16)
                        else x
                    )

            elif name in self._half:
                cast = self._narrow
            elif name in self._widest and any(
                t.device.type == "meta" and t.dtype is torch.float32
                for t in tree_leaves((args, kwargs))
                if isinstance(t, torch.Tensor)
            ):

                def cast(x: Any) -> Any:
                    return (
                        x.float()
                        if isinstance(x, torch.Tensor)
                        and x.device.type == "meta"
                        and x.is_floating_point()
                        else x
                    )

            if cast is not None:
                args, kwargs = pytree_map(cast, args), pytree_map(cast, kwargs)
        return func(*args, **kwargs)


def plan(
    step: Callable[..., Any],
    *inputs: Any,
    batch: Any = 0,
    budget: _Amount = None,
    device: str | os.PathLike[str] | torch.device | None = None,
    micro_batch: int | None = None,
    optimizer: str = "none",
    optimizer_way: str = "foreach",
    weight_decay: bool = False,
    amsgrad: bool = False,
    clip_grad_norm: bool = False,
    ddp: bool = False,
    grad_scaler: bool = False,
    sdpa: str = "auto",
    conf: str | None = None,
) -> Prediction:
    """What a step will need, computing nothing: the step is recorded on shapes and planned.

    step: called with the inputs made lazy; runs forward and backward, or returns the loss (backward
    is then called on it). It must not read values.
    inputs: tensors, as for `lazy(..., batch=batch)`; their contents are not looked at, and tensors
    and model may be on the `meta` device.
    budget: bytes or a word such as "24GiB" that the step may use, with what it reads (parameters,
    buffers, the batch: `base_bytes`; a batch on `meta` stands for its
        shape alone) and the gradients; `None`: no limit, or the device's memory.
    device: a GPU by name ("h100-80gb"; an unknown name lists the nearest), the path of a profile
    written by `measure_device`, or "cuda", "cuda:1": the one that is
        here, as it is now. `None`, "cpu": the sum of live bytes, as on a CPU.
    micro_batch: force the rows of a slice. optimizer, optimizer_way: "none", "sgd", "momentum",
    "adam", "adamw"; "foreach", "fused", "loop":
        the optimizer's own state and temporaries, which a recorded step does not show; so do
        weight_decay and amsgrad, whether gradients are clipped by `clip_grad_norm_`, whether the
        model is wrapped in DistributedDataParallel (its buckets), and whether a `GradScaler` is
        used. sdpa: attention's back end, "auto", "flash", "efficient", "math" or "cudnn". These
        count on a device only. `torch.autocast("cuda")` in the step casts as it does on CUDA, moves
        to CUDA move nothing; CUBLAS_WORKSPACE_CONFIG and TORCH_CUDNN_SDPA_DEPRIORITIZED count as
        they are set here, and so does PYTORCH_CUDA_ALLOC_CONF, unless conf gives other settings of
        the allocator: "expandable_segments:True".

    Returns: a `Prediction`. Parameters' `.grad` and all other state are as before.
    Raises: OutOfMemory when one row does not fit the budget; UnsupportedError when the step reads a
    value, and on a device when it runs a fully sharded module
        (FSDP), whose memory has not been measured; ValueError for an unknown device or setting.
    """
    profile = _profile_of(device)
    if micro_batch is not None and (
        isinstance(micro_batch, bool) or not isinstance(micro_batch, int) or micro_batch < 1
    ):
        raise ValueError(
            f"plan(micro_batch={micro_batch!r}): expected at least 1 row or None, got "
            f"{micro_batch!r}"
        )
    asked = (
        None
        if budget is None
        else _bytes(budget, torch.device("cpu"), f"plan(budget={budget!r})", here=False)
    )

    casts = False
    here = next(
        (t.device for t in tree_leaves(inputs) if isinstance(t, torch.Tensor)), torch.device("cpu")
    )

    def recorded(limit: int | None, rows: int | None) -> dict[str, Any]:
        _core.configure(budget=limit, micro_batch=rows)
        n_plans = _core.n_plans()
        nonlocal casts
        on_cuda = _AsOnCuda(here)
        with UndoWrites() as writes, contextlib.nullcontext() if profile is None else on_cuda:  # type: ignore[no-untyped-call]
            values = lazy(*inputs, batch=batch)
            result = step(*(values if isinstance(values, tuple) else (values,)))
            if isinstance(result, torch.Tensor) and _core.is_lazy(result):
                if result.requires_grad:
                    result.backward()  # type: ignore[no-untyped-call]
                else:
                    _core.run_all([result], False)
        casts = writes.casts_parameters or on_cuda.casts_parameters
        raw: dict[str, Any] | None = _core.last_plan()
        if raw is None or _core.n_plans() == n_plans:
            raise ValueError(
                "plan(): expected a step that returns its loss or calls backward on it, got one "
                "that does neither"
            )
        return raw

    inputs = tree_map(_plain_input, inputs)
    before, open_step = (
        _core.configure(dry=True, strict=False, fastest=False),
        _core.swap_open(None),
    )
    try:
        raw = recorded(asked, micro_batch)
        if profile is None:
            return Prediction(raw, None)
        allocator = (
            conf
            if conf is not None
            else os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF")
        )
        settings = (
            os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
            bool(os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED")),
            allocator,
            conf is not None,
            torch.__version__,
        )
        training = (
            optimizer,
            optimizer_way,
            sdpa,
            weight_decay,
            amsgrad,
            clip_grad_norm,
            ddp,
            casts,
            grad_scaler,
            *settings,
        )
        prediction = _core.predict(
            profile, asked or 0, micro_batch or -1, *training
        )  # -1: the most rows that fit
        raw = _core.last_plan() or raw  # the plan that was predicted
        return Prediction(raw, prediction)
    except UnsupportedError as e:
        if profile is None or "(FSDP)" not in str(e):
            raise
        raise UnsupportedError(
            "plan(device=...): the step runs a fully sharded module (FSDP). What its gathered "
            "parameters and reduced gradients need on a GPU has not been measured, so it is"
            " refused rather than guessed. Plan the model before it is sharded, or measure a "
            "step with torch.cuda.max_memory_reserved()"
        ) from e
    finally:
        _core.swap_open(open_step)
        _core.configure(**before)


def _profile_of(device: str | os.PathLike[str] | torch.device | None) -> str | None:
    """A built-in profile's name, or a profile as JSON; `None`: none is meant."""
    name = (
        "cpu"
        if device is None
        else str(device)
        if isinstance(device, torch.device)
        else os.fspath(device)
    )
    if os.path.exists(name):
        with open(name, encoding="utf-8") as f:
            return f.read()
    kind, _, index = name.lower().partition(":")
    if kind == "cpu":
        return None
    if kind != "cuda":
        return name.lower()
    if not torch.cuda.is_available():
        raise ValueError(
            f"plan(device={name!r}): there is no CUDA device here; name the GPU that is meant, "
            "for example 'h100-80gb', or a profile file"
        )
    return _cuda.profile_now(int(index) if index else torch.cuda.current_device())


def _plain_input(t: torch.Tensor, _dim: Any, where: str) -> torch.Tensor:
    """A batch that is lazy already belongs to a step of its own: the plan is made beside it, of the
    plain tensor."""
    if not _core.is_lazy(t):
        return t
    if not _core.is_concrete(t):
        raise ValueError(
            f"plan(): expected tensors, got a lazy value that is not computed yet, {describe(t)} "
            f"at inputs{where}. Pass a tensor of its shape instead: its contents are not looked at"
        )
    return _core.concrete(t)


def measure_device(path: str | os.PathLike[str], device: int = 0) -> dict[str, Any]:
    """Write the memory profile of this machine's GPU, for `plan(device=path)` and `koila plan --gpu
    path`. Takes under a minute.

    Measured in this process, best a fresh one: the CUDA context with the kernels of a small
    training step, cuBLAS's workspace, what cudaMemGetInfo reports.
    Returns: the profile. Raises: UnsupportedError without a CUDA device.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "measure_device(): there is no CUDA device here; plan(device=...) takes a built-in "
            "profile instead, for example 'h100-80gb'"
        )
    today = datetime.date.today().isoformat()
    with torch.cuda.device(device):
        properties = torch.cuda.get_device_properties(device)
        cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
        _, total = torch.cuda.mem_get_info()
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, padding=1),
            torch.nn.GroupNorm(2, 8),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(8 * 64, 8),
        ).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            torch.nn.functional.cross_entropy(
                model(torch.randn(4, 3, 8, 8, device="cuda")),
                torch.zeros(4, dtype=torch.long, device="cuda"),
            ).backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        cublas, clear = 0, getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if (
            clear is not None
        ):  # this thread's alone: whatever else has one, cuBLASLt or the backward thread, is given back before
            square = torch.ones(64, 64, device="cuda")
            clear()
            before = torch.cuda.memory_stats()["requested_bytes.all.current"]
            torch.mm(square, square)
            cublas = torch.cuda.memory_stats()["requested_bytes.all.current"] - before
            torch.cuda.synchronize()
            clear()
            del square
        del model, optimizer
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        context = max(0, total - free - torch.cuda.memory_reserved())

    def field(value: int, how: str = "measured", spread: int = 0) -> dict[str, Any]:
        return {"value": int(value), "how": how, "spread": int(spread), "date": today}

    profile = {
        "koila_device": 1,
        "name": properties.name,
        "fields": {
            "sm_count": field(properties.multi_processor_count),
            "compute_capability": field(10 * properties.major + properties.minor),
            "total_bytes": field(properties.total_memory),
            "info_total_bytes": field(total),
            "context_bytes": field(
                context, spread=32 << 20
            ),  # other processes on the card count as context
            **({"cudnn_version": field(cudnn)} if cudnn else {}),
            **({"cublas_workspace_bytes": field(cublas)} if cublas > 0 else {}),
        },
    }
    with open(path, "w", encoding="utf-8") as f:
        json.dump(profile, f, indent=2)
    return profile

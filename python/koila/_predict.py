"""`plan()`: the memory of a step without computing it, on this machine or on a GPU that is not
here. `measure_device()`: the profile of a present GPU."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from . import _core, _cuda, _pages
from ._budget import _Amount, _bytes, readable
from ._dry import AsOnCuda, Attention
from ._errors import UnsupportedError
from ._lazy import describe, lazy, tree_map
from ._plan import Plan, cut_in_words
from ._switch import refuse_when_off
from ._torch import VERSION
from ._undo import UndoWrites


class Prediction(Plan):
    """A plan that was never run. With `device=`: `prediction` holds, in bytes, (low, expected,
    high) of `allocated`, `reserved` and `device` for the `first` and the `steady` step, the same in
    `plain` for the whole batch in plain PyTorch, `fits`,
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

    def _answer(self) -> str:
        """The one number: the most that a step may need of the device. Needs a prediction."""
        p: dict[str, Any] = self.prediction or {}
        most = max(p[step]["device"][2] for step in ("first", "steady"))
        spare = f"fits, {readable(p['spare_bytes'])} to spare" if p["fits"] else "does not fit"
        return f"needs at most {readable(most)} of {readable(p['memory_bytes'])} on " + (
            f"{p['device']}: {spare}"
        )

    def _numbers(self) -> list[tuple[str, ...]]:
        p: dict[str, Any] = self.prediction or {}
        cases = {
            "later steps": p["steady"],
            "first step": p["first"],
            "plain PyTorch": p["plain"]["steady"],
        }
        rows: list[tuple[str, ...]] = []
        for name, peaks in cases.items():
            for what, meaning in _MEANINGS:
                low, expected, high = (readable(n) for n in peaks[what])
                is_new = len(rows) < len(_MEANINGS)
                first = name if what == _MEANINGS[0][0] else ""
                rows.append((first, what, expected, f"{low} .. {high}", meaning * is_new))
        return rows

    def __str__(self) -> str:
        text = super().__str__()
        if self.prediction is None:
            return text
        table = _pages.columns(_NUMBERS, self._numbers())
        return "\n".join([self._answer(), "", *table, "", text])

    def _body(self) -> list[str]:
        if self.prediction is None:
            return super()._body()
        table = _pages.table(_NUMBERS, self._numbers())
        notes = [_pages.note(text) for text in self.prediction["notes"]]
        answer = [_pages.heading(self._answer()), table, _pages.heading("how it is cut")]
        return [*answer, *super()._body(), _pages.heading("what was assumed"), *notes]

    def __repr__(self) -> str:
        return f"<koila.Prediction: {self._answer() if self.prediction else cut_in_words(self)}>"

    def to_dict(self) -> dict[str, Any]:
        """As `Plan.to_dict()`, with `fits` and `prediction`."""
        return {**super().to_dict(), "fits": self.fits, "prediction": self.prediction}


_NUMBERS = ("", "bytes", "expected", "from .. to", "what it is")
_MEANINGS = (
    ("allocated", "what tensors hold"),
    ("reserved", "what torch's allocator takes from the driver for that"),
    ("device", "with CUDA's context and libraries: what nvidia-smi shows"),
)


# Whole because half of it is the list of arguments, in the order in which they are documented.
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
    """Predict the memory of a step without computing it: the step is recorded on shapes and
    planned.

    step: called with the inputs made lazy; runs forward and backward, or returns the loss (backward
    is then called on it). It must not read values, but of whole numbers and truth values (is there
        padding?): these are computed.
    inputs: tensors, as for `lazy(..., batch=batch)`. Tensors and model may be on the `meta` device;
        where values of the batch are read, it is on the CPU and is moved there in the step.
    budget: bytes, or a text such as "24GiB", for the step, the tensors that it reads (parameters,
        buffers, the batch: `base_bytes`; a batch on `meta` stands for its shape alone) and the
        gradients; `None`: no limit, or the device's memory.
    device: a GPU by name ("h100-80gb"; an unknown name lists the nearest), the path of a profile
        written by `measure_device`, or "cuda", "cuda:1": the GPU that is here, as it is now.
        `None`, "cpu": the sum of live bytes, as on a CPU.
    micro_batch: force the rows of a slice.

    The rest counts on a device only, and names memory that a recorded step does not show:

    optimizer: "none", "sgd", "momentum", "adam", "adamw"; optimizer_way: "foreach", "fused",
        "loop"; weight_decay, amsgrad: the optimizer's state and temporaries.
    clip_grad_norm: gradients are clipped by `clip_grad_norm_`.
    ddp: the model is wrapped in DistributedDataParallel (its buckets).
    grad_scaler: a `GradScaler` is used.
    sdpa: attention's back end, "auto", "flash", "efficient", "math" or "cudnn".
    conf: the allocator's settings, "expandable_segments:True"; `None`: PYTORCH_CUDA_ALLOC_CONF.

    `torch.autocast("cuda")` in the step casts as it does on CUDA, and moves to CUDA move nothing.
    CUBLAS_WORKSPACE_CONFIG, CUBLASLT_WORKSPACE_SIZE, TORCH_CUBLAS_WORKSPACE_CACHE and
    TORCH_CUDNN_SDPA_DEPRIORITIZED count as they are set here.

    Returns: a `Prediction`. Parameters' `.grad` and all other state are as before.
    Raises: OutOfMemory when one row does not fit the budget; UnsupportedError when the step reads
        another value, and on a device when it runs a fully sharded module (FSDP), whose memory has
        not been measured; ValueError for an unknown device or setting.

    Example:
        >>> def step(x, y):
        ...     return F.cross_entropy(model(x), y)
        >>> plan(step, images, labels, device="h100-80gb", optimizer="adamw").fits
        True
    """
    refuse_when_off("plan()")
    if not callable(step):
        raise ValueError(f"plan(step): expected a function, got {type(step).__name__}")
    if not inputs:
        raise ValueError("plan(step): expected the step's batch after it, got no inputs")
    profile = _profile_of(device)
    if micro_batch is not None and (
        isinstance(micro_batch, bool) or not isinstance(micro_batch, int) or micro_batch < 1
    ):
        raise ValueError(
            f"plan(micro_batch={micro_batch!r}): expected at least 1 row or None, got "
            f"{micro_batch!r}"
        )
    user_budget = None
    if budget is not None:
        user_budget = _bytes(budget, torch.device("cpu"), f"plan(budget={budget!r})", here=False)
    inputs = tree_map(_plain_input, inputs)
    before = _core.configure(dry=True, strict=False, slices="fewest")
    open_step = _core.swap_open(None)
    try:
        _core.configure(budget=user_budget, micro_batch=micro_batch)
        attention = None if profile is None else _attention_of(profile, sdpa)
        raw, casts = _recorded(step, inputs, batch, attention)
        if profile is None:
            return Prediction(raw, None)
        allocator = conf
        if conf is None:
            allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
            allocator = allocator or os.environ.get("PYTORCH_ALLOC_CONF")
        prediction, raw = _core.predict(
            raw["number"],
            profile,
            memory=user_budget or 0,
            rows=micro_batch,  # None: the most that fit
            optimizer=optimizer,
            way=optimizer_way,
            sdpa=sdpa,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            clip_grad_norm=clip_grad_norm,
            ddp=ddp,
            autocast=casts,
            grad_scaler=grad_scaler,
            cublas_workspace=os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
            cublaslt_workspace=os.environ.get("CUBLASLT_WORKSPACE_SIZE"),
            keeps_cublas=os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1",
            cudnn_sdpa_last=bool(os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED")),
            conf=allocator,
            strict_conf=conf is not None,
            torch_version=torch.__version__,
        )
        return Prediction(raw, prediction)
    except UnsupportedError as e:
        if profile is None or "(FSDP)" not in str(e):
            raise
        raise UnsupportedError(_SHARDED) from e
    finally:
        _core.swap_open(open_step)
        _core.configure(**before)


_SHARDED = (
    "plan(device=...): the step runs a fully sharded module (FSDP). What its gathered parameters "
    "and reduced gradients need on a GPU has not been measured, so it is refused rather than "
    "guessed. Plan the model before it is sharded, or measure a step with "
    "torch.cuda.max_memory_reserved()"
)


def _recorded(
    step: Callable[..., Any], inputs: Any, batch: Any, attention: Attention | None
) -> tuple[dict[str, Any], bool]:
    """Record and plan a step on lazy inputs, computing nothing: its raw plan, and whether autocast
    casts parameters. attention: that of the GPU on which it would run; None: it runs here."""
    tensors = (t for t in tree_leaves(inputs) if isinstance(t, torch.Tensor))
    home = next((t.device for t in tensors), torch.device("cpu"))
    stand_in = AsOnCuda(home, attention)
    n_plans = _core.n_plans()
    with UndoWrites() as writes, stand_in if attention else contextlib.nullcontext():  # type: ignore[no-untyped-call]
        values = lazy(*inputs, batch=batch)
        result = step(*(values if isinstance(values, tuple) else (values,)))
        if isinstance(result, torch.Tensor) and _core.is_lazy(result):
            if result.requires_grad:
                result.backward()  # type: ignore[no-untyped-call]
            else:
                _core.run_all([result], False)
    if _core.n_plans() == n_plans:
        raise ValueError(
            "plan(): expected a step that returns its loss or calls backward on it, got one that "
            "does neither"
        )
    return _core.plans(1)[0], writes.casts_parameters or stand_in.casts_parameters


def _attention_of(profile: str, back_end: str) -> Attention:
    last = bool(os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED"))
    cudnn = 0 if last else _core.device_field(profile, "cudnn_version")
    return Attention(_core.device_field(profile, "compute_capability"), cudnn, back_end)


def _profile_of(device: str | os.PathLike[str] | torch.device | None) -> str | None:
    """A built-in profile's name, or a profile as JSON; `None`: none is meant."""
    if device is None:
        return None
    name = str(device) if isinstance(device, torch.device) else os.fspath(device)
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
    """The plain tensor of a batch that is lazy already: that batch belongs to another step, so the
    plan must not record on it."""
    if not _core.is_lazy(t):
        return t
    if not _core.is_concrete(t):
        raise ValueError(
            f"plan(): expected tensors, got a lazy value that is not computed yet, {describe(t)} "
            f"at inputs{where}. Pass a tensor of its shape instead: its contents are not looked at"
        )
    return _core.concrete(t)


_CONTEXT_SPREAD = 32 << 20  # bytes by which the context differs between processes


def _train_a_little() -> None:
    """A small training step, twice, which loads the kernels that most programs use."""
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


def _cublas_workspace() -> int:
    """Bytes of cuBLAS's workspace; 0: this torch cannot tell. Only this thread's is measured: the
    others (cuBLASLt's, the backward thread's) are given back before."""
    if VERSION >= (2, 15):  # each product gives it back
        return int(torch._C._cuda_getCublasWorkspaceSize())
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is None:
        return 0
    square = torch.ones(64, 64, device="cuda")
    clear()
    before = int(torch.cuda.memory_stats()["requested_bytes.all.current"])
    torch.mm(square, square)
    n_bytes = int(torch.cuda.memory_stats()["requested_bytes.all.current"]) - before
    torch.cuda.synchronize()
    clear()
    return n_bytes


def measure_device(path: str | os.PathLike[str], device: int = 0) -> dict[str, Any]:
    """Write the memory profile of this machine's GPU, for `plan(device=path)` and `koila plan --gpu
    path`. Takes under a minute.

    Measured in this process, best a fresh one: the CUDA context with the kernels of a small
    training step, cuBLAS's workspace, what cudaMemGetInfo reports.
    Returns: the profile. Raises: UnsupportedError without a CUDA device.

    Example:
        >>> if torch.cuda.is_available():
        ...     profile = measure_device("gpu.json")
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
        _train_a_little()
        cublas = _cublas_workspace()
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
            # other processes on the card count as context
            "context_bytes": field(context, spread=_CONTEXT_SPREAD),
            **({"cudnn_version": field(cudnn)} if cudnn else {}),
            **({"cublas_workspace_bytes": field(cublas)} if cublas > 0 else {}),
        },
    }
    with open(path, "w", encoding="utf-8") as f:
        json.dump(profile, f, indent=2)
    return profile

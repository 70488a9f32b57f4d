"""Know before you run: `plan()` a step without computing anything, on this machine's memory or on a GPU that is not here; `measure_device()`."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import _core
from ._budget import _bytes, readable
from ._errors import UnsupportedError
from ._lazy import lazy
from ._plan import Plan

class Prediction(Plan):
    """A plan that was never run. With `device=`: `prediction` holds, in bytes, (low, expected, high) of `allocated`, `reserved` and `device` for the first
    and the steady step, `fits`, `spare_bytes`, `notes` (every assumption) and `not_modelled` (operators whose inner memory is not known)."""

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
        lines = [text, "", f"on {p['device']}, {readable(p['memory_bytes'])}: {'fits, ' + readable(p['spare_bytes']) + ' to spare' if p['fits'] else 'does not fit'}"]
        for what in ("allocated", "reserved", "device"):
            low, expected, high = p["steady"][what]
            lines.append(f"  {what:<9}  {readable(expected)}   ({readable(low)} .. {readable(high)})")
        return "\n".join(lines)

class _UndoWrites(TorchDispatchMode):
    """What a planned step writes into plain tensors (a batch norm's counter, a logged mean) is put back, and so is the CPU's random state."""

    def __enter__(self) -> Any:
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._random = torch.get_rng_state()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for given, declared in zip([*args, *kwargs.values()], [*func._schema.arguments[: len(args)], *(a for n in kwargs for a in func._schema.arguments if a.name == n)]):
            if declared.alias_info is None or not declared.alias_info.is_write:
                continue
            for t in given if isinstance(given, (list, tuple)) else (given,):
                if isinstance(t, torch.Tensor) and not _core.is_lazy(t) and t.device.type != "meta" and id(t) not in self._before:
                    self._before[id(t)] = (t, t.detach().clone())
        return func(*args, **kwargs)

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        with torch.no_grad():
            for t, was in reversed(self._before.values()):
                t.detach().copy_(was)
        torch.set_rng_state(self._random)


def plan(
    step: Callable[..., Any],
    *inputs: Any,
    batch: Any = 0,
    budget: Any = None,
    device: str | os.PathLike[str] | None = None,
    micro_batch: int | None = None,
    optimizer: str = "none",
    optimizer_way: str = "foreach",
) -> Prediction:
    """What a step will need, computing nothing: the step is recorded on shapes and planned.

    step: called with the inputs made lazy; runs forward and backward, or returns the loss (backward is then called on it). It must not read values.
    inputs: tensors, as for `lazy(..., batch=batch)`; their contents are not looked at, and tensors and model may be on the `meta` device.
    budget: bytes or a word such as "24GiB" that the step, parameters and gradients included, may use; `None`: no limit, or the device's memory.
    device: a built-in profile ("h100-80gb"; an unknown name lists them) or the path of a profile written by `measure_device`.
    micro_batch: force the rows of a slice. optimizer, optimizer_way: "none", "sgd", "momentum", "adam", "adamw"; "foreach", "fused", "loop":
        the optimizer's own state and temporaries, which a recorded step does not show.

    Returns: a `Prediction`. Parameters' `.grad` and all other state are as before.
    Raises: OutOfMemory when one row does not fit the budget; UnsupportedError when the step reads a value; ValueError for an unknown device.
    """
    profile = None
    if device is not None:
        profile = os.fspath(device)
        if os.path.exists(profile):
            with open(profile, encoding="utf-8") as f:
                profile = f.read()
        else:
            profile = profile.lower()
    if micro_batch is not None and (isinstance(micro_batch, bool) or not isinstance(micro_batch, int) or micro_batch < 1):
        raise ValueError(f"plan(micro_batch={micro_batch!r}): expected at least 1 row or None, got {micro_batch!r}")
    asked = None if budget is None else _bytes(budget, torch.device("cpu"), f"plan(budget={budget!r})", here=False)

    def recorded(limit: int | None, rows: int | None) -> dict[str, Any]:
        _core.configure(budget=limit, micro_batch=rows)
        n_plans = _core.n_plans()
        with _UndoWrites():
            values = lazy(*inputs, batch=batch)
            result = step(*(values if isinstance(values, tuple) else (values,)))
            if isinstance(result, torch.Tensor) and _core.is_lazy(result):
                if result.requires_grad:
                    result.backward()
                else:
                    _core.run_all([result], False)
        raw: dict[str, Any] | None = _core.last_plan()
        if raw is None or _core.n_plans() == n_plans:
            raise ValueError("plan(): expected a step that returns its loss or calls backward on it, got one that does neither")
        return raw

    before = _core.configure(dry=True, strict=False, fastest=False)
    try:
        raw = recorded(asked, micro_batch)
        if profile is None:
            return Prediction(raw, None)
        rows = raw["micro_batch"]
        prediction = _core.predict(profile, asked or 0, rows if rows < raw["batch"] else 0, optimizer, optimizer_way)
        while not prediction["fits"] and micro_batch is None and rows > 1:
            rows = (rows + 1) // 2
            high = prediction["steady"]["device"][2]
            prediction = _core.predict(profile, asked or 0, rows, optimizer, optimizer_way)
            if prediction["steady"]["device"][2] > 0.99 * high:
                break  # what is left does not shrink with the slice, and simulating ever more slices only takes time
        if rows != raw["micro_batch"]:
            raw = recorded(asked, rows)  # the table shows the slices that the device needs
        return Prediction(raw, prediction)
    finally:
        _core.configure(**before)

def measure_device(path: str | os.PathLike[str], device: int = 0) -> dict[str, Any]:
    """Write the memory profile of this machine's GPU, for `plan(device=path)` and `koila plan --gpu path`. Takes under a minute.

    Measured in this process, best a fresh one: the CUDA context with the kernels of a small training step, cuBLAS's workspace, what cudaMemGetInfo reports.
    Returns: the profile. Raises: UnsupportedError without a CUDA device.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError("measure_device(): there is no CUDA device here; plan(device=...) takes a built-in profile instead, for example 'h100-80gb'")
    today = datetime.date.today().isoformat()
    with torch.cuda.device(device):
        properties = torch.cuda.get_device_properties(device)
        _, total = torch.cuda.mem_get_info()
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.GroupNorm(2, 8), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 64, 8)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        held = torch.cuda.memory_allocated()
        for _ in range(2):
            torch.nn.functional.cross_entropy(model(torch.randn(4, 3, 8, 8, device="cuda")), torch.zeros(4, dtype=torch.long, device="cuda")).backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        with_cublas = torch.cuda.memory_allocated()
        if clear is not None:
            clear()
        cublas = max(0, with_cublas - torch.cuda.memory_allocated()) if clear is not None else 0
        del model, optimizer, held
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
            "context_bytes": field(context, spread=32 << 20),  # other processes on the card count as context
            **({"cublas_workspace_bytes": field(cublas // 2)} if cublas else {}),  # one for the forward, one for the backward thread
        },
    }
    with open(path, "w", encoding="utf-8") as f:
        json.dump(profile, f, indent=2)
    return profile

"""Predicted memory of training steps against the measured memory on a GPU; the cost of predicting.

    python bench/bench_prediction.py
        on a machine with CUDA: predicts, runs, and prints the errors
    python bench/bench_prediction.py --dry
        predicts only
    python bench/bench_prediction.py --truth FILE
        errors of predictions made here, against a file of measurements that --save or --keep wrote
    [--only NAME,NAME] [--gpu NAME|FILE] [--save FILE] [--keep FOLDER] [--rival] [--trace] [--jobs
    N] [--seconds N]

Every configuration runs in fresh processes: one predicts plain PyTorch (`prediction["plain"]`; on
meta tensors: no weights, no CUDA), one trains without koila, six steps, alone on the card. The
models were fixed before any of them was measured. Errors are signed (predicted against measured)
and reported apart for the highest allocated and reserved bytes (torch's own counters) and device
bytes (total less the least that was free, polled). A prediction that is too low counts as a broken
promise.

--keep writes the results of one run on a GPU into FOLDER: profile.json, facts.json (the cost of
each first use: context, libraries, workspaces), truths.json, predictions.json, table.md.

--rival also runs two short real probes, at a quarter and half of the batch, and extrapolates
linearly: the strongest cheap alternative.

--trace also records, for each configuration, NAME.operators.json.gz (every operator of the first
two steps: bytes before, most inside, after) and NAME.history.pickle.gz (the allocator's history of
the first two steps), to attribute differences. --rival and --trace run after the measurements, so
they do not disturb them."""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import pickle
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "python"))

KINDS = ("allocated", "reserved", "device")
DEVICE = "cuda"


# ---- models: a function makes (model, inputs, loss of model and inputs) on the current default
# device


def ids(*size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.long)


def classify(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def next_token(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def mlp() -> Any:
    layers = [m for _ in range(6) for m in (nn.Linear(2048, 2048), nn.GELU())]
    return (
        nn.Sequential(*layers, nn.Linear(2048, 10)),
        (torch.zeros(4096, 2048), ids(4096)),
        classify,
    )


def cnn() -> Any:
    import zoo

    return zoo.ResNet(width=64, classes=1000), (torch.zeros(128, 3, 64, 64), ids(128)), classify


class Layers(nn.Module):
    """Embedded tokens or patches, transformer layers, a head; `again`: layers are run again in the
    backward."""

    def __init__(
        self,
        first: nn.Module,
        width: int,
        heads: int,
        layers: int,
        out: int,
        again: bool = False,
        causal: bool = False,
    ) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True
        )
        self.first, self.again, self.causal, self.head = first, again, causal, nn.Linear(width, out)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = x.flatten(2).transpose(1, 2) if x.ndim == 4 else x
        mask = (
            nn.Transformer.generate_square_subsequent_mask(
                x.shape[1], device=x.device, dtype=x.dtype
            )
            if self.causal
            else None
        )
        for layer in self.layers:
            x = (
                checkpoint(layer, x, mask, use_reentrant=False)
                if self.again
                else layer(x, mask, is_causal=self.causal)
            )
        return self.head(x if self.causal else x.mean(1))


def encoder() -> Any:
    return Layers(nn.Embedding(30000, 768), 768, 12, 12, 2), (ids(32, 256), ids(32)), classify


def gpt2(again: bool = False) -> Any:
    return (
        Layers(nn.Embedding(50257, 768), 768, 12, 12, 50257, again, causal=True),
        (ids(8, 512),),
        next_token,
    )


def vit() -> Any:
    return (
        Layers(nn.Conv2d(3, 384, 16, 16), 384, 6, 12, 1000),
        (torch.zeros(128, 3, 224, 224), ids(128)),
        classify,
    )


class UNet(nn.Module):
    def __init__(self, width: int = 64, again: bool = False) -> None:
        super().__init__()

        def double(a: int, b: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(a, b, 3, padding=1),
                nn.GroupNorm(8, b),
                nn.SiLU(),
                nn.Conv2d(b, b, 3, padding=1),
                nn.GroupNorm(8, b),
                nn.SiLU(),
            )

        w = width
        self.again = again
        self.down, self.up = (
            nn.ModuleList([double(3, w), double(w, 2 * w), double(2 * w, 4 * w)]),
            nn.ModuleList([double(6 * w, 2 * w), double(3 * w, w)]),
        )
        self.out = nn.Conv2d(w, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def run(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(m, x, use_reentrant=False) if self.again else m(x)

        kept = []
        for i, m in enumerate(self.down):
            x = run(m, x if i == 0 else F.avg_pool2d(x, 2))
            kept.append(x)
        for m, skip in zip(self.up, reversed(kept[:-1])):
            x = run(m, torch.cat([F.interpolate(x, scale_factor=2.0), skip], 1))
        return self.out(x)


def diffusion(again: bool = False) -> Any:
    return (
        UNet(again=again),
        (torch.zeros(32, 3, 64, 64),),
        lambda model, x: F.mse_loss(model(x), x),
    )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(256, 512, 2, batch_first=True), nn.Linear(512, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def rnn() -> Any:
    return Recurrent(), (torch.zeros(256, 128, 256), ids(256)), classify


class Graph(nn.Module):
    """Messages along edges are gathered and summed at nodes, a batch of graphs of one size."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(4))
        self.register_buffer("edges", torch.zeros(2, 4096, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            messages = x.index_select(1, self.edges[0])
            x = F.relu(
                layer(torch.cat([x, torch.zeros_like(x).index_add(1, self.edges[1], messages)], -1))
            )
        return x


def gnn() -> Any:
    return Graph(), (torch.zeros(16, 1024, 256),), lambda model, x: model(x).square().mean()


def llama() -> Any:
    from test_plan_ahead import Llama

    return Llama(), (ids(4, 1024),), next_token


class Case(NamedTuple):
    make: Callable[[], Any]
    half: bool = False
    optimizer: str = "sgd"
    way: str = "foreach"
    expandable: bool = False
    where: str = "meta"  # it is recorded; a recurrent layer is one operator on the CPU only


CASES = {
    "mlp": Case(mlp),
    "mlp-bf16-adamw-fused": Case(mlp, True, "adamw", "fused", True),
    "cnn-sgd": Case(cnn),
    "cnn-bf16-adamw": Case(cnn, True, "adamw"),
    "encoder-adamw": Case(encoder, False, "adamw"),
    "encoder-bf16-fused-expandable": Case(encoder, True, "adamw", "fused", True),
    "gpt2-adamw": Case(gpt2, False, "adamw"),
    "gpt2-bf16-checkpoint": Case(lambda: gpt2(True), True, "adamw", "fused"),
    "vit-adamw-expandable": Case(vit, False, "adamw", "foreach", True),
    "vit-bf16-fused": Case(vit, True, "adamw", "fused"),
    "diffusion-adamw": Case(diffusion, False, "adamw"),
    "diffusion-bf16-checkpoint": Case(lambda: diffusion(True), True, "adamw", "fused", True),
    "rnn-sgd": Case(rnn, where="cpu"),
    "gnn-adamw": Case(gnn, False, "adamw"),
    "gnn-bf16-fused": Case(gnn, True, "adamw", "fused"),
    "llama-1b-bf16-fused": Case(llama, True, "adamw", "fused"),
}


def conf_of(case: Case) -> str:
    return "expandable_segments:True" if case.expandable else ""


def step_of(case: Case, model: nn.Module, loss: Any) -> Callable[..., torch.Tensor]:
    def step(*inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=case.half):
            return loss(model, *inputs)

    return step


# ---- what a child process does


def predict(name: str, gpu: str) -> dict[str, Any]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    import koila

    case = CASES[name]
    with torch.device(case.where):
        model, inputs, loss = case.make()
    plan = koila.plan(
        step_of(case, model, loss),
        *inputs,
        device=gpu,
        micro_batch=inputs[0].shape[0],
        optimizer=case.optimizer,
        optimizer_way=case.way,
        conf=conf_of(case),
    )
    p = plan.prediction
    assert p is not None
    peaks = {
        kind: [max(p["plain"][step][kind][i] for step in ("first", "steady")) for i in range(3)]
        for kind in KINDS
    }
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    parameters = sum(x.numel() for x in model.parameters())
    return {
        "seconds": time.perf_counter() - started,
        "host": rss << 10,
        "host_before": before << 10,
        "parameters": parameters,
        "not_modelled": len(p["not_modelled"]),
        **peaks,
    }


class Run:
    """A configuration that trains on the device, a step at a time, as a plain script would."""

    def __init__(self, name: str, part: int = 1) -> None:
        """part: of the batch's rows, 1 / part."""
        self.case = CASES[name]
        with torch.device(DEVICE):
            self.model, self.inputs, self.loss = self.case.make()
        self.inputs = tuple(x.cpu() for x in self.inputs)
        self.inputs = tuple(
            x[: max(1, x.shape[0] // part)].clone() if part > 1 else x for x in self.inputs
        )
        kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
        self.optimizer = kinds[self.case.optimizer](
            self.model.parameters(), lr=1e-4, **{self.case.way: True}
        )

    def step(self) -> None:
        self.inputs = tuple(
            torch.empty_like(x, device="cpu").zero_().to(DEVICE) for x in self.inputs
        )
        self.optimizer.zero_grad(set_to_none=True)
        self.last = step_of(self.case, self.model, self.loss)(*self.inputs)
        self.last.backward()
        self.optimizer.step()


class LeastFree:
    """The least free memory of the device, polled from a thread while the block runs."""

    def __enter__(self) -> LeastFree:
        torch.cuda.init()
        free, self.total = torch.cuda.mem_get_info()
        self.at_start, self.least, self.n_polls, self._done = (
            self.total - free,
            free,
            0,
            threading.Event(),
        )
        self._watcher = threading.Thread(target=self._poll)
        self._watcher.start()
        return self

    def _poll(self) -> None:
        while not self._done.wait(0.0005):
            self.least = min(self.least, torch.cuda.mem_get_info()[0])
            self.n_polls += 1

    def __exit__(self, *exc: Any) -> None:
        self._done.set()
        self._watcher.join()


def counters() -> dict[str, int]:
    return {
        k: v
        for k, v in torch.cuda.memory_stats().items()
        if isinstance(v, int) and (".all." in k or "." not in k)
    }


def measure(name: str, part: int = 1, steps: int = 6) -> dict[str, Any]:
    first: dict[str, int] = {}
    with LeastFree() as watch:
        run = Run(name, part)
        model_bytes = torch.cuda.memory_allocated()
        for i in range(steps):
            run.step()
            if i == 0:
                torch.cuda.synchronize()
                first = counters()
        torch.cuda.synchronize()
    if steps == 6 and part == 1:  # what is outside of the cache when all is done
        free, total = torch.cuda.mem_get_info()
        outside = total - free - torch.cuda.memory_reserved()
    else:
        outside = 0
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "device": watch.total - watch.least,
        "outside": outside,
        "at_start": watch.at_start,
        "polls": watch.n_polls,
        "model": model_bytes,
        "rows": run.inputs[0].shape[0],
        "first": first,
        "all": counters(),
        "torch": torch.__version__,
    }


# ---- to attribute differences: what each operator takes, what each allocation was for, what each
# first use costs


class PerOperator(TorchDispatchMode):
    """Bytes allocated before an operator, the most inside it above that, and what it leaves above
    that."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[list[Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = func(*args, **(kwargs or {}))
        peak, after = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        shapes = [
            f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"
            for t in tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        ]
        self.log.append([str(func), shapes, before, peak - before, after - before])
        return result


def trace_operators(name: str, out: Path) -> dict[str, Any]:
    torch.cuda.init()
    run = Run(name)
    steps = []
    for _ in range(2):
        with PerOperator() as mode:
            run.step()
        steps.append(mode.log)
    with gzip.open(out / f"{name}.operators.json.gz", "wt", encoding="utf-8") as f:
        json.dump(steps, f)
    return {"operators": [len(s) for s in steps]}


def trace_history(name: str, out: Path, n_frames: int = 4) -> dict[str, Any]:
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(
        "all", context="alloc", stacks="python", max_entries=200_000
    )
    run = Run(name)
    for _ in range(2):
        run.step()
    torch.cuda.synchronize()
    s = torch.cuda.memory._snapshot()
    short: dict[Any, Any] = {}  # equal stacks are one in the file
    for x in [e for trace in s["device_traces"] for e in trace] + [
        b for g in s["segments"] for b in g["blocks"]
    ]:
        inner = x.get("frames", [])[:n_frames]
        x["frames"] = short.setdefault(
            tuple((f["filename"], f["line"], f["name"]) for f in inner), inner
        )
    with gzip.open(out / f"{name}.history.pickle.gz", "wb") as f:
        pickle.dump(s, f)
    return {
        "events": sum(len(t) for t in s["device_traces"]),
        "allocated": torch.cuda.max_memory_allocated(),
    }


def facts() -> list[dict[str, Any]]:
    """What each first use adds to the device's bytes outside of the cache, and to the cache."""
    seen: list[dict[str, Any]] = []

    def note(what: str, f: Callable[[], Any]) -> None:
        row: dict[str, Any] = {"what": what}
        try:
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            kept = f()
            torch.cuda.synchronize()
            row["inside"] = torch.cuda.max_memory_allocated() - before
            row["returned"] = sum(
                t.untyped_storage().nbytes()
                for t in tree_leaves(kept)
                if isinstance(t, torch.Tensor)
            )
            del kept
            row["kept"] = torch.cuda.memory_allocated() - before
        except Exception as e:
            row["error"] = f"{type(e).__name__}: {e}"[:300]
        free, total = torch.cuda.mem_get_info()
        seen.append(
            row
            | {
                "outside": total - free - torch.cuda.memory_reserved(),
                "reserved": torch.cuda.memory_reserved(),
            }
        )

    def back(y: torch.Tensor) -> None:
        y.float().sum().backward()

    torch.cuda.init()
    note("context", lambda: None)
    note("empty", lambda: torch.empty(1 << 20, device=DEVICE))
    note("fill", lambda: torch.ones(1 << 20, device=DEVICE))
    a, h = (torch.ones(1024, 1024, device=DEVICE, dtype=d) for d in (torch.float32, torch.bfloat16))
    bias = torch.ones(1024, device=DEVICE)
    note("mm float32", lambda: a @ a)
    note("mm float32 again", lambda: a @ a)
    note("mm bfloat16", lambda: h @ h)
    note("addmm float32 (cuBLASLt)", lambda: torch.addmm(bias, a, a))
    note("addmm bfloat16 (cuBLASLt)", lambda: torch.addmm(bias.bfloat16(), h, h))
    note("bmm float32", lambda: torch.bmm(a.view(4, 256, 1024), a.view(4, 1024, 256)))

    def second_stream() -> Any:
        with torch.cuda.stream(torch.cuda.Stream()):
            return a @ a

    note("mm on another stream", second_stream)
    w = torch.ones(1024, 1024, device=DEVICE, requires_grad=True)
    note("mm backward (its thread)", lambda: back(a @ w))
    w.grad = None
    note("mm backward again", lambda: back(a @ w))
    w.grad = None
    for dtype in (torch.float32, torch.bfloat16):
        for n, cin, cout, size, k in (
            (8, 3, 64, 64, 7),
            (32, 64, 64, 56, 3),
            (32, 256, 512, 14, 3),
            (32, 256, 512, 14, 1),
        ):
            x, c = (
                torch.ones(n, cin, size, size, device=DEVICE, dtype=dtype, requires_grad=True),
                torch.ones(cout, cin, k, k, device=DEVICE, dtype=dtype, requires_grad=True),
            )
            note(
                f"conv {dtype} {n}x{cin}x{size}x{size} {k}x{k} to {cout}",
                lambda x=x, c=c, k=k: F.conv2d(x, c, padding=k // 2).detach(),
            )
            y = F.conv2d(x, c, padding=k // 2)
            note(
                "its backward",
                lambda y=y, x=x, c=c: torch.autograd.grad(y, (x, c), torch.ones_like(y)),
            )
    for dtype in (torch.float32, torch.bfloat16):
        q = torch.ones(8, 12, 512, 64, device=DEVICE, dtype=dtype, requires_grad=True)
        for causal, p in ((False, 0.0), (True, 0.0), (False, 0.1)):
            note(
                f"sdpa {dtype} causal={causal} dropout={p}",
                lambda q=q, causal=causal, p=p: F.scaled_dot_product_attention(
                    q, q, q, is_causal=causal, dropout_p=p
                ).detach(),
            )
            y = F.scaled_dot_product_attention(q, q, q, is_causal=causal, dropout_p=p)
            note(
                f"its backward, {y.grad_fn.name() if y.grad_fn else None}",
                lambda y=y, q=q: torch.autograd.grad(y, q, torch.ones_like(y)),
            )
    bn = nn.BatchNorm2d(64).to(DEVICE)
    for half in (False, True):
        x = torch.ones(
            32,
            64,
            56,
            56,
            device=DEVICE,
            dtype=torch.bfloat16 if half else torch.float32,
            requires_grad=True,
        )
        note(f"batch norm {x.dtype}", lambda x=x: bn(x).detach())
        y = bn(x)
        note(
            f"its backward, {y.grad_fn.name()}",
            lambda y=y, x=x: torch.autograd.grad(y, x, torch.ones_like(y)),
        )
    for n in (3072, 3073, 20000):
        e, i = (
            torch.ones(30000, 768, device=DEVICE, requires_grad=True),
            torch.zeros(n, dtype=torch.long, device=DEVICE),
        )
        y = F.embedding(i, e)
        note(
            f"embedding backward {n} indices, 30000x768",
            lambda y=y, e=e: torch.autograd.grad(y, e, torch.ones_like(y)),
        )
    lstm = nn.LSTM(256, 512, 2, batch_first=True).to(DEVICE)
    x = torch.ones(256, 128, 256, device=DEVICE)
    note("lstm", lambda: lstm(x)[0].detach())
    y = lstm(x)[0]
    note(
        "its backward", lambda: torch.autograd.grad(y, list(lstm.parameters()), torch.ones_like(y))
    )
    for what, f in {
        "sum": torch.sum,
        "mean": torch.mean,
        "softmax": lambda t: torch.softmax(t, -1),
        "sort": torch.sort,
        "topk": lambda t: torch.topk(t, 8),
        "cumsum": lambda t: torch.cumsum(t, 0),
        "nonzero": torch.nonzero,
        "unique": torch.unique,
        "index_add": lambda t: t.index_add(
            0, torch.zeros(1024, dtype=torch.long, device=DEVICE), t
        ),
        "norm": torch.linalg.vector_norm,
        "randperm": lambda t: torch.randperm(1 << 20, device=DEVICE),
    }.items():
        note(what, lambda f=f: f(a))
    for rows in (65536, 65600, 200000):
        x, g = (
            torch.ones(rows, 128, device=DEVICE, requires_grad=True),
            nn.LayerNorm(128).to(DEVICE),
        )
        y = g(x)
        note(
            f"layer norm backward {rows}x128",
            lambda y=y, x=x, g=g: torch.autograd.grad(y, (x, g.weight, g.bias), torch.ones_like(y)),
        )
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        note("cuBLAS workspaces cleared", clear)
    return seen


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def child(
    what: str, name: str, gpu: str, out: str = ".", seconds: float = 900, part: int = 1
) -> dict[str, Any]:
    env = {**os.environ, "PYTHONWARNINGS": "ignore", "FAKECUDA_CUDNN_RNN": "0"}
    if "(fake)" in device_name():  # whose cuDNN has no attention
        env["TORCH_CUDNN_SDPA_DEPRIORITIZED"] = "1"
    if name in CASES:
        env["PYTORCH_CUDA_ALLOC_CONF"] = conf_of(CASES[name])
    if what == "predict":
        env["CUDA_VISIBLE_DEVICES"] = ""  # no context of its own while others measure
    command = [
        sys.executable,
        __file__,
        "--child",
        what,
        "--only",
        name,
        "--gpu",
        gpu,
        "--keep",
        out,
        "--part",
        str(part),
    ]
    try:
        r = subprocess.run(command, capture_output=True, text=True, env=env, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {seconds:.0f} s"}
    if r.returncode:
        return {
            "error": (r.stderr.strip().splitlines() or [f"exit {r.returncode}"])[-1][:200],
            "said": r.stderr[-1500:],
        }
    try:
        return dict(json.loads(r.stdout.splitlines()[-1]))
    except (IndexError, TypeError, ValueError):
        return {"error": f"said {r.stdout[-200:]!r}", "said": r.stderr[-1500:]}


def profile(path: str) -> dict[str, Any]:
    """The profile of this device. On a simulated one cuDNN asks for no memory; the profile says so,
    so what only the libraries of the hardware decide is zero on both sides."""
    import koila

    measured = koila.measure_device(path)
    if "(fake)" in measured["name"]:
        nothing = {**measured["fields"]["sm_count"], "value": 0}
        measured["fields"]["conv_workspace_bytes"] = nothing
        Path(path).write_text(json.dumps(measured, indent=2), encoding="utf-8")
    return measured


def run_child(what: str, name: str, gpu: str, out: Path, part: int) -> Any:
    if what == "predict":
        return predict(name, gpu)
    if what == "measure":
        return measure(name) if part == 1 else measure(name, part, 3)
    if what == "profile":
        return profile(gpu)
    if what == "facts":
        return {"facts": facts()}
    return trace_operators(name, out) if what == "operators" else trace_history(name, out)


# ---- the rival: two short probes, a line through them


def extrapolated(quarter: dict[str, Any], half: dict[str, Any], rows: int) -> dict[str, int]:
    slope = {
        k: (half[k] - quarter[k]) / max(1, half["rows"] - quarter["rows"])
        for k in ("allocated", "reserved")
    }
    return {k: round(half[k] + slope[k] * (rows - half["rows"])) for k in slope}


# ---- errors


def summary(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Of every kind: median, 95th percentile and worst of the size of the errors, the share
    predicted too low (expected; high), the share inside low .. high."""
    lines = []
    for kind in KINDS:
        pairs = [
            (r["predicted"][kind], r["truth"][kind])
            for r in rows.values()
            if kind in r["truth"] and kind in r["predicted"]
        ]
        if not pairs:
            continue
        errors = sorted(abs(p[1] - t) / t for p, t in pairs)
        share = {
            what: sum(test(p, t) for p, t in pairs) / len(pairs)
            for what, test in {
                "low": lambda p, t: p[1] < t,
                "broken": lambda p, t: p[2] < t,
                "inside": lambda p, t: p[0] <= t <= p[2],
            }.items()
        }
        middle = (errors[(len(errors) - 1) // 2] + errors[len(errors) // 2]) / 2
        p95 = errors[min(len(errors) - 1, math.ceil(0.95 * len(errors)) - 1)]
        lines.append(
            f"{kind:<10} {len(pairs):>3} configurations: median {middle:.2%}, p95 {p95:.2%}, "
            f"worst {errors[-1]:.2%}; too low {share['low']:.0%},"
            f" above the high end {share['broken']:.0%}, inside {share['inside']:.0%}"
        )
    return lines


def table(rows: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        "| configuration | M params | seconds | host MiB | not modelled | "
        + " | ".join(f"{k} (low .. high) MiB | true | error" for k in KINDS)
        + " |",
        "|" + "---|" * (5 + 3 * len(KINDS)),
    ]
    for name, r in rows.items():
        p, t = r["predicted"], r["truth"]
        if "error" in p:
            lines.append(f"| {name} | failed: {p['error']} |")
            continue
        cells = [
            name,
            f"{p['parameters'] / 1e6:.1f}",
            f"{p['seconds']:.2f}",
            f"{p['host'] >> 20}",
            str(p["not_modelled"]),
        ]
        for kind in KINDS:
            low, expected, high = (n / 2**20 for n in p[kind])
            true = t.get(kind)
            cells += [
                f"{expected:,.0f} ({low:,.0f} .. {high:,.0f})",
                "" if true is None else f"{true / 2**20:,.0f}",
                "" if true is None else f"{(p[kind][1] - true) / true:+.2%}",
            ]
        lines.append("| " + " | ".join(cells) + " |")
        if "error" in t:
            lines.append(f"| {name}, the run | failed: {t['error']} |")
    return lines


def rival_table(
    two: dict[str, list[dict[str, Any]]], truths: dict[str, dict[str, Any]]
) -> list[str]:
    lines, rows = [], {}
    for name, probes in two.items():
        truth = truths.get(name, {})
        if any("error" in x for x in (*probes, truth)) or not truth:
            lines.append(f"{name}: {[x.get('error') for x in (*probes, truth)]}")
            continue
        line = extrapolated(*probes, truth["rows"])
        rows[name] = {"predicted": {k: [v, v, v] for k, v in line.items()}, "truth": truth}
        lines.append(
            f"{name}: "
            + ", ".join(f"{k} {(v - truth[k]) / truth[k]:+.2%}" for k, v in line.items())
        )
    return lines + summary(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--gpu", default="")
    parser.add_argument("--truth")
    parser.add_argument("--save")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--rival", action="store_true")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--jobs", type=int, default=max(1, min(8, (os.cpu_count() or 2) // 2)))
    parser.add_argument(
        "--seconds",
        type=float,
        default=3600.0,
        help="probes and traces that were not started by then are left out",
    )
    parser.add_argument("--part", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument(
        "--child",
        choices=("predict", "measure", "profile", "facts", "operators", "history"),
        help=argparse.SUPPRESS,
    )
    args = parser.parse_args()
    keep: Path | None = args.keep
    if args.child:
        print(json.dumps(run_child(args.child, args.only, args.gpu, keep or Path(), args.part)))
        return
    names = [n for n in args.only.split(",") if n] or list(CASES)
    for unknown in set(names) - set(CASES):
        parser.error(f"no configuration {unknown}; there are {', '.join(CASES)}")
    if args.trace and not keep:
        parser.error("--trace needs --keep FOLDER")
    if keep:
        keep.mkdir(parents=True, exist_ok=True)

    def write(name: str, what: Any) -> None:
        if keep:
            (keep / name).write_text(json.dumps(what, indent=1), encoding="utf-8")

    started = time.monotonic()
    runs = torch.cuda.is_available() and not args.dry and not args.truth
    gpu = args.gpu
    if runs:
        written = str(keep / "profile.json" if keep else Path("device-profile.json"))
        got = child("profile", "", written)
        if "error" in got:
            print(f"measure_device failed: {got['error']}", file=sys.stderr)
            write("profile-error.json", got)
        gpu = gpu or ("" if "error" in got else written)
    gpu = gpu or "h100-80gb"
    truths: dict[str, dict[str, Any]] = {}
    if args.truth:
        with open(args.truth, encoding="utf-8") as f:
            truths = json.load(f)
    with ThreadPoolExecutor(args.jobs) as pool:
        predicted: dict[str, Future[dict[str, Any]]] = {
            n: pool.submit(child, "predict", n, gpu) for n in names
        }
        for name in names if runs else ():  # one at a time: device bytes are everybody's
            truths[name] = child("measure", name, gpu)
            write("truths.json", truths)
            print(f"{name} ... {time.monotonic() - started:.0f} s", file=sys.stderr)
        predictions = {n: p.result() for n, p in predicted.items()}
        write("predictions.json", predictions)
        rows = {n: {"predicted": predictions[n], "truth": truths.get(n, {})} for n in names}
        if args.save:
            with open(args.save, "w", encoding="utf-8") as f:
                json.dump({n: r["truth"] for n, r in rows.items()}, f, indent=1)
        lines = [
            *table(rows),
            "",
            *(summary(rows) or ["nothing was measured: run this where CUDA is, or give --truth"]),
        ]
        print(*lines, sep="\n", flush=True)

        def soon(what: str, name: str, part: int = 1) -> dict[str, Any]:
            left = args.seconds - (time.monotonic() - started)
            return (
                child(what, name, gpu, str(keep or "."), max(30.0, left), part)
                if left > 0
                else {"error": "no time left"}
            )

        if runs and keep:
            write("facts.json", soon("facts", ""))
        if runs and args.rival:
            probes = {n: [pool.submit(soon, "measure", n, part) for part in (4, 2)] for n in names}
            two = {n: [p.result() for p in ps] for n, ps in probes.items()}
            write("probes.json", two)
            lines += ["", "two probes, a line through them:", *rival_table(two, truths)]
            print(*lines[-len(two) - 6 :], sep="\n", flush=True)
        if runs and args.trace:
            traced = {
                (what, n): pool.submit(soon, what, n)
                for what in ("operators", "history")
                for n in names
            }
            write("traced.json", {f"{n} {what}": t.result() for (what, n), t in traced.items()})
    if keep:
        (keep / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{time.monotonic() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()

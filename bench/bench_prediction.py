"""Predicted memory of training steps against what a GPU says, and what predicting costs.

    python bench/bench_prediction.py                     on a machine with CUDA: predicts, runs, and prints the errors
    python bench/bench_prediction.py --dry               predicts only; the truth is filled in later
    python bench/bench_prediction.py --truth FILE        errors of predictions made here against a file of truths that --save wrote elsewhere
    [--only NAME,NAME] [--gpu NAME|FILE] [--save FILE]

Every configuration runs in fresh processes: one predicts (on meta tensors: no weights), one trains plainly, six steps. The models were fixed before any of them was
measured, and none was used to tune anything. Errors are signed, predicted against true, of the highest allocated, reserved (torch's own counters) and device bytes
(total less the least that was free, polled), kept apart; an under-estimate is a promise broken."""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "python"))

KINDS = ("allocated", "reserved", "device")


# ---- models: a function makes (model, inputs, loss of model and inputs) on the current default device


def ids(*size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.long)


def classify(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def next_token(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def mlp() -> Any:
    layers = [m for _ in range(6) for m in (nn.Linear(2048, 2048), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(2048, 10)), (torch.zeros(4096, 2048), ids(4096)), classify


def cnn() -> Any:
    import zoo

    return zoo.ResNet(width=64, classes=1000), (torch.zeros(128, 3, 64, 64), ids(128)), classify


class Layers(nn.Module):
    """Embedded tokens or patches, transformer layers, a head; `again`: layers are run again in the backward."""

    def __init__(self, first: nn.Module, width: int, heads: int, layers: int, out: int, again: bool = False, causal: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.first, self.again, self.causal, self.head = first, again, causal, nn.Linear(width, out)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = x.flatten(2).transpose(1, 2) if x.ndim == 4 else x
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype) if self.causal else None
        for layer in self.layers:
            x = checkpoint(layer, x, mask, use_reentrant=False) if self.again else layer(x, mask, is_causal=self.causal)
        return self.head(x if self.causal else x.mean(1))


def encoder() -> Any:
    return Layers(nn.Embedding(30000, 768), 768, 12, 12, 2), (ids(32, 256), ids(32)), classify


def gpt2(again: bool = False) -> Any:
    return Layers(nn.Embedding(50257, 768), 768, 12, 12, 50257, again, causal=True), (ids(8, 512),), next_token


def vit() -> Any:
    return Layers(nn.Conv2d(3, 384, 16, 16), 384, 6, 12, 1000), (torch.zeros(128, 3, 224, 224), ids(128)), classify


class UNet(nn.Module):
    def __init__(self, width: int = 64, again: bool = False) -> None:
        super().__init__()

        def double(a: int, b: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(8, b), nn.SiLU(), nn.Conv2d(b, b, 3, padding=1), nn.GroupNorm(8, b), nn.SiLU())

        w = width
        self.again = again
        self.down, self.up = nn.ModuleList([double(3, w), double(w, 2 * w), double(2 * w, 4 * w)]), nn.ModuleList([double(6 * w, 2 * w), double(3 * w, w)])
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
    return UNet(again=again), (torch.zeros(32, 3, 64, 64),), lambda model, x: F.mse_loss(model(x), x)


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
            x = F.relu(layer(torch.cat([x, torch.zeros_like(x).index_add(1, self.edges[1], messages)], -1)))
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
    plan = koila.plan(step_of(case, model, loss), *inputs, device=gpu, micro_batch=inputs[0].shape[0], optimizer=case.optimizer, optimizer_way=case.way, conf=conf_of(case))
    p = plan.prediction
    assert p is not None
    peaks = {kind: [max(p["first"][kind][i], p["steady"][kind][i]) for i in range(3)] for kind in KINDS}
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    parameters = sum(x.numel() for x in model.parameters())
    return {"seconds": time.perf_counter() - started, "host": rss << 10, "host_before": before << 10, "parameters": parameters, "not_modelled": len(p["not_modelled"]), **peaks}


def measure(name: str) -> dict[str, int]:
    case = CASES[name]
    torch.cuda.init()
    _, total = torch.cuda.mem_get_info()
    least, done = [total], threading.Event()

    def poll() -> None:
        while not done.wait(0.0005):
            least[0] = min(least[0], torch.cuda.mem_get_info()[0])

    with torch.device("cuda"):
        model, inputs, loss = case.make()
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    optimizer = kinds[case.optimizer](model.parameters(), lr=1e-4, **{case.way: True})
    watcher = threading.Thread(target=poll)
    watcher.start()
    for _ in range(6):
        fresh = tuple(torch.empty_like(x, device="cpu").zero_().cuda() for x in inputs)
        step_of(case, model, loss)(*fresh).backward()
        inputs = fresh
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    done.set()
    watcher.join()
    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved(), "device": total - least[0]}


def child(what: str, name: str, gpu: str) -> dict[str, Any]:
    import os

    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": conf_of(CASES[name]), "PYTHONWARNINGS": "ignore"} if name in CASES else dict(os.environ)
    r = subprocess.run([sys.executable, __file__, "--child", what, "--only", name, "--gpu", gpu], capture_output=True, text=True, env=env, timeout=900)
    if r.returncode:
        return {"error": (r.stderr.strip().splitlines() or ["no word"])[-1][:200]}
    return dict(json.loads(r.stdout.splitlines()[-1]))


# ---- errors


def summary(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Of every kind: median, 95th percentile and worst of the size of the errors, the share predicted too low (expected; high), the share inside low .. high."""
    lines = []
    for kind in KINDS:
        pairs = [(r["predicted"][kind], r["truth"][kind]) for r in rows.values() if kind in r["truth"] and kind in r["predicted"]]
        if not pairs:
            continue
        errors = sorted(abs(p[1] - t) / t for p, t in pairs)
        share = {what: sum(test(p, t) for p, t in pairs) / len(pairs) for what, test in
                 {"low": lambda p, t: p[1] < t, "broken": lambda p, t: p[2] < t, "inside": lambda p, t: p[0] <= t <= p[2]}.items()}  # fmt: skip
        middle = (errors[(len(errors) - 1) // 2] + errors[len(errors) // 2]) / 2
        p95 = errors[min(len(errors) - 1, math.ceil(0.95 * len(errors)) - 1)]
        lines.append(
            f"{kind:<10} {len(pairs):>3} configurations: median {middle:.2%}, p95 {p95:.2%}, worst {errors[-1]:.2%}; too low {share['low']:.0%},"
            f" above the high end {share['broken']:.0%}, inside {share['inside']:.0%}"
        )
    return lines


def table(rows: dict[str, dict[str, Any]]) -> list[str]:
    lines = ["| configuration | M params | seconds | host MiB | not modelled | " + " | ".join(f"{k} (low .. high) MiB | true | error" for k in KINDS) + " |", "|" + "---|" * (5 + 3 * len(KINDS))]
    for name, r in rows.items():
        p, t = r["predicted"], r["truth"]
        if "error" in p:
            lines.append(f"| {name} | failed: {p['error']} |")
            continue
        cells = [name, f"{p['parameters'] / 1e6:.1f}", f"{p['seconds']:.2f}", f"{p['host'] >> 20}", str(p["not_modelled"])]
        for kind in KINDS:
            low, expected, high = (n / 2**20 for n in p[kind])
            true = t.get(kind)
            cells += [f"{expected:,.0f} ({low:,.0f} .. {high:,.0f})", "" if true is None else f"{true / 2**20:,.0f}", "" if true is None else f"{(p[kind][1] - true) / true:+.2%}"]
        lines.append("| " + " | ".join(cells) + " |")
        if "error" in t:
            lines.append(f"| {name}, the run | failed: {t['error']} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--gpu", default="")
    parser.add_argument("--truth")
    parser.add_argument("--save")
    parser.add_argument("--child", choices=("predict", "measure", "profile"))
    args = parser.parse_args()
    if args.child == "profile":
        import koila

        print(json.dumps(koila.measure_device(args.gpu)["name"]))
        return
    if args.child:
        print(json.dumps(predict(args.only, args.gpu) if args.child == "predict" else measure(args.only)))
        return
    names = [n for n in args.only.split(",") if n] or list(CASES)
    for unknown in set(names) - set(CASES):
        parser.error(f"no configuration {unknown}; there are {', '.join(CASES)}")
    runs = torch.cuda.is_available() and not args.dry and not args.truth
    gpu = args.gpu
    if not gpu and runs:
        gpu = "device-profile.json"
        child("profile", "", gpu)
    gpu = gpu or "h100-80gb"
    truths = {}
    if args.truth:
        with open(args.truth, encoding="utf-8") as f:
            truths = json.load(f)
    rows: dict[str, dict[str, Any]] = {}
    for name in names:
        rows[name] = {"predicted": child("predict", name, gpu), "truth": child("measure", name, gpu) if runs else truths.get(name, {})}
        print(f"{name} ...", file=sys.stderr)
    if args.save:
        with open(args.save, "w", encoding="utf-8") as f:
            json.dump({n: r["truth"] for n, r in rows.items()}, f, indent=1)
    print(*table(rows), "", *(summary(rows) or ["nothing was measured: run this where CUDA is, or give --truth"]), sep="\n")


if __name__ == "__main__":
    main()

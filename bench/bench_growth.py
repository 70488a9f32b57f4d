"""Does a long run grow, or slow down? Each program takes ever-new calls: what koila remembers of
them must stay bounded.

    python bench/bench_growth.py [--steps 100000] [--only NAME,...] [--part 1000]
                                 [--forget-after 16384]

Each program runs in a fresh process. `grown` is its resident memory after the last step less that
after the first part, both after a collection, in MB (10^6 bytes); a time is the mean processor time
of the steps of a part, the second and the last one. Plain PyTorch runs the same steps (`plain`).
With a smaller --forget-after, koila forgets more often: what grows then was not forgotten.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Wrap = Callable[[Any], Any]
KEPT = 1000


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def annealed(wrap: Wrap) -> Callable[[int], None]:
    """A temperature, a weight of a penalty and a learning rate that change in each step."""
    model = mlp()

    def step(i: int) -> None:
        x = wrap(torch.randn(16, 8))
        logits = model(x) / (1 + 1 / (i + 1))
        loss = F.cross_entropy(logits, torch.arange(16) % 4) + logits.square().mean() * (
            0.1 + 1e-7 * i
        )
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad, alpha=0.01 / (1 + 1e-5 * i))
                p.grad = None

    return step


def shapes(wrap: Wrap) -> Callable[[int], None]:
    """Batches and sequences of ever-new sizes."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def step(i: int) -> None:
        rows, length = 2 + i % 317, 1 + i // 317
        x = wrap(torch.ones(rows, length, 4))
        model(x).mean(1).square().sum().backward()
        model.zero_grad()

    return step


def functions(wrap: Wrap) -> Callable[[int], None]:
    """A new autograd.Function, a new module and new hooks in each step."""
    weight = torch.randn(8, requires_grad=True)

    def step(i: int) -> None:
        class Scale(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Any) -> Any:
                return x * 2

            @staticmethod
            def backward(ctx: Any, g: Any) -> Any:
                return g * 2

        layer = nn.Linear(8, 2)
        layer.register_forward_hook(lambda m, a, out: out + 1)
        x = wrap(torch.randn(16, 8))
        layer(Scale.apply(x * weight)).square().mean().backward()
        weight.grad = None

    return step


def code(wrap: Wrap) -> Callable[[int], None]:
    """Code that is compiled anew in each step, from a file of a new name."""
    weight = torch.randn(8, requires_grad=True)

    def step(i: int) -> None:
        scope: dict[str, Any] = {}
        text = "\n" * (i % 1000) + "def f(x, w):\n    return (x * w).sum()\n"
        exec(compile(text, f"<cell {i}>", "exec"), scope)
        scope["f"](wrap(torch.randn(16, 8)), weight).backward()
        weight.grad = None

    return step


def arguments(wrap: Wrap) -> Callable[[int], None]:
    """Complex numbers, strings and generators as arguments, new in each step."""
    weight = torch.randn(8, requires_grad=True)

    def step(i: int) -> None:
        x = wrap(torch.randn(16, 8))
        y = (x * weight * complex(1, 1e-6 * i)).real + torch.bernoulli(
            torch.full_like(x, 0.5), generator=torch.Generator().manual_seed(i)
        )
        y.sum().backward()
        weight.grad = None

    return step


def kept(wrap: Wrap) -> Callable[[int], None]:
    """A plain loop, of which the last thousand losses are kept as tensors."""
    model = mlp()
    losses: list[Any] = []

    def step(i: int) -> None:
        loss = model(wrap(torch.randn(16, 8))).square().mean()
        loss.backward()
        model.zero_grad()
        losses.append(loss.detach())
        del losses[:-KEPT]

    return step


PROGRAMS = {f.__name__: f for f in (annealed, shapes, functions, code, arguments, kept)}


def resident() -> int:
    """Bytes of resident memory; what the C library holds without need is given back before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096


def measure(name: str, how: str, n_steps: int, part: int, forget_after: int) -> None:
    torch.set_num_threads(1)
    if how == "koila":
        from koila import _core, lazy

        _core.forget_after(forget_after)
        wrap: Wrap = lazy
    else:

        def wrap(x: Any) -> Any:
            return x

    step = PROGRAMS[name](wrap)
    times, sizes = [], []
    for first in range(0, n_steps, part):
        start = time.process_time()
        for i in range(first, first + part):
            step(i)
        times.append((time.process_time() - start) / part * 1e6)
        sizes.append(resident())
    most = (max(sizes) - sizes[0]) / 1e6
    print(
        f"{name:10} {how:6} {n_steps:8,} steps  grown {(sizes[-1] - sizes[0]) / 1e6:7.1f} MB"
        f"  at most {most:7.1f} MB  step {times[1]:7.0f} us, at the end {times[-1]:7.0f} us"
        + (f"  {_core.memo_info()}" if how == "koila" else ""),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--only", default=",".join(PROGRAMS))
    parser.add_argument("--how", default="koila,plain")
    parser.add_argument("--part", type=int, default=1000)
    parser.add_argument("--forget-after", type=int, default=16384)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        measure(*given.one, given.steps, given.part, given.forget_after)
        return
    for name in given.only.split(","):
        for how in given.how.split(","):
            numbers = (given.steps, given.part, given.forget_after)
            names = ("--steps", "--part", "--forget-after")
            words = [x for option, n in zip(names, numbers, strict=True) for x in (option, str(n))]
            one = [sys.executable, __file__, *words, "--one", name, how]
            subprocess.run(one, check=True)


if __name__ == "__main__":
    main()

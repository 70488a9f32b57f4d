"""What koila costs where everything fits: the time of a step, lazy : plain, for six models.

    python bench/bench_overhead.py [--model mlp,gpt2-4] [--turns 40] [--seconds 0.25]
        [--device cuda]

Each model has a process of its own, with one thread. Four ways to run its step take turns of some
steps each, in another order each time, which last `--seconds`:

- plain: PyTorch without koila;
- again: the same, to see how far the clock is to be trusted: it should read 1.000;
- aside: koila in the steady state, where torch does the step alone and koila looks at one in 1024;
- recorded: under `koila.step_aside(False)` every step is recorded and run.

Told are the processor time of a plain step (on a GPU: of the clock), and for the others the median
over the turns of the time relative to plain's of the same turn, with the interval in which 95 of
100 such medians lie, of turns drawn anew from these. Many short turns (`--turns 400 --seconds 0.01`
for steps of less than a millisecond) tell 0.003 apart even beside other programs.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import meter
import torch
from torch import nn
from torch.nn import functional as F

import koila

Batch = tuple[torch.Tensor, ...]
Model = tuple[nn.Module, Callable[..., torch.Tensor], Batch]
WARM_UP = 40  # steps: koila steps aside in them


def classifier(net: nn.Module, rows: int, *shape: int) -> Model:
    def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    return net, loss_of, (torch.randn(rows, *shape), torch.randint(0, 10, (rows,)))


def layers(*sizes: int) -> nn.Module:
    parts: list[nn.Module] = []
    for a, b in zip(sizes, sizes[1:], strict=False):
        parts += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 8 * 8, 10),
    )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 64, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.lstm(x)[0][:, -1])


def gpt2(rows: int) -> Model:
    from small_gpt2 import small_gpt2

    model = small_gpt2(
        n_layer=4, n_head=4, n_embd=128, vocab_size=1000, n_positions=64, dropout=0.1
    )

    def loss_of(model: nn.Module, ids: torch.Tensor) -> Any:
        return model(input_ids=ids, labels=ids).loss

    return model, loss_of, (torch.randint(0, 1000, (rows, 64)),)


MODELS: dict[str, Callable[[], Model]] = {
    "mlp-tiny": lambda: classifier(layers(64, 64, 64, 10), 32, 64),
    "mlp": lambda: classifier(layers(784, 512, 512, 10), 128, 784),
    "conv": lambda: classifier(convolutions(), 32, 3, 32, 32),
    "lstm": lambda: classifier(Recurrent(), 16, 32, 32),
    "gpt2-4": lambda: gpt2(4),
    "gpt2-16": lambda: gpt2(16),
}


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def interval(values: list[float]) -> tuple[float, float]:
    """In which 95 of 100 medians lie of as many values drawn from these."""
    drawn = sorted(median(random.choices(values, k=len(values))) for _ in range(400))
    return drawn[9], drawn[-10]


def measure(name: str, turns: int, seconds: float, device: str) -> None:
    torch.manual_seed(0)
    meter.use(device)
    with meter.device():
        model, loss_of, batch = MODELS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def steps(n: int, lazy: bool) -> float:
        """Seconds of one of n steps."""
        start = meter.clock()
        for _ in range(n):
            given: Any = batch
            if lazy:
                given = koila.lazy(*batch)
                given = (given,) if len(batch) == 1 else given
            loss = loss_of(model, *given)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return (meter.clock() - start) / n

    def recorded(n: int) -> float:
        with koila.step_aside(False):
            return steps(n, True)

    def plain(n: int) -> float:
        return steps(n, False)

    ways = {"plain": plain, "again": plain, "aside": lambda n: steps(n, True), "recorded": recorded}
    for way in ways.values():
        way(WARM_UP)
    n = max(1, int(seconds / plain(10)))
    assert (plan := koila.last_plan()) is not None and plan.n_micro_batches == 1
    turns_of = []
    for _ in range(turns):
        order = random.sample(list(ways), len(ways))
        turns_of.append({what: ways[what](n) for what in order})
    told = [f"{name:9s} plain {median([t['plain'] for t in turns_of]) * 1e3:8.3f} ms"]
    for what in ("again", "aside", "recorded"):
        ratios = [t[what] / t["plain"] for t in turns_of]
        low, high = interval(ratios)
        told.append(f"{what} {median(ratios):.3f} ({low:.3f} to {high:.3f})")
    print("   ".join(told), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=",".join(MODELS), help="which, separated by commas")
    parser.add_argument("--turns", type=int, default=40, help="of each way")
    parser.add_argument("--seconds", type=float, default=0.25, help="that a turn lasts")
    meter.add_option(parser)
    arguments = parser.parse_args()
    names = arguments.model.split(",")
    if len(names) == 1:
        measure(names[0], arguments.turns, arguments.seconds, arguments.device)
    for name in names if len(names) > 1 else []:
        rest = ["--turns", str(arguments.turns), "--seconds", str(arguments.seconds)]
        rest += ["--device", arguments.device]
        subprocess.run([sys.executable, __file__, "--model", name, *rest], check=True)

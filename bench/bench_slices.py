"""Is the size of the slices that koila settles on as fast as the best one by hand?

    python bench/bench_slices.py [--model gpt2,convnet,mlp] [--budget 0.7,0.5,...] [--rounds 7]

Each model under five budgets: its gradients, and a share of what the whole step needs beyond them.
There:

- settling: `micro_batch(None)` runs until it has stayed with one size for 20 steps;
- by hand: every size of ¾, 1, 1½, 2, 3, 4, 6, 8, … times the fewest slices takes turns with the
  others, if it fits, and the fastest is the best (koila's fewest are 2, 4, 8, …: fewer may fit);
- the automatic choice, the best by hand, and the fewest slices then take turns in new rounds, four
  times as many, so that the best by hand is not the luckiest one, and a single cell can be trusted.

The numbers are ratios of the middle times, of this thread's processor time unless torch runs on
several threads; `--wall`: of the clock's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

import koila
from koila import _core

MIB = 2**20
SETTLED_AFTER, MOST_STEPS = 20, 150
Step = Callable[[], None]


class Model(NamedTuple):
    module: nn.Module
    loss: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
    inputs: torch.Tensor
    labels: torch.Tensor


def gpt2() -> Model:
    from small_gpt2 import small_gpt2

    model = small_gpt2(n_layer=2, n_head=4, n_embd=128, vocab_size=2048, n_positions=64)
    tokens = torch.randint(0, 2048, (24, 48))
    return Model(
        model,
        lambda m, x, y: m(input_ids=x, labels=y).loss,
        tokens,
        tokens,
    )


def convnet() -> Model:
    layers: list[nn.Module] = []
    for n_in, n_out in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(n_in, n_out, 3, padding=1), nn.GroupNorm(4, n_out), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(32 * 16, 10)]
    return Model(
        nn.Sequential(*layers),
        lambda m, x, y: nn.functional.cross_entropy(m(x), y),
        torch.randn(64, 3, 24, 24),
        torch.randint(0, 10, (64,)),
    )


def mlp() -> Model:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(384, 384), nn.GELU()]
    return Model(
        nn.Sequential(*layers, nn.Linear(384, 10)),
        lambda m, x, y: nn.functional.cross_entropy(m(x), y),
        torch.randn(2048, 384),
        torch.randint(0, 10, (2048,)),
    )


MODELS: dict[str, Callable[[], Model]] = {"gpt2": gpt2, "convnet": convnet, "mlp": mlp}


def step_of(m: Model) -> Step:
    def step() -> None:
        m.module.zero_grad(set_to_none=True)
        x, y = koila.lazy(m.inputs, m.labels)
        m.loss(m.module, x, y).backward()

    return step


def whole_peak(step: Step) -> int:
    """Bytes above what is held."""
    step()
    _core.cpu_bytes_reset_peak()
    step()
    return int(_core.cpu_bytes_peak()) - int(_core.cpu_bytes_current())


class Bench(NamedTuple):
    step: Step
    budget: int
    clock: Callable[[], float]
    rounds: int

    def seconds(self, size: int | str | None) -> float:
        with koila.budget(self.budget), koila.micro_batch(size):
            start = self.clock()
            self.step()
            return self.clock() - start

    def plan(self, size: int | str | None) -> koila.Plan:
        self.seconds(size)
        plan = koila.last_plan()
        assert plan is not None
        assert plan.measured_peak_bytes is not None and plan.measured_peak_bytes <= self.budget
        return plan

    def in_turns(
        self, sizes: list[int | str | None], n_rounds: int
    ) -> dict[int | str | None, float]:
        """The middle of the seconds of each."""
        times: dict[int | str | None, list[float]] = {size: [] for size in sizes}
        for turn in range(n_rounds):
            for size in sizes if turn % 2 else reversed(sizes):
                times[size].append(self.seconds(size))
        return {size: statistics.median(of) for size, of in times.items()}

    def settle(self) -> tuple[koila.Plan, int]:
        """The plan that it stays with, and the steps until then."""
        same: list[int] = []
        for n_steps in range(1, MOST_STEPS + 1):
            plan = self.plan(None)
            same = (
                [*same, plan.micro_batch] if plan.micro_batch in same[-1:] else [plan.micro_batch]
            )
            if n_steps > 2 * SETTLED_AFTER and len(same) >= SETTLED_AFTER:
                break
        return plan, n_steps - len(same)


def sizes_by_hand(fewest: koila.Plan) -> list[int]:
    """Rows of a slice, the largest first."""
    n = fewest.n_micro_batches
    sizes = [-(-fewest.batch // (n - n // 4)), fewest.micro_batch]
    while sizes[-1] > 1 and n <= 64 * fewest.n_micro_batches:
        for slices in (n + n // 2, 2 * n):
            rows = -(-fewest.batch // slices)
            if rows < sizes[-1]:
                sizes.append(rows)
        n *= 2
    return sizes


def compare(b: Bench) -> tuple[float, str]:
    """Automatic to best by hand, and a row of the table."""
    fewest = b.plan("fewest")
    while koila.last_plan().n_micro_batches != b.plan("fewest").n_micro_batches:
        pass  # what operators use inside is known after the first runs
    fewest = b.plan("fewest")
    chosen, n_steps = b.settle()
    by_hand_all = sizes_by_hand(fewest)
    sizes: list[int | str | None] = [s for s in by_hand_all if b.plan(s).micro_batch == s]
    by_hand = b.in_turns(sizes, b.rounds)
    best = min(by_hand, key=lambda size: by_hand[size])
    last = b.in_turns([None, best, "fewest"], 4 * b.rounds)
    ratio = last[None] / last[best]
    return ratio, (
        f"{b.budget / MIB:8.1f} {fewest.micro_batch:7} {chosen.micro_batch:7} {best:7} "
        f"{1e3 * last['fewest']:8.1f} {1e3 * last[None]:8.1f} {1e3 * last[best]:8.1f} "
        f"{last['fewest'] / last[best]:8.3f} {ratio:8.3f} {n_steps:6}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=",".join(MODELS))
    parser.add_argument("--budget", default="0.7,0.5,0.35,0.25,0.15")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--wall", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    koila.lazy(torch.zeros(1))  # bytes are counted from now on
    clock = time.perf_counter if args.wall or args.threads > 1 else time.thread_time
    ratios = []
    for name in args.model.split(","):
        torch.manual_seed(0)
        model = MODELS[name]()
        step = step_of(model)
        peak = whole_peak(step)
        of_gradients = sum(p.nbytes for p in model.module.parameters())
        model.module.zero_grad(set_to_none=True)
        held = int(_core.cpu_bytes_current())
        print(
            f"{name}: {peak / MIB:.1f} MiB beyond {held / MIB:.1f}, load {os.getloadavg()[0]:.1f}"
        )
        print("  budget  fewest  chosen by hand  fewest   chosen  by hand   fewest   chosen  after")
        print("     MiB    rows    rows    rows      ms       ms       ms  to best  to best  steps")
        for share in args.budget.split(","):
            allowed = held + of_gradients + int(float(share) * (peak - of_gradients))
            ratio, row = compare(Bench(step, allowed, clock, args.rounds))
            ratios.append(ratio)
            print(row, flush=True)
    print(
        f"chosen to best by hand: at most {max(ratios):.3f}, middle {statistics.median(ratios):.3f}"
    )


if __name__ == "__main__":
    main()

"""Loops over samples against plain PyTorch and micro-batches cut by hand, as ratios.

    python bench/bench_samples.py [--repeat 5] [--only features] [--rows 64]

A step: a net of 256 over 48 positions a sample, with cross entropy, written as a loop over the
samples. Three ways take turns: plain; by hand, with the fewest slices (powers of two) that need at
most half of plain's activations; koila with a budget of that half.
"""

import argparse
import math

import torch
from in_turns import in_turns
from meter import MIB
from torch import nn
from torch.nn import functional as F

from koila import lazy

WIDTH, POSITIONS, CLASSES = 256, 48, 16


def net():
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.GELU(),
        nn.Linear(WIDTH, WIDTH),
        nn.GELU(),
        nn.Linear(WIDTH, CLASSES),
    )


def rows(model, x, y):
    """for row in x: everything"""
    return sum(F.cross_entropy(model(row), label) for row, label in zip(x, y)) / len(x)


def features(model, x, y):
    """features of the batch; for row in features: the head"""
    return rows(model[2:], model[:2](x), y)


def stacked(model, x, y):
    """the outputs of all rows, stacked"""
    return F.cross_entropy(torch.stack([model(row) for row in x]).flatten(0, 1), y.flatten())


def chunks(model, x, y):
    """for part in x.chunk(16)"""
    out = torch.cat([model(part) for part in x.chunk(16)])
    return F.cross_entropy(out.flatten(0, 1), y.flatten())


def compare(loss_of, n_rows, repeat):
    def plain(model, x, y, n):
        loss_of(model, x, y).backward()

    def by_hand(model, x, y, n):
        m = math.ceil(len(x) / n)
        for i in range(0, len(x), m):
            part = slice(i, i + m)
            (loss_of(model, x[part], y[part]) * (len(x[part]) / len(x))).backward()

    def in_half(model, x, y, n):
        x, y = lazy(x, y, batch=0)
        loss_of(model, x, y).backward()

    torch.manual_seed(0)
    model = net()
    batch = torch.randn(n_rows, POSITIONS, WIDTH), torch.randint(CLASSES, (n_rows, POSITIONS))
    turns = in_turns(model, batch, plain, by_hand, in_half, repeat)
    t, peaks, plan, allowed = turns.seconds, turns.peaks, turns.plan, turns.allowed
    print(
        f"{loss_of.__name__:9} | plain {t[plain] * 1e3:7.1f} ms {peaks[plain] / MIB:6.1f} MiB"
        f" | by hand in {turns.n_by_hand} {t[by_hand] / t[plain]:5.2f} : plain, peak"
        f" {peaks[by_hand] / allowed:5.2f} : half"
        f" | koila in {plan.n_micro_batches} {t[in_half] / t[plain]:5.2f} : plain,"
        f" {t[in_half] / t[by_hand]:5.2f} : by hand, peak {peaks[in_half] / allowed:5.2f} : half"
        f" | {plan.n_run / plan.n_recorded:4.2f} runs an operator, {len(plan.gathers)} gathers"
        f" | apart {turns.apart[by_hand]:.0e} {turns.apart[in_half]:.0e}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    cases = {f.__name__: f for f in (rows, features, stacked, chunks)}
    parser.add_argument("--only", choices=cases)
    parser.add_argument("--rows", type=int, default=64)
    options = parser.parse_args()
    for name, loss_of in cases.items():
        if options.only in (None, name):
            compare(loss_of, options.rows, options.repeat)


if __name__ == "__main__":
    main()

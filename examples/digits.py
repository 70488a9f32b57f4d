"""Train a convolutional net on scikit-learn's digits in a third of the memory that plain PyTorch
needs: one line is added.

    python examples/digits.py [--steps 40] [--report report.html]

The budget is real: torch's allocator refuses what goes above it, for plain PyTorch and for koila
alike.
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import koila
from koila import lazy
from koila._core import (
    cpu_bytes_install,
    cpu_bytes_peak,
    cpu_bytes_reset_peak,
)  # what torch's CPU allocator holds, to the byte

MIB = 2**20


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 16, 10),
    )  # fmt: skip


def data():
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return images[train], labels[train], images[test], labels[test]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--report", help="write the last step's page here")
    args = parser.parse_args()
    cpu_bytes_install()
    x, y, x_test, y_test = data()

    # what plain PyTorch needs: one step of the whole training set
    model = make_model()
    cpu_bytes_reset_peak()
    start = time.perf_counter()
    F.cross_entropy(model(x), y).backward()
    seconds = time.perf_counter() - start
    needed = cpu_bytes_peak()
    budget = needed // 3
    model.zero_grad()
    print(
        f"plain PyTorch needs     {needed / MIB:7.1f} MiB for a step of {len(x)} images, "
        f"{seconds:.2f} s"
    )
    print(f"the budget is           {budget / MIB:7.1f} MiB")
    with koila.budget(budget):
        try:
            F.cross_entropy(model(x), y).backward()
            print("plain PyTorch under it  finishes (unexpectedly)")
        except RuntimeError as e:
            print(f"plain PyTorch under it  fails: {str(e).splitlines()[0][:110]}")
    model.zero_grad()

    # the same loop with koila
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    highest, seconds = 0, 0.0
    with koila.budget(budget):
        for _ in range(args.steps):
            start = time.perf_counter()
            input, label = lazy(x, y, batch=0)  # the only line added
            loss = F.cross_entropy(model(input), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seconds += time.perf_counter() - start
            plan = koila.last_plan()
            highest = max(highest, plan.measured_peak_bytes or 0)
        with torch.no_grad():
            accuracy = (model(lazy(x_test)).argmax(1) == y_test).float().mean().item()
    print(
        f"koila under it          finishes: {plan.n_micro_batches} slices of {plan.micro_batch} "
        "rows"
    )
    print(f"  predicted peak        {plan.predicted_peak_bytes / MIB:7.1f} MiB")
    print(f"  measured peak         {highest / MIB:7.1f} MiB")
    print(f"  time                  {seconds / args.steps:7.2f} s a step ({args.steps} steps)")
    print(f"  loss                  {loss.item():7.3f}")
    print(f"  test accuracy         {100 * accuracy:7.1f} %")
    if args.report:
        plan.save(args.report)
    assert highest <= budget, "the measured peak is above the budget"
    assert args.steps < 40 or accuracy >= 0.95, "the accuracy is below 95 %"


if __name__ == "__main__":
    main()

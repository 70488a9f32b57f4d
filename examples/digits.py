"""Train a convolutional net on scikit-learn's digits in a third of the memory of plain PyTorch,
with one added line.

    python examples/digits.py [--steps 40] [--report report.html]

The budget is real: torch's allocator refuses requests above it, for plain PyTorch and for koila
alike.
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import koila
from koila import lazy, memlab

MIB = 2**20


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.GroupNorm(8, 32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.GroupNorm(8, 32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 16, 10),
    )


def data():
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return images[train], labels[train], images[test], labels[test]


def timed(step, n):
    """Seconds of a call of step(), on average over n calls."""
    start = time.perf_counter()
    for _ in range(n):
        step()
    return (time.perf_counter() - start) / n


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--report", help="write the last step's page here")
    args = parser.parse_args()
    memlab.start()  # count the bytes of torch's CPU allocator from here on
    images, labels, test_images, test_labels = data()

    # The memory of plain PyTorch, for a step of the whole training set. The first step warms up.
    model = make_model()

    def plain_step():
        model.zero_grad()
        F.cross_entropy(model(images), labels).backward()

    plain_step()
    with memlab.measure("cpu") as needed:
        plain_seconds = timed(plain_step, 3)
    budget = needed.peak // 3
    model.zero_grad()
    print(f"plain PyTorch needs     {needed.peak / MIB:7.1f} MiB for {len(images)} images")
    print(f"  time                  {plain_seconds:7.2f} s for forward and backward")
    print(f"the budget is           {budget / MIB:7.1f} MiB")
    with koila.budget(budget):
        try:
            F.cross_entropy(model(images), labels).backward()
            print("plain PyTorch under it  finishes (unexpectedly)")
        except RuntimeError as e:
            print(f"plain PyTorch under it  fails: {str(e).splitlines()[0][:110]}")
    model.zero_grad()

    # the same loop with koila
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    seconds, highest = [], 0
    with koila.budget(budget):
        for _ in range(args.steps):
            start = time.perf_counter()
            input, label = lazy(images, labels, batch=0)  # the only line added
            loss = F.cross_entropy(model(input), label)
            optimizer.zero_grad()
            loss.backward()
            seconds.append(time.perf_counter() - start)
            optimizer.step()
            plan = koila.last_plan()
            highest = max(highest, plan.measured_peak_bytes or 0)
        with torch.no_grad():
            predicted = model(lazy(test_images)).argmax(1)
            accuracy = (predicted == test_labels).float().mean().item()
    warm = seconds[1:] or seconds
    print(f"koila under it          finishes: {plan.n_micro_batches} slices of {plan.micro_batch}")
    print(f"  predicted peak        {plan.predicted_peak_bytes / MIB:7.1f} MiB")
    print(f"  measured peak         {highest / MIB:7.1f} MiB")
    print(f"  time                  {sum(warm) / len(warm):7.2f} s for forward and backward")
    print(f"  first step            {seconds[0]:7.2f} s, planning included")
    print(f"  loss                  {loss.item():7.3f} after {args.steps} steps")
    print(f"  test accuracy         {100 * accuracy:7.1f} %")
    if args.report:
        plan.save(args.report)
    assert highest <= budget, "the measured peak is above the budget"
    assert args.steps < 40 or accuracy >= 0.95, "the accuracy is below 95 %"


if __name__ == "__main__":
    main()

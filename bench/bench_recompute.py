"""Samples of a deep convolution net, at shares of plain PyTorch's activations: results that are
dropped and computed again, against checkpointing by hand, as ratios.

    python bench/bench_recompute.py [--repeat 3] [--blocks 24] [--samples 1] [--norm group]
        [--shares 0.5,0.3] [--device cuda]

With batch norm (`--norm batch`) and several samples all of them wait between the loops over slices.

By hand: torch.utils.checkpoint around groups of blocks, with the group size that needs the least
memory. Processor time (on a GPU: of the clock), the best of all turns; on a GPU the net is four
times as wide and its image twice as large, and each share is tried without host memory too. Peaks
are the bytes of torch's allocator above model and data. Activations are what is above the
gradients.
"""

import argparse
import itertools

import meter
import torch
from in_turns import difference
from meter import MIB
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import koila
from koila import lazy

SIZES = {"cpu": (16, 96), "cuda": (64, 192)}  # channels, and pixels of an edge
CLASSES = 10
SHARES = "0.8,0.6,0.5,0.4,0.3,0.2"


NORMS = {"group": lambda width: nn.GroupNorm(4, width), "batch": nn.BatchNorm2d}


class Block(nn.Module):
    def __init__(self, width, norm):
        super().__init__()
        bias = norm is not nn.BatchNorm2d  # which takes it away again
        self.inner = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=bias),
            norm(width),
            nn.SiLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=bias),
            norm(width),
        )

    def forward(self, x):
        return x + self.inner(x)


class Net(nn.Module):
    def __init__(self, n_blocks, width, norm):
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(width, norm) for _ in range(n_blocks)))
        self.head = nn.Linear(width, CLASSES)
        self.group = 0  # blocks that are checkpointed together; 0: none is

    def forward(self, x):
        x = self.first(x)
        if not self.group:
            x = self.blocks(x)
        for i in range(0, len(self.blocks), self.group) if self.group else ():
            x = checkpoint(self.blocks[i : i + self.group], x, use_reentrant=False)
        return self.head(x.mean((2, 3)))


def measure(model, x, y, repeat, wrap=lambda *v: v, budget=None):
    """Seconds of the fastest turn, and peak bytes of the last."""
    seconds = []
    for _ in range(repeat):
        model.zero_grad(set_to_none=True)
        base = meter.held()
        meter.reset_peak()
        start = meter.clock()
        with koila.budget(None if budget is None else base + budget), koila.axes("batch"):
            sample, label = wrap(x, y)
            F.cross_entropy(model(sample), label).backward()
        seconds.append(meter.clock() - start)
        del sample, label
    return min(seconds), meter.peak() - base


def in_host_memory(plan):
    return f"{plan.n_offloaded} values, {plan.offloaded_bytes / MIB:.0f} MiB, in host memory"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--norm", choices=NORMS, default="group")
    parser.add_argument("--shares", default=SHARES, help="of the activations, such as 0.5,0.3")
    meter.add_option(parser)
    options = parser.parse_args()
    torch.manual_seed(0)
    width, size = SIZES[options.device]
    meter.use(options.device)
    with meter.device():
        model = Net(options.blocks, width, NORMS[options.norm])
        x = torch.randn(options.samples, 3, size, size)
        y = torch.randint(CLASSES, (options.samples,))
    gradients = sum(p.nbytes for p in model.parameters())
    measure(model, x, y, 2)
    plain, peak = measure(model, x, y, options.repeat)
    expected = [p.grad.clone() for p in model.parameters()]
    activations = peak - gradients
    print(f"plain: {plain:.3f} s, {activations / MIB:.1f} MiB of activations")
    by_hand = {}
    for group in (1, 2, 3, 4, 6, 8, 12):
        model.group = group
        by_hand[group] = measure(model, x, y, options.repeat)
    model.group = min(by_hand, key=lambda g: by_hand[g][1])
    seconds, least = by_hand[model.group]
    print(
        f"by hand, groups of {model.group}: {(least - gradients) / activations:.2f} of them, "
        f"{seconds / plain:.2f} x plain's time"
    )
    model.group = 0
    uses = ("auto",) if options.device == "cpu" else ("auto", "off")
    shares = [float(share) for share in options.shares.split(",")]
    for share, use in itertools.product(shares, uses):
        budget = gradients + int(share * activations)
        try:
            with koila.host_memory(use):
                seconds, used = measure(model, x, y, options.repeat, lazy, budget)
        except koila.OutOfMemory as e:
            print(f"koila at {share:.2f}: {e}")
            continue
        plan = koila.last_plan()
        print(
            f"koila at {share:.2f}: {(used - gradients) / activations:.2f}, "
            f"{seconds / plain:.2f} x plain's time, {plan.n_micro_batches} slices, "
            f"work {plan.replay_ratio:.2f}, {plan.n_recomputed} operators computed again, "
            f"{in_host_memory(plan)}, apart {difference(model, expected):.0e}"
        )


if __name__ == "__main__":
    main()

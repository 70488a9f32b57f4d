"""Values read in the middle of a step against plain PyTorch, as ratios.

    python bench/bench_reads.py [--repeat 5] [--layers 4,16,64] [--reads 1000,2000,4000]

A step: a tower of layers (Linear and ReLU, 256 wide, 4096 rows), each with a forward hook that
reads `out.std().item()`, a mean of squares, backward. Three ways take turns: plain; koila on the
whole batch; koila with half of the memory that plain's activations take. Then a chain of reads,
each of one operator on four numbers: what a read costs beside its work, and whether that grows.
Times are of the processor, with one thread: others on the machine move them least.
"""

import argparse
import os
import time

import torch
from torch import nn

import koila
from koila import _core, lazy

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
WIDTH, ROWS = 256, 4096


def tower(n):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(n)]
    told = []
    for layer in layers:
        layer.register_forward_hook(lambda m, i, out: told.append(out.std().item()))
    return nn.Sequential(*layers), told


def step(model, told, x, wrap):
    told.clear()
    model.zero_grad(set_to_none=True)
    model(wrap(x)).square().mean().backward()
    return list(told)


def seconds(f):
    begun = time.process_time()
    f()
    return time.process_time() - begun


def hooks(n, repeat):
    model, told = tower(n)
    x = torch.randn(ROWS, WIDTH)
    gradients = sum(p.numel() * 4 for p in model.parameters())

    def half():
        model.zero_grad(set_to_none=True)
        activations = n * 2 * ROWS * WIDTH * 4
        with koila.budget(_core.cpu_bytes_current() + gradients + activations // 2):
            step(model, told, x, lazy)

    ways = {
        "plain": lambda: step(model, told, x, lambda x: x),
        "fits": lambda: step(model, told, x, lazy),
        "half": half,
    }
    expected = step(model, told, x, lambda x: x)
    for way in ("fits", "half"):
        ways[way]()
        error = max(abs(a - b) / abs(a) for a, b in zip(expected, told, strict=True))
        assert error < 1e-5, (way, error)
    best = dict.fromkeys(ways, float("inf"))
    ratio, cost = {}, {}
    for _ in range(repeat):
        for way, run in ways.items():
            best[way] = min(best[way], seconds(run))
            if way == "plain":
                continue
            ratio[way] = koila.last_plan().replay_ratio
            reads = [p for p in koila.plans()[:-1] if p.asked_by == "item"][-n:]
            cost[way] = max(p.n_run / p.n_micro_batches for p in reads)
    times = [best[way] / best["plain"] for way in ("fits", "half")]
    print(
        f"| hooks, {n} layers | {best['plain'] * 1e3:.0f} ms | {times[0]:.2f} | {times[1]:.2f} | "
        f"{ratio['fits']:.2f}, {ratio['half']:.2f} | {cost['fits']:.0f}, {cost['half']:.0f} |",
        flush=True,
    )


def chain(n, wrap):
    x = wrap(torch.randn(4))
    for _ in range(n):
        x = x * 1.0001
        x.sum().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--layers", default="4,16,64")
    parser.add_argument("--reads", default="1000,2000,4000")
    given = parser.parse_args()
    _core.cpu_bytes_install()
    print("| | plain | fits : plain | half : plain | work : recorded | operators a read |")
    print("|---|---|---|---|---|---|")
    for n in map(int, given.layers.split(",")):
        hooks(n, given.repeat)
    print("\n| reads in a chain | plain | koila | µs a read |\n|---|---|---|---|")
    for n in map(int, given.reads.split(",")):
        plain = seconds(lambda n=n: chain(n, lambda x: x))
        ours = seconds(lambda n=n: chain(n, lazy))
        print(f"| {n} | {plain:.3f} s | {ours:.2f} s | {ours / n * 1e6:.0f} |", flush=True)


if __name__ == "__main__":
    main()

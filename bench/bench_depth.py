"""Deep programs and long ones: what an operator, a step, a view or a read costs as a program grows.

    python bench/bench_depth.py [--only chain,recurrent,views,reads,writes] [--most 1]

Each size runs in a fresh process, in a thread with a stack of 256 KiB: what recurses as deep as a
program is long dies there. Times are processor time in microseconds per operator (step, view,
read); they must not grow with the size. `--most` scales the sizes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

SIZES = {
    "chain": [10_000, 100_000, 1_000_000],
    "recurrent": [1_000, 10_000, 100_000],
    "views": [1_000, 10_000, 100_000],
    "reads": [100, 1_000, 10_000],
    "writes": [100, 1_000, 10_000],
}
Wrap = Callable[[Any], Any]


def chain(wrap: Wrap, n: int) -> None:
    """n operators, one after the other, and their backward; then all is freed."""
    w = torch.full((4,), 0.5, requires_grad=True)
    x = torch.ones(8, 4)
    y = wrap(x) * w
    for _ in range(n):
        y = y + 1
    y.sum().backward()
    assert w.grad is not None and torch.equal(w.grad, x.sum(0))


def recurrent(wrap: Wrap, n: int) -> None:
    """A recurrent net by hand, unrolled n steps."""
    a, b = (torch.full((4, 4), 0.1, requires_grad=True) for _ in range(2))
    h = torch.zeros(8, 4)
    for x in wrap(torch.ones(n, 8, 4)).unbind():
        h = torch.tanh(x @ a + h @ b)
    h.square().sum().backward()


def views(wrap: Wrap, n: int) -> None:
    """n views of one tensor, kept, and read."""
    y = wrap(torch.ones(8, 4)) * 2
    kept = [y[i % 8] for i in range(n)]
    sum(kept).sum().item()


def reads(wrap: Wrap, n: int) -> None:
    """A value is read after each operator."""
    y = wrap(torch.ones(8, 4)) * 2
    for _ in range(n):
        y = y * 1.0
        y.sum().item()


def writes(wrap: Wrap, n: int) -> None:
    """n views of one tensor, which is written after each."""
    y = wrap(torch.ones(8, 4)) * 2
    kept = []
    for i in range(n):
        kept.append(y[i % 8])
        y.add_(1)
    y.sum().item()


def measure(name: str, how: str, n: int) -> None:
    torch.set_num_threads(1)
    wrap: Wrap = torch.clone
    if how == "koila":
        from koila import lazy

        def whole(x: Any) -> Any:
            return lazy(x, batch=1 if x.dim() == 3 else 0)

        wrap = whole
    globals()[name](wrap, 50)
    start = time.process_time()
    thread = threading.Thread(target=globals()[name], args=(wrap, n))
    thread.start()
    thread.join()
    each = (time.process_time() - start) / n * 1e6
    print(f"{name:10} {how:6} {n:10,}  {each:8.1f} us each", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(SIZES))
    parser.add_argument("--how", default="koila,plain")
    parser.add_argument("--most", type=float, default=1)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        threading.stack_size(256 << 10)
        name, how, n = given.one
        measure(name, how, int(n))
        return
    for name in given.only.split(","):
        for n in SIZES[name]:
            for how in given.how.split(","):
                one = [name, how, str(int(n * given.most))]
                subprocess.run([sys.executable, __file__, "--one", *one], check=True)


if __name__ == "__main__":
    main()

"""Time to record and plan a step without running it: shaped like GPT-3, on the meta device, at 24,
48 and 96 layers.

    python bench/bench_plan_ahead.py

Processor seconds of one thread, minimum of three; the first one also fills the cache of shapes. On
a busy 2-core x86-64 machine:

    layers  operators     first     again  us/operator
        24       2840    0.198s    0.063s  22.3
        48       5651    0.128s    0.127s  22.4
        96      11267    0.263s    0.255s  22.6
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import koila

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "python"))
from test_plan_ahead import GPT, meta, next_token, on_meta


def seconds(f: Callable[[], Any]) -> tuple[float, Any]:
    t = time.process_time()
    result = f()
    return time.process_time() - t, result


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'layers':>6}  {'operators':>9}  {'first':>8}  {'again':>8}  us/operator")
    for layers in (24, 48, 96):
        step, ids = next_token(on_meta(GPT, layers)), meta(32, 2048, dtype=torch.long)
        first, plan = seconds(lambda: koila.plan(step, ids, budget="4TiB"))
        again = min(seconds(lambda: koila.plan(step, ids, budget="4TiB"))[0] for _ in range(3))
        print(
            f"{layers:>6}  {plan.n_recorded:>9}  {first:7.3f}s  {again:7.3f}s  "
            f"{again / plan.n_recorded * 1e6:.1f}"
        )


if __name__ == "__main__":
    main()

"""What being told costs a step: what the log and on_step() do in each, measured apart from the
step, whose own time varies more than that.

    python bench/bench_told.py

Told are processor microseconds, the best of seven turns, and their part of a step of 10 ms.
"""

import logging
import timeit

import torch

import koila
from koila import _core, _log, _on_step, lazy

LONG_STEP_US = 10e3


def best_us(call, n):
    return 1e6 * min(timeit.repeat(call, number=n, repeat=7, timer=timeit.time.process_time)) / n


def main():
    logger = logging.getLogger("koila")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    weight = torch.randn(64, 64, requires_grad=True)
    with koila.micro_batch(16):
        (lazy(torch.randn(64, 64)) @ weight).sum().backward()
    number = _core.last_backward()
    logger.setLevel(logging.CRITICAL)
    costs = {"log off, a new plan": best_us(lambda: _log.told(number, 0, 0), 20000)}
    costs["log off, a plan that it was asked about"] = 0.0  # C does not ask again
    logger.setLevel(logging.INFO)
    costs["log at INFO, a plan that was told"] = 0.0  # C does not ask: python/ext/run/tell.c
    costs["log at INFO, a new plan"] = best_us(lambda: _log.told(number, 0, 0), 500)
    listener = koila.on_step(lambda told: None)
    costs["on_step()"] = best_us(lambda: _on_step._tell(number), 2000)
    listener.remove()
    costs["on_step(), which looks at step.plan"] = best_us(
        lambda: koila.Plan(_core.plan_numbered(number)), 500
    )
    for name, us in costs.items():
        print(f"{name:<40} {us:8.2f} us, {100 * us / LONG_STEP_US:.3f} % of a step of 10 ms")


if __name__ == "__main__":
    main()

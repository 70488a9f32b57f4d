"""Ways to run one training step, which take turns: plain, by hand in slices, and koila, one of them
within half of plain's activations. For the programs beside it."""

import time
from typing import NamedTuple

import meter

import koila


class Turns(NamedTuple):
    """Of each way, by its function. Bytes are above model and data."""

    seconds: dict  # the fastest turn
    peaks: dict  # bytes, of the last turn
    apart: dict  # how far its gradients are from plain's, relative to the largest
    allowed: int  # bytes: all gradients and half of plain's activations
    n_by_hand: int  # slices, the fewest (powers of two) that keep to `allowed`
    plan: koila.Plan  # of the last turn of `in_half`


def once(step, model, batch, n):
    """Seconds, and peak bytes above model and data."""
    model.zero_grad(set_to_none=True)
    base = meter.held()
    meter.reset_peak()
    start = time.perf_counter()
    step(model, *batch, n)
    return time.perf_counter() - start, meter.peak() - base


def difference(model, gradients):
    return max(
        float((p.grad - g).abs().max() / g.abs().max())
        for p, g in zip(model.parameters(), gradients)
    )


def in_turns(model, batch, plain, by_hand, in_half, repeat, others=()):
    """Each way is called with (model, *batch, slices by hand); `in_half` under a budget."""
    once(plain, model, batch, 1)
    peak = once(plain, model, batch, 1)[1]
    gradients = [p.grad.clone() for p in model.parameters()]
    of_gradients = sum(g.nbytes for g in gradients)
    allowed = of_gradients + (peak - of_gradients) // 2
    n = 1
    while once(by_hand, model, batch, n)[1] > allowed:
        n *= 2
    times, peaks, apart = {}, {}, {}
    for turn in range(repeat + 1):  # the first one warms up
        for step in (plain, *others, by_hand, in_half):
            model.zero_grad(set_to_none=True)
            budget = meter.held() + allowed if step is in_half else None
            with koila.budget(budget):
                seconds, peaks[step] = once(step, model, batch, n)
            apart[step] = difference(model, gradients)
            if turn:
                times.setdefault(step, []).append(seconds)
    best = {step: min(all_of) for step, all_of in times.items()}
    return Turns(best, peaks, apart, allowed, n, koila.last_plan())

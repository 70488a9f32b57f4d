"""Ways to run one training step, which take turns: plain, by hand in slices, and koila, one of them
within half of plain's activations. For the programs beside it."""

import time
from typing import NamedTuple

import meter

import koila

NOISE = 1e-4  # of the largest gradient: smaller ones are zero but for rounding


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


def gradients_of(model):
    return [p.grad for p in model.parameters() if p.grad is not None]


def difference(model, gradients):
    most = max(g.abs().max() for g in gradients)
    return max(
        float((p - g).abs().max() / max(g.abs().max(), most * NOISE))
        for p, g in zip(gradients_of(model), gradients, strict=True)
    )


def in_turns(model, batch, plain, by_hand, in_half, repeat, others=()):
    """Each way is called with (model, *batch, slices by hand); `in_half` under a budget."""
    once(plain, model, batch, 1)
    peak = once(plain, model, batch, 1)[1]
    gradients = [g.clone() for g in gradients_of(model)]
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

"""What the recipes share: the table of memory and time at three budgets.

Each recipe has a step (forward and backward of one batch) and hands it to `main()`: without options
it trains under a third of the memory that plain PyTorch needs, with `--table` it measures.
"""

import argparse
import time

import torch

import koila
from koila import lazy, memlab

MIB = 2**20
BUDGETS = (2 / 3, 1 / 2, 1 / 3)  # of plain PyTorch's peak


def plain(values):
    return values


def lazily(values):
    return lazy(*values) if len(values) > 1 else lazy(values[0])


def step_of(model, loss_of, batch, wrap):
    """Gradients of one batch, made lazy or not; the random numbers are the same each time."""
    model.zero_grad()
    torch.manual_seed(0)
    values = wrap(batch)
    loss = loss_of(model, *values) if isinstance(values, tuple) else loss_of(model, values)
    loss.backward()
    return loss


def gradients(model):
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def measured(model, loss_of, batch, wrap, budget=None):
    """(peak bytes that torch held, seconds of the processor) of a step that another went before."""
    with koila.budget(budget):
        step_of(model, loss_of, batch, wrap)
        model.zero_grad()
        with memlab.measure("cpu") as m:
            start = time.process_time()
            step_of(model, loss_of, batch, wrap)
            seconds = time.process_time() - start
    return m.peak, seconds


def described(plan):
    """How a step was cut, in a few words."""
    slices = str(plan.n_micro_batches)
    if plan.axis is not None:
        slices = f"{plan.axis.n_slices} along dim {plan.axis.dim}"
    return slices + (f", {plan.n_recomputed} operators again" if plan.n_recomputed else "")


def table(model, loss_of, batch, turns):
    """Print a step's memory and time: plain PyTorch, and koila at each budget. They take turns, for
    a machine is faster at times; the best of each counts."""
    step_of(model, loss_of, batch, plain)
    exact = gradients(model)
    peak, _ = measured(model, loss_of, batch, plain)
    ways = {None: plain} | {int(part * peak): lazily for part in BUDGETS}
    peaks = dict.fromkeys(ways, 0)
    best = dict.fromkeys(ways, float("inf"))
    told = {}
    for _ in range(turns):
        for budget, wrap in ways.items():
            highest, seconds = measured(model, loss_of, batch, wrap, budget)
            peaks[budget] = max(peaks[budget], highest)
            best[budget] = min(best[budget], seconds)
            off = ((gradients(model) - exact).norm() / exact.norm()).item()
            assert off < 1e-4, "these are not the gradients of the full batch"
            told[budget] = (described(koila.last_plan()) if budget else "1", off)
    print("| | budget, MiB | peak, MiB | time : plain | slices | gradients off by |")
    print("|---|---|---|---|---|---|")
    for budget in ways:
        name, limit = ("koila", f"{budget / MIB:.1f}") if budget else ("plain PyTorch", "–")
        slices, off = told[budget]
        off = f"{off:.0e}" if budget else "–"
        print(
            f"| {name} | {limit} | {peaks[budget] / MIB:.1f} | {best[budget] / best[None]:.2f} "
            f"| {slices} | {off} |"
        )
        assert not budget or peaks[budget] <= budget, "the measured peak is above the budget"


def train(model, loss_of, batches, steps, lr):
    """Train under a third of the memory that plain PyTorch needs; the losses."""
    peak, _ = measured(model, loss_of, batches(0), plain)
    trained = [p for p in model.parameters() if p.requires_grad]
    # its state, and what an update needs, come on top of the step
    budget = peak // 3 + 4 * sum(p.numel() * p.element_size() for p in trained)
    optimizer = torch.optim.AdamW(trained, lr=lr, foreach=False)
    losses = []
    with koila.budget(budget):
        for i in range(steps):
            values = lazily(batches(i))  # the only line added
            loss = loss_of(model, *values) if isinstance(values, tuple) else loss_of(model, values)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    plan = koila.last_plan()
    print(
        f"plain PyTorch needs {peak / MIB:.1f} MiB, the budget is {budget / MIB:.1f} MiB: "
        f"{plan.n_micro_batches} slices of {plan.micro_batch}, measured "
        f"{plan.measured_peak_bytes / MIB:.1f} MiB"
    )
    print(f"loss {losses[0]:.3f} at first, {sum(losses[-5:]) / 5:.3f} at the end")
    return losses


def main(model, loss_of, batches, steps, lr=3e-3, better=0.8):
    """The command line of a recipe. batches(i): the tensors of batch i. better: the part of the
    first loss below which the last five must be."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--table", action="store_true", help="measure memory and time instead")
    parser.add_argument("--turns", type=int, default=3, help="of which the fastest counts")
    args = parser.parse_args()
    if args.table:
        table(model, loss_of, batches(0), args.turns)
        return
    losses = train(model, loss_of, batches, args.steps, lr)
    is_short = args.steps < steps
    assert is_short or sum(losses[-5:]) / 5 < better * losses[0], "it did not learn"

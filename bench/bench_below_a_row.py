"""Which models train in less than one row needs: the table of docs/limits.md.

    python bench/bench_below_a_row.py [--models NAME,NAME] [--samples 1,2] [--shares 0.5,0.3]
        [--slices 16,7] [--why]

The models of tests/python/long_models.py, float64, one thread, on the CPU. A budget is all
gradients and a share of what slices of one row need above them. A line says whether the step trains
in it; what was cut, the loops, the operators computed again and the work over what was recorded;
how far gradients and buffers are from plain PyTorch's, at the worst (of the largest entry of each,
or of a thousandth of the largest of all); predicted : measured peak. Where it does not train: the
least share that any way needs, if koila was asked at all.

--slices cuts another dimension in slices of so many entries instead, whatever fits: of all rows,
and of one row at a time. --why adds the largest values at the peak, of the budget (of the least
that fits, where it does not train) or of the slices.
"""

import argparse
import copy
import sys
import warnings
from pathlib import Path

import torch

import koila
from koila import _core

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "python"))

from helpers import Cut, model_state
from long_models import MODELS
from memory_helpers import clear, installed, koila_step, only, out_of_memory


class Step:
    """A model, its batch and loss, and what plain PyTorch's step leaves."""

    def __init__(self, name, samples):
        make, data, self.loss = MODELS[name]
        torch.manual_seed(5)
        self.model, self.batch = make(), data(samples)
        self.start = copy.deepcopy(self.model.state_dict())
        self.loss(self.model, *self.batch).backward()
        self.expected = model_state(self.model)
        self.gradients = sum(p.nbytes for p in self.model.parameters())
        self.again()

    def again(self):
        clear(self.model)
        self.model.load_state_dict(self.start)

    def run(self, rows=None):
        """Runs it with koila from the same start; what was held before."""
        self.again()
        base = _core.cpu_bytes_current()
        koila_step(self.model, self.loss, self.batch, rows)
        return base

    def room(self):
        """Bytes above the gradients that slices of one row need."""
        base = self.run(1)
        needed = koila.last_plan().measured_peak_bytes - base - self.gradients
        self.again()
        return needed

    def apart(self):
        got = model_state(self.model)
        known = {k: e for k, e in self.expected.items() if e is not None and e.is_floating_point()}
        largest = {}
        for k, e in known.items():
            kind = k.split(":")[0]
            largest[kind] = max(largest.get(kind, 0.0), float(e.abs().max()))
        worst = 0.0
        for k, e in known.items():
            scale = max(float(e.abs().max()), 1e-3 * largest[k.split(":")[0]], 1e-300)
            worst = max(worst, float((e - got[k]).abs().max()) / scale)
        return worst


def told(plan, step):
    """What was cut, at which work, and how right that was."""
    rows = f"{plan.n_micro_batches} x {plan.micro_batch} rows"
    axis = plan.axis
    along = f"{axis.slice_size} of {axis.size}, dim {axis.dim}" if axis else "-"
    return (
        f"{rows:10} {along:17} {len(plan.loops):3} loops, {plan.n_recomputed:4} again, "
        f"work {plan.replay_ratio:.2f}, apart {step.apart():.0e}, "
        f"predicted : measured {plan.predicted_peak_bytes / plan.measured_peak_bytes:.3f}"
    )


def print_largest(plan):
    for t in plan.largest[:12]:
        print(f"        {t.n_bytes:9} {t.dtype}{list(t.shape)} {t.operator} {Path(t.line).name}")


def at_share(step, share, room):
    """What the step does within that share: (line of the table or None, the least share that would
    do or None)."""
    step.again()
    try:
        with only(int(step.gradients + share * room)):
            step.run()
    except koila.OutOfMemory as e:
        return None, share + e.missing_bytes / room
    except RuntimeError as e:
        if not out_of_memory(e):
            raise
        return None, None  # plain tensors of its forward pass were refused
    return told(koila.last_plan(), step), share


def print_shares(name, samples, shares, why):
    step = Step(name, samples)
    room = step.room()
    for share in shares:
        line, least = at_share(step, share, room)
        answer = f"yes  {line}" if line else f"no   {least:.2f} is the least" if least else "no"
        print(f"{name:10} {samples} {share:4.2f}  {answer}", flush=True)
        if why and least:
            if not line:
                print(f"{'':23} {at_share(step, least + 0.001, room)[0]}")
            print_largest(koila.last_plan())


def print_slices(name, samples, sizes, why):
    step = Step(name, samples)
    for axes in ("other", "both") if samples > 1 else ("other",):
        for size in sizes:
            with Cut(size, axes):
                step.run()
            plan = koila.last_plan()
            print(f"{name:10} {samples} {size:4}  {told(plan, step)}", flush=True)
            if why:
                print_largest(plan)


def numbers(kind):
    return lambda text: [kind(n) for n in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--samples", type=numbers(int), default=[1, 2])
    parser.add_argument("--shares", type=numbers(float), default=[0.5, 0.3])
    parser.add_argument("--slices", type=numbers(int))
    parser.add_argument("--why", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not installed():
        sys.exit("torch's CPU memory cannot be counted here")
    warnings.simplefilter("ignore")
    for name in options.models:
        for samples in options.samples:
            if options.slices:
                print_slices(name, samples, options.slices, options.why)
            else:
                print_shares(name, samples, options.shares, options.why)


if __name__ == "__main__":
    main()

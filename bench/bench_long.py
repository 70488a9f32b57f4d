"""One long sequence: its tokens cut by koila, against checkpointing by hand, as ratios.

    python bench/bench_long.py [--repeat 3] [--longest]

GPT-2, 8 layers of 128, vocabulary 8,000, one sample of 1,024 tokens, float32, one thread. By hand:
torch.utils.checkpoint around each block. Processor time, the least of all turns, which all ways
take in one process; peaks are the bytes of torch's allocator above model and data, gradients
included. `--longest` instead seeks the longest sequence that trains in what plain PyTorch needs for
512 tokens, doubled as long as it trains, up to 16 times, then halved between.
"""

import argparse
import itertools
import time

import torch
from in_turns import MIB, difference
from torch.nn import functional as F
from small_gpt2 import small_gpt2

import koila
from koila import _core, lazy

TOKENS = 1024
SLICES = (512, 256, 128, 64)
SHARES = (0.4, 0.3, 0.25, 0.2)
SHORT = 512  # tokens of plain's longest sequence
LONGEST = 16  # times that: where the search ends


def as_is(*values):
    return values


def next_token(model, ids, labels):
    return F.cross_entropy(model(ids).logits.flatten(0, 1), labels.flatten())


def once(model, ids, labels, wrap=as_is, budget=None):
    """Seconds, and peak bytes above model and data. `budget`: bytes above them."""
    model.zero_grad(set_to_none=True)
    base = _core.cpu_bytes_current()
    _core.cpu_bytes_reset_peak()
    start = time.process_time()
    with koila.budget(None if budget is None else base + budget):
        next_token(model, *wrap(ids, labels)).backward()
    return time.process_time() - start, _core.cpu_bytes_peak() - base


class Way:
    """One way to run the step; its least time and last peak."""

    def __init__(self, name, **kw):
        self.name, self.kw = name, kw
        self.checkpointed = kw.pop("checkpointed", False)
        self.tokens = kw.pop("tokens", None)
        self.seconds, self.peak, self.plan, self.apart = float("inf"), 0, None, 0.0

    def turn(self, model, ids, labels, expected):
        if self.checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with koila.micro_batch(self.tokens):
            seconds, self.peak = once(model, ids, labels, **self.kw)
        model.gradient_checkpointing_disable()
        self.seconds = min(self.seconds, seconds)
        self.plan = koila.last_plan() if "wrap" in self.kw else None
        self.apart = difference(model, expected) if expected else 0.0


def compare(repeat):
    torch.manual_seed(0)
    model = small_gpt2(8, 4, 128, 8000, TOKENS)
    ids, labels = torch.randint(8000, (2, 1, TOKENS)).unbind()
    gradients = sum(p.nbytes for p in model.parameters())
    once(model, ids, labels)
    peak = once(model, ids, labels)[1]
    expected = [p.grad.clone() for p in model.parameters()]
    ways = [Way("plain"), Way("blocks checkpointed by hand", checkpointed=True)]
    ways += [
        Way(f"{n} tokens a slice", wrap=lambda *v: lazy(*v, batch=1), tokens=n) for n in SLICES
    ]
    ways += [Way(f"budget of {s:.2f}", wrap=lazy, budget=int(s * peak)) for s in SHARES]
    for _, way in itertools.product(range(repeat + 1), ways):
        way.turn(model, ids, labels, expected)
    plain = ways[0]
    print(f"plain: {peak / MIB:.1f} MiB, of which {gradients / MIB:.1f} are gradients")
    for way in ways:
        print(
            f"{way.name:28} {way.peak / MIB:6.1f} MiB  {way.peak / peak:.2f} of plain's, "
            f"{(way.peak - gradients) / (peak - gradients):.2f} of its activations, "
            f"{way.seconds / plain.seconds:.2f} x its time, apart {way.apart:.0e}",
            end="",
        )
        if way.plan:
            p = way.plan
            predicted = p.predicted_peak_bytes / p.measured_peak_bytes
            print(
                f", predicted : measured {predicted:.3f}, work {p.replay_ratio:.2f}, "
                f"{p.n_recomputed} again, axis {p.axis and p.axis.slice_size}",
                end="",
            )
        print()


def seconds_in(budget, model, n_tokens, wrap):
    """Processor seconds of a step of so many tokens; None: it runs out of memory."""
    ids, labels = torch.randint(8000, (2, 1, n_tokens)).unbind()
    try:
        return once(model, ids, labels, wrap, budget)[0]
    except koila.OutOfMemory:
        pass
    except RuntimeError as e:
        if "memory" not in str(e):
            raise
    return None


def longest_of(seconds_at):
    """The longest sequence that trains: doubled, then halved between."""
    best, too_long, n_tokens = SHORT, None, 2 * SHORT
    while n_tokens <= LONGEST * SHORT and n_tokens - best >= SHORT // 4:
        seconds = seconds_at(n_tokens)
        print(f"  {n_tokens} tokens: {'too long' if seconds is None else f'{seconds:.1f} s'}")
        if seconds is None:
            too_long = n_tokens
        else:
            best = n_tokens
        n_tokens = (best + too_long) // 2 if too_long else 2 * best
    return best


def longest():
    """How many times plain's longest sequence trains in the same memory."""
    torch.manual_seed(0)
    model = small_gpt2(8, 4, 128, 8000, LONGEST * SHORT)
    ids, labels = torch.randint(8000, (2, 1, SHORT)).unbind()
    once(model, ids, labels)
    budget = once(model, ids, labels)[1]
    print(f"plain: {SHORT} tokens in {budget / MIB:.1f} MiB")
    for name, wrap in (("blocks checkpointed by hand", as_is), ("koila", lazy)):
        if wrap is as_is:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        best = longest_of(lambda n, wrap=wrap: seconds_in(budget, model, n, wrap))
        model.gradient_checkpointing_disable()
        print(f"{name}: {best} tokens, {best / SHORT:.2f} x")
    for n_tokens in sorted({min(8 * SHORT, best), best}):
        cut = seconds_in(budget, model, n_tokens, lazy)  # warm
        plain = seconds_in(None, model, n_tokens, as_is)
        print(f"  {n_tokens} tokens: {koila.last_plan().axis}, {cut / plain:.2f} x plain's time")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--longest", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.longest:
        longest()
    else:
        compare(options.repeat)


if __name__ == "__main__":
    main()

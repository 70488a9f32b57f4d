"""One long sequence: its tokens cut by koila, against checkpointing by hand, as ratios.

    python bench/bench_long.py [--repeat 3] [--longest] [--device cuda]

GPT-2, 8 layers of 128, vocabulary 8,000, one sample of 1,024 tokens, float32, one thread; on a GPU
12 layers of 768, vocabulary 50,257, 8,192 tokens. By hand: torch.utils.checkpoint around each
block. Processor time (on a GPU: of the clock), the least of all turns, which all ways take in one
process; peaks are the bytes of torch's allocator above model and data, gradients included.

`--longest` instead seeks the longest sequence that trains in what plain PyTorch needs for 512
tokens (on a GPU 4,096), doubled as long as it trains, up to 16 times, then halved between.
"""

import argparse
import itertools
from typing import NamedTuple

import meter
import torch
from in_turns import difference
from meter import MIB
from torch.nn import functional as F
from small_gpt2 import small_gpt2

import koila
from koila import lazy

PARTS = (2, 4, 8, 16)  # slices of a sequence
SHARES = (0.4, 0.3, 0.25, 0.2)
LONGEST = 16  # times plain's longest sequence: where the search ends


class Size(NamedTuple):
    n_layer: int
    n_head: int
    n_embd: int
    vocab_size: int
    tokens: int
    short: int  # tokens of plain's longest sequence

    def model(self, tokens):
        return small_gpt2(self.n_layer, self.n_head, self.n_embd, self.vocab_size, tokens)

    def sample(self, tokens):
        return torch.randint(self.vocab_size, (2, 1, tokens)).unbind()


SIZES = {"cpu": Size(8, 4, 128, 8000, 1024, 512), "cuda": Size(12, 12, 768, 50257, 8192, 4096)}


def as_is(*values):
    return values


def next_token(model, ids, labels):
    return F.cross_entropy(model(ids).logits.flatten(0, 1), labels.flatten())


def once(model, ids, labels, wrap=as_is, budget=None):
    """Seconds, and peak bytes above model and data. `budget`: bytes above them."""
    model.zero_grad(set_to_none=True)
    base = meter.held()
    meter.reset_peak()
    start = meter.clock()
    with koila.budget(None if budget is None else base + budget):
        next_token(model, *wrap(ids, labels)).backward()
    return meter.clock() - start, meter.peak() - base


class Way:
    """One way to run the step; its least time and last peak."""

    def __init__(self, name, **kw):
        self.name, self.kw = name, kw
        self.checkpointed = kw.pop("checkpointed", False)
        self.tokens = kw.pop("tokens", None)
        self.host_memory = kw.pop("host_memory", "auto")
        self.seconds, self.peak, self.plan, self.apart = float("inf"), 0, None, 0.0

    def turn(self, model, ids, labels, expected):
        if self.checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with koila.micro_batch(self.tokens), koila.host_memory(self.host_memory):
            seconds, self.peak = once(model, ids, labels, **self.kw)
        model.gradient_checkpointing_disable()
        self.seconds = min(self.seconds, seconds)
        self.plan = koila.last_plan() if "wrap" in self.kw else None
        self.apart = difference(model, expected) if expected else 0.0


def compare(size, repeat):
    torch.manual_seed(0)
    with meter.device():
        model = size.model(size.tokens)
        ids, labels = size.sample(size.tokens)
    gradients = sum(p.nbytes for p in model.parameters())
    once(model, ids, labels)
    peak = once(model, ids, labels)[1]
    expected = [p.grad.clone() for p in model.parameters()]
    ways = [Way("plain"), Way("blocks checkpointed by hand", checkpointed=True)]
    ways += [
        Way(f"{n} tokens a slice", wrap=lambda *v: lazy(*v, batch=1), tokens=n)
        for n in (size.tokens // parts for parts in PARTS)
    ]
    uses = ("auto",) if size is SIZES["cpu"] else ("auto", "off")
    ways += [
        Way(f"budget of {s:.2f}, host {use}", wrap=lazy, budget=int(s * peak), host_memory=use)
        for s, use in itertools.product(SHARES, uses)
    ]
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
                f"{p.n_recomputed} again, {p.n_offloaded} in host memory, "
                f"axis {p.axis and p.axis.slice_size}",
                end="",
            )
        print()


def seconds_in(budget, model, sample, n_tokens, wrap):
    """Seconds of a step of so many tokens; None: it runs out of memory."""
    ids, labels = (t[:, :n_tokens] for t in sample)
    try:
        return once(model, ids, labels, wrap, budget)[0]
    except koila.OutOfMemory:
        pass
    except RuntimeError as e:
        if "memory" not in str(e):
            raise
    return None


def longest_of(short, seconds_at):
    """The longest sequence that trains: doubled, then halved between."""
    best, too_long, n_tokens = short, None, 2 * short
    while n_tokens <= LONGEST * short and n_tokens - best >= short // 4:
        seconds = seconds_at(n_tokens)
        print(f"  {n_tokens} tokens: {'too long' if seconds is None else f'{seconds:.1f} s'}")
        if seconds is None:
            too_long = n_tokens
        else:
            best = n_tokens
        n_tokens = (best + too_long) // 2 if too_long else 2 * best
    return best


def longest(size):
    """How many times plain's longest sequence trains in the same memory."""
    torch.manual_seed(0)
    short = size.short
    with meter.device():
        model = size.model(LONGEST * short)
        sample = size.sample(LONGEST * short)
    ids, labels = (t[:, :short] for t in sample)
    once(model, ids, labels)
    budget = once(model, ids, labels)[1]
    print(f"plain: {short} tokens in {budget / MIB:.1f} MiB")
    for name, wrap in (("blocks checkpointed by hand", as_is), ("koila", lazy)):
        if wrap is as_is:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        best = longest_of(short, lambda n, wrap=wrap: seconds_in(budget, model, sample, n, wrap))
        model.gradient_checkpointing_disable()
        print(f"{name}: {best} tokens, {best / short:.2f} x")
    for n_tokens in sorted({min(8 * short, best), best}):
        cut = seconds_in(budget, model, sample, n_tokens, lazy)  # warm
        plain = seconds_in(None, model, sample, n_tokens, as_is)
        print(f"  {n_tokens} tokens: {koila.last_plan().axis}, {cut / plain:.2f} x plain's time")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--longest", action="store_true")
    meter.add_option(parser)
    options = parser.parse_args()
    meter.use(options.device)
    size = SIZES[options.device]
    if options.longest:
        longest(size)
    else:
        compare(size, options.repeat)


if __name__ == "__main__":
    main()

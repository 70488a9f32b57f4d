"""Compiled models: koila against hand-written micro-batching of the same compiled model, in turns;
and koila.compile() of the model as it was written against that.

Both run slices of the same size, with the same loss over the whole batch, and start with the same
memory of compiled code. The ratio is that of process times (medians), so that other work on the
machine counts less (on a GPU: of the clock's); the memory is the peak of torch's bytes.

    python bench/bench_compiled.py [--models gpt2,vit,mlp,resnet] [--rounds 7] [--without-loops]
        [--device cuda]
    python bench/bench_compiled.py --dropout 0.1 [--models gpt2,mlp] [--rounds 7]

With dropout a compiled model draws other numbers than plain PyTorch, and koila the same: what is
compared is koila.compile() against the same slices uncompiled.
"""

import argparse
import statistics

import meter
import torch
from torch import nn
from torch.nn import functional as F

import koila
from koila import _compile, lazy


class Block(nn.Module):
    def __init__(self, width, heads, causal, dropout=0.0):
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )
        self.heads, self.causal = heads, causal
        self.p, self.dropout = dropout, nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.before(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p, is_causal=self.causal)
        x = x + self.dropout(self.out(h.transpose(1, 2).reshape(b, t, c)))
        return x + self.dropout(self.mlp(self.after(x)))


class Gpt2(nn.Module):
    def __init__(self, dropout=0.0, words=8192, width=256, depth=4, tokens=128):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(tokens, width)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.blocks = nn.Sequential(*(Block(width, 4, True, dropout) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        x = self.dropout(self.words(ids) + self.places.weight[: ids.shape[1]])
        return self.head(self.norm(self.blocks(x)))


class Vit(nn.Module):
    def __init__(self, width=256, depth=4):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.places = nn.Parameter(torch.randn(1, 64, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, 4, False) for _ in range(depth)))
        self.head = nn.Linear(width, 100)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        return self.head(self.blocks(x).mean(1))


class Residual(nn.Module):
    def __init__(self, c, out, stride):
        super().__init__()
        self.inside = nn.Sequential(
            nn.Conv2d(c, out, 3, stride, 1, bias=False),
            nn.GroupNorm(8, out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.GroupNorm(8, out),
        )
        self.beside = nn.Conv2d(c, out, 1, stride)

    def forward(self, x):
        return F.relu(self.inside(x) + self.beside(x))


def resnet():
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 1, 1),
        Residual(32, 32, 1),
        Residual(32, 64, 2),
        Residual(64, 128, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def mlp(dropout=0.0):
    drops = [nn.Dropout(dropout)] if dropout else []
    hidden = (nn.Linear(784, 1024), nn.GELU(), *drops, nn.Linear(1024, 1024), nn.GELU(), *drops)
    return nn.Sequential(*hidden, nn.Linear(1024, 10))


def classes(*shape, n):
    return torch.randn(*shape), torch.randint(0, n, shape[:1])


def tokens(rows, length=128, words=8192):
    return torch.randint(0, words, (rows, length)), torch.randint(0, words, (rows, length))


# model, batch, rows of a slice
MODELS = {
    "gpt2": (Gpt2, lambda: tokens(16), 4),
    "vit": (Vit, lambda: classes(32, 3, 64, 64, n=100), 8),
    "mlp": (mlp, lambda: classes(2048, 784, n=10), 512),
    "resnet": (resnet, lambda: classes(32, 3, 32, 32, n=10), 8),
}
# the same, of sizes that keep a GPU busy
ON_GPU = {
    "gpt2": (
        lambda dropout=0.0: Gpt2(dropout, 32768, 768, 4, 512),
        lambda: tokens(32, 512, 32768),
        8,
    ),
    "vit": (lambda: Vit(768), lambda: classes(256, 3, 64, 64, n=100), 64),
    "mlp": (mlp, lambda: classes(65536, 784, n=10), 16384),
    "resnet": (resnet, lambda: classes(256, 3, 128, 128, n=10), 64),
}


def mean_loss(out, y):
    return F.cross_entropy(out.flatten(0, -2), y.flatten())


def by_hand(model, x, y, rows):
    for a, b in zip(x.split(rows), y.split(rows)):
        (mean_loss(model(a), b) * (len(a) / len(x))).backward()


def with_koila(model, x, y, rows):
    with koila.micro_batch(rows):
        a, b = lazy(x, y)
        mean_loss(model(a), b).backward()


def with_loops(model, x, y, rows):
    with koila.compile("on"):
        with_koila(model, x, y, rows)


def measured(step, model, x, y, rows):
    """Seconds and the peak of torch's bytes above what was held before."""
    for p in model.parameters():
        p.grad = None
    meter.reset_peak()
    before, begun = meter.held(), meter.clock()
    step(model, x, y, rows)
    return meter.clock() - begun, meter.peak() - before


def told(plan):
    return f"predicted : measured {plan.predicted_peak_bytes / plan.measured_peak_bytes:6.4f}"


def prepared(name):
    """A new model, the same compiled, a batch, and the rows of a slice."""
    make, batch, rows = MODELS[name]
    torch.manual_seed(0)
    with meter.device():
        model = make()
        x, y = batch()
    return model, torch.compile(model), x, y, rows


def compare_loops(name, n_rounds):
    """koila.compile() of the model, against the compiled model by hand."""
    model, compiled, x, y, rows = prepared(name)
    times, peaks = {by_hand: [], with_loops: []}, {}
    for _ in range(4):
        measured(by_hand, compiled, x, y, rows)
        measured(with_loops, model, x, y, rows)
        _compile.wait()
    for i in range(n_rounds):
        for step in (by_hand, with_loops)[:: 1 if i % 2 else -1]:
            seconds, peaks[step] = measured(
                step, compiled if step is by_hand else model, x, y, rows
            )
            times[step].append(seconds)
            if step is with_loops:
                plan = koila.last_plan()
    ratio = statistics.median(a / b for a, b in zip(times[with_loops], times[by_hand]))
    print(
        f"{name:<7} koila.compile() {ratio:6.3f} x  "
        f"peak {peaks[with_loops] / peaks[by_hand]:5.3f} x  "
        f"{told(plan)}  loops compiled {sum(p.compiled for p in plan.loops)} of "
        f"{len(plan.loops)}",
        flush=True,
    )


def compare_dropout(name, n_rounds, dropout):
    """koila.compile() of a model with dropout, against the same slices uncompiled."""
    make, batch, rows = MODELS[name]
    torch.manual_seed(0)
    with meter.device():
        model, (x, y) = make(dropout), batch()
    steps, grads = (with_koila, with_loops), {}
    times, peaks = {step: [] for step in steps}, {}
    for _ in range(4):
        for step in steps:
            measured(step, model, x, y, rows)
        _compile.wait()
    for i in range(n_rounds):
        for step in steps[:: 1 if i % 2 else -1]:
            torch.manual_seed(1)
            seconds, peaks[step] = measured(step, model, x, y, rows)
            times[step].append(seconds)
            grads[step] = [p.grad for p in model.parameters()]
            if step is with_loops:
                plan = koila.last_plan()
    off = max(
        ((a - b).abs().max() / b.abs().max()).item()
        for a, b in zip(grads[with_loops], grads[with_koila])
    )
    ratio = statistics.median(a / b for a, b in zip(times[with_loops], times[with_koila]))
    print(
        f"{name:<7} dropout {dropout}  {statistics.median(times[with_koila]):6.3f} s uncompiled  "
        f"koila.compile() {ratio:6.3f} x  peak {peaks[with_loops] / peaks[with_koila]:5.3f} x  "
        f"{told(plan)}  loops compiled {sum(p.compiled for p in plan.loops)} of "
        f"{len(plan.loops)}  furthest from the uncompiled {off:.1e}",
        flush=True,
    )


def compare(name, n_rounds):
    """The compiled model with koila, against the same by hand."""
    model, compiled, x, y, rows = prepared(name)
    by_hand(model, x, y, rows)
    plain = [p.grad.clone() for p in model.parameters()]
    steps = {"by hand": by_hand, "koila": with_koila}
    for _ in range(2):  # compiles; then learns
        for step in steps.values():
            measured(step, compiled, x, y, rows)
    ready = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    times, peaks, uncompiled = {k: [] for k in steps}, {}, []
    for i in range(n_rounds):
        for k in sorted(steps, reverse=i % 2 == 1):
            seconds, peaks[k] = measured(steps[k], compiled, x, y, rows)
            times[k].append(seconds)
            if k == "koila":
                plan = koila.last_plan()
                off = max(
                    ((p.grad - e).abs().max() / e.abs().max()).item()
                    for p, e in zip(model.parameters(), plain)
                )
        uncompiled.append(measured(with_koila, model, x, y, rows)[0])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == ready, "compiled again"
    by_pairs = statistics.median(a / b for a, b in zip(times["koila"], times["by hand"]))
    hand = statistics.median(times["by hand"])
    print(
        f"{name:<7} {hand:8.3f} s by hand  koila {by_pairs:6.3f} x  "
        f"uncompiled koila {statistics.median(uncompiled) / hand:5.2f} x  "
        f"peak {peaks['koila'] / peaks['by hand']:5.3f} x  "
        f"{told(plan)}  "
        f"furthest from the uncompiled {off:.1e}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--without-loops", action="store_true")
    parser.add_argument("--dropout", type=float, default=0.0, help="of gpt2 and mlp")
    meter.add_option(parser)
    given = parser.parse_args()
    meter.use(given.device)
    if given.device == "cuda":
        MODELS.update(ON_GPU)
    for name in given.models.split(","):
        if given.dropout:
            compare_dropout(name, given.rounds, given.dropout)
            continue
        compare(name, given.rounds)
        if not given.without_loops:
            compare_loops(name, given.rounds)


if __name__ == "__main__":
    main()

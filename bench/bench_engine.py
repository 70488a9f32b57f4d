"""The engine against plain PyTorch and hand-written micro-batching, in one run, as ratios.

    python bench/bench_engine.py [--repeat 7] [--only NAME] [--device cuda]

For each model: time and peak of a step (forward and backward), run in four ways: plain, by hand at
m rows, by koila at m rows, by koila on the whole batch. The four take turns, so that load on the
machine hits all alike, and a time is the best of its turns. Then the cost to capture and to plan
an operator, and a step shaped like GPT-3 (96 layers), captured and planned on meta tensors.
"""

import argparse
import os
import platform
import time

import meter
import torch
from meter import MIB
from torch import nn
from torch.nn import functional as F

import koila
from koila import _core, lazy
from koila._plan import Plan


def ce(model, x, y):
    return F.cross_entropy(model(x), y)


def lm(model, ids):
    logits = model(ids).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def mlp():
    sizes = [256, 512, 512, 512, 10]
    layers = [m for a, b in zip(sizes, sizes[1:]) for m in (nn.Linear(a, b), nn.GELU())]
    return nn.Sequential(*layers[:-1])


def conv():
    def unit(a, b):
        return [nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(8, b), nn.ReLU(inplace=True)]

    return nn.Sequential(
        *unit(3, 32),
        *unit(32, 32),
        nn.MaxPool2d(2),
        *unit(32, 64),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def gpt2():
    from small_gpt2 import small_gpt2

    return small_gpt2(n_layer=4, n_head=4, n_embd=128, vocab_size=512, n_positions=64)


def encoder():
    layers = [
        nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True) for _ in range(4)
    ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 64, 10))


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    c = ViTConfig(
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=256,
        image_size=32,
        patch_size=4,
        num_labels=10,
    )
    return ViTForImageClassification(c)


class Block(nn.Module):
    def __init__(self, a, b, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(a, b, 3, stride, 1, bias=False),
            nn.BatchNorm2d(b),
            nn.ReLU(inplace=True),
            nn.Conv2d(b, b, 3, 1, 1, bias=False),
            nn.BatchNorm2d(b),
        )
        self.down = (
            nn.Sequential(nn.Conv2d(a, b, 1, stride, bias=False), nn.BatchNorm2d(b))
            if a != b
            else nn.Identity()
        )

    def forward(self, x):
        return F.relu(self.body(x) + self.down(x), inplace=True)


def resnet18():
    w = 16
    body = [Block(w, w, 1), Block(w, w, 1)]
    for i in range(1, 4):
        body += [Block(w << (i - 1), w << i, 2), Block(w << i, w << i, 1)]
    stem = [nn.Conv2d(3, w, 3, 1, 1, bias=False), nn.BatchNorm2d(w), nn.ReLU(inplace=True)]
    return nn.Sequential(*stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(w << 3, 10))


# model, batch, loss, rows a slice; by_hand: may it be cut by hand?
MODELS = {
    "mlp": (mlp, lambda: (torch.randn(2048, 256), torch.randint(0, 10, (2048,))), ce, 512, True),
    "convnet": (
        conv,
        lambda: (torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,))),
        ce,
        16,
        True,
    ),
    "gpt2": (gpt2, lambda: (torch.randint(0, 512, (32, 64)),), lm, 8, True),
    "vit": (
        vit,
        lambda: (torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))),
        lambda m, x, y: F.cross_entropy(m(pixel_values=x).logits, y),
        8,
        True,
    ),
    "encoder-dropout": (
        encoder,
        lambda: (torch.randn(32, 64, 128), torch.randint(0, 10, (32,))),
        ce,
        8,
        True,
    ),
    "resnet18-batchnorm": (
        resnet18,
        lambda: (torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))),
        ce,
        8,
        False,
    ),
}


def plain(model, loss, batch, m):
    loss(model, *batch).backward()


def by_hand(model, loss, batch, m):
    n = len(batch[0])
    for i in range(0, n, m):
        part = [t[i : i + m] for t in batch]
        (loss(model, *part) * (len(part[0]) / n)).backward()


def cut(model, loss, batch, m):
    with koila.micro_batch(m):
        lazies = lazy(*batch)
        loss(model, *(lazies if isinstance(lazies, tuple) else (lazies,))).backward()


def whole(model, loss, batch, m):
    cut(model, loss, batch, len(batch[0]))


def once(step, model, loss, batch, m):
    """Seconds and peak bytes of one step, on the default device."""
    model.zero_grad(set_to_none=True)
    meter.wait()
    base = meter.held()
    meter.reset_peak()
    start = time.perf_counter()
    step(model, loss, batch, m)
    meter.wait()
    return time.perf_counter() - start, meter.peak() - base


def compare(name, repeat):
    make, data, loss, m, hand = MODELS[name]
    torch.manual_seed(0)
    model, batch = make(), data()
    steps = [plain, by_hand, cut, whole] if hand else [plain, cut, whole]
    best = {}
    for _ in range(repeat + 1):  # the first round warms up
        for step in steps:
            t, peak = once(step, model, loss, batch, m)
            best.setdefault(step, []).append((t, peak))
            if step is cut:
                plan = koila.last_plan()
    time_of = {s: min(t for t, _ in r[1:]) for s, r in best.items()}
    peak_of = {s: r[-1][1] for s, r in best.items()}
    row = [f"{name:20} {m:5}"]
    for s in (plain, by_hand, cut, whole):
        row.append(
            f"{time_of[s] * 1e3:8.1f} {peak_of[s] / MIB:7.1f}" if s in time_of else f"{'':8} {'':7}"
        )
    against = by_hand if hand else plain
    row.append(f"{time_of[cut] / time_of[against]:6.2f} {peak_of[cut] / peak_of[against]:6.2f}")
    row.append(f"{time_of[whole] / time_of[plain]:6.2f} {peak_of[whole] / peak_of[plain]:6.2f}")
    row.append(f"{plan.replay_ratio:5.2f}")
    print(" | ".join(row), flush=True)


def cost_of_an_operator(name, repeat):
    make, data, loss, m, _ = MODELS[name]
    model, batch = make(), data()

    def record():
        lazies = lazy(*batch)
        lazies = lazies if isinstance(lazies, tuple) else (lazies,)
        value = loss(model, *lazies)
        return torch.autograd.grad(
            value,
            [p for p in model.parameters() if p.requires_grad],
            create_graph=True,
            allow_unused=True,
        ), value

    record()
    capture, plan_time, n = [], [], 1
    for _ in range(repeat):
        start = time.perf_counter()
        grads, value = record()
        capture.append(time.perf_counter() - start)
        wanted = [g for g in grads if g is not None]
        with koila.micro_batch(m):
            _core.forget()
            start = time.perf_counter()
            n = Plan(
                _core.explain([*wanted, value])
            ).n_recorded  # koila.explain() would record the backward of these again
            plan_time.append(time.perf_counter() - start)
        del grads, value, wanted
    print(
        f"{name:20} {n:6} operators | capture {min(capture) / n * 1e6:6.2f} µs an operator | "
        f"plan {min(plan_time) / n * 1e6:6.2f} µs an operator",
        flush=True,
    )


class Attention(nn.Module):
    """One block of GPT-3's shape. Written out, because torch's own layers read values, and a meta
    tensor has none."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (
            u.view(b, t, self.heads, c // self.heads).transpose(1, 2)
            for u in self.qkv(self.norm1(x)).split(c, dim=2)
        )
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        )
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def gpt3_shaped(layers):
    """Forward and backward of GPT-3's shape on meta tensors: nothing is computed, everything is
    captured and planned."""
    width, t, words, batch = 12288, 2048, 50257, 32
    with torch.device("meta"):
        embed, position = nn.Embedding(words, width), nn.Parameter(torch.empty(t, width))
        blocks, norm = (
            nn.Sequential(*(Attention(width, 96) for _ in range(layers))),
            nn.LayerNorm(width),
        )
        ids = torch.zeros(batch, t, dtype=torch.long)
    parameters = [*embed.parameters(), position, *blocks.parameters(), *norm.parameters()]
    start = time.perf_counter()
    x = lazy(ids)
    logits = norm(blocks(embed(x) + position)) @ embed.weight.T
    value = F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())
    grads = torch.autograd.grad(value, parameters, create_graph=True)
    captured = time.perf_counter()
    with koila.micro_batch(4):
        p = Plan(_core.explain([*grads, value]))
    planned = time.perf_counter()
    peak = (p.predicted_peak_bytes - p.base_bytes) / 2**30
    print(
        f"GPT-3 shape, {layers:3} layers: {p.n_recorded:6} operators, captured in "
        f"{captured - start:5.2f} s, planned in {planned - captured:5.2f} s;"
        f" 4 rows at a time need {peak:.0f} GiB beside the parameters",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--only")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    meter.use(args.device)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.set_default_device(args.device)
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in open("/proc/cpuinfo")
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    print(
        f"{cpu}, {torch.get_num_threads()} thread, torch {torch.__version__}, Python "
        f"{platform.python_version()}; ms and MiB, best of {args.repeat}"
    )
    head = (
        [f"{'model':20} {'m':>5}"]
        + [f"{n:>16}" for n in ("plain", "by hand", "koila at m", "koila whole")]
        + [f"{'m/hand':>13}", f"{'whole/plain':>13}", "replay"]
    )
    print(" | ".join(head))
    names = [n for n in MODELS if not args.only or args.only in n]
    for name in names:
        compare(name, args.repeat)
    for name in names:
        cost_of_an_operator(name, args.repeat)
    if not args.only:
        for layers in (12, 24, 48, 96):
            try:
                gpt3_shaped(layers)
            except (RuntimeError, koila.KoilaError, NotImplementedError) as e:
                print(f"GPT-3 shape, {layers} layers: {type(e).__name__}: {str(e)[:100]}")
                break


if __name__ == "__main__":
    main()

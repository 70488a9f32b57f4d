"""The table of README.md: one training step by four ways to save memory, beside plain PyTorch.

    python bench/bench_peers.py [--turns 5]

A causal transformer learns next tokens; sentences differ in length, and the padding is ignored by
the loss. Gradients are compared with the full batch's in float64; peaks (what torch's allocator
holds above the model and the batch) and times (the best of turns taken in one process, as a ratio
to plain PyTorch) are float32.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import koila
from koila import lazy, memlab

BATCH, LENGTH, WIDTH, LAYERS, WORDS = 32, 64, 128, 6, 1000
SLICES = 4


class Model(nn.Module):
    """Token numbers [batch, length] to logits [batch, length, words]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, WORDS)
        self.checkpointed = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=self.head.weight.dtype)
        x = self.embed(ids)
        for block in self.blocks:
            if self.checkpointed:
                x = checkpoint(block, x, mask, use_reentrant=False)
            else:
                x = block(x, mask)
        return self.head(x)


def loss_of(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=-100)


def plain(model: Model, ids: torch.Tensor, labels: torch.Tensor) -> None:
    loss_of(model, ids, labels).backward()


def accumulated(model: Model, ids: torch.Tensor, labels: torch.Tensor) -> None:
    for i, o in zip(ids.chunk(SLICES), labels.chunk(SLICES), strict=True):
        (loss_of(model, i, o) / SLICES).backward()


def checkpointed(model: Model, ids: torch.Tensor, labels: torch.Tensor) -> None:
    model.checkpointed = True
    loss_of(model, ids, labels).backward()
    model.checkpointed = False


def smaller(model: Model, ids: torch.Tensor, labels: torch.Tensor) -> None:
    loss_of(model, ids[: BATCH // SLICES], labels[: BATCH // SLICES]).backward()


def with_koila(model: Model, ids: torch.Tensor, labels: torch.Tensor) -> None:
    ids, labels = lazy(ids, labels, batch=0)
    with koila.micro_batch(BATCH // SLICES):
        loss_of(model, ids, labels).backward()


WAYS: dict[str, Callable[[Model, torch.Tensor, torch.Tensor], None]] = {
    "plain PyTorch": plain,
    "koila": with_koila,
    "gradient accumulation": accumulated,
    "checkpointing, every block": checkpointed,
    "a smaller batch": smaller,
}


def made(dtype: torch.dtype) -> tuple[Model, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = Model().to(dtype)
    ids = torch.randint(0, WORDS, (BATCH, LENGTH))
    labels = ids.roll(-1, 1)
    lengths = torch.randint(8, LENGTH, (BATCH,))
    labels[torch.arange(LENGTH) >= lengths[:, None]] = -100
    return model, ids, labels


def gradients(way: Callable[..., None]) -> torch.Tensor:
    model, ids, labels = made(torch.float64)
    way(model, ids, labels)
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    memlab.start()
    exact = gradients(plain)
    errors = {n: ((gradients(w) - exact).norm() / exact.norm()).item() for n, w in WAYS.items()}
    model, ids, labels = made(torch.float32)
    best = dict.fromkeys(WAYS, float("inf"))
    rise = dict.fromkeys(WAYS, 0)
    for turn in range(args.turns + 1):  # the first warms up
        for name, way in WAYS.items():
            model.zero_grad()
            with memlab.measure("cpu") as m:
                start = time.perf_counter()
                way(model, ids, labels)
                seconds = time.perf_counter() - start
            if turn:
                best[name] = min(best[name], seconds)
                rise[name] = max(rise[name], m.rise)
    print("| | gradients off by | peak, MiB | time : plain |\n|---|---|---|---|")
    for name in WAYS:
        ratio = best[name] / best["plain PyTorch"]
        print(f"| {name} | {errors[name]:.0e} | {rise[name] / 2**20:.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()

"""A tied table of the vocabulary in slices: koila and hand-written micro-batching in turns.

    python bench/bench_tied.py [--rows 1,2,4] [--turns 5]

GPT-2 with 4 layers of width 256 and 50,257 words, 8 samples of 64 tokens, one thread, float32. By
hand, each slice makes two gradients of the table (the head's and the embedding's) and adds both to
`.grad`. Told, for each size of a slice: koila's time and peak beyond weights and batch, by those of
hand-written micro-batching with the same slices; medians over the turns.
"""

import argparse
import statistics
import time

import torch
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import koila
from koila import _core

BATCH, TOKENS, WORDS = 8, 64, 50_257


def loss_of(model: torch.nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids).logits.flatten(0, 1), labels.flatten())


def by_hand(model: torch.nn.Module, ids: torch.Tensor, labels: torch.Tensor, rows: int) -> None:
    for i in range(0, BATCH, rows):
        share = rows / BATCH
        (loss_of(model, ids[i : i + rows], labels[i : i + rows]) * share).backward()


def by_koila(model: torch.nn.Module, ids: torch.Tensor, labels: torch.Tensor, rows: int) -> None:
    with koila.micro_batch(rows):
        loss_of(model, *koila.lazy(ids, labels)).backward()


def taken(step, model: torch.nn.Module, batch: tuple, rows: int) -> tuple[float, int]:
    """Seconds and peak bytes of a step."""
    model.zero_grad(set_to_none=True)
    before = _core.cpu_bytes_current()
    _core.cpu_bytes_reset_peak()
    start = time.process_time()
    step(model, *batch, rows)
    seconds = time.process_time() - start
    return seconds, _core.cpu_bytes_peak() - before


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1,2,4", help="of a slice, separated by commas")
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=WORDS, resid_pdrop=0.0)
    model = GPT2LMHeadModel(config).eval()
    batch = tuple(torch.randint(0, WORDS, (BATCH, TOKENS)) for _ in range(2))
    for rows in map(int, args.rows.split(",")):
        turns = []
        for turn in range(args.turns + 1):
            hand, koila_s = (taken(s, model, batch, rows) for s in (by_hand, by_koila))
            if turn:  # the first learns shapes
                turns.append((koila_s[0] / hand[0], koila_s[1] / hand[1], hand[1]))
        time_ratio, peak_ratio, peak = (statistics.median(v) for v in zip(*turns, strict=True))
        print(
            f"{rows} of {BATCH} rows: time {time_ratio:.2f}, peak {peak_ratio:.2f} of "
            f"{peak / 2**20:.0f} MiB",
            flush=True,
        )


if __name__ == "__main__":
    main()

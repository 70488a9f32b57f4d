"""Train a language model on one document of 8,192 tokens, in a memory in which neither plain
PyTorch nor checkpointing each block by hand can. There is one sample, so no batch to make smaller:
koila cuts the tokens.

    python examples/long_context.py [--tokens 8192] [--steps 3]

The document is a text that scikit-learn ships, a token is a word or a sign between words. The
budget is real: torch's allocator refuses requests above it.
"""

import argparse
import pathlib
import re
import time

import sklearn.datasets
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import koila
from koila import lazy, memlab

MIB = 2**20
WIDTH, HEADS, LAYERS = 64, 2, 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        heads = (WIDTH // HEADS, HEADS)
        qkv = self.qkv(self.norm1(x)).split(WIDTH, dim=2)
        q, k, v = (u.unflatten(2, heads[::-1]).transpose(1, 2) for u in qkv)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class WordGPT(nn.Module):
    def __init__(self, n_tokens, n_words):
        super().__init__()
        self.embed = nn.Embedding(n_words, WIDTH)
        self.position = nn.Embedding(n_tokens, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, n_words, bias=False)
        self.checkpoints = False

    def forward(self, ids):
        x = self.embed(ids) + self.position.weight[: ids.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(self.norm(x))


def document(n_tokens):
    """The first tokens of the descriptions of scikit-learn's data sets, int64[1, n_tokens + 1], and
    how many different ones there are in all."""
    folder = pathlib.Path(sklearn.datasets.__file__).parent / "descr"
    text = "\n".join(p.read_text(encoding="utf-8") for p in sorted(folder.glob("*.rst")))
    tokens = re.findall(r"\w+|\W", text)
    number = {word: i for i, word in enumerate(sorted(set(tokens)))}
    return torch.tensor([number[t] for t in tokens[: n_tokens + 1]])[None], len(number)


def step(model, ids, labels):
    """Gradients of the whole document; returns the loss."""
    model.zero_grad()
    loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
    loss.backward()
    return loss.item()


def measured(model, ids, labels):
    """Peak bytes above what was there before, and seconds, of the second step."""
    step(model, ids, labels)
    model.zero_grad()
    with memlab.measure("cpu") as m:
        start = time.perf_counter()
        step(model, ids, labels)
        seconds = time.perf_counter() - start
    model.zero_grad()
    return m.peak, seconds


def fits(model, ids, labels):
    try:
        step(model, ids, labels)
        return True
    except RuntimeError:
        model.zero_grad()
        return False


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    memlab.start()  # count the bytes of torch's CPU allocator from here on
    torch.manual_seed(0)
    text, n_words = document(args.tokens)
    model = WordGPT(args.tokens, n_words)
    ids, labels = text[:, :-1], text[:, 1:]

    plain, plain_seconds = measured(model, ids, labels)
    model.checkpoints = True
    by_hand, by_hand_seconds = measured(model, ids, labels)
    budget = by_hand // 3
    print(f"one document of {ids.shape[1]:,} tokens, {n_words:,} different; forward and backward:")
    print(f"  plain PyTorch                 {plain / MIB:7.1f} MiB  {plain_seconds:6.2f} s")
    print(f"  each block checkpointed       {by_hand / MIB:7.1f} MiB  {by_hand_seconds:6.2f} s")
    print(f"the budget                      {budget / MIB:7.1f} MiB")
    with koila.budget(budget):
        print(f"  checkpointed under it         {'fits' if fits(model, ids, labels) else 'fails'}")
        model.checkpoints = False
        print(f"  plain PyTorch under it        {'fits' if fits(model, ids, labels) else 'fails'}")

        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for _ in range(args.steps):
            start = time.perf_counter()
            (input, label) = lazy(ids, labels)  # the only line added
            loss = step(model, input, label)
            seconds = time.perf_counter() - start
            optimizer.step()
            plan = koila.last_plan()
            print(
                f"  koila under it                {plan.measured_peak_bytes / MIB:7.1f} MiB"
                f"  {seconds:6.2f} s  {plan.axis}  loss {loss:.3f}"
            )
    assert plan.measured_peak_bytes <= budget, "the measured peak is above the budget"


if __name__ == "__main__":
    main()

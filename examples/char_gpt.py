"""A character-level GPT, on real text: the descriptions of the data sets that scikit-learn ships.
One line is added, and the step fits in 16 MiB.

python examples/char_gpt.py [--steps 120]
"""

import argparse
import pathlib

import sklearn.datasets
import torch
from torch import nn
from torch.nn import functional as F

import koila
from koila import lazy

T, WIDTH, HEADS, LAYERS, BATCH = 64, 64, 4, 2, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (
            u.view(b, t, HEADS, c // HEADS).transpose(1, 2)
            for u in self.qkv(self.norm1(x)).split(c, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))


class CharGPT(nn.Module):
    def __init__(self, n_characters):
        super().__init__()
        self.embed, self.position = (
            nn.Embedding(n_characters, WIDTH),
            nn.Parameter(0.02 * torch.randn(T, WIDTH)),
        )
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, n_characters, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.embed(ids) + self.position[: ids.shape[1]])))


def read_text():
    folder = pathlib.Path(sklearn.datasets.__file__).parent / "descr"
    return "\n".join(p.read_text(encoding="utf-8") for p in sorted(folder.glob("*.rst")))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    args = parser.parse_args()
    torch.manual_seed(0)
    text = read_text()
    alphabet = sorted(set(text))
    ids = torch.tensor([alphabet.index(c) for c in text])
    print(f"{len(text)} characters, {len(alphabet)} different")
    model = CharGPT(len(alphabet))
    nn.init.normal_(model.embed.weight, std=0.05)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def batch():
        start = torch.randint(0, len(ids) - T - 1, (BATCH,))
        window = torch.stack([ids[s : s + T + 1] for s in start])
        return window[:, :-1], window[:, 1:]

    first = None
    with koila.budget("16MiB"):
        for step in range(args.steps):
            input, label = lazy(*batch())  # the only line added
            loss = F.cross_entropy(model(input).flatten(0, 1), label.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 20 == 0 or step == args.steps - 1:
                print(f"step {step:4}  loss {loss.item():.3f}")
            first = first if first is not None else loss.item()
    print(koila.last_plan())
    out = ids[:1].clone()
    with torch.inference_mode():
        for _ in range(120):
            p = model(out[None, -T:])[0, -1].softmax(0)
            out = torch.cat([out, torch.multinomial(p, 1)])
    print("".join(alphabet[i] for i in out.tolist()))
    assert loss.item() < first - 0.5, "it did not learn"


if __name__ == "__main__":
    main()

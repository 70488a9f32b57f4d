"""CLIP: pictures of digits and sentences about them learn to find each other in the batch.

    python examples/clip.py [--steps 25] [--table]

The loss reads the matrix of all pairs both ways, so no row stands alone and the batch cannot be cut
by hand. koila keeps the embeddings of one tower and cuts the rest.
"""

import torch
from recipe import main
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from koila import memlab

BATCH, WIDTH, LETTERS = 512, 64, 32
NAMES = "zero one two three four five six seven eight nine".split()
FORMS = ("a {}", "the digit {}", "somebody wrote {}", "this is {}", "{} by hand", "number {}")


def encoded(sentence):
    """Letters as numbers, padded with 0: int64[LETTERS]."""
    numbers = [max(ord(c) - 96, 1) for c in sentence][:LETTERS]
    return torch.tensor(numbers + [0] * (LETTERS - len(numbers)))


class Clip(nn.Module):
    """Images [batch, 1, 8, 8] and letters [batch, 32] to embeddings of length one."""

    def __init__(self):
        super().__init__()
        self.picture = nn.Sequential(
            *(nn.Conv2d(1, 32, 3, padding=1), nn.GELU(), nn.Conv2d(32, 32, 3, padding=1)),
            *(nn.GELU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 16, WIDTH)),
        )
        self.letter = nn.Embedding(28, WIDTH, padding_idx=0)
        self.place = nn.Parameter(0.1 * torch.randn(LETTERS, WIDTH))
        self.sentence = nn.TransformerEncoderLayer(
            WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True
        )
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images, letters):
        words = self.sentence(self.letter(letters) + self.place).mean(1)
        return F.normalize(self.picture(images), dim=1), F.normalize(words, dim=1)


def loss_of(model, images, letters):
    pictures, sentences = model(images, letters)
    scores = model.scale.exp() * pictures @ sentences.t()
    own = torch.arange(len(scores))
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.t(), own)) / 2


if __name__ == "__main__":
    memlab.start()  # count the bytes of torch's CPU allocator from here on
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    sentences = torch.stack([encoded(f.format(n)) for n in NAMES for f in FORMS])

    def batches(i):
        torch.manual_seed(i)
        rows = torch.randint(0, len(images), (BATCH,))
        forms = torch.randint(0, len(FORMS), (BATCH,))
        return images[rows], sentences[torch.tensor(digits.target)[rows] * len(FORMS) + forms]

    main(Clip(), loss_of, batches, steps=25, better=0.9)

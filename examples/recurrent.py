"""A recurrent net: an LSTM reads lines of different lengths, packed, and says from which file each
comes.

    python examples/recurrent.py [--steps 30] [--table]

The lines are from the texts in which scikit-learn describes its data sets.
"""

import pathlib

import sklearn.datasets
import torch
from recipe import main
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

from koila import memlab

BATCH, WIDTH = 128, 64


class Reader(nn.Module):
    """Letters [batch, longest], padded, and lengths [batch] to a score for each file."""

    def __init__(self, n_characters, n_files):
        super().__init__()
        self.letter = nn.Embedding(n_characters, 16)
        self.lstm = nn.LSTM(16, WIDTH, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, n_files)
        self.lengths = torch.empty(0)

    def forward(self, letters):
        packed = pack_padded_sequence(
            self.letter(letters), self.lengths, batch_first=True, enforce_sorted=False
        )
        _, (last, _) = self.lstm(packed)
        return self.head(torch.cat([last[0], last[1]], 1))


def loss_of(model, letters, files):
    return F.cross_entropy(model(letters), files)


def lines_of_files():
    """[(letters as numbers, number of the file)], how many letters and files there are."""
    folder = pathlib.Path(sklearn.datasets.__file__).parent / "descr"
    texts = [p.read_text(encoding="utf-8") for p in sorted(folder.glob("*.rst"))]
    number = {c: i for i, c in enumerate(sorted(set("".join(texts))))}
    lines = [
        (torch.tensor([number[c] for c in line[:80]]), i)
        for i, text in enumerate(texts)
        for line in text.splitlines()
        if len(line) > 8
    ]
    return lines, len(number), len(texts)


if __name__ == "__main__":
    memlab.start()  # count the bytes of torch's CPU allocator from here on
    torch.manual_seed(0)
    lines, n_characters, n_files = lines_of_files()
    model = Reader(n_characters, n_files)

    def batches(i):
        torch.manual_seed(i)
        chosen = [lines[k] for k in torch.randint(0, len(lines), (BATCH,)).tolist()]
        model.lengths = torch.tensor([len(letters) for letters, _ in chosen])
        letters = pad_sequence([letters for letters, _ in chosen], batch_first=True)
        return letters, torch.tensor([file for _, file in chosen])

    main(model, loss_of, batches, steps=30, better=0.95)

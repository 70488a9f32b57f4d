"""Packed sequences against plain PyTorch and a loop by hand that packs each micro-batch, as ratios.

    python bench/bench_packed.py [--repeat 5] [--only "LSTM both"] [--rows 256]

A step: features, pack_padded_sequence, recurrent layers of 128, pad_packed_sequence, cross entropy
of the mean over time and of the last states. Lengths are drawn from 5 to 79. Four ways take turns:
plain; koila on the whole batch; by hand, with the fewest slices (powers of two) that need at most
half of plain's activations; koila with a budget of that half. All start from the same model, and
their gradients are compared.
"""

import argparse
import math
import os

import torch
from in_turns import in_turns
from meter import MIB
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import koila
from koila import lazy

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
WIDTH, SHORTEST, LONGEST = 128, 5, 79


class Model(nn.Module):
    def __init__(self, layer, both, layers):
        super().__init__()
        self.features = nn.Linear(WIDTH, WIDTH)
        self.layer = layer(WIDTH, WIDTH, layers, batch_first=True, bidirectional=both)
        self.head = nn.Linear(WIDTH * (1 + both), 10)
        self.last = nn.Linear(WIDTH, 10)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(self.features(x), lengths, True, enforce_sorted=False)
        out, states = self.layer(packed)
        padded, lengths = pad_packed_sequence(out, batch_first=True)
        last = states[0] if isinstance(states, tuple) else states
        mean = padded.sum(1) / lengths.unsqueeze(1)
        return self.head(mean), self.last(last[-1])


def loss_of(model, x, y, lengths):
    mean, last = model(x, lengths)
    return F.cross_entropy(mean, y) + F.cross_entropy(last, y)


def plain(model, x, y, lengths, n):
    loss_of(model, x, y, lengths).backward()


def by_hand(model, x, y, lengths, n):
    m = math.ceil(len(x) / n)
    for i in range(0, len(x), m):
        part = slice(i, i + m)
        share = len(x[part]) / len(x)
        (loss_of(model, x[part], y[part], lengths[part]) * share).backward()


def whole(model, x, y, lengths, n):
    with koila.micro_batch(len(x)):
        loss_of(model, *lazy(x, y), lengths).backward()


def in_half(model, x, y, lengths, n):
    x, y = lazy(x, y)
    loss_of(model, x, y, lengths).backward()


def compare(name, make, rows, repeat):
    torch.manual_seed(0)
    model = make()
    lengths = torch.randint(SHORTEST, LONGEST + 1, (rows,))
    batch = torch.randn(rows, LONGEST, WIDTH), torch.randint(0, 10, (rows,)), lengths
    turns = in_turns(model, batch, plain, by_hand, in_half, repeat, others=(whole,))
    t, peaks, apart, plan = turns.seconds, turns.peaks, turns.apart, turns.plan
    print(
        f"{name:12} | plain {t[plain] * 1e3:7.1f} ms {peaks[plain] / MIB:6.1f} MiB"
        f" | whole : plain {t[whole] / t[plain]:5.2f} peak {peaks[whole] / peaks[plain]:5.2f}"
        f" | by hand in {turns.n_by_hand} {t[by_hand] * 1e3:7.1f} ms"
        f" | half {turns.allowed / MIB:6.1f} MiB, peak {peaks[in_half] / MIB:6.1f} in"
        f" {plan.n_micro_batches}, : by hand {t[in_half] / t[by_hand]:5.2f}"
        f" : plain {t[in_half] / t[plain]:5.2f}"
        f" | apart {apart[whole]:.0e} {apart[by_hand]:.0e} {apart[in_half]:.0e}",
        flush=True,
    )


CASES = {
    f"{layer.__name__}{' both' if both else ''}{' x2' if layers > 1 else ''}": (
        lambda layer=layer, both=both, layers=layers: Model(layer, both, layers)
    )
    for layer in (nn.LSTM, nn.GRU)
    for both in (False, True)
    for layers in (1, 2)
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--rows", type=int, default=256)
    options = parser.parse_args()
    for name, make in CASES.items():
        if options.only in (None, name):
            compare(name, make, options.rows, options.repeat)


if __name__ == "__main__":
    main()

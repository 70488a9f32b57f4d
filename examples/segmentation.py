"""Segmentation: find the ink of a digit in a noisy picture that is four times as large.

    python examples/segmentation.py [--steps 15] [--table]

The net has batch norm, which sees the whole batch in any slices; the loss weighs ink against paper.
"""

import torch
from recipe import main
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from koila import memlab

BATCH, SIZE = 64, 32


def block(n_in, n_out):
    return nn.Sequential(nn.Conv2d(n_in, n_out, 3, padding=1), nn.BatchNorm2d(n_out), nn.ReLU())


def make_model(width=16):
    return nn.Sequential(
        *(block(1, width), nn.MaxPool2d(2), block(width, 2 * width)),
        *(nn.Upsample(scale_factor=2, mode="bilinear"), block(2 * width, width)),
        nn.Conv2d(width, 2, 1),
    )


def loss_of(model, images, ink):
    return F.cross_entropy(model(images), ink, weight=torch.tensor([1.0, 3.0]))


if __name__ == "__main__":
    memlab.start()  # count the bytes of torch's CPU allocator from here on
    torch.manual_seed(0)
    digits = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
    large = F.interpolate(digits, size=(SIZE, SIZE), mode="bilinear")

    def batches(i):
        torch.manual_seed(i)
        clean = large[torch.randint(0, len(large), (BATCH,))]
        noisy = clean + 0.3 * torch.randn(BATCH, 1, SIZE, SIZE)
        return noisy, (clean[:, 0] > 0.4).long()

    main(make_model(), loss_of, batches, steps=15, better=0.7)

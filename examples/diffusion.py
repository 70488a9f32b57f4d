"""Diffusion: a small U-Net learns to predict the noise that was mixed into scikit-learn's digits.

    python examples/diffusion.py [--steps 30] [--table]

Noise and times are drawn outside of the step, so that they are the same in any slices.
"""

import torch
from recipe import main
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from koila import memlab

BATCH, TIMES = 256, 100


def convolution(n_in, n_out):
    return nn.Sequential(nn.Conv2d(n_in, n_out, 3, padding=1), nn.GroupNorm(8, n_out), nn.SiLU())


class UNet(nn.Module):
    """Noisy images [batch, 1, 8, 8] and times [batch] to the noise in them."""

    def __init__(self, width=32):
        super().__init__()
        self.time = nn.Sequential(nn.Embedding(TIMES, width), nn.Linear(width, 2 * width))
        self.first = convolution(1, width)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = convolution(2 * width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.last = nn.Sequential(convolution(2 * width, width), nn.Conv2d(width, 1, 1))

    def forward(self, x, time):
        high = self.first(x)
        low = self.down(high) + self.time(time)[:, :, None, None]
        up = self.up(self.middle(low))
        return self.last(torch.cat([high, up], 1))


def loss_of(model, images, noise, time):
    kept = torch.cos(0.5 * torch.pi * time / TIMES)[:, None, None, None]
    noisy = kept * images + (1 - kept**2).sqrt() * noise
    return F.mse_loss(model(noisy, time), noise)


if __name__ == "__main__":
    memlab.start()  # count the bytes of torch's CPU allocator from here on
    torch.manual_seed(0)
    images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1

    def batches(i):
        torch.manual_seed(i)
        rows = torch.randint(0, len(images), (BATCH,))
        return images[rows], torch.randn(BATCH, 1, 8, 8), torch.randint(1, TIMES, (BATCH,))

    main(UNet(), loss_of, batches, steps=30, better=0.6)

"""Accelerate: gradients accumulated over two batches, clipped; predictions gathered. The prepared
loader yields lazy batches.

python examples/hf_accelerate.py        (needs accelerate)
"""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import koila
from koila import lazy


def main():
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(x[:1500], y[:1500]), batch_size=250, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with koila.micro_batch(100):
        for epoch in range(8):
            right = 0
            for input, label in lazy(loader):  # the only word added
                with accelerator.accumulate(model):
                    output = model(input)
                    accelerator.backward(F.cross_entropy(output, label))
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                predicted, expected = accelerator.gather_for_metrics((output.argmax(1), label))
                right += (predicted == expected).sum().item()
    model.eval()
    with torch.no_grad():
        accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean().item()
    print(f"{100 * right / 1500:.0f} % in training, {100 * accuracy:.0f} % of new digits")
    assert accuracy > 0.85


if __name__ == "__main__":
    main()

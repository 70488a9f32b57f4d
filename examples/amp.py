"""Autocast and gradient scaling around a step that is cut: nothing changes but the one line.

python examples/amp.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import koila
from koila import lazy


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if device == "cuda" else torch.bfloat16
    digits = load_digits()
    x, y = (
        torch.tensor(digits.data, dtype=torch.float32, device=device) / 16,
        torch.tensor(digits.target, device=device),
    )
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 10)).to(
        device
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device)
    with koila.micro_batch(400):
        for _ in range(30):
            input, label = lazy(x[:1500], y[:1500])  # the only line added
            with torch.autocast(device, dtype=dtype):
                loss = F.cross_entropy(model(input), label)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean().item()
    print(
        f"{koila.last_plan().n_micro_batches} slices, loss {loss.item():.3f}, scale "
        f"{scaler.get_scale():.0f}, accuracy {100 * accuracy:.0f} %"
    )
    assert koila.last_plan().n_micro_batches == 4 and accuracy > 0.85


if __name__ == "__main__":
    main()

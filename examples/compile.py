"""A model compiled by `torch.compile`. On a lazy batch its compiled code runs on slices, on a plain
tensor as before.

    python examples/compile.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import koila
from koila import lazy


def main():
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    # any backend; this one needs no C++ compiler
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with koila.micro_batch(400):
        for _ in range(30):
            input, label = lazy(x[:1500], y[:1500])  # the only line added
            loss = F.cross_entropy(compiled(input), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        accuracy = (compiled(x[1500:]).argmax(1) == y[1500:]).float().mean().item()
    print(
        f"{koila.last_plan().n_micro_batches} slices, loss {loss.item():.3f}, accuracy "
        f"{100 * accuracy:.0f} %"
    )
    assert koila.last_plan().n_micro_batches == 4 and accuracy > 0.85


if __name__ == "__main__":
    main()

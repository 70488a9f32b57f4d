"""A contrastive model: one tower reads the upper half of a digit, the other the lower half. Each
half must find the other in the batch.

Every row sees every other row, so cutting the batch by hand would change the loss. koila runs one
tower slice by slice and collects its embeddings. Then it runs the other tower, with its rows of the
matrix of scores, the loss and their backward. Last it runs the first tower again, with its
backward. The numbers are those of the full batch, and the matrix is never whole.

    python examples/two_tower.py [--epochs 30]
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import koila
from koila import lazy


def tower():
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(32, 256),
        nn.GELU(),
        nn.LayerNorm(256),
        nn.Linear(256, 256),
        nn.GELU(),
        nn.Linear(256, 32),
    )


def contrastive(a, b, scale):
    a, b = F.normalize(a, dim=1), F.normalize(b, dim=1)
    scores = scale.exp() * a @ b.T
    target = torch.arange(len(a))
    return (F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target)) / 2


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=30)
    args = parser.parse_args()
    torch.manual_seed(0)
    images = torch.tensor(load_digits().images, dtype=torch.float32) / 16
    images = images[torch.randperm(len(images))]
    train, test = images[:1536], images[1536:]
    upper, lower, scale = tower(), tower(), nn.Parameter(torch.tensor(2.0))
    parameters = [*upper.parameters(), *lower.parameters(), scale]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    loader = torch.utils.data.DataLoader(train, batch_size=512, shuffle=True)
    with koila.micro_batch(64):
        for epoch in range(args.epochs):
            for batch in loader:
                batch = lazy(batch)  # the only line added
                loss = contrastive(upper(batch[:, :4]), lower(batch[:, 4:]), scale)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if epoch % 10 == 0 or epoch == args.epochs - 1:
                print(f"epoch {epoch:3}  loss {loss.item():.3f}")
    print(koila.last_plan())
    plan = koila.last_plan()
    with torch.no_grad():
        a, b = F.normalize(upper(test[:, :4])), F.normalize(lower(test[:, 4:]))
        found = (
            (a @ b.T).topk(10, 1).indices.eq(torch.arange(len(a))[:, None]).any(1).float().mean()
        )
    print(
        f"the other half among the first 10 of {len(test)}: {100 * found:.0f} % (by chance "
        f"{1000 / len(test):.0f} %)"
    )
    assert plan.n_micro_batches == 8 and all(g.shape != (512, 512) for g in plan.gathers)
    assert args.epochs < 30 or found > 0.3, "it did not learn"


if __name__ == "__main__":
    main()

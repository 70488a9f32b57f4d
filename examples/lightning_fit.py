"""Lightning: `training_step` and `validation_step` make their batch lazy; logging, clipping and the
loop are Lightning's.

python examples/lightning_fit.py        (needs lightning)
"""

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import koila
from koila import lazy


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10)
        )

    def training_step(self, batch, i):
        input, label = lazy(*batch)  # the only line added
        loss = F.cross_entropy(self.model(input), label)
        self.log("loss", loss, on_epoch=True)
        return loss

    def on_after_backward(self):
        self.slices = koila.last_plan().n_micro_batches

    def validation_step(self, batch, i):
        input, label = lazy(*batch)  # evaluation is sliced too
        self.log("accuracy", (self.model(input).argmax(1) == label).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main():
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train = DataLoader(TensorDataset(x[:1500], y[:1500]), batch_size=500, shuffle=True)
    new = DataLoader(TensorDataset(x[1500:], y[1500:]), batch_size=297)
    quiet = dict(
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer = lightning.Trainer(
        max_epochs=8, accelerator="cpu", gradient_clip_val=1.0, log_every_n_steps=1, **quiet
    )
    with koila.micro_batch(200):
        module = Digits()
        trainer.fit(module, train, new)
    loss, accuracy = trainer.callback_metrics["loss_epoch"], trainer.callback_metrics["accuracy"]
    print(
        f"loss {loss:.3f}, {100 * accuracy:.0f} % of new digits, a step in {module.slices} slices"
    )
    assert module.slices == 3 and accuracy > 0.85


if __name__ == "__main__":
    main()

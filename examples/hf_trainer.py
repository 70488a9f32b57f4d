"""Hugging Face's Trainer: a vision transformer on digits. The batch becomes lazy where the loss is
computed; all else is the Trainer's.

python examples/hf_trainer.py        (needs transformers and accelerate)
"""

import tempfile

import torch
from sklearn.datasets import load_digits
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

import koila
from koila import lazy


class LazyTrainer(Trainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        return super().compute_loss(model, lazy(inputs), *args, **kwargs)  # the only line added


def train(cls, folder):
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    data = [
        {"pixel_values": image, "labels": label}
        for image, label in zip(images, torch.tensor(digits.target))
    ]
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        num_labels=10,
    )
    settings = TrainingArguments(
        folder,
        per_device_train_batch_size=256,
        per_device_eval_batch_size=297,
        max_steps=20,
        learning_rate=3e-3,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = cls(
        model=ViTForImageClassification(config),
        args=settings,
        train_dataset=data[:1500],
        eval_dataset=data[1500:],
    )
    return trainer.train().training_loss, trainer.evaluate()["eval_loss"]


def main():
    with tempfile.TemporaryDirectory() as folder:
        expected = train(Trainer, folder)
        with koila.micro_batch(100):
            got = train(LazyTrainer, folder)
    print(
        f"{koila.last_plan().n_micro_batches} slices; training loss {got[0]:.4f}, plain "
        f"{expected[0]:.4f}; on new digits {got[1]:.4f}, plain {expected[1]:.4f}"
    )
    assert abs(got[0] - expected[0]) < 1e-3 and abs(got[1] - expected[1]) < 1e-3


if __name__ == "__main__":
    main()

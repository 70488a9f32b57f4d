"""What a step needs where nothing is cut, against plain PyTorch: what koila holds beyond it would
be memory that the user pays for nothing.

    python bench/bench_whole.py [--models t5,gpt2,bert,vit,resnet]

Peaks above what is held before the step (the model), of the third step of each, in MiB, on the CPU.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from typing import Any

import torch
import transformers
from small_gpt2 import small_gpt2

import koila
from koila import _core, lazy

MIB = 2**20
Made = tuple[Any, dict[str, torch.Tensor]]


def words(most: int, *size: int) -> torch.Tensor:
    return torch.randint(1, most, size)


def t5() -> Made:
    """One sample: its three uses of one embedding are most of the step."""
    config = transformers.T5Config(
        num_layers=2, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False
    )
    model = transformers.T5ForConditionalGeneration(config)
    return model, dict(input_ids=words(32_000, 1, 64), labels=words(32_000, 1, 64))


def gpt2() -> Made:
    ids = words(20_000, 4, 128)
    return small_gpt2(4, 4, 256, 20_000, 1024), dict(input_ids=ids, labels=ids)


def bert() -> Made:
    config = transformers.BertConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
    )
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    ids = words(30_000, 4, 128)
    return transformers.BertForMaskedLM(config), dict(input_ids=ids, labels=ids)


def vit() -> Made:
    config = transformers.ViTConfig(
        hidden_size=192,
        num_hidden_layers=6,
        num_attention_heads=3,
        intermediate_size=768,
        num_labels=10,
    )
    model = transformers.ViTForImageClassification(config)
    return model, dict(pixel_values=torch.randn(8, 3, 224, 224), labels=words(10, 8))


def resnet() -> Made:
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=10))
    return model, dict(pixel_values=torch.randn(4, 3, 128, 128), labels=words(10, 4))


MODELS: dict[str, Callable[[], Made]] = dict(t5=t5, gpt2=gpt2, bert=bert, vit=vit, resnet=resnet)


def peak_of(model: Any, batch: dict[str, torch.Tensor]) -> float:
    """Of a step, in bytes, above what was held before."""
    model.zero_grad(set_to_none=True)
    gc.collect()
    held = _core.cpu_bytes_current()
    _core.cpu_bytes_reset_peak()
    model(**batch).loss.backward()
    return float(_core.cpu_bytes_peak() - held)


def row(name: str) -> str:
    """Measures a model: its line of the table."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model.train()
    plain = [peak_of(model, batch) for _ in range(3)][-1]
    ours = [peak_of(model, lazy(batch)) for _ in range(3)][-1]
    plan = koila.last_plan()
    if plan.n_micro_batches != 1:
        raise SystemExit(f"{name} was cut: too little memory is free")
    predicted = plan.predicted_peak_bytes / plan.measured_peak_bytes
    peaks = f"{plain / MIB:.1f} | {ours / MIB:.1f} | {ours / plain:.3f}"
    return f"| {name} | {peaks} | {predicted:.4f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    names = parser.parse_args().models.split(",")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    _core.cpu_bytes_install()
    print("| model | plain | koila | koila : plain | predicted : measured |\n|---|---|---|---|---|")
    with koila.step_aside(False):
        for name in names:
            print(row(name), flush=True)


if __name__ == "__main__":
    main()

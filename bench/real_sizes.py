"""Records one training step of models of the sizes that people train, on the meta device, without
computing it. `build-rel/bench_plan graphs DIR/*.kgraph` then measures how long planning takes.

    python bench/real_sizes.py DIR [model ...] [--samples 1,2]

Each is written for each number of samples: DIR/gpt2-1.kgraph, DIR/gpt2-2.kgraph, ...
"""

import argparse
import sys
from pathlib import Path

import torch
import transformers
from torch import nn
from torch.nn import functional as F

import koila

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "python"))
from long_models import deep

GPT2 = dict(n_positions=1024, attn_pdrop=0.0, use_cache=False)
LAYERS = dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12)
LLAMA = LAYERS | dict(intermediate_size=2048, vocab_size=32000, max_position_embeddings=2048)
LLAMA |= dict(num_key_value_heads=4, use_cache=False)
WINDOW = dict(sliding_window=256)
QWEN2 = dict(use_sliding_window=True, max_window_layers=1)
T5 = dict(num_layers=6, decoder_start_token_id=0, use_cache=False)
B0 = dict(width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280)
STILL = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
MAMBA = dict(hidden_size=256, num_hidden_layers=4, use_cache=False, use_mambapy=False)


def on_meta(kind, config, **settings):
    with torch.device("meta"):
        return getattr(transformers, kind)(getattr(transformers, config)(**settings)).train()


def numbers(*size):
    return torch.empty(*size, dtype=torch.long, device="meta")


def language(tokens, kind, config, **settings):
    """Of a decoder: f(samples) -> (step, batch)."""

    def made(samples):
        model = on_meta(kind, config, **settings)

        def step(ids):
            logits = model(input_ids=ids).logits
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

        return step, (numbers(samples, tokens),)

    return made


def labelled(tokens, label_tokens, kind, config, **settings):
    """Of a model that takes labels: f(samples) -> (step, batch)."""

    def made(samples):
        model = on_meta(kind, config, **settings)
        batch = numbers(samples, tokens), numbers(samples, label_tokens)
        return lambda ids, labels: model(input_ids=ids, labels=labels).loss, batch

    return made


def t5(**settings):
    return labelled(512, 256, "T5ForConditionalGeneration", "T5Config", **T5, **settings)


def bert(**settings):
    return labelled(512, 512, "BertForMaskedLM", "BertConfig", **settings)


def images(model, size, logits):
    def made(samples):
        classifier = model()
        dtype = next(classifier.parameters()).dtype
        batch = torch.empty(samples, 3, size, size, dtype=dtype, device="meta")
        return lambda x, y: F.cross_entropy(logits(classifier(x)), y), (batch, numbers(samples))

    return made


def deep_on_meta():
    with torch.device("meta"):
        return deep(blocks=24, width=64)


def vit():
    settings = dict(image_size=384, num_labels=1000)
    return on_meta("ViTForImageClassification", "ViTConfig", **settings, **STILL)


class UNet(nn.Module):
    """With 2 or 3 dimensions, each level with twice the channels of the one above."""

    def __init__(self, dims, width, levels, norm):
        super().__init__()
        conv = (nn.Conv2d, nn.Conv3d)[dims - 2]
        back = (nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 2]
        self.pool = (F.max_pool2d, F.max_pool3d)[dims - 2]
        widths = [width << i for i in range(levels)]

        def double(cin, cout):
            pairs = ((cin, cout), (cout, cout))
            return nn.Sequential(
                *[m for a, b in pairs for m in (conv(a, b, 3, padding=1), norm(b), nn.SiLU())]
            )

        pairs = list(zip(widths, widths[1:], strict=False))
        self.first = double(3, width)
        self.down = nn.ModuleList(double(a, b) for a, b in pairs)
        self.up = nn.ModuleList(back(b, a, 2, 2) for a, b in reversed(pairs))
        self.back = nn.ModuleList(double(b, a) for a, b in reversed(pairs))
        self.out = conv(width, 5, 1)

    def forward(self, x):
        x = self.first(x)
        beside = []
        for down in self.down:
            beside.append(x)
            x = down(self.pool(x, 2))
        for up, back in zip(self.up, self.back, strict=True):
            x = back(torch.cat([up(x), beside.pop()], 1))
        return self.out(x)


def group_norm(channels):
    return nn.GroupNorm(8, channels)


def segmented(model, *size):
    """Images or volumes with a class for each point: f(samples) -> (step, batch)."""

    def made(samples):
        with torch.device("meta"):
            net = model()
        batch = torch.empty(samples, 3, *size, device="meta"), numbers(samples, *size)
        return lambda x, y: F.cross_entropy(net(x), y), batch

    return made


MODELS = {
    "bert": bert(**STILL),
    "bert-dropout": bert(),
    "mpnet-dropout": labelled(512, 512, "MPNetForMaskedLM", "MPNetConfig"),
    "unet2d": segmented(lambda: UNet(2, 64, 5, group_norm), 512, 512),
    "unet3d": segmented(lambda: UNet(3, 32, 4, group_norm), 128, 128, 128),
    "segmenter": segmented(lambda: UNet(2, 64, 5, nn.BatchNorm2d), 512, 512),
    "gpt2": language(
        1024, "GPT2LMHeadModel", "GPT2Config", **GPT2, resid_pdrop=0.0, embd_pdrop=0.0
    ),
    "gpt2-dropout": language(1024, "GPT2LMHeadModel", "GPT2Config", **GPT2),
    "llama": language(2048, "LlamaForCausalLM", "LlamaConfig", **LLAMA),
    "mistral": language(2048, "MistralForCausalLM", "MistralConfig", **LLAMA, **WINDOW),
    "qwen2": language(2048, "Qwen2ForCausalLM", "Qwen2Config", **LLAMA, **WINDOW, **QWEN2),
    "t5": t5(dropout_rate=0.0),
    "t5-dropout": t5(),
    "vit": images(vit, 384, lambda out: out.logits),
    "mamba": language(256, "MambaForCausalLM", "MambaConfig", **MAMBA),
    "resnet50": images(
        lambda: on_meta("ResNetForImageClassification", "ResNetConfig"), 512, lambda out: out.logits
    ),
    "efficientnet": images(
        lambda: on_meta("EfficientNetForImageClassification", "EfficientNetConfig", **B0),
        384,
        lambda out: out.logits,
    ),
    "deep": images(deep_on_meta, 512, lambda out: out),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--samples", default="1,2", help="how many, separated by commas")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for name in given.models:
        for samples in map(int, given.samples.split(",")):
            step, batch = MODELS[name](samples)
            plan = koila.plan(step, *batch)
            plan.save(given.folder / f"{name}-{samples}.kgraph")
            print(f"{name}-{samples}: {plan.predicted_peak_bytes >> 20:,} MiB", flush=True)


if __name__ == "__main__":
    main()

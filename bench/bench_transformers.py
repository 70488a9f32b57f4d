"""Models of transformers whose losses or layers need care, against plain PyTorch and micro-batches
by hand, as ratios.

    python bench/bench_transformers.py [--repeat 5] [--only speech]

From random weights, in float32 and without dropout:

- speech: Wav2Vec2ForCTC (7 convolutions of 64, 4 layers of 128), 8 rows of two seconds of noise and
  at most 40 targets, which its loss lays one after another;
- experts: MixtralForCausalLM (4 layers of 128, 8 experts of 256, of which 2 see a token), 16 rows
  of 128 tokens.

Four ways take turns: plain; koila on the whole batch; by hand, with the fewest slices (powers of
two) that need at most half of plain's activations; koila with a budget of that half. All start from
the same model, and their gradients are compared.
"""

import argparse
import math

import torch
from in_turns import in_turns
from meter import MIB
from transformers import MixtralConfig, MixtralForCausalLM, Wav2Vec2Config, Wav2Vec2ForCTC

import koila
from koila import lazy

torch.set_num_threads(1)
SAMPLES, TARGETS, LETTERS = 32_000, 40, 32
ROWS, TOKENS, WORDS = 16, 128, 1000
WITHOUT = ("hidden", "attention", "activation", "feat_proj", "final")


def speech():
    config = Wav2Vec2Config(
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        conv_dim=(64,) * 7,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        vocab_size=LETTERS,
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
        apply_spec_augment=False,
        ctc_loss_reduction="mean",
        layerdrop=0.0,
        **{f"{name}_dropout": 0.0 for name in WITHOUT},
    )
    rows = 8
    targets = torch.randint(1, LETTERS, (rows, TARGETS))
    lengths = torch.randint(TARGETS // 2, TARGETS + 1, (rows, 1))
    targets = targets.masked_fill(torch.arange(TARGETS) >= lengths, -100)
    return Wav2Vec2ForCTC(config).train(), (torch.randn(rows, SAMPLES), targets)


def experts():
    config = MixtralConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        vocab_size=WORDS,
    )
    ids = torch.randint(0, WORDS, (ROWS, TOKENS))
    return MixtralForCausalLM(config).train(), (ids, ids.clone())


MODELS = {"speech": speech, "experts": experts}


def plain(model, x, y, n):
    model(x, labels=y).loss.backward()


def by_hand(model, x, y, n):
    rows = math.ceil(len(x) / n)
    for a, b in zip(x.split(rows), y.split(rows)):
        (model(a, labels=b).loss * (len(a) / len(x))).backward()


def whole(model, x, y, n):
    with koila.micro_batch(len(x)), koila.step_aside(False):
        plain(model, *lazy(x, y), n)


def in_half(model, x, y, n):
    plain(model, *lazy(x, y), n)


def compare(name, repeat):
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    turns = in_turns(model, batch, plain, by_hand, in_half, repeat, others=(whole,))
    t, peaks, apart, plan = turns.seconds, turns.peaks, turns.apart, turns.plan
    print(
        f"{name:8} plain {t[plain] * 1e3:7.1f} ms {peaks[plain] / MIB:6.1f} MiB"
        f" | whole : plain {t[whole] / t[plain]:5.2f}"
        f" | half {turns.allowed / MIB:6.1f} MiB, peak {peaks[in_half] / MIB:6.1f} in"
        f" {plan.n_micro_batches}, by hand in {turns.n_by_hand}"
        f" | : by hand {t[in_half] / t[by_hand]:5.2f} : plain {t[in_half] / t[plain]:5.2f}"
        f" | replay {plan.replay_ratio:4.2f}"
        f" | predicted : measured {plan.predicted_peak_bytes / plan.measured_peak_bytes:6.4f}"
        f" | apart {apart[whole]:.0e} {apart[by_hand]:.0e} {apart[in_half]:.0e}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", choices=MODELS)
    given = parser.parse_args()
    for name in MODELS:
        if given.only in (None, name):
            compare(name, given.repeat)


if __name__ == "__main__":
    main()

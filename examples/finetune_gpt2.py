"""Fine-tune a language model: Hugging Face's GPT-2 with all its weights, or with LoRA.

    python examples/finetune_gpt2.py [--lora] [--steps 20] [--table]

The weights are random and the model is small, for nothing is downloaded; the text is what
scikit-learn says of its data sets. LoRA is written out below: a frozen layer, and beside it two
thin ones that learn. It saves gradients and the optimizer's state; koila saves activations.
"""

import pathlib
import sys

import sklearn.datasets
import torch
from recipe import main
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from koila import memlab

TOKENS, BATCH, RANK = 64, 32, 4


class LoRA(nn.Module):
    """A frozen layer, plus (x @ down) @ up, which begins at zero."""

    def __init__(self, layer, n_in, n_out):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(n_in, RANK) / n_in**0.5)
        self.up = nn.Parameter(torch.zeros(RANK, n_out))

    def forward(self, x):
        return self.layer(x) + x @ self.down @ self.up


def with_lora(model):
    """The same model with everything frozen but LoRA's layers, beside each layer of attention."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, Conv1D) and name in ("c_attn", "c_proj"):
                setattr(module, name, LoRA(layer, *layer.weight.shape))
    return model


def read_text():
    folder = pathlib.Path(sklearn.datasets.__file__).parent / "descr"
    text = "\n".join(p.read_text(encoding="utf-8") for p in sorted(folder.glob("*.rst")))
    alphabet = sorted(set(text))
    number = {c: i for i, c in enumerate(alphabet)}
    return torch.tensor([number[c] for c in text]), len(alphabet)


def loss_of(model, ids):
    return model(input_ids=ids, labels=ids, use_cache=False).loss


if __name__ == "__main__":
    memlab.start()  # count the bytes of torch's CPU allocator from here on
    torch.manual_seed(0)
    is_lora = "--lora" in sys.argv
    sys.argv = [a for a in sys.argv if a != "--lora"]
    text, n_characters = read_text()
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=n_characters,
            n_positions=TOKENS,
            n_embd=64,
            n_layer=4,
            n_head=4,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    if is_lora:
        model = with_lora(model)

    def batches(i):
        torch.manual_seed(i)
        starts = torch.randint(0, len(text) - TOKENS, (BATCH,))
        return (torch.stack([text[s : s + TOKENS] for s in starts]),)

    main(model, loss_of, batches, steps=20, better=0.97 if is_lora else 0.85)

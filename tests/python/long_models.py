"""Models whose samples are large: long sequences, images, volumes. Sizes at which what a step keeps
for its backward is much larger than the gradients, and which take no time."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

T = 192  # tokens of a sample
LM = dict(hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64)
LM |= dict(vocab_size=61, max_position_embeddings=T, use_cache=False)
LM |= dict(bos_token_id=0, eos_token_id=1, pad_token_id=2)


def _hf(model, config, **kw):
    hf = pytest.importorskip("transformers")
    return getattr(hf, model)(getattr(hf, config)(**kw)).double()


def gpt2(dropout=0.0):
    kw = dict(vocab_size=61, n_positions=T, n_embd=32, n_layer=4, n_head=4, use_cache=False)
    kw |= dict(resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=0.0)
    return _hf("GPT2LMHeadModel", "GPT2Config", **kw, bos_token_id=0, eos_token_id=1)


def llama():
    return _hf("LlamaForCausalLM", "LlamaConfig", **LM, num_key_value_heads=2)


def mistral():
    kw = LM | dict(num_key_value_heads=2, sliding_window=16)
    return _hf("MistralForCausalLM", "MistralConfig", **kw)


def qwen2():
    kw = LM | dict(num_key_value_heads=2, sliding_window=16, use_sliding_window=True)
    return _hf("Qwen2ForCausalLM", "Qwen2Config", **kw, max_window_layers=1)


def bert():
    kw = {k: v for k, v in LM.items() if k != "use_cache"}
    kw |= dict(num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return _hf("BertForTokenClassification", "BertConfig", **kw)


def t5():
    kw = dict(vocab_size=61, d_model=24, d_kv=6, d_ff=48, num_layers=2, num_heads=4)
    kw |= dict(dropout_rate=0.0, decoder_start_token_id=0, use_cache=False)
    return _hf("T5ForConditionalGeneration", "T5Config", **kw)


def mamba():
    kw = dict(vocab_size=61, hidden_size=16, num_hidden_layers=2, state_size=4, use_cache=False)
    return _hf("MambaForCausalLM", "MambaConfig", **kw, use_mambapy=False)


def vit():
    kw = dict(hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64)
    kw |= dict(image_size=48, patch_size=4, num_channels=3, num_labels=5)
    kw |= dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return _hf("ViTForImageClassification", "ViTConfig", **kw)


class UNet(nn.Module):
    def __init__(self, dims):
        super().__init__()
        conv = (nn.Conv2d, nn.Conv3d)[dims - 2]
        back = (nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 2]
        self.pool = (F.max_pool2d, F.max_pool3d)[dims - 2]

        def double(cin, cout):
            return nn.Sequential(
                conv(cin, cout, 3, padding=1), nn.GroupNorm(2, cout), nn.SiLU(),
                conv(cout, cout, 3, padding=1), nn.GroupNorm(2, cout), nn.SiLU(),
            )  # fmt: skip

        self.down1, self.down2, self.middle = double(3, 4), double(4, 8), double(8, 8)
        self.up2, self.dec2 = back(8, 8, 2, 2), double(16, 8)
        self.up1, self.dec1, self.out = back(8, 4, 2, 2), double(8, 4), conv(4, 5, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(self.pool(a, 2))
        c = self.middle(self.pool(b, 2))
        b = self.dec2(torch.cat([self.up2(c), b], 1))
        return self.out(self.dec1(torch.cat([self.up1(b), a], 1)))


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return x + self.conv2(F.relu(self.conv1(F.relu(x))))


def deep(blocks=24, width=6):
    layers = [nn.Conv2d(3, width, 3, padding=1), *[Residual(width) for _ in range(blocks)]]
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5)
    ).double()


def segmenter(width=8):
    def block(cin):
        return [nn.Conv2d(cin, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]

    return nn.Sequential(*block(3), *block(width), *block(width), nn.Conv2d(width, 5, 1)).double()


def mlp(width=24):
    """Over the tokens of a sample, without attention."""
    layers = [nn.Embedding(61, width)]
    for _ in range(4):
        layers += [nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)]
    return nn.Sequential(*layers, nn.Linear(width, 61)).double()


def lm_loss(m, ids):
    """In float64, where the models' own loss is in float32."""
    logits = m(ids).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def class_loss(m, x, y):
    out = m(x)
    return F.cross_entropy(getattr(out, "logits", out), y)


def token_loss(m, ids, mask, labels):
    return F.cross_entropy(m(ids, attention_mask=mask).logits.flatten(0, 1), labels.flatten())


def pair_loss(m, ids, labels):
    logits = m(input_ids=ids, decoder_input_ids=labels).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _ids(b):
    return (torch.randint(3, 61, (b, T)),)


def _padded(b):
    lengths = torch.randint(T // 2, T + 1, (b,))
    mask = (torch.arange(T)[None] < lengths[:, None]).long()
    labels = torch.where(mask.bool(), torch.randint(0, 5, (b, T)), -100)
    return torch.randint(3, 61, (b, T)) * mask, mask, labels


def _image(b, size=48):
    return torch.randn(b, 3, size, size).double(), torch.randint(0, 5, (b,))


def _segmented(*shape):
    return lambda b: (torch.randn(b, 3, *shape).double(), torch.randint(0, 5, (b, *shape)))


# name -> model, batch of b samples, loss
MODELS = {
    "mlp": (mlp, _ids, lambda m, x: F.cross_entropy(m(x).flatten(0, 1), x.flatten())),
    "gpt2": (gpt2, _ids, lm_loss),
    "llama": (llama, _ids, lm_loss),
    "mistral": (mistral, _ids, lm_loss),
    "qwen2": (qwen2, _ids, lm_loss),
    "bert": (bert, _padded, token_loss),
    "t5": (
        t5,
        lambda b: (torch.randint(3, 61, (b, T)), torch.randint(3, 61, (b, T // 2))),
        pair_loss,
    ),
    "vit": (vit, _image, class_loss),
    "mamba": (mamba, _ids, lm_loss),
    "unet2d": (lambda: UNet(2).double(), _segmented(32, 32), class_loss),
    "unet3d": (lambda: UNet(3).double(), _segmented(12, 16, 16), class_loss),
    "deep": (deep, lambda b: _image(b, 24), class_loss),
    "segmenter": (segmenter, _segmented(32, 32), class_loss),
}  # fmt: skip

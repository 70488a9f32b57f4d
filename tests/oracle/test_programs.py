"""Whole programs, forward and backward: placed and run in slices == eager, and what is gathered is
what must be.

Models and losses of every kind at sizes that are all different; slices 4 + 3, 3 + 3 + 1, and the
whole batch of 7. `gathers` names the operators that may collect activations: none, unless the
samples couple. In float64 the difference is rounding.

    python tests/oracle/test_programs.py [part of a name] [-v]
        a report; with -v the placement of every node
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import slow

B = 7
SLICES = ([4, 3], [3, 3, 1], [7])
# In float64 a GPU's attention is made of products. Where its queries are cut, keys and values are
# collected for each, as for the CPU's one operator.
ON_A_GPU = torch.get_default_device().type == "cuda"
GATHERS_HERE = {"aten::bmm"} if ON_A_GPU else set()
CASES: dict[str, tuple] = {}
randn, randint = torch.randn, torch.randint


def case(name, gathers=(), tolerance=1e-11, dtype=torch.float64):
    """fn() -> (model, loss(model, *inputs), inputs, batch_dims or None)"""

    def add(fn):
        CASES[name] = (fn, set(gathers), tolerance, dtype)
        return fn

    return add


def classify(model, *shape, classes=4, dims=None):
    return (
        model,
        lambda m, x, y: F.cross_entropy(m(x), y),
        [randn(*shape), randint(classes, (B,))],
        dims,
    )


# ---- models


@case("mlp")
def _():
    return classify(
        nn.Sequential(nn.Linear(5, 11), nn.ReLU(), nn.Linear(11, 6), nn.GELU(), nn.Linear(6, 4)),
        B,
        5,
    )


@case("mlp, in place, dropout")
def _():
    return classify(
        nn.Sequential(nn.Linear(5, 11), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(11, 4)),
        B,
        5,
    )


@case("conv, group norm, pooling")
def _():
    return classify(
        nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
            nn.SiLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 6, 3),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(6, 4),
        ),
        B,
        3,
        12,
        10,
    )


class Block(nn.Module):
    def __init__(self, i, o, stride):
        super().__init__()
        self.a, self.b = nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o)
        self.c, self.d = nn.Conv2d(o, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o)
        self.short = (
            nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o))
            if stride > 1 or i != o
            else nn.Identity()
        )

    def forward(self, x):
        return F.relu(self.d(self.c(F.relu(self.b(self.a(x))))) + self.short(x))


def resnet():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 1, 1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        Block(4, 4, 1),
        Block(4, 6, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 4),
    )


@case("resnet, batch norm in training")
def _():
    return classify(resnet(), B, 3, 12, 10)


@case("resnet, batch norm in eval")
def _():
    return classify(resnet().eval(), B, 3, 12, 10)


# Here a GPU's kernel gives empty tensors for gradients that nobody asked for; capture has none.
@case(
    "batch norm of vectors, no affine, no statistics",
    gathers={"aten::native_batch_norm_backward"} if ON_A_GPU else (),
)
def _():
    return classify(
        nn.Sequential(
            nn.Linear(5, 6),
            nn.BatchNorm1d(6, affine=False),
            nn.ReLU(),
            nn.Linear(6, 4),
            nn.BatchNorm1d(4, track_running_stats=False),
        ),
        B,
        5,
    )


@case("instance norm")
def _():
    return classify(
        nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.Flatten(), nn.Linear(320, 4)
        ),
        B,
        3,
        12,
        10,
    )


class Recurrent(nn.Module):
    def __init__(self, kind, batch_first, **k):
        super().__init__()
        self.r = kind(5, 6, 2, batch_first=batch_first, **k)
        self.out = nn.Linear(6 * (2 if k.get("bidirectional") else 1), 4)

    def forward(self, x):
        o, _ = self.r(x)
        return self.out(o[:, -1] if self.r.batch_first else o[-1])


@case("lstm")
def _():
    return classify(Recurrent(nn.LSTM, True), B, 9, 5)


@case("lstm, time first")
def _():
    return classify(Recurrent(nn.LSTM, False), 9, B, 5, dims=[1, 0])


@case("lstm float32 (one fused kernel and its workspace)", tolerance=1e-6, dtype=torch.float32)
def _():
    return classify(Recurrent(nn.LSTM, True, bidirectional=True), B, 9, 5)


@case("gru, both directions")
def _():
    return classify(Recurrent(nn.GRU, True, bidirectional=True), B, 9, 5)


@case("rnn")
def _():
    return classify(Recurrent(nn.RNN, True), B, 9, 5)


@case("nn.Transformer")
def _():
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    return (
        nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
        lambda m, x, z: F.mse_loss(m(x, z, tgt_mask=mask), z),
        [randn(B, 9, 8), randn(B, 5, 8)],
        None,
    )


@case("nn.Transformer, time first")
def _():
    return (
        nn.Transformer(8, 2, 1, 1, 16),
        lambda m, x, z: F.mse_loss(m(x, z), z),
        [randn(9, B, 8), randn(5, B, 8)],
        [1, 1],
    )


@case("encoder with padding")
def _():
    pad = torch.zeros(B, 9, dtype=torch.bool)
    pad[2, 5:] = pad[4, 7:] = True
    m = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
    )
    return (
        m,
        lambda m, x, p: (m(x, src_key_padding_mask=p) * (~p)[..., None]).sum() / (~p).sum(),
        [randn(B, 9, 8), pad],
        None,
    )


class SelfAttention(nn.Module):
    def forward(self, x, mask=None, causal=False, memory=None):
        q, k, v = self.project(x).unflatten(-1, (3, 3, 4)).transpose(1, 3).unbind(2)
        if memory is not None:
            k, v = memory
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return self.out(out.transpose(1, 2).flatten(2)) + x

    def __init__(self):
        super().__init__()
        self.project, self.out = nn.Linear(12, 36), nn.Linear(12, 12)
        self.k, self.v = (nn.Parameter(randn(2, 3, 5, 4)) for _ in range(2))


# fused attention, with the queries of two sequences cut: keys and values are gathered
QUERIES = {
    "causal": lambda m, x: m(m(x, causal=True), causal=True),
    "all see all": lambda m, x: m(m(x)),
    "a window": lambda m, x: m(
        x, mask=(torch.arange(B)[:, None] - torch.arange(B)).abs().lt(3).view(1, 1, B, B)
    ),
    "a bias of its own": lambda m, x: m(x, mask=x[..., :1].unsqueeze(1) * torch.arange(B)),
    "keys of a parameter": lambda m, x: m(x, memory=(m.k, m.v)),
    "causal, fewer keys": lambda m, x: m(x, causal=True, memory=(m.k, m.v)),
}
KEYS_OF = {
    "causal": {"koila::query_rows", "koila::query_rows_backward"},
    "all see all": {
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    },
    "keys of a parameter": set(),
    "causal, fewer keys": set(),
}
for name, forward in QUERIES.items():

    @case(f"queries: {name}", KEYS_OF.get(name, KEYS_OF["all see all"]))
    def _(forward=forward):
        return SelfAttention(), lambda m, x: forward(m, x).pow(2).mean(), [randn(2, B, 12)], [1]


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.n = (
            nn.Conv2d(3, 4, 3, padding=1),
            nn.Conv2d(4, 8, 3, 2, 1),
            nn.GroupNorm(2, 8),
        )
        self.up, self.u, self.d, self.o = (
            nn.ConvTranspose2d(8, 4, 2, 2),
            nn.Upsample(scale_factor=2, mode="bilinear"),
            nn.Conv2d(8, 4, 1),
            nn.Conv2d(8, 2, 1),
        )

    def forward(self, x):
        a = F.relu(self.a(x))
        b = F.silu(self.n(self.b(a)))
        return self.o(torch.cat([self.up(b) + self.d(self.u(b)), a], 1))


@case("u-net, segmentation")
def _():
    return (
        UNet(),
        lambda m, x, y: F.cross_entropy(m(x), y, ignore_index=1, weight=torch.tensor([1.0, 2.0])),
        [randn(B, 3, 8, 12), randint(2, (B, 8, 12))],
        None,
    )


@case("rows of convolutions", {"koila::conv_rows", "koila::conv_rows_weight"})
def _():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(),
        nn.ConvTranspose2d(4, 4, 4, 2, padding=1), nn.Tanh(),
        nn.Conv2d(4, 4, 3, 2, padding=1, groups=2), nn.Tanh(),
        nn.ConvTranspose2d(4, 4, 3, 2, 1, output_padding=1, dilation=1), nn.Tanh(),
        nn.Conv2d(4, 2, 2, 2), nn.Tanh(), nn.Conv2d(2, 2, 3, padding=2, dilation=2),
    )  # fmt: skip
    return model, lambda m, x: m(x).pow(2).mean(), [randn(2, 3, B, 5)], [2]


OVERLAPPING = {
    f"koila::{o}_rows{b}" for o in ("max_pool", "avg_pool", "resample") for b in ("", "_backward")
}
if ON_A_GPU:  # where a GPU must be deterministic, torch writes a linear upsampling out as an index
    OVERLAPPING.add("aten::_unsafe_index.Tensor")


@case("rows of pools and upsampling", OVERLAPPING)
def _():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.MaxPool2d(3, 1, 1), nn.Upsample(scale_factor=2),
        nn.MaxPool2d(2), nn.AvgPool2d(3, 1, 1), nn.InstanceNorm2d(4),
        nn.Upsample(scale_factor=2, mode="bilinear"), nn.AvgPool2d(2), nn.BatchNorm2d(4),
    )  # fmt: skip
    return model, lambda m, x: m(x).pow(3).mean(), [randn(2, 3, B, 6)], [2]


PADDED = {"koila::pad_rows", "koila::pad_rows_backward"}
if ON_A_GPU:  # replication too
    PADDED.add("aten::_unsafe_index.Tensor")


@case("rows of padding", PADDED)
def _():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.ReflectionPad2d((1, 2, B - 3, 3)), nn.Tanh(),
        nn.ReplicationPad2d((2, 0, 1, 2 * B - 1)), nn.Tanh(), nn.ConstantPad2d((0, 1, -B, B), 2.5),
    )  # fmt: skip
    return model, lambda m, x: m(x).pow(3).mean(), [randn(2, 3, B, 6)], [2]


@case("gradient penalty")
def _():
    def loss(m, x):
        x = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        return ((g.norm(dim=1) - 1) ** 2).mean()

    return nn.Sequential(nn.Linear(5, 11), nn.Tanh(), nn.Linear(11, 1)), loss, [randn(B, 5)], None


@case("bfloat16", tolerance=2e-2, dtype=torch.bfloat16)
def _():
    return classify(
        nn.Sequential(nn.Linear(5, 11), nn.LayerNorm(11), nn.ReLU(), nn.Linear(11, 4)), B, 5
    )


def ids(v=50, t=9):
    return randint(v, (B, t))


def labels(t=9):
    x = ids(50, t)
    x[1, 3:] = x[5, :2] = -100
    return x


def attend():
    a = torch.ones(B, 9, dtype=torch.long)
    a[2, 6:] = a[3, 4:] = 0
    return a


class Bags(nn.Module):
    """Two tables of bags of 7 and 3, the batch being 7 too; one with weights of its own for the
    entries."""

    def __init__(self, mode, padding_idx=None, frozen=False):
        super().__init__()
        self.a, self.b = (
            nn.EmbeddingBag(11, 5, mode=mode, padding_idx=padding_idx) for _ in range(2)
        )
        self.head = nn.Linear(10, 4)
        self.a.weight.requires_grad_(not frozen)
        self.weighs = mode == "sum"

    def forward(self, i, j, w):
        return self.head(
            torch.cat([self.a(i), self.b(j, per_sample_weights=w) if self.weighs else self.b(j)], 1)
        )


for mode in ("sum", "mean", "max"):
    for options in ({}, {"padding_idx": 2}, {"frozen": True}):

        @case(f"embedding bags, {mode} {options}")
        def _(mode=mode, options=options):
            i, j, w = (
                randint(11, (B, 7)),
                randint(11, (B, 3)),
                randn(B, 3, requires_grad=mode == "sum"),
            )
            i[3] = 2
            return (
                Bags(mode, **options),
                lambda m, i, j, w, y: F.cross_entropy(m(i, j, w), y),
                [i, j, w, randint(4, (B,))],
                None,
            )


def transformers_case(name, cls, config, settings, keys, make, gathers=(), tolerance=1e-6):
    @case(name, gathers, tolerance)
    def _():
        transformers = pytest.importorskip("transformers")
        transformers.logging.set_verbosity_error()
        model = getattr(transformers, cls)(getattr(transformers, config)(**settings)).double()
        return model.train(), lambda m, *xs: m(**dict(zip(keys, xs))).loss, make(), None


GPT = dict(
    n_layer=2, n_head=2, n_embd=8, vocab_size=50, n_positions=16, pad_token_id=0, num_labels=3
)
BERT = dict(
    num_hidden_layers=2,
    hidden_size=8,
    num_attention_heads=2,
    intermediate_size=16,
    vocab_size=50,
    num_labels=3,
)
LLAMA = dict(
    num_hidden_layers=2,
    hidden_size=8,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=16,
    vocab_size=50,
)
transformers_case(
    "gpt2", "GPT2LMHeadModel", "GPT2Config", GPT, ["input_ids", "labels"], lambda: [ids(), labels()]
)
transformers_case(
    "gpt2, padding",
    "GPT2LMHeadModel",
    "GPT2Config",
    GPT,
    ["input_ids", "attention_mask", "labels"],
    lambda: [ids(), attend(), labels()],
)
transformers_case(
    "gpt2, classify",
    "GPT2ForSequenceClassification",
    "GPT2Config",
    GPT,
    ["input_ids", "labels"],
    lambda: [ids(), randint(3, (B,))],
)
transformers_case(
    "bert",
    "BertForMaskedLM",
    "BertConfig",
    BERT,
    ["input_ids", "attention_mask", "labels"],
    lambda: [ids(), attend(), labels()],
)
transformers_case(
    "bert, classify",
    "BertForSequenceClassification",
    "BertConfig",
    BERT,
    ["input_ids", "attention_mask", "labels"],
    lambda: [ids(), attend(), randint(3, (B,))],
)
transformers_case(
    "llama",
    "LlamaForCausalLM",
    "LlamaConfig",
    LLAMA,
    ["input_ids", "attention_mask", "labels"],
    lambda: [ids(), attend(), labels()],
)
transformers_case(
    "mistral",
    "MistralForCausalLM",
    "MistralConfig",
    LLAMA,
    ["input_ids", "labels"],
    lambda: [ids(), labels()],
)
transformers_case(
    "vit",
    "ViTForImageClassification",
    "ViTConfig",
    {**BERT, "image_size": 12, "patch_size": 4, "num_labels": 5},
    ["pixel_values", "labels"],
    lambda: [randn(B, 3, 12, 12), randint(5, (B,))],
)
transformers_case(
    "t5",
    "T5ForConditionalGeneration",
    "T5Config",
    dict(
        num_layers=2,
        d_model=8,
        num_heads=2,
        d_kv=4,
        d_ff=16,
        vocab_size=50,
        decoder_start_token_id=0,
    ),
    ["input_ids", "attention_mask", "labels"],
    lambda: [ids(), attend(), labels(6)],
)
transformers_case(
    "bart",
    "BartForConditionalGeneration",
    "BartConfig",
    dict(
        encoder_layers=1,
        decoder_layers=1,
        d_model=8,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        vocab_size=50,
        max_position_embeddings=32,
    ),
    ["input_ids", "labels"],
    lambda: [ids(), labels(6)],
)


@case("clip, contrastive", gathers={"aten::mm", "aten::alias"}, tolerance=1e-6)
def _():
    t = pytest.importorskip("transformers")
    small = dict(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        projection_dim=8,
    )
    config = t.CLIPConfig(
        text_config=dict(
            small, vocab_size=50, eos_token_id=49, bos_token_id=48, max_position_embeddings=16
        ),
        vision_config=dict(small, image_size=12, patch_size=4),
        projection_dim=8,
    )
    return (
        t.CLIPModel(config).double(),
        lambda m, i, p: m(input_ids=i, pixel_values=p, return_loss=True).loss,
        [ids(48), randn(B, 3, 12, 12)],
        None,
    )


# ---- losses, after one linear layer

yi, yn, yf, yp, w = (
    randint(4, (B,)),
    randint(4, (B,)),
    randn(B, 4, dtype=torch.float64),
    torch.rand(B, 4, dtype=torch.float64),
    torch.rand(4, dtype=torch.float64),
)
yn[3] = yn[6] = -100
ce = F.cross_entropy


def loss(name, fn, target, gathers=()):
    @case("loss: " + name, gathers)
    def _():
        return nn.Linear(5, 4), lambda m, x, y: fn(m(x), y), [randn(B, 5), target], None


loss("cross entropy", lambda o, y: ce(o, y), yi)
loss("ignore index", lambda o, y: ce(o, y), yn)
loss("weights", lambda o, y: ce(o, y, weight=w), yn)
loss("label smoothing", lambda o, y: ce(o, y, label_smoothing=0.1), yn)
loss("label smoothing and weights", lambda o, y: ce(o, y, weight=w, label_smoothing=0.1), yn)
loss("probabilities", lambda o, y: ce(o, y), yp.softmax(1))
loss("probabilities and weights", lambda o, y: ce(o, y, weight=w), yp.softmax(1))
loss("ce sum", lambda o, y: ce(o, y, reduction="sum"), yi)
loss("ce none", lambda o, y: ce(o, y, reduction="none").mean(), yn)
for red in ("mean", "sum", "none"):
    for n in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
        loss(f"{n} {red}", lambda o, y, n=n, red=red: getattr(F, n)(o, y, reduction=red).sum(), yf)
    loss(
        f"bce {red}",
        lambda o, y, red=red: F.binary_cross_entropy(o.sigmoid(), y, weight=w, reduction=red).sum(),
        yp,
    )
    loss(
        f"bce with logits {red}",
        lambda o, y, red=red: F.binary_cross_entropy_with_logits(
            o, y, weight=w, pos_weight=w * 2, reduction=red
        ).sum(),
        yp,
    )
    loss(
        f"kl {red}",
        lambda o, y, red=red: F.kl_div(o.log_softmax(1), y, reduction=red).sum(),
        yp.softmax(1),
    )
loss(
    "kl batchmean", lambda o, y: F.kl_div(o.log_softmax(1), y, reduction="batchmean"), yp.softmax(1)
)
loss("masked mean", lambda o, y: ((o - y) ** 2 * (y > 0)).sum() / (y > 0).sum(), yf)
loss("poisson", lambda o, y: F.poisson_nll_loss(o, y), yp)
loss("gaussian", lambda o, y: F.gaussian_nll_loss(o, y, yp[:1].expand(B, 4)), yf)
loss("soft margin", lambda o, y: F.soft_margin_loss(o, y.sign()), yf)
loss("multi margin", lambda o, y: F.multi_margin_loss(o, y), yi)
loss("multilabel margin", lambda o, y: F.multilabel_margin_loss(o, y), randint(-1, 4, (B, 4)))
loss("triplet", lambda o, y: F.triplet_margin_loss(o, y, o * 2), yf)
loss("cosine", lambda o, y: (1 - F.cosine_similarity(o, y)).mean(), yf)
loss("std over the batch", lambda o, y: o.std(0).sum() + o.var(), yf)
loss("logsumexp over the batch", lambda o, y: o.logsumexp(0).sum(), yf)
loss("norm over the batch", lambda o, y: o.norm() + o.norm(dim=0).sum() + o.norm(p=1), yf)
loss(
    "softmax over the batch",
    lambda o, y: (o.softmax(0) * y).sum() + (o.log_softmax(0) * y).sum(),
    yf,
)
loss("max over the batch", lambda o, y: o.amax(0).sum() + o.max(), yf)
loss(
    "infonce",
    lambda o, y: ce(F.normalize(o) @ F.normalize(y).t() / 0.1, torch.arange(B)),
    yf,
    {"aten::mm"},
)
loss(
    "simclr",
    lambda o, y: (
        lambda z: ce(
            (z @ z.t()).masked_fill(torch.eye(2 * B, dtype=torch.bool), -1e9),
            torch.cat([torch.arange(B) + B, torch.arange(B)]),
        )
    )(torch.cat([o, y])),
    yf,
    {"aten::mm"},
)
loss(
    "barlow twins",
    lambda o, y: (
        (((o - o.mean(0)) / o.std(0)).t() @ ((y - y.mean(0)) / y.std(0)) / B - torch.eye(4))
        .pow(2)
        .sum()
    ),
    yf,
)
loss("gather", lambda o, y: -o.log_softmax(1).gather(1, y[:, None]).mean(), yi)
loss("own row by index", lambda o, y: -o.log_softmax(1)[torch.arange(B), y].mean(), yi)
loss("one hot", lambda o, y: (o * F.one_hot(y, 4)).sum(1).mean(), yi)
loss(
    "focal",
    lambda o, y: (lambda ce_: ((1 - torch.exp(-ce_)) ** 2 * ce_).mean())(
        ce(o, y, reduction="none")
    ),
    yi,
)
loss("dice", lambda o, y: 1 - 2 * (o.sigmoid() * y).sum() / (o.sigmoid().sum() + y.sum()), yp)
loss(
    "topk, sort, cumsum, prod",
    lambda o, y: (
        o.topk(2, 1)[0].mean()
        + o.sort(1)[0][:, 1].mean()
        + (o.cumsum(1) * y).mean()
        + o.prod(1).mean()
    ),
    yf,
)
loss("mix-up", lambda o, y: ce(o, y) * 0.3 + ce(o, y.flip(0)) * 0.7, yi, {"aten::flip"})
loss(
    "halves of a double batch",
    lambda o, y: (lambda z: (z[:B] - z[B:]).pow(2).mean() + (z.chunk(2)[0] * y).mean())(
        torch.cat([o, o * 2])
    ),
    yf,
)
loss(
    "repeat",
    lambda o, y: (
        (o.repeat(1, 2) * y.repeat(1, 2)).mean()
        + o.repeat_interleave(3, 0).mean()
        + o.repeat(2, 1).pow(2).mean()
    ),
    yf,
)
loss("running total", lambda o, y: torch.zeros(()).add_(F.mse_loss(o, y)).add_(o.mean()), yf)
loss("einsum", lambda o, y: torch.einsum("bi,bj->ij", o, y).pow(2).sum(), yf)
loss(
    "written in place",
    lambda o, y: (
        lambda z: z.mul_(y).pow(2).mean() + z[:, 1:].clone().fill_(2).mul_(o[:, 1:]).mean()
    )(o * 2),
    yf,
)


# ---- loops over samples: with pieces nothing is gathered

SAMPLES: dict[str, object] = {}


def samples(name, loss_of, features=True):
    """loss_of(head, h, y): h are features of a net, or the batch itself."""
    SAMPLES[f"samples: {name}"] = loss_of

    @case(f"samples: {name}")
    def _():
        body = nn.Sequential(nn.Linear(5, 11), nn.GELU()) if features else nn.Identity()
        head = nn.Sequential(nn.Linear(11 if features else 5, 6), nn.GELU(), nn.Linear(6, 4))
        model = nn.ModuleList([body, head])
        return (
            model,
            lambda m, x, y: loss_of(m[1], m[0](x), y),
            [randn(B, 5), randint(4, (B,))],
            None,
        )


def one_by_one(head, h, y):
    return sum(F.cross_entropy(head(r)[None], t[None]) for r, t in zip(h, y)) / B


def in_place(head, h, y):
    loss = torch.zeros(())
    for i in range(B):
        loss += F.cross_entropy(head(h[i]), y[i])
    return loss


def moving_average(head, h, y):
    s = torch.zeros(4)
    for r in h:
        s = 0.9 * s + 0.1 * head(r)
    return s.pow(2).sum()


for features in (True, False):
    of = "features" if features else "the batch"
    samples(f"one by one, of {of}", one_by_one, features)
    samples(f"added in place, of {of}", in_place, features)
    samples(f"a moving average, of {of}", moving_average, features)
    samples(
        f"stacked, of {of}",
        lambda f, h, y: F.cross_entropy(torch.stack([f(r) for r in h]), y),
        features,
    )
    samples(
        f"chunks, of {of}",
        lambda f, h, y: F.cross_entropy(torch.cat([f(c) for c in h.chunk(4)]), y),
        features,
    )
    samples(
        f"ragged parts, of {of}",
        lambda f, h, y: F.cross_entropy(torch.cat([f(c) for c in h.split([1, 3, 2, 1])]), y),
        features,
    )
    samples(
        f"the losses of parts, of {of}",
        lambda f, h, y: torch.stack(
            [F.cross_entropy(f(c), t) for c, t in zip(h.split(2), y.split(2))]
        ).mean(),
        features,
    )
    samples(
        f"in another order, twice, some never, of {of}",
        lambda f, h, y: sum(f(h[i]).pow(2).mean() * h[i].sum() for i in (3, -1, 0, 3)),
        features,
    )
    samples(
        f"of different lengths, of {of}",
        lambda f, h, y: sum(
            (h[i, :n] * f[0].weight[:, :n]).pow(2).sum()
            for i, n in enumerate([3, 1, 5, 2, 4, 5, 2])
        ),
        features,
    )
    samples(
        f"pairs, of {of}",
        lambda f, h, y: sum((f(h[i]) - f(h[i + 1])).pow(2).sum().sqrt() for i in (0, 2, 4)),
        features,
    )
    samples(
        f"dropout, of {of}",
        lambda f, h, y: sum(F.dropout(f(r), 0.4).pow(2).mean() for r in h),
        features,
    )


def record(name):
    fn, gathers, tolerance, dtype = CASES[name]
    torch.manual_seed(1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if dtype is torch.float64 else torch.float32)
    try:
        model, loss_of, inputs, dims = fn()
        if dtype is torch.bfloat16:
            model, inputs = (
                model.bfloat16(),
                [x.bfloat16() if x.is_floating_point() else x for x in inputs],
            )
        parameters = [p for p in model.parameters() if p.requires_grad]

        def step(*xs):
            value = loss_of(model, *xs)
            grads = torch.autograd.grad(value, parameters, allow_unused=True)
            return [value, *[g for g in grads if g is not None]]

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return slow.record(step, inputs, dims)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("name", CASES)
def test_sliced_equals_eager(name):
    _, gathers, tolerance, _ = CASES[name]
    recording = record(name)
    for how in ("koila__place", "koila__place_cut", "koila__place_pieces"):
        run = recording.place(how)
        try:
            run.check(SLICES, atol=tolerance, rtol=tolerance, loose=False)
            assert (
                how != "koila__place"
                or name in SAMPLES
                or {op for op, _ in run.gathers()} <= gathers | GATHERS_HERE
            ), run.gathers()
            assert how != "koila__place_pieces" or name not in SAMPLES or not run.gathers(), (
                run.gathers()
            )
        finally:
            run.close()


@pytest.mark.parametrize("name", ["samples: stacked, of features", "samples: pairs, of features"])
@pytest.mark.parametrize("fault", ["absent values are ones", "rows are counted from the batch"])
def test_a_fault_in_pieces_is_caught(name, fault, monkeypatch):
    run = record(name).place("koila__place_pieces")
    if fault.startswith("absent"):
        monkeypatch.setattr(run, "absent", lambda like, size: like.new_ones(size))
    else:
        call = run.call
        monkeypatch.setattr(run, "call", lambda *a: call(*a[:9], min(a[9], 1) if a[9:] else 0))
    try:
        with pytest.raises((AssertionError, ValueError)):
            run.check(SLICES, atol=1e-11, rtol=1e-11, loose=False)
    finally:
        run.close()


@pytest.mark.about_the_cpu("in float64 a GPU has no attention of one operator")
def test_a_fault_in_the_number_of_the_first_query_is_caught(monkeypatch):
    run = record("queries: causal").place()
    call = run.call
    monkeypatch.setattr(run, "call", lambda *a: call(*a[:9], 0))
    try:
        with pytest.raises(AssertionError):
            run.check(SLICES, atol=1e-11, rtol=1e-11, loose=False)
    finally:
        run.close()


@pytest.mark.parametrize("name", ["mlp", "loss: ignore index", "resnet, batch norm in training"])
def test_placed_whole_is_bit_equal(name):
    recording = record(name)
    run = recording.place("koila__place_whole")
    try:
        for got, eager in zip(run.run([B]), recording.outs):
            if "batch norm in training" in name and eager.is_cuda:  # eager's is cuDNN's own
                torch.testing.assert_close(got, eager, rtol=1e-12, atol=1e-14)
            else:
                assert torch.equal(got, eager)
    finally:
        run.close()


@pytest.mark.parametrize("mean, std", [(0, 1), (30, 1e-2), (1000, 1)])
def test_split_batch_norm_in_float32_is_as_accurate_as_eager(mean, std):
    ours = eagers = 0.0
    for seed in range(8):
        torch.manual_seed(seed)
        x, c = randn(64, 4) * std + mean, randn(64, 4)

        def step(x, dtype=torch.float32):
            m = nn.BatchNorm1d(4).to(dtype)
            x = x.clone().requires_grad_()
            value = (m(x) * c.to(dtype)).pow(2).sum()
            return [value, *torch.autograd.grad(value, [x, *m.parameters()])]

        run = slow.record(step, [x]).place()
        for got, eager, exact in zip(
            run.run([30, 20, 14]), run.r.outs, step(x.double(), torch.float64)
        ):
            scale = exact.abs().max()
            ours, eagers = (
                max(ours, ((got - exact).abs().max() / scale).item()),
                max(eagers, ((eager - exact).abs().max() / scale).item()),
            )
        run.close()
    assert ours <= 1.5 * eagers, (ours, eagers)


if __name__ == "__main__":
    only = next((a for a in sys.argv[1:] if not a.startswith("-")), "")
    bad = 0
    for name in CASES:
        if only not in name:
            continue
        try:
            run = record(name).place()
            if "-v" in sys.argv:
                print(run.table())
            worst = run.check(SLICES, atol=CASES[name][2], rtol=CASES[name][2], loose=False)
            extra = {op for op, _ in run.gathers()} - CASES[name][1]
            bad += bool(extra)
            print(
                f"{'ok ' if not extra else 'BAD'} {name:50} {run.n_nodes:5} nodes, worst "
                f"{worst:.1e}, gathers {sorted({op for op, _ in run.gathers()})}"
            )
        except pytest.skip.Exception as e:
            print(f"skip {name}: {e}")
        except Exception as e:
            bad += 1
            print(f"BAD {name:50} {type(e).__name__}: {str(e)[:300]}")
    sys.exit(bad != 0)

"""What a GPU's models are made of is sliced: attention by every kernel, cuDNN's recurrent layers
(packed too), batch norm, U-Nets. A step of each in slices, under `strict()`, leaves eager's
numbers. Two things run whole, and say so: dropout inside cuDNN's recurrent layers, and inside its
attention where no offset leads to a row's numbers."""

import contextlib

import pytest
import torch
import zoo
from helpers import assert_same, model_state, plain, random_state
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from zoo import ResNet, ce

import koila
from koila import _attention, lazy

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="a GPU is needed: make test-gpu simulates one"
)

SIMULATED = torch.cuda.is_available() and "(fake)" in torch.cuda.get_device_name()
B, M = 6, 2  # rows, rows of a slice
DROPOUT = 0.125  # cuDNN's attention takes multiples of 1/16
D = torch.float64

# Of each kernel, a type that it takes, and the tolerance of a sum of that type over three slices.
KERNELS = {
    "flash": (SDPBackend.FLASH_ATTENTION, torch.bfloat16, 3e-2),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, torch.float32, 2e-5),
    "cudnn": (SDPBackend.CUDNN_ATTENTION, torch.half, 4e-3),
    "math": (SDPBackend.MATH, D, 1e-12),
}


@pytest.fixture(autouse=True)
def same_bits():
    """Kernels that give the same numbers each time, products that are not rounded to TF32."""
    with torch.backends.cudnn.flags(
        enabled=True, benchmark=False, deterministic=True, allow_tf32=False
    ):
        yield


def step(make, batch, loss_of, wrap):
    torch.manual_seed(5)
    model = make().cuda().train()
    values = [t.cuda() for t in batch()]
    wrapped = wrap(values)
    loss = loss_of(model, *wrapped)
    loss.backward()
    return {"loss:loss": plain(loss), **model_state(model), "value:generators": random_state()}


def lazily(values, axis=0):
    """axis: the first one's batch dimension."""
    wrapped = lazy(*values, batch=(axis, *(0 for _ in values[1:])) if len(values) > 1 else axis)
    return wrapped if len(values) > 1 else [wrapped]


def sliced(make, batch, loss_of, tol=1e-12, axis=0, strict=True):
    """The plan of the step; its numbers are eager's."""
    expected = step(make, batch, loss_of, list)

    with koila.micro_batch(M), koila.strict() if strict else contextlib.nullcontext():
        got = step(make, batch, loss_of, lambda values: lazily(values, axis))
    plan = koila.last_plan()
    assert plan.n_micro_batches == B // M
    assert_same(expected, got, tol)
    return plan


def refused(make, batch, loss_of, plan, operator):
    """The plan names what ran whole, strict() refuses it, and both say what is cut instead."""
    instead = max(g.instead for g in plan.gathers if operator in g.operator)
    assert instead and instead in str(plan)
    with koila.micro_batch(M), koila.strict():
        with pytest.raises(koila.GatherError, match=operator) as refusal:
            step(make, batch, loss_of, lazily)
    assert instead in str(refusal.value)


# ---- attention


def gpt2(dropout, dtype):
    return zoo.gpt2(dropout, n_embd=32, n_head=4, attn_implementation="sdpa").to(dtype)


def of_layers(make, **kw):
    size = dict(hidden_size=32, num_attention_heads=4, intermediate_size=24)
    return lambda dropout, dtype: make(dropout, **size, **kw, attn_implementation="sdpa").to(dtype)


llama, vit = of_layers(zoo.llama), of_layers(zoo.vit)
bert = of_layers(zoo.bert, vocab_size=31)


def tokens(dtype):
    return (torch.randint(1, 31, (B, 9)),)


def padded(dtype):
    mask = torch.arange(9)[None] < torch.randint(3, 10, (B, 1))
    return torch.randint(1, 31, (B, 9)) * mask, mask.long(), torch.randint(0, 3, (B,))


def next_token(model, ids):
    logits = model(ids).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


TRANSFORMERS = {
    "gpt2": (gpt2, tokens, next_token),
    "llama": (llama, tokens, next_token),
    "bert": (
        bert,
        lambda dtype: (*tokens(dtype), torch.randint(0, 3, (B,))),
        lambda model, ids, y: F.cross_entropy(model(ids).logits, y),
    ),
    "bert, padded": (
        bert,
        padded,
        lambda model, ids, mask, y: F.cross_entropy(model(ids, attention_mask=mask).logits, y),
    ),
    "vit": (
        vit,
        lambda dtype: (torch.randn(B, 3, 8, 8, dtype=dtype), torch.randint(0, 5, (B,))),
        lambda model, x, y: F.cross_entropy(model(pixel_values=x).logits, y),
    ),
}


def attends(name, kernel, dropout, is_reached=True):
    """is_reached: does an offset lead to the numbers of a row? Of cuDNN's, nobody knows."""
    make, batch, loss_of = TRANSFORMERS[name]
    backend, dtype, tol = KERNELS[kernel]
    is_known = SIMULATED or kernel != "cudnn" or not dropout
    program = (lambda: make(dropout, dtype), lambda: batch(dtype), loss_of)
    with sdpa_kernel(backend):
        plan = sliced(*program, tol, strict=is_reached and is_known)
        if plan.gathers or not is_reached:
            refused(*program, plan, "_scaled_dot_product_cudnn_attention")


@pytest.mark.parametrize("dropout", [0.0, DROPOUT])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit"])
def test_attention_is_sliced(name, kernel, dropout):
    attends(name, kernel, dropout)


@pytest.mark.parametrize("dropout", [0.0, DROPOUT])
@pytest.mark.parametrize("kernel", ["efficient", "cudnn", "math"])  # flash takes no mask
def test_attention_with_a_padding_mask_is_sliced(kernel, dropout):
    attends("bert, padded", kernel, dropout)


@pytest.mark.skipif(not SIMULATED, reason="kernels of hardware cannot be chosen: make test-gpu")
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_cudnn_attention_whose_rows_no_offset_reaches_runs_whole(name, monkeypatch):
    """Planted: a mask whose heads are told apart by something else than the offset."""
    monkeypatch.setenv("FAKECUDA_CUDNN_DROPOUT", "threads")
    monkeypatch.setattr(_attention, "_tried", {})
    attends(name, "cudnn", DROPOUT, is_reached=False)


# ---- recurrent layers


class Recurrent(nn.Module):
    def __init__(self, kind, layers, batch_first, bidirectional, dropout, **more):
        super().__init__()
        options = dict(batch_first=batch_first, bidirectional=bidirectional, dropout=dropout)
        self.rnn = kind(5, 7, layers, **options, **more)
        self.head = nn.Linear((self.rnn.proj_size or 7) * (1 + bidirectional), 4)

    def forward(self, x):
        out, _ = self.rnn(x)
        return self.head(out.mean(1 if self.rnn.batch_first else 0))


def sequences(batch_first):
    shape = (B, 8, 5) if batch_first else (8, B, 5)
    return torch.randn(shape, dtype=D), torch.randint(0, 4, (B,))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_sliced(kind, layers, bidirectional, batch_first):
    sliced(
        lambda: Recurrent(kind, layers, batch_first, bidirectional, 0.0).double(),
        lambda: sequences(batch_first),
        ce,
        axis=0 if batch_first else 1,
    )


class Packed(Recurrent):
    """Over rows of different lengths."""

    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x, [3, 8, 1, 5, 8, 2], True, False)
        out, last = self.rnn(packed)
        y, _ = nn.utils.rnn.pad_packed_sequence(out, True)
        last = last[0] if isinstance(last, tuple) else last
        return self.head(y.mean(1)) + last.square().mean((0, 2)).unsqueeze(1)


@pytest.mark.parametrize("net", [Recurrent, Packed])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_lstms_with_projections_are_sliced(net, layers, bidirectional):
    plan = sliced(
        lambda: net(nn.LSTM, layers, True, bidirectional, 0.0, proj_size=3).double(),
        lambda: sequences(True),
        ce,
    )
    assert not plan.gathers


@pytest.mark.parametrize("dtype", [D, torch.float32])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_packed_recurrent_layers_are_sliced(kind, layers, bidirectional, dtype):
    """All layers in one call of cuDNN, as in eager."""
    plan = sliced(
        lambda: Packed(kind, layers, True, bidirectional, 0.0).to(dtype),
        lambda: tuple(t.to(dtype) if t.is_floating_point() else t for t in sequences(True)),
        ce,
        1e-12 if dtype == D else 2e-5,
    )
    assert not plan.gathers


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_packed_layers_refuse_what_cudnn_refuses(kind):
    """Gradients in evaluation, and gradients of gradients."""
    net, x = Packed(kind, 1, True, False, 0.0).cuda(), torch.randn(B, 8, 5, device="cuda")
    for wrap in (lambda t: t, lazy):
        with pytest.raises(RuntimeError, match="double backwards is not supported|derivative"):
            w = net.rnn.weight_hh_l0
            (g,) = torch.autograd.grad(net(wrap(x)).sum(), w, create_graph=True)
            g.square().sum().backward()
        with pytest.raises(RuntimeError, match="backward can only be called in training mode"):
            net.eval()(wrap(x)).sum().backward()
        net.train()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_dropout_between_recurrent_layers_runs_whole(kind):
    """cuDNN keeps the state of this dropout itself: a second step draws other numbers in eager too,
    so none are compared."""

    def make():
        return Recurrent(kind, 2, True, False, DROPOUT).double()

    with koila.micro_batch(M):
        out = step(make, lambda: sequences(True), ce, lazily)
    assert out["loss:loss"].isfinite() and koila.last_plan().n_micro_batches == B // M
    refused(make, lambda: sequences(True), ce, koila.last_plan(), "_cudnn_rnn")


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_dropout_between_recurrent_layers_is_sliced_without_cudnn(kind):
    """As limits.md recommends."""
    with torch.backends.cudnn.flags(enabled=False):
        sliced(
            lambda: Recurrent(kind, 2, True, False, DROPOUT).double(), lambda: sequences(True), ce
        )


# ---- convolutions and norms


class UNet(nn.Module):
    """Down twice, up twice, with batch norms; up by a transposed convolution or by
    interpolation."""

    def __init__(self, up):
        super().__init__()

        def double(c_in, c_out):
            return nn.Sequential(
                nn.Conv2d(c_in, c_out, 3, padding=1, bias=False),
                nn.BatchNorm2d(c_out),
                nn.ReLU(inplace=True),
                nn.Conv2d(c_out, c_out, 3, padding=1),
                nn.GroupNorm(2, c_out),
                nn.SiLU(),
            )

        def upwards(c):
            if up == "transposed":
                return nn.ConvTranspose2d(c, c, 2, 2)
            return nn.Upsample(scale_factor=2, mode=up)

        self.down1, self.down2, self.middle = double(3, 4), double(4, 8), double(8, 8)
        self.up2, self.level2 = upwards(8), double(16, 4)
        self.up1, self.level1 = upwards(4), double(8, 4)
        self.out = nn.Conv2d(4, 3, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.avg_pool2d(b, 2))
        b = self.level2(torch.cat([self.up2(c), b], 1))
        return self.out(self.level1(torch.cat([self.up1(b), a], 1)))


def images(layout):
    x = torch.randn(B, 3, 8, 8, dtype=D)
    return x.contiguous(memory_format=layout), torch.randint(0, 5, (B,))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_resnet_is_sliced(layout):
    sliced(
        lambda: ResNet(stages=(1, 1, 1)).double().to(memory_format=layout),
        lambda: images(layout),
        ce,
    )


@pytest.mark.parametrize("up", ["transposed", "nearest", "bilinear"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_unet_is_sliced(up, layout):
    sliced(
        lambda: UNet(up).double().to(memory_format=layout),
        lambda: images(layout),
        lambda model, x, y: F.mse_loss(model(x), x.flip(1)),
    )


@pytest.mark.parametrize("dtype", [D, torch.float32, torch.bfloat16])
def test_rms_norm_is_sliced(dtype):
    """Fused on a GPU, with a backward of its own."""
    sliced(
        lambda: nn.Sequential(nn.Linear(5, 8), nn.RMSNorm(8), nn.Linear(8, 4)).to(dtype),
        lambda: (torch.randn(B, 7, 5, dtype=dtype), torch.randint(0, 4, (B,))),
        lambda model, x, y: F.cross_entropy(model(x).mean(1), y),
        {D: 1e-12, torch.float32: 2e-6, torch.bfloat16: 3e-2}[dtype],
    )


def test_log_sigmoid_is_sliced():
    """On a GPU without the buffer that the CPU's backward reads."""
    sliced(
        lambda: nn.Linear(5, 4).double(),
        lambda: (torch.randn(B, 5, dtype=D),),
        lambda model, x: -F.logsigmoid(model(x)).mean(),
    )

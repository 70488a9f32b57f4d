"""A training step through `lazy()` leaves the loss, gradients and buffers of plain PyTorch on the
full batch, whatever the slice."""

import pytest
import torch
from helpers import SLICES, WHOLE_BATCH_NORM, compare, rows
from torch import nn
from torch.nn import functional as F
from zoo import (
    MLP,
    B,
    Block,
    ConvNet,
    Encoder,
    Generator,
    Recurrent,
    ResNet,
    Seq2Seq,
    UNet,
    bert,
    ce,
    gpt2,
    images,
    padded,
    rows_of,
    tokens,
    vit,
)

import koila

ACTIVATION = 64  # bytes a row: smaller than any activation here, larger than a label or a flag
SGD = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)  # noqa: E731


def lm(model, ids):
    return model(ids, labels=ids).loss


def lm64(model, ids):
    """The model's own loss casts its logits to float32, where no two summation orders agree to
    1e-12."""
    logits = model(ids).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def classify(model, ids, mask, label):
    return F.cross_entropy(model(ids, attention_mask=mask).logits, label)


def see(model, x, y):
    return F.cross_entropy(model(pixel_values=x).logits, y)


def translate(model, source, target):
    out = model(source, target[:, :-1])
    return F.mse_loss(out, target[:, 1:, :5])


MODELS = {
    "mlp": (lambda: MLP(), rows_of(5), ce),
    "mlp-width-equals-batch": (lambda: MLP(width=B, classes=B), rows_of(5), ce),
    "mlp-batch-7": (lambda: MLP(), rows_of(5, b=7), ce),
    "convnet-groupnorm": (lambda: ConvNet(), images(), ce),
    "convnet-layernorm-channels-last": (
        lambda: ConvNet(lambda c: nn.GroupNorm(1, c)).to(memory_format=torch.channels_last),
        lambda: (
            torch.randn(B, 3, 8, 8, dtype=torch.float64).contiguous(
                memory_format=torch.channels_last
            ),
            torch.randint(0, 5, (B,)),
        ),
        ce,
    ),
    "lstm": (lambda: Recurrent(), rows_of(4, 5), ce),
    "lstm-bidirectional": (lambda: Recurrent(bidirectional=True, layers=1), rows_of(3, 5), ce),
    "gru": (lambda: Recurrent(nn.GRU), rows_of(4, 5), ce),
    "rnn": (lambda: Recurrent(nn.RNN, layers=1), rows_of(4, 5), ce),
    "encoder": (lambda: Encoder(), rows_of(5, 8), ce),
    "encoder-prenorm": (lambda: Encoder(norm_first=True), rows_of(5, 8), ce),
    "transformer": (
        lambda: Seq2Seq(),
        lambda: (
            torch.randn(B, 5, 8, dtype=torch.float64),
            torch.randn(B, 4, 8, dtype=torch.float64),
        ),
        translate,
    ),
    "gpt2": (lambda: gpt2(), tokens(), lm64),
    "gpt2-eager-attention": (lambda: gpt2(attn_implementation="eager"), tokens(), lm64),
    "bert": (lambda: bert(), padded(), classify),
    "vit": (lambda: vit(), images(), see),
    "unet": (lambda: UNet(), images(), lambda model, x, y: F.mse_loss(model(x), x)),
    "generator": (
        lambda: Generator(),
        lambda: (torch.randn(B, 3, 4, 4).double(), torch.randn(B, 5).double()),
        lambda model, x, style: model(x, style).square().mean(),
    ),
}

# `nn.LSTM` makes its first state as a plain tensor of the full batch, and float64 runs it cell by
# cell.
ALLOWED_BYTES_A_ROW = {
    "lstm": 8 * 7 * 2,
    "lstm-bidirectional": 8 * 7 * 2,
    "gru": 8 * 7 * 2,
    "rnn": 8 * 7 * 2,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_step_equals_eager(name):
    make, batch, loss = MODELS[name]
    compare(
        lambda: make().double(),
        batch,
        loss,
        gather_bytes_per_row=max(ACTIVATION, ALLOWED_BYTES_A_ROW.get(name, 0)),
    )


def test_gpt2_with_its_own_loss_equals_eager_to_float32():
    compare(lambda: gpt2().double(), tokens(), lm, tol=2e-6)


# ---- batch norm in training mode: statistics couple all rows


class PatchTokens(nn.Module):
    """A convolution and a batch norm in front of a transformer (LeViT and its like): the gradient
    comes back through a transposition, and in a slice of one row its strides no longer tell torch's
    kernel the order it lies in."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = (
            nn.Conv2d(3, 8, 3, 2, 1, bias=False),
            nn.BatchNorm2d(8),
            nn.Linear(8, 5),
        )

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).flatten(2).transpose(1, 2)).amax(1)


NORMED = {
    "patch-tokens": (PatchTokens, images()),
    "convnet-batchnorm": (lambda: ConvNet(nn.BatchNorm2d), images()),
    "convnet-batchnorm-no-affine": (
        lambda: ConvNet(lambda c: nn.BatchNorm2d(c, affine=False)),
        images(),
    ),
    "convnet-batchnorm-no-running-stats": (
        lambda: ConvNet(lambda c: nn.BatchNorm2d(c, track_running_stats=False)),
        images(),
    ),
    "convnet-batchnorm-cumulative-average": (
        lambda: ConvNet(lambda c: nn.BatchNorm2d(c, momentum=None)),
        images(),
    ),
    "mlp-batchnorm": (
        lambda: nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 4)),
        rows_of(5),
    ),
    "block": (
        lambda: nn.Sequential(
            Block(3, 4, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
        ),
        images(),
    ),
}


@pytest.mark.parametrize("name", NORMED)
def test_batchnorm_in_training_mode_equals_eager(name):
    make, batch = NORMED[name]
    # one slice runs the recorded operators: bit-equal. Split statistics combine in another order.
    how = dict(gather_bytes_per_row=ACTIVATION, tol_whole=WHOLE_BATCH_NORM)
    compare(lambda: make().double(), batch, ce, **how)


def test_a_resnet_of_20_batchnorms_equals_eager():
    how = dict(gather_bytes_per_row=ACTIVATION, tol_whole=WHOLE_BATCH_NORM)
    compare(lambda: ResNet().double(), images(), ce, **how)


def test_batchnorm_in_eval_mode_does_not_touch_its_statistics():
    compare(
        lambda: ResNet(stages=(1, 1)).double().eval(), images(), ce, gather_bytes_per_row=ACTIVATION
    )


@pytest.mark.parametrize("rows", [None, 4, 1])
def test_a_recurrent_layer_evaluates_without_gradients(rows):
    """Its kernel leaves the workspace out, which a recording says has no elements."""
    torch.manual_seed(0)
    layer = nn.LSTM(16, 16, batch_first=True).eval()
    x = torch.randn(16, 4, 16)
    with torch.no_grad():
        y, (h, c) = layer(x)
        with koila.micro_batch(rows):
            y2, (h2, c2) = layer(koila.lazy(x))
            assert y2.mean().item() == pytest.approx(y.mean().item(), abs=1e-6)
            for a, b in ((y, y2), (h, h2), (c, c2)):
                assert (a - koila.run(b)).abs().max() <= (0 if rows is None else 1e-6)


def test_pooling_of_channels_last_images_is_sliced():
    """It ends in `as_strided_`, and its gradient is a copy through `as_strided` into zeros: each
    row of it is a slice's own."""

    def make():
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(8, 6, 1),
            nn.Flatten(),
            nn.Linear(6, 5),
        ).double()

    def loss(model, x, y):
        # a step whose loss is not used
        ce(model, x.contiguous(memory_format=torch.channels_last), y)
        return ce(
            model.to(memory_format=torch.channels_last),
            x.contiguous(memory_format=torch.channels_last),
            y,
        )

    compare(make, images(), loss, gather_bytes_per_row=0)
    assert koila.last_plan().replay_ratio <= 1.0


@pytest.mark.parametrize(
    "f",
    [
        lambda h: h.as_strided((B, 2, 4), (6, 2, 1)),  # windows that overlap, each in its row
        lambda h: h.as_strided((4, B), (1, 6), 1),
        lambda h: h.t().as_strided((B, 3, 2), (6, 1, 3)),
        lambda h: h.as_strided((B, 6), (5, 1)),  # rows that overlap: gathered
        lambda h: h[1:].as_strided((B - 2, 6), (6, 1), 6),
    ],
)
def test_as_strided_equals_eager(f):
    def loss(model, x, y):
        return f(model(x)).sin().square().mean()

    compare(lambda: nn.Linear(5, 6).double(), rows_of(5), loss)


# ---- other axes and shapes of batch


def test_the_batch_may_be_the_second_dimension():
    def loss(model, x, y):
        return F.cross_entropy(model(x), y)

    from helpers import batch_rows, compare_programs, step_program

    make = lambda: (torch.randn(4, B, 5, dtype=torch.float64), torch.randint(0, 4, (B,)))  # noqa: E731
    program = step_program(lambda: Recurrent(batch_first=False).double(), make, loss)
    assert batch_rows(make()) == 4
    compare_programs(program, B, batch=(1, 0))


def test_the_optimizer_step_after_it_leaves_eager_s_parameters():
    compare(lambda: MLP().double(), rows_of(5), ce, optimizer=SGD)
    compare(
        lambda: MLP().double(), rows_of(5), ce, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01)
    )


def test_ten_steps_of_training_end_at_eager_s_parameters():
    from helpers import compare_programs, model_state, plain

    def program(wrap):
        torch.manual_seed(7)
        model = ConvNet().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        out = {}
        for step in range(10):
            x, y = wrap(torch.randn(B, 3, 8, 8, dtype=torch.float64), torch.randint(0, 5, (B,)))
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            out[f"loss:{step}"] = plain(loss)
        return out | model_state(model)

    compare_programs(program, B, tol=1e-10, tol_whole=1e-11)


@pytest.mark.parametrize("kind", SLICES)
@pytest.mark.parametrize("kernel", ["cudnn_batch_norm", "miopen_batch_norm"])
@pytest.mark.parametrize("tracked", [True, False])
def test_batch_norm_of_a_vendor_is_recorded_as_the_native_one(kernel, tracked, kind):
    """Lazy tensors never reach the kernel: what a GPU would call is recorded and cut as on the
    CPU."""
    torch.manual_seed(0)
    data, weight, bias = (
        torch.randn(6, 3, 4, dtype=torch.float64),
        torch.rand(3, dtype=torch.float64),
        torch.rand(3, dtype=torch.float64),
    )

    def step(x, call):
        state = (
            [torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)]
            if tracked
            else [None, None]
        )
        w, b = weight.clone().requires_grad_(), bias.clone().requires_grad_()
        call(x, w, b, *state, True, 0.1, 1e-5)[0].tanh().square().sum().backward()
        return [w.grad, b.grad, *(s for s in state if s is not None)]

    a, b = data.clone().requires_grad_(), data.clone().requires_grad_()
    expected = step(a, torch.ops.aten.native_batch_norm)
    with koila.micro_batch(rows(kind, 6)):
        found = step(koila.lazy(b), getattr(torch.ops.aten, kernel))
    assert koila.last_plan().n_micro_batches == len(range(0, 6, rows(kind, 6) or 6))
    for e, f in zip([*expected, a.grad], [*found, b.grad]):
        assert (e - f).abs().max() <= 1e-12 * e.abs().max()

"""Forward and backward of whole models: what is recorded, run by the simple executor, is eager's to
the bit; and every call returns what was recorded."""

import pytest
import torch
import torch.nn.functional as F
import zoo
from helpers import WHOLE_BATCH_NORM
from torch import nn

from koila import _core, lazy
from koila._backward import _original as engine


def gradients(loss, params):
    return engine(
        (loss,),
        (torch.ones_like(loss),),
        False,
        False,
        tuple(params),
        allow_unreachable=True,
        accumulate_grad=False,
    )


def same(model, inputs, loss_of, is_same=torch.equal):
    params = [p for p in model.parameters() if p.requires_grad]
    torch.manual_seed(7)
    eager_loss = loss_of(model, *inputs)
    eager = gradients(eager_loss, params)
    eager_state = torch.default_generator.get_state()
    torch.manual_seed(7)
    loss = loss_of(model, *lazy(*inputs)) if len(inputs) > 1 else loss_of(model, lazy(*inputs))
    ours = gradients(loss, params)
    assert torch.equal(torch.default_generator.get_state(), eager_state), (
        "the generator is not where eager leaves it"
    )
    tape = _core.tape_of(loss)
    assert tape.check()
    _core.run_whole([loss, *[g for g in ours if g is not None]])
    assert torch.equal(torch.default_generator.get_state(), eager_state)
    assert is_same(loss.torch(), eager_loss)
    for p, g, e in zip(params, ours, eager):
        assert (g is None) == (e is None)
        if g is not None:
            assert g.shape == e.shape and g.stride() == e.stride() and is_same(g.torch(), e), (
                p.shape
            )
    tape.close()


def ce(model, x, y):
    return F.cross_entropy(model(x), y)


def mlp(p=0.0):
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.ReLU(inplace=True),
        nn.Dropout(p),
        nn.LayerNorm(16),
        nn.Linear(16, 16),
        nn.GELU(),
        nn.Linear(16, 4),
    )


def conv(norm):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        norm(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3),
        nn.SiLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


X = torch.randn(6, 8)
Y = torch.tensor([0, 3, 1, 2, 1, 0])
IMAGE = torch.randn(6, 3, 10, 10)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_mlp(p):
    same(mlp(p), (X, Y), ce)


@pytest.mark.parametrize(
    "norm",
    [
        lambda c: nn.GroupNorm(2, c),
        lambda c: nn.BatchNorm2d(c).eval(),
        lambda c: nn.BatchNorm2d(c, track_running_stats=False),
        lambda c: nn.InstanceNorm2d(c, affine=True),
    ],
)
def test_convolutions(norm):
    # eager runs cuDNN's batch norm, koila torch's own
    is_same = torch.allclose if WHOLE_BATCH_NORM else torch.equal
    same(conv(norm), (IMAGE, Y), ce, is_same)
    same(
        conv(norm).to(memory_format=torch.channels_last),
        (IMAGE.contiguous(memory_format=torch.channels_last), Y),
        ce,
        is_same,
    )


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_recurrent(kind, dtype):
    model = kind(8, 5, num_layers=2, bidirectional=True, batch_first=True, dtype=dtype)
    same(model, (torch.randn(6, 7, 8, dtype=dtype),), lambda m, x: m(x)[0].sin().mean())


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_transformer_encoder(dropout):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
    same(
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        (torch.randn(6, 5, 8),),
        lambda m, x: m(x).square().mean(),
    )


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_gpt2(dropout):
    model = zoo.gpt2(dropout, n_layer=3, n_embd=16, vocab_size=50, use_cache=True).train()
    ids = torch.randint(0, 50, (6, 12))
    same(model, (ids,), lambda m, x: m(input_ids=x, labels=x).loss)


def test_batchnorm_statistics_happen_once_and_at_the_end_of_the_step():
    torch.manual_seed(0)
    model, reference = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
    for _ in range(3):
        x = torch.randn(6, 8)
        reference(x).square().mean().backward()
        y = lazy(x)
        loss = model(y).square().mean()
        float(loss)
        loss.backward()
        assert torch.equal(model.running_mean, reference.running_mean) and torch.equal(
            model.running_var, reference.running_var
        )
        assert model.num_batches_tracked == reference.num_batches_tracked


def test_batchnorm_statistics_are_written_as_its_kernel_writes_them():
    """Autograd saved the buffers of two forwards before the first backward writes them; an
    evaluation recorded before reads what was there then."""
    torch.manual_seed(0)
    model, reference = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
    x, z = torch.randn(6, 8), torch.randn(4, 8)
    results = []
    for net, wrap in ((reference, lambda t: t), (model, lazy)):
        with torch.no_grad():
            early = net.eval()(wrap(z))
        net.train()
        version = net.running_mean._version
        first, second = net(wrap(x)).square().mean(), net(wrap(x) * 2).pow(4).mean()
        first.backward()
        second.backward()
        assert net.running_mean._version == version
        results.append((early + 0, net.weight.grad, net.running_mean, net.running_var))
    for a, b in zip(*results):
        assert torch.allclose(a, b + 0, rtol=1e-5, atol=1e-7)


def test_batchnorm_statistics_happen_without_a_backward_too():
    model, reference = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(6, 8)
            reference(x)
            model(lazy(x))
    assert torch.equal(model.running_mean, reference.running_mean) and torch.equal(
        model.running_var, reference.running_var
    )


def test_the_two_uses_of_one_batchnorm_in_a_step_follow_one_another():
    model, reference = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
    x = torch.randn(6, 8)
    (reference(x) + reference(x * 2)).square().mean().backward()
    y = lazy(x)
    (model(y) + model(y * 2)).square().mean().backward()
    assert torch.equal(model.running_mean, reference.running_mean) and torch.equal(
        model.running_var, reference.running_var
    )


def test_instance_norm_with_statistics():
    model, reference = (
        nn.InstanceNorm1d(4, track_running_stats=True),
        nn.InstanceNorm1d(4, track_running_stats=True),
    )
    x = torch.randn(6, 4, 5)
    reference(x)
    model(lazy(x)).sum().item()
    assert torch.equal(model.running_mean, reference.running_mean) and torch.equal(
        model.running_var, reference.running_var
    )


def test_a_factory_of_metadata_has_no_data_edge():
    y = lazy(X) * 2
    for made in (
        torch.ones_like(y),
        torch.zeros_like(y),
        y.new_zeros(3),
        torch.full_like(y, 2.5),
        torch.empty_like(y),
        y.new_empty_strided((2, 3), (1, 2)),
    ):
        text = _core.tape_of(made).text().strip().splitlines()[-2]  # the last is the end
        assert "aten::full(" in text or "aten::empty_strided(" in text, text
        assert made.shape == made.torch().shape and made.stride() == made.torch().stride()


@pytest.mark.parametrize(
    "draw",
    [
        lambda t: torch.rand_like(t),
        lambda t: torch.randn_like(t),
        lambda t: torch.bernoulli(t.sigmoid()),
        lambda t: F.dropout(t, 0.3),
        lambda t: F.dropout1d(t.unsqueeze(0), 0.3),
        lambda t: F.alpha_dropout(t, 0.3),
        lambda t: torch.empty_like(t).exponential_(),
        lambda t: torch.empty_like(t).normal_(1, 2),
        lambda t: t.clone().uniform_(-1, 1),
        lambda t: t.t().clone().bernoulli_(0.4),
        lambda t: t.bernoulli(0.4),
        lambda t: F.gumbel_softmax(t),
        lambda t: F.rrelu(t, training=True),
        lambda t: torch.multinomial(t.softmax(1), 3),
        lambda t: torch.empty_like(t)[:, ::2].normal_(),
        lambda t: torch.randint_like(t, 9),
        lambda t: torch.randint_like(t, 3, 9),
        lambda t: torch.poisson(t.exp()),
        lambda t: torch.normal(t, 2.0),
        lambda t: torch.empty_like(t).bernoulli_(t.sigmoid()),
        lambda t: torch.native_dropout(t, 0.3, True)[0],
    ],
)
def test_random_numbers_are_eagers(draw):
    for x in (torch.randn(6, 5), torch.randn(6, 37), torch.randn(6, 8, dtype=torch.float64)):
        torch.manual_seed(11)
        first, second = draw(x), draw(x)
        state = torch.default_generator.get_state()
        torch.manual_seed(11)
        y = lazy(x)
        a, b = draw(y), draw(y)
        assert torch.equal(torch.default_generator.get_state(), state)
        plain = [t.torch() if _core.is_lazy(t) else t for t in (b, a)]
        assert torch.equal(plain[1], first) and torch.equal(plain[0], second)
        assert torch.equal(torch.default_generator.get_state(), state)
        _core.tape_of(y).close()

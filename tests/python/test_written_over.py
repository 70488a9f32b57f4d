"""A sum of two terms is written over one that nobody reads any more, as torch's autograd adds
gradients up: peaks are no higher than eager's, and what somebody still has is left alone."""

import copy

import pytest
import torch
from helpers import assert_same, model_state, plain
from memory_helpers import Held, clear, eager_step, installed, koila_step
from torch import nn
from torch.nn import functional as F

import koila
from koila import lazy


class Tied(nn.Module):
    """One large matrix that three layers use, as encoder, decoder and head of T5 do."""

    def __init__(self, words=20_000, width=32):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.encoder, self.decoder = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        context = torch.tanh(self.encoder(self.words(x))).mean(1, keepdim=True)
        h = torch.tanh(self.decoder(self.words(x) + context))
        return h[:, -1] @ self.words.weight[:100].t() + h.sum() * self.words.weight[0, 0]


def tied_loss(model, x):
    return F.cross_entropy(model(x), x[:, 0] % 100)


@pytest.mark.skipif(not installed(), reason="torch's CPU memory cannot be counted here")
@pytest.mark.about_the_cpu("its peaks are counted to the byte")
def test_gradients_of_one_matrix_are_added_in_the_memory_of_one():
    torch.manual_seed(0)
    model, batch = Tied().double(), (torch.randint(100, (4, 6)),)
    peaks = []
    for step in (eager_step, koila_step):
        for _ in range(2):  # the first learns what operators use inside
            clear(model)
            with Held() as held:
                step(model, tied_loss, batch)
        peaks.append(held.peak)
    plan = koila.last_plan()
    matrix = model.words.weight.nbytes
    assert plan.n_micro_batches == 1 and peaks[1] <= 1.001 * peaks[0], peaks
    assert peaks[1] < 2.1 * matrix, "three gradients were there at once"
    assert plan.predicted_peak_bytes == pytest.approx(plan.measured_peak_bytes, rel=1e-3)


@pytest.mark.parametrize("rows", [None, 1, 3])
def test_the_gradients_are_eager_s(rows):
    torch.manual_seed(0)
    eager, batch = Tied(words=200).double(), torch.randint(100, (4, 6))
    lazily = copy.deepcopy(eager)
    tied_loss(eager, batch).backward()
    koila_step(lazily, tied_loss, (batch,), rows)
    assert_same(model_state(eager), model_state(lazily), 0 if rows is None else 1e-12)


KEPT = []


@torch.library.custom_op("koila_tests::kept", mutates_args=())
def keeps(x: torch.Tensor) -> torch.Tensor:
    result = x * 2
    KEPT.append(result.detach())  # another tensor on the same memory
    return result


@keeps.register_fake
def _(x):
    return torch.empty_like(x)


def test_what_an_operator_of_a_program_keeps_is_not_written_over():
    """Neither torch nor koila is told of it."""
    KEPT.clear()
    x, w = torch.randn(6, 4), torch.ones(4)
    out = keeps(lazy(x) * w) + torch.ones(4)
    assert torch.equal(plain(out), x * 2 + 1)
    assert [tuple(k.shape) for k in KEPT] == [(6, 4)] and torch.equal(KEPT[0], x * 2)


class Saves(nn.Module):
    """Its backward reads what it was given."""

    def forward(self, x):
        return torch.sin(x)


@pytest.mark.parametrize("rows", [None, 2])
def test_what_a_module_saved_for_its_backward_is_not_written_over(rows):
    torch.manual_seed(0)
    layers = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
    x = torch.randn(6, 4, dtype=torch.float64)

    def loss(saves, x):
        given = layers[0](x)
        return (saves(given) * (given + layers[1](x))).square().mean()

    gradients = []
    for saves, batch in ((Saves(), x), (koila.opaque(Saves()), lazy(x))):
        with koila.micro_batch(rows):
            loss(saves, batch).backward()
        gradients.append([p.grad for layer in layers for p in layer.parameters()])
        for layer in layers:
            clear(layer)
    for eager, lazily in zip(*gradients):
        assert torch.allclose(plain(lazily), eager, rtol=1e-12)

"""The loss of logits[:, :-1], however it is written: the logits are cut along the tokens, though
they are one longer. The step is eager's, whatever else reads them."""

import pytest
import torch
from helpers import compare_along_other, model_state, random_state, step_program
from memory_helpers import clear, installed, koila_step, needs, only
from torch import nn
from torch.nn import functional as F

import koila

pytestmark = pytest.mark.skipif(not installed(), reason="torch's CPU memory cannot be counted here")
counted = pytest.mark.about_the_cpu("its peaks are counted to the byte")
T, WORDS = 96, 500


class Model(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.attention = nn.Linear(16, 48)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, WORDS, bias=bias)

    def hidden(self, ids):
        x = self.embed(ids)
        q, k, v = self.attention(x).chunk(3, 2)
        return self.norm(x + F.scaled_dot_product_attention(q, k, v, is_causal=True))

    def forward(self, ids):
        return self.head(self.hidden(ids))


def flattened(m, ids):
    return F.cross_entropy(m(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def as_in_old_transformers(m, ids):
    logits = m(ids)[..., :-1, :].contiguous()
    labels = ids[..., 1:].contiguous()
    return nn.CrossEntropyLoss()(logits.view(-1, WORDS), labels.view(-1))


def classes_second(m, ids):
    return F.cross_entropy(m(ids)[:, :-1].transpose(1, 2), ids[:, 1:], label_smoothing=0.1)


def log_probabilities(m, ids):
    logp = m(ids)[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    return -(logp * (ids[:, 1:] % 3 > 0)).sum(1).sigmoid().mean()


def taken_behind_the_softmax(m, ids):
    logp = F.log_softmax(m(ids), -1)[:, :-1]
    return F.nll_loss(logp.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=3)


def capped(m, ids):
    logits = 3 * torch.tanh(m(ids) / 3)
    return F.cross_entropy(logits[:, :-1].reshape(-1, WORDS), ids[:, 1:].reshape(-1))


def tied(m, ids):
    logits = m.hidden(ids) @ m.embed.weight.t()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def behind_a_prompt(m, ids):
    return F.cross_entropy(m(ids)[:, 9:-1].flatten(0, 1), ids[:, 10:].flatten())


def backwards(m, ids):
    return F.cross_entropy(m(ids)[:, 1:].flatten(0, 1), ids[:, :-1].flatten())


def with_a_penalty(m, ids):
    logits = m(ids)[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    return loss + 0.01 * logits.logsumexp(-1).square().mean()


def taken_twice(m, ids):
    logits = m(ids)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    return loss + 0.01 * logits[:, :-1].logsumexp(-1).square().mean()


def taken_step_by_step(m, ids):
    logits = m(ids)[:, :-1][:, -60:]
    return F.cross_entropy(logits.flatten(0, 1), ids[:, -60:].flatten())


def of_the_last_hidden(m, ids):
    logits = m.head(m.hidden(ids)[:, -61:])[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), ids[:, -60:].flatten())


NARROWED = [
    flattened,
    as_in_old_transformers,
    classes_second,
    log_probabilities,
    taken_behind_the_softmax,
    capped,
    tied,
    behind_a_prompt,
    backwards,
    with_a_penalty,
    taken_twice,
    taken_step_by_step,
    of_the_last_hidden,
]


# ---- other rows are read too


def read_whole(m, ids):
    logits = m(ids)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    return loss + 0.01 * logits.square().mean()


def two_tokens_ahead(m, ids):
    logits = m(ids)
    one = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    return one + F.cross_entropy(logits[:, :-2].flatten(0, 1), ids[:, 2:].flatten())


def the_last_row_too(m, ids):
    logits = m(ids)
    return flattened(m, ids) + logits[:, -1].square().mean()


def differences(m, ids):
    logits = m(ids)
    return (logits[:, 1:] - logits[:, :-1]).square().mean()


def every_other(m, ids):
    return F.cross_entropy(m(ids)[:, :-1:2].flatten(0, 1), ids[:, 1::2].flatten())


def exact_but_for_zeros(m, ids):
    """exp(0) is not 0: no gradient that is zero may go through it unseen."""
    logits = m(ids)
    (g,) = torch.autograd.grad(logits[:, :-1].square().mean(), logits, create_graph=True)
    return g.exp().mean() + flattened(m, ids)


OTHERS = [read_whole, two_tokens_ahead, the_last_row_too, differences, every_other]
OTHERS += [exact_but_for_zeros]


def sentences(samples):
    torch.manual_seed(samples)
    return (torch.randint(0, WORDS, (samples, T)),)


def make(bias=False):
    return lambda: Model(bias).double()


@pytest.mark.parametrize("samples, axes", [(1, "other"), (2, "other"), (3, "both")])
@pytest.mark.parametrize("loss", NARROWED + OTHERS)
def test_a_loss_of_some_tokens_is_eager_s(loss, samples, axes):
    program = step_program(make(bias=loss is flattened), lambda: sentences(samples), loss)
    torch.manual_seed(1234)
    expected, state = program(lambda *v: v[0]), random_state()
    sizes = (16, 7, 1)
    n = compare_along_other(program, expected, state, 1e-12, sizes=sizes, axes=axes)
    assert n == len(sizes)


@counted
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("loss", NARROWED)
def test_the_logits_of_some_tokens_are_cut_along_them(loss, samples, bias):
    """A third of what one row needs: less than the logits, which are there three times."""
    model, batch = make(bias)(), sentences(samples)
    loss(model, *batch).backward()
    expected = model_state(model)
    clear(model)
    room, gradients = needs(model, batch, loss)
    with only(gradients + room // 4):
        koila_step(model, loss, batch)
    plan = koila.last_plan()
    assert plan.axis is not None and plan.axis.size == T
    assert plan.measured_peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=0.02)
    for k, e in expected.items():
        torch.testing.assert_close(model_state(model)[k], e, rtol=1e-11, atol=1e-13)

"""A weight that is used several times has a gradient of several terms. In slices they are added up
as they are made, and what can be added while it is made is never there beside the sum: the
gradients are eager's, and take the memory of the sums alone."""

import pytest
import torch
from helpers import (
    SLICES,
    WHOLE,
    compare,
    compare_along_other,
    model_state,
    random_state,
    step_program,
)
from memory_helpers import clear, installed, koila_step
from torch import nn
from torch.nn import functional as F

import koila

WORDS, WIDTH = 30, 8


def texts(n=5, length=6):
    return torch.randint(0, WORDS, (n, length)), torch.randint(0, WORDS, (n, length))


class Tied(nn.Module):
    """The table of its words is its head, and one layer is used twice."""

    def __init__(self, words=WORDS, width=WIDTH, padding=0, tokens_meet=False, rows_meet=False):
        super().__init__()
        self.words = nn.Embedding(words, width, padding_idx=padding)
        self.layer, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.tokens_meet, self.rows_meet = tokens_meet, rows_meet

    def forward(self, x):
        h = self.norm(self.layer(self.words(x)))
        if self.tokens_meet:  # along the tokens, the loops before and behind this are two
            h = h + h.mean(1, keepdim=True)
        if self.rows_meet:
            h = h - h.mean(0)
        return F.linear(h + torch.tanh(self.layer(h)), self.words.weight)


class TwoTexts(nn.Module):
    """The table is used by an encoder, a decoder and the head. Along the decoder's tokens, the
    encoder runs outside loops."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.encoder, self.decoder = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, y):
        text = torch.tanh(self.encoder(self.words(x)))
        h = self.decoder(self.words(y))
        seen = F.scaled_dot_product_attention(h, text, text)
        return F.linear(seen, self.words.weight)


class Experts(nn.Module):
    """Products of several matrices at once, twice by the same ones."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.weight = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 3)

    def forward(self, x):
        h = self.words(x).unsqueeze(2).expand(-1, -1, 3, -1)
        h = torch.tanh(torch.einsum("btei,eio->bteo", h, self.weight))
        return F.linear(torch.einsum("btei,eio->bto", h, self.weight), self.words.weight)


class Unrolled(nn.Module):
    """A loop over the tokens in Python: as many terms."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.cell = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        h = self.words(x)
        state = h[:, 0]
        for t in range(1, h.shape[1]):
            state = torch.tanh(self.cell(state) + h[:, t])
        return F.linear(state, self.words.weight).unsqueeze(1).expand(-1, x.shape[1], -1)


def of_tokens(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def of_two(model, x, y):
    return F.cross_entropy(model(x, y).flatten(0, 1), y.flatten())


MODELS = {
    "tied": (Tied, of_tokens),
    "no padding": (lambda: Tied(padding=None), of_tokens),
    "tokens meet": (lambda: Tied(tokens_meet=True), of_tokens),
    "rows meet": (lambda: Tied(rows_meet=True), of_tokens),
    "two texts": (TwoTexts, of_two),
    "experts": (Experts, of_tokens),
    "unrolled": (Unrolled, of_tokens),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_gradients_are_eager_s(name):
    make, loss = MODELS[name]
    compare(lambda: make().double(), texts, loss, split=name != "rows meet")


@pytest.mark.parametrize("axes", ["other", "both"])
@pytest.mark.parametrize("name", ["tied", "tokens meet", "two texts", "experts"])
def test_so_they_are_along_the_tokens(name, axes):
    make, loss = MODELS[name]
    program = step_program(lambda: make().double(), texts, loss)
    torch.manual_seed(1234)
    expected = program(lambda *v: v)
    assert compare_along_other(program, expected, random_state(), 1e-12, axes=axes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_added_up_in_single_precision(dtype):
    """As sums of half precision are without it; eager adds the terms in half precision."""
    tol = 3e-2 if dtype == torch.bfloat16 else 4e-3
    compare(lambda: Tied().to(dtype), texts, of_tokens, [k for k in SLICES if k != WHOLE], tol)


def test_a_sum_that_is_not_of_its_last_term_alone_is_noticed():
    """A planted fault: one row of the table's gradient lacks what the embedding adds."""

    def tamper(got):
        got["grad:words.weight"][3] -= 1e-6
        return got

    with pytest.raises(AssertionError, match="words.weight"):
        compare(lambda: Tied().double(), texts, of_tokens, tamper=tamper)


@pytest.mark.skipif(not installed(), reason="torch's CPU memory cannot be counted here")
@pytest.mark.about_the_cpu("its peaks are counted to the byte")
@pytest.mark.parametrize("tokens_meet", [False, True])
def test_no_term_of_a_large_table_is_there_beside_its_gradient(tokens_meet):
    """In the first slice it is the sum that is made; in the others nothing that is as large."""
    torch.manual_seed(0)
    words = 20_000
    model = Tied(words, 128, tokens_meet=tokens_meet).double()
    batch = tuple(torch.randint(0, words, (4, 6)) for _ in range(2))
    table = model.words.weight.nbytes
    for _ in range(2):  # the first learns what operators use inside
        clear(model)
        koila_step(model, of_tokens, batch, 1)
    plan = koila.last_plan()
    assert plan.n_micro_batches == 4
    took = plan.measured_peak_bytes - plan.base_bytes
    assert took < 1.4 * table, "a term was there too"
    assert plan.predicted_peak_bytes == pytest.approx(plan.measured_peak_bytes, rel=0.02)
    expected = model_state(model)
    clear(model)
    of_tokens(model, *batch).backward()
    for k, v in model_state(model).items():
        assert torch.allclose(v, expected[k], rtol=1e-10, atol=1e-15), k

"""Random operators in slices draw exactly eager's numbers, and only their own rows where the
generator can be moved."""

import threading

import pytest
import torch
from conftest import DEVICE
from helpers import REAL_GPU, plain, random_state, rows
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_helpers import installed, only
from torch import nn
from torch.nn import functional as F

import koila
from koila import _core, _random, lazy

D = torch.float64


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**63),
    st.integers(0, 1300),
    st.lists(st.integers(0, 2000), min_size=1, max_size=4),
)
def test_a_generator_skipped_is_a_generator_drawn_from(seed, before, steps):
    """Of the CPU, wherever the tests run: a GPU's is moved by its offset alone."""

    def rand(n, generator):
        return torch.rand(n, generator=generator, device="cpu")

    real = torch.Generator("cpu").manual_seed(seed)
    if before:
        rand(before, real)  # one word each
    skipped = real.get_state()
    for n in steps:
        if n:
            rand(n, real)
        _core.generator_skip(skipped, n)
    other = torch.Generator("cpu")
    other.set_state(skipped)
    assert torch.equal(rand(1000, real), rand(1000, other))


def test_what_is_no_state_is_refused():
    with pytest.raises(ValueError, match="5056 bytes of a CPU generator's state, got 8"):
        _core.generator_skip(torch.zeros(8, dtype=torch.uint8), 1)


LAYOUTS = {
    "rows": (lambda x: x, (6, 10)),
    "columns": (lambda x: x.t(), (6, 10)),
    "sequence first": (lambda x: x.transpose(0, 1), (6, 5, 4)),
    "sequence first in memory": (lambda x: x.transpose(0, 1).contiguous(), (6, 5, 4)),
    "heads": (lambda x: x.reshape(30, 4), (6, 5, 4)),
    "heads before the batch": (lambda x: x.transpose(0, 1).reshape(30, 4), (6, 5, 4)),
    "channels last": (lambda x: x.contiguous(memory_format=torch.channels_last), (6, 3, 4, 5)),
    "not dense": (lambda x: x[:, ::2], (6, 10)),
    "one of each": (lambda x: x.unsqueeze(1), (6, 10)),
    # dense, but its first element is an odd number of them behind the memory's
    "ahead": (lambda x: x.t().contiguous()[1:], (5, 9)),
}
DRAWS = {
    "dropout": lambda t: F.dropout(t, 0.4),
    "feature_dropout": lambda t: F.dropout2d(t, 0.4) if t.dim() == 4 else F.alpha_dropout(t, 0.4),
    "bernoulli_": lambda t: t * torch.empty_like(t).bernoulli_(0.3),
    "bernoulli_ of bools": lambda t: t * torch.empty_like(t, dtype=torch.bool).bernoulli_(0.3),
    "uniform_": lambda t: t * torch.empty_like(t).uniform_(-1, 2),
    "float32": lambda t: t * torch.rand_like(t, dtype=torch.float32),
    "randn_like": lambda t: t * torch.randn_like(t),
}


def draw_twice(x, layout, draw):
    """One draw, then another that begins where the first left the generator."""
    torch.manual_seed(5)
    torch.rand(3)
    y = draw(layout(x))
    loss = (
        y * torch.arange(y.numel(), dtype=D, device=y.device).reshape(y.shape)
    ).sum() + F.dropout(x, 0.5).square().sum()
    loss.backward()
    return plain(y), plain(loss), random_state()


@pytest.mark.parametrize("m", [4, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_slices_draw_eager_s_numbers(layout, m):
    slices_draw_eager_s_numbers(layout, m, DEVICE)


def slices_draw_eager_s_numbers(layout, m, device):
    view, shape = LAYOUTS[layout]
    data = torch.randn(shape, dtype=D, device=device)
    for name, draw in DRAWS.items():
        a = data.clone().requires_grad_()
        expected = draw_twice(a, view, draw)
        b = data.clone().requires_grad_()
        with koila.micro_batch(m):
            found = draw_twice(lazy(b), view, draw)
            assert koila.last_plan().n_micro_batches > 1
        assert torch.equal(expected[0], found[0]), name
        assert torch.allclose(expected[1], found[1], rtol=1e-13) and torch.equal(
            expected[2], found[2]
        ), name
        assert torch.allclose(a.grad, b.grad, rtol=1e-13), name


@pytest.mark.skipif(DEVICE != "cuda", reason="one kernel draws a GPU's dropout")
@pytest.mark.parametrize("layout", ["not dense", "ahead"])
def test_a_mask_drawn_for_memory_that_lies_otherwise_is_found(monkeypatch, layout):
    monkeypatch.setattr(
        _random,
        "_laid_out_as",
        lambda x: _random.redispatch(torch.ops.aten.empty_like.default, (x,), {}),
    )
    with pytest.raises(AssertionError, match="dropout"):
        slices_draw_eager_s_numbers(layout, 4, "cuda")


def test_a_wrong_number_of_words_is_found(monkeypatch):
    monkeypatch.setattr(_random, "_words", lambda func, *_: 3 if func in _random._in_order else 0)
    with pytest.raises(AssertionError):
        slices_draw_eager_s_numbers("rows", 4, "cpu")  # words are the CPU generator's


def test_operators_whose_words_are_not_known_draw_the_whole(monkeypatch):
    monkeypatch.setattr(_random, "_words", lambda *_: 0)
    for layout in LAYOUTS:
        slices_draw_eager_s_numbers(layout, 4, "cpu")


@pytest.mark.skipif(not _core.cpu_bytes_ok(), reason="torch's CPU memory cannot be counted here")
def test_a_slice_draws_only_its_rows():
    """Not the whole batch's numbers: neither the time of it nor the memory. On the CPU: a GPU's
    kernels draw by place in the whole."""
    if not _random._words(torch.ops.aten.bernoulli_.float, torch.float32, (0.5,), {}):
        pytest.skip("bernoulli_ does not follow the generator on this build")
    model, data = (
        nn.Sequential(nn.Linear(8, 512), nn.Dropout(0.5), nn.Linear(512, 1)).to("cpu"),
        torch.randn(256, 8, device="cpu"),
    )
    with koila.micro_batch(4):
        for _ in range(2):
            model(lazy(data)).square().mean().backward()
    whole = 256 * 512 * 4
    assert koila.last_plan().measured_peak_bytes - koila.last_plan().base_bytes < whole / 4


@pytest.mark.parametrize("m", [None, 4, 1])
def test_a_fused_dropout_s_mask_is_the_rows_of_the_whole(monkeypatch, m):
    """As on GPUs: native_dropout draws by position, so its mask is drawn for a tensor of the
    batch's shape and cut."""
    monkeypatch.setattr(_random, "_is_fused", lambda device: True)
    data, w = torch.randn(6, 5, 4), torch.randn(4, 3)

    def step(x):
        torch.manual_seed(3)
        h = torch.native_dropout(x @ w, 0.4, True)[0]
        out = torch.native_dropout(h.transpose(0, 1).tanh(), 0.2, True)[0]
        loss = out.square().sum() + torch.rand(1).sum()
        loss.backward()
        return plain(out), plain(loss), random_state()

    a, b = data.clone().requires_grad_(), data.clone().requires_grad_()
    expected = step(a)
    with koila.micro_batch(m) if m else koila.budget(None):
        found = step(lazy(b))
    assert (
        koila.last_plan().n_micro_batches == (1 if m is None else -(-6 // m))
        and not koila.last_plan().gathers
    )
    assert (
        torch.equal(expected[0] == 0, found[0] == 0)
        and (torch.equal(expected[0], found[0]) or REAL_GPU)
        and torch.allclose(expected[0], found[0])
        and torch.allclose(expected[1], found[1])
        and torch.equal(expected[2], found[2])
    )
    assert torch.equal(a.grad, b.grad) or REAL_GPU and torch.allclose(a.grad, b.grad)


def test_wrong_bounds_are_an_error_at_the_call_also_after_right_ones():
    for low, high in ((0.0, 1.0), (4.0, 1.0)):
        y = torch.empty_like(koila.lazy(torch.rand(6, 3)))
        if low < high:
            y.uniform_(low, high)
        else:
            with pytest.raises(RuntimeError, match="from=4"):
                y.uniform_(low, high)


drawn = []


@torch.library.custom_op("koila_test::probe", mutates_args=())
def probe(x: torch.Tensor) -> torch.Tensor:
    thread = threading.Thread(target=lambda: drawn.append(torch.rand(3)))
    thread.start()
    thread.join()
    return x.clone()


probe.register_fake(torch.empty_like)


@pytest.mark.about_the_cpu("a GPU's generator is drawn from itself: native_dropout takes no other")
@pytest.mark.parametrize("slices", ["whole", "ragged", "one"])
def test_what_another_thread_draws_during_a_run_is_neither_repeated_nor_lost(slices):
    """The operator `probe` draws in another thread whenever it runs, after dropout has drawn."""
    drawn.clear()
    batch = torch.ones(6, 40)
    torch.manual_seed(5)
    expected = F.dropout(batch, 0.5) + F.dropout(batch, 0.25)
    torch.manual_seed(5)
    with koila.micro_batch(rows(slices, 6)), torch.no_grad():
        x = lazy(batch)
        y = probe(F.dropout(x, 0.5)) + F.dropout(x, 0.25)
        rest = torch.Generator()
        rest.set_state(torch.get_rng_state())
        out = koila.run(y)
    assert drawn
    for got in drawn:
        assert torch.equal(got, torch.rand(3, generator=rest))
    assert torch.equal(torch.get_rng_state(), rest.get_state())
    assert torch.equal(out, expected)


class Shared(torch.Generator):
    """A generator from which another thread draws behind each of the first readings."""

    n_times = 0

    def get_state(self):
        state = super().get_state()
        if self.n_times:
            self.n_times -= 1
            others.append(torch.empty(3, dtype=D))
            thread = threading.Thread(target=lambda: others[-1].uniform_(generator=self))
            thread.start()
            thread.join()
        return state


others = []


@pytest.mark.about_the_cpu("a GPU's generator cannot be inherited from")
@pytest.mark.parametrize("n_times", [1, 2, 5])
@pytest.mark.parametrize("draw", ["uniform_", "normal_", "exponential_"])
def test_what_another_thread_draws_while_an_operator_is_recorded_is_not_repeated(
    monkeypatch, draw, n_times
):
    """The whole is what one thread draws after the other: first the others, then the operator."""
    others.clear()
    shared = Shared()
    shared.manual_seed(5)
    monkeypatch.setattr(_random, "default_generator", lambda device: shared)
    with koila.micro_batch(2):
        x = lazy(torch.ones(6, 5, dtype=D))
        shared.n_times = n_times
        noise = getattr(torch.empty_like(x), draw)()
        shared.n_times = 0
        found = koila.run(noise + x) - 1
    alone = torch.Generator().manual_seed(5)
    assert len(others) == n_times
    for got in others:
        assert torch.equal(got, torch.empty(3, dtype=D).uniform_(generator=alone))
    expected = getattr(torch.empty(6, 5, dtype=D), draw)(generator=alone)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(shared.get_state(), alone.get_state())


@pytest.mark.skipif(not installed(), reason="torch's CPU memory cannot be counted here")
@pytest.mark.about_the_cpu("the CPU's budget, to a few KiB")
@pytest.mark.parametrize("draw", [F.dropout, lambda x: x * torch.empty_like(x).bernoulli_(0.3)])
def test_what_koila_tries_of_a_generator_is_not_refused_for_a_small_budget(monkeypatch, draw):
    """It ended in torch's error, whose text was lost where scripted code had called."""
    monkeypatch.setattr(_random, "_known_words", {})
    monkeypatch.setattr(_random, "_advance_one", {})
    x, w = torch.randn(6, 4), torch.ones(4, requires_grad=True)

    def step(x):
        torch.manual_seed(0)
        (draw(x * w)).square().mean().backward()
        return w.grad

    reference, w.grad = step(x), None
    with only(20 * 1024):
        assert torch.equal(plain(step(lazy(x))), reference)

"""Fused attention with dropout on a GPU is cut by rows, and draws what the whole batch draws."""

import contextlib
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import koila
from koila import _attention, lazy

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="kernels of a GPU: make test-gpu"
)

EFFICIENT, FLASH = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION
CUDNN = SDPBackend.CUDNN_ATTENTION
SIMULATED = torch.cuda.is_available() and "(fake)" in torch.cuda.get_device_name()
ROWS, LENGTH, WIDTH = 8, 12, 32
SLICES = {"whole": 8, "even": 2, "ragged": 3, "one": 1}
# of gradients of about 0.1: an accumulation in another order
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


class Net(nn.Module):
    def __init__(self, key_heads=2, p=0.3125):  # cuDNN's attention takes multiples of 1/16
        super().__init__()
        self.key_heads, self.p = key_heads, p
        self.q = nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * key_heads * 16)
        self.out = nn.Linear(WIDTH, 5)

    def forward(self, x, mask=None):
        rows = x.shape[0]
        for _ in range(2):
            q = self.q(x).view(rows, LENGTH, 2, 16).transpose(1, 2)
            k, v = (
                y.view(rows, LENGTH, self.key_heads, 16).transpose(1, 2)
                for y in self.kv(x).chunk(2, -1)
            )
            y = F.scaled_dot_product_attention(
                q, k, v, mask, self.p, mask is None, enable_gqa=self.key_heads != 2
            )
            x = x + y.transpose(1, 2).reshape(rows, LENGTH, WIDTH)
        return self.out(x.mean(1))


def step(net, batch, target, mask, rows, seed=7):
    """Loss, gradients and generator after one step; rows None: plain PyTorch."""
    net.zero_grad()
    torch.manual_seed(seed)
    if rows is None:
        loss = F.cross_entropy(net(batch, mask), target)
        loss.backward()
    else:
        with koila.micro_batch(rows):
            tensors = lazy(*(t for t in (batch, target, mask) if t is not None))
            loss = F.cross_entropy(net(tensors[0], *tensors[2:]), tensors[1])
            loss.backward()
            loss = loss.torch()
    return loss, [p.grad.clone() for p in net.parameters()], torch.cuda.get_rng_state()


def setting(dtype, key_heads=2, masked=False):
    torch.manual_seed(0)
    net = Net(key_heads).to("cuda", dtype)
    batch = torch.randn(ROWS, LENGTH, WIDTH).to("cuda", dtype)
    target = torch.randint(5, (ROWS,)).to("cuda")
    mask = torch.randn(ROWS, 1, LENGTH, LENGTH).to("cuda", dtype) if masked else None
    return net, batch, target, mask


def largest_difference(a, b):
    return max((x - y).abs().max().item() for x, y in zip(a, b))


@pytest.mark.parametrize("rows", SLICES.values(), ids=SLICES)
@pytest.mark.parametrize(
    ("kernel", "dtype", "options"),
    [
        (EFFICIENT, torch.float32, {}),
        (EFFICIENT, torch.float32, {"masked": True}),
        (EFFICIENT, torch.bfloat16, {}),
        (FLASH, torch.float16, {}),
        (FLASH, torch.bfloat16, {}),
        (FLASH, torch.bfloat16, {"key_heads": 1}),
        (CUDNN, torch.float16, {}),
        (CUDNN, torch.float16, {"masked": True}),
        (CUDNN, torch.bfloat16, {}),
        (CUDNN, torch.bfloat16, {"key_heads": 1}),
    ],
)
def test_attention_with_dropout_is_cut_and_draws_as_the_whole(kernel, dtype, options, rows):
    inputs = setting(dtype, **options)
    is_known = SIMULATED or kernel is not CUDNN  # what cuDNN draws on hardware, nobody tells
    with sdpa_kernel(kernel):
        loss, gradients, after = step(*inputs, None)
        with koila.strict() if is_known else contextlib.nullcontext():
            lazy_loss, lazy_gradients, lazy_after = step(*inputs, rows)
    plan = koila.last_plan()
    assert plan.n_micro_batches == -(-ROWS // rows)
    assert not is_known or (plan.gathers == [] and plan.replay_ratio == 1)
    assert torch.equal(after, lazy_after)
    if rows == ROWS:
        assert torch.equal(loss, lazy_loss)
        assert all(map(torch.equal, gradients, lazy_gradients))
    assert largest_difference(gradients, lazy_gradients) < TOLERANCE[dtype]


def agrees(inputs, dtype):
    """Numbers and generator are eager's. Returns which operators ran whole."""
    _, gradients, after = step(*inputs, None)
    _, lazy_gradients, lazy_after = step(*inputs, 2)
    assert torch.equal(after, lazy_after)
    assert largest_difference(gradients, lazy_gradients) < TOLERANCE[dtype]
    return {g.operator for g in koila.last_plan().gathers}


@pytest.mark.parametrize("kernel", [EFFICIENT, FLASH, CUDNN])
def test_a_distance_that_is_not_the_kernels_is_found_and_runs_whole(kernel, monkeypatch):
    """The trial compares rows drawn alone with the whole's. Planted: wrong distances."""
    dtype = torch.float32 if kernel is EFFICIENT else torch.float16
    wrong = {
        number: tuple(lambda m, d=d: d(m) + 4 for d in distances)
        for number, distances in _attention._DISTANCES.items()
    }
    monkeypatch.setattr(_attention, "_DISTANCES", wrong)
    monkeypatch.setattr(_attention, "_tried", {})
    with sdpa_kernel(kernel):
        agrees(setting(dtype), dtype)
    assert set(_attention._tried.values()) == {_attention._nowhere}


@pytest.mark.skipif(not SIMULATED, reason="kernels of hardware cannot be chosen: make test-gpu")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("heads_differ_by", ["elements", "blocks", "threads"])
def test_cudnn_attention_is_cut_where_an_offset_leads_to_a_row_and_runs_whole_where_none_does(
    heads_differ_by, masked, monkeypatch
):
    """Tried at the shapes of the call. Planted: "threads", heads that no offset tells apart."""
    monkeypatch.setenv("FAKECUDA_CUDNN_DROPOUT", heads_differ_by)
    monkeypatch.setattr(_attention, "_tried", {})
    is_whole = heads_differ_by == "threads"
    with sdpa_kernel(CUDNN):
        gathered = agrees(setting(torch.float16, masked=masked), torch.float16)
    assert any("cudnn_attention" in operator for operator in gathered) == is_whole
    ((trial, found),) = _attention._tried.items()
    assert trial.matrix == (2, LENGTH, LENGTH) and trial.masked == masked
    assert (found is _attention._nowhere) == is_whole
    x = torch.empty(3, 2, LENGTH, 16, dtype=torch.float16, device="cuda")
    word = "nowhere" if is_whole else heads_differ_by
    assert _attention.rows_found_by(x, _attention.CUDNN) == word


def test_the_comparison_finds_rows_that_are_drawn_elsewhere(monkeypatch):
    """Planted: a wrong distance, and a trial that lets it pass."""
    inputs = setting(torch.float32)
    true_distance = _attention._distance
    monkeypatch.setattr(_attention, "_distance", lambda *a: true_distance(*a) + 4)
    with sdpa_kernel(EFFICIENT):
        _, gradients, _ = step(*inputs, None)
        _, lazy_gradients, _ = step(*inputs, 2)
    assert largest_difference(gradients, lazy_gradients) > 100 * TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [(EFFICIENT, torch.float32), (FLASH, torch.float16), (CUDNN, torch.float16)],
)
def test_a_seed_of_64_bits_is_kept(kernel, dtype):
    inputs = setting(dtype)
    with sdpa_kernel(kernel):
        _, gradients, _ = step(*inputs, None, seed=-3)
        _, lazy_gradients, _ = step(*inputs, 2, seed=-3)
    assert largest_difference(gradients, lazy_gradients) < TOLERANCE[dtype]


def test_rows_that_begin_between_blocks_of_the_generator_run_whole():
    """3 heads of 7 * 7 numbers: the second row would begin at 147, and a generator can be moved
    only to multiples of 4."""
    torch.manual_seed(0)
    q = torch.randn(4, 3, 7, 16, device="cuda", requires_grad=True)
    with sdpa_kernel(EFFICIENT), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(7)
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.5).square().sum().backward()
        expected = q.grad
        q.grad = None
        torch.manual_seed(7)
        with koila.micro_batch(2):
            x = lazy(q)
            F.scaled_dot_product_attention(x, x, x, dropout_p=0.5).square().sum().backward()
    assert torch.allclose(q.grad, expected, rtol=1e-5, atol=1e-6)

"""Fused attention with dropout on a GPU is cut by rows, and draws what the whole batch draws."""

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
ROWS, LENGTH, WIDTH = 8, 12, 32
SLICES = {"whole": 8, "even": 2, "ragged": 3, "one": 1}
# of gradients of about 0.1: an accumulation in another order
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


class Net(nn.Module):
    def __init__(self, key_heads=2, p=0.3):
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
    ],
)
def test_attention_with_dropout_is_cut_and_draws_as_the_whole(kernel, dtype, options, rows):
    inputs = setting(dtype, **options)
    with sdpa_kernel(kernel):
        loss, gradients, after = step(*inputs, None)
        with koila.strict():
            lazy_loss, lazy_gradients, lazy_after = step(*inputs, rows)
    plan = koila.last_plan()
    assert plan.n_micro_batches == -(-ROWS // rows)
    assert plan.gathers == [] and plan.replay_ratio == 1
    assert torch.equal(after, lazy_after)
    if rows == ROWS:
        assert torch.equal(loss, lazy_loss)
        assert all(map(torch.equal, gradients, lazy_gradients))
    assert largest_difference(gradients, lazy_gradients) < TOLERANCE[dtype]


@pytest.mark.parametrize("kernel", [EFFICIENT, FLASH])
def test_a_distance_that_is_not_the_kernels_is_found_and_runs_whole(kernel, monkeypatch):
    """The trial compares rows drawn alone with the whole's. Planted: a wrong distance."""
    dtype = torch.float32 if kernel is EFFICIENT else torch.float16
    inputs = setting(dtype)
    true_distance = _attention._distance
    monkeypatch.setattr(_attention, "_distance", lambda *a: true_distance(*a) + 4)
    monkeypatch.setattr(_attention, "_tried", {})
    with sdpa_kernel(kernel):
        _, gradients, after = step(*inputs, None)
        _, lazy_gradients, lazy_after = step(*inputs, 2)
    assert torch.equal(after, lazy_after)
    assert largest_difference(gradients, lazy_gradients) < TOLERANCE[dtype]
    assert _attention._tried and not any(_attention._tried.values())


def test_the_comparison_finds_rows_that_are_drawn_elsewhere(monkeypatch):
    """Planted: a wrong distance, and a trial that lets it pass."""
    inputs = setting(torch.float32)
    true_distance = _attention._distance
    monkeypatch.setattr(_attention, "_distance", lambda *a: true_distance(*a) + 4)
    monkeypatch.setattr(_attention, "_draws_by_row", lambda *a: True)
    with sdpa_kernel(EFFICIENT):
        _, gradients, _ = step(*inputs, None)
        _, lazy_gradients, _ = step(*inputs, 2)
    assert largest_difference(gradients, lazy_gradients) > 100 * TOLERANCE[torch.float32]


@pytest.mark.parametrize(("kernel", "dtype"), [(EFFICIENT, torch.float32), (FLASH, torch.float16)])
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

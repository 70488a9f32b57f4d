"""The same model, batch and steps on the simulated device and on the CPU give the same losses,
gradients and parameters. Run with the environment that build.sh made."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import fakecuda
import pytest
import torch
from torch import nn
from torch.nn import functional as F


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(20, 50),
            nn.GELU(),
            nn.LayerNorm(50),
            nn.Linear(50, 30),
            nn.Tanh(),
            nn.Linear(30, 7),
        )

    def batch(self, dtype):
        return torch.randn(16, 20, dtype=dtype), torch.randint(0, 7, (16,))

    def forward(self, x, y):
        return F.cross_entropy(self.net(x), y)


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, stride=2),
            nn.GroupNorm(4, 16),
            nn.SiLU(),
            nn.ConvTranspose2d(16, 4, 2),
            nn.BatchNorm2d(4),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(16, 5),
        )

    def batch(self, dtype):
        return torch.randn(8, 3, 16, 16, dtype=dtype), torch.randint(0, 5, (8,))

    def forward(self, x, y):
        return F.cross_entropy(self.net(x), y, label_smoothing=0.1)


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM, **more):
        super().__init__()
        self.embed, self.rnn = (
            nn.Embedding(40, 12),
            kind(12, 16, 2, batch_first=True, bidirectional=True, **more),
        )
        self.head = nn.Linear(2 * (self.rnn.proj_size or 16), 40)

    def batch(self, dtype):
        x = torch.randint(0, 40, (6, 9))
        return x, x

    def forward(self, x, y):
        return F.cross_entropy(self.head(self.rnn(self.embed(x))[0]).flatten(0, 1), y.flatten())


class Attention(nn.Module):
    def __init__(self, masked=False):
        super().__init__()
        self.masked = masked
        self.embed, self.layer, self.head = (
            nn.Embedding(40, 32),
            nn.TransformerEncoderLayer(32, 4, 64, 0.0, "gelu", batch_first=True, norm_first=True),
            nn.Linear(32, 40),
        )

    def batch(self, dtype):
        x = torch.randint(0, 40, (3, 11))
        return x, x

    def forward(self, x, y):
        h = self.embed(x)
        mask = nn.Transformer.generate_square_subsequent_mask(
            x.shape[1], device=x.device, dtype=h.dtype
        )
        h = self.layer(h, mask, is_causal=not self.masked)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class Normed(nn.Module):
    """RMS norms over one dimension and two, with a weight and without."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.RMSNorm(12), nn.Unflatten(1, (3, 4)))
        self.rest = nn.RMSNorm((3, 4), elementwise_affine=False)
        self.both = nn.RMSNorm((3, 4))

    def batch(self, dtype):
        return torch.randn(10, 6, dtype=dtype), torch.randn(10, 3, 4, dtype=dtype)

    def forward(self, x, y):
        h = self.net(x)
        return F.mse_loss(self.both(self.rest(h).tanh() + h), y)


class Indices(nn.Module):
    """Gathers, scatters, sorts, masks and counts."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(10, 6))

    def batch(self, dtype):
        return torch.randn(10, 6, dtype=dtype), torch.randint(0, 10, (12,))

    def forward(self, x, y):
        h = (x * self.w)[y]
        h = h[h > -0.5].exp().cumsum(0)
        s, i = h.sort(descending=True)
        t = torch.zeros_like(x).index_add(0, y, x[y] * self.w[y])
        u = self.w.gather(1, x.argsort(1)).topk(3, 1).values
        return (
            s[:5].sum()
            + i.sum() * 0
            + t.pow(2).mean()
            + u.prod(1).sum()
            + torch.where(x > 0, self.w, 0).norm()
            + self.w.std()
        )


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=100,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = transformers.GPT2LMHeadModel(config)

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def batch(self, dtype):
            x = torch.randint(0, 100, (4, 16))
            return x, x

        def forward(self, x, y):
            return self.model(input_ids=x, labels=y).loss

    return Wrapped()


MODELS = {
    "mlp": Mlp,
    "convolutions": Convolutions,
    "lstm": Recurrent,
    "lstm-projected": lambda: Recurrent(proj_size=6),
    "gru": lambda: Recurrent(nn.GRU),
    "rnn": lambda: Recurrent(nn.RNN),
    "attention": Attention,
    "attention-masked": lambda: Attention(True),
    "indices": Indices,
    "rms-norm": Normed,
    "gpt2": gpt2,
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
}


def run(model, batch, device, make, steps):
    model = copy.deepcopy(model).to(device)
    optimizer = make(model.parameters())
    losses, grads = [], None
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(*(t.to(device) for t in batch))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        grads = [p.grad.cpu().clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        losses.append(loss.item())
    return losses, grads, {k: v.cpu() for k, v in model.state_dict().items()}


@pytest.fixture(autouse=True)
def without_cudnn_rnn(request):
    if any(name in request.node.name for name in ("lstm", "gru", "rnn")):
        with torch.backends.cudnn.flags(enabled=False):
            yield
    else:
        yield


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("name", MODELS)
def test_model(name, dtype):
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype)
    batch = model.batch(dtype)
    there, here = (run(model, batch, d, OPTIMIZERS["sgd"], 3) for d in ("cuda", "cpu"))
    tolerance = (
        {"rtol": 1e-9, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-3, "atol": 2e-5}
    )
    for a, b in zip(there, here):
        torch.testing.assert_close(a, b, **tolerance)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name):
    torch.manual_seed(0)
    model = Mlp().double()
    batch = model.batch(torch.float64)
    there, here = (run(model, batch, d, OPTIMIZERS[name], 4) for d in ("cuda", "cpu"))
    for a, b in zip(there, here):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_attention_backends(backend, dropout):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (
        torch.randn(2, 4, 33, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    with sdpa_kernel(getattr(SDPBackend, backend)):
        torch.manual_seed(3)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        g = torch.autograd.grad(a.float().square().sum(), (q, k, v))
        torch.manual_seed(3)
        b = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
    assert torch.equal(a, b)
    if not dropout:
        c = F.scaled_dot_product_attention(
            *(t.detach().cpu().float() for t in (q, k, v)), is_causal=True
        )
        torch.testing.assert_close(a.detach().cpu().float(), c, rtol=2e-2, atol=2e-2)
    else:  # the slope along a direction: the mask that was drawn is the mask of the gradient
        q, k, v = (t.detach().float().requires_grad_() for t in (q, k, v))
        kind = SDPBackend.MATH if backend == "FLASH_ATTENTION" else getattr(SDPBackend, backend)

        def f(x):
            torch.manual_seed(3)
            with sdpa_kernel(kind):
                return (
                    F.scaled_dot_product_attention(x, k, v, is_causal=True, dropout_p=dropout)
                    .square()
                    .sum()
                )

        d = torch.randn_like(q)
        (g,) = torch.autograd.grad(f(q), q)
        slope = (f((q + 1e-2 * d).detach()) - f((q - 1e-2 * d).detach())) / 2e-2
        torch.testing.assert_close((g * d).sum(), slope, rtol=2e-2, atol=2e-2)


def test_a_reserve_of_a_recurrent_layer_serves_one_backward():
    """cuDNN's backward writes into it, so torch copies it where the graph is kept."""
    x, h = torch.randn(4, 3, 5, device="cuda"), torch.zeros(1, 3, 7, device="cuda")
    gru = nn.GRU(5, 7).cuda()
    options = (3, 7, 0, 1, False, 0.0, True, False, [], None)  # a GRU
    weights = gru._flat_weights
    aten = torch.ops.aten
    y, _, _, reserve, buffer = aten._cudnn_rnn(x, weights, 4, None, h, None, *options)

    def gradient(of):
        grads = (torch.ones_like(y), None, None)
        before = (x, weights, 4, buffer, h, None, y, *grads, *options)
        return aten._cudnn_rnn_backward(*before, of, [True, True, False, True])[0]

    first = gradient(reserve.clone())
    assert first.isfinite().all() and torch.equal(gradient(reserve), first)
    assert gradient(reserve).isnan().all()
    out, _ = gru(x)
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    assert gru.weight_hh_l0.grad.isfinite().all()


def cudnn_attention(x):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)


def at(offset, x):
    torch.manual_seed(3)
    torch.cuda.default_generators[0].set_offset(offset)
    return cudnn_attention(x)


@pytest.mark.parametrize(
    ("heads", "distance"), [("elements", 72), ("blocks", 18), ("threads", None)]
)
def test_cudnn_attention_draws_a_row_where_its_heads_are_said_to_begin(
    heads, distance, monkeypatch
):
    monkeypatch.setenv("FAKECUDA_CUDNN_DROPOUT", heads)
    x = torch.randn(3, 2, 6, 8, device="cuda", dtype=torch.half)
    whole = at(40, x)
    reached = [n for n in range(0, 200, 2) if torch.equal(at(40 + 2 * n, x[2:]), whole[2:])]
    assert reached == ([] if distance is None else [distance])


def test_cudnn_attention_moves_the_generator_by_a_number_for_each_element():
    """So a second one draws others, in a captured graph too."""
    x = torch.randn(3, 1, 5, 8, device="cuda", dtype=torch.half)
    torch.manual_seed(3)
    two = [cudnn_attention(x), cudnn_attention(x)]
    assert not torch.equal(*two)
    assert torch.cuda.default_generators[0].get_offset() == 2 * 76  # of 75, a multiple of 4
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [cudnn_attention(x), cudnn_attention(x)]
    torch.manual_seed(3)
    graph.replay()
    assert all(map(torch.equal, captured, two))
    assert torch.cuda.default_generators[0].get_offset() == 2 * 76


@pytest.mark.parametrize("turned", [False, True])
def test_cudnn_attention_is_laid_out_like_the_query(turned):
    q = torch.randn(2, 5, 3, 8, device="cuda", dtype=torch.half)
    q = q.transpose(1, 2) if turned else q
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(q.requires_grad_(), q, q)
    assert out.stride() == q.stride()
    assert torch.autograd.grad(out.sum(), q)[0].stride() == q.stride()


def test_an_expanded_tensor_can_be_filled_and_nothing_else():
    base = torch.zeros(3, 1, 4, device="cuda")
    wide = base.expand(3, 2, 4)
    assert wide.fill_(2.0).sum().item() == 48 and base.sum().item() == 24
    assert wide.zero_().sum().item() == 0
    with pytest.raises(RuntimeError, match="more than one element of the written-to"):
        wide.add_(1)


def test_draws_follow_seed_and_offset():
    torch.manual_seed(1)
    a = [
        torch.randn(5, device="cuda"),
        torch.rand(5, device="cuda"),
        F.dropout(torch.ones(50, device="cuda"), 0.5),
        torch.randperm(9, device="cuda"),
        torch.randint(0, 9, (7,), device="cuda"),
    ]
    state = torch.cuda.get_rng_state()
    b = torch.randn(3, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(b, torch.randn(3, device="cuda"))
    torch.manual_seed(1)
    c = [
        torch.randn(5, device="cuda"),
        torch.rand(5, device="cuda"),
        F.dropout(torch.ones(50, device="cuda"), 0.5),
        torch.randperm(9, device="cuda"),
        torch.randint(0, 9, (7,), device="cuda"),
    ]
    assert all(torch.equal(x, y) for x, y in zip(a, c))
    assert not torch.equal(a[0][:3], b)


def test_autocast_and_scaler():
    torch.manual_seed(0)
    model, scaler = Mlp().cuda(), torch.amp.GradScaler()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = (t.cuda() for t in model.batch(torch.float32))
    first = None
    for _ in range(10):
        with torch.autocast("cuda", torch.float16):
            loss = model(x, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        first = first or loss.item()
    assert loss.item() < first


def test_linear_algebra():
    a = torch.randn(5, 5, device="cuda", dtype=torch.float64)
    a = a @ a.t() + torch.eye(5, device="cuda", dtype=torch.float64)
    torch.testing.assert_close(
        a @ torch.linalg.inv(a), torch.eye(5, device="cuda", dtype=torch.float64)
    )
    torch.testing.assert_close(torch.linalg.cholesky(a) @ torch.linalg.cholesky(a).t(), a)
    e, v = torch.linalg.eigh(a)
    torch.testing.assert_close(v @ e.diag() @ v.t(), a)
    torch.testing.assert_close(
        torch.linalg.solve(a, a[:, 0]).cpu(), torch.eye(5, dtype=torch.float64)[0]
    )
    torch.testing.assert_close(torch.fft.irfft(torch.fft.rfft(a)[..., :3], 5).cpu(), a.cpu())
    b = torch.randn(3, 5, 4, device="cuda")  # many that are not square: MAGMA, which needs cuSPARSE
    for there, here in zip(torch.linalg.lu_factor(b), torch.linalg.lu_factor(b.cpu())):
        assert torch.equal(there.cpu(), here)


def test_the_mode_of_many_numbers():
    x = torch.randint(0, 9, (3000,), device="cuda")
    for there, here in zip(x.mode(), x.cpu().mode()):
        assert torch.equal(there.cpu(), here)


def test_a_zero_tensor_without_memory_is_read_as_zeros():
    """The gradient of sgn; somebody else holds it, so autograd copies it."""
    zero = torch._efficientzerotensor((4, 3), device="cuda")
    assert torch.equal(torch.ones(4, 3, device="cuda").copy_(zero).cpu(), torch.zeros(4, 3))
    x = torch.randn(4, 3, device="cuda", requires_grad=True)
    kept = []
    y = x.sgn()
    y.register_hook(lambda g: kept.append(g))
    x.register_hook(lambda g: kept.append(g))
    y.sum().backward()
    assert torch.equal(x.grad.cpu(), torch.zeros(4, 3)) and len(kept) == 2


def test_a_copy_of_itself_is_nothing_also_where_elements_share_memory():
    x = torch.randn(6, 4, device="cuda")
    e, again = (x.unsqueeze(1).expand(6, 3, 4) for _ in range(2))
    assert e.copy_(e) is e and e.copy_(again) is e
    with pytest.raises(RuntimeError, match="single memory location"):
        e.copy_(torch.ones(6, 1, 4, device="cuda"))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_under_autocast(kind):
    """Autocast gives cuDNN the weights as columns of one piece of memory."""
    torch.manual_seed(0)
    layer, x = kind(5, 7, 2, batch_first=True), torch.randn(3, 4, 5)
    wide, narrow = (copy.deepcopy(layer).cuda() for _ in range(2))
    expected = wide(x.cuda())[0]
    with torch.autocast("cuda"):
        found = narrow(x.cuda())[0]
    assert found.dtype == torch.float16 and torch.allclose(found.float(), expected, atol=0.03)
    expected.square().sum().backward()
    found.float().square().sum().backward()
    for p, q in zip(wide.parameters(), narrow.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, atol=0.05 * float(p.grad.abs().max()) + 1e-3)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_dropout_between_layers_of_cudnn(kind):
    """Another mask each time; the gradient's is that of its forward, also if others were drawn in
    between."""
    torch.manual_seed(0)
    net = kind(4, 64, 2, dropout=0.5).cuda()
    x = torch.randn(3, 2, 4, device="cuda")
    first, second = (net(x)[0] for _ in range(2))
    assert not torch.equal(first, second)
    net.eval()
    assert torch.equal(net(x)[0], net(x)[0])
    net.train()
    net.zero_grad()
    grads = torch.autograd.grad(first.sum(), list(net.parameters()), retain_graph=True)
    net(x)
    again = torch.autograd.grad(first.sum(), list(net.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(grads, again))
    other = torch.autograd.grad(second.sum(), list(net.parameters()))
    assert not all(torch.equal(a, b) for a, b in zip(grads, other))


def test_a_kernel_that_asserts_is_counted_and_what_the_host_refuses_is_not():
    x, label = torch.randn(3, 4, device="cuda"), torch.tensor([0, 1, 9], device="cuda")
    before = fakecuda.asserted()
    with pytest.raises(RuntimeError, match="must match"):
        x + torch.randn(3, 5, device="cuda")
    assert fakecuda.asserted() == before
    with pytest.raises(IndexError, match="out of bounds"):
        F.cross_entropy(x, label)
    assert fakecuda.asserted() == before + 1


def test_a_test_that_lets_a_kernel_assert_and_is_not_marked_fails(tmp_path):
    tests = Path(__file__).parents[2] / "python"
    (tmp_path / "conftest.py").write_text((tests / "conftest.py").read_text())
    (tmp_path / "test_it.py").write_text(
        "import pytest, torch\n"
        "def look():\n"
        "    with pytest.raises(IndexError):\n"
        "        torch.nn.functional.cross_entropy(torch.randn(2, 3), torch.tensor([0, 7]))\n"
        "def test_unmarked():\n    look()\n"
        "@pytest.mark.kernel_asserts\ndef test_marked():\n    look()\n"
    )
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(tmp_path), "-p", "no:cacheprovider"],
        env={**os.environ, "KOILA_DEVICE": "cuda"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert "1 failed, 1 passed" in ran.stdout, ran.stdout
    assert "mark it kernel_asserts" in ran.stdout


def test_what_only_a_gpu_returns_keeps_its_shape():
    x, w = torch.randn(4, 3, 2, device="cuda"), torch.ones(3, device="cuda")
    kept = torch.native_batch_norm(x, w, w, w.clone(), w.clone(), False, 0.1, 1e-5)
    assert kept[1].shape == kept[2].shape == (3,)


@pytest.mark.parametrize("other", [lambda x: x[:4, ::2], lambda x: x.t().contiguous()[1:]])
def test_dropout_draws_by_how_its_tensor_lies(other):
    def mask(x):
        torch.manual_seed(0)
        return torch.native_dropout(x, 0.5, True)[1]

    x = other(torch.ones(5, 9, device="cuda"))
    assert torch.equal(mask(x), mask(x)) and not torch.equal(mask(x), mask(x.clone()))

"""Sparse tensors and bags of embeddings on the simulated device: the same numbers as on the CPU,
and beside a bag's sum what CUDA's kernel leaves, in CUDA's shapes."""

import copy

import pytest
import torch
from torch import nn

D = torch.float64


def on_both(program, *values):
    """What `program` gives on the CPU and on the device, brought to the CPU and densified."""
    results = []
    for device in ("cpu", "cuda"):
        out = program(*(v.to(device) for v in values))
        out = out if isinstance(out, tuple) else (out,)
        assert all(o.device.type == device for o in out)
        results.append([o.detach().cpu() for o in out])
    for a, b in zip(*results):
        assert a.layout == b.layout and a.shape == b.shape and a.dtype == b.dtype
        if a.layout == torch.sparse_coo:
            assert a.is_coalesced() == b.is_coalesced()
        torch.testing.assert_close(a.to_dense(), b.to_dense(), rtol=1e-12, atol=1e-14)


@pytest.fixture
def matrix():
    torch.manual_seed(0)
    return torch.rand(9, 7, dtype=D).sub(0.5).relu()


@pytest.fixture
def coo():
    torch.manual_seed(1)
    at = torch.stack([torch.randint(9, (20,)), torch.randint(7, (20,))])
    return torch.sparse_coo_tensor(at, torch.randn(20, dtype=D), (9, 7))


LAYOUTS = [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc]


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_dense_tensor_becomes_sparse_and_dense_again(matrix, layout):
    on_both(lambda m: (m.to_sparse(layout=layout), m.to_sparse(layout=layout).to_dense()), matrix)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=str)
def test_products(matrix, layout):
    x = torch.randn(7, 5, dtype=D)
    on_both(lambda m, x: m.to_sparse(layout=layout) @ x, matrix, x)
    on_both(lambda m, x: torch.addmm(x.new_ones(9, 5), m.to_sparse(layout=layout), x), matrix, x)


def test_entries_given_twice_add_up(coo):
    assert not coo.is_coalesced()
    on_both(lambda c: (c.coalesce(), c.coalesce().indices(), c.coalesce().values()), coo)
    on_both(lambda c: torch.ones(9, 7, dtype=D, device=c.device) + c, coo)


def test_arithmetic_of_sparse_tensors(coo, matrix):
    on_both(lambda c: c + c.coalesce() * 2, coo)
    on_both(lambda c, m: c.coalesce() * m, coo, matrix)
    on_both(lambda c: torch.sparse.sum(c, 0), coo)
    on_both(lambda c: torch.sparse.softmax(c, 1), coo)
    on_both(lambda c, m: m.sparse_mask(c.coalesce()), coo, matrix)


def test_writes_to_sparse_tensors(coo):
    def program(c):
        a, b = c.clone(), c.coalesce().clone()
        a.mul_(3).add_(b)
        b.add_(c, alpha=-2)
        return a, b, c.clone().zero_()

    on_both(program, coo)


def test_gradient_of_sparse_values():
    at = torch.tensor([[0, 2, 2, 4], [1, 0, 1, 2]])

    def program(v, x):
        v.requires_grad_()
        s = torch.sparse_coo_tensor(at.to(v.device), v, (5, 3))
        return torch.autograd.grad(torch.sparse.mm(s, x).square().sum(), v)

    on_both(program, torch.randn(4, dtype=D), torch.randn(3, 6, dtype=D))


@pytest.mark.parametrize("kind", ["embedding", "bag", "bag with padding"])
def test_sparse_gradients_train(kind):
    torch.manual_seed(0)
    if kind == "embedding":
        made = nn.Embedding(20, 6, sparse=True).double()
    else:
        padding = 4 if "padding" in kind else None
        made = nn.EmbeddingBag(20, 6, mode="sum", sparse=True, padding_idx=padding).double()
    ids = [torch.randint(20, (8, 4)) for _ in range(3)]

    def program(like):
        model = copy.deepcopy(made).to(like.device)
        optimizer = torch.optim.SparseAdam(model.parameters(), 0.1)
        for i in ids:
            optimizer.zero_grad()
            model(i.to(like.device)).square().sum().backward()
            assert model.weight.grad.is_sparse
            optimizer.step()
        return model.weight.grad.coalesce(), model.weight

    on_both(program, torch.zeros(()))


SCALED = {"scale_grad_by_freq": True}  # torch refuses it of maxima


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("mode", "options"),
    [(mode, options) for mode in ("sum", "mean", "max") for options in ({}, {"padding_idx": 4})]
    + [("sum", SCALED), ("mean", SCALED)],
    ids=str,
)
def test_bags_and_their_gradients(mode, options, last):
    torch.manual_seed(0)
    made = nn.EmbeddingBag(11, 6, mode=mode, include_last_offset=last, **options).double()
    at = torch.tensor([0, 5, 5, 9, 28] + [30] * last)

    def program(ids):
        model = copy.deepcopy(made).to(ids.device)
        out = model(ids, at.to(ids.device))
        out.square().sum().backward()
        return out, model.weight.grad

    on_both(program, torch.randint(0, 11, (30,)))


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_what_a_bag_saves_has_cuda_s_shapes(mode, last):
    """As EmbeddingBag.cu allocates and its kernels write: bag_size is as long as the offsets, and
    max_indices is empty for a sum or mean, -1 in an empty bag."""
    table = torch.randn(11, 6, device="cuda")
    ids = torch.tensor([3, 4, 4, 1, 0, 2, 9], device="cuda")
    at = torch.tensor([0, 3, 3, 5] + [7] * last, device="cuda")
    out, bag, size, best = torch.ops.aten._embedding_bag(
        table, ids, at, False, mode, False, None, bool(last), 4
    )
    assert out.shape == (4, 6)
    assert bag.tolist() == [0, 0, 0, 2, 2, 3, 3]
    assert size.shape == (4 + last,)
    assert size[:4].tolist() == [1, 0, 2, 2]  # what is padded is not counted
    assert best.shape == ((4, 6) if mode == 2 else (0,))
    if mode == 2:
        assert (best[1] == -1).all() and (best[0] == 3).all()

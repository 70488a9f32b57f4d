"""Every loss, every reduction: the denominator is the full batch's, whatever the slice and however
unevenly the counted entries lie."""

import koila
import pytest
import torch
from helpers import ONE, SLICES, WHOLE, compare, plain
from torch import nn
from torch.nn import functional as F
from zoo import B

C, T = 4, 5
D = torch.float64


def table():
    return nn.Linear(7, C).double()


def x():
    return torch.randn(B, 7, dtype=D)


def labels(ignore=False):
    y = torch.randint(0, C, (B,))
    if ignore:
        y[torch.tensor([0, 1, 4])] = -100  # a whole slice of it, and part of another
    return y


def probabilities():
    return torch.rand(B, C, dtype=D).softmax(1)


def seq(m, v):
    return m(v.unsqueeze(1).expand(-1, T, -1)) * torch.linspace(0.5, 1.5, T, dtype=D)[:, None]


def token_labels():
    y = torch.randint(0, C, (B, T))
    for i, n in enumerate([5, 0, 1, 5, 2, 0]):
        y[i, n:] = -100
    return y


W = torch.tensor([0.2, 1.0, 3.0, 0.7], dtype=D)

# rows that are added up, or reduced, by class; from a table that is not zeros
BY_CLASS = {
    "index_add": lambda to, y, h: to.index_add(0, y, h),
    "index_add-transposed": lambda to, y, h: to.t().index_add(1, y, h.t()),
    "index_put": lambda to, y, h: to.index_put((y,), h, accumulate=True),
    "index_put-columns": lambda to, y, h: torch.ops.aten.index_put(to, [None, y], h.t(), True),
    "scatter_add": lambda to, y, h: to.scatter_add(0, y[:, None].expand_as(h), h),
    **{
        f"scatter_reduce-{how}": lambda to, y, h, how=how: to.scatter_reduce(
            0, y[:, None].expand_as(h), h, how
        )
        for how in ("sum", "amax", "amin")
    },
}

# name -> (batch, loss); the first entry of the batch is the input of a linear layer
LOSSES = {
    **{
        f"by class-{name}": (
            lambda: (x(), labels()),
            lambda m, v, y, f=f: (
                f(torch.linspace(-1, 1, C * C, dtype=D).view(C, C), y, m(v)).pow(2).mean()
            ),
        )
        for name, f in BY_CLASS.items()
    },
    "cross_entropy": (lambda: (x(), labels()), lambda m, v, y: F.cross_entropy(m(v), y)),
    "cross_entropy-sum": (
        lambda: (x(), labels()),
        lambda m, v, y: F.cross_entropy(m(v), y, reduction="sum"),
    ),
    "cross_entropy-none": (
        lambda: (x(), labels()),
        lambda m, v, y: F.cross_entropy(m(v), y, reduction="none").square().mean(),
    ),
    "cross_entropy-ignore_index": (
        lambda: (x(), labels(True)),
        lambda m, v, y: F.cross_entropy(m(v), y),
    ),
    "cross_entropy-ignore_index-2": (
        lambda: (x(), labels()),
        lambda m, v, y: F.cross_entropy(m(v), y, ignore_index=2),
    ),
    "cross_entropy-weight": (
        lambda: (x(), labels()),
        lambda m, v, y: F.cross_entropy(m(v), y, weight=W),
    ),
    "cross_entropy-weight-ignore_index": (
        lambda: (x(), labels(True)),
        lambda m, v, y: F.cross_entropy(m(v), y, weight=W),
    ),
    "cross_entropy-smoothing": (
        lambda: (x(), labels()),
        lambda m, v, y: F.cross_entropy(m(v), y, label_smoothing=0.1),
    ),
    "cross_entropy-smoothing-weight-ignore": (
        lambda: (x(), labels(True)),
        lambda m, v, y: F.cross_entropy(m(v), y, weight=W, label_smoothing=0.1),
    ),
    "cross_entropy-probabilities": (
        lambda: (x(), probabilities()),
        lambda m, v, y: F.cross_entropy(m(v), y),
    ),
    "cross_entropy-probabilities-weight-smoothing": (
        lambda: (x(), probabilities()),
        lambda m, v, y: F.cross_entropy(m(v), y, weight=W, label_smoothing=0.2),
    ),
    "cross_entropy-tokens": (
        lambda: (x(), token_labels()),
        lambda m, v, y: F.cross_entropy(seq(m, v).flatten(0, 1), y.flatten()),
    ),
    "cross_entropy-tokens-transposed": (
        lambda: (x(), token_labels()),
        lambda m, v, y: F.cross_entropy(seq(m, v).transpose(1, 2), y),
    ),
    "nll": (lambda: (x(), labels()), lambda m, v, y: F.nll_loss(m(v).log_softmax(1), y)),
    "nll-weight-ignore": (
        lambda: (x(), labels(True)),
        lambda m, v, y: F.nll_loss(m(v).log_softmax(1), y, weight=W),
    ),
    "mse": (lambda: (x(), torch.randn(B, C, dtype=D)), lambda m, v, y: F.mse_loss(m(v), y)),
    "mse-sum": (
        lambda: (x(), torch.randn(B, C, dtype=D)),
        lambda m, v, y: F.mse_loss(m(v), y, reduction="sum"),
    ),
    "mse-none": (
        lambda: (x(), torch.randn(B, C, dtype=D)),
        lambda m, v, y: F.mse_loss(m(v), y, reduction="none").mean(0).sum(),
    ),
    "l1": (lambda: (x(), torch.randn(B, C, dtype=D)), lambda m, v, y: F.l1_loss(m(v), y)),
    "smooth_l1": (
        lambda: (x(), torch.randn(B, C, dtype=D)),
        lambda m, v, y: F.smooth_l1_loss(m(v), y, beta=0.7),
    ),
    "huber": (
        lambda: (x(), torch.randn(B, C, dtype=D)),
        lambda m, v, y: F.huber_loss(m(v), y, delta=0.6),
    ),
    "bce": (
        lambda: (x(), torch.rand(B, C, dtype=D)),
        lambda m, v, y: F.binary_cross_entropy(m(v).sigmoid(), y),
    ),
    "bce-weight-rows": (
        lambda: (x(), torch.rand(B, C, dtype=D)),
        lambda m, v, y: F.binary_cross_entropy(m(v).sigmoid(), y, weight=W),
    ),
    "bce_with_logits": (
        lambda: (x(), torch.rand(B, C, dtype=D)),
        lambda m, v, y: F.binary_cross_entropy_with_logits(m(v), y),
    ),
    "bce_with_logits-pos_weight": (
        lambda: (x(), torch.rand(B, C, dtype=D)),
        lambda m, v, y: F.binary_cross_entropy_with_logits(m(v), y, weight=W, pos_weight=2 * W),
    ),
    "kl_div-batchmean": (
        lambda: (x(), probabilities()),
        lambda m, v, y: F.kl_div(m(v).log_softmax(1), y, reduction="batchmean"),
    ),
    "kl_div-mean": (
        lambda: (x(), probabilities()),
        lambda m, v, y: F.kl_div(m(v).log_softmax(1), y, reduction="mean"),
    ),
    "kl_div-log_target": (
        lambda: (x(), probabilities().log()),
        lambda m, v, y: F.kl_div(m(v).log_softmax(1), y, reduction="sum", log_target=True),
    ),
    "masked-mean-by-hand": (
        lambda: (x(), token_labels()),
        lambda m, v, y: (
            (F.cross_entropy(seq(m, v).transpose(1, 2), y, reduction="none") * (y != -100)).sum()
            / (y != -100).sum()
        ),
    ),
    "masked-mean-clamped": (
        lambda: (x(), torch.tensor([1.0, 0, 0, 1, 1, 0], dtype=D)),
        lambda m, v, y: (m(v).square().sum(1) * y).sum() / y.sum().clamp(min=1),
    ),
    "weighted-mean-rows": (
        lambda: (x(), torch.rand(B, dtype=D)),
        lambda m, v, w: (m(v).square().mean(1) * (w / w.sum())).sum(),
    ),
    "sum-over-size": (
        lambda: (x(), labels()),
        lambda m, v, y: F.cross_entropy(m(v), y, reduction="sum") / y.shape[0],
    ),
    "focal": (
        lambda: (x(), labels()),
        lambda m, v, y: (
            (1 - m(v).softmax(1).gather(1, y[:, None])).square()
            * -m(v).log_softmax(1).gather(1, y[:, None])
        ).mean(),
    ),
    "dice": (
        lambda: (x(), torch.rand(B, C, dtype=D)),
        lambda m, v, y: (
            1 - (2 * (m(v).sigmoid() * y).sum() + 1) / (m(v).sigmoid().sum() + y.sum() + 1)
        ),
    ),
}

# These couple the rows or lack a rule: exact all the same, made whole where they must be.
# masks for masked_select of y[B, T] and h[B, T, C]
SELECTING = {
    "tokens": lambda y, h: (y >= 0).unsqueeze(2),
    "expanded": lambda y, h: (y >= 0).unsqueeze(2).expand_as(h),
    "entries": lambda y, h: y.unsqueeze(2) >= torch.arange(C),
    "whole": lambda y, h: torch.linspace(-1, 1, C) > 0,
    "none": lambda y, h: (y > C).unsqueeze(2),
}

COUPLED = {
    **{
        f"masked_select-{name}": (
            lambda: (x(), token_labels()),
            lambda m, v, y, mask=mask: (
                (h := seq(m, v)).masked_select(mask(y, h)).cumsum(0).square().sum() + h.mean()
            ),
        )
        for name, mask in SELECTING.items()
    },
    "std": (lambda: (x(),), lambda m, v: m(v).std(0).sum() + m(v).var()),
    "logsumexp": (lambda: (x(),), lambda m, v: m(v).logsumexp(0).sum()),
    "norm": (lambda: (x(),), lambda m, v: m(v).norm() + m(v).norm(dim=0).sum()),
    "max": (lambda: (x(),), lambda m, v: m(v).max(0).values.sum() + m(v).amax() - m(v).min()),
    "median": (lambda: (x(),), lambda m, v: m(v).median(0).values.sum()),
    "infonce": (
        lambda: (x(), torch.randn(B, C, dtype=D)),
        lambda m, v, y: F.cross_entropy(
            F.normalize(m(v), dim=1) @ F.normalize(y, dim=1).T / 0.1, torch.arange(B)
        ),
    ),
    "clip": (
        lambda: (x(), x()),
        lambda m, v, w: sum(
            F.cross_entropy(s, torch.arange(B))
            for s in (
                F.normalize(m(v)) @ F.normalize(m(w)).T,
                F.normalize(m(w)) @ F.normalize(m(v)).T,
            )
        ),
    ),
    "triplet": (
        lambda: (x(), x(), x()),
        lambda m, a, p, n: F.triplet_margin_loss(m(a), m(p), m(n)),
    ),
    "cosine": (
        lambda: (x(), x()),
        lambda m, a, b: F.cosine_embedding_loss(m(a), m(b), torch.ones(B)),
    ),
    "multi_margin": (lambda: (x(), labels()), lambda m, v, y: F.multi_margin_loss(m(v), y)),
    "multilabel_soft_margin": (
        lambda: (x(), torch.rand(B, C, dtype=D)),
        lambda m, v, y: F.multilabel_soft_margin_loss(m(v), y),
    ),
    "gaussian_nll": (
        lambda: (x(), torch.randn(B, C, dtype=D)),
        lambda m, v, y: F.gaussian_nll_loss(m(v), y, m(v).square() + 0.1),
    ),
    "poisson_nll": (
        lambda: (x(), torch.rand(B, C, dtype=D)),
        lambda m, v, y: F.poisson_nll_loss(m(v), y),
    ),
    "soft_margin": (
        lambda: (x(), torch.rand(B, C, dtype=D).round() * 2 - 1),
        lambda m, v, y: F.soft_margin_loss(m(v), y),
    ),
    "barlow": (
        lambda: (x(), x()),
        lambda m, a, b: (
            ((m(a) - m(a).mean(0)) / m(a).std(0))
            .T.mm((m(b) - m(b).mean(0)) / m(b).std(0))
            .div(B)
            .sub(torch.eye(C, dtype=D))
            .square()
            .sum()
        ),
    ),
    "mmd": (lambda: (x(), x()), lambda m, a, b: (-torch.cdist(m(a), m(b)).square()).exp().mean()),
    "softmax-over-batch": (
        lambda: (x(), torch.randn(B, C, dtype=D)),
        lambda m, v, y: (m(v).softmax(0) * y).sum(),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_equals_eager_and_gathers_nothing(name):
    batch, loss = LOSSES[name]
    compare(table, batch, loss, gather_bytes_per_row=16)


@pytest.mark.parametrize("name", COUPLED)
def test_a_loss_that_couples_rows_equals_eager(name):
    batch, loss = COUPLED[name]
    compare(table, batch, loss)


def test_masked_select_reads_only_its_mask():
    """What it takes from is too large to be made in passing."""
    w = torch.randn(16, 16, requires_grad=True)
    v, y = koila.lazy(torch.randn(256, 64, 16), torch.randint(0, 4, (256, 64)))
    with koila.micro_batch(64):
        (v @ w).masked_select((y > 1).unsqueeze(2)).mean().backward()
    assert koila.plans()[-2].n_recorded == 2


# ---- every row meets every other row: the matrix of pairs is computed a few rows at a time,
# against one side that is whole

# rows: a row of the matrix of pairs (144 bytes) is more than all that may be collected of a row
PAIRS = 18


def pairs(n=2):
    return tuple(torch.randn(PAIRS, 7, dtype=D) for _ in range(n))


def both(m, *values):
    return tuple(F.normalize(m(v), dim=1) for v in values)


def clip(logits, **options):
    target = torch.arange(PAIRS)
    if options.pop("ignore", False):
        target[torch.tensor([0, 1, 7])] = -100
    return F.cross_entropy(logits, target, **options) + 2 * F.cross_entropy(
        logits.t(), target, **options
    )


def symmetric(**options):
    def loss(m, v, w):
        a, b = both(m, v, w)
        return clip(a @ b.t() / 0.1, **options)

    return pairs, loss


def simclr(m, v, w):
    z = torch.cat(both(m, v, w))
    scores = (z @ z.t() / 0.5).masked_fill(torch.eye(2 * PAIRS, dtype=torch.bool), -1e9)
    return F.cross_entropy(scores, (torch.arange(2 * PAIRS) + PAIRS) % (2 * PAIRS))


def supervised(m, v, y):  # supervised contrastive: rows with the same label attract each other
    z = F.normalize(m(v), dim=1)
    log_p = (z @ z.t() / 0.3).log_softmax(1)
    same = (y[:, None] == y[None, :]).to(D)
    return -(log_p * same).sum(1).div(same.sum(1)).mean()


def siglip(m, v, w):
    a, b = both(m, v, w)
    return -F.logsigmoid((a @ b.t() * 3 - 1) * (2 * torch.eye(PAIRS, dtype=D) - 1)).sum() / PAIRS


def hinge(m, v):
    z = m(v)
    return F.relu(1 - (z[:, None] - z[None]).square().sum(-1)).mean()


def in_batches(m, v, w):  # as bmm: the embedding cut into two heads
    a, b = (t.view(PAIRS, 2, C // 2).transpose(0, 1) for t in both(m, v, w))
    return (a @ b.transpose(1, 2)).logsumexp(2).mean() - torch.einsum("hic,hic->", a, b)


CONTRASTIVE = {
    "infonce": (
        pairs,
        lambda m, v, w: F.cross_entropy(
            torch.matmul(*(t if i == 0 else t.t() for i, t in enumerate(both(m, v, w)))) / 0.1,
            torch.arange(PAIRS),
        ),
    ),
    "clip": symmetric(),
    "clip-smoothing": symmetric(label_smoothing=0.1),
    "clip-ignored": symmetric(ignore=True),
    "clip-ignored-class": symmetric(ignore_index=3),
    "clip-sum": symmetric(reduction="sum"),
    "clip-weight": symmetric(weight=torch.linspace(0.1, 2, PAIRS, dtype=D)),
    "clip-none": (
        pairs,
        lambda m, v, w: (
            lambda a, b: (
                F.cross_entropy((a @ b.t()).t(), torch.arange(PAIRS), reduction="none")
                .square()
                .mean()
            )
        )(*both(m, v, w)),
    ),
    "clip-targets-of-the-batch": (
        lambda: (*pairs(), torch.randperm(PAIRS)),
        lambda m, v, w, t: (
            lambda a, b: F.cross_entropy(a @ b.t(), t) + F.cross_entropy((a @ b.t()).t(), t)
        )(*both(m, v, w)),
    ),
    "clip-temperature": (
        pairs,
        lambda m, v, w: (lambda a, b: clip(m.bias.exp().sum() * a @ b.t()))(*both(m, v, w)),
    ),
    "simclr": (pairs, simclr),
    "supervised": (lambda: (*pairs(1), torch.randint(0, 3, (PAIRS,))), supervised),
    "siglip": (pairs, siglip),
    "hinge": (lambda: pairs(1), hinge),
    "cdist": (pairs, lambda m, v, w: (-torch.cdist(m(v), m(w)).square()).exp().mean()),
    "cdist-by-products": (
        pairs,
        lambda m, v, w: torch.cdist(m(v), m(w), compute_mode="use_mm_for_euclid_dist").mean(),
    ),
    "heads": (pairs, in_batches),
}


@pytest.mark.parametrize("kind", SLICES)
@pytest.mark.parametrize("name", CONTRASTIVE)
def test_pairs_of_rows_are_never_whole(name, kind):
    batch, loss = CONTRASTIVE[name]
    compare(table, batch, loss, slices=[kind], gather_bytes_per_row=None if kind == WHOLE else 100)
    # With larger slices the plan may keep rows of the matrix instead of computing them twice.
    if kind == ONE:
        whole = [
            t
            for t in koila.last_plan().largest
            if t.n_bytes >= PAIRS * PAIRS * 8 and t.shape.count(PAIRS) == 2
        ]
        assert not whole, whole


def test_pairs_of_rows_fit_where_their_matrix_does_not():
    n = 1024
    a, b = torch.randn(n, 16), torch.randn(n, 16)
    model = nn.Linear(16, 16)

    def step(lazily):
        model.zero_grad()
        with lazily:
            u, v = koila.lazy(a, b)
            scores, target = F.normalize(model(u)) @ F.normalize(model(v)).t(), torch.arange(n)
            (F.cross_entropy(scores, target) + F.cross_entropy(scores.t(), target)).backward()
        return koila.last_plan(), model.weight.grad.clone()

    whole, expected = step(koila.micro_batch(n))
    sliced, got = step(koila.budget(whole.base_bytes + n * n * 2))
    # as recorded: scores, their softmax both ways, gradients
    assert whole.predicted_peak_bytes > 4 * n * n * 4
    # half the bytes of the scores alone
    assert (
        sliced.n_micro_batches > 1 and sliced.predicted_peak_bytes - sliced.base_bytes <= n * n * 2
    )
    assert torch.allclose(expected, got, rtol=1e-4, atol=1e-6)


@pytest.mark.kernel_asserts
@pytest.mark.parametrize("wrong", [PAIRS, -1])
def test_a_target_that_is_no_class_is_an_error_in_slices_of_classes_too(wrong):
    target = torch.arange(PAIRS)
    target[5] = wrong
    model = table()
    with koila.micro_batch(4), pytest.raises((IndexError, RuntimeError)):
        v, w = koila.lazy(*pairs())
        F.cross_entropy((model(v) @ model(w).t()).t(), target).backward()
    assert model.weight.grad is None


def test_all_targets_ignored_gives_eager_s_nan():
    compare(table, lambda: (x(), torch.full((B,), -100)), lambda m, v, y: F.cross_entropy(m(v), y))


def channels_first(m, v):
    """GroupNorm over a view of tokens, which is turned back: the loss reads, and its gradient is,
    laid out otherwise than the norm's result."""
    return m[1](m[0](v).transpose(1, 2)).transpose(1, 2)


LAID_OUT = {
    "mse": lambda m, v, y: F.mse_loss(channels_first(m, v), y),
    "smooth_l1": lambda m, v, y: F.smooth_l1_loss(channels_first(m, v), y),
    "huber": lambda m, v, y: F.huber_loss(channels_first(m, v), y),
    "soft_margin": lambda m, v, y: F.soft_margin_loss(channels_first(m, v), y.sign()),
    "l1": lambda m, v, y: F.l1_loss(channels_first(m, v), y),
    "bce": lambda m, v, y: F.binary_cross_entropy(channels_first(m, v).sigmoid(), y.sigmoid()),
    "kl_div": lambda m, v, y: F.kl_div(channels_first(m, v).log_softmax(-1), y.softmax(-1)),
    "log_softmax": lambda m, v, y: (channels_first(m, v).log_softmax(-1) * y).sum(),
    "softmax": lambda m, v, y: (channels_first(m, v).softmax(1) * y).sum(),
    "logsigmoid": lambda m, v, y: (F.logsigmoid(channels_first(m, v)) * y).sum(),
    "hardswish": lambda m, v, y: (F.hardswish(channels_first(m, v)) * y).sum(),
    "hardtanh": lambda m, v, y: (F.hardtanh(channels_first(m, v)) * y).sum(),
    "logit": lambda m, v, y: (channels_first(m, v).sigmoid().logit(1e-3) * y).sum(),
    "xlogy": lambda m, v, y: torch.xlogy(y, channels_first(m, v).exp()).sum(),
    "dropout": lambda m, v, y: (torch.native_dropout(channels_first(m, v), 0.5, True)[0] * y).sum(),
    "layer_norm": lambda m, v, y: (F.layer_norm(channels_first(m, v), (C,)) * y).sum(),
    "replicate": lambda m, v, y: (
        F.pad(channels_first(m, v), (0, 0, 1, 1), mode="replicate").pow(2).sum()
    ),
}


@pytest.mark.parametrize("name", LAID_OUT)
def test_gradients_are_laid_out_as_kernels_make_them(name):
    """Torch's shape functions give some gradients strides that the kernels do not: group norm's
    backward takes a contiguous gradient and does not look again."""
    compare(
        lambda: nn.Sequential(nn.Linear(7, C), nn.GroupNorm(2, C)).double(),
        lambda: (torch.randn(B, T, 7, dtype=D), torch.randn(B, T, C, dtype=D)),
        LAID_OUT[name],
        tol_whole=1e-12,
    )


def test_unpooling_is_laid_out_as_its_input():
    pooled = F.max_pool2d(torch.randn(B, 4, 6, 6), 2, return_indices=True)
    last = [t.to(memory_format=torch.channels_last) for t in pooled]
    for inputs in (pooled, last):
        expected, got = F.max_unpool2d(*inputs, 2), F.max_unpool2d(*koila.lazy(*inputs), 2)
        assert got.stride() == expected.stride() == plain(got).stride()
        assert torch.equal(plain(got), expected)


@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_loss_that_is_no_mean_needs_no_total_weight_before_its_backward(reduction, weighted):
    """Its operator has it as an argument, which it does not read: nothing runs twice for it."""
    torch.manual_seed(0)
    model, weight = table(), torch.rand(C, dtype=D) if weighted else None

    def gradients(v, y):
        model.zero_grad()
        loss = F.cross_entropy(model(v), y, weight, reduction=reduction, ignore_index=1)
        loss.sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    given = x(), labels()
    expected = gradients(*given)
    for rows in (1, 3):
        with koila.micro_batch(rows):
            found = gradients(*koila.lazy(*given))
        assert all(torch.allclose(f, e, 1e-12, 1e-14) for f, e in zip(found, expected, strict=True))
        assert len(koila.last_plan().loops) == 1 and koila.last_plan().replay_ratio == 1


ACCURACIES = {
    "mean": lambda right: right.float().mean(),
    "mean of doubles": lambda right: right.double().mean(),
    "sum by length": lambda right: right.sum() / len(right),
    "sum of floats": lambda right: right.float().sum() / len(right),
    "masked": lambda right: right.sum() / right.new_ones(right.shape).sum(),
    "dimension": lambda right: right.float()[:, None].mean(0),
    "percent": lambda right: 100 * right.float().mean() / 100,
}


@pytest.mark.parametrize("n", [7, 49, 60, 100, 1000])
@pytest.mark.parametrize("accuracy", ACCURACIES)
def test_an_accuracy_is_rounded_as_in_eager(accuracy, n):
    """A mean of slices that are each rounded is not 1 where all are right."""
    x = torch.arange(n)
    for limit in (n, n // 3):
        expected = ACCURACIES[accuracy](x < limit)
        for rows in (1, 8, 11):
            with koila.micro_batch(rows):
                assert torch.equal(ACCURACIES[accuracy](koila.lazy(x) < limit).torch(), expected), (
                    rows
                )

"""The rule oracle: for every operator in ops.def, calls of it (from PyTorch's own OpInfo samples,
forward and backward, and from our own list) are run whole and run as the rule says, with some
inputs sharded along some dimension and others whole, or one of them a partial sum. The two must be
equal.

A claim is a case that runs in the loop: the rule said something. Slices are of unequal length, and
single rows; partial sums are no halves. An operator with a line in ops.def and no claim at all is
listed, and test_every_line_has_a_claim fails unless it stands in NO_CPU_SAMPLE. test_planted_faults
runs the same oracle over trees with wrong rules: each must be caught.

    python tests/oracle/test_rules.py [part of an operator's name] [--all]
        a report by operator
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

sys.path.insert(0, str(Path(__file__).parent))
import slow

LINES = slow.op_lines()
HERE = Path(__file__).resolve()

# rules that only speak on another device, or about factories (test_factories has these), or only
# inside rewrites (whole programs have these)
NO_CPU_SAMPLE = {
    "aten::_thnn_fused_lstm_cell",
    "aten::_thnn_fused_lstm_cell_backward_impl",
    "aten::_thnn_fused_gru_cell",
    "aten::_thnn_fused_gru_cell_backward",
    "aten::_fused_rms_norm",
    "aten::_fused_rms_norm_backward",
    "aten::arange.start",  # of no tensor: tests/python/test_ranges.py
    "aten::bernoulli.float",
    "aten::native_dropout",  # of an empty tensor, for its mask alone: tests/python/test_random.py
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_efficient_attention_backward",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_backward",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_cudnn_attention_backward",
    "aten::_cudnn_rnn",
    "aten::_cudnn_rnn_backward",
    # needs the opaque workspace of its forward: test_programs.py
    "aten::mkldnn_rnn_layer_backward",
    "aten::_embedding_bag",
    "aten::_embedding_bag_forward_only",
    "aten::_embedding_bag_backward",
    # with offsets that an arange of the program made: test_programs.py
    "aten::_embedding_bag_per_sample_weights_backward",
    "aten::_native_batch_norm_legit",  # writes its running statistics: capture renames it
}


def name_of(func) -> str:
    return func._schema.name + (
        "." + func._schema.overload_name if func._schema.overload_name else ""
    )


class Calls(TorchDispatchMode):
    """Collects calls of operators that have a line, at most `limit` different ones each."""

    def __init__(self, limit):
        super().__init__()
        self.limit, self.by_op, self.seen = limit, {}, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = name_of(func)
        if name in LINES and not func._schema.is_mutable:
            flat, spec = tree_flatten((args, kwargs))
            key = (
                name,
                tuple(
                    (tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else repr(x)
                    for x in flat
                ),
            )
            many = self.by_op.setdefault(name, [])
            if (
                key not in self.seen
                and len(many) < self.limit
                and any(isinstance(x, torch.Tensor) and x.dim() for x in flat)
            ):
                self.seen.add(key)
                if all(x.numel() < 5000 for x in flat if isinstance(x, torch.Tensor)):
                    many.append(
                        (
                            func,
                            [
                                x.detach().clone() if isinstance(x, torch.Tensor) else x
                                for x in flat
                            ],
                            spec,
                        )
                    )
        return func(*args, **kwargs)


def op_infos():
    from torch.testing._internal.common_methods_invocations import op_db

    skip = (
        "jiterator",
        "masked.",
        "sparse",
        "svd_lowrank",
        "pca_lowrank",
        "ormqr",
        "to_sparse",
        "torch.ops.aten._efficient",
        "_segment",
        "signal.",
    )
    return [o for o in op_db if not any(s in o.name for s in skip)]


def collect(limit, samples_each, only=""):
    warnings.simplefilter("ignore")
    calls = Calls(80)
    torch.manual_seed(0)
    random.seed(0)
    stem = only.replace("aten::", "").split(".")[0].replace("_backward", "")
    for op in op_infos():
        if stem and stem not in op.name:
            continue
        for dtype in (torch.float64, torch.int64):
            if dtype not in op.dtypes:
                continue
            try:
                samples = op.sample_inputs(
                    "cpu", dtype, requires_grad=dtype == torch.float64 and op.supports_autograd
                )
                for k, s in enumerate(samples):
                    if k >= samples_each:
                        break
                    with calls:
                        out = op(s.input, *s.args, **s.kwargs)
                        outs = [
                            o
                            for o in tree_flatten(out)[0]
                            if isinstance(o, torch.Tensor) and o.requires_grad
                        ]
                        if outs:
                            sum((o.abs() if o.is_complex() else o).sum() for o in outs).backward()
            except Exception:  # a sample this build cannot run is no sample
                continue
    spread = {n: spread_out(c, limit) for n, c in calls.by_op.items()}
    own = Calls(40)
    for fn in own_samples():
        with own:
            fn()
    with torch.inference_mode(), own:  # here composite operators arrive whole
        for fn in composite_samples():
            fn()
    for name, c in own.by_op.items():
        spread[name] = c + spread.get(name, [])
    for name, (family, _) in LINES.items():
        if family in (
            "pointwise",
            "linear",
            "mul",
            "div",
            "masked_fill",
            "where",
        ) and not spread.get(name):
            spread[name] = synthetic(name)
    return {n: c for n, c in spread.items() if only in n}


def spread_out(calls, limit):
    """Those with most dimensions, and some of the others."""
    by_dims = sorted(
        calls, key=lambda c: -max(x.dim() for x in c[1] if isinstance(x, torch.Tensor))
    )
    rest = by_dims[limit // 2 :]
    return by_dims[: limit // 2] + random.Random(0).sample(rest, min(len(rest), limit - limit // 2))


def synthetic(name):
    """A call made up from the schema: for functions of elements any numbers will do."""
    func = slow.Run.func(name)
    for dtype in (torch.float64, torch.int64, torch.bool):
        args, kwargs = [], {}
        for k, a in enumerate(func._schema.arguments):
            kind = str(a.type)
            if a.has_default_value() and not kind.startswith("Tensor"):
                continue
            v = (
                (torch.rand(5, 4) * 3).to(dtype) + (dtype is not torch.bool)
                if kind == "Tensor"
                else {"number": 2, "int": 1, "float": 0.5, "bool": True}.get(kind)
            )
            if a.kwarg_only:
                kwargs[a.name] = v
            else:
                args.append(v)
        try:
            func(*args, **kwargs)
        except Exception:
            continue
        return [(func, *tree_flatten((tuple(args), kwargs)))]
    return []


def composite_samples():
    r, a = torch.randn, torch.ops.aten
    yield lambda: a.linear(r(5, 3), r(4, 3), r(4))
    yield lambda: a.linear(r(5, 2, 3), r(4, 3))
    yield lambda: a.reshape(r(10, 3), [2, 15])
    yield lambda: a.flatten.using_ints(r(10, 3, 4), 0, 1)
    yield lambda: a.flatten.using_ints(r(5, 3, 4), 0, 1)
    yield lambda: a.contiguous(r(5, 3).t())
    yield lambda: a.chunk(r(5, 4, 3), 2, 1)
    yield lambda: a.any.dims(r(5, 4) > 0, [1])
    yield lambda: a.all.dims(r(5, 4) > 0, [1])
    yield lambda: a.mish(r(5, 4))


def own_samples():
    """What OpInfo has not, or not with a batch that can be cut."""
    F, r = torch.nn.functional, torch.randn
    d = torch.float64

    def g(*s, low=0, high=4):
        return torch.randint(low, high, s)

    def loss(f, *shape, **kw):
        x = r(*shape, dtype=d, requires_grad=True)
        return lambda: f(x).sum().backward()

    t5 = g(5)
    t5[1] = 1
    t53 = g(5, 3, 4)
    w = torch.rand(4, dtype=d)
    yield from (
        loss(lambda x, k=k: F.cross_entropy(x, t5, **k), 5, 4)
        for k in (
            {},
            {"ignore_index": 1},
            {"weight": w},
            {"reduction": "sum"},
            {"reduction": "none"},
            {"weight": w, "ignore_index": 1},
        )
    )
    yield from (
        loss(lambda x, k=k: F.cross_entropy(x, t53, **k), 5, 4, 3, 4)
        for k in ({}, {"ignore_index": 1, "weight": w}, {"reduction": "none"})
    )
    y = r(5, 4, dtype=d)
    for name in ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"):
        for red in ("mean", "sum", "none"):
            yield loss(
                lambda x, name=name, red=red: getattr(F, name)(
                    x, y.sign() if "soft" in name else y, reduction=red
                ),
                5,
                4,
            )
    p = torch.rand(5, 4, dtype=d)
    for red in ("mean", "sum", "none"):
        yield loss(
            lambda x, red=red: F.binary_cross_entropy(x.sigmoid(), p, reduction=red, weight=w), 5, 4
        )
        yield loss(
            lambda x, red=red: F.binary_cross_entropy_with_logits(
                x, p, reduction=red, weight=w, pos_weight=w + 1
            ),
            5,
            4,
        )
        yield loss(lambda x, red=red: F.multi_margin_loss(x, t5, reduction=red, weight=w), 5, 4)
        yield loss(
            lambda x, red=red: F.multilabel_margin_loss(x, g(5, 4, low=-1), reduction=red), 5, 4
        )
    for training in (True, False):
        yield loss(
            lambda x, t=training: F.batch_norm(
                x, torch.zeros(3, dtype=d), torch.ones(3, dtype=d), w[:3].requires_grad_(), w[:3], t
            ),
            5,
            3,
            4,
            2,
        )
        yield loss(
            lambda x, t=training: F.batch_norm(
                x, torch.zeros(3, dtype=d), torch.ones(3, dtype=d), None, None, t
            ),
            5,
            3,
        )
    yield loss(lambda x: F.batch_norm(x, None, None, None, None, True), 5, 3, 4)
    yield loss(
        lambda x: F.group_norm(x, 2, r(4, dtype=d, requires_grad=True), r(4, dtype=d)), 5, 4, 3, 2
    )
    yield loss(
        lambda x: F.layer_norm(x, (4,), r(4, dtype=d, requires_grad=True), r(4, dtype=d)), 5, 3, 4
    )
    yield loss(lambda x: F.layer_norm(x, (3, 4)), 5, 3, 4)
    yield loss(lambda x: F.rms_norm(x, (4,), r(4, dtype=d, requires_grad=True)), 5, 3, 4)
    q = [r(5, 2, 3, 4, dtype=d, requires_grad=True) for _ in range(3)]
    yield lambda: F.scaled_dot_product_attention(*q).sum().backward()
    yield (
        lambda: (
            F.scaled_dot_product_attention(*q, attn_mask=r(5, 1, 3, 3, dtype=d)).sum().backward()
        )
    )
    yield lambda: F.scaled_dot_product_attention(*q, attn_mask=r(3, 3, dtype=d)).sum().backward()
    yield loss(lambda x: F.embedding(t53, x), 4, 3)
    yield loss(lambda x: F.embedding(t53, x, padding_idx=1), 4, 3)
    yield loss(
        lambda x: F.conv2d(
            x, r(4, 3, 2, 2, dtype=d, requires_grad=True), r(4, dtype=d, requires_grad=True)
        ),
        5,
        3,
        4,
        6,
    )
    yield loss(
        lambda x: F.conv_transpose2d(x, r(3, 4, 2, 2, dtype=d, requires_grad=True)), 5, 3, 4, 6
    )
    yield loss(lambda x: x[torch.arange(5), t5], 5, 4)
    yield loss(lambda x: x[torch.arange(5)[:, None], g(5, 3)], 5, 4, 2)
    yield loss(lambda x: x[:, t5], 5, 4, 3)
    yield loss(lambda x: x[:, t5, t5 % 3], 5, 4, 3)
    yield loss(lambda x: x[t5 % 3, :, t5], 3, 7, 4)
    z = lambda *s: torch.zeros(*s, dtype=d)  # noqa: E731
    yield lambda: torch.ops.aten.index_put(z(4, 3), [t5], r(5, 3, dtype=d), True)
    yield lambda: torch.ops.aten.index_put(r(7, 5, 3, dtype=d), [t5], r(5, 3, dtype=d))
    yield lambda: torch.ops.aten.index_put(r(4, 5, 3, dtype=d), [g(2)], r(2, 5, 3, dtype=d), False)
    yield lambda: torch.ops.aten._unsafe_index_put(z(4, 3), [t5], r(5, 3, dtype=d), True)
    yield lambda: torch.ops.aten._unsafe_index.Tensor(r(4, 3, dtype=d), [t5])
    A = torch.ops.aten
    bn = [r(3, dtype=d), r(3, dtype=d), torch.zeros(3, dtype=d), torch.ones(3, dtype=d)]
    for x in (r(5, 3, dtype=d), r(5, 3, 4, dtype=d)):
        yield lambda x=x: A._native_batch_norm_legit_functional(x, *bn, True, 0.3, 1e-5)
        yield lambda x=x: A._native_batch_norm_legit_functional(
            x, None, None, *bn[2:], True, 0.3, 1e-5
        )
        yield lambda x=x: A._native_batch_norm_legit_functional(x, *bn, False, 0.3, 1e-5)
        yield lambda x=x: A._native_batch_norm_legit.no_stats(x, *bn[:2], True, 0.3, 1e-5)
        yield lambda x=x: A._native_batch_norm_legit_no_training(x, *bn, 0.3, 1e-5)
    for lstm in (torch.nn.LSTM(3, 4), torch.nn.LSTM(3, 4, bidirectional=True)):
        yield lambda lstm=lstm: lstm(r(6, 5, 3))[0].sum().backward()
    yield lambda: A.linalg_solve_triangular(
        r(5, 3, 3, dtype=d).triu() + 3 * torch.eye(3, dtype=d), r(5, 3, 2, dtype=d), upper=True
    )
    yield lambda: A.linalg_qr(r(5, 3, 3, dtype=d))
    yield lambda: A._linalg_det(r(5, 3, 3, dtype=d))
    yield lambda: A._linalg_slogdet(r(5, 3, 3, dtype=d))
    yield lambda: A.linalg_cholesky_ex(
        torch.eye(3, dtype=d).expand(5, 3, 3) * torch.rand(5, 1, 1, dtype=d)
    )
    yield lambda: A.cholesky_solve(
        r(5, 3, 2, dtype=d), torch.eye(3, dtype=d).expand(5, 3, 3) * torch.rand(5, 1, 1, dtype=d)
    )
    yield lambda: A.cholesky_inverse(
        torch.eye(3, dtype=d).expand(5, 3, 3) * torch.rand(5, 1, 1, dtype=d)
    )
    yield lambda: A.linalg_householder_product(r(5, 4, 3, dtype=d), r(5, 3, dtype=d))
    lu = torch.linalg.lu_factor(r(5, 3, 3, dtype=d))
    yield lambda: A.linalg_lu_solve(*lu, r(5, 3, 2, dtype=d))
    yield lambda: A.lu_unpack(*lu)
    yield lambda: A.median.dim(r(5, 3, dtype=d), 1)
    yield lambda: A.nanmedian.dim(r(5, 3, dtype=d), 1)
    yield lambda: A.argmax(r(5, 3, dtype=d), 1)
    yield lambda: A.argmin(r(5, 3, dtype=d), 1, True)
    yield lambda: A.count_nonzero.dim_IntList(r(5, 3, dtype=d) > 0, [0])
    yield lambda: F.glu(r(5, 6, dtype=d, requires_grad=True), 1).sum().backward()
    yield lambda: A.im2col(r(5, 3, 4, 6, dtype=d), [2, 2], [1, 1], [0, 0], [1, 1])
    yield lambda: A.col2im(r(5, 12, 15, dtype=d), [4, 6], [2, 2], [1, 1], [0, 0], [1, 1])
    yield lambda: A.index_fill.int_Tensor(r(5, 4, dtype=d), 1, g(2), torch.tensor(2.0, dtype=d))
    yield lambda: A.lift_fresh_copy(r(5, 3, dtype=d))
    yield lambda: A.unsafe_split_with_sizes(r(5, 7, dtype=d), [3, 4], 1)
    yield lambda: A.scatter.value_reduce(r(5, 7, dtype=d), 1, g(5, 2), 2.0, reduce="add")
    yield lambda: A.scatter_reduce.two(r(5, 7, dtype=d), 1, g(5, 2), r(5, 2, dtype=d), "amax")
    for how in ("amax", "amin", "sum"):
        yield lambda how=how: A.scatter_reduce.two(
            r(2, 3, dtype=d), 0, g(9, 3) % 2, r(9, 3, dtype=d), how
        )
    yield lambda: A.scatter_add(r(2, 3, dtype=d), 0, g(9, 3) % 2, r(9, 3, dtype=d))
    yield lambda: A.index_add(r(3, 2, dtype=d), 1, g(9) % 2, r(3, 9, dtype=d))
    yield lambda: A.index_put(r(3, 2, dtype=d), [None, g(9) % 2], r(3, 9, dtype=d), True)
    yield lambda: A.new_zeros(r(3, dtype=d), [9, 2])
    yield lambda: A.copy(r(5, 3, dtype=d), r(3, dtype=d))
    yield lambda: A.fill.Tensor(r(5, 3, dtype=d), torch.tensor(2.0, dtype=d))
    yield lambda: A.fill.Scalar(r(5, 3, dtype=d), 2.0)
    yield lambda: A.zero(r(5, 3, dtype=d))
    for o, n in ((3, 4), (4, 3)):
        yield lambda o=o, n=n: A.split.Tensor(r(20, n, dtype=d), 5, 0)
        yield lambda o=o, n=n: A.slice.Tensor(r(20, n, dtype=d), 0, 5, 15)
        yield lambda o=o, n=n: A.slice.Tensor(r(20, n, dtype=d), 0, -10)
        yield lambda o=o, n=n: A.slice_backward(r(10, n, dtype=d), [20, n], 0, 5, 15, 1)
        yield lambda o=o, n=n: A.slice_backward(r(10, n, dtype=d), [20, n], 0, 10, 2**63 - 1, 1)
        yield lambda o=o, n=n: A.cat([r(10, n, dtype=d), r(5, n, dtype=d)])
        yield lambda o=o, n=n: A.repeat(r(5, n, dtype=d), [2, 3])
        yield lambda o=o, n=n: A.repeat(r(5, n, dtype=d), [o, 2, 1])
    for op in (torch.sort, torch.argsort):
        yield lambda op=op: op(r(5, 4, dtype=d), dim=1, stable=True)
    for dim in (0, 1, (0, 1), (1, 2)):
        for name in ("var", "std", "var_mean", "std_mean"):
            for keep in (False, True):
                yield lambda dim=dim, name=name, keep=keep: getattr(torch, name)(
                    r(5, 3, 4, dtype=d), dim, keepdim=keep, correction=0
                )
    for p_ in (1, 2, float("inf"), -float("inf"), 3):
        yield lambda p_=p_: torch.linalg.vector_norm(r(5, 3, 4, dtype=d), p_, 0)
        yield lambda p_=p_: torch.linalg.vector_norm(r(5, 3, 4, dtype=d), p_)
        yield lambda p_=p_: torch.ops.aten.norm.ScalarOpt_dim(r(5, 3, dtype=d), p_, [0], True)
        yield lambda p_=p_: torch.ops.aten.norm.Scalar(r(5, 3, dtype=d), p_)
    for dim in (0, 1, -1):
        for f in ("_softmax", "_log_softmax"):
            yield lambda dim=dim, f=f: getattr(torch.ops.aten, f)(r(5, 3, 4, dtype=d), dim, False)
            yield lambda dim=dim, f=f: getattr(torch.ops.aten, f + "_backward_data")(
                r(5, 3, dtype=d), torch.rand(5, 3, dtype=d), dim % 2, d
            )
        yield lambda dim=dim: torch.ops.aten._safe_softmax(r(5, 3, dtype=d), dim)
        yield lambda dim=dim: torch.logsumexp(r(5, 3, 4, dtype=d), dim)
        yield lambda dim=dim: torch.logsumexp(r(5, 3, 4, dtype=d), dim, True)
    yield lambda: torch.logsumexp(
        r(5, 3, dtype=d).masked_fill(torch.ones(5, 3, dtype=torch.bool).tril(-2), -float("inf")), 0
    )
    for a, b in (((2, 5, 3), (2, 4, 3)), ((5, 3), (4, 3))):
        x1, x2 = r(*a, dtype=d, requires_grad=True), r(*b, dtype=d, requires_grad=True)
        yield lambda x1=x1, x2=x2: torch.cdist(x1, x2).sum().backward()
        yield lambda x1=x1, x2=x2: torch.cdist(x1, x2, p=1.0).sum().backward()
        yield (
            lambda x1=x1, x2=x2: (
                torch.cdist(x1, x2, compute_mode="use_mm_for_euclid_dist").sum().backward()
            )
        )
    for m in ("sum", "mean"):
        yield lambda m=m: getattr(torch.ops.aten, m).default(r(5, 3, dtype=d))
    x = r(5, 3, 8, 8, dtype=d, requires_grad=True)
    for mode in ("nearest", "bilinear", "bicubic", "nearest-exact"):
        yield lambda mode=mode: F.interpolate(x, scale_factor=2, mode=mode).sum().backward()
    for mode in ("bilinear", "bicubic"):
        yield (
            lambda mode=mode: (
                F.interpolate(x, size=(5, 4), mode=mode, antialias=True).sum().backward()
            )
        )
    x1 = r(5, 3, 8, dtype=d, requires_grad=True)
    x3 = r(5, 2, 4, 3, 3, dtype=d, requires_grad=True)
    for mode in ("nearest", "linear", "nearest-exact"):
        yield lambda mode=mode: F.interpolate(x1, scale_factor=2, mode=mode).sum().backward()
    yield loss(
        lambda x: F.grid_sample(x, torch.rand(5, 2, 3, 4, 3, dtype=d, requires_grad=True)),
        5,
        2,
        3,
        3,
        3,
    )
    yield lambda: A.searchsorted.Tensor(r(9, dtype=d).sort()[0], r(5, 3, dtype=d))
    yield lambda: A.searchsorted.Tensor(r(5, 9, dtype=d).sort()[0], r(5, 3, dtype=d), right=True)
    yield lambda: A.searchsorted.Tensor(r(2, 5, 4, dtype=d).sort()[0], r(2, 5, 5, dtype=d))
    rows = r(5, 9, dtype=d)
    yield lambda: A.searchsorted.Tensor(rows, r(5, 3, dtype=d), sorter=rows.argsort())
    yield lambda: A._is_all_true(r(5, 3, dtype=d) > -1)
    yield lambda: A._is_any_true(r(5, 3, dtype=d) > 1)
    yield lambda: A.linalg_cross(r(5, 3, dtype=d), r(5, 3, dtype=d))
    yield lambda: A.linalg_cross(r(3, 5, dtype=d), r(3, 1, dtype=d), dim=0)
    yield (
        lambda: (
            F.bilinear(
                r(5, 3, dtype=d, requires_grad=True),
                r(5, 2, dtype=d, requires_grad=True),
                r(4, 3, 2, dtype=d, requires_grad=True),
            )
            .sum()
            .backward()
        )
    )
    yield lambda: A.slice_scatter(r(5, 6, dtype=d), r(5, 2, dtype=d), 1, 2, 4)
    # windows that overlap, each in its row
    yield lambda: A.as_strided(r(5, 3, 2, dtype=d), [5, 2, 4], [6, 2, 1])
    yield lambda: A.as_strided(r(5, 3, 2, dtype=d), [2, 5, 5], [1, 6, 0])
    yield lambda: A.as_strided(r(30, dtype=d), [5, 6, 1], [6, 1, 1])
    yield lambda: A.glu_backward(r(5, 3, dtype=d), r(5, 6, dtype=d), 1)
    for mode in ("nearest", "trilinear", "nearest-exact"):
        yield lambda mode=mode: F.interpolate(x3, scale_factor=2, mode=mode).sum().backward()
    for n, xx in ((1, x1), (2, x), (3, x3)):
        for kind in ("reflect", "replicate", "constant"):
            yield lambda xx=xx, n=n, kind=kind: F.pad(xx, [1, 2] * n, mode=kind).sum().backward()
        yield lambda xx=xx, n=n: getattr(F, f"adaptive_avg_pool{n}d")(xx, 3).sum().backward()
        yield lambda xx=xx, n=n: getattr(F, f"adaptive_max_pool{n}d")(xx, 3).sum().backward()
        yield lambda xx=xx, n=n: getattr(F, f"avg_pool{n}d")(xx, 2).sum().backward()
        yield lambda xx=xx, n=n: getattr(F, f"max_pool{n}d")(xx, 2).sum().backward()
    yield lambda: F.pixel_shuffle(r(5, 8, 3, 3, dtype=d, requires_grad=True), 2).sum().backward()
    yield lambda: F.pixel_unshuffle(r(5, 2, 4, 4, dtype=d, requires_grad=True), 2).sum().backward()
    # rows of pixels; rows of a grid; images that are channels
    yield lambda: F.pixel_shuffle(r(2, 8, 5, 3, dtype=d), 2)
    yield lambda: F.pixel_unshuffle(r(2, 2, 10, 4, dtype=d), 2)
    yield lambda: F.affine_grid(r(5, 2, 3, dtype=d), [5, 3, 4, 2], align_corners=False)
    yield (
        lambda: (
            F.grid_sample(
                r(2, 3, 4, 4, dtype=d, requires_grad=True),
                r(2, 5, 3, 2, dtype=d, requires_grad=True),
                align_corners=False,
            )
            .sum()
            .backward()
        )
    )
    for transposed, window in ((False, (3, 5)), (False, (5, 3)), (True, (5, 3)), (True, (3, 5))):
        yield lambda transposed=transposed, window=window: (
            torch.convolution(
                r(2, window[not transposed], 4, 4, dtype=d, requires_grad=True),
                r(*window, 2, 2, dtype=d, requires_grad=True),
                None, [1, 1], [1, 1], [1, 1], transposed, [0, 0], 1,
            )
            .square()
            .sum()
            .backward()
        )  # fmt: skip
    # images, and their weights, as groups of one image
    for transposed, groups, x, w, out in (
        (False, 5, 10, (15, 2), 15),
        (False, 10, 10, (10, 1), 10),
        (True, 5, 10, (10, 3), 15),
        (True, 10, 20, (20, 1), 10),
    ):
        yield lambda transposed=transposed, groups=groups, x=x, w=w, out=out: (
            torch.convolution(
                r(1, x, 4, 4, dtype=d, requires_grad=True),
                r(*w, 2, 2, dtype=d, requires_grad=True),
                r(out, dtype=d, requires_grad=True),
                [1, 1], [1, 1], [1, 1], transposed, [0, 0], groups,
            )
            .square()
            .sum()
            .backward()
        )  # fmt: skip
    yield lambda: torch.ops.aten.native_channel_shuffle(r(5, 4, 3, 3, dtype=d), 2)
    yield lambda: torch.ops.aten.channel_shuffle(r(5, 4, 3, 3, dtype=d), 2)
    yield lambda: torch.ops.aten.take(r(4, 3, dtype=d), g(5, 2))
    yield lambda: torch.ops.aten.addmm(z(4, 3), r(4, 5, dtype=d), r(5, 3, dtype=d))
    for s in ((5, 12), (10, 3), (5, 4, 3)):
        yield lambda s=s: r(*s, dtype=d).reshape(-1)
        yield lambda s=s: r(*s, dtype=d).view(-1, 3)
    yield lambda: torch.ops.aten._reshape_alias(r(10, 3, dtype=d), [2, 15], [15, 1])
    yield lambda: torch.ops.aten.reshape(r(10, 3, dtype=d), [2, 15])
    yield lambda: torch.ops.aten.flatten.using_ints(r(10, 3, 4, dtype=d), 0, 1)
    yield lambda: torch.ops.aten._unsafe_view(r(10, 3, dtype=d), [2, 5, 3])
    yield lambda: torch.ops.aten.linear(r(5, 3, dtype=d), r(4, 3, dtype=d), r(4, dtype=d))
    yield lambda: torch.ops.aten.contiguous(r(5, 3, dtype=d).t())


# ---- one case


def factorings(n):
    """(outer, batch, inner) of a size: the plain one, and for composite sizes others."""
    out = [(1, n, 1)]
    for b in (5, 2, 3):
        if n > b and n % b == 0:
            out += [(1, b, n // b), (n // b, b, 1)]
            break
    return out


def cases(flat):
    """Which inputs are sharded how. {index: ("S", dim, outer, inner) or ("P",)} and the batch."""
    tensors = [(i, x) for i, x in enumerate(flat) if isinstance(x, torch.Tensor)]
    seen = set()

    def once(d, b):
        key = (tuple(sorted(d.items())), b)
        if key in seen:
            return []
        seen.add(key)
        return [(d, b)]

    for i, x in tensors:
        for dim in range(x.dim()):
            for o, b, n in factorings(x.shape[dim]):
                if b < 2:
                    continue
                yield from once({i: ("S", dim, o, n)}, b)
                if (o, n) == (1, 1) or len(tensors) <= 3:
                    # everything of that size at the same place from the left, and from the right
                    left = {
                        j: ("S", dim, o, n)
                        for j, y in tensors
                        if y.dim() > dim and y.shape[dim] == x.shape[dim]
                    }
                    back = x.dim() - dim
                    right = {
                        j: ("S", y.dim() - back, o, n)
                        for j, y in tensors
                        if y.dim() >= back and y.shape[-back] == x.shape[dim]
                    }
                    first = {
                        j: (
                            "S",
                            next(k for k in range(y.dim()) if y.shape[k] == x.shape[dim]),
                            o,
                            n,
                        )
                        for j, y in tensors
                        if x.shape[dim] in y.shape
                    }
                    last = {
                        j: (
                            "S",
                            next(k for k in reversed(range(y.dim())) if y.shape[k] == x.shape[dim]),
                            o,
                            n,
                        )
                        for j, y in tensors
                        if x.shape[dim] in y.shape
                    }
                    for d in (left, right, first, last):
                        yield from once(d, b)
        if x.is_floating_point():
            yield from once({i: ("P",)}, 5)
    floats = {i: ("P",) for i, x in tensors if x.is_floating_point()}
    if len(floats) > 1:
        yield from once(floats, 5)


# Weights of partial sums: they add up to 1, for flags exactly.
WEIGHTS = torch.tensor([0.5, -0.25, 1.0, 0.25, -0.5], dtype=torch.float64)


def judge(func, flat, spec, how, batch, zeros=()):
    """'claim', 'none', or an AssertionError."""
    leaves, dims, at = [], [], {}
    for i, h in how.items():
        x = flat[i]
        if h[0] == "S":
            _, dim, o, n = h
            leaf = (
                x.reshape(*x.shape[:dim], o, batch, n, *x.shape[dim + 1 :]).clone()
                if (o, n) != (1, 1)
                else x.clone()
            )
            dims.append(dim + 1 if (o, n) != (1, 1) else dim)
        else:
            leaf = (WEIGHTS.to(x.dtype).reshape(-1, *[1] * x.dim()) * x).clone()
            dims.append(0)
        at[i] = len(leaves)
        leaves.append(leaf)

    def program(*given):
        args = list(flat)
        for i, h in how.items():
            v = given[at[i]]
            if h[0] == "P":
                v = v.sum(0)
            elif (h[2], h[3]) != (1, 1):
                v = v.reshape(flat[i].shape)
            args[i] = v
        for i in zeros:
            args[i] = torch.ops.aten.zeros(list(flat[i].shape), dtype=flat[i].dtype)
        a, k = tree_unflatten(args, spec)
        with torch.inference_mode(
            func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
        ):
            out = func(*a, **k)
        outs = [o for o in tree_flatten(out)[0] if isinstance(o, torch.Tensor)]
        return outs

    try:
        rec = slow.record(program, leaves, dims)
    except NotImplementedError:
        return "none"
    n_recorded = slow.lib.koila_graph_n_nodes(rec.g.graph)
    run = rec.place()
    try:
        mine = [n for n in range(run.n_nodes) if run.p.contents.node[n].recorded == n_recorded - 1]
        if not any(run.p.contents.node[n].in_loop for n in mine):
            return "none"
        ragged = [r for r in (batch // 2 + 1, batch - batch // 2 - 1) if r]
        narrow = any(
            isinstance(x, torch.Tensor) and x.dtype in (torch.float32, torch.complex64)
            for x in flat
        )
        tolerance = 1e-4 if narrow else 1e-9  # a float32 input may give a float64 result
        run.check([ragged, [1] * batch], atol=tolerance, rtol=tolerance, loose=not narrow)
        return "claim"
    finally:
        run.close()


def is_uninitialised(name):
    return name.startswith(("aten::empty", "aten::new_empty"))


def examine(calls, report=False):
    """{op: number of claims}, [failures]"""
    claims, failures = {}, []
    for name, many in sorted(calls.items()):
        n = 0
        if is_uninitialised(name):
            continue
        for func, flat, spec in many:
            for how, batch in cases(flat):
                variants = [()]
                if "accumulates" in name or name in (
                    "aten::index_put",
                    "aten::_unsafe_index_put",
                    "aten::index_add",
                    "aten::scatter_add",
                    "aten::addmm",
                    "aten::add.Tensor",
                ):
                    first = next(
                        (i for i, x in enumerate(flat) if isinstance(x, torch.Tensor)), None
                    )
                    if first is not None and first not in how:
                        variants.append((first,))
                for zeros in variants:
                    try:
                        with warnings.catch_warnings():
                            warnings.simplefilter("ignore")
                            n += judge(func, flat, spec, how, batch, zeros) == "claim"
                    except (
                        AssertionError,
                        RuntimeError,
                        IndexError,
                        ValueError,
                        TypeError,
                        AttributeError,
                    ) as e:
                        shapes = [
                            tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in flat
                        ]
                        failures.append(
                            (name, how, batch, zeros, shapes, f"{type(e).__name__}: {e}")
                        )
        claims[name] = n
        if report:
            print(f"{n:5} {name}", flush=True)
    return claims, failures


LIMITS = (6, 6) if not os.environ.get("KOILA_ORACLE_ALL") else (60, 60)


@pytest.fixture(scope="session")
def judged():
    return examine(collect(*LIMITS))


def test_every_rule_equals_the_whole(judged):
    _, failures = judged
    assert not failures, f"{len(failures)} wrong:\n" + "\n".join(map(str, failures[:20]))


def test_every_line_has_a_claim(judged):
    claims, _ = judged
    factories = {n for n, (family, _) in LINES.items() if family.startswith(("factory", "fill"))}
    silent = sorted(
        n
        for n in LINES
        if not claims.get(n)
        and n not in NO_CPU_SAMPLE
        and n not in factories
        and not n.startswith("koila::")
    )
    assert not silent, (
        f"{len(silent)} operators of ops.def have no sample in which their rule speaks: {silent}"
    )


def test_the_page_of_operators_is_fresh():
    done = subprocess.run(
        [sys.executable, str(slow.ROOT / "tools/make_operators.py"), "--check"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


FAULTS = [  # file, text, replacement, operators to look at
    (
        "graph/ops.def",
        'KOILA_OP("aten::cumsum",',
        'KOILA_OP("aten::cumsum", pointwise, "", 0) KOILA_OP("aten::no_such_operator",',
        "aten::cumsum",
    ),
    (
        "placement/rules_reduce.c",
        "count *= (set >> d) & 1 ? m->size[d] : 1;",
        "count += (set >> d) & 1 ? m->size[d] : 1;",
        "aten::mean",
    ),
    (
        "placement/rules_matmul.c",
        "*out = koila__p(c, KOILA_SUM);\n        return koila__need(c, y.i,",
        "*out = koila__p(c, KOILA_MAX);\n        return koila__need(c, y.i,",
        "aten::mm",
    ),
    (
        "placement/rules_loss.c",
        "return reduction != MEAN || koila__fix_add(c, KOILA__FIX_SCALE, 0, 0);\n}\n"
        "/* (grad, x, y, reduction, ...) */",
        "return true;\n}\n",
        "aten::mse_loss_backward",
    ),
    (
        "placement/rules_pointwise.c",
        "if (c->n_in != 2)\n        return false;\n    for (uint32_t i = 0; i < 2; i++)\n"
        "        if (!koila__is_sum(c->in[i]) && !c->zero[i])\n            return false;\n"
        "    for (uint32_t i = 0; i < 2; i++)\n        c->need[i] = koila__p(c, KOILA_SUM);",
        "for (uint32_t i = 0; i < c->n_in; i++) if (koila__is_s(c->in[i])) return false;",
        "aten::add.Tensor",
    ),
    (
        "placement/rules_view.c",
        "const koila_placement q = koila__s(c, d, before / pre, behind / post);",
        "const koila_placement q = koila__s(c, d, behind / post, before / pre);",
        "aten::view",
    ),
    (
        "placement/rules_windows.c",
        "koila__fix_add(c, KOILA__FIX_ROWS, GROUPS, 0)",
        "true",
        "aten::convolution",
    ),
]


@pytest.mark.parametrize("fault", range(len(FAULTS)))
def test_planted_faults_are_caught(fault, tmp_path):
    file, text, replacement, op = FAULTS[fault]
    for part in ("src", "include"):
        shutil.copytree(slow.ROOT / part, tmp_path / part)
    path = tmp_path / "src" / file
    source = path.read_text()
    assert source.count(text) == 1, f"the text to replace is in {file} {source.count(text)} times"
    path.write_text(source.replace(text, replacement))
    env = dict(os.environ, KOILA_ORACLE_ROOT=str(tmp_path))
    done = subprocess.run([sys.executable, str(HERE), op], env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "wrong:" in done.stdout, (
        f"not caught: {done.stdout[-500:]} {done.stderr[-1500:]}"
    )


if __name__ == "__main__":
    only = next((a for a in sys.argv[1:] if not a.startswith("-")), "")
    found, wrong = examine(
        collect(*((60, 60) if "--all" in sys.argv else LIMITS), only=only), report=True
    )
    for f in wrong[:60]:
        print("wrong:", *f)
    print(
        f"{sum(found.values())} claims over {sum(1 for n in found.values() if n)} operators, "
        f"{len(wrong)} wrong"
    )
    if not only:
        print("no claim:", sorted(n for n in LINES if not found.get(n)))
    sys.exit(1 if wrong else 0)

"""PyTorch's operator database through `lazy()`: forward and backward, each slice kind, against
eager. One JSON line an operator.

    opinfo_sweep.py <shard> <n_shards> <samples an operator> <slice kinds, comma-separated>

Outcomes: same; refused (a KoilaError: what and why); wrong (numbers differ); raised (eager does
not); random (only shapes are compared: two eager runs differ); skipped (eager itself raises, or
there is no batch to cut).
"""

import copy
import json
import math
import os
import sys
import warnings

import torch
from conftest import DEVICE
from helpers import rows
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_map

import koila

# of the largest number of a result, where everything that goes in and comes out is float64
TOL = 1e-9
# machine epsilons, where something is coarser: of the largest number that goes in or comes out, for
# sums of such numbers may cancel
COARSE = 8


def first_batched(sample):
    t = (
        sample.input
        if isinstance(sample.input, torch.Tensor)
        else next((v for v in tree_flatten(sample.input)[0] if isinstance(v, torch.Tensor)), None)
    )
    return t if t is not None and t.ndim and t.layout is torch.strided and t.shape[0] >= 2 else None


def fresh(value, n, lazily):
    """Copies of all tensors; those with `n` rows are the batch."""
    leaves = []

    def copy(t):
        if not isinstance(t, torch.Tensor):
            return t
        c = t.detach().clone()
        if t.requires_grad:
            c.requires_grad_()
            leaves.append(c)
        if lazily and c.ndim and c.layout is torch.strided and c.shape[0] == n and c is not None:
            return koila.lazy(c)
        return c

    return tree_map(copy, value), leaves


def outputs(out):
    return [t for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor)]


def run(op, sample, n, lazily):
    torch.manual_seed(0)
    (inp, args, kwargs), leaves = fresh((sample.input, sample.args, sample.kwargs), n, lazily)
    out = sample.output_process_fn_grad(op(inp, *args, **kwargs))
    flat = outputs(out)
    differentiable = [t for t in flat if t.requires_grad]
    if differentiable and leaves:
        total = sum(
            ((t.abs() if t.is_complex() else t) * 0.5).square().sum() for t in differentiable
        )
        total.backward()
    values = [koila.run(t).detach() for t in flat]
    grads = [leaf.grad for leaf in leaves]
    return values + grads


def coarsest(sample, expected):
    """What the numbers of this sample can be compared to: the machine epsilon of the coarsest dtype
    among what goes in and comes out, and the largest number there; None where all is float64.
    (`cfloat` and a `cov` with float32 weights have float64 results that were float32 on the
    way.)"""
    there = [
        t.detach()
        for t in outputs((sample.input, sample.args, sample.kwargs)) + outputs(expected)
        if t.is_floating_point() or t.is_complex()
    ]
    eps = max((torch.finfo(t.dtype).eps for t in there), default=0)
    if eps <= torch.finfo(torch.float64).eps:
        return None
    sizes = [
        t.to_dense().abs() if t.layout is not torch.strided else t.abs() for t in there if t.numel()
    ]
    return eps, max(float(s[s.isfinite()].max()) if s.isfinite().any() else 0.0 for s in sizes)


def differ(expected, got, coarse=None):
    if len(expected) != len(got):
        return f"{len(got)} results for {len(expected)}"
    for i, (e, g) in enumerate(zip(expected, got)):
        if e is None or g is None:
            if (e is None) != (g is None) and not (torch.count_nonzero(e if g is None else g) == 0):
                return f"result {i}: one is None"
            continue
        if e.shape != g.shape or e.dtype != g.dtype:
            return f"result {i}: {g.dtype}{list(g.shape)} for {e.dtype}{list(e.shape)}"
        if e.layout is not torch.strided or e.numel() == 0:
            continue
        if not (e.is_floating_point() or e.is_complex()):
            if not torch.equal(e, g):
                return f"result {i}: not equal"
            continue
        e, g = (
            torch.view_as_real(t.resolve_conj().resolve_neg()) if t.is_complex() else t
            for t in (e, g)
        )
        scale = float(e[e.isfinite()].abs().max()) if e.isfinite().any() else 1.0
        tol = (
            TOL * max(scale, 1e-3) if coarse is None else COARSE * coarse[0] * max(coarse[1], 1e-3)
        )
        if not torch.allclose(e, g, rtol=0, atol=tol, equal_nan=True):
            return (
                f"result {i}: off by {float((e - g).abs().nan_to_num().max()):.3g} of {scale:.3g}"
            )
    return None


def nudged(sample, eps):
    """The sample with its coarse numbers moved by a rounding of theirs, up and down in turn."""

    def move(t):
        if not isinstance(t, torch.Tensor) or not t.is_floating_point():
            return t
        if torch.finfo(t.dtype).eps < eps or t.layout is not torch.strided or not t.numel():
            return t
        moved = t.detach().clone()
        moved.view(-1)[::2] *= 1 + eps
        moved.view(-1)[1::2] *= 1 - eps
        return moved.requires_grad_(t.requires_grad)

    out = copy.copy(sample)
    out.input, out.args, out.kwargs = tree_map(move, (sample.input, sample.args, sample.kwargs))
    return out


def is_rounding(op, sample, n, expected, got, coarse):
    """Do the results differ by no more than eager's own do, when a coarse input is moved by a
    rounding? (A gradient that is zero but for rounding: `cov` of two samples by float32
    weights.)"""
    if coarse is None:
        return False
    moved = run(op, nudged(sample, coarse[0]), n, False)
    for e, g, m in zip(expected, got, moved):
        if e is None or g is None or not (e.is_floating_point() or e.is_complex()):
            if differ([e], [g]) is not None:
                return False
        elif not float((e - g).abs().max()) <= COARSE * float((e - m).abs().max()):
            return False
    return True


def one(op, sample, kinds):
    t = first_batched(sample)
    if t is None:
        return "skipped", "no batch"
    n = t.shape[0]
    try:
        expected, again = run(op, sample, n, False), run(op, sample, n, False)
    except Exception as e:
        return "skipped", f"eager: {type(e).__name__}"
    torch.rand(3)
    coarse = coarsest(sample, expected)
    # empty tensors show old contents of memory, so they count as random
    random = differ(expected, again, coarse) is not None or "empty" in op.name
    if not random:
        seed, torch.manual_seed = torch.manual_seed, lambda s: None
        try:
            random = differ(expected, run(op, sample, n, False), coarse) is not None
        except Exception:
            random = True
        finally:
            torch.manual_seed = seed
    for kind in kinds:
        if kind == "ragged" and n < 3:
            continue
        try:
            with koila.micro_batch(rows(kind, n)):
                got = run(op, sample, n, True)
        except koila.KoilaError as e:
            return "refused", f"{type(e).__name__}: {str(e).splitlines()[0][:160]}"
        except Exception as e:
            return (
                "raised",
                f"{kind}: {type(e).__name__}: {str(e).splitlines()[0][:160] if str(e) else ''}",
            )
        if random:
            if [getattr(e, "shape", None) for e in expected] != [
                getattr(g, "shape", None) for g in got
            ]:
                return "wrong", f"{kind}: shapes differ"
        elif (why := differ(expected, got, coarse)) is not None and not is_rounding(
            op, sample, n, expected, got, coarse
        ):
            return "wrong", f"{kind}: {why}"
    return ("random" if random else "same"), ""


RANK = ["skipped", "same", "random", "refused", "raised", "wrong"]


def main(shard, n_shards, n_samples, kinds, start=0):
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    mine = op_db[shard::n_shards]
    for i, op in enumerate(mine[start:], start):
        name = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
        print(json.dumps({"begin": i, "op": name}), flush=True)
        worst, why = "skipped", "no float64"
        if torch.float64 in op.supported_dtypes(DEVICE):
            grad = op.supports_autograd and torch.float64 in op.supported_backward_dtypes(DEVICE)
            try:
                samples = list(
                    s
                    for _, s in zip(
                        range(4 * n_samples),
                        op.sample_inputs(DEVICE, torch.float64, requires_grad=grad),
                    )
                )
            except Exception as e:
                samples, why = [], f"no samples: {type(e).__name__}"
            cut = [s for s in samples if first_batched(s) is not None]
            for s in cut[:: max(1, math.ceil(len(cut) / n_samples))]:
                outcome, reason = one(op, s, kinds)
                if RANK.index(outcome) > RANK.index(worst) or worst == "skipped":
                    worst, why = outcome, reason
        print(json.dumps({"end": i, "op": name, "outcome": worst, "why": why}), flush=True)


if __name__ == "__main__":
    main(
        int(sys.argv[1]),
        int(sys.argv[2]),
        int(sys.argv[3]),
        sys.argv[4].split(","),
        int(sys.argv[5]) if len(sys.argv) > 5 else 0,
    )
    # Torch's thread of a GPU lets go of the last backward after that has returned, and needs the
    # GIL for it: where the interpreter ends meanwhile, the process aborts, in eager too.
    sys.stdout.flush()
    os._exit(0)

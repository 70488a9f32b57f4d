"""Eager PyTorch is the oracle: the same program is run plain and through `lazy()`, from identical
copies and seeds, and everything it leaves is compared.

A program is a function of one argument, `wrap`: it gives its batch through `wrap(...)` (nothing, or
`lazy`), and returns a dict of what it computed. `compare()` makes such a program from a model, a
batch and a loss.

Tolerance: |a - b| ≤ tol × scale, where scale is the largest entry of the eager tensor. A tensor
that is mathematically zero (the bias before a softmax over keys, before a batch norm) holds
rounding noise only, which no two orders of summation share; the floor of the scale is 1e-3 × the
largest entry of all tensors of the same kind ("grad", "value").
"""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
import textwrap

import torch

import koila
from koila import _core, lazy

WHOLE, EVEN, RAGGED, ONE = "whole", "even", "ragged", "one"
SLICES = (WHOLE, EVEN, RAGGED, ONE)
# compare() cuts along other dimensions of the batch than its rows
OTHER_AXES = os.environ.get("KOILA_OTHER_AXES") == "1"


def rows(kind, batch):
    """Slice sizes of each kind. Ragged: more than one slice and the last one smaller."""
    if kind == WHOLE:
        return batch
    if kind == ONE:
        return 1
    if kind == EVEN:
        return max(d for d in range(1, batch) if batch % d == 0)
    sizes = [d for d in range(2, batch) if batch % d]
    return sizes[len(sizes) // 2]


def random_state():
    """The state of every generator that a program without one of its own draws from."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.cat([torch.get_rng_state(), *(s.cpu() for s in gpus)])


def plain(x):
    """A detached copy that no later step can change."""
    x = koila.run(x) if isinstance(x, torch.Tensor) else torch.as_tensor(x)
    return x.detach().clone()


def written_buffers(model):
    """Names and buffers as they are now. To read a batch norm's in a step that has not run computes
    its statistics, see python/koila/_statistics.py; here they are only looked at."""
    seen = set()
    for path, module in model.named_modules():
        buffers = module.__dict__.get("_buffers")
        if buffers is None:  # a scripted module
            buffers = dict(module.named_buffers(recurse=False))
        for name, b in getattr(buffers, "own", buffers).items():
            if b is not None and b not in seen:
                seen.add(b)
                yield f"{path}.{name}" if path else name, b


def model_state(model, grads=True):
    """Everything a step leaves in a model, by name."""
    out = {}
    for name, p in model.named_parameters():
        if grads:
            out[f"grad:{name}"] = None if p.grad is None else plain(p.grad)
            assert p.grad is None or type(p.grad) in (torch.Tensor, torch.nn.Parameter), (
                f"{name}.grad is a {type(p.grad).__name__}"
            )
        out[f"value:param {name}"] = plain(p)
    for name, b in written_buffers(model):
        assert not isinstance(b, koila.LazyTensor), f"buffer {name} stayed lazy"
        out[f"value:buffer {name}"] = plain(b)
    return out


def assert_same(expected, got, tol, what=""):
    """Both dicts hold the same names and, within `tol` (0: to the bit), the same numbers."""
    assert list(expected) == list(got), f"{what}: names differ: {set(expected) ^ set(got)}"
    top = {}
    for name, t in expected.items():
        if t is not None and t.numel() and (t.is_floating_point() or t.is_complex()):
            finite = t[t.isfinite()].abs()
            kind = name.split(":")[0]
            top[kind] = max(top.get(kind, 0.0), float(finite.max()) if finite.numel() else 0.0)
    for name, e in expected.items():
        g = got[name]
        where = f"{what}: {name}"
        if e is None or g is None:
            assert e is None and g is None, (
                f"{where}: expected {'none' if e is None else 'a tensor'}, got "
                f"{'none' if g is None else 'a tensor'}"
            )
            continue
        assert e.shape == g.shape, f"{where}: shape {tuple(g.shape)} for {tuple(e.shape)}"
        assert e.dtype == g.dtype, f"{where}: dtype {g.dtype} for {e.dtype}"
        if tol == 0 or not (e.is_floating_point() or e.is_complex()):
            same = torch.equal(e, g) or (
                e.is_floating_point()
                and torch.equal(e.isnan(), g.isnan())
                and torch.equal(e.nan_to_num(), g.nan_to_num())
            )
            if not same:
                apart = (e.to(torch.float64) - g.to(torch.float64)).abs()
                largest = float(apart.max()) if e.numel() else 0
                raise AssertionError(f"{where}: not bit-equal, largest difference {largest:.3g}")
            continue
        assert torch.equal(e.isfinite(), g.isfinite()), f"{where}: other entries are finite"
        assert torch.equal(e.isnan(), g.isnan()), f"{where}: other entries are NaN"
        e, g = (torch.where(t.isfinite(), t, torch.zeros_like(t)) for t in (e, g))
        if e.numel():
            scale = max(float(e.abs().max()), 1e-3 * top.get(name.split(":")[0], 0.0), 1e-300)
            error = float((e - g).abs().max()) / scale
            assert error <= tol, f"{where}: relative error {error:.3g} > {tol:.0e}"


def compare_programs(
    program,
    batch_size,
    slices=SLICES,
    tol=1e-12,
    tol_whole=0.0,
    split=True,
    gather_bytes_per_row=None,
    rng=True,
    batch=0,
    tamper=None,
):
    """Run `program` plain, then lazily for each kind of slice, and compare what it returns.

    split: the last step really was cut. gather_bytes_per_row: no gather above so many bytes a row
    (None: not looked at).
    rng: the generator's state afterwards is eager's. tamper: a planted fault, applied to the lazy
    result.
    """
    torch.manual_seed(1234)
    expected = program(lambda *v: v[0] if len(v) == 1 else v)
    state = random_state()
    if OTHER_AXES:
        compare_along_other(program, expected, state if rng else None, max(tol, 1e-12), batch)
        return expected
    for kind in slices:
        n = rows(kind, batch_size)
        torch.manual_seed(1234)
        with koila.micro_batch(n):
            got = program(lambda *v: lazy(*v, batch=batch))
        what = f"slices of {n} ({kind})"
        if tamper:
            got = tamper(got)
        assert_same(expected, got, tol_whole if kind == WHOLE else tol, what)
        if rng:
            assert torch.equal(state, random_state()), (
                f"{what}: the user's random state differs from eager's"
            )
        plan = koila.last_plan()
        assert plan is not None, f"{what}: no step ran"
        if split:
            assert plan.n_micro_batches == math.ceil(batch_size / n), (
                f"{what}: ran as {plan.n_micro_batches} slices"
            )
        if gather_bytes_per_row is not None:
            big = [g for g in plan.gathers if g.n_bytes > gather_bytes_per_row * batch_size]
            assert not big, f"{what}: gathered {big}"
    return expected


def compare_along_other(
    program, expected, state, tol, batch=0, sizes=(1, 2, 5), tamper=None, axes="other"
):
    """The same along another dimension of the batch, in slices of so many of its entries; the rows
    where it has none. "both": row by row, and along another dimension in each row. How many of the
    steps were cut along another one."""
    n_along = 0
    for n in sizes:
        torch.manual_seed(1234)
        with Cut(n, axes):
            got = program(lambda *v: lazy(*v, batch=batch))
        what = f"slices of {n} along another axis, {axes}"
        assert_same(expected, tamper(got) if tamper else got, tol, what)
        assert state is None or torch.equal(state, random_state()), f"{what}: random state"
        plan = koila.last_plan()
        cut = plan is not None and plan.axis is not None
        n_along += cut and (axes == "other" or plan.n_micro_batches > 1)
    return n_along


class Cut:
    """Another dimension is cut, in slices of `n` entries, whatever fits: of all rows, or of one row
    at a time (`axes` "both")."""

    def __init__(self, n, axes="other"):
        self.n, self.axes = n, axes

    def __enter__(self):
        self.before = _core.configure(micro_batch=self.n, axes=self.axes)

    def __exit__(self, *exc):
        _core.configure(micro_batch=self.before["micro_batch"], axes=self.before["axes"])


def step_program(make_model, make_batch, loss_fn, optimizer=None):
    """One forward and backward: loss, gradients, buffers, and the inputs, which must be
    untouched."""

    def program(wrap):
        torch.manual_seed(7)
        model = make_model()
        values = make_batch()
        given = copy.deepcopy(values)
        wrapped = wrap(*values)
        wrapped = wrapped if isinstance(wrapped, tuple) and len(values) > 1 else (wrapped,)
        loss = loss_fn(model, *wrapped)
        loss.backward()
        out = {"loss:loss": plain(loss), **model_state(model)}
        if optimizer is not None:
            optimizer(model.parameters()).step()
            out |= {"after:" + k: v for k, v in model_state(model, grads=False).items()}
        for i, (a, b) in enumerate(zip(given, values)):
            for j, (ta, tb) in enumerate(zip(tensors(a), tensors(b), strict=True)):
                out[f"input:{i}.{j}"] = tb.detach().clone()
                assert torch.equal(ta, tb), "an input was written"
        return out

    return program


def tensors(value):
    out = []
    koila._lazy.tree_map(lambda t, d, w: out.append(t) or t, value)
    return out


def batch_rows(values):
    return tensors(values)[0].shape[0]


def compare(make_model, make_batch, loss_fn, slices=SLICES, tol=1e-12, optimizer=None, **options):
    torch.manual_seed(0)
    n = batch_rows(make_batch())
    return compare_programs(
        step_program(make_model, make_batch, loss_fn, optimizer), n, slices, tol, **options
    )


# ---- fresh processes


def rendezvous():
    """The environment in which processes of torch.distributed find each other: some builds of torch
    are without the default way, libuv."""
    try:
        torch.distributed.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False, use_libuv=True)
    except RuntimeError:
        return {"USE_LIBUV": "0"}
    return {}


# A GPU's kernels may add in another order each time, or in slices; the simulated device's do not.
REAL_GPU = os.environ.get("KOILA_DEVICE") == "cuda" and "(fake)" not in torch.cuda.get_device_name()


def torch_version():
    """(major, minor)"""
    return tuple(int(n) for n in torch.__version__.split(".")[:2])


# A step that is not cut runs eager's kernels and gives eager's bits, but for batch norm in training
# on a GPU: eager runs cuDNN's, koila torch's own.
WHOLE_BATCH_NORM = 1e-12 if REAL_GPU else 0


# Torch's thread of a GPU lets go of the last backward after that has returned, and needs the GIL
# for it: where the interpreter ends meanwhile, the process aborts, in eager too.
AT_REST = """
import sys, time
if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
    time.sleep(0.2)
"""


def run_python(code, timeout=300, check=True, env=None, args=()):
    """Run `code` in a fresh interpreter; its output. One thread, so that memory and bits are the
    same each time. The interpreter ends when a GPU's thread is at rest."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    here = os.path.dirname(os.path.abspath(__file__))
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [here, environment.get("PYTHONPATH", "")])
    )
    p = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code) + AT_REST, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
    )
    if check:
        assert p.returncode == 0, f"rc {p.returncode}\n{p.stdout}\n{p.stderr}"
    return p.stdout if check else p

"""Habits of other versions of torch, put upon this one. Whole suites with another torch: the table
in the README."""

import pytest
import torch
from helpers import run_python

from koila._shapes import shape

# A stash of torch 2.11 keeps no reference of its own, and lets go of one when it is replaced.
OLD_STASH = """
import ctypes
stash = torch._C._stash_obj_in_tls
probe, n_stashed = [], 0
stash("probe", probe)
keeps = sys.getrefcount(probe) == 3
if not keeps:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
def old_stash(key, o):
    global n_stashed
    stash(key, o)
    if key.startswith("koila"):
        n_stashed += 1
        if keeps:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(o))
torch._C._stash_obj_in_tls = old_stash
remove = vars(torch._C).pop("_remove_obj_from_tls", None)
import koila
koila.lazy(torch.ones(1))
if remove:
    torch._C._remove_obj_from_tls = remove
"""

# Whose backward it is is stashed for the threads of an accelerator's devices: as if there were one.
ACCELERATOR = """
import sys, torch
torch.accelerator.device_count = lambda: 1
"""

STEPS = """
import koila
from koila import _core
x, w = torch.randn(8, 4), torch.randn(4, 4, requires_grad=True)
def step():
    with koila.micro_batch(2):
        (koila.lazy(x) @ w).square().mean().backward()
step()
context = _core.context()
step()
before = sys.getrefcount(context)
for _ in range(20):
    step()
print(sys.getrefcount(context) - before)
"""


@pytest.mark.parametrize("stash", ["", OLD_STASH], ids=["own", "taken"])
def test_references_to_what_is_stashed_are_even(stash):
    told = "print(n_stashed > 40)" if stash else "print(True)"
    assert run_python(ACCELERATOR + stash + STEPS + told).split() == ["0", "True"]


def test_wrapped_attributes_tell_whose_they_are():
    """The compiler of torch 2.11 asks that of every accessor, when it is imported."""
    code = """
import torch
from torch.overrides import get_default_nowrap_functions as accessors
def told():
    accessors.cache_clear()
    return sorted((f.__self__.__name__, f.__self__.__objclass__.__name__) for f in accessors())
before = told()
import koila
koila.lazy(torch.ones(2))
print(type(torch.Tensor.grad) is not type(torch._C.TensorBase.grad), told() == before)
print(torch.Tensor.data.__name__, torch.Tensor.data.__objclass__.__name__)
"""
    assert run_python(code).split() == ["True", "True", "data", "TensorBase"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_attention_on_the_cpu_is_recorded_in_the_types_of_its_kernel(dtype):
    """The shape function of torch 2.11 has another type for the sums of doubles."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    q = torch.randn(1, 2, 5, 8, dtype=dtype, device="cpu")
    found = [t.dtype for t in attention(q, q, q)]
    assert [meta[0] for _, meta in shape(attention, (q, q, q), {})[1]] == found

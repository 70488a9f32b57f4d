"""A lazy result has the strides that the kernel gives it, of whatever layouts its inputs are. Where
they differ the run copies, and a kernel that is chosen by layout rounds otherwise."""

import itertools
import os
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import koila
from koila import _shapes, lazy

with open(os.path.join(os.path.dirname(__file__), "../../src/graph/ops.def")) as ops:
    OPERATORS = re.findall(r'KOILA_OP\("aten::([\w.]+)"', ops.read())
NUMBERS = {"number": 2, "int": 0, "float": 0.5, "bool": False}
LAYOUTS = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "expanded": lambda x: x[:, :, :1, :1].expand(x.shape),
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
}
# Copied by the run: results that few programs read, or that a random call makes. (Torch 2.12 has a
# contiguous `zero`, which nobody calls.)
OTHERWISE = {"log_sigmoid_forward", "native_dropout_backward", "rrelu_with_noise_backward", "zero"}


def calls_of(name, width):
    """Calls of an operator of up to three tensors, in all layouts: (layouts, function, tensors)."""
    base, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
    if op is None or any(a.alias_info for a in op._schema.arguments):
        return
    given = [a for a in op._schema.arguments if not (a.kwarg_only or a.has_default_value())]
    types = [str(a.type) for a in given]
    if not 1 <= types.count("Tensor") <= 3 or not {*types} <= {*NUMBERS, "Tensor"}:
        return

    def call(*tensors):
        left = iter(tensors)
        return op(*(next(left) if t == "Tensor" else NUMBERS[t] for t in types))

    for layouts in itertools.product(LAYOUTS, repeat=types.count("Tensor")):
        yield layouts, call, [LAYOUTS[way](torch.rand(4, 6, 2, width) + 0.5) for way in layouts]


def strides_of(results):
    results = results if isinstance(results, (tuple, list)) else [results]
    return [r.stride() for r in results if isinstance(r, torch.Tensor) and r.dim() > 1]


def differing(names, width=3):
    """(operator, layouts, the kernel's strides, the lazy result's); how many calls were made."""
    found, n_calls = [], 0
    for name in names:
        for layouts, call, tensors in calls_of(name, width):
            try:
                real = strides_of(call(*tensors))
            except (RuntimeError, NotImplementedError, IndexError):
                break  # torch has no kernel for these
            told = strides_of(call(lazy(tensors[0]), *tensors[1:]))
            n_calls += 1
            if told != real:
                found.append((name, layouts, real, told))
    return found, n_calls


@pytest.mark.about_the_cpu("calls all operators, also those that no simulated kernel can run")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_results_are_laid_out_as_kernels_do():
    found, n_calls = differing(n for n in OPERATORS if n not in OTHERWISE)
    assert not found
    assert n_calls > 1000


def test_results_are_laid_out_by_the_operands_that_are_named():
    found, n_calls = differing(
        f"{op._schema.name.removeprefix('aten::')}.{op._schema.overload_name}".rstrip(".")
        for op in _shapes._laid_out_by
    )
    assert not found
    assert n_calls > 200


def test_a_shape_function_of_torch_is_seen_to_differ(monkeypatch):
    """The checker's planted fault."""
    monkeypatch.delitem(_shapes._laid_out_by, torch.ops.aten.hardswish_backward.default)
    found, _ = differing(["hardswish_backward"], width=7)  # shapes are asked for once
    assert ("contiguous", "channels last") in [layouts for _, layouts, _, _ in found]


@pytest.mark.parametrize("activation", [nn.Hardswish, nn.ReLU6, nn.ELU, nn.Softplus, nn.LeakyReLU])
def test_channels_last_images_with_a_contiguous_gradient_are_eager_s_to_the_bit(activation):
    """A mean over an image gives a contiguous gradient; batch norm sums in the order of memory."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 64, 1), nn.BatchNorm2d(64), activation(), nn.Conv2d(64, 8, 1))
    net = net.to(memory_format=torch.channels_last)
    x = torch.randn(6, 3, 4, 4).contiguous(memory_format=torch.channels_last)

    def gradients(wrap):
        net.zero_grad()
        F.mse_loss(net[:3](wrap(x)).mean((2, 3)), torch.zeros(6, 64)).backward()
        return [p.grad.clone() for p in net[:3].parameters()]

    eager = gradients(lambda x: x)
    with koila.micro_batch(6), koila.step_aside(False):
        ours = gradients(lazy)
    assert all(torch.equal(a, b) for a, b in zip(eager, ours))

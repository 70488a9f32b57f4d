"""Recorded calls go through torch's C ABI where they can. Claims: the results are those of torch's
own Python call, to the bit; what fails there raises torch's own exception."""

import threading
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from zoo import MLP, ConvNet, Recurrent, ce, gpt2, images, rows_of, tokens

import koila
from koila import _core
from koila._torch import VERSION

pytestmark = pytest.mark.skipif(VERSION < (2, 13), reason="torch's C ABI lacks what calls need")


@pytest.fixture(autouse=True)
def every_step_is_recorded():
    with koila.step_aside(False):
        yield
    _core.direct_calls(True)


def lm(model, ids):
    return model(input_ids=ids, labels=ids).loss


MODELS = {
    "mlp": (MLP, rows_of(5), ce),
    "batch norm": (lambda: ConvNet(nn.BatchNorm2d), images(), ce),
    "gpt2": (gpt2, tokens(), lm),
    "lstm": (lambda: Recurrent(nn.LSTM), rows_of(4, 5), ce),
}


def gradients(make, data, loss, may, rows):
    """(gradients of the third of three steps, calls that went through the ABI)"""
    torch.manual_seed(0)
    model, batch = make().double(), data()
    before = _core.direct_calls(may)
    for _ in range(3):
        model.zero_grad()
        given = koila.lazy(*batch)
        with koila.micro_batch(rows):
            loss(model, *(given if len(batch) > 1 else (given,))).backward()
    return [p.grad for p in model.parameters()], _core.direct_calls(may) - before


@pytest.mark.parametrize("rows", [None, 2])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_calls_from_python(name, rows):
    expected, n_none = gradients(*MODELS[name], False, rows)
    got, n = gradients(*MODELS[name], True, rows)
    assert n_none == 0 and n > 10
    for a, b in zip(expected, got, strict=True):
        assert torch.equal(a, b)


CALLS = {
    "ints": lambda x: x.sum((0, 2), keepdim=True),
    "a dtype": lambda x: x.sum(1, dtype=torch.float64),
    "a dtype that is needed": lambda x: F.log_softmax(x, 1, dtype=torch.float64),
    "tensors": lambda x: torch.cat([x, x * x, x], 1),
    "absent ones": lambda x: F.conv1d(x, torch.ones(2, 4, 3), padding=1),
    "an optional tensor": lambda x: F.conv1d(x, torch.ones(2, 4, 3), torch.ones(2), stride=2),
    "indices": lambda x: x[:, torch.tensor([1, 0, 3])],
    "a float": lambda x: F.layer_norm(x, (5,), eps=0.25),
    "flags": lambda x: x.var(1, unbiased=False),
    "several results": lambda x: x.max(1),
    "a list of results": lambda x: x.split([1, 3], 1),
    "a device and a layout": lambda x: x + x.new_zeros(4, 5, device=x.device, layout=torch.strided),
    "a scalar": lambda x: x.clamp(-0.5, 0.5) + x.add(x, alpha=3),
    "numbers in place of tensors": lambda x: x * 2.5 - 1,
}


@pytest.mark.parametrize("name", CALLS)
def test_each_form_of_argument_comes_through(name):
    torch.manual_seed(0)
    for k in range(3):
        x = torch.randn(6, 4, 5)
        expected, got = CALLS[name](x), CALLS[name](koila.lazy(x))
        tensors = [expected] if isinstance(expected, torch.Tensor) else list(expected)
        found = [got] if isinstance(got, torch.Tensor) else list(got)
        for a, b in zip(tensors, found, strict=True):
            b = b.torch()
            assert torch.equal(a, b) and a.dtype == b.dtype and a.stride() == b.stride(), k


# All of these go through the ABI, of the others none.
FILLED = {
    "a memory format": lambda x: x.contiguous(memory_format=torch.channels_last),
    "a format that is kept": lambda x: x.clone(memory_format=torch.preserve_format),
    "zeros": lambda x: x.new_zeros(3, 2),
    "ones": lambda x: x.new_ones(3, 2, dtype=torch.int16),
    "true": lambda x: x.new_full((3,), True, dtype=torch.bool),
    "one, in another dtype": lambda x: x.new_full((2, 1), 1, dtype=torch.float64),
}
OTHERS = {
    "two": lambda x: x.new_full((3,), 2.0),
    "less than zero": lambda x: x.new_full((3,), -0.0),
    "not a number": lambda x: x.new_full((3,), float("nan")),
}


@pytest.mark.parametrize("name", [*FILLED, *OTHERS])
def test_filled_and_laid_out_tensors_are_torchs(name):
    call = {**FILLED, **OTHERS}[name]
    torch.manual_seed(0)
    for again in (False, True, True):  # a signature goes there when it is called again
        x = torch.randn(2, 3, 4, 5)
        expected = call(x) * 1  # which has a scalar
        before = _core.direct_calls(True)
        got = koila.run(call(koila.lazy(x)) * 1)
        n = _core.direct_calls(True) - before
        assert got.dtype == expected.dtype and got.stride() == expected.stride()
        bits = {4: torch.int32, 8: torch.int64}.get(expected.element_size(), expected.dtype)
        assert torch.equal(got.view(bits), expected.view(bits))
        assert n == (name in FILLED) or not again


@pytest.mark.about_the_cpu("on a GPU a kernel would assert")
def test_an_error_is_torchs_own():
    table = torch.randn(5, 3, requires_grad=True)

    def step(ids):
        F.embedding(koila.lazy(ids), table).square().sum().backward()

    for _ in range(3):
        step(torch.tensor([1, 4, 2]))
    bad = torch.tensor([1, 5, 2])
    with pytest.raises(IndexError) as expected:
        F.embedding(bad, table)
    with pytest.raises(IndexError) as got:
        step(bad)
    assert str(got.value) == str(expected.value)
    before = _core.direct_calls(True)
    step(torch.tensor([1, 4, 2]))
    assert _core.direct_calls(True) > before


def test_functions_of_torch_stay_on_outside():
    """The executor tells torch that the next call's arguments need not be looked through."""

    class Seen(torch.overrides.TorchFunctionMode):
        n = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            Seen.n += 1
            return func(*args, **(kwargs or {}))

    net = nn.Linear(3, 2)
    for _ in range(3):
        net(koila.lazy(torch.randn(4, 3))).clamp(0, 1).sum().backward()
    with Seen():
        torch.ones(2) + 1
    assert Seen.n == 2
    assert not torch._C._peek_should_skip_torch_function()


@pytest.mark.about_the_cpu("a call on a GPU returns at once")
def test_other_threads_run_during_a_long_call():
    a, b = torch.randn(1400, 1400), torch.randn(1400, 1400, requires_grad=True)
    ticks, over = [], threading.Event()

    def tick():
        while not over.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.0005)

    def product():
        x = koila.lazy(a)
        with torch.no_grad():
            wanted = x @ b
            for _ in range(3):
                wanted = wanted @ b
        begun = time.perf_counter()
        koila.run(wanted)
        return begun, time.perf_counter()

    for _ in range(3):
        product()
    thread = threading.Thread(target=tick)
    before = _core.direct_calls(True)
    thread.start()
    try:
        begun, ended = product()
    finally:
        over.set()
        thread.join()
    assert _core.direct_calls(True) - before >= 4
    assert ended - begun > 0.02
    # between the calls alone there would be five
    assert sum(begun < t < ended for t in ticks) > 10

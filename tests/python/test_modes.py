"""Other people's modes and torch's settings: what is active when an operator is recorded decides
its result, once, whatever is active when it is run."""

import contextlib

import pytest
import torch
from conftest import DEVICE
from helpers import SLICES, plain, rows, run_python
from program_generator import default_dtype
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import koila
from koila import UnsupportedError, _core, lazy

B = 6


class Doubling(TorchDispatchMode):
    """Changes results: tanh is twice tanh."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.tanh.default else result


class Rounding(TorchDispatchMode):
    """Emulates a lower precision, as quantisation studies do."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            return result.to(torch.bfloat16).to(result.dtype)
        return result


class Logging(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


class Reading(Logging):
    """Reads the values of what passes."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.tanh.default:
            self.seen.append(float(result.abs().max()))
        return result


class Functions(TorchFunctionMode):
    """Changes results, and counts."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(getattr(func, "__name__", str(func)))
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.tanh else result


def step(wrap, mode, whole=True, read=False):
    """A step whose forward, and with `whole` its backward, runs in `mode`; `read`: a value is read
    in it too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Flatten())
    head = nn.Linear(12, 4)
    x = wrap(torch.randn(B, 2, 6))
    with mode:
        out = torch.tanh(head(model(x)))
        loss = out.square().mean()
        value = float(out.sum()) if read else 0.0
        if whole:
            loss.backward()
    if not whole:
        loss.backward()
    tensors = [*model.parameters(), *head.parameters()]
    return [plain(loss), torch.tensor(value), *(p.grad for p in tensors), *model.buffers()]


def same(expected, got, tol=1e-6):
    assert len(expected) == len(got)
    for e, g in zip(expected, got, strict=True):
        assert e.dtype == g.dtype and torch.allclose(e, g, rtol=tol, atol=tol), (e, g)


@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("mode", [Doubling, Rounding, Logging, Functions, Reading])
def test_a_mode_is_applied_once(mode, whole, slices):
    expected = step(lambda t: t, mode(), whole, read=True)
    with koila.micro_batch(rows(slices, B)):
        got = step(lazy, mode(), whole, read=True)
    # what is rounded in slices is added in another order
    same(expected, got, 1e-6 if mode is not Rounding or slices == "whole" else 2e-2)


def test_a_mode_that_is_applied_in_the_run_too_would_be_noticed():
    """In a fresh process, because the executor looks its functions up once."""
    said = run_python(
        """
        import koila, koila._run, test_modes
        class Stays:
            back = staticmethod(lambda: None)
        koila._run.ModesAside = Stays
        expected = test_modes.step(lambda t: t, test_modes.Doubling())
        got = test_modes.step(koila.lazy, test_modes.Doubling())
        print(all(e.allclose(g, atol=1e-6) for e, g in zip(expected, got)))
        """
    )
    assert said.strip() == "False"


@pytest.mark.parametrize("whole", [True, False])
def test_a_logging_mode_sees_eagers_operators(whole):
    eager, lazily = Logging(), Logging()
    step(lambda t: t, eager, whole)
    step(lazy, lazily, whole)
    assert sum(n == "aten::convolution" for n in lazily.seen) == 1
    # an attention of its own and eager's choice of a batch norm differ by name; products do not
    products = {"aten::mm", "aten::addmm", "aten::convolution", "aten::tanh", "aten::tanh_backward"}
    assert [n for n in lazily.seen if n in products] == [n for n in eager.seen if n in products]
    assert len(lazily.seen) == len(eager.seen)


def transformer(wrap):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return layer(wrap(torch.randn(B, 5, 8))).square().mean()


def convolutions(wrap):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    return net(wrap(torch.randn(B, 3, 8, 8))).square().mean()


def products(wrap):
    torch.manual_seed(0)
    w = torch.randn(4, 4, requires_grad=True)
    x = wrap(torch.randn(B, 3, 4))
    return (torch.bmm(x @ w, x.transpose(1, 2)).softmax(-1) @ x).sum()


@pytest.mark.parametrize("f", [transformer, convolutions, products])
@pytest.mark.parametrize("where", ["all", "forward", "read"])
def test_a_flop_counter_counts_eagers_flops(f, where):
    def count(wrap):
        counter = FlopCounterMode(display=False)
        counted, free = counter, contextlib.nullcontext()
        with counted if where != "read" else free:
            loss = f(wrap)
            if where == "all":
                loss.backward()
        with counted if where == "read" else free:
            float(loss)
        return counter.get_total_flops()

    expected = count(lambda t: t)
    assert (expected > 0) == (where != "read")
    for slices in SLICES:
        with koila.micro_batch(rows(slices, B)):
            assert count(lazy) == expected


def test_a_profiler_sees_what_is_recorded_and_what_is_run():
    """Of each step the forward is recorded, and the backward in the two steps until it is known."""
    from torch.profiler import ProfilerActivity, profile

    def counts(wrap, calls):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
            for _ in range(calls):
                products(wrap).backward()
        events = {e.key: e for e in p.key_averages()}
        return events["aten::bmm"], events.get("koila: run")

    products(lambda t: t).backward()  # a GPU's workspaces are made in the first call
    eager, _ = counts(lambda t: t, 5)
    _core.backwards_doubted(False)  # none is known
    recorded, run = counts(lazy, 5)
    # of a step's four, two are the forward's
    assert eager.count % (5 * (2 + 2)) == 0 and run.count == 5  # a GPU's kernel counts too
    assert recorded.count == eager.count + 5 * 2 + 2 * 2
    for memory in ("self_cpu_memory_usage", "self_device_memory_usage"):  # recording takes none
        assert getattr(recorded, memory) == getattr(eager, memory)


WHERE_DTYPE_DECIDES = {
    "sin": lambda x: x.sin(),
    "div": lambda x: x / 2,
    "mul": lambda x: x * 2.5,
    "mean": lambda x: x.float().mean(),
    "where": lambda x: torch.where(x > 4, 1.0, 0.0),
    "zeros": lambda x: torch.zeros(B, 4) + x,
    "new": lambda x: x.sigmoid().new_ones(B),
    "one_hot": lambda x: F.one_hot(x, 10).sum(1) / 3,
}


@pytest.mark.parametrize("first", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", WHERE_DTYPE_DECIDES)
def test_the_default_dtype_is_that_of_the_recording(name, first):
    """... and the same call under another one is another call."""
    f = WHERE_DTYPE_DECIDES[name]

    def program(wrap):
        out = []
        for dtype in (first, torch.float64, torch.float32, torch.float64):
            torch.manual_seed(0)
            with default_dtype(dtype):
                x = wrap(torch.randint(1, 9, (B, 4)))
                z = f(x)
            with default_dtype(torch.float64 if dtype is torch.float32 else torch.float32):
                said, value = z.dtype, koila.run(z)
            assert said is value.dtype and torch.get_default_dtype() is torch.float32
            out.append(value)
        return out

    expected = program(lambda t: t)
    for slices in SLICES:
        with koila.micro_batch(rows(slices, B)):
            same(expected, program(lazy))


def test_the_default_dtype_of_a_step_in_two_of_them():
    def program(wrap):
        x = wrap(torch.arange(B * 2).reshape(B, 2))
        w = torch.ones(2, 2, requires_grad=True)
        with default_dtype(torch.float64):
            a = x / 3
        b = x / 3
        loss = (a * (b @ w).double()).sum()
        loss.backward()
        return a, b, loss.detach(), w.grad

    expected = program(lambda t: t)
    with koila.micro_batch(4):
        same(expected, [koila.run(t) for t in program(lazy)])


def test_a_default_device_in_between_changes_nothing():
    def program(wrap):
        torch.manual_seed(0)
        lstm = nn.LSTM(4, 3, batch_first=True)
        x = wrap(torch.randn(B, 5, 4))
        h = F.dropout(lstm(x)[0], 0.5) + torch.ones(B, 5, 3)
        torch.set_default_device("meta")
        try:
            h.sum().backward()
        finally:
            torch.set_default_device(None if DEVICE == "cpu" else DEVICE)
        return [koila.run(h).detach(), *(p.grad for p in lstm.parameters())]

    with koila.micro_batch(4):
        same(program(lambda t: t), program(lazy))


def test_deterministic_algorithms_are_those_of_the_recording():
    """Asked for in the recording only: an operator that has none raises where it ran in eager, and
    asked for in the run only, none raises."""
    x = torch.randn(B, 2, 4)
    seen = []

    def looks(t):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return t * 1

    f = koila.opaque(looks)
    for on in (True, False):
        torch.use_deterministic_algorithms(on)
        try:
            z = f(lazy(x))
            del seen[:]  # its shape was found by calling it
            torch.use_deterministic_algorithms(not on)
            koila.run(z)
            assert torch.are_deterministic_algorithms_enabled() is not on
        finally:
            torch.use_deterministic_algorithms(DEVICE != "cpu", warn_only=True)
        assert seen == [on]


def test_a_value_read_in_inference_mode_is_a_normal_tensor():
    def program(wrap):
        torch.manual_seed(0)
        m, w = nn.Linear(4, 4), torch.ones(4, requires_grad=True)
        z = m(wrap(torch.randn(B, 4)))
        with torch.inference_mode():
            said = str(z.detach()), float(z.sum())
            kept = koila.run(z)
        (koila.run(z.detach()) * w).sum().backward()
        (z * z).sum().backward()
        assert not kept.is_inference()
        return said[1:], w.grad, m.weight.grad

    for e, g in zip(program(lambda t: t), program(lazy), strict=True):
        assert torch.allclose(torch.as_tensor(e), torch.as_tensor(g))


def test_grad_mode_and_autocast_are_those_of_the_recording():
    def program(wrap):
        torch.manual_seed(0)
        m = nn.Linear(4, 4)
        x = wrap(torch.randn(B, 4))
        with torch.autocast(DEVICE, torch.bfloat16):
            a = m(x)
        b = m(x)
        with torch.no_grad():
            c = m(x)
        with torch.autocast(DEVICE, torch.bfloat16), torch.no_grad():
            values = [plain(t) for t in (a, b, c)]
        with torch.autocast(DEVICE, torch.bfloat16):
            (a.float() + b).sum().backward()
        return [*values, m.weight.grad]

    same(program(lambda t: t), program(lazy), 1e-2)


def test_an_opaque_module_runs_in_the_autocast_of_its_call():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))

    def program(wrap, f):
        torch.manual_seed(0)
        net.zero_grad()
        x = wrap(torch.randn(B, 4))
        with torch.autocast(DEVICE, torch.bfloat16):
            a = f(x)
        b = f(x)
        (a.float() * b).sum().backward()
        return [plain(a), plain(b), *(p.grad.clone() for p in net.parameters())]

    with koila.micro_batch(4):
        same(program(lambda t: t, net), program(lazy, koila.opaque(net)), 1e-2)


def test_a_generator_seeded_in_between_is_the_users():
    def program(wrap):
        torch.manual_seed(0)
        z = F.dropout(wrap(torch.randn(B, 4)), 0.5)
        torch.manual_seed(77)
        a = torch.rand(3)
        return koila.run(z), a, torch.rand(3)

    with koila.micro_batch(4):
        same(program(lambda t: t), program(lazy), 0)


def test_modes_stay_on_their_stacks_whatever_happens():
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    a, b, f = Logging(), Doubling(), Functions()
    before = _get_current_function_mode_stack()  # the default device is one
    with a, b, f:
        z = torch.tanh(lazy(torch.randn(B, 4)))
        with koila.budget("1B"), pytest.raises(koila.OutOfMemory):
            koila.run(z)
        koila.run(z)
        assert _get_current_dispatch_mode_stack() == [a, b]
        assert _get_current_function_mode_stack() == [*before, f]


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_the_first_state_of_a_recurrent_layer_is_seen_by_modes(kind):
    """It is made without torch's dispatcher where nobody looks, and is the same then."""
    torch.manual_seed(0)
    layer, x = kind(4, 3, batch_first=True), torch.randn(B, 5, 4)

    class Seen(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.calls = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls.append(func)
            return func(*args, **(kwargs or {}))

    expected = layer(x)[0]
    alone = koila.run(layer(koila.lazy(x))[0])
    with Seen() as seen:
        watched = koila.run(layer(koila.lazy(x))[0])
    assert seen.calls.count(torch.ops.aten.new_zeros.default) == (2 if kind is torch.nn.LSTM else 1)
    assert torch.equal(alone, watched) and torch.equal(alone, expected)


@pytest.mark.parametrize("where", ["outside", "argument"])
@pytest.mark.parametrize("trace", ["linearize", "make_fx"])
def test_a_tracer_that_would_keep_the_batch_for_good_is_refused(trace, where):
    """Its graph took lazy tensors for constants, and gave what the first call had, or garbage."""
    w, x = torch.randn(4, 3), torch.randn(B, 4)
    batch = lazy(x)
    f, at = (lambda w: (batch @ w).tanh(), w) if where == "outside" else (lambda x: x @ w, batch)
    with pytest.raises(UnsupportedError, match=r"aten\..* is traced by make_fx .*x\.torch\(\)"):
        make_fx(f)(at) if trace == "make_fx" else torch.func.linearize(f, at)
    assert torch.equal(plain(make_fx(lambda x: x @ w)(x)(batch)), x @ w)

"""koila.compile() on a GPU: compiled loops give what their operators give, their memory is known
after a run that was measured, and a function that takes the GPU longer is dropped, without anybody
waiting. The simulated device runs no compiled kernels: there the graph that Inductor would get runs
as it is."""

import pytest
import torch
from conftest import DEVICE, simulated_device
from torch import nn
from torch.nn import functional as F

import koila
from koila import _compile, _core, _cuda, lazy

pytestmark = pytest.mark.skipif(DEVICE == "cpu", reason="test_compile.py is about the CPU")
ROWS = 13
WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")


class Instead:
    """Runs in place of what Inductor makes."""

    off = 0.0  # is added to the last sum
    error = None  # is raised
    n_calls = 0

    def compile_fx_inner(self, graph, inputs):
        def function(given):
            self.n_calls += 1
            if self.error:
                raise self.error
            results = graph(*given)
            if self.off:
                given[-1].add_(self.off)
            return results

        return function


@pytest.fixture(autouse=True)
def may_depend_on_the_clock():
    """Under deterministic algorithms, as other tests run on a GPU, nothing is compiled."""
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(True, warn_only=True)


@pytest.fixture
def instead(monkeypatch):
    _core.forget()  # plans of other tests, with their bodies
    it = Instead()
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", it.compile_fx_inner)
    return it


@pytest.fixture
def made(request):
    """Loops are what Inductor makes of them; on the simulated device, what it would be given."""
    if simulated_device():
        request.getfixturevalue("instead")
    else:
        _core.forget()


@pytest.fixture
def never_judged(monkeypatch):
    """The graph takes the simulated device longer than the operators that Inductor would fuse."""
    monkeypatch.setattr(_cuda.Clock, "seconds", lambda self: -1.0)


def mlp():
    layers = nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.LayerNorm(16)
    return nn.Sequential(*layers, nn.Linear(16, 8))


def convolutions():
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 4 * 4, 8))


def cross_entropy(out, y):
    return F.cross_entropy(out, y)


def contrastive(out, y):
    """In two loops: rows are kept in between, and all of them are needed whole."""
    a = F.normalize(out, dim=1)
    return F.cross_entropy(a @ a.t() / 0.1, torch.arange(len(out), device=out.device))


CASES = {
    "mlp": (mlp, (8,), cross_entropy),
    "contrastive": (mlp, (8,), contrastive),
    "convolutions": (convolutions, (3, 8, 8), cross_entropy),
}


class Training:
    """A model, its batch, and steps that all begin alike."""

    def __init__(self, name="mlp"):
        make, shape, self.loss = CASES[name]
        torch.manual_seed(0)
        self.model = make().double().to("cuda")
        self.batch = torch.randn(ROWS, *shape).double().cuda(), torch.randint(8, (ROWS,)).cuda()
        self.start = {k: v.clone() for k, v in self.model.state_dict().items()}

    def step(self, lazily=True):
        """The loss, gradients and buffers that a step leaves."""
        self.model.load_state_dict(self.start)
        self.model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.manual_seed(5)
        x, y = lazy(*self.batch) if lazily else self.batch
        loss = self.loss(self.model(x), y)
        loss.backward()
        left = [loss.detach(), *(p.grad for p in self.model.parameters()), *self.model.buffers()]
        return [t.clone() for t in left]

    def compiled_step(self):
        with koila.compile("on"), koila.micro_batch(4):
            found = self.step()
        assert _compile.wait(300)
        return found

    def until_compiled(self):
        """The first step whose loops are compiled."""
        for _ in range(6):
            found = self.compiled_step()
            if any(loop.compiled for loop in koila.last_plan().loops):
                return found
        raise AssertionError("no loop was compiled")


def are_alike(found, expected):
    return all(torch.allclose(f, e, 1e-12, 1e-14) for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_step_whose_loops_are_compiled_is_that_of_plain_torch(made, never_judged, name):
    training = Training(name)
    expected = training.step(lazily=False)
    assert are_alike(training.until_compiled(), expected)
    assert all(loop.compiled for loop in koila.last_plan().loops)
    assert are_alike(training.compiled_step(), expected)


def test_a_body_that_computes_something_else_is_noticed_by_these_tests(instead, never_judged):
    training = Training()
    expected = training.step(lazily=False)
    instead.off = 1e-6
    assert not are_alike(training.until_compiled(), expected)


def test_what_compiled_loops_take_is_known_after_a_run_that_raised_the_peak(made, never_judged):
    training = Training()
    training.until_compiled()
    assert koila.last_plan().predicted_uncompiled
    training.compiled_step()  # on a GPU the first run also tries kernels
    training.compiled_step()
    plan = koila.last_plan()
    assert not plan.predicted_uncompiled
    assert plan.predicted_peak_bytes == plan.measured_peak_bytes


def n_waits():
    """Of the driver's calls. Only the simulated device counts them."""
    fakecuda = simulated_device()
    return sum(fakecuda.calls().get(f, 0) for f in WAITS) if fakecuda else 0


@pytest.mark.parametrize("seconds, is_used", [(3.1, True), (4.0, False)])
def test_a_function_that_takes_longer_is_dropped_and_nobody_waits(
    instead, monkeypatch, seconds, is_used
):
    """A loop takes 3 seconds by the test's clock, `seconds` where its function runs."""
    told = []

    class Clock(_cuda.Clock):
        def __init__(self, index):
            super().__init__(index)
            self.before = instead.n_calls

        def ends(self):
            super().ends()
            told.append(seconds if instead.n_calls > self.before else 3.0)
            self.found = told[-1]

        def seconds(self):
            return self.found if super().seconds() >= 0 else -1.0

    monkeypatch.setattr(_cuda, "Clock", Clock)
    training = Training("contrastive")
    training.until_compiled()
    before = n_waits()
    for _ in range(40):
        training.compiled_step()
    used = any(loop.compiled for loop in koila.last_plan().loops)
    waits = n_waits() - before
    assert used is is_used
    n_told = len(told)
    training.compiled_step()
    assert len(told) == n_told, "one comparison is enough, or there is nothing to compare"
    before = n_waits()
    for _ in range(40):
        training.step(lazily=False)
    assert waits <= n_waits() - before


def test_where_a_function_runs_out_of_memory_the_step_runs_without_it(instead, never_judged):
    training = Training()
    expected = training.step(lazily=False)
    training.until_compiled()
    instead.error = torch.OutOfMemoryError("planted")
    assert are_alike(training.compiled_step(), expected)
    assert not any(loop.compiled for loop in koila.last_plan().loops)


def test_a_clock_tells_the_time_of_the_gpu_and_waits_for_nothing():
    clock = _cuda.Clock(torch.cuda.current_device())
    x = torch.randn(256, 256)
    for _ in range(10):
        x = x @ x
    clock.ends()
    torch.cuda.synchronize()
    assert clock.seconds() > 0

"""What a step asks of a GPU's driver where everything fits. Claims: a step that koila records, or
steps aside from, waits for the GPU and takes memory no more often than plain PyTorch's, and asks
for free memory ten times a second at most; calls through torch's C ABI are those of Python, in
numbers and in the allocator's peak, on each stream and device, in each precision."""

import functools
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import koila
from koila import _core, _cuda, lazy
from koila._torch import VERSION

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available() or "(fake)" not in torch.cuda.get_device_name(),
        reason="only the simulated device counts what is asked of it: make test-gpu",
    ),
    pytest.mark.usefixtures("no_default_device"),
]

ROWS, STEPS, WARM_UP = 12, 20, 40
# Work that is begun, and a question that takes no time.
BEGUN = {"cudaLaunchKernel", "cudaMemcpyAsync", "cudaStreamIsCapturing"}


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 10)), (8,)),
    "batch norm": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)
        ),
        (3, 8, 8),
    ),
    "dropout": (lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 10)), (8,)),
    "lstm": (Recurrent, (5, 8)),
}


@pytest.fixture(autouse=True)
def nothing_known():
    _core.forget()
    yield
    _core.direct_calls(True)


def trainer(name, device="cuda"):
    """step(lazily?) of a new model, and its model."""
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make().to(device)
    batch = torch.randn(ROWS, *shape, device=device), torch.randint(10, (ROWS,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(lazily):
        x, y = lazy(*batch) if lazily else batch
        optimizer.zero_grad()
        F.cross_entropy(model(x).float(), y).backward()
        optimizer.step()

    return step, model


def asked(step, lazily):
    """What STEPS steps ask of the driver, {function: calls}, and the seconds that they take."""
    import fakecuda

    for _ in range(WARM_UP):
        step(lazily)
    before, start = fakecuda.calls(), time.monotonic()
    for _ in range(STEPS):
        step(lazily)
    seconds = time.monotonic() - start
    return {f: n - before.get(f, 0) for f, n in fakecuda.calls().items() if f not in BEGUN}, seconds


def asked_beyond(step):
    """{function: calls} that lazy steps ask more than plain ones."""
    plain, _ = asked(step, False)
    given, seconds = asked(step, True)
    plain["cudaMemGetInfo"] = plain.get("cudaMemGetInfo", 0) + 1 + int(seconds / 0.1)
    return {f: n - plain.get(f, 0) for f, n in given.items() if n > plain.get(f, 0)}


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "aside"])
@pytest.mark.parametrize("name", MODELS)
def test_a_steady_step_asks_no_more_than_plain(name, recorded):
    step, _ = trainer(name)
    with koila.step_aside(not recorded):
        before = _core.aside()["steps"]
        assert not asked_beyond(step)
        assert (_core.aside()["steps"] > before) is not recorded


def synchronize(index):
    torch.cuda.synchronize(index)


def ask_for_free_memory(index):
    torch.cuda.mem_get_info(index)


def make_an_event(index):
    torch.cuda.Event().record()


@pytest.mark.parametrize("fault", [synchronize, ask_for_free_memory, make_an_event])
def test_a_planted_question_is_found(monkeypatch, fault):
    count = _cuda.held

    def held(index):
        fault(index)
        return count(index)

    monkeypatch.setattr(_cuda, "held", held)
    with koila.step_aside(False):
        assert asked_beyond(trainer("mlp")[0])


def test_what_torch_holds_is_that_of_now():
    """Only what others have left is remembered for a moment."""
    step, _ = trainer("mlp")
    with koila.step_aside(False):
        for _ in range(4):
            step(True)
        held = koila.last_plan().base_bytes
        more = torch.empty(1 << 20, device="cuda")
        step(True)
    assert koila.last_plan().base_bytes == held + more.nbytes


needs_abi = pytest.mark.skipif(VERSION < (2, 13), reason="torch's C ABI lacks what calls need")


def trained(name, direct, device="cuda", around=None):
    """(parameters after four steps, where generators stand, the allocator's peak beyond what was
    held, calls through the ABI)"""
    _core.forget()
    step, model = trainer(name, device)
    before = _core.direct_calls(direct)
    with koila.step_aside(False):
        for _ in range(4):
            torch.cuda.synchronize()
            held = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            with around() if around else torch.enable_grad():
                step(True)
    peak = torch.cuda.max_memory_allocated(device) - held
    state = torch.cuda.get_rng_state(device)
    n = _core.direct_calls(direct) - before
    return [*model.parameters(), *model.buffers()], state, peak, n


@functools.cache
def another_stream():
    """The same in all steps: the first product on a stream makes cuBLAS's workspace there."""
    return torch.cuda.Stream()


def on_another_stream():
    return torch.cuda.stream(another_stream())


AROUND = {
    "as it is": None,
    "another stream": on_another_stream,
    "bfloat16": lambda: torch.autocast("cuda", torch.bfloat16),
    "float16": lambda: torch.autocast("cuda", torch.float16),
}


@needs_abi
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", MODELS)
def test_direct_calls_are_those_of_python(name, around):
    expected, state, peak, none = trained(name, False, around=AROUND[around])
    got, got_state, got_peak, n = trained(name, True, around=AROUND[around])
    assert none == 0 and n > 10
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert torch.equal(state, got_state) and got_peak == peak


@needs_abi
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one device: FAKECUDA_DEVICES=2")
@pytest.mark.parametrize("name", MODELS)
def test_direct_calls_of_another_device_are_made_there(name):
    held = torch.cuda.memory_allocated("cuda:0")
    expected, state, peak, none = trained(name, False, "cuda:1")
    got, got_state, got_peak, n = trained(name, True, "cuda:1")
    assert none == 0 and n > 10 and torch.cuda.current_device() == 0
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert all(p.device.index == 1 for p in got)
    assert torch.equal(state, got_state) and got_peak == peak
    assert torch.cuda.memory_allocated("cuda:0") == held

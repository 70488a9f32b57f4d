"""On a GPU results of the forward pass may wait in host memory: the numbers are eager's to the bit,
the peak is below the budget, copies are ordered with the kernels, and what the host refuses is done
without it. The simulated device moves bytes in no time, so the tests set the price of a byte."""

import os
import subprocess
import sys

import pytest
import torch
from conftest import DEVICE
from helpers import assert_same, model_state
from memory_helpers import out_of_memory, products_without_workspace
from test_recompute import encoder, tower
from torch import nn

import koila
from koila import _core, _host_memory, lazy

pytestmark = pytest.mark.skipif(DEVICE == "cpu", reason="the CPU's memory is host memory")

FREE, DEAR = 1e-6, 1e9  # the price of a byte: less than any kernel's, more than all kernels'

MODELS = {
    "convolutions": (lambda: tower(10), (3, 32, 32)),
    "dropout": (lambda: tower(8, dropout=0.3), (3, 32, 32)),
    "batch norm": (lambda: tower(4, norm=nn.BatchNorm2d), (3, 32, 32)),
    "in place": (
        lambda: nn.Sequential(tower(4), nn.Linear(8, 8), nn.ReLU(inplace=True)).double(),
        (3, 32, 32),
    ),
    "encoder": (encoder, (64, 3)),
}


@pytest.fixture(autouse=True)
def no_library_memory(monkeypatch):
    """cuDNN's and cuBLAS's memory is not what these tests are about."""
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    with products_without_workspace():
        yield
    _host_memory._prices.clear()


class Case:
    """A model on the device, what eager leaves of a step, and the plan of the whole step."""

    def __init__(self, name, rows=1):
        make, shape = MODELS[name]
        torch.manual_seed(1)
        self.model = make().cuda()
        self.x = torch.randn(rows, *shape, dtype=torch.float64, device="cuda")
        self.start = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.expected = self.run(lambda x: x)
        self.price = None

    def run(self, wrap):
        self.model.load_state_dict(self.start)
        self.model.zero_grad(set_to_none=True)
        torch.cuda.manual_seed(3)
        self.model(wrap(self.x)).square().mean().backward()
        return model_state(self.model)

    def know(self, price):
        """Plans of this price, with what operators use inside."""
        if self.price == price:
            return
        self.price = _host_memory._prices[0] = price
        _core.forget()
        for _ in range(2):
            self.run(lazy)
        self.whole = koila.last_plan()

    def below(self, share, price=FREE, axes="batch"):
        """What a step leaves, with a budget of `share` of what the whole one needs."""
        self.know(price)
        self.model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        base = self.whole.base_bytes
        self.budget = base + int(share * (self.whole.predicted_peak_bytes - base))
        with koila.budget({"cuda": self.budget}), koila.axes(axes):
            return self.run(lazy)

    def has_changed_nothing(self):
        return all(p.grad is None for p in self.model.parameters())


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_whose_results_wait_in_host_memory_leaves_what_eager_leaves(name, rows):
    case = Case(name, rows)
    n_offloaded = 0
    for share in (0.7, 0.5, 0.35) if rows == 1 else (0.25, 0.18):
        try:
            if rows > 1:
                case.below(share)  # learns what operators use inside on one row
            got = case.below(share)
        except koila.OutOfMemory:
            continue
        plan = koila.last_plan()
        n_offloaded += plan.n_offloaded
        assert_same(case.expected, got, 1e-12 if plan.n_micro_batches > 1 else 0, f"at {share}")
        # torch rounds each block up to 512 bytes
        rounding = 512 * plan.n_recorded
        assert torch.cuda.max_memory_allocated() <= case.budget + rounding
        assert 0 <= torch.cuda.max_memory_allocated() - plan.predicted_peak_bytes <= rounding
    assert n_offloaded or rows > 1, "none ever waited there"


def pinned_so_far():
    """Bytes. (When a block is free again depends on when torch asks the copies whether they are
    done, so the most at a time would not tell.)"""
    return torch.cuda.memory.host_memory_stats()["active_bytes.allocated"]


def test_what_waits_is_told_and_is_all_that_is_pinned():
    case = Case("convolutions")
    case.know(FREE)
    pinned_before = pinned_so_far()
    case.below(0.5)
    plan = koila.last_plan()
    assert plan.n_offloaded and f"{plan.n_offloaded} values" in str(plan)
    assert plan.n_run == plan.n_recorded + plan.n_recomputed
    pinned = pinned_so_far() - pinned_before
    assert plan.offloaded_bytes <= pinned <= plan.offloaded_bytes + plan.n_offloaded


def test_the_price_of_a_byte_decides_between_copying_and_computing_again():
    case = Case("convolutions")
    case.below(0.5, FREE)
    assert koila.last_plan().n_offloaded and koila.last_plan().replay_ratio < 1.01
    case.below(0.5, DEAR)
    assert not koila.last_plan().n_offloaded and koila.last_plan().n_recomputed


def test_with_host_memory_less_fits_than_with_results_computed_again_alone():

    def least(use):
        share = 0.6
        with koila.host_memory(use):
            while share > 0.02:
                try:
                    case.below(share, 1.0)
                except koila.OutOfMemory:
                    break
                share -= 0.04
        return share

    case = Case("dropout")
    assert least("auto") < least("off")


def test_host_memory_can_be_forbidden():
    case = Case("convolutions")
    with koila.host_memory("off"):
        got = case.below(0.5)
    assert not koila.last_plan().n_offloaded and koila.last_plan().n_recomputed
    assert_same(case.expected, got, 0)
    with koila.host_memory("off"), koila.host_memory("auto"):
        case.below(0.5)
    assert koila.last_plan().n_offloaded
    with pytest.raises(ValueError, match="host_memory"):
        koila.host_memory("on")


def test_with_more_memory_nothing_waits():
    case = Case("convolutions")
    case.below(0.5)
    assert koila.last_plan().n_offloaded
    case.below(2)
    assert not koila.last_plan().n_offloaded


def test_a_smaller_budget_never_needs_more_memory_nor_less_work():
    case = Case("convolutions")
    case.know(1.0)
    peak, work = case.whole.predicted_peak_bytes + 1, 0.0
    n_budgets = 0
    for i in range(24, 2, -1):
        try:
            case.below(i / 25, 1.0)
        except koila.OutOfMemory:
            break
        plan = koila.last_plan()
        if not plan.fit["fits"]:  # segments are as large as all of this step
            continue
        n_budgets += 1
        assert plan.predicted_peak_bytes <= peak
        assert plan.replay_ratio >= work - 1e-9
        peak, work = plan.predicted_peak_bytes, plan.replay_ratio
    assert n_budgets > 10


# ---- what goes wrong


def test_refused_pinned_memory_is_replaced_by_pageable(monkeypatch):
    case, refused = Case("convolutions"), []
    empty = torch.empty_strided

    def refusing(*args, pin_memory=False, **kw):
        if pin_memory:
            refused.append(args)
            raise RuntimeError("CUDA error: out of memory")
        return empty(*args, **kw)

    monkeypatch.setattr(torch, "empty_strided", refusing)
    got = case.below(0.5)
    assert len(refused) == koila.last_plan().n_offloaded > 0
    assert_same(case.expected, got, 0)


def test_where_the_host_has_no_memory_results_are_computed_again(monkeypatch):
    case, refused = Case("convolutions"), []
    empty = torch.empty_strided

    def refusing(*args, device=None, **kw):
        if str(device) == "cpu":
            refused.append(args)
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return empty(*args, device=device, **kw)

    monkeypatch.setattr(torch, "empty_strided", refusing)
    got = case.below(0.5)
    plan = koila.last_plan()
    assert len(refused) == 2 and not plan.n_offloaded and plan.n_recomputed and plan.retries == 1
    assert_same(case.expected, got, 0)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt, ZeroDivisionError])
def test_whichever_copy_fails_a_step_is_complete_or_has_changed_nothing(monkeypatch, error):
    case = Case("dropout")
    calls, fails_at = [0], [0]
    copy = _host_memory._Way.copy

    def failing(self, to, source):
        calls[0] += 1
        if calls[0] == fails_at[0]:
            raise error("planted")
        copy(self, to, source)

    monkeypatch.setattr(_host_memory._Way, "copy", failing)
    case.below(0.45)
    n_copies = calls[0]
    assert n_copies == 2 * koila.last_plan().n_offloaded > 0
    n_raised = 0
    for at in range(1, n_copies + 1, max(1, n_copies // 12)):
        calls[0], fails_at[0] = 0, at
        try:
            got = case.below(0.45)
        except (error, koila.KoilaError) as e:
            assert error is not torch.OutOfMemoryError or out_of_memory(e)
            assert case.has_changed_nothing(), f"copy {at}: a part"
            n_raised += 1
        else:
            assert_same(case.expected, got, 0, f"copy {at}")
        fails_at[0] = 0
        assert_same(case.expected, case.below(0.45), 0, f"after copy {at}")
    assert bool(n_raised) == (error is not torch.OutOfMemoryError)


# ---- the order of copies and kernels

# torch's sanitizer of streams watches a step. Memory that is used again counts as the same memory,
# so its next user must be ordered after its last one. The executor remembers what it calls, so
# faults are planted in a process of their own, before it starts.
RACES = """
import sys
import torch
import torch.cuda._sanitizer as sanitizer
from koila import _host_memory, _run

fault = sys.argv[1]
sanitizer.EventHandler._handle_memory_allocation = lambda *a: None
sanitizer.EventHandler._handle_memory_deallocation = lambda *a: None
torch.zeros(1, device="cuda")
mode = sanitizer.CUDASanitizerDispatchMode()
find, guards = mode.event_handler._handle_kernel_launch, _run.guards
found, launched = [], []

def launch(*args):
    launched.append(1)
    found.extend(find(*args))
    return []

class Watched:
    def __init__(self):
        self.inner = guards()
        mode.__enter__()

    def __del__(self):
        mode.__exit__(None, None, None)

def unordered(self, to, source):
    with torch.cuda.stream(self.stream):
        to.copy_(source, non_blocking=True)
        self.event = self.stream.record_event()

mode.event_handler._handle_kernel_launch = launch
_run.guards = Watched
if fault == "copies wait for nothing":
    _host_memory._Way.copy = unordered
if fault == "kernels wait for no copy":
    _host_memory._Way.wait = lambda self: setattr(self, "is_coming", False)
if fault == "memory is used again at once":
    _run.PSEUDO["koila::offloaded"] = lambda h, x: h

from memory_helpers import products_without_workspace
from test_cuda_host_memory import Case, FREE
import koila
torch.backends.cudnn.enabled = False
with products_without_workspace():
    case = Case("dropout")
    del found[:], launched[:]
    case.below(0.4)
plan = koila.last_plan()
assert len(launched) >= plan.n_run + 2 * plan.n_offloaded > plan.n_run
print("races", len(found))
"""


@pytest.mark.parametrize(
    "fault",
    [
        "none",
        "copies wait for nothing",
        "kernels wait for no copy",
        "memory is used again at once",
    ],
)
def test_copies_and_kernels_are_ordered(fault):
    ran = subprocess.run(
        [sys.executable, "-c", RACES, fault],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    n_races = int(ran.stdout.split("races")[-1])
    assert bool(n_races) == (fault != "none")

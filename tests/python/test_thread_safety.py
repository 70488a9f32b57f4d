"""Threads beside each other: what one does is not seen by the others; and no moment at which Python
runs inside koila's C lets another thread, a finaliser or a hook break what is being walked."""

import contextlib
import json
import os
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

import koila
from koila import _core, lazy

HERE = os.path.dirname(os.path.abspath(__file__))
MIB = 1 << 20
ROWS, WIDTH = 64, 32
NOISE = 4096  # smaller changes are not worth a new plan

pytestmark = pytest.mark.about_the_cpu("threads of the host, and its memory")

inside = [0]  # bytes that the operator below takes for itself


@torch.library.custom_op("koila_threads::hungry", mutates_args=())
def hungry(x: torch.Tensor) -> torch.Tensor:
    held = torch.empty(inside[0] + 1, dtype=torch.uint8)
    return x * (2.0 if held.numel() else 0.0)


@hungry.register_fake
def _(x):
    return torch.empty_like(x)


@contextlib.contextmanager
def beside(work):
    """`work` runs again and again in another thread, and is known to have run."""
    stop, begun = threading.Event(), threading.Event()
    failed = []

    def loop():
        try:
            while not stop.is_set():
                work()
                begun.set()
        except BaseException as e:  # for the test to raise
            failed.append(e)
            begun.set()

    t = threading.Thread(target=loop)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    t.start()
    try:
        begun.wait()
        yield
    finally:
        stop.set()
        t.join()
        sys.setswitchinterval(before)
    if failed:
        raise failed[0]


def predicted(x):
    with torch.no_grad():
        koila.run(hungry(lazy(x)))
    return koila.last_plan().predicted_peak_bytes - koila.last_plan().base_bytes


# ---- what operators use inside


@pytest.mark.parametrize("rows", [None, 16])
def test_a_sample_that_was_too_large_heals_within_ten_steps(rows):
    _core.forget()
    x = torch.randn(ROWS, WIDTH)
    with koila.micro_batch(rows):
        predicted(x)
        usual = predicted(x)
        inside[0] = 64 * MIB
        predicted(x)
        inside[0] = 0
        after = [predicted(x) for _ in range(10)]
    assert after[0] >= 64 * MIB, "one such sample counts at first"
    assert after[-1] <= usual + NOISE


def test_what_alternates_is_not_forgotten_between():
    _core.forget()
    x = torch.randn(ROWS, WIDTH)
    found = []
    for k in range(30):
        inside[0] = 8 * MIB if k % 3 == 0 else 0
        found.append(predicted(x))
    inside[0] = 0
    assert min(found[1:]) >= 8 * MIB


def test_a_step_that_no_plan_fits_any_more_is_tried_again_within_ten_steps():
    _core.forget()
    x = torch.randn(ROWS, WIDTH)
    with koila.budget(_core.cpu_bytes_current() + 32 * MIB):
        predicted(x)
        inside[0] = 24 * MIB
        predicted(x)
        inside[0] = 0
    refused = 0
    with koila.budget(_core.cpu_bytes_current() + 16 * MIB):
        for _ in range(10):
            try:
                predicted(x)
                break
            except koila.OutOfMemory:
                refused += 1
    assert refused <= 9


def test_what_other_threads_allocate_is_not_learned():
    _core.forget()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))
    x = torch.randn(4 * ROWS, WIDTH)

    def step():
        model.zero_grad()
        model(lazy(x)).pow(2).sum().backward()
        plan = koila.last_plan()
        return plan.predicted_peak_bytes - plan.base_bytes

    with koila.micro_batch(ROWS):
        usual = [step() for _ in range(3)][-1]
        held = []

        def allocate():
            held.append(torch.empty(4 * MIB, dtype=torch.uint8))
            if len(held) > 8:
                held.clear()

        with beside(allocate):
            found = {step() for _ in range(200)}
    assert max(found) <= usual + NOISE


def test_the_peak_of_a_step_counts_what_other_threads_hold_meanwhile():
    """It is the process's, as it was: what a step's report is compared with is the budget."""
    x = torch.randn(ROWS, WIDTH)
    predicted(x)
    before = koila.last_plan().measured_peak_bytes
    inside[0] = 0
    held = torch.empty(16 * MIB, dtype=torch.uint8)
    predicted(x)
    assert koila.last_plan().measured_peak_bytes >= before + held.numel()


# ---- budgets


def test_a_budget_refuses_the_thread_that_set_it_and_no_other():
    outcome = {}

    def allocate(name):
        try:
            outcome[name] = torch.empty(64 * MIB, dtype=torch.uint8).numel()
        except RuntimeError as e:
            outcome[name] = str(e)

    with koila.budget(_core.cpu_bytes_current() + 16 * MIB):
        other = threading.Thread(target=allocate, args=("other",))
        other.start()
        other.join()
        allocate("own")
    assert outcome["other"] == 64 * MIB
    assert "can't allocate memory" in outcome["own"]


# ---- all kinds of threads at once: thread_stress.py


def stress(*arguments):
    """(the summary, the output) of thread_stress.py."""
    p = subprocess.run(
        [sys.executable, os.path.join(HERE, "thread_stress.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=3600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    lines = p.stdout.splitlines()
    assert lines, p.stderr[-2000:]
    return json.loads(lines[-1]), p.stdout

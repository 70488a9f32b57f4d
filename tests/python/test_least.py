"""What an OutOfMemory tells is missing is true: with it the step trains, and with clearly less it
does not."""

import gc

import loop_programs
import program_generator as programs
import pytest
import torch
from conftest import LONG
from long_models import MODELS
from memory_helpers import clear, installed, koila_step, only, out_of_memory
from test_scans import Step, loss_of

import koila
from koila import _core, lazy

pytestmark = [
    pytest.mark.skipif(not installed(), reason="torch's CPU memory cannot be counted here"),
    pytest.mark.about_the_cpu("its peaks are counted to the byte"),
]


def told_least(run, budget):
    """The budget that the error of `run(budget)` tells; None: it trains, or plain PyTorch was
    refused."""
    gc.collect()
    try:
        run(budget)
    except koila.OutOfMemory as e:
        return budget + e.missing_bytes
    except RuntimeError as e:
        if not out_of_memory(e):
            raise
    return None


def check(run, budget):
    """Was anything told? Then it is true, within two percent."""
    least = told_least(run, budget)
    if least is None:
        return False
    enough, less = int(1.02 * least) + 1, int(0.95 * least)
    assert told_least(run, enough) is None, (budget, least)
    assert less <= budget or told_least(run, less) is not None, (budget, least)
    return True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("samples", [1, 2] if LONG else [2])
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("mlp", "unet3d")])
def test_the_least_that_a_model_is_told_is_true(name, samples):
    make, data, loss = MODELS[name]
    torch.manual_seed(5)
    model, batch = make(), data(samples)
    start = {k: v.clone() for k, v in model.state_dict().items()}
    gradients = sum(p.nbytes for p in model.parameters())

    def run(budget):
        clear(model)
        model.load_state_dict(start)
        with only(budget):
            koila_step(model, loss, batch)

    gc.collect()
    base = _core.cpu_bytes_current()
    koila_step(model, loss, batch, 1)
    room = koila.last_plan().measured_peak_bytes - base - gradients
    assert any([check(run, int(gradients + share * room)) for share in (0.12, 0.08)])


@pytest.mark.filterwarnings("ignore")
def test_the_least_that_random_loops_over_time_are_told_is_true():
    n_told = 0
    for seed in range(200, 240 if LONG else 208):
        gc.collect()
        step = Step(lambda seed=seed: loop_programs.Model(seed), *loop_programs.sizes(seed))

        def run(budget, step=step):
            clear(step.model)
            with only(budget):
                koila_step(step.model, loss_of, step.batch)

        for share in (0.5, 0.2):
            n_told += check(run, int(step.gradients + share * step.room))
    assert n_told > 5


@pytest.mark.filterwarnings("ignore")
def test_the_least_that_random_programs_are_told_is_true(monkeypatch):
    """Without random numbers, whose generator's state is larger than all else of so small a
    step."""
    backward, kinds, n_told = torch.Tensor.backward, "vvvwwwfffmns", 0
    told = budget = None

    def within(t):
        nonlocal told
        if budget is None:
            return backward(t)
        try:
            with only(budget):
                backward(t)
        except koila.OutOfMemory as e:
            told = e.missing_bytes
            raise

    def run(n):
        nonlocal told, budget
        told, budget = None, n
        programs.run(seed, seed % 2, lazy, kinds=kinds)
        if told is not None:
            error = koila.OutOfMemory("told")
            error.missing_bytes = told
            raise error

    monkeypatch.setattr(torch.Tensor, "backward", within)
    for seed in range(9000, 9300 if LONG else 9020):
        budget = None
        with koila.micro_batch(1):
            programs.run(seed, seed % 2, lazy, kinds=kinds)
        plan = koila.last_plan()
        n_told += check(run, (plan.predicted_peak_bytes - plan.base_bytes) // 3)
    assert n_told > 3

"""The Nth allocation of a step is refused, for every N: the step ends with eager's gradients, or
raises with nothing changed."""

import traceback

import pytest
import torch
from conftest import LONG
from helpers import model_state
from memory_helpers import by_hand_step, clear, installed, koila_step, out_of_memory
from test_addends import Tied, of_tokens, texts
from test_exactness_models import lm64
from torch import nn
from torch.nn import functional as F
from zoo import MLP, ConvNet, ce, gpt2, images, rows_of, tokens

import koila
from koila import _core

pytestmark = pytest.mark.skipif(not installed(), reason="torch's CPU memory cannot be counted here")


def reading(model, x, y):
    """A loss whose step also reads two values in its middle, whole: what they left must go well."""
    with koila.micro_batch(None):
        hidden = model.layers[:3](x)
        hidden.std().item()
        loss = F.cross_entropy(model.layers[3:](hidden), y)
        loss.item()
    return loss


def reading_each_layer(model, x, y):
    """In slices what variables hold is kept: here of two layers at a time, and pieces of them."""
    h = x
    for layer in model.layers:
        before, h = h, layer(h)
        h.std().item()
        h[1].sum().item()
        before.mean().item()
    return F.cross_entropy(h, y)


def each_row(model, x, y):
    return sum(F.cross_entropy(model(row), label) for row, label in zip(x, y)) / len(x)


def each_row_read(model, x, y):
    loss = 0
    for row, label in zip(model.layers[:2](x), y):
        one = F.cross_entropy(model.layers[2:](row), label)
        loss = loss + one * (2 if one.item() > 1.4 else 1)
    return loss


def parts_joined(model, x, y):
    return F.cross_entropy(torch.cat([model(part) for part in x.split(2)]), y)


STEPS = {
    "mlp": (lambda: MLP().double(), rows_of(5), ce),
    "convnet-batchnorm": (lambda: ConvNet(nn.BatchNorm2d).double(), images(), ce),
    "gpt2": (lambda: gpt2().double(), tokens(), lm64),
    "tied": (lambda: Tied(tokens_meet=True).double(), texts, of_tokens),
    "mlp, read": (lambda: MLP().double(), rows_of(5), reading),
    "mlp, each layer read": (lambda: MLP().double(), rows_of(5), reading_each_layer),
    "each row": (lambda: MLP().double(), rows_of(5), each_row),
    "each row, read": (lambda: MLP().double(), rows_of(5), each_row_read),
    "parts, joined": (lambda: MLP().double(), rows_of(5), parts_joined),
    "infonce": (
        lambda: MLP().double(),
        rows_of(5),
        lambda m, x, y: F.cross_entropy(
            F.normalize(m(x)) @ F.normalize(m(-x)).T / 0.1, torch.arange(6)
        ),
    ),
}


def world(model):
    return {**model_state(model), "rng": torch.get_rng_state()}


@pytest.mark.about_the_cpu("it refuses allocations of the host")
@pytest.mark.parametrize("name", STEPS)
def test_every_refused_allocation_ends_well(name):
    make, data, loss = STEPS[name]
    torch.manual_seed(0)
    model, batch = make(), data()
    start = {k: v.clone() for k, v in model.state_dict().items()}
    loss(model, *batch).backward()
    expected = model_state(model)

    def fresh():
        clear(model)
        model.load_state_dict(start)

    fresh()
    koila_step(model, loss, batch, 4)  # shapes and plans are known from here on
    fresh()
    before = _core.cpu_bytes_n_allocs()
    koila_step(model, loss, batch, 4)
    n_allocs = _core.cpu_bytes_n_allocs() - before
    assert n_allocs > 10
    finished = raised = 0
    step = 1 if LONG else max(1, n_allocs // 150)
    for n in range(1, n_allocs + 2, step):
        fresh()
        state = world(model)
        _core.cpu_bytes_fail_nth(n)
        try:
            koila_step(model, loss, batch, 4)
            ok = True
        except (RuntimeError, MemoryError, koila.KoilaError) as e:
            ok = False
            if "num_batches_tracked" in "".join(traceback.format_tb(e.__traceback__)[-1:]):
                # the model's own forward failed, in plain torch, between two layers: what the
                # layers before did has happened, as in eager
                continue
            assert out_of_memory(e), f"allocation {n}: {type(e).__name__}: {e}"
        finally:
            _core.cpu_bytes_fail_nth(0)
        if ok:
            finished += 1
            got = model_state(model)
            for k, e in expected.items():
                scale = 1e-3 if k.startswith("grad") else 1e-12
                assert torch.allclose(
                    e.double(), got[k].double(), rtol=1e-10, atol=1e-10 * scale
                ), f"allocation {n} of {n_allocs}: {k} is wrong"
        else:
            raised += 1
            for k, b in state.items():
                a = world(model)[k]
                assert (a is None) == (b is None) and (b is None or torch.equal(a, b)), (
                    f"allocation {n} of {n_allocs}: {k} changed"
                )
    assert finished > 0.5 * raised, f"{finished} finished, {raised} raised"


def test_a_batch_of_a_step_that_failed_is_not_counted_and_the_next_try_is_as_the_first():
    """BatchNorm counts its batches in plain torch, in the forward; with `momentum=None` the count
    weighs the statistics."""

    def train(failures):
        torch.manual_seed(0)
        model, (x, y) = (
            nn.Sequential(
                nn.Linear(5, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 4)
            ).double(),
            rows_of(5)(),
        )
        for attempt in range(3 + failures):
            broken = attempt in (1, 2) and failures

            def hook(g, broken=broken):
                if broken:
                    raise ValueError("not today")

            handle = model[0].weight.register_hook(hook)
            try:
                # two forwards a step
                koila_step(model, lambda m, a, b: ce(m, a, b) + m(a * 2).square().mean(), (x, y), 4)
            except ValueError:
                pass
            handle.remove()
        return model_state(model)

    expected, got = train(0), train(2)
    assert int(got["value:buffer 1.num_batches_tracked"]) == 6
    assert all(torch.equal(expected[k], got[k]) for k in expected)


@pytest.mark.about_the_cpu("it refuses allocations of the host")
def test_the_hand_written_loop_would_lose_its_gradients():
    """The planted fault: the same check catches a loop that leaves half a gradient behind."""
    make, data, loss = STEPS["mlp"]
    torch.manual_seed(0)
    model, batch = make(), data()
    before = _core.cpu_bytes_n_allocs()
    by_hand_step(model, loss, batch, 2)
    n_allocs = _core.cpu_bytes_n_allocs() - before
    clear(model)
    _core.cpu_bytes_fail_nth(int(n_allocs * 0.8))
    with pytest.raises(RuntimeError):
        by_hand_step(model, loss, batch, 2)
    _core.cpu_bytes_fail_nth(0)
    assert any(p.grad is not None for p in model.parameters())

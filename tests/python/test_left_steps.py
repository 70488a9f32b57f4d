"""A step that ended in an exception is over, also while a traceback, a logger or IPython's
sys.last_value holds its tensors: the next lazy() begins another one."""

import sys

import pytest
import torch
from conftest import DEVICE
from helpers import plain, rows
from long_models import MODELS
from torch import nn

import koila
from koila import lazy

B = 6


def net():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


def batch(seed):
    return torch.randn(B, 4, generator=torch.Generator(DEVICE).manual_seed(seed))


def state(model):
    return [
        *(plain(p.grad) for p in model.parameters() if p.grad is not None),
        *(plain(b) for b in model.buffers()),
    ]


def good_step(model, x):
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return [plain(loss), *state(model)]


def same(expected, got, tol=1e-6):
    assert len(expected) == len(got)
    for e, g in zip(expected, got, strict=True):
        assert torch.allclose(e.double(), g.double(), rtol=tol, atol=tol), (e, g)


def refused_by_strict(model, x):
    with koila.strict():
        model(x).sort(0).values.square().mean().backward()


def refused_read(model, x):
    with koila.strict():
        float(model(x).sort(0).values.sum())


def out_of_memory(model, x):
    loss = model(x).square().mean()
    with koila.budget("1B"), koila.micro_batch(None):  # a GPU's budget limits plans, not slices
        loss.backward()


def stale(model, x):
    h = model(x).square().mean()
    with torch.no_grad():
        model[0].bias.add_(1.0)
        model[0].bias.sub_(1.0)
    h.backward()


def interrupted(model, x):
    loss = model(x).square().mean()
    model[3].weight.register_hook(lambda g: (_ for _ in ()).throw(KeyboardInterrupt))
    try:
        loss.backward()
    finally:
        model[3].weight._backward_hooks.clear()


LEAVES_NOTHING = {
    f.__name__: f for f in (refused_by_strict, refused_read, out_of_memory, stale, interrupted)
}


def kept_in(where):
    """Whoever holds the exception, and with it the frames and their tensors."""
    if where == "last_value":
        sys.last_value = sys.exc_info()[1]
        return None
    return sys.exc_info()


@pytest.mark.parametrize("where", ["variable", "last_value"])
@pytest.mark.parametrize("name", LEAVES_NOTHING)
@pytest.mark.parametrize("slices", ["ragged", "one"])
def test_a_step_that_failed_leaves_nothing_in_the_next(name, where, slices):
    model, other = net(), net()
    with koila.micro_batch(rows(slices, B)):
        try:
            LEAVES_NOTHING[name](model, lazy(batch(1)))
        except BaseException:  # noqa: B036
            held = kept_in(where)
        model.zero_grad()
        got = [good_step(model, lazy(batch(i))) for i in (2, 3)]
    same(got[0], good_step(other, batch(2)))
    same(got[1], good_step(other, batch(3)))
    del held
    sys.last_value = None


def test_no_tensor_made_after_a_step_that_failed_belongs_to_it():
    """A model that is built anew in the next cell of a notebook, after an OutOfMemory."""
    model, x = net(), lazy(batch(1))
    h = model(x)
    assert isinstance(torch.zeros(B, 3), koila.LazyTensor)
    with pytest.raises(RuntimeError):
        out_of_memory(model, x)
    assert type(torch.zeros(B, 3)) is torch.Tensor
    same([plain(h + torch.zeros(B, 2))], [plain(net()(batch(1)))])  # it goes on


def test_strict_accepts_the_step_after_the_one_that_it_refused():
    model, other = net(), net()
    with koila.strict(), koila.micro_batch(4):
        kept = []
        for i in range(3):
            with pytest.raises(koila.GatherError) as e:
                refused_by_strict(model, lazy(batch(1)))
            kept.append(e)
            same(good_step(model, lazy(batch(i))), good_step(other, batch(i)))
            assert koila.last_plan().n_micro_batches == 2


def test_a_users_exception_in_forward_leaves_what_eager_leaves():
    """The forward pass ran up to there: in eager its running statistics have moved."""

    class Mine(Exception):
        pass

    def program(wrap):
        model, out = net(), []
        for i in range(4):
            x = wrap(batch(i))
            try:
                if i % 2 == 0:
                    h = model[1](model[0](x))
                    raise Mine(h)
                out += good_step(model, x)
            except Mine as e:
                kept = e
        assert kept.args
        return out

    same(program(lambda t: t), program(lazy))


def test_a_read_that_failed_and_was_caught_does_not_end_the_step():
    def program(wrap, lazily):
        model = net()
        h = model(wrap(batch(1)))
        if lazily:
            with koila.strict(), pytest.raises(koila.GatherError):
                float(h.sort(0).values.sum())
        target = h.detach() * 0.5
        y = wrap(batch(2))[:, :2]
        loss = (h * y + target).square().mean()
        loss.backward()
        return [plain(loss), *state(model)]

    with koila.micro_batch(4):
        got = program(lazy, True)
        assert koila.last_plan().n_micro_batches == 2
    same(program(lambda t: t, False), got)


def test_a_failed_step_may_be_tried_again():
    model, other = net(), net()
    loss = model(lazy(batch(1))).square().mean()
    with koila.budget("1B"), pytest.raises(koila.OutOfMemory):
        loss.backward(retain_graph=True)
    loss.backward()
    same(state(model), good_step(other, batch(1))[1:])


def test_what_is_left_of_an_evaluation_does_not_stop_each_new_step():
    """Sixteen batches without a backward are run at the next lazy(). By then what their statistics
    were computed from was written: a warning, once, and no error for ever."""
    model = net()
    outs = [model(lazy(batch(i))) for i in range(16)]
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.warns(RuntimeWarning, match="running statistics"):
        x = lazy(batch(17))
    good_step(model, x)
    with pytest.raises(koila.StaleValueError):
        koila.run(outs[0])
    good_step(model, lazy(batch(18)))


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_a_plain_step_of_one_sample_goes_on_beside_an_open_step_of_its_length(name):
    """Positions from arange(n) are the open step's, so its tape records the plain one too. A
    dimension of one sample has a stride that means nothing, and shapes may be told with another."""
    make, data, loss = MODELS[name]

    def step():
        torch.manual_seed(5)
        model, values = make(), data(1)
        loss(model, *values).backward()
        return [plain(p.grad) for p in model.parameters()]

    expected = step()
    opened = lazy(*data(2))
    same(expected, step())
    del opened

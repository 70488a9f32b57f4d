"""A process that forks in the middle of a step: the child lets go of the parent's step without
effects, may use `lazy` itself, and may ask for the parent's values.

A child runs backwards where one of plain torch does. Debian's torch is built with Vulkan: it has a
device besides the CPU, autograd starts a thread for it, and from then on refuses the backwards of
forked children. There koila's children get that same error, unless the backward is known from an
earlier step and needs no autograd, and all else holds."""

import pytest
from helpers import run_python

pytestmark = pytest.mark.about_the_cpu("with a GPU torch refuses a child's backward: test_gpu.py")

PLAIN = """
import os
import torch

def backward():
    torch.ones(3, requires_grad=True).sum().backward()

backward()
pid = os.fork()
if pid == 0:
    try:
        backward()
    except RuntimeError as e:
        os._exit(7 if "fork-based" in str(e) else 3)
    except BaseException:
        os._exit(3)
    os._exit(0)
print({0: "runs", 7: "is refused"}[os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])])
"""


@pytest.fixture(scope="module")
def start():
    """START, told what becomes of a child's backward where koila is not even imported."""
    return f"is_refused = {run_python(PLAIN).strip() == 'is refused'}\n{START}"


START = """
import gc, os, sys
import torch, koila
from koila import lazy
from torch import nn

def pair():
    torch.manual_seed(7)
    model, other = (
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
        for _ in range(2)
    )
    model[1].share_memory()
    other.load_state_dict(model.state_dict())
    return model, other

def right(model, other, x, loss):
    expected = other(x).square().mean()
    expected.backward()
    assert torch.allclose(koila.run(loss.detach()), expected)
    for a, b in zip(model.parameters(), other.parameters()):
        assert torch.allclose(a.grad, b.grad, atol=1e-5), (a.grad, b.grad)
    for a, b in zip(model.buffers(), other.buffers()):
        assert torch.allclose(a.double(), b.double()), (a, b)

def step(model, other):
    x = torch.randn(6, 4)
    loss = model(lazy(x)).square().mean()
    loss.backward()
    assert koila.last_plan().n_micro_batches == 2
    right(model, other, x, loss)

def twin(x):
    # what a model makes of x and the gradients of its loss, by torch alone
    model, _ = pair()
    out = model(x)
    return out.detach(), torch.autograd.grad(out.square().mean(), list(model.parameters()))

def gradients_are(wanted):
    for p, g in zip(model.parameters(), wanted):
        assert torch.allclose(p.grad, g, atol=1e-5), (p.grad, g)

def child(f, ends_as):
    may_fail = is_refused and f.__name__ in ("backward", "other_step", "drop_and_step")
    pid = os.fork()
    if pid == 0:
        try:
            f()
        except BaseException as e:
            if not (may_fail and isinstance(e, RuntimeError) and "fork-based" in str(e)):
                print(type(e).__name__, e, file=sys.stderr)
                os._exit(3)
        if ends_as == "program":
            os._exit(0) if sys.exc_info()[0] else sys.exit(0)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, "the child failed"

koila.micro_batch(4).__enter__()
"""


def test_a_forked_child_lets_go_of_the_step(start):
    """Running statistics lie in shared memory, so that what a child does to them shows."""
    run_python(
        start
        + """
def nothing():
    pass

def drop():
    global loss
    del loss
    gc.collect()

def read():
    assert abs(float(loss.detach()) - value) < 1e-6

def backward():
    loss.backward()
    gradients_are(wanted)

def other_step():
    step(*pair())

def drop_and_step():
    drop()
    step(*pair())

for f in (nothing, drop, read, backward, other_step, drop_and_step):
    for ends_as in ("program", "worker"):
        model, other = pair()
        x = torch.randn(6, 4)
        loss = model(lazy(x)).square().mean()
        at, wanted = twin(x)
        value = float(at.square().mean())
        child(f, ends_as)
        assert koila._core.current_tape() is koila._core.tape_of(loss)
        loss.backward()
        right(model, other, x, loss)

from torch.utils.data import DataLoader, TensorDataset
import multiprocessing

model, other = pair()
x = torch.randn(6, 4)
loss = model(lazy(x)).square().mean()
for (batch,) in DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4, num_workers=2):
    assert batch.shape == (4, 4)
with multiprocessing.get_context("fork").Pool(1) as pool:
    assert pool.map(abs, [-1]) == [1]
loss.backward()
right(model, other, x, loss)
"""
    )


def test_a_forked_child_may_use_what_reads_left(start):
    """What the parent's reads have kept is the child's too, and what the child drops, reads or
    writes of it is the child's alone."""
    run_python(
        start
        + """
def close(a, b):
    assert abs(a - b) < 1e-6, (a, b)

def nothing():
    pass

def drop():
    global h
    del h
    gc.collect()

def reads_again():
    close(h.std().item(), spread)
    close(h[2].sum().item(), row)
    close(h.square().mean().item(), value)

def backward():
    h.square().mean().backward()
    gradients_are(wanted)

def plain(t):
    return t.torch() if isinstance(t, koila.LazyTensor) else t

def writes_what_it_got():
    plain(h.detach()).zero_()
    plain(h.detach()[1]).zero_()

def other_step():
    reads_again()
    with koila.micro_batch(4):
        step(*pair())

def leaves_by_a_new_one():
    lazy(torch.ones(3, 3)).sum().item()

for rows in (None, 4):
    for f in (nothing, drop, reads_again, backward, writes_what_it_got, other_step,
              leaves_by_a_new_one):
        for ends_as in ("program", "worker"):
            model, other = pair()
            x = torch.randn(6, 4)
            at, wanted = twin(x)
            spread, row, value = at.std().item(), at[2].sum().item(), at.square().mean().item()
            with koila.micro_batch(rows):
                told = []
                hooks = [m.register_forward_hook(lambda m, i, o: told.append(o.std().item()))
                         for m in model]
                h = model(lazy(x))
                close(told[-1], spread)
                close(h[2].sum().item(), row)
                child(f, ends_as)
                reads_again()
                loss = h.square().mean()
                loss.backward()
                right(model, other, x, loss)
            del h, loss
"""
    )


def test_a_child_that_kept_the_effects_would_be_noticed(start):
    p = run_python(
        start
        + """
from koila import _core

os.register_at_fork = lambda **_: None
model, other = pair()
x = torch.randn(6, 4)
loss = model(lazy(x)).square().mean()

def drop():
    global loss
    del loss
    gc.collect()

child(drop, "worker")
loss.backward()
right(model, other, x, loss)
""",
        check=False,
    )
    assert p.returncode != 0 and "AssertionError" in p.stderr

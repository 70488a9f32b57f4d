"""Deep programs, and long ones: nothing recurses as deep as a program is long, nothing takes time
that grows faster than it, and what is remembered of calls is bounded.

Such a program runs in a fresh process. KOILA_LONG=1: a million operators, 100,000 steps."""

import os
import threading

import pytest
import torch
from helpers import run_python
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import koila
from koila import _attention, _backward, _core, _opaque, lazy

LONG = bool(os.environ.get("KOILA_LONG"))

# ---- leaves, found without a Python object for each node


class _Two(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, constant):
        return x * w.detach(), x + 1

    @staticmethod
    def backward(ctx, gx, gy):
        return gx + gy, gx, None


def _graphs():
    """(name, outputs whose leaves are looked for)"""
    a, b, c = (torch.randn(3, 3, requires_grad=True) for _ in range(3))
    yield "one leaf twice", [(a * a).sum()]
    yield "a leaf and what comes from it", [a, (a * b).sum()]
    yield "in order", [(c * a).sum(), (b + c).sum()]
    yield "missing edges", [torch.cat([a, torch.ones(3, 3), b @ c]).sum()]
    yield "functions", [_Two.apply(a * 2, b, torch.ones(()))[1] + c]
    yield "a function at the root", [_Two.apply(a, b, None)[0]]
    yield "a function of constants", [_Two.apply(torch.ones(3), b, None)[0]]
    yield "written in place", [a.clone().mul_(b).add_(c)[0].sum()]
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.GELU(), nn.Linear(4, 2))
    yield "a model", [model(torch.randn(5, 3)).logsumexp(1).mean()]
    yield "a recurrent layer", [nn.LSTM(3, 4, 2)(torch.randn(5, 2, 3))[0].sum()]
    yield "a reentrant checkpoint", [checkpoint(lambda x: x * b, a * 1, use_reentrant=True) + c]
    yield "a checkpoint", [checkpoint(lambda x: x * b, a * 1, use_reentrant=False) + c]
    yield "an edge", [torch.autograd.graph.get_gradient_edge(a * b)]
    x = lazy(torch.randn(4, 3))
    yield "lazy", [F.mse_loss(model(x), torch.ones(4, 2)), (x @ a).sum()]
    yield "a lazy leaf", [(lazy(torch.randn(4, 3)).requires_grad_() * a[0]).sum()]


def test_leaves_are_those_that_next_functions_names():
    assert _backward._nodes_are_known
    for name, outputs in _graphs():
        nodes = [n for o in outputs if (n := getattr(o, "node", None) or o.grad_fn) is not None]
        told = _core.leaves_behind(nodes)
        walked, reentrant = _backward._leaves_behind(nodes)
        assert told is not None, name
        assert [id(t) for t in told[0]] == [id(t) for t in walked], name
        assert told[1] == reentrant, name
        found, again = _backward._leaves(outputs)
        assert len({id(t) for t in found}) == len(found) and again == reentrant, name


def test_gradients_are_the_same_without_the_layout_of_nodes(monkeypatch):
    def gradients():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        F.mse_loss(model(lazy(torch.randn(6, 3))), torch.zeros(6, 2)).backward()
        return [p.grad for p in model.parameters()]

    one = gradients()
    monkeypatch.setattr(_backward, "_nodes_are_known", False)
    for a, b in zip(one, gradients(), strict=True):
        assert torch.equal(a, b)


def test_a_leaf_among_the_outputs_gets_its_gradient_once():
    w = torch.ones(1, requires_grad=True)
    x = lazy(torch.full((4, 1), 2.0))
    with koila.micro_batch(2):
        torch.autograd.backward([w, (x * w).sum()], [torch.ones(1), torch.ones(())])
    assert w.grad.item() == 9


# ---- depth

PRELUDE = """
import os, sys, threading, torch, koila
from koila import lazy
from koila._torch import VERSION
torch.set_num_threads(1)
n = int(sys.argv[1])
x0, w = torch.randn(8, 4), torch.full((4,), 0.5, requires_grad=True)

def in_a_small_thread(f):
    failed = []
    def g():
        try:
            f()
        except BaseException as e:
            failed.append(e)
            raise
    threading.stack_size(256 << 10)
    t = threading.Thread(target=g)
    t.start()
    t.join()
    assert not failed, failed
    # Torch before 2.13 aborts at the end of a process of which a thread has run a backward, now and
    # then, koila never imported.
    if VERSION < (2, 13):
        sys.stdout.flush()
        os._exit(0)
"""


@pytest.mark.parametrize("ends", ["never", "backward"])
def test_a_chain_of_operators_is_freed(ends):
    run_python(
        PRELUDE
        + f"""
def chain(x):
    y = x * w
    for _ in range(n):
        y = y + 1
    return y.sum()


def f():
    loss = chain(lazy(x0))
    if {ends == "backward"}:
        loss.backward()
        assert torch.equal(w.grad, x0.sum(0)), w.grad
    del loss

in_a_small_thread(f)
""",
        args=[1_000_000 if LONG else 20_000],
        timeout=900,
    )


def test_an_unrolled_recurrent_net_trains():
    run_python(
        PRELUDE
        + """
U, W = (torch.randn(4, 4).mul_(0.1).requires_grad_() for _ in range(2))
x0 = torch.randn(n, 8, 4)


def net(xs):
    h = torch.zeros(8, 4)
    for x in xs:
        h = torch.tanh(x @ W + h @ U)
    return h.square().sum()


def step(wrap):
    U.grad = W.grad = None
    x = wrap(x0)
    loss = net(x.unbind())
    loss.backward()
    del loss
    return U.grad, W.grad


def f():
    for eager, got in zip(step(lambda x: x), step(lambda x: lazy(x, batch=1)), strict=True):
        assert torch.allclose(got, eager, atol=1e-4 * eager.abs().max().item()), (eager, got)


in_a_small_thread(f)
""",
        args=[100_000 if LONG else 4_000],
        timeout=900,
    )


# ---- time

LINEAR = """
import gc, time, torch
from koila import lazy
torch.set_num_threads(1)
gc.disable()  # which walks all that lives, again and again


def writes(n):
    # a write after each view, and all views live
    y = lazy(torch.ones(8, 4)) * 2
    kept = []
    yield
    for i in range(n):
        kept.append(y[i % 8])
        y.add_(1)
    yield
    assert kept[-1].sum().item() == (2 + n) * 4


def held(n):
    # a value is read, and then all the others are made when the next step begins
    x = lazy(torch.ones(8, 4, dtype=torch.float64))
    kept = [x * float(i) for i in range(n)]
    assert sum(kept[: n // 2]).sum().item() == 8 * 4 * sum(range(n // 2))
    yield
    lazy(torch.ones(2, 2))
    yield
    assert kept[-1].sum().item() == 8 * 4 * (n - 1)


def each(program, n):
    steps = program(n)
    next(steps)
    start = time.process_time()
    next(steps)
    took = (time.process_time() - start) / n
    assert next(steps, None) is None
    return took


for program, few, many in ((writes, 2_000, 40_000), (held, 2_000, 32_000)):
    each(program, 100)
    times = [min(each(program, n) for _ in range(2)) for n in (few, many)]
    assert times[1] < 3 * times[0], (program.__name__, times)
"""


def test_what_one_operator_costs_does_not_grow_with_what_is_held():
    run_python(LINEAR, timeout=600)


# ---- views, and what outlives its step


@pytest.mark.parametrize("n_views", [3, 31, 32, 33, 150])
def test_long_chains_of_views_are_replayed_after_each_write(n_views):
    def program(x):
        base = x * 2
        view, kept = base, []
        for i in range(n_views):
            view = view.t() if i % 2 else view.unsqueeze(0).select(0, 0)
            if i % 7 == 0:
                kept.append(view)
        base.add_(1)
        view.mul_(3)
        first = [v * 1 for v in kept]
        base[1].zero_()
        kept[-1].sub_(0.5)
        return [base, view, *kept, *first]

    x = torch.randn(3, 3)
    for got, wanted in zip(program(lazy(x)), program(x), strict=True):
        assert torch.equal(got.torch(), wanted)


def test_kept_losses_stay_what_they_were_and_can_be_used():
    def program(wrap):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        losses, total = [], 0
        for i in range(8):
            model.zero_grad()
            loss = model(wrap(torch.full((4, 3), float(i)))).square().mean()
            loss.backward()
            losses.append(loss.detach())
            if i % 3 == 2:  # those that rest are used in a step, viewed and written
                total = total + sum(losses) + losses[i - 2].view(1)[0]
                losses[i - 1].mul_(2)
        return [*losses, total, *(p.grad for p in model.parameters())]

    for got, wanted in zip(program(lazy), program(lambda x: x), strict=True):
        assert torch.allclose(got.torch() if hasattr(got, "torch") else got, wanted, rtol=1e-5)


# ---- what is remembered of calls is bounded


@pytest.fixture
def forget_after():
    """forget_after(n): forget after so many new entries, until the test ends"""
    before = []
    yield lambda n: before.append(_core.forget_after(n))
    _core.forget_after(before[0])


def _annealed(x, model, i):
    loss = (model(x) / (1 + 1 / (i + 1))).square().mean() + (x * (0.1 + i / 997)).sum()
    loss.backward()
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    return [loss.detach(), *grads]


def _new_shapes(x, model, i):
    x = torch.cat([x] * (1 + i)).narrow(0, 0, 2 + i)
    return _annealed(x, model, 0)


def _new_text(x, model, i):
    y = torch.div(x, 3, rounding_mode="floor") * complex(1, i)
    drawn = torch.bernoulli(x * 0 + 0.5, generator=torch.Generator(x.device).manual_seed(i))
    return [(y.imag + drawn).sum().detach()]


def _new_code(x, model, i):
    scope = {}
    exec(compile("\n" * i + "def f(x): return (x * 2).sum()", f"cell_{i}.py", "exec"), scope)
    return [scope["f"](x).detach()]


@pytest.mark.parametrize("program", [_annealed, _new_shapes, _new_text, _new_code])
def test_ever_new_calls_are_forgotten_and_results_are_the_same(program, forget_after):
    n_steps, n = 100, 50
    forget_after(n)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    n_known = []
    before = _core.memo_info()["forgotten"]
    for i in range(n_steps):
        x = torch.randn(4, 3)
        wanted = program(x, model, i)
        got = program(lazy(x), model, i)
        for a, b in zip(got, wanted, strict=True):
            assert torch.allclose(a.torch() if _core.is_lazy(a) else a, b, rtol=1e-5)
        n_known.append(_core.memo_info()["known"])
    assert _core.memo_info()["forgotten"] > before
    # beside the new ones: 32 cached plans, and calls of the tests before, once more
    assert max(n_known[n_steps // 2 :]) < max(n_known[: n_steps // 2]) + n, n_known


def _junk():
    """Calls that nobody repeats: they take the ids that were forgotten."""
    for i in range(3):
        _junk.n += 1
        x = lazy(torch.ones(2 + _junk.n % 50, 3, dtype=torch.float64))
        (x.t() * (_junk.n + i / 7)).sum().torch()


_junk.n = 0


def test_what_is_in_use_stays_when_the_rest_is_forgotten(forget_after):
    def program(wrap, between):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.GELU(), nn.Linear(6, 2))
        runner = nn.Sequential(nn.Linear(2, 2), nn.Sigmoid())
        if wrap is lazy:
            runner = koila.opaque(runner)
        kept, views, answers = [], [], []
        for i in range(8):
            x = wrap(torch.randn(6, 4))
            between()
            h = checkpoint(model, x * (1 + i / 3), use_reentrant=False)
            between()
            base = x.detach() * (2 + i)
            view = base[1:].t().unsqueeze(0)
            between()
            loss = runner(h).square().mean() + h.logsumexp(1).sum()
            loss.backward()
            between()
            base.mul_(i + 0.5)  # the view is replayed, after its links could have been forgotten
            kept.append(loss.detach())
            views.append(view)
            answers += [view.sum(), (views[i // 2] + 1).sum(), sum(kept)]
            between()
            buffer = torch.zeros(6, 4)
            buffer[:, 1:] = x[:, :-1]
            answers.append((buffer * (i + 1)).sum())
        answers += [p.grad for p in model.parameters()] + list(model.buffers())
        return answers + kept + views

    wanted = program(lambda x: x, lambda: None)
    forget_after(0)
    for between in (lambda: None, _junk):
        for got, one in zip(program(lazy, between), wanted, strict=True):
            got = got.torch() if _core.is_lazy(got) else got
            assert torch.allclose(got, one, rtol=1e-5), (got, one)


@pytest.mark.parametrize("between", [lambda: None, _junk])
def test_views_that_outlive_their_step_beside_their_base_keep_what_names_them(
    between, forget_after
):
    """Base and views rest together: no graph names the calls and the shapes of the views."""

    def program(wrap):
        kept, answers = [], []
        for i in range(6):
            x = wrap(torch.arange((5.0 + i) * (3 + i)).view(5 + i, 3 + i))
            base = x * 2
            kept.append((base, base[1:].t(), base[:, 1:].unsqueeze(0)[:, ::2]))
            answers.append(base.sum() * 1)
            between()
        for n, (base, first, second) in enumerate(kept):
            between()
            answers += [first + 1, first.shape[0] * second.sum(2)]
            base.mul_(n + 2)
            between()
            first.add_(second.sum())
            answers += [first * 1, second * 1]
        return [*answers, *(t for three in kept for t in three)]

    wanted = program(lambda x: x)
    forget_after(0)
    for got, one in zip(program(lazy), wanted, strict=True):
        assert got.shape == one.shape and got.stride() == one.stride()
        assert torch.equal(got.torch() if _core.is_lazy(got) else got, one)


def test_nothing_is_forgotten_while_another_thread_is_in_the_middle_of_an_operator(forget_after):
    library = torch.library.Library("koila_depth", "DEF")
    library.define("twice(Tensor x, float by) -> Tensor")
    library.impl("twice", lambda x, by: x * 2 * by, "CPU")
    is_inside, may_go_on = threading.Event(), threading.Event()

    def shape(x, by):
        is_inside.set()
        assert may_go_on.wait(60)
        return torch.empty_like(x)

    torch.library.register_fake("koila_depth::twice", shape, lib=library)
    got = []

    def other():
        x = lazy(torch.full((5, 7), 3.0))
        got.append(torch.ops.koila_depth.twice(x.t()[1:], 1.25).sum().torch())

    thread = threading.Thread(target=other)
    forget_after(0)
    thread.start()
    assert is_inside.wait(60)
    before = _core.memo_info()["forgotten"]
    _junk()
    assert _core.memo_info()["forgotten"] == before
    may_go_on.set()
    thread.join()
    _junk()
    assert _core.memo_info()["forgotten"] > before
    assert got[0].item() == 5 * 6 * 3 * 2 * 1.25
    library._destroy()


def test_ways_of_calling_an_opaque_function_are_forgotten():
    def scaled(x, by):
        return x * by

    run = _opaque.Runner(scaled, None)
    for i in range(3 * _opaque._MAX_KNOWN):
        assert run(lazy(torch.ones(2, 3)), i / 7).sum().item() == pytest.approx(6 * i / 7)
        assert len(run._known) <= _opaque._MAX_KNOWN


def test_which_attention_was_tried_is_forgotten(monkeypatch):
    tried = []
    monkeypatch.setattr(_attention, "_tried", {})
    monkeypatch.setattr(_attention, "_draws_by_row", lambda *a: tried.append(a) or True)
    call = _attention.Call(0.5, False, None, _attention.FLASH)
    for head in range(1, 3 * _attention._MOST_TRIED):
        q = torch.empty(1, 1, 1, head)
        assert _attention._distance(q, q, q, None, call) == 32
        assert _attention._distance(q, q, q, None, call) == 32
        assert len(_attention._tried) <= _attention._MOST_TRIED
    assert len(tried) == head


def test_a_call_that_steps_repeat_is_not_forgotten(forget_after):
    model = nn.Linear(3, 2)

    def steps(factor):
        for n in range(2, 42):  # more than there are cached plans
            (model(lazy(torch.ones(n, 3))) * factor).sum().backward()

    forget_after(10**6)
    steps(2.5)
    steps(2.5)
    steps(7.5)
    n_calls, n_forgotten = _core.memo_info()["calls"], _core.memo_info()["forgotten"]
    forget_after(0)
    lazy(torch.ones(2, 3))
    forget_after(10**6)
    info = _core.memo_info()
    assert info["forgotten"] == n_forgotten + 1 and info["calls"] < n_calls
    steps(2.5)
    assert _core.memo_info()["calls"] == info["calls"]

"""One process, many threads and asyncio tasks: each as if it were alone, and a thread that does not
use koila as if koila were not there."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import gc
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import koila
import pytest
import torch
from conftest import DEVICE
from helpers import run_python
from koila import _core, _opaque, lazy
from torch import nn

B = 12


@pytest.fixture(autouse=True)
def _often():
    """Threads take turns often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)
    gc.collect()


def is_plain(t):
    return type(t) is torch.Tensor


class Net(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
        self.double()

    def forward(self, x):
        return self.layers(x)


def data(seed, n=B):
    g = torch.Generator(DEVICE).manual_seed(seed)
    return (
        torch.randn(n, 6, generator=g, dtype=torch.float64),
        torch.randint(3, (n,), generator=g),
    )


def train(seed, wrap, n_steps=3, model=None):
    """A few steps; parameters, buffers and losses."""
    model = Net(seed) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for k in range(n_steps):
        x, y = wrap(*data(100 * seed + k))
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return [t.detach().clone() for t in [*model.state_dict().values()]], losses


def sliced(*values):
    return lazy(*values)


def eager(*values):
    return values


def assert_close(a, b):
    for s, t in zip(a[0], b[0], strict=True):
        torch.testing.assert_close(s, t, rtol=1e-9, atol=1e-12)
    assert a[1] == pytest.approx(b[1], rel=1e-9)


def assert_same(a, b):
    assert a[1] == b[1] and all(map(torch.equal, a[0], b[0]))


def together(*functions):
    """Run them in threads that start at once; their results. The first exception is raised."""
    start = threading.Barrier(len(functions))

    def run(f):
        if DEVICE != "cpu":
            torch.set_default_device(DEVICE)  # each thread has its own
        start.wait()
        return f()

    with ThreadPoolExecutor(len(functions)) as pool:
        return [r.result() for r in [pool.submit(run, f) for f in functions]]


def in_a_thread(f):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(f).result()


@pytest.fixture(scope="module")
def alone():
    """What each training run gives by itself, before any thread starts: (eager, lazy in slices)."""
    out = {}
    for seed in range(4):
        with koila.micro_batch(4 + seed):
            out[seed] = train(seed, eager), train(seed, sliced)
        assert_close(*out[seed])
    return out


def own_model(seed):
    """Models are made in one thread: their seeds are the process's."""
    return Net(seed)


# ---- threads


def test_threads_train_as_each_does_alone(alone):
    models = [own_model(s) for s in range(4)]

    def work(seed):
        def run():
            with koila.micro_batch(4 + seed):
                for _ in range(3):
                    out = train(seed, sliced, model=copy.deepcopy(models[seed]))
                    assert _core.configure()["micro_batch"] == 4 + seed
                return out

        return run

    for seed, out in enumerate(together(*map(work, range(4)))):
        assert_same(out, alone[seed][1])


def test_a_plain_thread_beside_koila_threads_is_bit_equal(alone):
    models = [own_model(s) for s in range(4)]
    stop = threading.Event()

    def plain():
        try:
            return [train(0, eager, model=copy.deepcopy(models[0])) for _ in range(10)]
        finally:
            stop.set()

    def koilas(seed):
        def run():
            with koila.micro_batch(3):
                while not stop.is_set():
                    train(seed, sliced, model=copy.deepcopy(models[seed]))

        return run

    plains, *_ = together(plain, koilas(1), koilas(2))
    for out in plains:
        assert_same(out, alone[0][0])


def test_a_plain_backward_is_torch_s_own_while_lazy_tensors_live():
    """In a process of its own: a tensor of another test, in whose graph lazy ones are, would make
    koila look at each backward."""
    run_python(
        """
        import sys, threading, torch
        from koila import _backward, lazy

        torch.set_default_device(sys.argv[1])
        entered, run = [], _backward._run_lazily
        _backward._run_lazily = lambda *a, **k: (entered.append(1), run(*a, **k))[1]
        w = torch.ones(3, requires_grad=True)
        x = lazy(torch.randn(12, 3))
        kept = (x * w).sum()

        def plain():
            v = torch.ones(3, requires_grad=True, device=sys.argv[1])
            (v * 2).sum().backward()
            torch.autograd.grad((v * 3).sum(), v)
            found.append(v.grad.tolist())

        found = []
        plain()
        beside = threading.Thread(target=plain)
        beside.start()
        beside.join()
        assert found == [[2.0] * 3] * 2 and not entered, (found, entered)
        kept.backward()
        assert len(entered) == 1 and type(w.grad) is torch.Tensor
        assert torch.allclose(w.grad, x.torch().sum(0))
        """,
        args=[DEVICE],
    )


def test_a_backward_that_comes_back_to_lazy_tensors_through_a_plain_one(monkeypatch):
    """x.torch(), and a function of the user that takes values."""

    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            value = torch.from_numpy(x.detach().cpu().numpy()).to(x.device)
            ctx.save_for_backward(value)
            return value.sin()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[0].cos()

    x = torch.randn(B, 3, dtype=torch.float64)

    def gradients(wrap, through):
        w = torch.linspace(1, 2, 3, dtype=torch.float64, requires_grad=True)
        through(wrap(x) * w).sum().backward()
        assert is_plain(w.grad)
        return w.grad

    for through in (Sine.apply, lambda t: t.torch() if hasattr(t, "torch") else t):
        expected = gradients(lambda t: t, through)
        with koila.micro_batch(5):
            torch.testing.assert_close(gradients(lazy, through), expected)


def test_planning_beside_a_plain_backward():
    """koila.plan() in one thread made the backward of others do nothing."""
    model, shapes = Net(1), [torch.empty(64, 6, dtype=torch.float64), torch.empty(64).long()]
    before = [p.detach().clone() for p in model.parameters()]
    stop = threading.Event()

    def plans():
        try:
            return [
                koila.plan(
                    lambda a, b: nn.functional.cross_entropy(model(a), b), *shapes, micro_batch=16
                ).n_micro_batches
                for _ in range(15)
            ]
        finally:
            stop.set()

    def backwards(wrap):
        def run():
            n = 0
            while not stop.is_set() or n < 3:
                w = torch.ones(6, dtype=torch.float64, requires_grad=True)
                x = data(n)[0]
                (wrap(x) * w).sum().backward()
                assert w.grad is not None
                torch.testing.assert_close(w.grad, x.sum(0), rtol=1e-9, atol=1e-12)
                assert not _core.is_planning()
                n += 1

        return run

    found, *_ = together(plans, backwards(lambda x: x), backwards(lazy))
    assert len(found) == 15
    assert all(map(torch.equal, before, model.parameters()))
    assert all(p.grad is None for p in model.parameters())


def test_tensors_of_one_thread_used_in_another():
    """A loader's thread makes batches lazy; a step is read elsewhere; results come back."""
    x, w = data(7)[0], torch.linspace(1, 2, 6, dtype=torch.float64, requires_grad=True)
    with ThreadPoolExecutor(1) as pool:
        batches = list(pool.map(lazy, [x, x + 1, x + 2]))
        with koila.micro_batch(5):
            for k, batch in enumerate(batches):
                w.grad = None
                (batch * w).sum().backward()
                torch.testing.assert_close(w.grad, (x + k).sum(0))
                assert koila.last_plan().micro_batch == 5
        one, other = pool.submit(lazy, x).result(), lazy(x)
        mixed = (one * w).exp() + (other * w).tanh()
        assert pool.submit(float, mixed.detach().sum()).result() == pytest.approx(
            float(((x * w).exp() + (x * w).tanh()).sum())
        )


def test_one_step_recorded_by_many_threads():
    """As torch.nn.parallel.parallel_apply does."""
    x = data(3)[0]
    models = [Net(s).eval() for s in range(4)]

    def loss(wrap):
        for m in models:
            m.zero_grad()
        batch = wrap(x)
        outputs = together(*[lambda m=m: m(batch) for m in models])
        sum(o.pow(2).mean() for o in outputs).backward()
        return [p.grad.clone() for m in models for p in m.parameters()]

    expected = loss(lambda t: t)
    for _ in range(3):
        with koila.micro_batch(5):
            for g, e in zip(loss(lazy), expected, strict=True):
                torch.testing.assert_close(g, e, rtol=1e-9, atol=1e-12)
            assert koila.last_plan().micro_batch == 5


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="it asks for a device's stream")
def test_parallel_apply():
    from torch.nn.parallel import parallel_apply

    x, models = data(4)[0], [Net(s).eval() for s in range(3)]
    expected = [m(x) for m in models]
    batch = lazy(x)
    for o, e in zip(parallel_apply(models, [batch] * 3), expected, strict=True):
        assert isinstance(o, koila.LazyTensor)
        torch.testing.assert_close(o.detach().torch(), e.detach())


def test_two_threads_that_would_wait_for_each_other_are_told():
    """Each runs its own step and needs a tensor of the other's in the middle of it."""
    x = torch.randn(B, 3)
    recorded, running = threading.Barrier(2), threading.Barrier(2)
    told = []

    def step(mine, theirs):
        armed = []

        @koila.opaque
        def meet(t):
            if armed:
                armed.clear()  # a failed run is tried again, without what is merely held
                running.wait(60)
                try:
                    theirs[0].torch()
                except koila.KoilaError as e:
                    told.append(str(e))
                    raise
            return t * 2

        def run():
            batch = lazy(x)
            mine.append((batch * 2).sum(0))
            total = (meet(batch).sum(0) + mine[0]).sum()
            recorded.wait(60)
            armed.append(True)
            return float(total)

        return run

    a, b = [], []
    found = together(step(a, b), step(b, a))
    assert len(told) == 1 and "wait for each other" in told[0]
    assert found == pytest.approx([4 * float(x.sum())] * 2, rel=1e-4, abs=1e-4)


# ---- settings


def test_settings_of_a_thread_are_its_own():
    seen = {}
    inside, looked = threading.Event(), threading.Event()

    def other():
        assert inside.wait(20)
        seen["other"] = _core.configure()
        with koila.micro_batch(7), koila.strict():
            looked.set()
            assert left.wait(20)
        seen["after"] = _core.configure()

    left = threading.Event()
    thread = threading.Thread(target=other)
    thread.start()
    before = _core.configure()
    with koila.micro_batch(3), koila.budget("1GiB"):
        inside.set()
        assert looked.wait(20)
        now = _core.configure()
    left.set()
    thread.join()
    assert seen["other"] == seen["after"] == before == _core.configure()
    assert now["micro_batch"] == 3 and now["budget"] == 1 << 30 and not now["strict"]


def test_one_setting_entered_by_many_threads():
    setting = koila.micro_batch(3)
    both = threading.Barrier(2)

    @setting
    def work(n):
        both.wait(20)
        with koila.micro_batch(n):
            both.wait(20)
            seen = _core.configure()["micro_batch"]
        both.wait(20)
        return seen, _core.configure()["micro_batch"]

    assert together(lambda: work(5), lambda: work(6)) == [(5, 3), (6, 3)]
    assert _core.configure()["micro_batch"] is None


def test_the_budget_of_the_process_and_the_budget_of_a_thread():
    if not _core.cpu_bytes_ok() and _core.cpu_bytes_install() not in "AB":
        pytest.skip("torch's CPU memory cannot be counted here")

    def large():
        return torch.zeros(1 << 20, device="cpu").numel()

    room = _core.cpu_bytes_current() + (1 << 20)
    with koila.budget({"cpu": room}):
        with pytest.raises(RuntimeError, match="memory"):
            large()
        assert together(large) == [1 << 20]  # a plain thread is not limited
    koila.set_budget({"cpu": room})
    try:
        for f in (large, lambda: together(large)):
            with pytest.raises(RuntimeError, match="memory"):
                f()
        assert together(lambda: _core.configure()["cpu_budget"]) == [room]
        with koila.budget({"cpu": room + (8 << 20)}):
            assert large() == 1 << 20
    finally:
        koila.set_budget(None)
    assert together(large) == [1 << 20] and large() == 1 << 20


def test_set_budget_inside_a_budget():
    with koila.budget("3GiB"):
        koila.set_budget("2GiB")
        assert _core.configure()["budget"] == 2 << 30
    assert _core.configure()["budget"] == 2 << 30
    koila.set_budget(None)
    assert _core.configure()["budget"] is None


# ---- asyncio


def test_asyncio_tasks_train_as_each_does_alone(alone):
    async def task(seed):
        model = Net(seed)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses = []
        with koila.micro_batch(4 + seed):
            for k in range(3):
                x, y = lazy(*data(100 * seed + k))
                await asyncio.sleep(0)
                z = torch.zeros(B, 3, dtype=torch.float64)
                z[:] = model(x)
                await asyncio.sleep(0)
                loss = nn.functional.cross_entropy(z, y)
                optimizer.zero_grad()
                loss.backward()
                await asyncio.sleep(0)
                optimizer.step()
                losses.append(float(loss.detach()))
        return [t.detach().clone() for t in model.state_dict().values()], losses

    async def main():
        return await asyncio.gather(*map(task, range(4)))

    for seed, out in enumerate(asyncio.run(main())):
        assert_close(out, alone[seed][0])


def test_settings_of_a_task_are_its_own_and_those_of_tasks_made_inside():
    def rows():
        return _core.configure()["micro_batch"]

    async def child(n):
        inherited = rows()
        with koila.micro_batch(n):
            await asyncio.sleep(0.001)
            return inherited, rows()

    async def main():
        with koila.micro_batch(3):
            inside = [asyncio.create_task(child(n)) for n in (4, 5)]
            thread = asyncio.to_thread(rows)
        outside = asyncio.create_task(child(6))
        return await asyncio.gather(*inside, outside), await thread, rows()

    made, in_thread, after = asyncio.run(main())
    assert made == [(3, 4), (3, 5), (None, 6)] and after is None
    assert in_thread is None  # a coroutine that starts outside


def test_a_step_goes_on_in_another_context():
    """A notebook runs each cell in a context of its own."""
    w = torch.linspace(1, 2, 6, dtype=torch.float64, requires_grad=True)
    x, y = data(5)[0], data(6)[0]
    names = {}

    def cell(code):
        contextvars.copy_context().run(exec, code, {**globals(), **locals()}, names)

    names.update(x=x, y=y, w=w, lazy=lazy, torch=torch)
    cell("a = lazy(x)")
    cell("h = (a * w).tanh()")
    cell("b = lazy(y)")
    cell("loss = (h * b).sum()")
    cell("loss.backward()")
    expected = torch.autograd.grad(((x * w).tanh() * y).sum(), w)[0]
    torch.testing.assert_close(w.grad, expected)


# ---- other things that were the process's


def test_factories_belong_to_the_step_of_their_thread():
    done = threading.Event()
    found = []

    def other():
        try:
            for _ in range(200):
                found.append(is_plain(torch.zeros(B, 2)))
        finally:
            done.set()

    x = lazy(torch.randn(B, 3))
    thread = threading.Thread(target=other)
    thread.start()
    ours = []
    while not done.is_set():
        ours.append(isinstance(torch.zeros(B, 2), koila.LazyTensor))
    thread.join()
    assert all(found) and all(ours) and len(found) == 200
    del x


def test_hooks_of_a_plain_thread_run_while_a_step_is_recorded():
    """Both use one model: its hooks were taken off for everybody."""
    w = torch.ones(6, dtype=torch.float64, requires_grad=True)
    w.register_hook(lambda g: g * 2)
    stop = threading.Event()
    x = data(1)[0]

    def koilas():
        try:
            for _ in range(30):
                (gradient,) = torch.autograd.grad((lazy(x) * w).tanh().sum(), w)
                assert torch.isfinite(gradient).all()
        finally:
            stop.set()

    def plains():
        n = 0
        while not stop.is_set() or n < 3:
            v = w * 1
            v.retain_grad()
            (gradient,) = torch.autograd.grad((x * w).sum(), w)
            torch.testing.assert_close(gradient, 2 * x.sum(0))
            n += 1

    together(koilas, plains)


def test_new_calls_in_many_threads():
    """Each asks for shapes of its own: one FakeTensorMode served all."""

    def work(seed):
        def run():
            out = []
            for k in range(12):
                n = 5 + seed + 3 * k
                x = data(seed, n)[0]
                got = (lazy(x).unsqueeze(1) @ x[: 3 + k].t()).amax(-1)
                out.append(torch.allclose(got.torch(), (x.unsqueeze(1) @ x[: 3 + k].t()).amax(-1)))
                with pytest.raises(RuntimeError):
                    lazy(x) @ x[:5]
            return all(out)

        return run

    assert together(*map(work, range(3))) == [True] * 3


# ---- values read in the middle of a step, and what they leave


def train_reading(seed, wrap, model, n_steps=2):
    """A few steps, whose layers are all looked at; parameters, buffers, and what was read."""
    optimizer, told = torch.optim.SGD(model.parameters(), 0.1), []
    hooks = [
        m.register_forward_hook(lambda m, i, o: told.extend((o.std().item(), o[1].sum().item())))
        for m in model.modules()
    ]
    for k in range(n_steps):
        x, y = wrap(*data(100 * seed + k))
        loss = nn.functional.cross_entropy(model(x), y)
        told.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for hook in hooks:
        hook.remove()
    return [t.detach().clone() for t in [*model.state_dict().values()]], told


@pytest.mark.parametrize("rows", [None, 5])
def test_threads_read_in_the_middle_as_each_does_alone(rows):
    models = [own_model(s) for s in range(4)]

    def work(seed, wrap=sliced):
        def run():
            with koila.micro_batch(rows):
                return train_reading(seed, wrap, copy.deepcopy(models[seed]))

        return run

    alone = [work(s)() for s in range(4)]
    for seed, out in enumerate(alone):
        assert_close(work(seed, eager)(), out)
    for _ in range(3):
        for seed, out in enumerate(together(*map(work, range(4)))):
            assert_same(out, alone[seed])


@pytest.mark.parametrize("rows", [None, 5])
def test_one_step_is_read_by_other_threads_while_it_is_recorded(rows):
    """Each reader finds eager's numbers, whatever the others and the recording keep or drop."""
    x, n = data(9)[0], 12
    weight = torch.linspace(-0.4, 0.4, 36, dtype=torch.float64).view(6, 6).requires_grad_()

    def layers(h):
        for k in range(n):
            h = (h @ weight).tanh() * (1 + 0.1 * k)
            yield h

    def step(wrap, n_readers):
        weight.grad, made, done = None, [], threading.Event()

        def record():
            try:
                for h in layers(wrap(x)):
                    made.append(h)
                    h[0].sum().item()
            finally:
                done.set()

        def read():
            told = {}
            while not done.is_set() or len(told) < n:
                for k, h in enumerate(made.copy()):
                    told.setdefault(k, []).append((h.std().item(), h[2, 3].item()))
            return told

        with koila.micro_batch(rows):
            _, *found = together(record, *[read] * n_readers)
            made[-1].square().sum().backward()
        return found, weight.grad

    (expected,), gradient = step(lambda t: t, 1)
    for _ in range(4):
        found, got = step(lazy, 3)
        torch.testing.assert_close(got, gradient, rtol=1e-11, atol=1e-13)
        for told in found:
            for k, pairs in told.items():
                for pair in pairs:
                    assert pair == pytest.approx(expected[k][0], rel=1e-11), k


@pytest.mark.about_the_cpu("bytes of the host")
def test_what_is_kept_of_one_thread_s_step_stays_beside_the_budget_of_another():
    models = [own_model(s) for s in range(2)]
    x = data(4, 4096)[0]
    expected = models[0](x).mean().item()
    h = models[0](lazy(x))
    h.std().item()

    def limited():
        with koila.budget(_core.cpu_bytes_current() + (64 << 10)):
            return train(1, sliced, model=models[1])

    assert_close(train(1, eager, model=copy.deepcopy(models[1])), in_a_thread(limited))
    assert h.mean().item() == pytest.approx(expected, rel=1e-11)
    assert koila.plans()[-1].n_run == 1, "the mean alone"


def test_asyncio_tasks_read_in_the_middle_as_each_does_alone():
    models = [own_model(s) for s in range(3)]

    async def one(seed, wrap):
        model, told = copy.deepcopy(models[seed]), []
        with koila.micro_batch([None, 4, 5][seed]):
            h = wrap(data(seed)[0])
            for layer in model.layers:
                h = layer(h)
                told.append(h.std().item())
                await asyncio.sleep(0)
            h.square().sum().backward()
        return [p.grad.clone() for p in model.parameters()], told

    async def all_of(wrap):
        return await asyncio.gather(*(one(s, wrap) for s in range(3)))

    for a, b in zip(asyncio.run(all_of(lambda t: t)), asyncio.run(all_of(lazy)), strict=True):
        assert_close(a, b)


# ---- a module that several threads run at once


def test_threads_that_meet_exchanged_parameters_wait_for_the_module_s_own():
    model = own_model(1).eval()
    opaque, x = koila.opaque(model), data(0)[0]
    own = list(model.parameters())
    expected = torch.autograd.grad(model(x).square().sum(), own)
    is_exchanged, may_end = threading.Event(), threading.Event()

    def exchange():
        mine = _opaque._exchanges.begin(model)
        table = next(m._parameters for m in model.modules() if m._parameters)
        before = dict(table)
        table.update({name: p.detach() for name, p in before.items()})
        is_exchanged.set()
        may_end.wait(60)
        table.update(before)
        _opaque._exchanges.end(mine)

    def step():
        return torch.autograd.grad(opaque(lazy(x)).square().sum(), own)

    with ThreadPoolExecutor(3) as pool:
        other = pool.submit(exchange)
        assert is_exchanged.wait(60)
        steps = [pool.submit(step)]
        time.sleep(0.2)  # the first has looked, and waits
        steps.append(pool.submit(step))
        time.sleep(0.2)
        may_end.set()
        other.result()
        for found in steps:
            for f, e in zip(found.result(), expected, strict=True):
                assert torch.allclose(f, e, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rows", [None, 5])
def test_threads_run_the_same_opaque_module_at_the_same_moment(rows):
    """Each run exchanges the module's parameters for its own. Two that did so at once put back each
    other's."""
    model = own_model(1).eval()
    whole, part = koila.opaque(model), koila.opaque(model.layers)
    before = dict(model.named_parameters())
    xs = [data(s)[0] for s in range(4)]

    def gradients(f, x):
        return torch.autograd.grad(f(x).square().sum(), list(before.values()))

    def work(seed):
        def run():
            out = []
            for _ in range(10):
                with koila.micro_batch(rows):
                    out.append(gradients([whole, part][seed % 2], lazy(xs[seed])))
            return out

        return run

    expected = [gradients(model, x) for x in xs]
    found = together(*map(work, range(4)))
    for name, p in model.named_parameters():
        assert p is before[name] and p.is_leaf, f"{name} is another run's"
    for e, runs in zip(expected, found, strict=True):
        for got in runs:
            for g, w in zip(got, e, strict=True):
                torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-12)


class Shown(nn.Module):
    """A thread that knows nothing of koila uses the module each time that it runs."""

    def __init__(self, plain):
        super().__init__()
        self.inner = own_model(2).eval()
        self.plain, self.found = plain, []

    def forward(self, x):
        self.found.append(in_a_thread(self.plain))
        return self.inner(x)


def freeze_the_first(model):
    model.layers[0].weight.requires_grad_(False)


def tie(model):
    model.layers[3] = nn.Sequential(model.layers[3], nn.Linear(3, 3, bias=False).double())
    model.tied = model.layers[3][1]


@pytest.mark.about_the_cpu("threads of the test make tensors where they like")
@pytest.mark.parametrize("change", [None, freeze_the_first, tie])
@pytest.mark.parametrize("rows", [None, 5])
def test_a_plain_thread_uses_a_module_while_it_runs_inside_an_opaque_one(rows, change):
    def plain():
        own = dict(module.inner.named_parameters())
        wanted = [p for p in own.values() if p.requires_grad]
        loss = module.inner(y).square().sum()
        return own, torch.autograd.grad(loss, wanted)

    module, (x, y) = Shown(plain), (data(s)[0] for s in range(2))
    if change:
        change(module.inner)
    before = dict(module.inner.named_parameters())
    wanted = [p for p in before.values() if p.requires_grad]
    expected = torch.autograd.grad(module.inner(x).square().sum(), wanted)
    expected_plain = torch.autograd.grad(module.inner(y).square().sum(), wanted)
    f = koila.opaque(module)
    with koila.micro_batch(rows):
        got = torch.autograd.grad(f(lazy(x)).square().sum(), wanted)
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-9, atol=1e-12)
    n_slices = 1 if rows is None else -(-B // rows)
    assert len(module.found) == 1 + n_slices, "the look-up, each slice once"
    for own, gradients in module.found:
        assert own.keys() == before.keys()
        assert all(own[name] is p for name, p in before.items())
        for g, e in zip(gradients, expected_plain, strict=True):
            assert torch.equal(g, e)
    assert all(p.grad is None for p in before.values())


# ---- what others see of a step that is only tried


@pytest.mark.about_the_cpu("it tells what autocast does where there is no GPU")
def test_planning_for_a_gpu_leaves_other_threads_their_autocast_and_attention():
    q = torch.randn(4, 2, 8, 16, dtype=torch.bfloat16)
    attention = nn.functional.scaled_dot_product_attention
    methods = [getattr(torch.autocast, n) for n in ("__init__", "__enter__", "__exit__")]

    def look():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CUDA is not available
            cast = torch.autocast("cuda", dtype=torch.bfloat16)
        with cast, koila.micro_batch(2):
            product = torch.ones(2, 2) @ torch.ones(2, 2)
            x = lazy(q)
            out = nn.functional.scaled_dot_product_attention(x, x, x)
            n_nodes = _core.tape_of(out).n_nodes
            return cast.device, product.dtype, koila.run(out), n_nodes

    expected, found = in_a_thread(look), []

    def step(x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
            found.append(in_a_thread(look))
            # a second plan begins and ends while the first one records
            found.append(in_a_thread(lambda: koila.plan(inner, x0, device="h100-80gb") and look()))
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
        return nn.functional.scaled_dot_product_attention(x, x, x).float().sum()

    def inner(x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return nn.functional.scaled_dot_product_attention(x, x, x).float().sum()

    x0 = torch.empty(4, 2, 8, 16, dtype=torch.bfloat16)
    koila.plan(step, x0, device="h100-80gb")
    assert len(found) == 2
    for got in found:
        assert got[:2] == expected[:2] and torch.equal(got[2], expected[2])
        assert got[3] == expected[3], "the attention was recorded as on the GPU"
    assert nn.functional.scaled_dot_product_attention is attention
    assert methods == [getattr(torch.autocast, n) for n in ("__init__", "__enter__", "__exit__")]


class Watched(nn.Module):
    """Looks at the module as another thread would, while it runs."""

    def __init__(self, original=None):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)
        self.lstm = nn.LSTM(3, 3, batch_first=True)
        self.seen = []

    def forward(self, x):
        y = self.lstm(self.norm(self.linear(x))[:, None])[0][:, 0]
        self.seen.append((y.shape[0], in_a_thread(self.look)))
        return y

    def look(self):
        model = self.seen_of
        flags = [m.training for m in model.modules()]
        return flags, float(model.linear.weight.detach().abs().sum()), model.norm.running_var.sum()


@pytest.mark.about_the_cpu("threads of the test make tensors where they like")
@pytest.mark.parametrize("frozen", [False, True])
def test_the_shapes_of_an_opaque_module_are_looked_up_unseen(frozen):
    model = Watched()
    object.__setattr__(model, "seen_of", model)  # no child
    model.norm.train(not frozen)
    weight = float(model.linear.weight.detach().abs().sum())
    statistics = model.norm.running_var.clone()
    flags = [m.training for m in model.modules()]
    y = koila.opaque(model)(lazy(torch.randn(6, 4)))
    (n_rows, seen), *rest = model.seen
    assert not rest and n_rows == 2, "a look-up runs two rows, once"
    assert seen == (flags, weight, statistics.sum())
    assert torch.equal(model.norm.running_var, statistics)
    assert [m.training for m in model.modules()] == flags
    y.sum().backward()
    assert model.linear.weight.grad is not None


@pytest.mark.about_the_cpu("a compiler for the CPU")
def test_a_compiled_opaque_module_is_not_compiled_for_its_look_up():
    shapes = []

    def backend(graph, inputs):
        shapes.extend(tuple(t.shape) for t in inputs)
        return graph.forward

    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh())
    compiled = torch.compile(model, backend=backend, dynamic=False)
    x = torch.randn(6, 4)
    y = koila.opaque(compiled)(lazy(x))
    assert tuple(y.shape) == (6, 3) and not shapes
    found = koila.run(y).detach()
    assert shapes
    assert torch.allclose(found, nn.Sequential(*model)(x).detach(), atol=1e-6)


# ---- koila.plan(device=...) beside other threads


def deep(x):
    """A step that takes a while to predict."""
    for _ in range(40):
        x = nn.functional.gelu(x @ torch.ones(8, 8, requires_grad=True))
    return x.square().mean()


def plan_deep():
    return koila.plan(deep, torch.empty(64, 8), device="h100-80gb")


def test_other_threads_run_while_a_step_is_predicted(monkeypatch):
    """The counting thread can count inside the call only where the call lets go of the lock: the
    lock is taken from nobody while the interval lasts. How soon a waiting thread wakes up is the
    system's business, so the call is made until one did."""
    n, ended, predict = [0], threading.Event(), _core.predict
    seen = []

    def watched(*args, **kwargs):
        before = n[0]
        out = predict(*args, **kwargs)
        seen.append(n[0] - before)
        return out

    def count():
        while not ended.is_set():
            n[0] += 1
            time.sleep(0)

    monkeypatch.setattr(_core, "predict", watched)
    thread = threading.Thread(target=count)
    thread.start()
    sys.setswitchinterval(1000)
    try:
        while len(seen) < 200 and not any(seen):
            plan_deep()
    finally:
        ended.set()
        sys.setswitchinterval(1e-5)
        thread.join()
    assert any(seen)


def test_predictions_beside_threads_with_new_calls_are_those_of_each_alone():
    expected = plan_deep()

    def predict():
        return [plan_deep() for _ in range(4)]

    def ever_new(first):
        def run():
            before = _core.forget_after(50)
            for k in range(first, first + 60):
                x = lazy(torch.ones(2 + k, 3))
                (x * (1 + k)).tanh().reshape(-1).sum().item()
            return before

        return run

    found = together(predict, ever_new(0), predict, ever_new(1000))
    _core.forget_after(max(found[1], found[3]))
    for p in (*found[0], *found[2]):
        assert p.prediction == expected.prediction and str(p) == str(expected)


def test_a_thread_without_settings_reads_a_step_whose_thread_plans():
    x, _ = data(3)
    y = lazy(x) * 2
    found = []

    def step(z):
        found.append(in_a_thread(lambda: (koila.run(y), koila.plans())))
        return (z * z).sum()

    planned = koila.plan(step, x)
    value, plans = found[0]
    assert torch.equal(value, x * 2)
    assert planned.asked_by == "plan" and planned.n_run == 0


class _Nests(torch.autograd.Function):
    """Twice x. Its backward runs another one, and so on, `depth` times."""

    @staticmethod
    def forward(ctx, x, depth):
        ctx.depth = depth
        ctx.save_for_backward(x.detach())
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            z = _Nests.apply(y, ctx.depth - 1) if ctx.depth else y * y.detach()
            return torch.autograd.grad((z * grad).sum(), y)[0], None


@pytest.mark.parametrize("depth", [1, 31, 32, 33, 60, 61, 130])
def test_nested_backwards_are_eager_ones_where_torch_changes_the_thread(depth):
    def gradient(wrap):
        torch.manual_seed(0)
        w = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
        x = torch.randn(B, 4, dtype=torch.float64)
        _Nests.apply(wrap(x) @ w, depth).sum().backward()
        return w.grad

    with koila.micro_batch(5):
        found = gradient(lazy)
    assert is_plain(found)
    torch.testing.assert_close(found, gradient(lambda x: x), rtol=1e-12, atol=1e-12)
    # nothing is left behind: this backward is none of koila's
    v = torch.ones(3, requires_grad=True)
    (v * v).sum().backward()
    assert is_plain(v.grad)

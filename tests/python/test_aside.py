"""Stepping aside: where nothing is to be cut lazy() hands out plain copies, and torch does the step
alone. Every claim is about a loop that goes on, as users have it: nothing is lost, and koila is
back in time."""

import contextlib
import logging
import threading
import time

import pytest
import torch
from conftest import DEVICE
from memory_helpers import installed, only, out_of_memory
from torch import nn
from torch.nn import functional as F

import koila
from koila import _core, lazy
from koila._budget import from_environment

pytestmark = pytest.mark.skipif(not installed(), reason="torch's CPU memory cannot be counted here")
on_the_cpu = pytest.mark.about_the_cpu("torch's CPU bytes and their limit")

MIB = 1 << 20
AFTER, EVERY = 4, 50  # steps in this file; 16 and 1024 by default


@pytest.fixture(autouse=True)
def soon():
    """koila steps aside soon, and remembers nothing of another test's steps."""
    before = _core.aside_after(AFTER, EVERY)
    _core.configure_step_aside(None)
    yield before
    _core.configure_step_aside(False)
    _core.aside_after(*before)


def is_lazy(t):
    return isinstance(t, koila.LazyTensor)


class Loop:
    """A training loop of a user's: with koila's line, or without it."""

    def __init__(self, wrap=lazy, width=8, make=None):
        torch.manual_seed(0)
        self.model = (
            make() if make else nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.wrap = wrap
        self.was_lazy = []
        self.losses = []

    def step(self, x, y=None, forward=None):
        y = (x[:, 0] > 0).long() if y is None else y
        x, y = self.wrap(x, y)
        self.was_lazy.append(is_lazy(x))
        loss = F.cross_entropy((forward or self.model)(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        return loss

    def steps(self, n, rows=6):
        for i in range(n):
            self.step(batch(i, rows))
        return self

    @property
    def is_aside(self):
        return not self.was_lazy[-1]


def batch(i, rows=6):
    made = torch.randn(rows, 4, generator=torch.Generator("cpu").manual_seed(i), device="cpu")
    return made.to(DEVICE)


def parameters(loop):
    return [p.detach().clone() for p in loop.model.parameters()]


def assert_same(got, expected):
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def aside_loop(**options):
    loop = Loop(**options).steps(AFTER + 2)
    assert loop.was_lazy == [True] * AFTER + [False] * 2
    return loop


# ---- what it is


def test_a_loop_comes_to_the_same_numbers_aside():
    lazily, plainly = Loop().steps(40), Loop(lambda *v: v).steps(40)
    assert lazily.was_lazy.count(True) == AFTER and lazily.is_aside
    assert lazily.losses == pytest.approx(plainly.losses, rel=1e-5)
    assert_same(parameters(lazily), parameters(plainly))


def test_another_loop_would_be_noticed():
    """The comparison above can fail."""
    lazily, plainly = Loop().steps(40), Loop(lambda *v: v).steps(39)
    plainly.step(batch(7))
    with pytest.raises(AssertionError):
        assert_same(parameters(lazily), parameters(plainly))


def test_sixteen_steps_are_recorded_by_default_and_one_in_1024(soon):
    assert soon == (16, 1024)
    _core.aside_after(*soon)
    w, x, lazily = torch.ones(3, requires_grad=True), torch.ones(5, 3), []
    for _ in range(16 + 1024 + 3):
        given = lazy(x)
        lazily.append(is_lazy(given))
        (given * w).sum().backward()
    assert [i for i, was in enumerate(lazily) if was] == [*range(16), 16 + 1024]


def test_what_flows_aside_is_plain_and_answers_like_lazy():
    loop = aside_loop()
    x = lazy(*(batch(0), torch.zeros(6, dtype=torch.long)))[0]
    loss = loop.model(x).sum()
    for t in (x, loss):
        assert type(t) is torch.Tensor
        assert t.torch() is t and t.run() is t and koila.run(t) is t


def test_the_plan_tells_it():
    loop = Loop().steps(AFTER)
    assert koila.last_plan().n_aside == 0 and "stepped" not in str(koila.last_plan())
    recorded = koila.last_plan()
    loop.steps(3)
    plan = koila.last_plan()
    assert plan.n_aside == 3 and plan.n_micro_batches == 1 and plan.batch == 6
    assert "stepped aside, plain PyTorch since 3 steps" in str(plan)
    assert plan.predicted_peak_bytes == recorded.predicted_peak_bytes
    assert koila.plans()[-1].n_aside == 0, "what ran is told as it ran"
    loop.steps(1, rows=7)
    assert koila.last_plan().n_aside == 0 and koila.last_plan().batch == 7


def test_the_log_tells_it_each_time_that_koila_steps_aside(caplog):
    caplog.set_level(logging.INFO, "koila")
    loop = Loop()
    for rows in (6, 6, 7, 6):
        for _ in range(AFTER + 2):
            loop.step(torch.randn(rows, 4))
    told = [r.getMessage() for r in caplog.records if "torch does the next ones" in r.getMessage()]
    assert len(told) == 2 and loop.was_lazy.count(False) == 2 + 6 + 2 + 6


def test_explain_of_a_step_aside_gives_the_plan_of_the_recorded_one():
    loop = aside_loop()
    loss = loop.step(batch(0))
    assert koila.explain(loss).n_aside == 3
    loop.steps(1, rows=5)
    with pytest.raises(ValueError, match="expected a lazy value"):
        koila.explain(loss)


def test_the_tensor_that_was_given_is_never_written():
    loop = aside_loop()
    x = batch(0)
    before, version = x.clone(), x._version
    for write in (
        lambda t: t.add_(1),
        lambda t: t[0].zero_(),
        lambda t: t.view(-1).mul_(2),
        lambda t: t.numpy(force=True).fill(0),
    ):

        def written(t, write=write):
            write(t)
            return loop.model(t)

        loop.step(x, forward=written)
        assert loop.is_aside and torch.equal(x, before) and x._version == version


def test_a_write_to_the_given_tensor_changes_no_step():
    """It is copied when lazy() is called."""

    def program(wrap):
        loop = Loop(wrap)
        for i in range(3 * AFTER):
            x = batch(i)

            def forward(t, x=x, i=i):
                out = loop.model(t)
                if i >= 2 * AFTER:
                    x.zero_()
                return out

            loop.step(x, forward=forward)
        return loop

    taken = program(lazy)
    assert taken.is_aside
    assert_same(parameters(taken), parameters(program(lambda *v: tuple(t.clone() for t in v))))


def test_one_tensor_given_twice_stays_one():
    w = torch.ones(3, requires_grad=True)
    for _ in range(AFTER + 1):
        a, b = lazy(*[torch.ones(5, 3)] * 2)
        (a * w).sum().backward()
    assert not is_lazy(a) and a is b


@pytest.mark.parametrize("n_bytes", [40, 1 << 20])
def test_copies_are_copies(n_bytes):
    """Small ones are made in C."""
    w = torch.ones(1, requires_grad=True)
    x = torch.arange(n_bytes // 4, dtype=torch.float32).view(2, -1)
    for given in (
        x,
        x.t().contiguous().t(),
        x[:, ::2],
        torch._neg_view(x),
        x.expand(3, *x.shape)[0],
    ):
        for _ in range(AFTER + 1):
            copy = lazy(given)
            (copy * w).sum().backward()
        assert not is_lazy(copy) and torch.equal(copy, given)
        assert copy.data_ptr() != given.data_ptr() and copy.is_neg() == given.clone().is_neg()
        assert copy.stride() == given.clone().stride() and not copy.requires_grad


@pytest.mark.parametrize(
    "form",
    [
        lambda x, y: lazy(x, y),
        lambda x, y: lazy((x, y)),
        lambda x, y: lazy([x, y]),
        lambda x, y: tuple(lazy({"x": x, "y": y}).values()),
        lambda x, y: lazy(x, [y, None], batch=(0, [-2, None]))[0:1] + (0,),
        lambda x, y: tuple(lazy([[x], {"y": y}])[0]) * 2,
    ],
)
def test_batches_of_any_form_are_handed_out_in_it(form):
    w = torch.ones(3, requires_grad=True)
    kinds = []
    for _ in range(AFTER + 1):
        found = form(torch.ones(5, 3), torch.zeros(5, 2))
        kinds.append((type(found), len(found), is_lazy(found[0])))
        (found[0] * w).sum().backward()
    assert [k[2] for k in kinds] == [True] * AFTER + [False]
    assert len({k[:2] for k in kinds}) == 1


def test_loaders_too():
    loop = Loop()
    data = torch.utils.data.TensorDataset(torch.randn(6 * 9, 4), torch.zeros(6 * 9).long())
    loader = torch.utils.data.DataLoader(data, batch_size=6, generator=torch.Generator(DEVICE))
    for x, y in lazy(loader):
        loop.wrap = lambda *v: v
        loop.step(x, y)
    assert loop.was_lazy == [True] * AFTER + [False] * (9 - AFTER)


def test_training_and_evaluation_step_aside_each_for_itself():
    loop, evaluated = Loop(), []
    for i in range(2 * AFTER):
        loop.step(batch(i))
        with torch.no_grad():
            x = lazy(batch(i))
            out = loop.model(x)
            float(out.sum())
        evaluated.append(is_lazy(x))
    assert loop.was_lazy == evaluated == [True] * AFTER + [False] * AFTER
    assert koila.last_plan().asked_by == "backward" and koila.last_plan().n_aside == AFTER


# ---- when it does not


def never(wrap, n=3 * AFTER):
    w = torch.ones(3, requires_grad=True)
    for _ in range(n):
        x = wrap()
        x = x[0] if isinstance(x, tuple) else x
        assert is_lazy(x)
        (x * w).sum().backward()


def test_it_can_be_turned_off():
    with koila.step_aside(False):
        never(lambda: lazy(torch.ones(5, 3)))
    for given in (0, None, "off"):
        with pytest.raises(ValueError, match="True or False"):
            koila.step_aside(given)


def test_it_can_be_turned_off_in_the_environment(monkeypatch):
    def asked(value):
        monkeypatch.setenv("KOILA_STEP_ASIDE", value)
        from_environment()

    try:
        asked("0")
        never(lambda: lazy(torch.ones(5, 3)))
        with koila.step_aside(True):
            assert not all(Loop().steps(AFTER + 1).was_lazy)
        with pytest.raises(ValueError, match="0 or 1"):
            asked("no")
        never(lambda: lazy(torch.ones(5, 3)))
        asked("1")
        assert not all(Loop().steps(AFTER + 1).was_lazy)
    finally:
        _core.configure_step_aside(True)


def test_inputs_that_need_gradients_are_always_lazy():
    never(lambda: lazy(torch.ones(5, 3, requires_grad=True)))


def test_several_calls_for_one_step_are_always_lazy():
    x, y = torch.ones(5, 3), torch.ones(5, 2)  # in the middle of a step they would be lazy already
    never(lambda: (lazy(x), lazy(y)))


def test_steps_that_are_cut_are_always_lazy():
    with koila.micro_batch(2):
        never(lambda: lazy(torch.ones(5, 3)))


def test_strict_steps_are_always_lazy():
    with koila.strict():
        never(lambda: lazy(torch.ones(5, 3)))


def test_steps_in_inference_mode_are_always_lazy():
    for _ in range(3 * AFTER):
        with torch.inference_mode():
            x = lazy(torch.ones(5, 3))
            float(x.sum())
        assert is_lazy(x)


def test_a_step_whose_backward_may_still_come_is_joined():
    w = torch.ones(3, requires_grad=True)
    for _ in range(AFTER + 2):
        (lazy(torch.ones(5, 3)) * w).sum().backward()
    first = (lazy(torch.ones(7, 3)) * w).sum()  # recorded, and waits
    x = lazy(torch.ones(5, 3))
    assert is_lazy(x)
    ((x * w).sum() + first).backward()


# ---- koila is back


def test_another_batch_size_is_recorded_at_once():
    loop = aside_loop().steps(1, rows=9)
    assert not loop.is_aside
    loop.steps(1)
    assert loop.is_aside, "the first kind is remembered"


@pytest.mark.parametrize("change", ["dtype", "dim", "grad", "stride"])
def test_other_inputs_are_recorded_at_once(change):
    w = torch.ones(5, requires_grad=True)

    def one(x, dim=0):
        x = lazy(x, batch=dim)
        (x * w).sum().backward()
        return is_lazy(x)

    for _ in range(AFTER + 1):
        was = one(torch.ones(5, 5))
    assert not was
    if change == "grad":
        with torch.no_grad():
            assert is_lazy(lazy(torch.ones(5, 5)))
    else:
        x = torch.ones(5, 5, dtype=torch.float64 if change == "dtype" else torch.float32)
        assert one(x.t() if change == "stride" else x, dim=int(change == "dim"))


@pytest.mark.parametrize("n_dims", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8]
)
def test_any_size_or_stride_that_is_another_is_recorded_at_once(dtype, n_dims):
    """C compares tensors where they lie in memory: with tensors of up to five dimensions all at
    once, else as torch tells."""
    w = torch.ones(1, requires_grad=True)
    sizes = [2, 3, 4, 2, 1, 3, 2][:n_dims]

    def one(x):
        x = lazy(x)
        if isinstance(x, koila.LazyTensor):
            assert x.dtype is dtype
        (x.to(torch.float32).sum() * w).sum().backward()
        return is_lazy(x)

    def one_of(sizes):
        return one(torch.ones(sizes).to(dtype))

    assert [one_of(sizes) for _ in range(AFTER + 2)] == [True] * AFTER + [False] * 2
    for d in range(n_dims):
        changed = [n + (i == d) for i, n in enumerate(sizes)]
        assert one_of(changed), d
        assert not one_of(sizes)
        wide = torch.ones([n + (i == d) for i, n in enumerate(sizes)]).to(dtype)
        seen = wide.narrow(d, 0, sizes[d])
        assert one(seen) == (seen.stride() != torch.ones(sizes).stride()), d


def test_a_plan_in_the_middle_is_a_plan():
    """koila.plan() records, whatever the steps before it were, and changes nothing for those after
    it."""
    loop = aside_loop()
    for _ in range(2):
        seen = []

        def step(x, y, loop=loop, seen=seen):
            a, b = lazy(batch(0), torch.zeros(6).long())
            seen += [is_lazy(x), is_lazy(a)]
            return F.cross_entropy(loop.model(x), y) + F.cross_entropy(loop.model(a), b)

        koila.plan(step, batch(0), torch.zeros(6).long())
        assert seen and all(seen)
        loop.steps(2)
        assert loop.is_aside


@on_the_cpu
def test_a_longer_batch_at_step_900_is_cut():
    """Under a budget in which plain PyTorch cannot do it."""
    _core.aside_after(16, 1024)
    small, large = batch(0, 8), batch(0, 4096)
    budget = 2 * MIB

    def program(wrap):
        loop = Loop(wrap, width=256)
        with only(budget) if wrap is lazy else contextlib.nullcontext():
            for _ in range(900):
                loop.step(small)
            was_aside = loop.is_aside
            loop.step(large)
            cut = koila.last_plan().n_micro_batches if wrap is lazy else 0
            for _ in range(3):
                loop.step(small)
        return loop, was_aside, cut

    lazily, was_aside, cut = program(lazy)
    assert was_aside and cut > 1 and lazily.is_aside
    plainly = program(lambda *v: v)[0]
    assert_same(parameters(lazily), parameters(plainly))
    with pytest.raises(RuntimeError) as refused, only(budget):
        Loop(lambda *v: v, width=256).step(large)
    assert out_of_memory(refused.value), "the budget would have been enough without koila"


@on_the_cpu
def test_shapes_that_grow_are_cut_when_they_must_be():
    lazily, plainly = Loop(width=256), Loop(lambda *v: v, width=256)
    slices, lazy_of = [], {}
    with only(4 * MIB):
        for rows in (64, 128, 4096, 8192):
            for _ in range(AFTER + 2):
                lazily.step(batch(1, rows))
                slices.append(koila.last_plan().n_micro_batches)
            lazy_of[rows] = lazily.was_lazy[-1]
    for rows in (64, 128, 4096, 8192):
        for _ in range(AFTER + 2):
            plainly.step(batch(1, rows))
    assert lazy_of == {64: False, 128: False, 4096: True, 8192: True}
    assert slices[0] == 1 and slices[-1] > 1
    assert_same(parameters(lazily), parameters(plainly))


@on_the_cpu
def test_a_budget_in_the_middle_brings_koila_back():
    rows = 4096
    lazily = Loop(width=256).steps(AFTER + 2, rows)
    assert lazily.is_aside
    with only(2 * MIB):
        lazily.steps(2, rows)
        assert not lazily.is_aside and koila.last_plan().n_micro_batches > 1
    before = _core.configure()
    koila.set_budget(_core.cpu_bytes_current() + 2 * MIB)
    try:
        lazily.steps(2, rows)
        assert not lazily.is_aside and koila.last_plan().n_micro_batches > 1
    finally:
        koila.set_budget(None)
        assert before["budget"] is None
    lazily.steps(1, rows)
    assert lazily.is_aside


def fake_system(root, available):
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: 99999999 kB\nMemAvailable: {available >> 10} kB\n"
    )
    _core.limits_from(str(root))


@on_the_cpu
def test_memory_that_shrinks_brings_koila_back(tmp_path):
    rows = 4096  # about 17 MiB
    try:
        fake_system(tmp_path, 4 << 30)
        loop = Loop(width=256).steps(AFTER + 2, rows)
        assert loop.is_aside
        fake_system(tmp_path, 30 * MIB)  # enough to be tried, too little to be spare
        loop.steps(1, rows)
        assert not loop.is_aside and "free" in _core.aside()["why"]
        fake_system(tmp_path, 4 << 30)
        loop.steps(AFTER + 1, rows)  # the step before may have been cut
        assert loop.is_aside
    finally:
        _core.limits_from("")


@on_the_cpu
@pytest.mark.parametrize("is_little", [True, False])
def test_the_system_is_asked_ten_times_a_second_and_of_little_steps_once(tmp_path, is_little):
    """A little step needs at most one part in 256 of what is free."""
    rows = 4096  # about 17 MiB
    try:
        fake_system(tmp_path, (32 if is_little else 1) << 30)
        loop = Loop(width=256).steps(AFTER + 2, rows)
        before = _core.resident()["asked"]
        for _ in range(3):
            time.sleep(0.15)
            loop.steps(1, rows)
            assert loop.is_aside
        assert _core.resident()["asked"] - before == (0 if is_little else 3)
        time.sleep(1)
        loop.steps(1, rows)
        assert _core.resident()["asked"] - before == (1 if is_little else 4)
    finally:
        _core.limits_from("")


@on_the_cpu
def test_out_of_memory_brings_koila_back_from_the_next_step_on():
    loop, plainly = aside_loop(), Loop(lambda *v: v).steps(AFTER + 2)

    def unlucky(x):
        _core.cpu_bytes_fail_nth(2)
        return loop.model(x)

    with pytest.raises(RuntimeError) as refused:
        loop.step(batch(0), forward=unlucky)
    _core.cpu_bytes_fail_nth(0)
    assert out_of_memory(refused.value) and loop.is_aside
    loop.steps(AFTER)
    assert not any(loop.was_lazy[AFTER : AFTER + 3]) and all(loop.was_lazy[AFTER + 3 :])
    assert "out of memory" in _core.aside()["why"]
    plainly.steps(AFTER)
    assert_same(parameters(loop), parameters(plainly))
    loop.steps(1)
    assert loop.is_aside


def test_a_device_that_is_full_brings_koila_back():
    loop = aside_loop()
    with pytest.raises(RuntimeError) as refused:
        loop.step(batch(0), forward=lambda x: loop.model(x) + torch.empty(1 << 44).sum())
    assert out_of_memory(refused.value) and not isinstance(refused.value, koila.KoilaError)
    loop.steps(1)
    assert loop.was_lazy[-2:] == [False, True]


@on_the_cpu
@pytest.mark.parametrize("n", range(1, 25))
def test_any_refusal_in_a_step_aside_is_torchs_own_and_the_next_step_is_recorded(n):
    """Also that of the copies."""
    loop, x = aside_loop(), batch(0)
    y = (x[:, 0] > 0).long()
    _core.cpu_bytes_fail_nth(n)
    failed = None
    try:
        loop.step(x, y)
    except RuntimeError as e:
        failed = e
    finally:
        _core.cpu_bytes_fail_nth(0)
    assert failed is None or (out_of_memory(failed) and not isinstance(failed, koila.KoilaError))
    loop.steps(1)
    assert loop.was_lazy[-1]


@on_the_cpu
def test_a_step_that_needs_more_is_looked_at():
    """The same inputs and another computation, which the recorded steps did not show."""
    loop = aside_loop()

    def hungry(x):
        return loop.model(x) + torch.ones(48 * MIB // 4).sum() * 0

    loop.step(batch(0), forward=hungry)
    assert loop.is_aside
    loop.step(batch(0), forward=hungry)
    assert not loop.is_aside
    loop.step(batch(0), forward=hungry)
    assert loop.is_aside, "it has room, and what it needs is known now"


@on_the_cpu
def test_more_that_is_held_is_looked_at():
    loop = aside_loop()
    held = torch.ones(64 * MIB // 4)
    loop.steps(3)
    assert loop.was_lazy[-3:] == [True, False, False] and held.numel()


def test_one_step_in_so_many_is_looked_at():
    loop = Loop().steps(AFTER + 3 * (EVERY + 1))
    lazily = [i for i, was in enumerate(loop.was_lazy) if was]
    assert lazily == [*range(AFTER), *(AFTER + k * (EVERY + 1) - 1 for k in (1, 2, 3))]


def test_what_forgets_plans_forgets_these_steps():
    loop = aside_loop()
    _core.forget()
    loop.steps(1)
    assert not loop.is_aside


def test_a_step_that_failed_does_not_count():
    loop = Loop()
    for i in range(3 * AFTER):
        if i % 2:
            loop.step(batch(i))
            continue
        with pytest.raises(RuntimeError, match="size|shape"):
            loop.step(batch(i), forward=lambda x: loop.model(x) @ torch.ones(9, 9))
    assert all(loop.was_lazy)


# ---- threads


def in_threads(n, work):
    """work(i) in n threads at once. What they raise is raised."""
    raised = []

    def one(i):
        try:
            if DEVICE != "cpu":
                torch.set_default_device(DEVICE)  # it is a thread's own
            work(i)
        except BaseException as e:
            raised.append(e)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not raised


def test_each_thread_steps_aside_for_itself():
    main = aside_loop()
    loops = [Loop() for _ in range(3)]  # threads share the seed
    in_threads(3, lambda i: loops[i].steps(AFTER + 2))
    expected = parameters(Loop(lambda *v: v).steps(AFTER + 2))
    for loop in loops:
        assert loop.was_lazy == [True] * AFTER + [False] * 2
        assert_same(parameters(loop), expected)
    assert main.steps(1).is_aside


def test_a_setting_of_one_thread_is_not_anothers():
    loop = aside_loop()
    inside, done = threading.Event(), threading.Event()

    def other():
        with koila.step_aside(False), koila.strict():
            inside.set()
            done.wait(20)

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(20)
    loop.steps(1)
    done.set()
    thread.join()
    assert loop.is_aside


def test_threads_that_end_leave_nothing():
    """Each context has a window for the peak of its steps, and there are few."""

    for _ in range(40):
        in_threads(1, lambda _: Loop().steps(AFTER + 1))
    loop = aside_loop()

    def hungry(x):
        return loop.model(x) + torch.ones(48 * MIB // 4).sum() * 0

    loop.step(batch(0), forward=hungry)
    loop.steps(1)
    assert DEVICE != "cpu" or not loop.is_aside


# ---- being told


def told_of(n_steps, one):
    """The steps that a listener is told of in so many steps, the first ones recorded."""
    seen = []
    with koila.on_step(seen.append):
        for _ in range(n_steps):
            one()
    assert _core.is_aside()
    return seen


def test_steps_that_torch_does_alone_are_told_as_such():
    loop, x, seen = Loop(), torch.randn(6, 4), []

    def look(told):
        seen.append((told, told.plan, loop.model[0].weight.grad is not None))

    with koila.on_step(look):
        for _ in range(AFTER + 3):
            loop.step(x)
    loop.step(x)  # nobody listens
    facts = [(t.aside, t.slices, t.micro_batch, t.batch) for t, _, _ in seen]
    assert facts == [(False, 1, 6, 6)] * AFTER + [(True, 1, 6, 6)] * 3
    assert all(there for _, _, there in seen)
    numbers = [t.number for t, _, _ in seen]
    assert numbers == sorted(set(numbers))
    for told, plan, _ in seen[AFTER:]:
        assert plan.n_aside and plan.measured_peak_bytes == told.measured_peak_bytes
        assert 0 < told.seconds < 10
        assert DEVICE != "cpu" or told.measured_peak_bytes > 0
    assert seen[-2][0].plan is None and seen[-1][0].plan is not None


@pytest.mark.parametrize("n, is_reentrant", [(1, False), (2, False), (1, True)])
def test_as_many_backwards_of_a_step_are_told_as_when_it_was_recorded(n, is_reentrant):
    model, x = nn.Linear(4, 3), torch.randn(6, 4)

    def one():
        out = model(lazy(x))
        if is_reentrant:
            out = torch.utils.checkpoint.checkpoint(torch.tanh, out, use_reentrant=True)
        for i in range(n):
            out.square().mean().backward(retain_graph=i + 1 < n)
        model.weight.sum().backward()  # none of koila's

    seen = told_of(AFTER + 2, one)
    assert [t.aside for t in seen] == [False] * (n * AFTER) + [True] * (n * 2)


def test_a_step_that_is_left_with_a_plain_result_hides_no_step_that_torch_does_alone():
    """Then every backward of the process goes through koila."""
    w, loop, x = torch.ones(3, requires_grad=True), Loop(), torch.randn(6, 4)
    left = (lazy(torch.ones(4, 3)) * w).sum()
    _core.has_exit(left)
    seen = told_of(AFTER + 3, lambda: loop.step(x))
    assert [t.aside for t in seen][-2:] == [True, True] and left is not None


def test_a_step_without_a_backward_is_not_told_when_torch_does_it_alone():
    model, x = nn.Linear(4, 3), torch.randn(6, 4)

    def one():
        model(lazy(x)).sum().item()
        model.weight.sum().backward()  # none of koila's

    assert told_of(AFTER + 2, one) == []


def test_a_callback_that_raises_does_so_after_the_gradients_of_a_step_done_alone():
    loop, x = Loop(), torch.randn(6, 4)
    for _ in range(AFTER + 1):
        loop.step(x)
    loop.model.zero_grad()
    with koila.on_step(lambda told: 1 / 0), pytest.raises(ZeroDivisionError):
        loop.step(x)
    assert loop.was_lazy[-1] is False and loop.model[0].weight.grad is not None

"""micro_batch(None) and micro_batch("fastest"): which of the sizes that fit is run, learned from
steps that run anyway. The clock is planted: an operator of the step puts it forward, by a time that
depends on the rows of the slice."""

import collections
import contextlib
import threading

import pytest
import torch
from torch import nn

import koila
from koila import _budget, _core, lazy

pytestmark = pytest.mark.about_the_cpu("on a GPU no time is taken without waiting for it")

ROWS, WIDTH = 64, 1024
FEWEST = 16  # rows, within ROOM
ROOM = 7 << 17
CALM = 8  # N_CALM of tuning.c
# .seconds: of a step, by the rows of its slices; .now: what the clock shows; .run: what happens too
PLANTED = threading.local()


def clock():
    return getattr(PLANTED, "now", 0.0)


@torch.library.custom_op("slices::slow", mutates_args=())
def slow(x: torch.Tensor) -> torch.Tensor:
    rows = x.size(0)
    if hasattr(PLANTED, "run"):
        PLANTED.run(rows)
    PLANTED.now = clock() + getattr(PLANTED, "seconds", {}).get(rows, 1.0) * rows / ROWS
    return x.clone()


slow.register_fake(torch.empty_like)
torch.library.register_autograd("slices::slow", lambda ctx, g: g)
koila.register_rule(slow, "S0->S0")


@pytest.fixture(autouse=True)
def clock_is_planted():
    _core.plant_clock(clock)
    yield
    _core.plant_clock(None)
    _core.configure_process(slices="auto")
    torch.use_deterministic_algorithms(False)


class Step:
    """A training step that is cut into slices of FEWEST rows within ROOM."""

    def __init__(self, whole=lambda m: m, opaque=False):
        torch.manual_seed(0)
        self.module = nn.Linear(8, WIDTH).double()
        self.x = torch.randn(ROWS, 8, dtype=torch.float64)
        self.apply = koila.opaque(self.module) if opaque else self.module
        self.loss(self.module, self.x).backward()
        self.expected = self.module.weight.grad.clone()
        self.module.zero_grad(set_to_none=True)
        self.held = _core.cpu_bytes_current()
        self.room = ROOM

    def loss(self, module, x):
        return slow(module(x)).exp().square().mean()

    def run(self):
        """The plan that ran; its gradients are eager's, within the budget."""
        self.module.zero_grad(set_to_none=True)
        with koila.budget(self.held + self.room):
            self.loss(self.apply, lazy(self.x)).backward()
        plan = koila.last_plan()
        assert torch.allclose(self.module.weight.grad, self.expected, rtol=1e-12, atol=1e-15)
        assert plan.measured_peak_bytes <= plan.budget_bytes
        return plan

    def sizes(self, n):
        return [self.run().micro_batch for _ in range(n)]


def in_a_context(work):
    """In a thread of its own: what was learned elsewhere is not known there."""
    outcome = []

    def run():
        try:
            outcome.append((work(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


def sizes_of(seconds, n, step=None):
    """The sizes of n steps that take so long, by rows."""

    def work():
        PLANTED.seconds = seconds
        return (step or Step()).sizes(n)

    return in_a_context(work)


# ---- what is chosen

ENOUGH = CALM + 2 + 5 * 11 + 5  # steps until the last of five sizes is decided, and some


@pytest.mark.parametrize(
    "seconds, best",
    [
        ({16: 0.016, 8: 0.016, 4: 0.016, 2: 0.016}, 16),
        ({16: 0.020, 8: 0.008, 4: 0.014, 2: 0.020}, 8),
        ({16: 0.024, 8: 0.024, 4: 0.006, 2: 0.012}, 4),
        ({16: 0.032, 8: 0.024, 4: 0.016, 2: 0.006}, 2),
    ],
    ids=["none is faster", "half", "a quarter, half is no slower", "an eighth"],
)
def test_a_step_settles_on_the_size_that_the_clock_prefers(seconds, best):
    sizes = sizes_of(seconds, ENOUGH)
    assert sizes[:CALM] == [FEWEST] * CALM
    assert sizes[-5:] == [best] * 5
    around = {22, 11, 6, 4, 3, 2}  # 1½ and ¾ times the slices of the best
    assert set(sizes) <= {16, 8, 4, 2} | around


@pytest.mark.parametrize(
    "seconds, best, room",
    [
        ({16: 0.016, 8: 0.016, 11: 0.008, 9: 0.008}, 11, ROOM),
        ({16: 0.020, 8: 0.014, 11: 0.008, 9: 0.008}, 11, ROOM),
        ({16: 0.020, 8: 0.008, 6: 0.004, 4: 0.010}, 6, ROOM),
        ({16: 0.016, 8: 0.024, 22: 0.008, 20: 0.008}, 22, ROOM),
        ({16: 0.016, 8: 0.024, 22: 0.008, 20: 0.008}, 16, ROOM * 11 // 16),
    ],
    ids=["between", "below half", "beyond half", "above", "above, which does not fit"],
)
def test_sizes_between_the_halves_are_tried_around_the_best(seconds, best, room):
    def work():
        PLANTED.seconds = seconds
        step = Step()
        step.room = room
        return step.sizes(ENOUGH), koila.last_plan()

    sizes, plan = in_a_context(work)
    assert plan.n_fewest == min(4, plan.n_micro_batches)
    assert sizes[:CALM] == [FEWEST] * CALM and sizes[-5:] == [best] * 5


def test_a_size_that_is_slower_is_left_after_three_runs():
    seen = collections.Counter(sizes_of({16: 0.008, 8: 0.03, 4: 0.001}, CALM + 20))
    assert seen[8] == seen[11] == seen[22] == 3 and set(seen) == {22, 16, 11, 8}


@pytest.mark.parametrize("half, chosen", [(1.0, 16), (0.9, 8)], ids=["as fast", "faster"])
def test_a_machine_that_slows_down_meanwhile_decides_nothing(half, chosen):
    def work():
        step = Step()
        for n in range(ENOUGH):
            PLANTED.seconds = {rows: 0.02 * 1.03**n for rows in (16, 8, 4, 2)}
            PLANTED.seconds[8] *= half
            size = step.run().micro_batch
        return size

    assert in_a_context(work) == chosen


def test_sizes_are_compared_again_after_five_hundred_steps_and_not_before():
    def work():
        PLANTED.seconds = {16: 0.02, 8: 0.01, 4: 0.02}
        step = Step()
        assert step.sizes(ENOUGH)[-1] == 8
        PLANTED.seconds = {16: 0.02, 8: 0.04, 4: 0.04}
        return step.sizes(512 + 20)

    sizes = in_a_context(work)
    assert set(sizes[: 512 - ENOUGH]) == {8} and sizes[-1] == 16


def test_fastest_begins_at_the_second_step_and_cuts_what_fits_whole():
    def work():
        PLANTED.seconds = {64: 0.02, 32: 0.006, 16: 0.02, 8: 0.02}
        step = Step()
        step.room = 4 * ROOM
        with koila.micro_batch("fastest"):
            return step.sizes(40)

    sizes = in_a_context(work)
    assert sizes[:2] == [64, 64] and 32 in sizes[2:5] and sizes[-5:] == [32] * 5


def test_fastest_cuts_nothing_that_strict_would_refuse():
    class Sorted(Step):
        def loss(self, module, x):
            return slow(module(x)).sort(dim=0)[0].exp().square().mean()

    def work():
        PLANTED.seconds = {64: 0.02, 32: 0.006, 16: 0.02, 8: 0.02}
        step = Sorted()
        step.room = 64 * ROOM
        with koila.micro_batch("fastest"):
            cut = set(step.sizes(10))
            with koila.strict():
                return cut, set(step.sizes(10))

    cut, strictly = in_a_context(work)
    assert 32 in cut and strictly == {64}


def test_the_plan_tells_how_many_slices_would_do():
    def work():
        PLANTED.seconds = {16: 0.02, 8: 0.006, 4: 0.02}
        step = Step()
        before = step.run()
        step.sizes(ENOUGH)
        return before, step.run()

    before, after = in_a_context(work)
    assert (before.n_micro_batches, before.n_fewest) == (4, 4) and "would fit" not in str(before)
    assert (after.n_micro_batches, after.n_fewest) == (8, 4) and "4 would fit" in str(after)


def test_each_thread_has_its_own():
    chosen = {}
    turn = threading.Lock()  # their bytes are counted together
    made = threading.Barrier(2)

    def work(name, seconds):
        PLANTED.seconds = seconds
        with turn:
            step = Step()
            step.loss(step.module, step.x).backward()
        made.wait()  # both have their gradients: how the turns fall changes no one's room
        own = sum(p.grad.nbytes for p in step.module.parameters())
        step.held = _core.cpu_bytes_current() - own
        made.wait()
        sizes = []
        for _ in range(ENOUGH):
            with turn:
                sizes.append(step.run().micro_batch)
        chosen[name] = sizes[-1]

    threads = [
        threading.Thread(target=work, args=("half", {16: 0.05, 8: 0.01, 4: 0.05, 2: 0.05})),
        threading.Thread(target=work, args=("fewest", {16: 0.01, 8: 0.05, 4: 0.05, 2: 0.05})),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert chosen == {"half": 8, "fewest": 16}


# ---- where nothing is tried

FASTER = {16: 0.012, 8: 0.002, 4: 0.001}
LONG_ENOUGH = CALM + 10


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def told_by_the_environment():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KOILA_TUNE", "0")
        _budget.from_environment()
    yield
    _core.configure_process(slices="auto")


OFF = {
    "fewest": lambda: koila.micro_batch("fewest"),
    "forced": lambda: koila.micro_batch(FEWEST),
    "deterministic algorithms": deterministic,
    "KOILA_TUNE=0": told_by_the_environment,
}


@pytest.mark.parametrize("how", OFF)
def test_nothing_is_tried_where_it_is_off(how):
    def work():
        PLANTED.seconds = FASTER
        with OFF[how]():
            return Step().sizes(LONG_ENOUGH)

    assert set(in_a_context(work)) == {FEWEST}


def test_micro_batch_none_inside_turns_it_on_again():
    def work():
        PLANTED.seconds = FASTER
        step = Step()
        with koila.micro_batch("fewest"):
            with koila.micro_batch(None):
                inside = step.sizes(LONG_ENOUGH)
            return inside, step.sizes(2)

    inside, after = in_a_context(work)
    assert set(inside) != {FEWEST} and set(after) == {FEWEST}


def test_a_word_of_the_environment_that_means_nothing_is_refused(monkeypatch):
    monkeypatch.setenv("KOILA_TUNE", "often")
    with pytest.raises(ValueError, match="KOILA_TUNE=often: expected 0 or 1"):
        _budget.from_environment()


def test_nothing_is_tried_of_a_step_with_a_module_that_runs_as_it_is():
    """A compiled one would be compiled again for each size."""
    sizes = in_a_context(lambda: sizes_of(FASTER, LONG_ENOUGH, Step(opaque=True)))
    assert len(set(sizes)) == 1


@pytest.mark.parametrize("times, tried", [(1.0, True), (0.2, False)], ids=["long", "short"])
def test_nothing_is_tried_of_a_step_that_takes_next_to_no_time(times, tried):
    sizes = sizes_of({rows: times * FASTER[rows] for rows in FASTER}, LONG_ENOUGH)
    assert (set(sizes) != {FEWEST}) == tried


def test_nothing_is_tried_while_settings_change():
    def work():
        PLANTED.seconds = FASTER
        step = Step()
        sizes = []
        for i in range(LONG_ENOUGH):
            step.room = ROOM + 64 * (i // CALM)
            sizes.append(step.run().micro_batch)
        return sizes

    assert set(in_a_context(work)) == {FEWEST}


def test_nothing_is_tried_of_an_evaluation():
    def work():
        PLANTED.seconds = FASTER
        step = Step()
        sizes = []
        for _ in range(LONG_ENOUGH):
            with torch.no_grad(), koila.budget(step.held + ROOM):
                koila.run(step.loss(step.module, lazy(step.x)))
            sizes.append(koila.last_plan().n_micro_batches)
        return sizes

    sizes = in_a_context(work)
    assert sizes[0] > 1 and len(set(sizes)) == 1


# ---- a trial that goes wrong


class Interrupt(BaseException):
    pass


@pytest.mark.parametrize("error", [ValueError, Interrupt], ids=["exception", "interrupt"])
def test_a_trial_that_is_stopped_changes_nothing_and_the_next_step_goes_on(error):
    def work():
        PLANTED.seconds = FASTER
        step = Step()
        step.sizes(CALM + 2)
        before = {k: v.clone() for k, v in step.module.state_dict().items()}

        sizes = set()

        def stop(rows):
            sizes.add(rows)
            if 8 in sizes:  # also when what is merely held is left out
                raise error("planted")

        PLANTED.run = stop
        with pytest.raises(error, match="planted"):
            step.sizes(5)
        assert step.module.weight.grad is None
        assert all(torch.equal(v, before[k]) for k, v in step.module.state_dict().items())
        PLANTED.run = lambda rows: None
        return step.sizes(ENOUGH)

    assert in_a_context(work)[-1] < FEWEST


def test_a_size_that_runs_out_of_memory_is_not_tried_again_and_its_step_is_finished():
    ran_out = []

    def refuse(rows):
        if rows == 8:
            ran_out.append(rows)
            raise torch.OutOfMemoryError("planted")

    def work():
        PLANTED.seconds = FASTER
        step = Step()
        step.sizes(2)  # its operators are known at these rows
        PLANTED.run = refuse
        return step.sizes(ENOUGH)

    sizes = in_a_context(work)
    assert len(ran_out) == 1 and sizes.count(FEWEST) == ENOUGH - 1


def test_a_size_whose_plan_no_longer_fits_gives_way_to_the_fewest_slices():
    """Of this step every size fits where the fewest do; a size is made to need more memory, by what
    is learned of its operators."""

    def work():
        PLANTED.seconds = {16: 0.02, 8: 0.006, 4: 0.02}
        step = Step()
        assert step.sizes(ENOUGH)[-1] == 8
        block = []

        def take(rows):
            if rows == 8:
                block.append(torch.empty(4 * ROOM, dtype=torch.uint8))

        PLANTED.run = take
        return step.sizes(CALM), step.sizes(3)

    during, after = in_a_context(work)
    assert 8 not in during[2:] and 8 not in after

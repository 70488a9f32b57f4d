"""What koila tells: the log, on_step(), the bar of a long step."""

import contextlib
import fcntl
import io
import logging
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import koila
from helpers import Cut
from koila import _core, _log, _progress, lazy


@pytest.fixture(autouse=True)
def nothing_was_told():
    """Plans and causes that another test has met are news here."""
    _core.forget()
    _log._told_causes.clear()
    _log._last_cut.clear()


def plain_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 3))


def step(model, n=10, rows=4, reads=0):
    torch.manual_seed(0)
    x, y = lazy(torch.randn(n, 5), torch.randint(0, 3, (n,)))
    with koila.micro_batch(rows):
        loss = F.cross_entropy(model(x), y)
        for _ in range(reads):
            (loss * 1).item()
        loss.backward()


def lines(caplog, level):
    return [r.getMessage() for r in caplog.records if r.name == "koila" and r.levelno == level]


# ---- the log


def test_a_cut_is_told_when_it_is_chosen_and_when_it_changes(caplog):
    caplog.set_level(logging.INFO, "koila")
    model = plain_model()
    for rows in (4, 4, 5, 5, 4, 10, 10):
        step(model, rows=rows)
    p = koila.last_plan()
    told = lines(caplog, logging.INFO)
    assert [t.split("step (test_told.py:")[1].split(") ")[1].split(":")[0] for t in told] == [
        "cut into 3 × 4 rows of 10, the last 2",
        "cut into 2 × 5 rows of 10",
        "runs whole, 10 rows",
    ]
    assert told[2].endswith(f" of {koila._budget.readable(p.budget_bytes)}")
    assert "; plain would need " in told[0] and "plain" not in told[2]


def test_a_step_that_is_as_before_asks_nothing_of_the_log(caplog, monkeypatch):
    """Told in full, or as far as the level lets it, C does not call Python any more."""
    asked, looked = [], []
    whole = _core.plan_numbered
    monkeypatch.setattr(_core, "plan_numbered", lambda n: looked.append(n) or whole(n))
    _core.tell_to(lambda *args: asked.append(args) or _log.told(*args), _log.LOGGER._cache)
    try:
        model = plain_model()
        for level, n_asked, n_looked in (
            (logging.CRITICAL, 1, 0),
            (logging.WARNING, 1, 1),
            (logging.INFO, 1, 1),
            (logging.INFO, 0, 0),
        ):
            caplog.set_level(level, "koila")
            asked.clear(), looked.clear()
            for _ in range(3):
                step(model)
            assert (len(asked), len(looked)) == (n_asked, n_looked), level
    finally:
        _log.install()


def test_a_gather_is_warned_of_once_with_its_line_and_a_remedy(caplog):
    caplog.set_level(logging.WARNING, "koila")
    w = torch.randn(5, 5, requires_grad=True)
    held = torch.ones(1 << 20)  # what else a program holds, it is large beside the step
    for n in (12, 12, 16):
        with koila.micro_batch(4):
            h = lazy(torch.randn(n, 5)) @ w
            h.sort(0).values.square().sum().backward()
    [told] = [t for t in lines(caplog, logging.WARNING) if "aten::sort" in t and "back" not in t]
    assert told.startswith("test_told.py:") and "f32[12, 5]" in told and "To avoid that" in told
    assert "register_rule" not in told, "torch's own operators have their rules"
    assert held.all()


@torch.library.custom_op("told::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@twice.register_fake
def _(x):
    return torch.empty_like(x)


def test_a_rule_is_asked_for_where_it_would_help(caplog):
    caplog.set_level(logging.WARNING, "koila")
    with koila.micro_batch(4):
        twice(lazy(torch.randn(12, 512)).exp()).sum().item()
    [told] = lines(caplog, logging.WARNING)
    assert "told::twice" in told and "koila.register_rule()" in told


def test_no_rule_is_asked_for_of_an_operator_of_koila(caplog):
    """A convolution along the height, of which batch norm needs all rows."""
    caplog.set_level(logging.WARNING, "koila")
    norms = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), norms[0], nn.Conv2d(8, 8, 3, padding=1), norms[1]
    )
    with Cut(4):
        model(lazy(torch.randn(1, 1, 32, 32))).square().mean().backward()
    told = [text for text in lines(caplog, logging.WARNING) if "koila::conv_rows needs" in text]
    assert told and not any("register_rule" in text for text in told)


def test_a_gather_that_takes_next_to_nothing_is_not_warned_of(caplog):
    """The median of a number for each row, beside what is much larger."""
    caplog.set_level(logging.WARNING, "koila")
    w = torch.randn(5, 2048, requires_grad=True)
    with koila.micro_batch(4):
        logits = lazy(torch.randn(12, 5)) @ w
        (logits.logsumexp(1).sum() + logits.argmax(1).median()).backward()
    gathers = [g for plan in koila.plans() for g in plan.gathers]
    assert any(g.operator == "aten::median" and g.bytes == 12 * 8 for g in gathers)
    assert lines(caplog, logging.WARNING) == []


def test_batch_norm_that_runs_layers_again_is_warned_of(caplog):
    caplog.set_level(logging.WARNING, "koila")
    norms = (nn.BatchNorm1d(32), nn.GroupNorm(4, 32))
    for norm in norms:
        model = nn.Sequential(nn.Linear(5, 32), norm, nn.Tanh(), nn.Linear(32, 3))
        step(model), step(model, rows=5)
    [told] = lines(caplog, logging.WARNING)
    more = round(100 * (koila.plans()[-4].replay_ratio - 1))
    assert f"{more} % of the step's work" in told and "batch_norm" in told and "eval()" in told


@pytest.mark.about_the_cpu("the budget is the CPU's")
def test_batch_norm_is_the_cause_also_where_results_are_dropped(caplog):
    caplog.set_level(logging.WARNING, "koila")
    wide = [m for _ in range(8) for m in (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh())]
    model = nn.Sequential(nn.Linear(5, 64), *wide, nn.Linear(64, 3))
    x, y = torch.randn(4096, 5), torch.randint(0, 3, (4096,))
    with koila.budget(_core.cpu_bytes_current() + 2000 * 1024), koila.axes("batch"):
        F.cross_entropy(model(lazy(x)), lazy(y)).backward()
    plan = koila.last_plan()
    assert plan.n_recomputed and plan.n_micro_batches > 1
    [told] = lines(caplog, logging.WARNING)
    assert "batch_norm" in told and "eval()" in told


def test_many_reads_are_warned_of_and_few_are_not(caplog):
    caplog.set_level(logging.WARNING, "koila")
    model = plain_model()
    step(model, rows=None, reads=_log.MANY_READS - 1)
    assert lines(caplog, logging.WARNING) == []
    step(model, rows=None, n=11, reads=_log.MANY_READS)
    [told] = lines(caplog, logging.WARNING)
    assert told.startswith("test_told.py:") and f"{_log.MANY_READS} values" in told


def test_a_step_that_was_cut_again_is_warned_of(caplog):
    caplog.set_level(logging.WARNING, "koila")
    model = plain_model()
    step(model), step(model)
    allocations = _core.cpu_bytes_n_allocs()
    step(model)
    allocations = _core.cpu_bytes_n_allocs() - allocations
    for n in range(allocations // 2, allocations):  # one of them is inside a slice
        _core.cpu_bytes_fail_nth(n)
        try:
            step(model)
        except Exception:
            pass
        finally:
            _core.cpu_bytes_fail_nth(0)
        if koila.last_plan().retries:
            break
    assert koila.last_plan().retries
    assert any("although the plan fitted" in t for t in lines(caplog, logging.WARNING))


@pytest.mark.about_the_cpu("the budget is the CPU's")
def test_rows_that_were_asked_for_and_do_not_fit_are_said_to_be_the_cause(caplog):
    caplog.set_level(logging.WARNING, "koila")
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1))
    x = torch.randn(1024, 64)

    def run(size):
        model.zero_grad()
        with koila.micro_batch(size):
            model(koila.lazy(x)).sum().backward()
        return koila.last_plan()

    run(512)
    fits = run(256).predicted_peak_bytes
    with koila.budget(fits + 4096):
        plan = run(512)
    assert plan.retries and plan.measured_peak_bytes <= fits + 4096
    [told] = [t for t in lines(caplog, logging.WARNING) if "memory ran out" in t]
    assert "2 × 512 rows of 1024 need" in told and "although" not in told


def test_what_a_handler_raises_does_not_stop_a_step(monkeypatch):
    class Bad(logging.Handler):
        def emit(self, record):
            raise KeyError("planted")

    found = []
    monkeypatch.setattr(sys, "unraisablehook", lambda u: found.append(u.exc_value))
    handler, model = Bad(), plain_model()
    _log.LOGGER.addHandler(handler)
    _log.LOGGER.setLevel(logging.INFO)
    try:
        step(model)
    finally:
        _log.LOGGER.removeHandler(handler)
        _log.LOGGER.setLevel(logging.NOTSET)
    assert model[0].weight.grad is not None and [type(e) for e in found] == [KeyError]


def test_ctrl_c_while_the_log_speaks_is_raised_after_it(caplog, ctrl_c):
    """It comes out of the read, and is not lost with what handlers raise."""

    class Interrupting(logging.Handler):
        def emit(self, record):
            signal.raise_signal(signal.SIGINT)
            spoken.append(record)

    spoken, handler = [], Interrupting()
    caplog.set_level(logging.INFO, "koila")
    _log.LOGGER.addHandler(handler)
    x = lazy(torch.randn(12, 5))
    try:
        with koila.micro_batch(4), pytest.raises(KeyboardInterrupt):
            (x * 2).sum().item()
            for _ in range(10):  # it may come right after
                pass
    finally:
        _log.LOGGER.removeHandler(handler)
    assert len(spoken) == 1


PROGRAM = """
import torch, koila
x = koila.lazy(torch.randn(12, 5))
w = torch.randn(5, 5, requires_grad=True)
with koila.micro_batch(4):
    (x @ w).sum().backward()
"""


@pytest.mark.parametrize(
    "asked, expected",
    [("INFO", "koila: step (train.py:6) cut into 3 × 4 rows of 12:"), ("warning", "")],
)
def test_the_environment_turns_the_log_on(asked, expected, tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    env = {**os.environ, "KOILA_LOG": asked}
    p = subprocess.run(
        [sys.executable, "train.py"], capture_output=True, text=True, env=env, cwd=tmp_path
    )
    assert p.returncode == 0 and p.stderr.startswith(expected), p.stderr
    assert p.stderr.count("\n") == (1 if expected else 0)


def test_a_level_that_there_is_not_is_refused(monkeypatch):
    monkeypatch.setenv("KOILA_LOG", "loud")
    with pytest.raises(ValueError, match="KOILA_LOG=loud: expected DEBUG, INFO"):
        _log.from_environment()


# ---- on_step


def test_a_callback_gets_the_facts_of_the_plan_with_gradients_in_place():
    model, seen = plain_model(), []

    def look(told):
        seen.append((told, told.plan, model[0].weight.grad is not None))

    with koila.on_step(look):
        step(model)
        step(model, rows=10)
    step(model)
    assert [t.slices for t, _, _ in seen] == [3, 1] and all(there for _, _, there in seen)
    for told, plan, _ in seen:
        for name in ("batch", "micro_batch", "axis", "budget_bytes", "retries", "seconds"):
            assert getattr(told, name) == getattr(plan, name), name
        assert told.predicted_peak_bytes == plan.predicted_peak_bytes
        assert told.measured_peak_bytes == plan.measured_peak_bytes > 0
        assert told.gathers == len(plan.gathers) == 0 and 0 < told.seconds < 10
    for _ in range(17):
        step(model)
    assert seen[0][0].plan is None


def test_only_backwards_that_ran_a_step_are_told():
    seen, w = [], torch.randn(5, 5, requires_grad=True)
    with koila.on_step(seen.append):
        (torch.randn(3, 5) @ w).sum().backward()  # plain
        x = lazy(torch.randn(12, 5))
        (x @ w).sum().item()  # a read
        koila.plan(lambda v: (v @ w).sum(), torch.randn(12, 5))
        assert seen == []
        torch.autograd.grad((x @ w).sum(), w)
        assert len(seen) == 1
        checkpointed = torch.utils.checkpoint.checkpoint(
            torch.tanh, lazy(torch.randn(12, 5)) @ w, use_reentrant=True
        )
        checkpointed.sum().backward()  # a backward within it
    assert len(seen) == 2


def test_what_a_callback_raises_comes_after_the_gradients_and_after_the_others():
    model, calls = plain_model(), []

    def bad(told):
        calls.append("bad")
        raise KeyError("planted")

    expected = plain_model()
    step(expected)
    with koila.on_step(bad), koila.on_step(lambda told: calls.append("good")):
        with pytest.raises(KeyError, match="planted"):
            step(model)
        assert calls == ["bad", "good"]
    for p, e in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(p.grad, e.grad)
    step(model)  # the step was over: the next one is as ever
    assert calls == ["bad", "good"] and koila._backward.after_step is None


def test_a_callback_that_is_a_decorated_function_stays_one():
    @koila.on_step
    def mine(told):
        "Mine."
        seen.append(told)
        return len(seen)

    seen = []
    step(plain_model())
    mine.remove(), mine.remove()
    step(plain_model())
    assert len(seen) == 1 and mine(seen[0]) == 2 and mine.__doc__ == "Mine."
    assert "mine, removed" in repr(mine) and "0x" not in repr(mine) + repr(seen[0])
    with pytest.raises(TypeError, match="expected a function"):
        koila.on_step(3)


def test_a_callback_may_run_a_step_and_is_told_in_the_thread_that_runs_it():
    model, other, seen = plain_model(), plain_model(), []

    def look(told):
        seen.append((threading.get_ident(), told.batch))
        if told.batch == 10:
            step(other, n=12)

    with koila.on_step(look):
        thread = threading.Thread(target=step, args=(model,))
        thread.start()
        thread.join()
    assert [batch for _, batch in seen] == [10, 12]
    assert {who for who, _ in seen} == {thread.ident}


def test_the_log_is_asked_about_a_plan_once_for_each_level(monkeypatch):
    asked = []

    def told(*args, right=_log.told):
        asked.append(args)
        return right(*args)

    logger = logging.getLogger("koila")
    monkeypatch.setattr(logger, "level", logger.level)
    _core.tell_to(told, logger._cache)
    try:
        with koila.step_aside(False):
            model = plain_model()
            logger.setLevel(logging.ERROR)
            for _ in range(4):
                step(model)
            assert len(asked) == 1
            logging.disable(logging.CRITICAL)  # any level, of anybody
            step(model), step(model)
            assert len(asked) == 2
            logging.disable(logging.NOTSET)
            logger.disabled = True  # which no level tells
            step(model), step(model)
            assert len(asked) == 4
            logger.disabled = False
            step(model), step(model)
            assert len(asked) == 5
    finally:
        logger.disabled = False
        _log.install()


# ---- the bar


@pytest.fixture
def bars(monkeypatch):
    """A terminal, two seconds that are over at once, and the bars that were made."""
    made = []

    class Bar:
        def __init__(self, total, initial, **options):
            self.total, self.n, self.told, self.is_open = total, initial, [], True
            made.append(self)

        def update(self, more):
            self.n += more
            self.told.append(self.n)

        def close(self):
            self.is_open = False

    monkeypatch.setattr(_progress, "_make", Bar)
    monkeypatch.setattr(_progress, "_has_reader", lambda: True)
    seconds = _core.progress_after(0.0)
    yield made
    _core.progress_after(seconds)


def test_a_long_step_shows_its_slices_and_closes_the_bar(bars):
    step(plain_model())
    [bar] = bars
    n_slices = sum(loop.n_slices for loop in koila.last_plan().loops)
    assert bar.total == n_slices and bar.told[-1] == n_slices and not bar.is_open
    assert bar.told == sorted(bar.told)


def test_a_bar_is_closed_where_the_step_fails(bars):
    def bad(x):
        if x.shape[0] != 10 and bars:
            raise KeyError("planted")
        return x * 2

    x = lazy(torch.randn(10, 5))
    with koila.micro_batch(2), pytest.raises(KeyError):
        koila.run(koila.opaque(bad)(x))
    assert bars and not bars[0].is_open


def test_short_steps_and_those_nobody_looks_at_show_nothing(bars, monkeypatch):
    _core.progress_after(2.0)
    step(plain_model())
    _core.progress_after(0.0)
    monkeypatch.setattr(_progress, "_has_reader", lambda: False)
    step(plain_model())
    monkeypatch.setattr(_progress, "_has_reader", lambda: True)
    koila.progress(False)
    try:
        step(plain_model())
    finally:
        koila.progress(True)
    assert bars == []
    monkeypatch.undo()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert not _progress._has_reader()
    with pytest.raises(TypeError, match="True or False"):
        koila.progress("off")


# ---- the library of the bar itself

LONG_STEP = """
import time
import torch
import koila
from koila import _core, lazy

_core.progress_after(0.3)


def slow(x):
    time.sleep(0.08)
    return x * 2


x = lazy(torch.randn(10, 5))
with koila.micro_batch(1):
    koila.run(koila.opaque(slow)(x))
"""


def run_in_terminal(program, folder):
    """What a program writes to a terminal, 80 columns wide, that is its standard error."""
    (folder / "program.py").write_text(program, encoding="utf-8")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    child = subprocess.Popen(
        [sys.executable, "program.py"], cwd=folder, stdout=subprocess.DEVNULL, stderr=theirs
    )
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # Linux ends the reading of a closed terminal with EIO
        while part := os.read(ours, 4096):
            seen += part
    os.close(ours)
    assert child.wait() == 0, seen
    return seen.decode()


def test_a_terminal_shows_the_bar_of_a_long_step_and_is_left_clean(tmp_path):
    pytest.importorskip("tqdm")
    seen = run_in_terminal(LONG_STEP, tmp_path)
    counts = [int(n) for n in re.findall(r"koila: .*?\| (\d+)/10 ", seen)]
    assert counts and counts == sorted(counts) and 1 < counts[-1] <= 10, seen
    assert seen.rpartition("\r")[2].strip() == "" and "\n" not in seen  # the bar is wiped away
    assert run_in_terminal(LONG_STEP.replace("after(0.3)", "after(60)"), tmp_path) == ""


def test_a_notebook_shows_the_bar_of_a_long_step_and_no_warning(tmp_path):
    pytest.importorskip("tqdm")
    pytest.importorskip("ipykernel")
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(LONG_STEP)])
    nbclient.NotebookClient(
        book, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    texts = [o.get("text", "") or str(o.get("data", "")) for o in book.cells[0].outputs]
    told = "".join(texts)
    assert "koila: " in told and "/10 [" in told and "Warning" not in told, told

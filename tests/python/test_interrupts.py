"""Ctrl-C at any bytecode of koila's own Python, and at any operator of a run: gradients and buffers
are as before, or done; and every mode is as before."""

import contextlib
import os
import signal
import sys
import threading

import pytest
import torch
from conftest import DEVICE
from helpers import Cut, model_state
from torch import nn

import koila
from koila import _backward, _core, lazy

pytestmark = pytest.mark.usefixtures("ctrl_c")
D = torch.float64
HERE = os.path.dirname(koila.__file__)


def net():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.25), nn.Linear(8, 1)
    ).double()


class Interrupt:
    """While on: SIGINT at the `at`-th opcode of koila's Python; `seen` counts them."""

    TOOL = 5  # sys.monitoring's id

    def __init__(self, at):
        self.at, self.seen = at, 0

    def _count(self):
        self.seen += 1
        if self.seen == self.at:
            signal.raise_signal(signal.SIGINT)

    def _step(self, frame, event, _):
        if event == "opcode":
            self._count()
        return self._step

    def _call(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(HERE):
            return None
        frame.f_trace_opcodes = True
        return self._step

    def _instruction(self, code, offset):
        if not code.co_filename.startswith(HERE):
            return sys.monitoring.DISABLE
        self._count()

    def __enter__(self):
        if sys.version_info < (3, 12):
            self.before = sys.gettrace()
            sys.settrace(self._call)
        else:  # a tracer does not see every opcode there of code that it meets for the first time
            events = sys.monitoring.events.INSTRUCTION
            sys.monitoring.use_tool_id(self.TOOL, "test_interrupts")
            sys.monitoring.register_callback(self.TOOL, events, self._instruction)
            sys.monitoring.set_events(self.TOOL, events)
        return self

    def __exit__(self, *_):
        if sys.version_info < (3, 12):
            sys.settrace(self.before)
        else:
            sys.monitoring.set_events(self.TOOL, 0)
            sys.monitoring.free_tool_id(self.TOOL)


def modes():
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "excluded": str(torch._C._dispatch_tls_local_exclude_set()),
        "included": str(torch._C._dispatch_tls_local_include_set()),
        "modes": torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack(),
        "functions": torch._C._is_torch_function_enabled(),
        "handler": signal.getsignal(signal.SIGINT),
        "depth": _backward.depth_of(_core.context()).level,
        "settings": _core.configure(),
    }


def sweep(model, data, every, known=False):
    """Interrupt `loss.backward()` at every `every`-th opcode of koila. Returns how often that undid
    it, and the number of opcodes. known: the backward was recorded before, and is copied."""
    hook = model[0].weight.register_hook(lambda g: g * 2)
    start, modes_before = {k: v.clone() for k, v in model.state_dict().items()}, modes()

    def prepared():
        if not known:
            _core.backwards_doubted(False)  # forgets them all
        model.load_state_dict(start)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        torch.manual_seed(11)
        return model(lazy(data)).square().mean()

    loss = prepared()
    before = model_state(model)
    loss.backward()
    after = model_state(model)
    for name in ("grad:0.weight", "value:buffer 1.running_mean"):
        assert not torch.equal(before[name], after[name])
    for _ in range(3):  # until the log has told all, and the backward is known
        prepared().backward()
    loss = prepared()
    n_known = _core.n_backwards_copied()
    with Interrupt(-1) as count:
        loss.backward()
    assert _core.n_backwards_copied() - n_known == known
    n_undone = 0
    for at in range(1, count.seen + 1, every):
        loss = prepared()
        try:
            with Interrupt(at) as interrupt:
                loss.backward()
            for _ in range(10):  # it may come right after
                pass
            # steps on a GPU get shorter, once what they use inside is known
            assert DEVICE != "cpu" and interrupt.seen < at > count.seen / 2
            break
        except KeyboardInterrupt:
            pass
        assert modes() == modes_before, f"opcode {at}"
        assert len(model[0].weight._backward_hooks) == 1, f"opcode {at}: a hook is lost"
        found = model_state(model)
        done = not torch.equal(found["grad:0.weight"], before["grad:0.weight"])
        n_undone += not done
        for name, value in (after if done else before).items():
            assert torch.equal(found[name], value), (
                f"opcode {at}: {name} is not as {'after' if done else 'before'} the step"
            )
    hook.remove()
    return n_undone, count.seen


@pytest.mark.parametrize("known", [False, True])
def test_an_interrupt_at_any_bytecode(known):
    with koila.micro_batch(4):
        n_undone, n_opcodes = sweep(
            net(), torch.randn(12, 6, dtype=D), 1 if os.environ.get("KOILA_LONG") else 9, known
        )
    assert 10 < n_undone < n_opcodes / 9 or os.environ.get("KOILA_LONG")


def tokens_net():
    """Of samples with 7 tokens: batch norm needs all of them, dropout draws for each."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 8), Tokens(8), nn.Tanh(), nn.Dropout(0.25), nn.Linear(8, 1)
    ).double()


class Tokens(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize("axes", ["other", "both"])
def test_an_interrupt_at_any_bytecode_of_a_step_cut_along_another_dimension(axes):
    data = torch.randn(3, 7, 6, dtype=D)
    with Cut(3, axes):
        n_undone, n_opcodes = sweep(tokens_net(), data, 1 if os.environ.get("KOILA_LONG") else 9)
        plan = koila.last_plan()
    assert plan.axis[:2] == (1, 7) and plan.n_micro_batches == (3 if axes == "both" else 1)
    assert 10 < n_undone < n_opcodes / 9 or os.environ.get("KOILA_LONG")


@pytest.mark.parametrize("axes", ["other", "both"])
def test_an_interrupt_at_any_operator_of_a_step_cut_along_another_dimension(axes):
    """Nothing has changed, and the same step done again is eager's."""
    koila.register_rule("koila_interrupts::mark", "S0->S0; S1->S1")
    model, data = tokens_net(), torch.randn(3, 7, 6, dtype=D)
    start = {k: v.clone() for k, v in model.state_dict().items()}

    def prepared(wrap):
        model.load_state_dict(start)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        torch.manual_seed(11)
        return mark(model(mark(wrap(data)))).square().mean()

    prepared(lambda x: x).backward()
    expected = model_state(model)
    n_interrupted = 0
    with Cut(3, axes):
        prepared(lazy).backward()
        loss = prepared(lazy)
        with InterruptedOperator(-1) as count:
            loss.backward()
        assert count.seen > 6  # in each slice
        for at in range(1, count.seen + 1):
            loss = prepared(lazy)
            before, modes_before = model_state(model), modes()
            with pytest.raises(KeyboardInterrupt), InterruptedOperator(at):
                loss.backward()
            n_interrupted += 1
            assert modes() == modes_before, at
            for name, value in before.items():
                assert torch.equal(model_state(model)[name], value), f"{name}, {at}"
            prepared(lazy).backward()
            for name, value in expected.items():
                torch.testing.assert_close(model_state(model)[name], value, rtol=1e-11, atol=1e-13)
    assert n_interrupted == count.seen


@pytest.mark.filterwarnings("ignore:koila. a training-mode forward pass was left")
def test_a_backward_without_its_shield_is_found(monkeypatch):
    monkeypatch.setattr(_core, "shield", contextlib.nullcontext())
    with koila.micro_batch(4), pytest.raises((AssertionError, pytest.fail.Exception)):
        sweep(net(), torch.randn(12, 6, dtype=D), 3)
    _backward.depth_of(_core.context()).level = 0
    torch.set_grad_enabled(True)


def test_a_second_interrupt_goes_through():
    """Somebody who insists does not wait for a hook that hangs."""
    passed = []

    def hook(gradient):
        signal.raise_signal(signal.SIGINT)
        passed.append("once")
        signal.raise_signal(signal.SIGINT)
        passed.append("twice")
        return gradient

    model = net()
    model[0].weight.register_hook(hook)
    with pytest.raises(KeyboardInterrupt):
        model(lazy(torch.randn(12, 6, dtype=D))).square().mean().backward()
    # a GPU's hooks run on a thread of torch's: there is no way into it, in eager neither
    assert passed == (["once"] if DEVICE == "cpu" else ["once", "twice"])
    assert all(p.grad is None for p in model.parameters())


def test_a_handler_that_raises_stops_a_run_between_operators():
    """SIGALRM, as time limits use it: the error of the handler, and nothing changed."""

    class TooLong(Exception):
        pass

    def handler(*_):
        raise TooLong

    model, data = (
        nn.Sequential(*[nn.Linear(64, 64) for _ in range(40)]).double(),
        torch.randn(256, 64, dtype=D),
    )
    held = lazy(data)
    keep = [held * k for k in range(3)]  # merely held values are no reason to try again
    old = signal.signal(signal.SIGALRM, handler)
    try:
        with koila.micro_batch(1), pytest.raises(TooLong):
            loss = model(held).square().mean()
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            loss.backward()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert all(p.grad is None for p in model.parameters()) and len(keep) == 3


def test_a_thread_other_than_the_main_one_is_not_shielded():
    seen = []

    def work():
        with _core.shield:
            seen.append(threading.get_ident() != threading.main_thread().ident)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [True]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
        for _ in range(10):
            pass


# ---- reads in the middle of a step


@torch.library.custom_op("koila_interrupts::mark", mutates_args=())
def mark(x: torch.Tensor) -> torch.Tensor:
    """An operator in whose n-th run a signal comes."""
    mark.seen += 1
    if mark.seen == mark.at:
        signal.raise_signal(signal.SIGINT)
    return x * 2


mark.seen = mark.at = 0
mark.register_fake(torch.empty_like)
mark.register_autograd(lambda ctx, g: g * 2)


class InterruptedOperator:
    """While on: SIGINT inside the `at`-th run of `mark`."""

    def __init__(self, at):
        self.at = at

    def __enter__(self):
        mark.seen, mark.at = 0, self.at
        return self

    def __exit__(self, *_):
        mark.at, self.seen = 0, mark.seen


def sweep_reads(interrupt, rows, every):
    """A step that reads values behind each of its layers, each time under `interrupt(at)`, for
    every `every`-th `at`: what was interrupted is read again, and all is eager's. Returns the
    number of reads that were interrupted."""
    koila.register_rule("koila_interrupts::mark", "S0->S0")
    model, data = net(), torch.randn(12, 6, dtype=D)
    start = {k: v.clone() for k, v in model.state_dict().items()}
    n_interrupted = n_seen = 0

    def look(h):
        return h.detach()[1].sum().item(), h.std().item()

    def look_under(at, h):
        nonlocal n_interrupted, n_seen
        modes_before = modes()
        try:
            with interrupt(at) as found:
                told = look(h)
            for _ in range(10):  # it may come right after
                pass
            assert told == look(h)
        except KeyboardInterrupt:
            n_interrupted += 1
            assert modes() == modes_before, at
        n_seen = max(n_seen, found.seen)

    def step(wrap, at):
        model.load_state_dict(start)
        model.zero_grad()
        torch.manual_seed(11)
        h, told = wrap(data), []
        for layer in model:
            h = mark(layer(h))
            look_under(at, h)
            told += look(h)
        h.square().mean().backward()
        told = torch.tensor([*told, h.std().item()], dtype=D)
        return model_state(model) | {"told": told, "rng": torch.get_rng_state()}

    with koila.micro_batch(rows):
        expected = step(lambda x: x, -1)
        step(lazy, -1)  # shapes are known from here on
        n_seen = 0
        step(lazy, -1)
        n_places = n_seen
        for at in range(1, n_places + 1, every):
            for name, value in step(lazy, at).items():
                torch.testing.assert_close(
                    value,
                    expected[name],
                    rtol=1e-11,
                    atol=1e-13,
                    msg=lambda m: f"{name}, {at}: {m}",
                )
    return n_interrupted


@pytest.mark.parametrize("rows", [None, 4])
def test_a_read_that_is_interrupted_at_any_bytecode_can_be_tried_again(rows):
    assert sweep_reads(Interrupt, rows, 1 if os.environ.get("KOILA_LONG") else 5) > 50


@pytest.mark.parametrize("rows", [None, 4])
def test_a_read_that_is_interrupted_at_any_operator_can_be_tried_again(rows):
    assert sweep_reads(InterruptedOperator, rows, 1) >= 5


def programs_of_views(model, x):
    """Views of many kinds, writes, and `torch.zeros` that are filled or settle."""
    h = model(x)
    out = torch.zeros(12, 3, dtype=D)
    out[:, 1] = h[:, 0]
    out.t()[2].add_(h.view(-1) * 2)
    filled = torch.zeros(12, 2, dtype=D)
    filled.add_(1)
    z = torch.view_as_complex(torch.stack([out[:, 1], out[:, 2]], -1)).conj()
    return (z * z.conj()).real.mean() + out[1:5].std() + (h + filled[:, :1]).mean()


@pytest.mark.filterwarnings("ignore:koila. a training-mode forward pass was left")
@pytest.mark.parametrize("known", [True, False], ids=["known calls", "new calls"])
def test_an_interrupt_at_any_bytecode_of_the_recording_leaves_the_modes_and_the_next_step_alone(
    known,
):
    model, n = net(), 0

    def step(at):
        nonlocal n
        n += not known
        data = torch.randn(12, 6, dtype=D)
        torch.manual_seed(11)
        model.zero_grad()
        before = modes()
        try:
            with Interrupt(at) as found:
                loss = programs_of_views(model, lazy(data) * (1 + n / 1024))
            for _ in range(10):  # it may come right after
                pass
            assert at < 0 or found.seen < at
            return found.seen
        except KeyboardInterrupt:
            pass
        assert modes() == before, at
        torch.manual_seed(11)
        with koila.micro_batch(5):
            loss = programs_of_views(model, lazy(data) * 1.0)
            loss.backward()
        got = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        torch.manual_seed(11)
        programs_of_views(model, data * 1.0).backward()
        for g, p in zip(got, model.parameters(), strict=True):
            torch.testing.assert_close(g, p.grad, rtol=1e-9, atol=1e-12, msg=lambda m: f"{at}: {m}")
        return found.seen

    step(-1)
    n_places = step(-1)
    assert n_places > 100
    every = 1 if os.environ.get("KOILA_LONG") else max(1, n_places // 150)
    for at in range(1, n_places + 1, every):
        step(at)

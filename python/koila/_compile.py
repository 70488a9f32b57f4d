"""Loops whose slices run as one compiled function: `koila.compile()`. See python/ext/run/body.c.

The body of a loop is walked once, on tensors without memory, and its graph goes to Inductor:
forward and backward pass of a slice, and its additions to the sums, as one function. Inductor works
in a thread of its own, while slices run as they are. The walk is in the thread of the step.

Whoever traces with torch.fx patches torch for all threads, so two threads must not: both the walk
and Inductor's work are under the lock of torch.compile(), and where another thread has it, the
loops are asked for again after the next run. See _traced_apart() for what others would notice.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from . import _core
from ._own_operators import OwnOperator, own_operators
from ._torch import outside_operators, untyped_storage

_log = logging.getLogger("koila")
_Function = Callable[[list[Any]], Any]
_Made = TypeVar("_Made")
_Traced = tuple[torch.fx.GraphModule, list[torch.Tensor]]


class _Work:
    """What is to be compiled, by one thread, which ends when there is nothing more, or with the
    program. That waits for what is being compiled: a thread that the interpreter stops while it is
    in Inductor's C++ aborts the process."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._asked: queue.SimpleQueue[tuple[object, _Traced]] = queue.SimpleQueue()
        self._n_left = 0

    def add(self, body: object, traced: _Traced) -> None:
        with self._lock:
            self._asked.put((body, traced))
            self._n_left += 1
            if self._n_left == 1:
                threading.Thread(target=self._run, name="koila compiles", daemon=False).start()

    def wait(self, timeout: float | None = None) -> bool:
        """Until all that was asked for is compiled."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._n_left, timeout)

    def _run(self) -> None:
        while True:
            self._one(*self._asked.get())
            with self._lock:
                self._n_left -= 1
                if not threading.main_thread().is_alive():  # the program is over
                    self._n_left, self._asked = 0, queue.SimpleQueue()
                self._lock.notify_all()
                if not self._n_left:
                    return

    @staticmethod
    def _one(body: object, traced: _Traced) -> None:
        function = _or_not(body, lambda _: _compiled(*traced))
        if function is not None:
            _core.body_is(body, function)

    def forget(self) -> None:
        """In a forked process, which has not the thread."""
        lock = _lock_of_torch() if self._n_left else None
        if lock is not None:
            lock._at_fork_reinit()
        self.__init__()  # type: ignore[misc]


_work = _Work()
os.register_at_fork(after_in_child=_work.forget)


def ask(bodies: list[object]) -> bool:
    """Compile loops in the background, and let the executor have them. `False`: ask again, for
    something else is being compiled. Called by C."""
    from torch._dynamo.convert_frame import compile_lock

    if not _work.wait(0) or not compile_lock.acquire(blocking=False):
        return False
    try:
        with _traced_apart():
            traced = [(body, _or_not(body, _traced)) for body in bodies]
    finally:
        compile_lock.release()
    for body, found in traced:
        if found is not None:
            _work.add(body, found)
    return True


def wait(timeout: float | None = None) -> bool:
    """Until all loops that were asked for are compiled, or cannot be."""
    return _work.wait(timeout)


def raised(error: Exception, waits: bool) -> None:
    """A compiled loop raised `error`, and its step runs once more without it. waits: it is tried
    again where there is more memory. Called by C."""
    what = "waits for more memory" if waits else "is dropped"
    _log.info("koila.compile(): a compiled loop %s, for it raised %s", what, _in_words(error))


def _or_not(body: object, make: Callable[[object], _Made]) -> _Made | None:
    """What `make` makes of the body. `None`: it cannot, and the executor knows."""
    try:
        return make(body)
    except Exception as error:  # whatever it is that Inductor cannot take
        _log.info("koila.compile(): a loop stays as it is: %s", _in_words(error))
        _core.body_is(body, None)
        return None


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _traced(body: object) -> _Traced:
    """The graph of a body, and tensors like its inputs."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    def walk(*given: torch.Tensor) -> list[torch.Tensor]:
        return _core.body_walk(body, list(given))

    with outside_operators(), torch.no_grad(), FakeTensorMode():
        inputs = _core.body_inputs(body)
        trace = make_fx(torch.func.functionalize(walk), select_decomp_table())
        return trace(*inputs), inputs


def _draw(
    node: int, size: list[int], stride: list[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return _core.body_draw(node)


def _fake_draw(
    node: int, size: list[int], stride: list[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


@own_operators("CompositeExplicitAutograd")  # it takes no tensor: one kernel for all devices
def _operators() -> list[OwnOperator]:
    """koila::drawn: what call `node` of the plan draws for the slice whose body runs."""
    schema = "drawn(int node, int[] size, int[] stride, ScalarType dtype, Device device) -> Tensor"
    return [OwnOperator(schema, _draw, _fake_draw)]


def drawn_like(node: int, like: torch.Tensor) -> torch.Tensor:
    """A random call in the graph of a body, whose numbers are a tensor like this. Called by C."""
    drawn = _operators().drawn.default
    return drawn(node, like.size(), like.stride(), like.dtype, like.device)  # type: ignore[no-any-return]


def _compiled(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> _Function:
    """Takes the list of a body's inputs, which it may empty, and returns the list of its results.
    A `torch.compile()` of another thread waits meanwhile. Layouts stay as they were recorded: in
    another one convolutions and their backward are copied there and back in each slice."""
    from torch._dynamo.convert_frame import compile_lock
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    with compile_lock, _traced_apart(), config.patch(layout_optimization=False):
        function: Any = compile_fx_inner(graph, inputs)
    return lambda given: _apart(list(function(given)))


def _apart(results: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each with memory of its own: Inductor leaves out copies of what is a result already, and a
    later loop may write one of them in place."""
    met = set()
    for i, t in enumerate(results):
        storage = untyped_storage(t)._cdata
        if storage in met:
            results[i] = t.clone()
        met.add(storage)
    return results


@contextlib.contextmanager
def _traced_apart() -> Iterator[None]:
    """Who traces (Inductor does too, now and then) changes two things for all threads: compiled
    functions refuse to be called, and modules ask the tracer how they are called. Meanwhile such
    functions run uncompiled, and modules of other threads than this one ask nobody."""
    from torch._dynamo import config

    settings: dict[str, Any] = config._config  # type: ignore[attr-defined]
    refuses = settings["error_on_nested_fx_trace"]  # its default is what all threads see
    here, tracer = threading.get_ident(), torch.fx.Tracer
    call_module, refused = tracer.call_module, refuses.default

    def call(self: Any, m: Any, forward: Any, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() == here:
            return call_module(self, m, forward, args, kwargs)
        return forward(*args, **kwargs)

    tracer.call_module = call  # type: ignore[method-assign]
    refuses.default = False
    try:
        yield
    finally:
        tracer.call_module = call_module  # type: ignore[method-assign]
        refuses.default = refused


def _lock_of_torch() -> Any:
    """That under which torch compiles; `None`: it never did."""
    module = sys.modules.get("torch._dynamo.convert_frame")
    return None if module is None else module.compile_lock

"""The cost of capture: microseconds per recorded operator, forward and backward, warm; also of
single operators.

    python bench/bench_capture.py [--model tiny,gpt2,mlp,ops] [--repeat 40]

The models are tiny, so that dispatch, autograd, the model's own Python and koila's handler take
most of the time. Four ways to run one step take turns, and the best of each counts:

- plain: PyTorch without koila;
- floor: a tensor subclass whose handler only returns tensors made beforehand. It measures the
  model's own Python, torch's path to a Python handler, and autograd. No tracer that sees operators
  below autograd can be faster;
- capture: koila, all is recorded;
- known: koila, in a step that was recorded before: its backward is copied.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

import koila
from koila import _backward, _core

Model = tuple[torch.nn.Module, Callable[[torch.nn.Module, Any], torch.Tensor], torch.Tensor]


def gpt2(width: int = 64, heads: int = 4, rows: int = 4) -> Model:
    from small_gpt2 import small_gpt2

    return (
        small_gpt2(n_layer=12, n_head=heads, n_embd=width, vocab_size=100, n_positions=32),
        lambda m, x: m(input_ids=x, labels=x).loss,
        torch.randint(0, 100, (rows, 16)),
    )


def mlp() -> Model:
    layers: list[torch.nn.Module] = []
    for _ in range(13):
        layers += [torch.nn.Linear(64, 64), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers), lambda m, x: m(x).square().mean(), torch.randn(32, 64)


MODELS: dict[str, Callable[[], Model]] = {
    "tiny": lambda: gpt2(width=16, heads=2, rows=2),
    "gpt2": gpt2,
    "mlp": mlp,
}


class Ready(torch.Tensor):
    """A wrapper whose handler is replaced before each step, see `floor_of`."""

    __slots__ = ("real",)  # while recording: what it stands for
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def of(like: torch.Tensor) -> torch.Tensor:
        return torch.Tensor._make_wrapper_subclass(
            Ready, like.shape, strides=like.stride(), dtype=like.dtype
        )


def floor_of(step: Callable[[torch.Tensor], Any], batch: torch.Tensor) -> Callable[[], float]:
    """Seconds of `step` with a handler that only returns stored results. A first pass computes and
    stores the result of every operator."""
    # What each dispatch returned, in order; None: its own first argument (an in-place operator).
    given: list[Any] = []

    def wrapped(t: torch.Tensor) -> torch.Tensor:
        w = Ready.of(t)
        w.real = t
        return w

    def record(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args_, kwargs_ = tree_map_only(Ready, lambda w: w.real, (args, kwargs or {}))
        result = func(*args_, **kwargs_)
        given.append(None if func._schema.is_mutable else result)
        return args[0] if func._schema.is_mutable else tree_map_only(torch.Tensor, wrapped, result)

    Ready.__torch_dispatch__ = staticmethod(record)
    step(wrapped(batch))

    def timed() -> float:
        ready = [tree_map_only(torch.Tensor, Ready.of, g) for g in reversed(given)]
        x = Ready.of(batch)

        def hand_out(
            func: Any,
            types: Any,
            args: Any = (),
            kwargs: Any = None,
            pop: Callable[[], Any] = ready.pop,
        ) -> Any:
            result = pop()
            return args[0] if result is None else result

        Ready.__torch_dispatch__ = staticmethod(hand_out)
        t = time.perf_counter()
        step(x)
        t = time.perf_counter() - t
        assert not ready, "the step took another way than when it was recorded"
        return t

    return timed


def model_cost(name: str, repeat: int) -> None:
    model, loss_of, batch = MODELS[name]()
    params = list(model.parameters())
    n_nodes = 0

    def capture(known: bool) -> float:
        nonlocal n_nodes
        if not known:
            _core.backwards_doubted(False)  # forgets them all
        x = koila.lazy(batch)
        context = _core.context()
        t = time.perf_counter()
        loss = loss_of(model, x)
        leaves, reentrant = _backward._leaves([loss])
        call = _backward._Call((loss,), (torch.ones_like(loss),), False, False)
        outer = _core.backward_begins(context)
        grads = _backward._record(_backward.depth_of(context), call, leaves, reentrant)
        _core.backward_ends(outer)
        t = time.perf_counter() - t
        n_nodes = _core.tape_of(x).n_nodes
        _core.tape_of(x).close()
        del grads
        return t

    def once_known() -> float:
        for _ in range(3):
            seconds = capture(True)
        return seconds

    def plain(x: torch.Tensor = batch) -> float:
        t = time.perf_counter()
        torch.autograd.grad(loss_of(model, x), params)
        return time.perf_counter() - t

    cold = capture(False)
    floor = floor_of(plain, batch)
    turns = [(plain(), floor(), capture(False), once_known()) for _ in range(repeat)]
    best = [min(column) for column in zip(*turns, strict=True)]
    each = ", ".join(
        f"{what} {t * 1e6 / n_nodes:.2f}"
        for what, t in zip(("plain", "floor", "capture", "known"), best, strict=True)
    )
    print(
        f"{name}: {n_nodes} operators, cold {cold * 1e3:.0f} ms; us an operator: {each}; "
        f"capture : plain {best[2] / best[0]:.2f}, capture : floor {best[2] / best[1]:.2f}, "
        f"known : capture {best[3] / best[2]:.2f}"
    )


def op_cost(n: int = 2000, rounds: int = 20) -> None:
    def per_call(f: Callable[[], Any]) -> float:
        """Microseconds of one call, the best of the rounds."""
        times = []
        for _ in range(rounds):
            t = time.perf_counter()
            for _ in range(n):
                f()
            times.append(time.perf_counter() - t)
        return min(times) / n * 1e6

    a, b = torch.randn(4, 4), torch.randn(4, 4)
    w = torch.randn(4, 4, requires_grad=True)
    for name, f in {
        "mul": lambda x, y: x * y,
        "mm": lambda x, y: x @ y,
        "view": lambda x, y: x.view(16),
        "x+1.5": lambda x, y: x + 1.5,
        "detach": lambda x, y: x.detach(),
    }.items():
        row = []
        for grad in (False, True):
            plain, lazy = (a, koila.lazy(a)) if not grad else (a * w, koila.lazy(a) * w)
            row += [per_call(lambda x=x, y=w if grad else b: f(x, y)) for x in (plain, lazy)]
            _core.tape_of(lazy).close()
        print(
            f"{name:8s} no grad: plain {row[0]:.2f} lazy {row[1]:.2f}   grad: plain {row[2]:.2f} "
            f"lazy {row[3]:.2f} us"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny,gpt2,mlp,ops", help="which, separated by commas")
    parser.add_argument("--repeat", type=int, default=40, help="turns of a model's step")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for m in arguments.model.split(","):
        op_cost() if m == "ops" else model_cost(m, arguments.repeat)

"""Cost of capture: microseconds per recorded operator, forward and backward, warm; and one operator alone.

    python bench/bench_capture.py [--model gpt2|mlp|ops]

Compute is kept tiny so that what is measured is dispatch, autograd, the model's own Python and koila's handler. Minimum over the runs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

import koila
from koila import _core


def gpt2(layers: int = 12) -> tuple[torch.nn.Module, Callable[[torch.nn.Module, Any], torch.Tensor], torch.Tensor]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=layers, n_head=4, n_embd=64, vocab_size=100, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = GPT2LMHeadModel(config).train()
    ids = torch.randint(0, 100, (4, 16))
    return model, lambda m, x: m(input_ids=x, labels=x).loss, ids


def mlp() -> tuple[torch.nn.Module, Callable[[torch.nn.Module, Any], torch.Tensor], torch.Tensor]:
    layers: list[torch.nn.Module] = []
    for _ in range(13):
        layers += [torch.nn.Linear(64, 64), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers), lambda m, x: m(x).square().mean(), torch.randn(32, 64)


def best(f: Callable[[], Any], n: int) -> float:
    times = []
    for _ in range(n):
        t = time.perf_counter()
        f()
        times.append(time.perf_counter() - t)
    return min(times)


def model_cost(name: str, n: int = 30) -> None:
    model, loss_of, batch = {"gpt2": gpt2, "mlp": mlp}[name]()
    params = [p for p in model.parameters() if p.requires_grad]
    sizes = {}

    def capture(lines: bool) -> None:
        _core.lines(lines)
        x = koila.lazy(batch)
        loss = loss_of(model, x)
        grads = torch.autograd.grad(loss, params, create_graph=False) if False else _grads(loss, params)
        sizes["nodes"] = _core.tape_of(x).n_nodes
        _core.tape_of(x).close()
        del grads

    def eager() -> None:
        torch.autograd.grad(loss_of(model, batch), params)

    t = time.perf_counter()
    capture(True)
    cold = time.perf_counter() - t
    on = best(lambda: capture(True), n)
    off = best(lambda: capture(False), n)
    _core.lines(True)
    plain = best(eager, n)
    k = sizes["nodes"]
    print(f"{name}: {k} nodes; cold {cold * 1e3:.1f} ms; warm {on * 1e6 / k:.2f} us/op, without lines {off * 1e6 / k:.2f}; capture {on * 1e3:.2f} ms, eager {plain * 1e3:.2f} ms")
    print(f"  memo {_core.memo_info()}")


def _grads(loss: torch.Tensor, params: list[torch.Tensor]) -> Any:
    from koila import _backward

    return _backward._original((loss,), (None,) if False else (torch.ones_like(loss),), False, False, tuple(params), allow_unreachable=True, accumulate_grad=False)


def op_cost(n: int = 2000, rounds: int = 20) -> None:
    def per_call(f: Callable[[], Any]) -> float:
        def many() -> None:
            for _ in range(n):
                f()

        return best(many, rounds) / n * 1e6

    a, b = torch.randn(4, 4), torch.randn(4, 4)
    w = torch.randn(4, 4, requires_grad=True)
    for name, f in {"mul": lambda x, y: x * y, "mm": lambda x, y: x @ y, "view": lambda x, y: x.view(16), "x+1.5": lambda x, y: x + 1.5, "detach": lambda x, y: x.detach()}.items():
        row = []
        for grad in (False, True):
            y = w if grad else b
            row.append(per_call(lambda: f(a, y)))
            x = koila.lazy(a)
            if grad:
                x = x * w
            row.append(per_call(lambda: f(x, y)))
            _core.tape_of(x).close()
        print(f"{name:8s} no grad: eager {row[0]:.2f} lazy {row[1]:.2f}   grad: eager {row[2]:.2f} lazy {row[3]:.2f} us")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="gpt2,mlp,ops")
    torch.set_num_threads(1)
    for m in parser.parse_args().model.split(","):
        op_cost() if m == "ops" else model_cost(m)

"""Threads of all kinds beside each other: each must leave what it leaves alone.

    thread_stress.py [--first SEED] [--runs N] [--seconds S] [--kinds lazy,plain,...] [--fault]

One run: 2 to 8 jobs of random kinds, models and seeds, one thread each, at a random switch interval
from 1e-6 seconds to Python's own 5e-3. Every job was run alone before, in the same process; bit for
bit its outcome must be the same beside the others.

    lazy        trains through koila.lazy()
    settings    the same with its own micro_batch(n), strict() or budget()
    plain       trains without koila
    evaluating  a lazy forward under no_grad(), values read one by one
    allocating  makes, fills and frees tensors, of up to 64 MiB
    planning    koila.plan(), also of a GPU that is not here: what it predicts
    drawing     draws from the default generator: alone it is not defined what comes out, but no
                number of 62 bits may come twice
    dropout     trains through koila.lazy() with dropout: it draws from the same generator, so only
                its losses' being finite is compared

The runs are done in a process of their own (`--inside`), which is started again behind a run that
killed it or hung. The last line of the output is a summary as JSON; the exit status is 1 if
anything was found. `--fault` plants one, a number that leaks from thread to thread.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

INTERVALS = (1e-6, 1e-5, 1e-4, 1e-3, 5e-3)
KINDS = (
    "lazy",
    "settings",
    "plain",
    "evaluating",
    "allocating",
    "planning",
    "drawing",
    "dropout",
)
# of one run, on a busy machine; beyond it the run hangs
LIMIT_S = int(os.environ.get("KOILA_STRESS_LIMIT", "120"))
N_JOBS = 24  # of each kind: so many different jobs, each run alone once
STEPS = 4

Outcome = list[Any]  # tensors and plain values


class _Leak:
    """The planted fault: what one trainer writes here, another one reads."""

    on = False
    scale = 1.0


# ---- models


def _model(r: random.Random) -> tuple[Any, tuple[int, ...], int]:
    """(a model, the shape of its batch, its classes), from the job's own generator."""
    from torch import nn

    width = r.choice((8, 16, 24))
    kind = r.choice(("mlp", "conv", "norm", "lstm", "attention"))
    rows = r.choice((16, 24, 32))
    if kind == "mlp":
        layers = [m for _ in range(r.randint(1, 3)) for m in (nn.Linear(width, width), nn.GELU())]
        return nn.Sequential(*layers, nn.Linear(width, 5)), (rows, width), 5
    if kind == "norm":
        net = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh())
        return nn.Sequential(net, nn.Linear(width, 3)), (rows, width), 3
    if kind == "conv":
        net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten())
        return nn.Sequential(net, nn.Linear(4 * 36, 4)), (rows, 2, 6, 6), 4
    if kind == "attention":
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, 0.0, batch_first=True)
        return nn.Sequential(layer, nn.Flatten(), nn.Linear(3 * width, 4)), (rows, 3, width), 4
    return _Recurrent(width), (rows, 4, width), 4


def _Recurrent(width: int) -> Any:  # a class would need torch at import
    from torch import nn

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.LSTM(width, width, batch_first=True), nn.Linear(width, 4)

        def forward(self, x: Any) -> Any:
            return self.head(self.cell(x)[0][:, -1])

    return Recurrent()


# Parameters are drawn by torch's modules from the default generator, which belongs to all threads:
# jobs overwrite them from their own.
def _make(seed: int) -> tuple[Any, Any, Any, Any]:
    """(model, inputs, classes, generator) of a job."""
    import torch

    r = random.Random(seed)
    g = torch.Generator().manual_seed(seed)
    model, shape, n_classes = _model(r)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * 0.2)
    x = torch.randn((STEPS, *shape), generator=g)
    y = torch.randint(n_classes, (STEPS, shape[0]), generator=g)
    return model, x, y, g


def _state(model: Any) -> Outcome:
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers())]


# ---- kinds


def _train(seed: int, wrap: Callable[..., Any], dropout: float = 0.0) -> Outcome:
    import torch
    from torch.nn import functional as F

    model, x, y, _ = _make(seed)
    r = random.Random(seed + 1)
    make = r.choice((torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW))
    optimizer = make(model.parameters(), lr=0.01)
    model.train()
    losses = []
    for k in range(STEPS):
        _Leak.scale = float(seed % 97)
        optimizer.zero_grad()
        a, b = wrap(x[k], y[k])
        if dropout:
            a = F.dropout(a, dropout)
        loss = F.cross_entropy(model(a), b)
        loss.backward()
        if _Leak.on and _Leak.scale != float(seed % 97):
            for p in model.parameters():
                p.grad.add_(1e-3)
        optimizer.step()
        losses.append(loss.item())
    if dropout:
        return [all(-1e30 < v < 1e30 for v in losses)]
    return [*_state(model), *losses]


def lazily(seed: int) -> Outcome:
    import koila

    return _train(seed, koila.lazy)


def with_settings(seed: int) -> Outcome:
    import koila

    r = random.Random(seed)
    with contextlib.ExitStack() as settings:
        settings.enter_context(koila.micro_batch(r.choice((1, 3, 4, 7))))
        if r.random() < 0.3:
            settings.enter_context(koila.strict())
        if r.random() < 0.3:
            settings.enter_context(koila.budget("4GiB"))
        return _train(seed, koila.lazy)


def plain(seed: int) -> Outcome:
    return _train(seed, lambda *v: v)


def evaluating(seed: int) -> Outcome:
    import torch

    import koila

    model, x, _, _ = _make(seed)
    model.eval()
    out: Outcome = []
    for k in range(STEPS):
        with torch.no_grad():
            y = model(koila.lazy(x[k]))
        out += [y.mean().item(), koila.run(y).clone()]
    return out


def allocating(seed: int) -> Outcome:
    import torch

    r = random.Random(seed)
    held, total = [], 0.0
    for _ in range(60):
        n = r.choice((10, 1000, 100_000, 1 << 24 if r.random() < 0.1 else 1 << 18))
        held.append(torch.full((n,), float(n % 13)))
        if r.random() < 0.6:
            t = held.pop(r.randrange(len(held)))
            total += float(t[0]) + float(t[-1])
    return [total, [float(t[0]) for t in held]]


def planning(seed: int) -> Outcome:
    import torch
    from torch.nn import functional as F

    import koila

    model, x, y, _ = _make(seed)
    n = random.Random(seed).choice((None, 3))
    before = [p.grad for p in model.parameters()]

    def step(a, b):
        return F.cross_entropy(model(a), b)

    p = koila.plan(step, x[0], y[0], micro_batch=n)
    on_gpu = koila.plan(step, x[0], y[0], micro_batch=n, device="h100-80gb").prediction
    assert before == [p.grad for p in model.parameters()]
    return [
        p.micro_batch,
        p.n_micro_batches,
        [list(on_gpu[k]["reserved"]) for k in ("first", "steady")],
        [torch.clone(q.detach()) for q in model.parameters()],
    ]


_DRAWN: set[int] = set()
_DRAWN_TWICE: list[int] = []


def drawing(seed: int) -> Outcome:
    import torch

    for _ in range(60):
        for v in torch.randint(1 << 62, (3,)).tolist():
            if v in _DRAWN:
                _DRAWN_TWICE.append(v)
            _DRAWN.add(v)
    return []


def with_dropout(seed: int) -> Outcome:
    import koila

    return _train(seed, koila.lazy, dropout=0.3)


JOBS: dict[str, Callable[[int], Outcome]] = {
    "lazy": lazily,
    "settings": with_settings,
    "plain": plain,
    "evaluating": evaluating,
    "allocating": allocating,
    "planning": planning,
    "drawing": drawing,
    "dropout": with_dropout,
}


# ---- one run


def differences(expected: Outcome, got: Outcome) -> str:
    """In words; empty: to the bit the same."""
    import torch

    if len(expected) != len(got):
        return f"{len(got)} results for {len(expected)}"
    for i, (a, b) in enumerate(zip(expected, got)):
        if isinstance(a, torch.Tensor):
            if a.shape != b.shape or a.dtype != b.dtype:
                return f"result {i}: {b.dtype}{tuple(b.shape)} for {a.dtype}{tuple(a.shape)}"
            if not torch.equal(a, b):
                return f"result {i} differs by {(a - b).abs().max().item():.3g}"
        elif isinstance(a, list):
            inner = differences(a, b)
            if inner:
                return f"result {i}: {inner}"
        elif a != b and not (a != a and b != b):
            return f"result {i}: {b!r} for {a!r}"
    return ""


class Alone:
    """What each job leaves when nothing runs beside it."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, int], Outcome] = {}

    def __call__(self, kind: str, seed: int) -> Outcome:
        if (kind, seed) not in self.known:
            self.known[kind, seed] = JOBS[kind](seed)
        return self.known[kind, seed]


def beside(jobs: list[tuple[str, int]]) -> list[Outcome | BaseException]:
    """What each job leaves when all run at once, in a thread each."""
    found: list[Any] = [None] * len(jobs)
    start = threading.Barrier(len(jobs))

    def work(i: int, kind: str, seed: int) -> None:
        start.wait()
        try:
            found[i] = JOBS[kind](seed)
        except BaseException as e:
            found[i] = e

    threads = [
        threading.Thread(target=work, args=(i, kind, seed), name=f"{kind}-{seed}")
        for i, (kind, seed) in enumerate(jobs)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return found


def run(seed: int, alone: Alone, kinds: tuple[str, ...] = KINDS) -> tuple[list[str], float]:
    """(what was wrong, in words; the switch interval) of one run."""
    r = random.Random(seed)
    interval = r.choice(INTERVALS)
    jobs = [(r.choice(kinds), r.randrange(N_JOBS)) for _ in range(r.randint(2, 8))]
    expected = [alone(kind, s) for kind, s in jobs]
    _DRAWN.clear()
    _DRAWN_TWICE.clear()
    before = sys.getswitchinterval()
    sys.setswitchinterval(interval)
    try:
        found = beside(jobs)
    finally:
        sys.setswitchinterval(before)
    wrong = [f"{len(_DRAWN_TWICE)} numbers were drawn twice"] if _DRAWN_TWICE else []
    for (kind, s), a, b in zip(jobs, expected, found):
        text = (
            f"raised {type(b).__name__}: {b}" if isinstance(b, BaseException) else differences(a, b)
        )
        if text:
            wrong.append(f"{kind} {s}: {text[:300]}")
    if wrong:
        wrong.insert(0, " ".join(f"{kind}-{s}" for kind, s in jobs))
    return wrong, interval


def inside(first: int, n: int, until: float, kinds: tuple[str, ...]) -> None:
    """Runs first, first + 1, ...; a line of JSON before and after each."""
    import torch

    torch.set_num_threads(1)
    alone = Alone()
    for seed in range(first, first + n):
        if time.time() > until:
            return
        print(json.dumps({"begin": seed}), flush=True)
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        started = time.monotonic()
        wrong, interval = run(seed, alone, kinds)
        faulthandler.cancel_dump_traceback_later()
        seconds = round(time.monotonic() - started, 3)
        line = {"end": seed, "interval": interval, "wrong": wrong, "seconds": seconds}
        print(json.dumps(line), flush=True)


# ---- many runs


def drive(first: int, n: int, seconds: float, more: list[str]) -> dict[str, Any]:
    """Many runs, in processes that may die."""
    total: dict[str, Any] = {"runs": 0, "wrong": 0, "crashes": 0, "hangs": 0, "at": {}}
    started, at = time.time(), first
    while at < first + n and time.time() < started + seconds:
        command = [sys.executable, "-X", "faulthandler", __file__, "--inside", "--first", str(at)]
        command += ["--runs", str(first + n - at), "--until", str(started + seconds), *more]
        begun = None
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as child:
            said: list[str] = []
            assert child.stdout is not None and child.stderr is not None
            errors = child.stderr
            reader = threading.Thread(target=lambda: said.append(errors.read()))
            reader.start()
            for text in child.stdout:
                line = json.loads(text) if text.startswith("{") else {}
                if "begin" in line:
                    begun = line["begin"]
                elif "end" in line:
                    begun, at = None, line["end"] + 1
                    total["runs"] += 1
                    by = total["at"].setdefault(f"{line['interval']:g}", [0, 0])
                    by[0] += 1
                    if line["wrong"]:
                        total["wrong"] += 1
                        by[1] += 1
                        print(f"run {line['end']} at {line['interval']:g}: wrong")
                        print("\n".join(f"    {w}" for w in line["wrong"]), flush=True)
            reader.join()
        if begun is None:
            if child.returncode:
                print(said[0][-4000:])
                total["crashes"] += 1
            break
        hung = "Timeout (" in said[0]
        total["hangs" if hung else "crashes"] += 1
        total["runs"] += 1
        print(f"run {begun}: {'hung' if hung else f'died, {child.returncode}'}")
        print(said[0][-6000:], flush=True)
        at = begun + 1
    total["seconds"] = round(time.time() - started, 1)
    return total


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1e6)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--fault", action="store_true")
    parser.add_argument("--inside", action="store_true")
    parser.add_argument("--until", type=float, default=1e12)
    given = parser.parse_args()
    _Leak.on = given.fault
    if given.inside:
        inside(given.first, given.runs, given.until, tuple(given.kinds.split(",")))
        return 0
    more = ["--kinds", given.kinds, *(["--fault"] if given.fault else [])]
    total = drive(given.first, given.runs, given.seconds, more)
    print(json.dumps(total))
    return 1 if total["wrong"] or total["crashes"] or total["hangs"] else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

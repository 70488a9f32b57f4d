"""One training step in a fresh process, under a limit; prints what happened as JSON. Used by
test_survival.py.

survival_worker.py peak                              -> bytes that plain PyTorch's step needs
survival_worker.py <eager|hand|koila> <budget|rlimit> <bytes>
"""

import contextlib
import json
import resource
import sys

import torch
from memory_helpers import Held, by_hand_step, clear, eager_step, installed, only, out_of_memory
from torch import nn
from torch.nn import functional as F

import koila

torch.set_num_threads(1)


def make():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(128, 256),
        nn.GELU(),
        nn.LayerNorm(256),
        nn.Linear(256, 256),
        nn.GELU(),
        nn.LayerNorm(256),
        nn.Linear(256, 16),
    ).double()
    return model, (torch.randn(256, 64, 128, dtype=torch.float64), torch.randint(0, 16, (256, 64)))


def loss(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def data_bytes():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmData"))


def unlimit():
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def hand(model, batch):
    """Hand-tuned: halve until it fits."""
    m = len(batch[0])
    while m:
        try:
            by_hand_step(model, loss, batch, m)
            return m
        except RuntimeError as e:
            if not out_of_memory(e):
                raise
            clear(model)
            m //= 2
    raise torch.OutOfMemoryError("one row does not fit")


def main(mode, kind="", limit="0"):
    model, batch = make()
    small = tuple(t[:2] for t in batch)
    eager_step(model, loss, small)  # code pages and thread pools are not the step's
    clear(model)
    installed()
    if mode == "peak":
        with Held() as held:
            eager_step(model, loss, batch)
        return {"peak": held.peak}
    if mode == "koila":
        a, b = koila.lazy(*small)
        loss(model, a, b).backward()
        clear(model)
    n = int(limit)
    if kind == "rlimit":
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + n, resource.RLIM_INFINITY))
    try:
        with only(n) if kind == "budget" else contextlib.nullcontext():
            if mode == "eager":
                eager_step(model, loss, batch)
                m = len(batch[0])
            elif mode == "hand":
                m = hand(model, batch)
            else:
                a, b = koila.lazy(*batch)
                loss(model, a, b).backward()
                m = koila.last_plan().micro_batch
    except (RuntimeError, MemoryError, koila.KoilaError) as e:
        unlimit()
        if not out_of_memory(e):
            raise
        return {"ok": False, "error": f"{type(e).__name__}: {e}"[:300]}
    unlimit()
    grads = [p.grad for p in model.parameters()]
    return {
        "ok": True,
        "m": m,
        "sums": [
            float((g * torch.linspace(-1, 1, g.numel(), dtype=g.dtype).view_as(g)).sum())
            for g in grads
        ],
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))

"""In fresh processes, under limits: koila finishes wherever hand-tuned micro-batching can, with the
same numbers; plain PyTorch does not."""

import contextlib
import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import LONG
from memory_helpers import Held, installed, only, out_of_memory
from torch import nn
from torch.nn import functional as F

import koila
from koila import lazy

pytestmark = [
    pytest.mark.skipif(not installed(), reason="torch's CPU memory cannot be counted here"),
    pytest.mark.about_the_cpu("under a limit of the host; a GPU: test_gpu"),
]

HERE = os.path.dirname(os.path.abspath(__file__))
FRACTIONS = [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0] if LONG else [0.3, 0.5, 0.8, 1.0]


def worker(*args):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    p = subprocess.run(
        [sys.executable, os.path.join(HERE, "survival_worker.py"), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=200,
        env=env,
    )
    assert p.returncode == 0, f"{args}: rc {p.returncode}\n{p.stderr[-2000:]}"
    return json.loads(p.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def whole():
    peak = worker("peak")["peak"]
    return peak, worker("eager", "none", 0)


@pytest.mark.parametrize("kind", ["budget", "rlimit"])
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_koila_finishes_wherever_hand_tuned_micro_batching_can(kind, fraction, whole):
    peak, reference = whole
    # at 1.0 plain PyTorch just fits; a process needs a little beside its tensors
    limit = int(peak * fraction) + (1 << 20 if kind == "budget" else 8 << 20) * (fraction == 1.0)
    hand, ours = worker("hand", kind, limit), worker("koila", kind, limit)
    if hand["ok"]:
        assert ours["ok"], ours
    if ours["ok"]:
        assert torch.allclose(
            torch.tensor(ours["sums"]), torch.tensor(reference["sums"]), rtol=1e-9, atol=1e-12
        )
    if fraction <= 0.8:
        eager = worker("eager", kind, limit)
        assert not eager["ok"] and hand["ok"]


def test_a_batch_8_times_longer_at_step_900_of_1000_loses_nothing():
    def train(steps, wrap, limit):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)
        ).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        data = torch.Generator().manual_seed(1)
        cuts = []
        for step in range(steps):
            t = 8 * (8 if step == 900 else 1)
            x, y = (
                torch.randn(32, t, 8, generator=data, dtype=torch.float64),
                torch.randint(0, 4, (32, t), generator=data),
            )
            with only(limit) if limit else contextlib.nullcontext():
                x, y = wrap(x, y)
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
            cuts.append(koila.last_plan().n_micro_batches if wrap is lazy else 1)
        return model, cuts

    plain = lambda *v: v  # noqa: E731
    reference, _ = train(1000, plain, None)
    with Held() as held:
        train(2, plain, None)
    limit = 3 * held.peak
    with pytest.raises(RuntimeError) as e:
        train(1000, plain, limit)
    assert out_of_memory(e.value)
    model, cuts = train(1000, lazy, limit)
    assert cuts[900] > 1 and max(cuts[:899]) == 1 and len(cuts) == 1000
    for a, b in zip(model.parameters(), reference.parameters()):
        assert torch.allclose(a, b, rtol=1e-8, atol=1e-10)

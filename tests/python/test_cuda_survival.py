"""On a GPU with little memory left a step finishes wherever micro-batching by hand does, with plain
PyTorch's gradients: under a cap, under a budget, after steps of random sizes that left free memory
in pieces, and beside another process. Plain PyTorch runs out in most of these."""

import json
import multiprocessing
import os
import subprocess
import sys

import pytest
import torch
from cuda_survival_worker import FRACTIONS, OTHERS, SITUATIONS, another_process_takes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU is needed")

HERE = os.path.dirname(os.path.abspath(__file__))


def worker(tmp_path, *args):
    """What cuda_survival_worker.py says, on a simulated device of 2 GiB."""
    env = {**os.environ, "FAKECUDA_MEMORY": "2GiB", OTHERS: str(tmp_path / "others")}
    # whatever the other tests of this run need: here, PyTorch is as users have it
    env.pop("CUBLAS_WORKSPACE_CONFIG", None)
    p = subprocess.run(
        [sys.executable, os.path.join(HERE, "cuda_survival_worker.py"), *args],
        capture_output=True,
        text=True,
        timeout=400,
        env=env,
    )
    assert p.returncode == 0, p.stderr[-3000:]
    return json.loads(p.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "model, situation",
    [
        *(("mlp", situation) for situation in SITUATIONS),
        *(("language", situation) for situation in ("others", "fragmented")),
        *(("images", situation) for situation in ("cap", "fragmented")),
    ],
)
def test_koila_finishes_wherever_micro_batching_by_hand_does(model, situation, tmp_path):
    found = worker(tmp_path, "memory", model, situation)
    for fraction in FRACTIONS[model]:
        hand, ours = (found[str(fraction)][who] for who in ("hand", "koila"))
        print(f"{model}, {situation}, {fraction}: by hand {hand['m']} rows, koila {ours['m']}")
        assert hand["m"] > 0, "too little for anybody says nothing"
        assert ours["m"] >= hand["m"] / 2, (fraction, hand, ours)
    assert not found[str(FRACTIONS[model][0])]["eager"]["m"]
    if (model, situation) == ("mlp", "cap"):
        whole = found["1.0"]["eager"]["m"]
        assert whole and ours["m"] == whole, "what fits whole is not cut"


@pytest.mark.parametrize(
    "model, situation", [("mlp", "cap"), ("language", "others"), ("images", "fragmented")]
)
def test_steps_that_were_cut_leave_plain_gradients(model, situation, tmp_path):
    found = worker(tmp_path, "numbers", model, situation)
    for fraction, cut in found["cut"].items():
        assert cut["slices"] > 1
        for error in cut["errors"]:
            assert error <= 1e-12, fraction


def test_a_batch_8_times_longer_at_step_900_of_1000_loses_nothing(tmp_path):
    found = worker(tmp_path, "long", "plain", "cap")
    assert found["plain"] == "OutOfMemoryError at step 900"
    slices = found["slices"]
    assert len(slices) == 1000 and max(slices[:900]) == 1
    assert slices[900] > 1 and slices[-1] == 1, "one large batch must not slow all that follow"
    assert max(found["errors"]) <= 1e-9


def test_memory_that_others_take_while_a_step_runs_is_survived(tmp_path):
    """Its plan counted on that memory."""
    found = worker(tmp_path, "taken", "mlp", "others")
    assert found["retries"] > 0 and found["slices"] > 1
    assert max(found["errors"]) <= 1e-12


def test_another_process_takes_memory_and_gives_it_back():
    """As on a real GPU. A simulated one is not shared among processes: here, that it starts, says
    that it has the memory, and ends."""
    give_back = another_process_takes(32 << 20)
    assert give_back() is None
    assert not multiprocessing.active_children()

"""Torch's own allocator, recorded on the simulated device, is what the model says: every address,
every segment, every statistic, wherever the device lays its memory."""

import importlib.util
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from koila._torch import VERSION

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "record_history.py"
LAYOUTS = ("first", "up", "down")
# programs on several streams: with kernels that take time, memory comes back late
SLOW = ("random-default", "random-expandable", "random-split32-cap", "two-streams")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("fakecuda") is None or not torch.version.cuda,
    reason="needs the simulated device (make test-gpu); on hardware: make gpu-report",
)
if VERSION < (2, 13):
    pytest.skip("its dumps lack events: docs/allocator.md says which", allow_module_level=True)


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("record_history", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record(folder, names=(), **settings):
    """Records the programs and replays them; returns what was found of each."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FAKECUDA_", "KOILA_"))}
    command = [sys.executable, str(TOOL), str(folder), "--jobs", "2"]
    if names:
        command += ["--only", ",".join(names)]
    ran = subprocess.run(
        command,
        env={**env, "FAKECUDA_NUMBERS": "0", **settings},
        capture_output=True,
        text=True,
        timeout=500,
    )
    checks = folder / "checks.json"
    assert checks.exists(), ran.stderr[-2000:]
    return json.loads(checks.read_text())["found"]


@pytest.fixture(scope="module", params=LAYOUTS)
def recorded(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"histories-{request.param}")
    return request.param, folder, record(folder, FAKECUDA_ADDRESSES=request.param)


def test_every_history_is_replayed_exactly(recorded):
    _, _, found = recorded
    assert len(found) >= 63
    assert not {n: r["verdict"] for n, r in found.items() if not r["verdict"].startswith("exact")}


def test_statistics_are_torchs_but_those_that_no_event_tells(recorded):
    _, _, found = recorded
    assert not {n: r["stats"] for n, r in found.items() if r["stats"]}


def test_the_requests_alone_give_the_same_statistics(recorded):
    """Which segments go, and when memory is out, the model then decides itself."""
    _, _, found = recorded
    alone = {n: r["requests"] for n, r in found.items() if "requests" in r}
    assert len(alone) >= 13
    assert not {n: d for n, d in alone.items() if d}


def test_the_rules_of_another_version_are_noticed(recorded, tool):
    """The planted fault: ties by address, as torch had them before 2.12."""
    layout, folder, _ = recorded
    if layout == "up":
        pytest.skip("the oldest segment is the lowest here")
    koila = tool.koila_command(None)
    pickles = sorted(folder.glob("random-*.pickle"))
    verdicts = [
        tool.simulate(koila, file, "--check", "--torch", "2.11")[1]["replay"]["verdict"]
        for file in pickles
    ]
    assert len(verdicts) >= 13
    assert sum(v == "differs" for v in verdicts) * 2 >= len(verdicts)


def test_one_changed_address_is_noticed(recorded, tool, tmp_path):
    _, folder, _ = recorded
    with (folder / "pure-default.pickle").open("rb") as f:
        snapshot = pickle.load(f)
    trace = snapshot["device_traces"][0]
    allocs = [e for e in trace if e["action"] == "alloc"]
    allocs[len(allocs) // 2]["addr"] += 512
    changed = tmp_path / "changed.pickle"
    changed.write_bytes(pickle.dumps(snapshot))
    status, told, words = tool.simulate(tool.koila_command(None), changed, "--check")
    assert status != 0
    assert not told or not told["replay"]["verdict"].startswith("exact"), words


def test_histories_with_kernels_that_take_time_are_exact(tmp_path):
    found = record(tmp_path, SLOW, FAKECUDA_KERNEL_US="300")
    assert sorted(found) == sorted(SLOW)
    assert not {n: r["verdict"] for n, r in found.items() if not r["verdict"].startswith("exact")}
    assert not {n: r["stats"] for n, r in found.items() if r["stats"]}

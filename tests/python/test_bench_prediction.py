"""The bench of predictions works without a GPU: it predicts, and its errors are those of the truth
it is given."""

import json
import os
import sys
from pathlib import Path

import pytest
from helpers import run_python

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(scope="module")
def bench():
    if not (BENCH / "bench_prediction.py").exists():
        pytest.skip("installed without the benches")
    sys.path.insert(0, str(BENCH))
    try:
        import bench_prediction
    finally:
        sys.path.remove(str(BENCH))
    return bench_prediction


def test_there_are_a_dozen_configurations_of_every_sort(bench):
    cases = bench.CASES.values()
    assert (
        len(cases) >= 12
        and {c.optimizer for c in cases} == {"sgd", "adamw"}
        and {c.way for c in cases} == {"foreach", "fused"}
    )
    assert {c.half for c in cases} == {c.expandable for c in cases} == {True, False}


def test_it_predicts_without_a_gpu_and_fills_in_the_truth_later(bench, tmp_path):
    script, truth = BENCH / "bench_prediction.py", tmp_path / "truth.json"
    truth.write_text(
        json.dumps({"gnn-adamw": {"allocated": 100 << 20, "reserved": 1 << 40, "device": 1 << 40}})
    )
    code = (
        f"import runpy, sys; sys.argv = [{str(script)!r}, '--only', 'gnn-adamw', %s]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    dry = run_python(code % "'--dry'", env=env)
    assert "nothing was measured" in dry and dry.count("| gnn-adamw |") == 1 and "failed" not in dry
    filled = run_python(code % f"'--truth', {str(truth)!r}", env=env)
    assert (
        "allocated    1 configurations" in filled
        and "too low 0%" in filled
        and "above the high end 100%" in filled
    )


def test_errors_are_counted_as_one_would_by_hand(bench):
    rows = {}
    for i, expected in enumerate([90, 100, 110, 130, 200]):  # of 100: -10, 0, +10, +30, +100 %
        peaks = {kind: [expected - 5, expected, expected + 5] for kind in bench.KINDS}
        rows[str(i)] = {"predicted": peaks, "truth": dict.fromkeys(bench.KINDS, 100)}
    lines = bench.summary(rows)
    assert len(lines) == 3
    for line in lines:
        assert (
            "median 10.00%, p95 100.00%, worst 100.00%; too low 20%, above the high end 20%, "
            "inside 20%" in line
        )
    assert bench.summary({"a": {"predicted": rows["0"]["predicted"], "truth": {}}}) == []

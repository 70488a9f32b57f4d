"""tools/gpu_report.py: what it says of a report. The report itself is made on a GPU."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import gpu_report  # noqa: E402

KNOWN = {"tests/python/test_a.py::test_known"}
PREDICTION = {
    "configurations": {
        "mlp": {
            "predicted": {"allocated": [90, 110, 120], "reserved": [1, 2, 3], "device": [1, 2, 3]},
            "measured": {"allocated": 100, "reserved": 2, "device": None},
            "error": None,
        }
    }
}
REPORT = {
    "format": gpu_report.FORMAT,
    "device": {
        "gpu": "some GPU",
        "simulated": False,
        "memory": 1 << 30,
        "torch": "2.13.0",
        "koila": "abc",
    },
    "seconds": {"tests": 1.0, "replay": 2.0, "prediction": 3.0},
    "tests": {
        "passed": {"tests/python/test_a.py": 5},
        "failed": {"tests/python/test_a.py::test_known": "why"},
        "skipped": {},
    },
    "replay": {"pure": {"verdict": "exact", "statistics": {}}},
    "prediction": PREDICTION,
}
SIMULATED = {
    "replay": {"pure": {"verdict": "exact", "statistics": {}}},
    "prediction": PREDICTION,
}


def said(report, simulated=SIMULATED):
    return gpu_report.summary(report, simulated, KNOWN)


def test_a_report_that_agrees_names_no_difference():
    lines = said(REPORT)
    assert not [line for line in lines if "DIFFERS" in line]
    assert "5 tests passed, 1 failed, 0 skipped" in lines
    assert "1 of 1 histories replayed exactly" in lines
    assert "mlp: allocated 0 (+10.00%; +0.00%), reserved 0 (+0.00%; +0.00%)" in lines


def test_a_test_that_fails_only_on_hardware_is_told():
    report = copy.deepcopy(REPORT)
    report["tests"]["failed"]["tests/python/test_a.py::test_new"] = "why"
    assert [line for line in said(report) if "DIFFERS" in line] == [
        "DIFFERS: passes when simulated: tests/python/test_a.py::test_new: why"
    ]


def test_a_history_that_replays_otherwise_is_told():
    report = copy.deepcopy(REPORT)
    report["replay"]["pure"]["verdict"] = "differs"
    report["replay"]["fresh"] = {"verdict": "exact", "statistics": {"a": [1, 2]}}
    lines = said(report)
    assert "DIFFERS: pure: differs; simulated: exact" in lines
    assert "DIFFERS: fresh: exact; simulated: not recorded" in lines
    assert "statistics of fresh: {'a': [1, 2]}" in lines


def test_a_configuration_that_failed_is_told():
    report = copy.deepcopy(REPORT)
    report["prediction"]["configurations"]["mlp"]["error"] = "out of memory"
    assert "DIFFERS: mlp failed: out of memory" in said(report)


def test_a_part_that_could_not_run_fails_the_report():
    report = copy.deepcopy(REPORT)
    report["tests"]["failed"] = {}
    assert not gpu_report.failed(report)
    report["replay"] = {"error": "no command"}
    assert gpu_report.failed(report)
    assert "could not run: no command" in said(report)


def test_outcomes_of_pytest_are_counted(tmp_path):
    file = tmp_path / "test_three.py"
    file.write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 1 == 2, 'so it is'\n"
        "@pytest.mark.skip(reason='no GPU')\n"
        "def test_left(): pass\n"
    )
    xml = tmp_path / "out.xml"
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={xml}", file],
        cwd=tmp_path,
        capture_output=True,
    )
    found = gpu_report.count_outcomes(xml)
    assert found["passed"] == {"test_three.py": 1}
    assert list(found["failed"]) == ["test_three.py::test_bad"]
    assert "so it is" in found["failed"]["test_three.py::test_bad"]
    assert found["skipped"] == {"test_three.py::test_left": "no GPU"}


@pytest.mark.parametrize("seconds", [None, 0])
def test_files_for_which_there_is_no_time_are_left_out_and_named(seconds, tmp_path):
    files = [str(tmp_path / name) for name in ("test_one.py", "test_two.py")]
    for file in files:
        Path(file).write_text("def test_good(): pass\n")
    found = gpu_report.run_tests(files[:1], files[1:], 1, seconds)
    assert list(found["left_out"]) == ([] if seconds is None else files)
    assert sum(found["passed"].values()) == (2 if seconds is None else 0)
    lines = gpu_report.compare_tests(found, set())
    assert sum("left out, for --test-seconds" in line for line in lines) == len(found["left_out"])


def test_a_report_that_is_broken_off_has_the_parts_before(monkeypatch):
    saved = []
    monkeypatch.setattr(gpu_report, "describe_device", lambda: REPORT["device"])
    monkeypatch.setattr(gpu_report, "run_replay", lambda folder: REPORT["replay"])
    monkeypatch.setattr(gpu_report, "run_prediction", lambda folder: 1 / 0)
    old = {"tests": REPORT["tests"], "seconds": {"tests": 1.0}}
    with pytest.raises(ZeroDivisionError):
        gpu_report.make_report(
            old, ["replay", "prediction"], dict, lambda r: saved.append(copy.deepcopy(r))
        )
    (report,) = saved
    assert report["tests"] == REPORT["tests"] and "prediction" not in report
    assert "1 of 1 histories replayed exactly" in said(report)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--only", "smell"], "no part smell; there are tests, replay, prediction, speed"),
        (["--read", "missing.json"], "missing.json: no such file"),
        (["--only", "tests"], "--suites names the test files"),
    ],
)
def test_bad_use_is_an_error_that_says_what_to_do(options, words):
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "gpu_report.py"), *options],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert words in done.stderr


def test_a_report_made_elsewhere_is_read(tmp_path):
    file = tmp_path / "report.json"
    file.write_text(json.dumps(REPORT))
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "gpu_report.py"), "--read", str(file)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1  # a test failed there
    assert done.stdout.startswith("some GPU, 1,024 MiB, torch 2.13.0, koila abc\n")

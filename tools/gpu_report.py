"""Everything of koila that touches a GPU, run on a real one and compared with the simulated one.

    make gpu-report                                  in an environment that uses the torch you have
    python tools/gpu_report.py [--out gpu-report.json] [--only tests,replay,prediction,speed]
    python tools/gpu_report.py --keep FILE           on a simulated device: what others compare with
    python tools/gpu_report.py --read FILE           the summary of a report that was made elsewhere
    ... --test-seconds N    test files that have not ended by then are left out, and named as such

It writes one file (anew after each part), with nothing in it but the names, versions and numbers
below, and prints where the hardware agrees with the simulated device (tests/fakecuda) and where it
does not:

- tests: the test suites with every tensor on the GPU. On the simulated device all of them pass but
  those of tests/fakecuda/known_failures.txt.
- replay: histories of torch's allocator (tools/record_history.py), replayed by koila's model.
- prediction: peaks of training steps that koila predicts, against the measured ones
  (bench/bench_prediction.py). What the libraries of the hardware ask for is not simulated, so the
  two devices may differ; the report says by how much.
- speed: koila against plain PyTorch and micro-batching by hand (bench/bench_engine.py). A simulated
  device has no speed.

Exit status 1 if a part could not run or a test failed."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KNOWN_FAILURES = ROOT / "tests" / "fakecuda" / "known_failures.txt"
SIMULATED = ROOT / "tests" / "fakecuda" / "simulated.json"
MEMORY_KINDS = ("allocated", "reserved", "device")
PARTS = ("tests", "replay", "prediction", "speed")
FORMAT = 1
MIB = 1 << 20


# ---- the device


def describe_device() -> dict[str, Any]:
    """What is measured on. Raises SystemExit where torch sees no GPU."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit(
            f"gpu_report: torch {torch.__version__} of {sys.executable} sees no GPU. Give a Python "
            "whose torch does: make gpu-report PYTHON=...; without a GPU, make test-gpu."
        )
    name = torch.cuda.get_device_name()
    return {
        "gpu": name,
        "simulated": "(fake)" in name,
        "devices": torch.cuda.device_count(),
        "memory": torch.cuda.mem_get_info()[1],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "koila": commit(),
        "rows_of_attention": rows_of_attention(),
    }


def rows_of_attention() -> dict[str, str]:
    """Of each kernel of fused attention: by what the numbers that dropout draws for a row of the
    batch were found, if they were. Only hardware can tell it of cuDNN's."""
    import torch
    from koila import _attention

    x = torch.empty(3, 2, 36, 16, dtype=torch.half, device="cuda")
    return {
        "flash": _attention.rows_found_by(x, _attention.FLASH),
        "efficient": _attention.rows_found_by(x, _attention.EFFICIENT),
        "cudnn": _attention.rows_found_by(x, _attention.CUDNN),
    }


def commit() -> str:
    said = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    return said.stdout.strip() or "unknown"


# ---- the parts: each returns what it found, as JSON


def run_tests(
    suites: list[str], beside: list[str], processes: int, seconds: float | None
) -> dict[str, Any]:
    """Runs `suites` with every tensor on the GPU, and those `beside` it with tensors where they
    say. Tests that passed are counted by file, all others are named with their first line of
    reason. seconds: for all; then file by file, so that what has ended counts, and those that
    have not are `left_out`."""
    until = None if seconds is None else time.monotonic() + seconds
    found: dict[str, dict[str, Any]] = {"passed": {}, "failed": {}, "skipped": {}, "left_out": {}}
    for files, environment in ((suites, {"KOILA_DEVICE": "cuda"}), (beside, {})):
        for group in [files] if until is None else [[file] for file in files]:
            left = None if until is None else max(0, until - time.monotonic())
            more = run_pytest(group, processes, environment, left) if group else {}
            if "error" in more:
                return more
            for outcome, tests in more.items():
                found[outcome].update(tests)
    return found


def run_pytest(
    suites: list[str], processes: int, environment: dict[str, str], seconds: float | None
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", *suites, "-q", f"--junitxml={xml}"]
        command += ["-o", "junit_family=xunit2"]
        if processes > 1:
            command += ["-n", str(processes), "--dist", "worksteal"]
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **environment}, start_new_session=True
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return {"left_out": {file: f"not done after {seconds:.0f} s" for file in suites}}
        finally:
            if process.poll() is None:  # with all that it has started
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if not xml.exists():
            return {"error": f"pytest ended with status {status} and left no result"}
        return count_outcomes(xml)


def count_outcomes(xml: Path) -> dict[str, Any]:
    passed: dict[str, int] = {}
    others: dict[str, dict[str, str]] = {"failed": {}, "skipped": {}}
    for case in ElementTree.parse(xml).iter("testcase"):
        file = case.get("classname", "").replace(".", "/") + ".py"
        reasons = [e for e in case if e.tag in ("failure", "error", "skipped")]
        if reasons:
            outcome = "skipped" if reasons[0].tag == "skipped" else "failed"
            reason = (reasons[0].get("message") or "").strip().splitlines() or [""]
            others[outcome][f"{file}::{case.get('name')}"] = reason[0][:300]
        else:
            passed[file] = passed.get(file, 0) + 1
    return {"passed": passed, **others}


def run_replay(folder: Path) -> dict[str, Any]:
    """Of every recorded history: what its replay says, and which statistics differ."""
    command = [sys.executable, str(ROOT / "tools" / "record_history.py"), str(folder)]
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    checks = folder / "checks.json"
    if not checks.exists():
        return {"error": "tools/record_history.py wrote no checks.json"}
    found = json.loads(checks.read_text(encoding="utf-8"))["found"]
    return {
        name: {"verdict": row["verdict"], "statistics": row.get("stats") or {}}
        for name, row in found.items()
    }


def run_prediction(folder: Path) -> dict[str, Any]:
    """Of every configuration: predicted [low, expected, high] and measured, in bytes."""
    command = [sys.executable, str(ROOT / "bench" / "bench_prediction.py"), "--keep", str(folder)]
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    if not (folder / "predictions.json").exists():
        return {"error": "bench/bench_prediction.py wrote no predictions.json"}
    predicted = json.loads((folder / "predictions.json").read_text(encoding="utf-8"))
    truths = json.loads((folder / "truths.json").read_text(encoding="utf-8"))
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    rows = {
        name: {
            "predicted": {k: predicted[name].get(k) for k in MEMORY_KINDS},
            "measured": {k: truths.get(name, {}).get(k) for k in MEMORY_KINDS},
            "error": predicted[name].get("error") or truths.get(name, {}).get("error"),
        }
        for name in predicted
    }
    return {"configurations": rows, "facts": facts}


def run_speed() -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "bench" / "bench_engine.py"), "--device", "cuda"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["?"])[-1][:300]}
    return {"table": done.stdout.splitlines()}


# ---- the comparison: lines of text, the disagreements marked


def known_failures() -> set[str]:
    lines = KNOWN_FAILURES.read_text(encoding="utf-8").splitlines()
    tests = (line.split("  #")[0].strip() for line in lines)
    return {t for t in tests if t and not t.startswith("#")}


def compare_tests(found: dict[str, Any], known: set[str]) -> list[str]:
    lines = [
        f"{sum(found['passed'].values())} tests passed, {len(found['failed'])} failed, "
        f"{len(found['skipped'])} skipped"
    ]
    for file, reason in found.get("left_out", {}).items():
        lines.append(f"left out, for --test-seconds: {file}: {reason}")
    for test, reason in found["failed"].items():
        expected = test in known or test.split("[")[0] in known
        word = "fails on the simulated device too" if expected else "DIFFERS: passes when simulated"
        lines.append(f"{word}: {test}: {reason}")
    return lines


def compare_replay(found: dict[str, Any], simulated: dict[str, Any]) -> list[str]:
    exact = sum(row["verdict"].startswith("exact") for row in found.values())
    lines = [f"{exact} of {len(found)} histories replayed exactly"]
    for name, row in found.items():
        there = simulated.get(name, {}).get("verdict", "not recorded")
        if row["verdict"] != there:
            lines.append(f"DIFFERS: {name}: {row['verdict']}; simulated: {there}")
        if row["statistics"]:
            lines.append(f"statistics of {name}: {row['statistics']}")
    return lines


def relative(value: float, to: float) -> str:
    return f"{(value - to) / to:+.2%}"


def compare_prediction(found: dict[str, Any], simulated: dict[str, Any]) -> list[str]:
    there = simulated.get("configurations", {})
    lines = ["measured MiB (predicted against it; the simulated device against it)"]
    for name, row in found["configurations"].items():
        if row["error"]:
            lines.append(f"DIFFERS: {name} failed: {row['error']}")
            continue
        cells = []
        for kind in MEMORY_KINDS:
            measured = row["measured"][kind]
            if measured is None:
                continue
            on_simulated = there.get(name, {}).get("measured", {}).get(kind)
            cells.append(
                f"{kind} {measured / MIB:,.0f} ({relative(row['predicted'][kind][1], measured)}; "
                + ("not there)" if on_simulated is None else f"{relative(on_simulated, measured)})")
            )
        lines.append(f"{name}: " + ", ".join(cells))
    return lines


def summary(report: dict[str, Any], simulated: dict[str, Any], known: set[str]) -> list[str]:
    """The report as lines. A line with DIFFERS: hardware and simulated device disagree."""
    device = report["device"]
    lines = [
        f"{device['gpu']}, {device['memory'] / MIB:,.0f} MiB, torch {device['torch']}, "
        f"koila {device['koila']}" + (" (SIMULATED DEVICE)" if device["simulated"] else "")
    ]
    for kernel, found_by in device.get("rows_of_attention", {}).items():
        lines.append(
            f"{kernel} attention with dropout: the numbers of a row are found by {found_by}"
        )
    for part in PARTS:
        found = report.get(part)
        if found is None:
            continue
        lines += ["", f"{part}, {report['seconds'][part]:.0f} s"]
        if "error" in found:
            lines.append(f"could not run: {found['error']}")
        elif part == "tests":
            lines += compare_tests(found, known)
        elif part == "replay":
            lines += compare_replay(found, simulated.get("replay", {}))
        elif part == "prediction":
            lines += compare_prediction(found, simulated.get("prediction", {}))
        else:
            lines += found["table"]
    return lines


def failed(report: dict[str, Any]) -> bool:
    parts = [report[part] for part in PARTS if part in report]
    return any("error" in part for part in parts) or bool(report.get("tests", {}).get("failed"))


# ---- the command


def make_report(
    old: dict[str, Any],
    parts: list[str],
    run_suites: Callable[[], dict[str, Any]],
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """old: a report whose parts stay where they are not run again. save: gets the report after each
    part, so that one that is broken off has those before."""
    report = {**old, "format": FORMAT, "device": describe_device()}
    report["seconds"] = dict(old.get("seconds", {}))
    with tempfile.TemporaryDirectory() as folder:
        for part in parts:
            print(f"gpu_report: {part} ...", file=sys.stderr, flush=True)
            started = time.monotonic()
            if part == "tests":
                report[part] = run_suites()
            elif part == "replay":
                report[part] = run_replay(Path(folder) / part)
            elif part == "prediction":
                report[part] = run_prediction(Path(folder) / part)
            else:
                report[part] = run_speed()
            report["seconds"][part] = round(time.monotonic() - started, 1)
            save(report)
    return report


def read_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def write_json(path: Path, report: dict[str, Any]) -> None:
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-report.json"))
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument(
        "--suites", nargs="*", default=[], help="test files, all tensors on the GPU"
    )
    parser.add_argument(
        "--beside", nargs="*", default=[], help="test files, tensors where they say"
    )
    parser.add_argument(
        "--keep", type=Path, help="put what a simulated device says into FILE, part by part"
    )
    parser.add_argument("--read", type=Path, help="print the summary of this report")
    parser.add_argument(
        "--processes", type=int, default=1, help="of pytest; more than one blurs measured memory"
    )
    parser.add_argument("--test-seconds", type=float, help="for all test files; no limit without")
    args = parser.parse_args()
    parts = args.only.split(",")
    for unknown in set(parts) - set(PARTS):
        parser.error(f"no part {unknown}; there are {', '.join(PARTS)}")
    if args.read:
        if not args.read.exists():
            parser.error(f"{args.read}: no such file")
        report = read_json(args.read)
        if report.get("format") != FORMAT:
            parser.error(f"{args.read} is not a report of this version of koila")
    else:
        if "tests" in parts and not args.suites:
            parser.error("--suites names the test files; make gpu-report gives them")
        if args.keep and not describe_device()["simulated"]:
            parser.error("--keep is for a simulated device; this GPU is a real one")
        file = args.keep or args.out
        suites = (args.suites, args.beside, args.processes, args.test_seconds)
        report = make_report(
            read_json(args.keep) if args.keep else {},
            parts,
            lambda: run_tests(*suites),
            lambda so_far: write_json(file, so_far),
        )
    print(*summary(report, read_json(SIMULATED), known_failures()), sep="\n")
    if not args.read and not args.keep:
        print(f"\nwritten to {args.out}: please send it back")
    return 1 if failed(report) else 0


if __name__ == "__main__":
    sys.exit(main())

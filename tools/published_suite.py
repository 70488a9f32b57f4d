"""Run the test suite of the published pytorch_memlab against koila.memlab, under the old name. This
repository keeps no copy of the suite.

    pip download --no-deps pytorch_memlab==0.3.2       (or a checkout of its repository)
    python -m zipfile -e pytorch_memlab-0.3.2-py3-none-any.whl old
    python tools/published_suite.py old/test

Prints one line a test and exits 1 if one fails. Without a GPU, `.cuda()` returns its object
unchanged, so that every test runs.
"""

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SUBMODULES = (
    "line_profiler",
    "line_profiler.line_profiler",
    "line_profiler.extension",
    "mem_reporter",
    "courtesy",
    "utils",
)
# raises KeyboardInterrupt on purpose, which would end pytest
INTERRUPTS = "test_line_report_profile_interrupt"


def pytest_configure(config):
    """As a pytest plugin: the alias, and `.cuda()` where there is none."""
    sys.modules["pytorch_memlab"] = importlib.import_module("koila.memlab")
    for name in SUBMODULES:
        sys.modules[f"pytorch_memlab.{name}"] = importlib.import_module(f"koila.memlab.{name}")
    import torch

    if not torch.cuda.is_available():
        torch.nn.Module.cuda = torch.Tensor.cuda = lambda self, device=None: self


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "tests", type=Path, help="the suite's folder, with test_line_profiler.py in it"
    )
    folder = parser.parse_args().tests.resolve()
    if not (folder / "test_line_profiler.py").exists():
        parser.error(f"{folder}: no test_line_profiler.py there")
    here = str(Path(__file__).resolve().parent)
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }
    options = [
        "-p",
        "published_suite",
        "-p",
        "no:cacheprovider",
        "-v",
        "--no-header",
        "--import-mode=importlib",
    ]
    # away from the suite's own package, so that the alias is imported
    with tempfile.TemporaryDirectory() as cwd:
        passed = subprocess.run(
            [sys.executable, "-m", "pytest", *options, "-k", f"not {INTERRUPTS}", str(folder)],
            env=env,
            cwd=cwd,
        )
        interrupted = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                *options,
                f"{folder}/test_line_profiler.py",
                "-k",
                INTERRUPTS,
            ],
            env=env,
            cwd=cwd,
            capture_output=True,
            text=True,
        )
    shown = interrupted.stdout.count("def work():") == 1 and "Traceback" not in interrupted.stderr
    right = interrupted.returncode == 2 and "KeyboardInterrupt" in interrupted.stdout and shown
    print(
        f"{INTERRUPTS}: {'PASSED (interrupted, its table printed at exit)' if right else 'FAILED'}"
    )
    if not right:
        print(interrupted.stdout[-3000:], interrupted.stderr[-1000:])
    return int(passed.returncode != 0 or not right)


if __name__ == "__main__":
    sys.exit(main())

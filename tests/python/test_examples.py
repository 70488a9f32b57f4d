"""Every example runs, as it is shown, and its own assertions hold."""

import os
import pathlib
import subprocess
import sys

import pytest
from helpers import rendezvous
import torch

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
OPTIONS = {"digits.py": ["--report", "{tmp}/report.html"]}
NEEDS = {
    "hf_trainer.py": ["transformers", "accelerate"],
    "hf_accelerate.py": ["accelerate"],
    "lightning_fit.py": ["lightning"],
    "finetune_gpt2.py": ["transformers"],
}


def need_packages(name):
    """Skips where a package that the example imports is not installed."""
    for package in ["sklearn", *NEEDS.get(name, [])]:
        pytest.importorskip(package)


def programs():
    """The examples. Recipes are trained for a few steps by test_docs.py, and here to their end."""
    for path in sorted(EXAMPLES.glob("*.py")):
        is_recipe = "from recipe import" in path.read_text(encoding="utf-8")
        if path.name != "recipe.py":
            yield pytest.param(path.name, marks=pytest.mark.long if is_recipe else ())


@pytest.mark.parametrize("name", list(programs()))
def test_an_example_runs(name, tmp_path):
    need_packages(name)
    if name in ("ddp.py", "fsdp.py") and not (
        torch.distributed.is_available() and torch.distributed.is_gloo_available()
    ):
        pytest.skip("no gloo")
    options = [o.format(tmp=tmp_path) for o in OPTIONS.get(name, [])]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **rendezvous()}
    for _ in range(3 if name in ("ddp.py", "fsdp.py") else 1):
        p = subprocess.run(
            [sys.executable, str(EXAMPLES / name), *options],
            capture_output=True,
            text=True,
            timeout=300,
            env=env,
        )
        # Sometimes a process aborts at exit, after it printed its result: try again.
        if "SIGABRT" not in p.stderr:
            break
    assert p.returncode == 0, p.stdout + p.stderr[-3000:]
    if options:
        assert "svg" in (tmp_path / "report.html").read_text(encoding="utf-8")
        for words in (
            "plain PyTorch needs",
            "the budget is",
            "fails:",
            "predicted peak",
            "measured peak",
            "test accuracy",
        ):
            assert words in p.stdout

"""The Makefile: what no target would say by itself. make takes an undefined variable for an empty
text, so a target that lost one does something else, in silence."""

import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TARGETS = (
    "demo test text format unit python gpu-suites test-gpu-known gpu-report bench docs wheels clean"
)


def undefined_variables(makefile, targets):
    """What these targets would expand to nothing. -n: nothing is run."""
    told = subprocess.run(
        ["make", "--no-print-directory", "-n", "--warn-undefined-variables", "-f", makefile]
        + targets.split(),
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stderr
    lines = [line for line in told.splitlines() if "undefined variable" in line]
    return {line.split("'")[1] for line in lines}


@pytest.mark.skipif(not shutil.which("make"), reason="there is no make")
def test_every_variable_of_the_makefile_is_defined(tmp_path):
    assert undefined_variables("Makefile", TARGETS) == set()
    planted = tmp_path / "Makefile"
    planted.write_text("a: ; echo $(LOST)\n", encoding="utf-8")
    assert undefined_variables(planted, "a") == {"LOST"}

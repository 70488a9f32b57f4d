"""What `--known-skips` of conftest.py says: of the simulated GPU's tests at most 15 skip, each with
what ends it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import Skips

HERE = Path(__file__).parent
LINE = "test_it.py::test_marked[{}]  # hardware\n"


def wrong(folder, lines, *reports):
    known = folder / "known.txt"
    known.write_text("# a list\n" + "".join(lines), encoding="utf-8")
    skips = Skips(known)
    for name, reason in reports:
        report = SimpleNamespace(
            nodeid=name, skipped=reason is not None, longrepr=("file", 1, f"Skipped: {reason}")
        )
        skips.pytest_runtest_logreport(report)
    session = SimpleNamespace(exitstatus=0)
    skips.pytest_sessionfinish(session)
    assert bool(session.exitstatus) == bool(skips.wrong)
    return skips.wrong


def test_a_skip_that_is_not_in_the_list_is_wrong(tmp_path):
    seen = [(f"test_it.py::test_marked[{n}]", "no such device") for n in (1, 2)]
    fine = [("a", None), ("b", "long: KOILA_LONG=1 runs it")]
    assert not wrong(tmp_path, [LINE.format(n) for n in (1, 2)], *seen, *fine)
    (found,) = wrong(tmp_path, [LINE.format(1)], *seen, *fine)
    assert "test_marked[2]: Skipped: no such device" in found


def test_a_line_without_a_reason_and_too_many_lines_are_wrong(tmp_path):
    assert "no reason" in wrong(tmp_path, ["test_it.py::test_marked\n"])[0]
    assert not wrong(tmp_path, [LINE.format(n) for n in range(15)])
    assert "16 tests may skip" in wrong(tmp_path, [LINE.format(n) for n in range(16)])[0]


@pytest.mark.parametrize("more", [[], ["-n", "1"]])
def test_pytest_fails_and_says_so(tmp_path, more):
    shutil.copy(HERE / "conftest.py", tmp_path)
    (tmp_path / "known.txt").touch()
    (tmp_path / "test_it.py").write_text("import pytest\n\ndef test_it():\n    pytest.skip('no')\n")
    command = [sys.executable, "-m", "pytest", "-q", "--known-skips=known.txt", *more]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert said.returncode == 1 and "test_it.py::test_it: Skipped: no" in said.stdout

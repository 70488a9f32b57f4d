"""The law of the layers, C first, and nothing of a machine in the tree. Needs the source tree beside the tests."""

import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
check_layers = pytest.importorskip("check_layers")


def tracked():
    p = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True) if shutil.which("git") else None
    if p is None or p.returncode:
        pytest.skip("not a git checkout")
    return [f for f in p.stdout.splitlines() if (ROOT / f).is_file()]


def test_the_layers_hold():
    assert check_layers.broken(ROOT) == []


@pytest.mark.parametrize(
    "path, line",
    [
        ("src/alloc.c", '#include "table.h"'),
        ("src/rules_view.c", '#include "rules_loss.h"'),
        ("src/graph.c", '#include "schedule.h"'),
        ("src/cache.c", '#include "table.h"'),
        ("src/ledger.c", "#include <Python.h>"),
        ("src/unheard_of.c", ""),
        ("cli/cmd_plan.c", '#include "schedule.h"'),
        ("python/ext/run.c", '#include "schedule.h"'),
        ("python/ext/alloc.c", ""),
    ],
)
def test_a_planted_break_is_found(tmp_path, path, line):
    for d in ("src", "cli", "python/ext", "include"):
        (tmp_path / d).mkdir(parents=True)
    (tmp_path / "src" / "alloc.c").write_text("")
    (tmp_path / path).write_text(line + "\n")
    assert len(check_layers.broken(tmp_path)) == 1


def test_c_lines_are_at_least_twice_the_python_lines():
    def lines(suffixes, folders):
        return sum(
            sum(1 for line in (ROOT / f).read_text(encoding="utf-8").splitlines() if line.strip())
            for f in tracked()
            if f.startswith(folders) and f.endswith(suffixes)
        )

    c = lines((".c", ".h", ".def"), ("src/", "include/", "cli/", "python/ext/"))
    python = lines((".py", ".pyi"), ("python/koila/",))
    assert c >= 2 * python, f"{c} lines of C, {python} of Python"


def test_nothing_of_a_machine_is_in_the_tree():
    here = {str(ROOT), sys.prefix, sys.base_prefix, str(pathlib.Path.home())} - {"/", "/usr", "/usr/local"}
    bad = re.compile("|".join(re.escape(p) + "/" for p in sorted(here)) + r"|/home/(?!user/)\w+/|index-ur[l]=http")
    found = [f for f in tracked() if bad.search((ROOT / f).read_text(encoding="utf-8", errors="ignore"))]
    assert found == []

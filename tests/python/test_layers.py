"""The law of the layers, C first, and nothing of a machine in the tree. Needs the source tree
beside the tests."""

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
    p = (
        subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
        if shutil.which("git")
        else None
    )
    if p is None or p.returncode:
        pytest.skip("not a git checkout")
    return [f for f in p.stdout.splitlines() if (ROOT / f).is_file()]


def test_the_rooms_keep_the_law():
    assert check_layers.broken_includes(ROOT) == []


HEADERS = [
    "src/graph/table.h",
    "src/placement/placer.h",
    "src/placement/rules_loss.h",
    "src/engine/schedule.h",
    "src/allocator/cache.h",
    "include/koila/plan.h",
    "python/ext/capture/tape.h",
    "python/ext/run/run.h",
    "python/ext/memlab/memlab.h",
    "python/ext/memlab/credit.h",
]


@pytest.mark.parametrize(
    "path, line",
    [
        ("src/base/alloc.c", '#include "graph/table.h"'),
        ("src/placement/rules_view.c", '#include "placement/rules_loss.h"'),
        ("src/placement/rules_view.c", '#include "placement/placer.h"'),
        ("src/graph/graph.c", '#include "engine/schedule.h"'),
        ("src/allocator/cache.c", '#include "graph/table.h"'),
        ("src/allocator/device.c", '#include "koila/plan.h"'),
        ("src/memory/ledger.c", '#include "allocator/cache.h"'),
        ("src/memory/ledger.c", '#include "gone.h"'),
        ("src/memory/ledger.c", "#include <Python.h>"),
        ("src/nowhere/unheard_of.c", ""),
        ("cli/cmd_plan.c", '#include "engine/schedule.h"'),
        ("python/ext/run/run.c", '#include "engine/schedule.h"'),
        ("python/ext/capture/node.c", '#include "run/run.h"'),
        ("python/ext/capture/node.c", '#include "memlab/memlab.h"'),
        ("python/ext/ground/real.c", '#include "capture/tape.h"'),
        ("python/ext/ground/alloc.c", ""),
    ],
)
def test_a_planted_include_is_found(tmp_path, path, line):
    for header in [*HEADERS, path]:
        (tmp_path / header).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / header).write_text("")
    (tmp_path / "src" / "base").mkdir(parents=True, exist_ok=True)
    (tmp_path / "src" / "base" / "alloc.c").write_text("")
    (tmp_path / path).write_text(line + "\n")
    assert len(check_layers.broken_includes(tmp_path)) == 1


def test_allowed_includes_are_not_found(tmp_path):
    allowed = {
        "src/placement/rewrite.c": '#include "placement/placer.h"',
        "src/engine/plan.c": '#include "graph/table.h"',
        "python/ext/capture/node.c": '#include "memlab/credit.h"',
        "python/ext/run/run.c": '#include "capture/tape.h"',
        "python/ext/memlab/events.c": '#include "memlab/memlab.h"',
    }
    for header in HEADERS:
        (tmp_path / header).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / header).write_text("")
    for path, line in allowed.items():
        (tmp_path / path).write_text(line + "\n")
    assert check_layers.broken_includes(tmp_path) == []


def compiled(folder, sources):
    """Objects of these sources, {path: text}, named as Meson names them."""
    compiler = shutil.which("cc")
    if not compiler or not shutil.which("nm"):
        pytest.skip("no C compiler or no nm")
    for path, text in sources.items():
        source = folder / pathlib.Path(path).name
        source.write_text(text)
        made = folder / (path.replace("/", "_") + ".o")
        subprocess.run([compiler, "-c", str(source), "-o", str(made)], check=True)
    return list(folder.glob("*.c.o"))


THING = {"src/engine/thing.c": "int koila__engine_thing(void) { return 1; }\n"}


def test_a_planted_call_is_found(tmp_path):
    calls = "int koila__engine_thing(void);\nint koila__x(void) { return koila__engine_thing(); }\n"
    found = check_layers.broken_calls(compiled(tmp_path, {**THING, "src/base/x.c": calls}))
    assert len(found) == 1
    assert "koila__engine_thing of src/engine" in found[0]


def test_the_same_objects_without_the_call_keep_the_law(tmp_path):
    quiet = "int koila__x(void) { return 1; }\n"
    uses = "int koila__x(void);\nint koila__y(void) { return koila__x(); }\n"
    sources = {**THING, "src/base/x.c": quiet, "src/engine/y.c": uses}
    assert check_layers.broken_calls(compiled(tmp_path, sources)) == []


def ring(last):
    """Three files of which each uses the next, and the third uses `last`."""

    def one(name, used):
        return f"int koila__{used}(void);\nint koila__{name}(void) {{ return koila__{used}(); }}\n"

    return {
        "python/ext/capture/a.c": one("a", "b"),
        "python/ext/run/b.c": one("b", "c"),
        "python/ext/capture/c.c": one("c", last),
    }


def test_a_planted_circle_is_found(tmp_path):
    found = check_layers.circles(compiled(tmp_path, ring("a")))
    assert len(found) == 3
    assert "capture_c uses koila__a of capture_a" in found[1]


def test_files_in_a_row_are_no_circle(tmp_path):
    assert check_layers.circles(compiled(tmp_path, ring("elsewhere"))) == []


def test_no_objects_is_not_a_clean_bill(tmp_path):
    assert check_layers.broken_calls([]) == ["no object of any room was found: build first"]


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
    here = {str(ROOT), sys.prefix, sys.base_prefix, str(pathlib.Path.home())} - {
        "/",
        "/usr",
        "/usr/local",
    }
    bad = re.compile(
        "|".join(re.escape(p) + "/" for p in sorted(here))
        + r"|/home/(?!user/)\w+/|index-ur[l]=http"
    )
    found = [
        f for f in tracked() if bad.search((ROOT / f).read_text(encoding="utf-8", errors="ignore"))
    ]
    assert found == []

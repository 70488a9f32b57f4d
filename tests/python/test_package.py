"""What people install: metadata, files, the message where torch or a compiler is missing, and the
files that the usual public host reads."""

import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from helpers import run_python

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def is_editable():
    files = importlib.metadata.distribution("koila").files or []
    return any("editable" in str(f) for f in files)


@pytest.mark.skipif(is_editable(), reason="an editable installation has none of a wheel's files")
def test_the_installed_wheel_has_its_files_its_metadata_and_its_command():
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    p = subprocess.run(
        [sys.executable, ROOT / "tools/check_installed.py", "--torch", "yes"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PATH": path},
    )
    assert p.returncode == 0, p.stdout + p.stderr


def test_versions_and_pythons_are_the_same_wherever_they_are_written():
    said = (ROOT / "meson.build").read_text(encoding="utf-8")
    version = re.search(r"version: '([0-9.]+)'", said)[1]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f'"koila {version}"' in (ROOT / "docs/koila.1").read_text(encoding="utf-8")
    assert importlib.metadata.version("koila") == version
    wheels = PROJECT["tool"]["cibuildwheel"]["build"].split()
    classifiers = [c.split(" :: ") for c in PROJECT["project"]["classifiers"]]
    pythons = [c[2] for c in classifiers if c[:2] == ["Programming Language", "Python"]]
    assert [f"cp{v.replace('.', '')}-*" for v in pythons if re.match(r"3\.\d", v)] == wheels
    assert f">={pythons[2]}" == PROJECT["project"]["requires-python"]


@pytest.mark.parametrize(
    "torch, said",
    [
        ("raise ImportError('planted')", "and there is none: pip install torch"),
        ("__version__ = '2.6.0'", "this is 2.6.0: pip install -U torch"),
    ],
)
def test_a_torch_that_is_missing_or_too_old_is_refused_by_name(torch, said, tmp_path):
    (tmp_path / "torch.py").write_text(torch, encoding="utf-8")
    p = run_python("import koila", check=False, env={"PYTHONPATH": str(tmp_path)})
    last = p.stderr.splitlines()[-1]
    assert p.returncode == 1 and last.startswith("ImportError: koila needs PyTorch 2.10 or newer")
    assert last.endswith(said)


@pytest.mark.skipif(not shutil.which("meson"), reason="there is no meson")
def test_without_a_compiler_the_build_says_what_to_install(tmp_path):
    p = subprocess.run(
        ["meson", "setup", tmp_path / "build", "-Dpython=true", "-Dclib=false"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "CC": str(tmp_path / "none")},
    )
    assert p.returncode and "there is no C compiler. Install one (apt install gcc" in p.stdout


def schema_errors(kind, *files):
    """What check-jsonschema finds in these files, by the schema of their reader; "" if nothing."""
    p = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{kind}", *files],
        capture_output=True,
        text=True,
        timeout=300,
    )
    return p.stdout if p.returncode else ""


@pytest.mark.parametrize(
    "kind, pattern, key",
    [
        ("github-workflows", ".github/workflows/*.yml", "runs-on:"),
        ("github-issue-forms", ".github/ISSUE_TEMPLATE/*-*.yml", "description:"),
        ("github-issue-config", ".github/ISSUE_TEMPLATE/config.yml", "blank_issues_enabled: true"),
        ("citation-file-format", "CITATION.cff", "cff-version:"),
    ],
)
def test_files_for_other_programs_keep_their_schema(kind, pattern, key, tmp_path):
    pytest.importorskip("check_jsonschema")
    files = sorted(ROOT.glob(pattern))
    assert files and schema_errors(kind, *files) == ""
    planted = tmp_path / files[0].name
    text = files[0].read_text(encoding="utf-8")
    planted.write_text(text.replace(key, f"{key[:4]}-{key[4:]}"), encoding="utf-8")
    assert text.count(key) and schema_errors(kind, planted)


def targets_of(text):
    """The targets of the Makefile that a workflow makes."""
    return set(re.findall(r"run: make ([a-z-]+)", text))


def test_workflows_make_what_the_makefile_has():
    made = set()
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        made |= targets_of(path.read_text(encoding="utf-8"))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    has = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    assert {"test", "test-gpu", "text"} <= made and made - has <= {"docs"}

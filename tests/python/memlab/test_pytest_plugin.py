"""The marker and the fixture, in a pytest of their own, which finds the plugin as in an environment
where koila is installed."""

import os
import pathlib
import re
import subprocess
import sys
import textwrap

import pytest
from koila_pytest import size_of

ROOT = pathlib.Path(__file__).parents[3]

# Run before pytest starts, as if these were not installed. `sys.modules[name] = None` would say the
# same to an import, but pytest itself reads sys.modules for each package that a plugin installs.
ABSENT = """
class Absent:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == {!r}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
sys.meta_path.insert(0, Absent)
"""
NO_TORCH, NO_KOILA = ABSENT.format("torch"), ABSENT.format("koila")


def installed(folder):
    """Writes what installing koila tells other programs into `folder`: its entry points."""
    metadata = folder / "koila-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: koila\nVersion: 0\n")
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    entry = re.search(r'\[project\.entry-points\.pytest11\]\n(\w+) = "([\w.]+)"', text)
    (metadata / "entry_points.txt").write_text(f"[pytest11]\n{entry[1]} = {entry[2]}\n")
    return folder


def run_pytest(tmp_path, tests, *options, before="pass"):
    """The output of pytest over these tests, in which koila counts as installed."""
    folder = tmp_path / "tests"
    folder.mkdir(parents=True)
    (folder / "test_it.py").write_text(textwrap.dedent(tests))
    path = [str(installed(tmp_path / "site")), *sys.path]
    program = f"import sys\n{before}\nimport pytest\nsys.exit(pytest.main(sys.argv[1:]))"
    options = ["-q", "-p", "no:cacheprovider", *options, str(folder)]
    done = subprocess.run(
        [sys.executable, "-c", program, *options],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in path if p)},
    )
    return done.stdout + done.stderr


def test_marker_fails_what_needs_more_and_the_fixture_measures(tmp_path):
    told = run_pytest(
        tmp_path,
        """
        import pytest, torch
        @pytest.mark.limit_tensor_memory("4KiB", device="cpu")
        def test_fits(): torch.zeros(1024)
        @pytest.mark.limit_tensor_memory("4KiB", device="cpu")
        def test_too_much(): torch.zeros(1025)
        @pytest.mark.limit_tensor_memory(1, device="cpu")
        def test_own_failure():
            torch.zeros(9)
            assert False, "mine"
        def test_fixture(memlab):
            with memlab.measure("cpu") as m: torch.zeros(10)
            assert m.alloc == 40
        """,
        "--strict-markers",
    )
    assert "2 failed, 2 passed" in told, told
    assert "needed 4.00K of tensor memory (4100 bytes), limit 4.00K (4096 bytes)" in told
    assert "mine" in told


PLAIN = """
    import sys
    def test_plain():
        loaded = [m for m in sys.modules if m.partition(".")[0] in ("koila", "torch")]
        assert not loaded and "koila_pytest" in sys.modules
"""


@pytest.mark.parametrize(
    "before", ["pass", NO_TORCH, NO_KOILA], ids=["as it is", "without torch", "without koila"]
)
def test_tests_that_do_not_ask_for_it_import_neither_torch_nor_koila(tmp_path, before):
    told = run_pytest(tmp_path, PLAIN, before=before)
    assert "1 passed" in told, told


def test_without_torch_the_test_that_asks_fails_and_says_why(tmp_path):
    told = run_pytest(
        tmp_path,
        """
        import pytest
        @pytest.mark.limit_tensor_memory("4KiB")
        def test_marked(): pass
        def test_fixture(memlab): pass
        def test_plain(): pass
        """,
        before=NO_TORCH,
    )
    assert "1 failed, 1 passed, 1 error" in told and "torch" in told, told


def test_pytest_tells_of_the_marker_and_the_fixture(tmp_path):
    told = run_pytest(tmp_path, "", "--markers", before=NO_TORCH)
    assert "@pytest.mark.limit_tensor_memory(limit, device=None): fail if" in told, told
    told = run_pytest(tmp_path / "again", "", "--fixtures", before=NO_TORCH)
    assert "memlab" in told and "koila_pytest.py" in told, told


def test_sizes():
    assert [size_of(s) for s in (7, "24MiB", "1.5 KB", "2G")] == [7, 24 << 20, 1500, 2 * 10**9]
    with pytest.raises(ValueError, match="24MiB"):
        size_of("a lot")

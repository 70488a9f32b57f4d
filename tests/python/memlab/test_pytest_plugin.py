"""The marker and the fixture, in a pytest of their own."""

import subprocess
import sys
import textwrap
from importlib.metadata import entry_points

import pytest

from koila.memlab.pytest_plugin import size_of


def test_marker_fails_what_needs_more_and_the_fixture_measures(tmp_path):
    (tmp_path / "test_it.py").write_text(
        textwrap.dedent("""
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
    """)
    )
    # pytest finds it by itself where koila is installed as a wheel, and not after `meson install`
    name = "koila.memlab.pytest_plugin"
    ask = [] if any(e.value == name for e in entry_points(group="pytest11")) else ["-p", name]
    p = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *ask, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "2 failed, 2 passed" in p.stdout, p.stdout + p.stderr
    assert (
        "needed 4.00K of tensor memory (4100 bytes), limit 4.00K (4096 bytes)" in p.stdout
        and "mine" in p.stdout
    )


def test_sizes():
    assert [size_of(s) for s in (7, "24MiB", "1.5 KB", "2G")] == [7, 24 << 20, 1500, 2 * 10**9]
    with pytest.raises(ValueError, match="24MiB"):
        size_of("a lot")

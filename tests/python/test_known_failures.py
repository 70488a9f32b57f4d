"""The list of known failures on the simulated device (tests/fakecuda): what it leaves out, and that
every line of it names a test and a cause."""

import pathlib
import re
import types

import conftest
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIST = ROOT / "tests/fakecuda/known_failures.txt"


@pytest.mark.parametrize(
    "only, kept", [(False, ["t.py::b[2]", "t.py::c"]), (True, ["t.py::a[1]", "t.py::b[1]"])]
)
def test_a_list_leaves_out_its_tests_and_no_others(tmp_path, only, kept):
    file = tmp_path / "list.txt"
    file.write_text("# t.py::c\n\nt.py::a  # each case\nt.py::b[1]  # one case\n")
    options = {"--known-failures": str(file), "--only-known-failures": only}
    hook = types.SimpleNamespace(pytest_deselected=lambda items: None)
    config = types.SimpleNamespace(getoption=options.get, hook=hook)
    items = [
        types.SimpleNamespace(nodeid=n)
        for n in ("t.py::a[1]", "t.py::b[1]", "t.py::b[2]", "t.py::c")
    ]
    conftest.leave_known_failures_out(config, items)
    assert [item.nodeid for item in items] == kept


def test_every_known_failure_names_a_test_and_a_cause():
    text = LIST.read_text(encoding="utf-8")
    causes = set(re.findall(r"^#   (\w+)  ", text, re.M))
    for line in text.splitlines():
        if line and not line.startswith("#"):
            test, cause = line.split("  # ")
            file, name = test.split("[")[0].split("::")
            assert re.search(rf"^def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.M), (
                line
            )
            assert cause in causes, line
    assert causes == set(re.findall(r"  # (\w+)$", text, re.M)), "a cause without a failure"

"""%mlrun in a real shell, in process."""

import pytest
import torch

IPython = pytest.importorskip("IPython")
from IPython.core.error import UsageError  # noqa: E402
from IPython.core.interactiveshell import InteractiveShell  # noqa: E402

from koila.memlab.line_profiler.extension import parse_options  # noqa: E402


@pytest.fixture
def shell():
    s = InteractiveShell.instance()
    s.user_ns.update(torch=torch)
    s.run_line_magic("load_ext", "koila.memlab")
    yield s
    s.run_line_magic("unload_ext", "koila.memlab")
    InteractiveShell.clear_instance()


def test_cell_is_profiled_line_by_line(shell):
    d = shell.run_cell_magic("mlrun", "", "a = torch.empty(1000, dtype=torch.uint8)\nb = [1, 2]\n")
    text = str(d)
    assert text.startswith("## <cell>") and "a = torch.empty" in text and "b = [1, 2]" in text
    assert shell.user_ns["a"].numel() == 1000 and shell.user_ns["b"] == [1, 2]


def test_statement_with_spaces_and_options_is_verbatim(shell):
    shell.run_cell("def g(n, k=0):\n    return torch.empty(n)")
    d = shell.run_line_magic("mlrun", "-f g y = g(1, k=-1)")
    assert "## g" in str(d) and shell.user_ns["y"].numel() == 1


def test_function_defined_in_the_cell(shell):
    d = shell.run_cell_magic(
        "mlrun", "-f f -c hits -D", "def f():\n    x = torch.empty(10)\n    return x\nf()\nf()\n"
    )
    lines = str(d).splitlines()
    assert lines[0] == "## f" and [line.split()[0] for line in lines[5:]] == ["2", "2", "2"]


def test_options(shell, tmp_path, capsys):
    shell.run_cell("def f():\n    return torch.empty(10)")
    p = shell.run_line_magic("mlrun", "-r -q -f f f()")
    assert type(p).__name__ == "LineProfiler" and capsys.readouterr().out == ""
    assert shell.run_line_magic("mlrun", "-q -f f f()") is None
    file = tmp_path / "out.txt"
    d = shell.run_line_magic("mlrun", f"-D -c rise -c hits -T {file} -f f f()")
    assert file.read_text() == str(d) and "rise hits" in file.read_text()
    page = tmp_path / "out.html"
    shell.run_line_magic(
        "mlrun", f"-q --dump-profile={page} --function=f --no-default-columns -c alloc f()"
    )
    assert "<table" in page.read_text() and "alloc" in page.read_text()
    shell.run_line_magic("mlrun", "-q -g cpu -f f f()")
    shell.run_line_magic("mlrun", "-qDffoo".replace("foo", " f f()"))


def test_functions_are_expressions_and_may_be_several(shell):
    shell.run_cell(
        "class A:\n    def m(self):\n        return torch.empty(3)\n\ndef f():\n    return "
        "A().m()\n\nfs = [f]"
    )
    d = shell.run_line_magic("mlrun", "-f A.m -f fs[0] f()")
    assert str(d).count("## ") == 2 and "## A.m" in str(d) and "## f" in str(d)
    d = shell.run_cell_magic(
        "mlrun",
        "--function=late.n -f f",
        "class late:\n    n = staticmethod(lambda: torch.empty(5))\nlate.n(); f()\n",
    )
    assert "<lambda>" in str(d) and "## f" in str(d)


@pytest.mark.parametrize(
    "suffix, begins", [(".json", "["), (".csv", "function"), (".txt", "## f"), (".log", "## f")]
)
def test_dumps_by_suffix(shell, tmp_path, suffix, begins):
    shell.run_cell("def f():\n    return torch.empty(10)")
    file = tmp_path / f"table{suffix}"
    shell.run_line_magic("mlrun", f"-q -T {file} -D -c rise --no_default_columns -f f f()")
    text = file.read_text()
    assert (
        text.startswith(begins)
        and "rise" in text
        and "active_bytes" not in text.split("code")[0].replace('"active_bytes', "")
    )


@pytest.mark.parametrize("gpu", ["-g 0", "-g cpu", "--gpu=cpu", "-gcpu"])
def test_the_device_shown(shell, gpu):
    shell.run_cell("def f():\n    return torch.empty(10)")
    assert "## f" in str(shell.run_line_magic("mlrun", f"{gpu} -f f f()"))


@pytest.mark.parametrize(
    "line",
    ["-c nope -f f f()", "-f", "--what f()", "-f undefined_name 1", "-f 3 1", "-g what -f f f()"],
)
def test_mistakes_are_usage_errors(shell, line):
    shell.run_cell("def f():\n    return 1")
    with pytest.raises(UsageError):
        shell.run_line_magic("mlrun", line)


def test_errors_of_the_cell_are_shown_and_the_dump_is_written(shell, tmp_path):
    file = tmp_path / "d.txt"
    with pytest.raises(ZeroDivisionError):
        shell.run_cell_magic("mlrun", f"-T {file}", "a = torch.empty(5)\n1 / 0\n")
    assert "1 / 0" in file.read_text() and "a" in shell.user_ns
    with pytest.raises(SyntaxError):
        shell.run_cell_magic("mlrun", "", "a b c\n")


def test_parse_options():
    assert parse_options("-f g y = g(1, k=-1)") == (
        {"f": ["g"], "c": [], "g": 0, "T": None, "D": False, "r": False, "q": False},
        "y = g(1, k=-1)",
    )
    assert parse_options("-1 + 2")[1] == "-1 + 2"
    assert parse_options("-f 'a.b' -- -x")[0]["f"] == ["a.b"] and parse_options("-- -x")[1] == "-x"


def test_help_explains(shell):
    assert "--return-profiler" in shell.find_line_magic("mlrun").__doc__


def test_magic_inside_ipython_prints_one_line_for_usage(shell, capsys):
    shell.run_cell("%mlrun -c nope 1")
    out = capsys.readouterr()
    assert "Traceback" not in out.out + out.err and "three dot-separated parts" in out.out + out.err

"""`koila` and `python -m koila`: one command, with `run` beside what is written in C."""

import os
import pathlib
import re
import subprocess
import sys
import textwrap

import pytest
import torch
from torch.utils.data import DataLoader

from koila import _launch

FOLDER = pathlib.Path(__file__).parent
# The batch takes 1 MiB, and so do the results of each of the 24 layers.
TRAIN = """
    import sys, torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 4096), torch.randn(64))
    middle = [torch.nn.Tanh() for _ in range(24)]
    model = torch.nn.Sequential(torch.nn.LayerNorm(4096), *middle, torch.nn.Linear(4096, 1))
    for x, y in DataLoader(data, batch_size=64):
        loss = (model(x).squeeze(1) - y).square().mean()
        loss.backward()
    print(type(x).__name__, sys.argv[1:], f"{model[-1].weight.grad.double().norm():.5f}")
"""


def koila(*args, folder, command=("-m", "koila"), **environment):
    return subprocess.run(
        [sys.executable, *command, *map(str, args)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


@pytest.fixture
def script(tmp_path):
    def write(text, name="train.py"):
        (tmp_path / name).write_text(textwrap.dedent(text), encoding="utf-8")
        return tmp_path

    return write


def test_a_script_that_was_not_changed_trains_where_plain_pytorch_does_not_fit(script):
    folder = script(TRAIN)
    plain = koila("run", "train.py", "--own", "3", folder=folder)
    assert plain.returncode == 0, plain.stderr
    kind, rest = plain.stdout.split(" ", 1)
    assert kind == "Tensor" and rest.startswith("['--own', '3'] ")
    small = koila("run", "--budget", "16MiB", "train.py", folder=folder)
    assert small.returncode == 1 and "can't allocate memory" in small.stderr
    options = ["--budget=16MiB", "--lazy", "--page", "step.html"]
    lazy = koila("run", *options, "train.py", "--own", "3", folder=folder)
    assert lazy.returncode == 0, lazy.stderr
    assert lazy.stdout == f"LazyTensor {rest}"
    assert "<html" in (folder / "step.html").read_text(encoding="utf-8")


def test_the_rows_the_log_and_the_environment_of_a_script(script):
    folder = script(
        """
        import os, koila
        print(koila._core.configure()["micro_batch"], os.environ["KOILA_LOG"])
        print(*(os.environ[n] for n in ("KOILA_BUDGET", "KOILA_MICRO_BATCH")), __name__, __file__)
        raise SystemExit(7)
        """
    )
    options = ["--micro-batch=4", "--log", "--budget", "1GiB"]
    p = koila("run", *options, "train.py", folder=folder)
    assert p.returncode == 7, p.stderr
    assert p.stdout.split() == ["4", "INFO", "1GiB", "4", "__main__", "train.py"]


def test_the_page_is_written_when_the_script_fails_and_its_lack_is_told(script):
    folder = script(
        """
        import torch, koila
        w = torch.ones(2, requires_grad=True)
        (koila.lazy(torch.ones(8, 2)) * w).sum().backward()
        raise KeyError("mine")
        """
    )
    p = koila("run", "--page", "step.html", "train.py", folder=folder)
    assert p.returncode == 1 and p.stderr.endswith("KeyError: 'mine'\n")
    assert (folder / "step.html").exists()
    script("print(1)", "plain.py")
    p = koila("run", "--page", "none.html", "plain.py", folder=folder)
    assert p.returncode == 0 and "none.html was not written" in p.stderr and "--lazy" in p.stderr
    p = koila("run", "--lazy", "--page", "none.html", "plain.py", folder=folder)
    assert "call lazy(...) there" in p.stderr and "--lazy" not in p.stderr


def test_a_module_runs_with_its_own_options(script):
    folder = script("import sys; print(sys.argv[1:], __spec__.name)", "mod.py")
    p = koila("run", "-m", "mod", "--budget", "x", folder=folder, PYTHONPATH=str(folder))
    assert p.stdout == "['--budget', 'x'] mod\n", p.stderr


@pytest.mark.parametrize(
    "args, said",
    [
        (["--budgt", "2GiB", "train.py"], "no option --budgt. Did you mean '--budget'?"),
        (["--budget"], "argument --budget: expected one argument"),
        ([], "expected a script, or -m and a module"),
        (["-m"], "expected a script, or -m and a module"),
        (["-m", "nosuchmodule"], "no module named nosuchmodule"),
        (["none.py"], "No such file or directory: 'none.py'"),
        (["--budget", "2Gb", "train.py"], "--budget 2Gb: expected a size"),
        (["--micro-batch=fastset", "x.py"], "Did you mean 'fastest'?"),
        (["--page", "step.pdf", "train.py"], "expected a name that ends in .html"),
    ],
)
def test_a_bad_use_of_run_is_2_and_says_what_was_expected(args, said, script, capsys, monkeypatch):
    monkeypatch.chdir(script("print('ran')"))
    for name in ("KOILA_BUDGET", "KOILA_MICRO_BATCH", "KOILA_LOG"):
        monkeypatch.setenv(name, "")  # run sets them
    try:
        code = _launch.main(args)
    except SystemExit as leaving:
        code = leaving.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "") and err.startswith("koila: run: ") and said in err


def test_run_without_torch_or_with_a_bad_variable_is_one_line_and_2(tmp_path):
    command = ("-c", "import koila_command, sys; sys.exit(koila_command.main())")
    p = koila("run", "x.py", folder=tmp_path, command=command, KOILA="off")
    assert (p.returncode, len(p.stderr.splitlines())) == (2, 1) and 'expected "0"' in p.stderr
    (tmp_path / "torch.py").write_text("raise ImportError", encoding="utf-8")
    p = koila("run", "x.py", folder=tmp_path, command=command, PYTHONPATH=str(tmp_path))
    assert (p.returncode, len(p.stderr.splitlines())) == (2, 1) and "pip install torch" in p.stderr


def test_a_script_with_an_error_of_syntax_fails_as_in_python(script):
    p = koila("run", "train.py", folder=script("x = = 1"))
    assert p.returncode == 1 and p.stderr.endswith("SyntaxError: invalid syntax\n")


def test_a_batch_that_cannot_be_lazy_stays_plain_with_one_warning():
    words = DataLoader(["a", "b", "c"], batch_size=1)
    numbers = DataLoader(torch.ones(6, 2), batch_size=3)
    plain = DataLoader.__iter__
    with _launch.lazy_loaders(), pytest.warns(UserWarning, match="stays plain") as told:
        assert [list(batch) for batch in words] == [["a"], ["b"], ["c"]]
        assert [type(x).__name__ for x in numbers] == ["LazyTensor"] * 2
        batches = iter(numbers)
        assert len(batches) == 2 and next(batches).shape == (3, 2) and batches._num_yielded == 1
    assert len(told) == 1 and DataLoader.__iter__ is plain


def test_the_c_program_and_the_parser_name_the_same_options():
    said = koila("help", "run", folder=FOLDER).stdout
    options = {name for action in _launch.parser()._actions for name in action.option_strings}
    assert set(re.findall(r"--[a-z][a-z-]*", said)) == options
    assert said == koila("run", "--help", folder=FOLDER).stdout


def test_what_is_written_in_c_keeps_its_exit_codes_and_needs_no_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')", encoding="utf-8")
    command = ("-c", "import koila_command, sys; sys.exit(koila_command.main())")
    for args, code in ((["--version"], 0), (["simulate", "none.pickle"], 2), (["plam"], 2)):
        p = koila(*args, folder=tmp_path, command=command, PYTHONPATH=str(tmp_path))
        assert p.returncode == code and "torch was imported" not in p.stderr
    assert "Did you mean plan?" in p.stderr

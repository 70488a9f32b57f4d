"""python -m koila.memlab"""

import json
import subprocess
import sys
import textwrap

from memlab_helpers import cli

SCRIPT = textwrap.dedent("""
    import sys, torch
    class Net:
        def forward(self):
            return torch.zeros(1000)
    def train(n):
        x = Net().forward()
        return [torch.zeros(n), x]
    if __name__ == "__main__":
        print(sys.argv[1:], len(train(10)))
        sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
""")


def test_run_reports_on_stderr_and_keeps_the_exit_code(tmp_path):
    (tmp_path / "s.py").write_text(SCRIPT)
    p = cli(
        "run", "-g", "cpu", "-f", "train", "-c", "alloc", "s.py", "3", "--x", code=3, cwd=tmp_path
    )
    assert (
        p.stdout == "['3', '--x'] 2\n"
        and "## train" in p.stderr
        and "Net.forward" not in p.stderr
        and "3.91K" in p.stderr
    )
    p = cli("run", "s.py", cwd=tmp_path)
    assert "## Net.forward" in p.stderr and "## train" in p.stderr
    assert (
        "it has Net.forward, train" in cli("run", "-f", "nope", "s.py", cwd=tmp_path, code=2).stderr
    )


def test_run_of_a_module_and_of_an_imported_function(tmp_path):
    (tmp_path / "mod.py").write_text(SCRIPT)
    p = cli("run", "-f", "mod:Net.forward", "-m", "mod", "0", cwd=tmp_path)
    assert p.stdout == "['0'] 2\n"
    (tmp_path / "use.py").write_text("import mod\nmod.train(5)\n")
    assert "## Net.forward" in cli("run", "-f", "mod:Net.forward", "use.py", cwd=tmp_path).stderr


def test_a_function_of_the_script_itself_is_the_one_that_runs(tmp_path):
    """It was imported, which ran the script once more, to its sys.exit(), and nothing was
    reported."""
    (tmp_path / "s.py").write_text(
        "import sys, torch\ndef f():\n    return "
        "torch.zeros(1000)\nf()\nprint('ran')\nsys.exit(4)\n"
    )
    for name in ("s:f", "__main__:f"):
        p = cli("run", "-g", "cpu", "-f", name, "-o", "t.txt", "s.py", cwd=tmp_path, code=4)
        assert p.stdout == "ran\n" and "3.91K" in (tmp_path / "t.txt").read_text() and not p.stderr
    for name, said in (("s:g", "it has f"), ("nowhere:f", "nowhere"), ("json:nope", "nope")):
        p = cli("run", "-f", name, "s.py", cwd=tmp_path, code=2)
        assert said in p.stderr and "Traceback" not in p.stderr and not p.stdout
    (tmp_path / "other.py").write_text("pass\n")
    assert "exit code 4" in cli("run", "-f", "s:f", "other.py", cwd=tmp_path, code=2).stderr
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text(
        "import torch\ndef g():\n    return torch.zeros(1000)\n"
    )
    (tmp_path / "pack" / "__main__.py").write_text("import pack\npack.g()\n")
    assert "3.91K" in cli("run", "-g", "cpu", "-f", "pack:g", "-m", "pack", cwd=tmp_path).stderr


def test_failing_scripts_show_their_own_traceback(tmp_path):
    (tmp_path / "s.py").write_text("def f():\n    raise ValueError('mine')\nf()\n")
    p = cli("run", "s.py", cwd=tmp_path, code=1)
    assert "ValueError: mine" in p.stderr and "__main__.py" not in p.stderr and "## f" in p.stderr
    cli("run", "missing.py", cwd=tmp_path, code=2)
    assert "suffix" in cli("run", "-o", "x.foo", "s.py", cwd=tmp_path, code=2).stderr


def test_saved_tables_are_viewed_and_snapshots_compared(tmp_path):
    (tmp_path / "s.py").write_text(SCRIPT + "\n    ")
    (tmp_path / "s.py").write_text(SCRIPT)
    cli("run", "-o", "t.json", "s.py", cwd=tmp_path)
    assert "train" in cli("view", "t.json", cwd=tmp_path).stdout
    data = json.loads((tmp_path / "t.json").read_text())
    data[0]["lines"][1]["active_bytes.all.peak"] += 1024
    (tmp_path / "u.json").write_text(json.dumps(data))
    assert f"{'total':<66s}{'1.00K':>12s}" in cli("diff", "t.json", "u.json", cwd=tmp_path).stdout
    cli("run", "-o", "t.html", "s.py", cwd=tmp_path)
    page = (tmp_path / "t.html").read_text()
    assert page.startswith("<!doctype html>") and "http" not in page
    (tmp_path / "snap.py").write_text(
        "import torch\nfrom koila import memlab\nm = torch.nn.Linear(9, "
        "9)\nmemlab.snapshot(m).save('a.json')\nx = "
        "torch.zeros(1000)\nmemlab.snapshot(m).save('b.json')\n"
    )
    subprocess.run([sys.executable, "snap.py"], cwd=tmp_path, check=True, timeout=60)
    assert json.loads((tmp_path / "a.json").read_text())["rows"]
    out = cli("diff", "a.json", "b.json", cwd=tmp_path).stdout
    assert "by name only" in out and "3.91K" in out
    assert "weight" in cli("view", "a.json", cwd=tmp_path).stdout
    for arguments, says in (
        (("diff", "a.json", "t.json"), "one of each"),
        (("view", "s.py"), "saved as .json"),
        (("view", "none.json"), "No such file"),
    ):
        bad = cli(*arguments, code=2, cwd=tmp_path)
        assert says in bad.stderr and "Traceback" not in bad.stderr


def test_top_shows_memory_while_it_runs(tmp_path):
    (tmp_path / "s.py").write_text("import torch, time\nx = torch.zeros(10000)\ntime.sleep(1)\n")
    assert "cpu 39.06K" in cli("top", "-i", "0.2", "s.py", cwd=tmp_path).stderr


def test_a_program_without_any_tensor_says_so():
    code = (
        "import torch; from koila.memlab import MemReporter as R; r = R(); "
        "r.print_stats(target_device='cuda'); print('##'); r.report(device='cuda'); r.report()"
    )
    p = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    before, after = p.stdout.split("##\n")
    assert (
        len(before.splitlines()) == 2
        and after.count("No tensors on cuda\n") == 1
        and after.count("Element type") == 2
    ), p

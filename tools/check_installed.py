"""Check an installed koila: python tools/check_installed.py [--torch yes|no]

Runs anywhere but in the source tree's python/ folder, with nothing but the standard library. Checks
the metadata, the files that a wheel must bring, the command, and `import koila`: with a torch that
is new enough a first step, without one the message that says what is missing. --torch: fail if
there is none, or if there is one.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig

# Each with what it is for. All but the last two lie beside the package.
FILES = {
    "koila/py.typed": "type checkers read the annotations",
    "koila/_core.pyi": "the extension's annotations",
    "koila/bin/koila": "the C program behind the command",
    "koila_command.py": "the command",
    "koila_pytest.py": "the pytest plugin",
    "licenses/LICENSE": "the licence",
    "share/man/man1/koila.1": "the manual page",
}
STEP = """
import torch, koila
w = torch.ones(3, requires_grad=True, dtype=torch.float64)
x = torch.arange(24, dtype=torch.float64).reshape(8, 3)
with koila.micro_batch(3):
    (koila.lazy(x) * w).square().sum().backward()
assert torch.equal(w.grad, (2 * x * x).sum(0)), w.grad
assert koila.last_plan().n_micro_batches == 3, koila.last_plan()
print("one step in three slices, its gradient as by hand; torch", torch.__version__)
"""


def said(*command: str) -> tuple[int, str]:
    """The exit code, and all that the command wrote."""
    p = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return p.returncode, p.stdout + p.stderr


def expect(is_so: bool, text: str) -> None:
    if not is_so:
        sys.exit(f"check_installed: {text}")
    print(f"  {text}")


def check_files() -> None:
    distribution = importlib.metadata.distribution("koila")
    files = [str(f) for f in distribution.files or []]
    for name, purpose in FILES.items():
        expect(any(f.endswith(name) for f in files), f"{name}: {purpose}")
    told = distribution.metadata
    for field in ("Summary", "Author", "Keywords", "Requires-Python", "License-Expression"):
        expect(bool(told[field]), f"{field}: {told[field]}")
    expect(len(told.get_all("Classifier", [])) > 10, "classifiers")
    expect(told["Description-Content-Type"] == "text/markdown", "README is the long description")


def check_command() -> None:
    version = importlib.metadata.version("koila")
    path = shutil.which("koila", path=sysconfig.get_path("scripts")) or shutil.which("koila")
    expect(path is not None, f"the command is {path}")
    assert path is not None
    expect(said(path, "--version") == (0, f"koila {version}\n"), "koila --version is the package's")
    code, text = said(path, "plan", "--list-gpus")
    expect(code == 0 and "h100-80gb" in text, "koila plan --list-gpus names GPUs")
    code, text = said(path, "plam")
    expect(code == 2 and "Did you mean plan?" in text, "koila plam is answered with plan")


def check_import(wanted: str | None) -> None:
    code, text = said(sys.executable, "-c", "import koila")
    has_torch = said(sys.executable, "-c", "import torch")[0] == 0
    if wanted is not None:
        expect(has_torch == (wanted == "yes"), f"torch is here: {wanted}")
    if code == 0:
        code, text = said(sys.executable, "-c", STEP)
        expect(code == 0, text.strip())
    else:
        last = text.strip().splitlines()[-1]
        expect(last.startswith("ImportError: koila needs PyTorch"), last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", choices=("yes", "no"))
    options = parser.parse_args()
    print(f"koila {importlib.metadata.version('koila')} in Python {sys.version.split()[0]}")
    os.chdir("/")
    check_files()
    check_command()
    check_import(options.torch)


if __name__ == "__main__":
    main()

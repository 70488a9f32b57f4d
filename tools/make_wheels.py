"""Build koila's distributions and check them: make wheels

The source distribution is made of the last commit. Of it a wheel is built with each CPython from
3.10 on that is found here (PATH, pyenv), in the environment that a user's pip would make.
auditwheel says on which systems it runs and names it so, twine checks what an index would show, and
tools/check_installed.py runs it in a new environment without torch. Where --torch-python is of the
same version, also beside that one's torch.

Wheels for other machines and older systems are made by cibuildwheel (pyproject.toml).
"""

from __future__ import annotations

import argparse
import glob
import os
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VERSIONS = [(3, minor) for minor in range(10, 15)]
_TELL = """
import sys, sysconfig
print(*sys.version_info[:2], bool(sysconfig.get_config_var("Py_GIL_DISABLED")))
"""


def run(*command: str, **environment: str) -> str:
    """What the command wrote to standard output. Ends this program where it fails."""
    p = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, cwd=ROOT
    )
    if p.returncode:
        sys.exit(f"make_wheels: {' '.join(command)} failed\n{p.stdout}{p.stderr}")
    return p.stdout


def version_of(python: str) -> tuple[int, int] | None:
    """(3, 12), or None where this is no CPython to build for."""
    p = subprocess.run([python, "-c", _TELL], capture_output=True, text=True)
    told = p.stdout.split()
    if p.returncode or len(told) != 3 or told[2] == "True":
        return None
    return int(told[0]), int(told[1])


def pythons() -> dict[tuple[int, int], str]:
    """{version: program} of all that are here, one of each version."""
    pyenv = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    found: dict[tuple[int, int], str] = {}
    for major, minor in VERSIONS:
        name = f"python{major}.{minor}"
        here = sorted(glob.glob(f"{pyenv}/versions/{major}.{minor}.*/bin/{name}"))
        for program in [*here, shutil.which(name)]:
            if program and (major, minor) not in found and version_of(program) == (major, minor):
                found[major, minor] = program
    return found


def source_distribution(out: str) -> str:
    run(sys.executable, "-m", "build", "--sdist", "--outdir", out, ".")
    (path,) = glob.glob(f"{out}/koila-*.tar.gz")
    return path


def wheel_of(source: str, python: str, out: str) -> str:
    """The wheel that this Python's pip builds of the source, with its system in its name."""
    with tempfile.TemporaryDirectory() as raw:
        run(python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", raw, source)
        (built,) = glob.glob(f"{raw}/*.whl")
        print(*[line for line in run("auditwheel", "show", built).splitlines() if line], sep="\n  ")
        before = set(os.listdir(out))
        run("auditwheel", "repair", "--wheel-dir", out, built)
        (name,) = set(os.listdir(out)) - before
    return os.path.join(out, name)


def check(wheel: str, python: str, torch_python: str | None) -> None:
    """In a new environment, and beside the torch of `torch_python`."""
    tool = os.path.join(ROOT, "tools", "check_installed.py")
    with tempfile.TemporaryDirectory() as folder:
        run(python, "-m", "venv", folder)
        own = f"{folder}/bin/python"
        run(own, "-m", "pip", "install", "--quiet", "--no-deps", wheel)
        print(run(own, tool, "--torch", "no"), end="")
    if torch_python and version_of(torch_python) == version_of(python):
        with tempfile.TemporaryDirectory() as folder:
            run(torch_python, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, wheel)
            path = os.pathsep.join([f"{folder}/bin", os.environ["PATH"]])
            told = run(torch_python, tool, "--torch", "yes", PYTHONPATH=folder, PATH=path)
            print(told.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="dist", help="the folder; it is emptied first")
    parser.add_argument("--torch-python", help="a Python with torch, to run a step with")
    options = parser.parse_args()
    out = os.path.join(ROOT, options.out)
    shutil.rmtree(out, ignore_errors=True)
    os.makedirs(out)
    source = source_distribution(out)
    for version, python in pythons().items():
        began = time.monotonic()
        print(f"\n== CPython {version[0]}.{version[1]}: {python}", flush=True)
        wheel = wheel_of(source, python, out)
        check(wheel, python, options.torch_python)
        size = os.path.getsize(wheel) / 2**20
        print(f"{os.path.basename(wheel)}: {size:.1f} MiB, {time.monotonic() - began:.0f} s")
    print(f"\n{run('twine', 'check', '--strict', *sorted(glob.glob(f'{out}/*')))}", end="")
    missing = [f"{a}.{b}" for a, b in VERSIONS if (a, b) not in pythons()]
    print(f"not here, so not built for: {', '.join(missing) or 'none'}")


if __name__ == "__main__":
    main()

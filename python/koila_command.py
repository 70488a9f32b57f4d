"""The command `koila`, and `python -m koila`.

`koila run` is Python (koila/_launch.py). All else is the C program beside the package's modules,
which needs no torch. So this module lies outside the package, whose import imports torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NoReturn


def _become_the_c_program(argv: Sequence[str]) -> NoReturn:
    spec: Any = find_spec("koila")  # finds the package without running it
    program = os.fspath(spec.loader.get_resource_reader("koila").files() / "bin" / "koila")
    try:
        os.execv(program, ["koila", *argv])
    except OSError as error:
        sys.stderr.write(f"koila: {program}: {error.strerror}\n  Install koila anew.\n")
        sys.exit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, or with those of the process. Returns the exit code;
    the C program takes the place of this process instead."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] != ["run"] or argv[1:2] in (["-h"], ["--help"]):
        _become_the_c_program(argv)
    try:
        from koila import _launch
    except (ImportError, ValueError) as error:  # no torch, or a variable with a bad value
        sys.stderr.write(f"koila: run: {error}\n")
        return 2
    return _launch.main(argv[1:])


if __name__ == "__main__":
    sys.exit(main())

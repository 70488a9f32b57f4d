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
    spec = find_spec("koila")  # finds the package without running it
    loader: Any = spec and spec.loader
    program = os.fspath(loader.get_resource_reader("koila").files() / "koila")
    os.execv(program, ["koila", *argv])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, or with those of the process. Returns the exit code;
    the C program takes the place of this process instead."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] != ["run"] or argv[1:2] in (["-h"], ["--help"]):
        _become_the_c_program(argv)
    from koila import _launch

    return _launch.main(argv[1:])


if __name__ == "__main__":
    sys.exit(main())

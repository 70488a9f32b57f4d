"""Source files as they are told: which are a program's, and names of notebook cells: `In [3]`,
where Python knows a file such as /tmp/ipykernel_4711/1234.py."""

from __future__ import annotations

import functools
import os
import re
import sys
from typing import Any


def cell_of(filename: str) -> str | None:
    """`"In [3]"` for the source file of a notebook's or IPython's third cell; `None`: it is no
    cell."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    compiler = getattr(shell, "compile", None)
    if compiler is None or not hasattr(compiler, "format_code_name"):
        return None
    named = compiler.format_code_name(filename)  # ("Cell", "In[3]"), as IPython's own tracebacks
    return named[1].replace("[", " [", 1) if named and named[0] == "Cell" else None


_CELL_FILE = re.compile(r"[^\s\"'<>]*ipykernel_\d+[^\s\"'<>:]*\.py")


def cells_in(text: str) -> str:
    """`text` with the files of notebook cells in it replaced by the cells' numbers."""
    return _CELL_FILE.sub(lambda found: file_shown(found[0]), text)


def file_shown(filename: str) -> str:
    """The name under which a source file is shown: of a cell its number."""
    return cell_of(filename) or filename


@functools.cache
def library() -> tuple[str, ...]:
    """The folders of koila and of torch, with a slash at the end. Code there is not a program's,
    which may lie in a folder of the same name. Who asks has imported torch, if there is one."""
    files = [__file__, getattr(sys.modules.get("torch"), "__file__", None)]
    return tuple(os.path.dirname(os.path.abspath(f)) + os.sep for f in files if f)

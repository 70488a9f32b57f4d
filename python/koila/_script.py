"""A Python program that is run inside another one, as Python itself would run it."""

from __future__ import annotations

import io
import os
import sys
import traceback
import types
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any


def load(
    script: str | None, module: str | None, args: Sequence[str]
) -> tuple[types.CodeType, dict[str, Any]]:
    """(code, namespace) of a script, or of a module as after `python -m`. Sets sys.argv for it, and
    for a script the first entry of sys.path.

    Raises:
        ValueError: there is no such module, or neither is given. OSError: the script cannot be
        read. SyntaxError: it is no Python.
    """
    namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    if module:
        spec = find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(f"{module}.__main__")
        if spec is None or spec.loader is None:
            raise ValueError(f"no module named {module}")
        loader: Any = spec.loader
        code = loader.get_code(spec.name)
        namespace.update(__file__=spec.origin, __spec__=spec, __package__=spec.parent)
        sys.argv = [str(spec.origin), *args]
    else:
        if not script:
            raise ValueError("expected a script, or -m module")
        with io.open_code(script) as f:
            code = compile(f.read(), script, "exec", dont_inherit=True)
        namespace["__file__"] = script
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
        sys.argv = [script, *args]
    return code, namespace


def execute(code: types.CodeType, namespace: dict[str, Any]) -> int:
    """Run as __main__; the exit code. What the program raises is printed as Python would."""
    module = types.ModuleType("__main__")
    module.__dict__.update(namespace)
    sys.modules["__main__"] = module
    try:
        exec(code, module.__dict__)
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        sys.stderr.write(f"{leaving.code}\n")
        return 1
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0

"""IPython: `%load_ext koila.memlab` adds %mlrun and %%mlrun, and only then imports IPython."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any

from .. import utils
from .line_profiler import DEFAULT_COLUMNS, LineProfiler, RecordsDisplay, check_columns, codes_of

_HELP = """Run a statement or a cell under koila.memlab's line profiler.

%mlrun [options] statement      %%mlrun [options]

Options come first; the rest of the line, verbatim, is the statement.
  -f, --function FUNC        profile this function (an expression); repeatable. It may be defined
                             in the cell. Without -f the cell itself is profiled, as <cell>.
  -c, --column COL           add a column, as 'active_bytes.all.peak', 'rise', 'hits'; repeatable
  -D, --no-default-columns   drop the default columns (also --no_default_columns)
  -g, --gpu N                the device shown: an index (default 0), cpu, cuda:1
  -T, --dump-profile FILE    also write the table there; .html .json .csv by suffix, else text
  -r, --return-profiler      return the LineProfiler instead of the display
  -q, --quiet                show and return nothing (with -r: return only)
"""
_FLAGS = {
    "-D": "D",
    "--no_default_columns": "D",
    "--no-default-columns": "D",
    "-r": "r",
    "--return-profiler": "r",
    "-q": "q",
    "--quiet": "q",
}
_VALUED = {
    "-f": "f", "--function": "f", "-c": "c", "--column": "c", "-g": "g", "--gpu": "g",
    "-T": "T", "--dump-profile": "T",
}  # fmt: skip


def _usage(text: str) -> Exception:
    from IPython.core.error import UsageError

    return UsageError(f"%mlrun: {text}")


# Whole because each case removes a part of the line, and the next case continues with the rest.
def parse_options(line: str) -> tuple[dict[str, Any], str]:
    """({option: value}, the rest of the line, untouched)."""
    options: dict[str, Any] = {
        "f": [],
        "c": [],
        "g": 0,
        "T": None,
        "D": False,
        "r": False,
        "q": False,
    }
    rest = line
    while True:
        rest = rest.lstrip()
        word = rest.split(None, 1)[0] if rest else ""
        if not word.startswith("-") or word == "-" or word[1:2].isdigit():
            return options, rest
        rest = rest[len(word) :]
        if word == "--":
            return options, rest.lstrip()
        name, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
        if not word.startswith("--") and len(word) > 2:  # -fname, -Dr
            name, value = word[:2], word[2:]
            if name in _FLAGS:
                rest, value = f"-{value}{rest}", ""
            elif name in _VALUED:
                equals = "="
        if name in _FLAGS and not equals:
            options[_FLAGS[name]] = True
            continue
        if name not in _VALUED:
            if name.startswith("-") and not name.startswith("--") and not name[1:].isalpha():
                return options, word + rest
            raise _usage(f"unknown option {name}")
        if not equals:
            rest = rest.lstrip()
            value = _first_word(rest)
            rest = rest[len(value) :]
            value = value[1:-1] if value[:1] in {"'", '"'} else value
        if not value:
            raise _usage(f"option {name} needs a value")
        key = _VALUED[name]
        options[key] = [*options[key], value] if key in {"f", "c"} else value


def _first_word(rest: str) -> str:
    if rest[:1] in {"'", '"'}:
        end = rest.find(rest[0], 1)
        if end > 0:
            return rest[: end + 1]
    return rest.split(None, 1)[0] if rest else ""


def _functions(
    expressions: Iterable[str], namespace: dict[str, Any], profiler: LineProfiler
) -> list[str]:
    """Add the functions that exist by now; the others stay in the list."""
    left = []
    for text in expressions:
        try:
            value = eval(text, namespace)
        except (NameError, AttributeError):
            left.append(text)
            continue
        except Exception as error:
            raise _usage(f"-f {text}: {type(error).__name__}: {error}") from None
        if not codes_of(value):
            raise _usage(f"-f {text}: no code behind {type(value).__name__} object")
        profiler.add_function(value)
    return left


class _Cell:
    """The code of a cell, run statement by statement, so that functions it defines are found as
    soon as they exist."""

    def __init__(self, source: str, file: str) -> None:
        self.file = file
        self.tree: Any = compile(source, file, "exec", ast.PyCF_ONLY_AST, dont_inherit=False)

    def whole(self) -> CodeType:
        return compile(self.tree, self.file, "exec")

    def statements(self) -> Iterator[CodeType]:
        for node in self.tree.body:
            yield compile(ast.Module([node], []), self.file, "exec")


def run(shell: Any, line: str, cell: str | None = None) -> Any:
    """Run %mlrun or %%mlrun."""
    options, statement = parse_options(line)
    columns = (*(() if options["D"] else DEFAULT_COLUMNS), *options["c"])
    gpu = options["g"]
    try:
        check_columns(columns)
        profiler = LineProfiler(target_gpu=int(gpu) if str(gpu).isdigit() else gpu)
    except (TypeError, ValueError) as error:
        raise _usage(str(error)) from None
    source = statement if cell is None else (f"{statement}\n{cell}" if statement.strip() else cell)
    source = shell.transform_cell(source)
    if not source.endswith("\n"):
        source += "\n"
    namespace = shell.user_ns
    file = f"<mlrun-{id(profiler):x}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    left = _functions(options["f"], namespace, profiler)
    failed: BaseException | None = None
    try:
        code = _Cell(source, file)
        with profiler:
            if options["f"]:
                for part in code.statements():
                    exec(part, namespace)
                    left = _functions(left, namespace, profiler) if left else left
            else:
                whole = code.whole()
                whole = whole.replace(co_name="<cell>")
                profiler.add(
                    whole, "<cell>", file, 1, len(source.splitlines()), source.splitlines()
                )
                exec(whole, namespace)
    except BaseException as error:  # shown like any error of a cell; the table is still written
        failed = error
    profiler.disable()
    if left and failed is None:
        raise _usage(f"-f {left[0]}: not defined, and the cell does not define it")
    display = profiler.display(columns=columns)
    if options["T"]:
        try:
            utils.format_of(options["T"])
            display.save(options["T"])
        except ValueError:
            utils.write(options["T"], str(display))
    if failed is not None:
        raise failed
    if options["r"]:
        if not options["q"]:
            _show(display)
        return profiler
    return None if options["q"] else display


def _show(display: RecordsDisplay) -> None:
    from IPython.display import display as show

    show(display)


def load_ipython_extension(ipython: Any) -> None:
    """%load_ext koila.memlab

    >>> from IPython.core.interactiveshell import InteractiveShell
    >>> shell = InteractiveShell.instance()
    >>> load_ipython_extension(shell)
    >>> shell.find_line_magic("mlrun") is not None
    True
    """

    def mlrun(line: str, cell: str | None = None) -> Any:
        return run(ipython, line, cell)

    mlrun.__doc__ = _HELP
    ipython.register_magic_function(mlrun, "line_cell", "mlrun")


def unload_ipython_extension(ipython: Any) -> None:
    """%unload_ext koila.memlab

    >>> from IPython.core.interactiveshell import InteractiveShell
    >>> shell = InteractiveShell.instance()
    >>> load_ipython_extension(shell)
    >>> unload_ipython_extension(shell)
    >>> shell.find_line_magic("mlrun") is None
    True
    """
    for kind in ("line", "cell"):
        ipython.magics_manager.magics[kind].pop("mlrun", None)

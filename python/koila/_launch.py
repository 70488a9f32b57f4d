"""`koila run`: a training script as it is, under a budget that it does not know of. What the
options mean is said by `koila help run` (cli/cmd_help.c)."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, NoReturn

from torch.utils.data import DataLoader

from ._budget import from_environment
from ._errors import UnsupportedError
from ._lazy import lazy
from ._nearest import did_you_mean
from ._plan import last_plan
from ._script import execute, load

_FAILED, _BAD_USE = 1, 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit as the C program does after a bad use, with the option that was meant."""
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            known = [name for action in self._actions for name in action.option_strings]
            message = f"no option {unknown}{did_you_mean(unknown.split()[0], known)}"
        sys.stderr.write(f"koila: run: {message}\n  See koila help run.\n")
        sys.exit(_BAD_USE)


def parser() -> argparse.ArgumentParser:
    p = _Parser(prog="koila run", add_help=False, allow_abbrev=False)
    p.add_argument("--budget", metavar="SIZE")
    p.add_argument("--micro-batch", metavar="N")
    p.add_argument("--lazy", action="store_true")
    p.add_argument("--log", action="store_true")
    p.add_argument("--page", metavar="FILE")
    return p


def _split(argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """koila's own options; and the script, or -m and a module, with its own."""
    with_value = [a.option_strings[0] for a in parser()._actions if a.nargs is None]
    i = 0
    while i < len(argv) and argv[i] != "-m" and argv[i].startswith("-"):
        i += 2 if argv[i] in with_value else 1
    return argv[:i], argv[i:]


def _set(options: argparse.Namespace) -> None:
    """Through the environment, which other processes that the script starts inherit."""
    asked = {
        "KOILA_BUDGET": ("--budget", options.budget),
        "KOILA_MICRO_BATCH": ("--micro-batch", options.micro_batch),
        "KOILA_LOG": ("--log", "INFO" if options.log else None),
    }
    os.environ.update({name: text for name, (_, text) in asked.items() if text is not None})
    try:
        import_module("._engine", __package__)  # reads them all, unless it has started before
        from_environment()
    except ValueError as error:
        told = str(error)
        for name, (option, text) in asked.items():
            told = told.replace(f"{name}={text}:", f"{option} {text}:")
        raise ValueError(told) from None


class _LazyBatches:
    """An iterator of a DataLoader whose batches are lazy. Its attributes are the loader's own."""

    def __init__(self, batches: Any, told: set[str]) -> None:
        self._koila_batches = batches
        self._koila_told = told

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        batch = next(self._koila_batches)
        try:
            return lazy(batch)
        except (ValueError, UnsupportedError) as error:
            if str(error) not in self._koila_told:
                self._koila_told.add(str(error))
                warnings.warn(f"koila run --lazy: a batch stays plain, for {error}", stacklevel=2)
            return batch

    def __len__(self) -> int:
        return len(self._koila_batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._koila_batches, name)


@contextlib.contextmanager
def lazy_loaders() -> Iterator[None]:
    """Inside, every DataLoader yields lazy batches. A batch that cannot be lazy stays as it is,
    with a warning for each cause."""
    plain = DataLoader.__iter__
    told: set[str] = set()

    def batches(self: DataLoader[Any]) -> Any:
        return _LazyBatches(plain(self), told)

    DataLoader.__iter__ = batches  # type: ignore[method-assign]
    try:
        yield
    finally:
        DataLoader.__iter__ = plain  # type: ignore[method-assign]


def _save_page(path: str, are_lazy: bool) -> None:
    """The last plan's page, or why there is none; of several processes that torchrun started, the
    first one's. are_lazy: --lazy was said."""
    if os.environ.get("RANK", "0") != "0":
        return
    plan = last_plan()
    if plan is None:
        told = "no step was lazy. Make the batches lazy: --lazy, or lazy(...) in the script"
        if are_lazy:
            told = (
                "no batch of a DataLoader came to a backward. Where the script makes its batches "
                "itself, call lazy(...) there"
            )
        sys.stderr.write(f"koila: run: {path} was not written, for {told}\n")
        return
    try:
        plan.save(path)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"koila: run: --page {path}: {error}\n")


def main(argv: Sequence[str]) -> int:
    """`argv`: what follows `koila run`. The exit code: the script's own; 1, it raised; 2, it or an
    option cannot be taken."""
    own, program = _split(argv)
    options = parser().parse_args(own)
    is_module = program[:1] == ["-m"]
    name, rest = (program[1:2], program[2:]) if is_module else (program[:1], program[1:])
    try:
        if not name:
            raise ValueError("expected a script, or -m and a module")
        if options.page is not None and not options.page.endswith(".html"):
            raise ValueError(f"--page {options.page}: expected a name that ends in .html")
        _set(options)
        script, module = (None, name[0]) if is_module else (name[0], None)
        code, namespace = load(script, module, rest)
    except (OSError, ValueError, ImportError) as error:
        sys.stderr.write(f"koila: run: {error}\n  See koila help run.\n")
        return _BAD_USE
    except SyntaxError as error:
        traceback.print_exception(type(error), error, None)
        return _FAILED
    with lazy_loaders() if options.lazy else contextlib.nullcontext():
        status = execute(code, namespace)
    if options.page is not None:
        _save_page(options.page, options.lazy)
    return status

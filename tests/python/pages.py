"""Pages of Markdown as programs: their examples run, from the first to the last, in one namespace.

- A block ```` ```python ```` runs. A block ```` ```text ```` right below it is what it prints, as
  in doctest: `...` stands for anything.
- A comment `<!-- run` ... `-->` runs too, and no reader sees it: what the examples take for
  granted (a model, a batch).
- `<!-- needs: lightning -->`: without these packages the page's test is skipped.
- `<!-- slow -->`: the page runs with KOILA_LONG=1 only.

    python tests/python/pages.py PAGE.md     run one page
    python tests/python/pages.py --serve     run the pages and programs whose names come in, each in
                                             a process of its own: what one leaves is not another's
"""

from __future__ import annotations

import contextlib
import doctest
import io
import json
import linecache
import os
import pathlib
import re
import runpy
import sys
import tempfile
import traceback
from typing import NamedTuple

_BLOCK = re.compile(
    r"^```(?P<kind>\w*)\n(?P<code>.*?)^```$|^<!-- run\n(?P<hidden>.*?)^-->$",
    re.MULTILINE | re.DOTALL,
)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Block(NamedTuple):
    """A block of code: "python", "hidden", "text", "sh" or another kind; the number of its first
    line, from 1."""

    kind: str
    code: str
    line: int


class Wrong(AssertionError):
    """An example that prints something else than its page says."""


def blocks(text: str) -> list[Block]:
    found = []
    for m in _BLOCK.finditer(text):
        group = "hidden" if m["hidden"] is not None else "code"
        kind = "hidden" if group == "hidden" else m["kind"]
        found.append(Block(kind, m[group], text.count("\n", 0, m.start(group)) + 1))
    return found


def read_by_people(text: str) -> str:
    """The page without its comments."""
    return _COMMENT.sub("", text)


def n_words(text: str) -> int:
    """Words that a reader sees, those of code and tables too: what has a letter or a digit between
    two spaces, without the targets of links."""
    seen = re.sub(r"\]\([^)]*\)", "]", read_by_people(text))
    return sum(any(c.isalnum() for c in word) for word in seen.split())


def needs(text: str) -> list[str]:
    return re.findall(r"[\w.]+", " ".join(re.findall(r"<!-- needs: (.*?) -->", text)))


def is_slow(text: str) -> bool:
    return "<!-- slow -->" in text


def expected_of(text: str, i: int, all_blocks: list[Block]) -> str | None:
    """What block i prints by its page: a block of text with nothing but space between."""
    if i + 1 == len(all_blocks) or all_blocks[i + 1].kind != "text":
        return None
    lines = text.splitlines()
    end = all_blocks[i].line + all_blocks[i].code.count("\n")  # the line of the closing fence
    between = lines[end : all_blocks[i + 1].line - 2]
    return None if any(map(str.strip, between)) else all_blocks[i + 1].code


def run(path: pathlib.Path, folder: pathlib.Path) -> int:
    """Run the examples of a page in a folder that may be written to; how many ran.

    Raises:
        Wrong: one prints something else than the page says. What an example raises goes on.
    """
    text = path.read_text(encoding="utf-8")
    all_blocks = blocks(text)
    # A program whose lines have the numbers that they have on the page: for tracebacks and memlab.
    source = [""] * (text.count("\n") + 1)
    for block in all_blocks:
        if block.kind in ("python", "hidden"):
            lines = block.code.splitlines()
            source[block.line - 1 : block.line - 1 + len(lines)] = lines
    program = folder / f"{path.stem}.py"
    program.write_text("\n".join(source), encoding="utf-8")
    linecache.checkcache(str(program))
    names = {"__name__": f"page_{path.stem}", "__file__": str(program)}
    n = 0
    before = os.getcwd()
    os.chdir(folder)
    try:
        for i, block in enumerate(all_blocks):
            if block.kind not in ("python", "hidden"):
                continue
            n += block.kind == "python"
            printed = io.StringIO()
            code = compile("\n" * (block.line - 1) + block.code, str(program), "exec")
            with contextlib.redirect_stdout(printed):
                exec(code, names)
            expected = expected_of(text, i, all_blocks)
            if expected is not None and not doctest.OutputChecker().check_output(
                expected, printed.getvalue(), _FLAGS
            ):
                raise Wrong(
                    f"{path.name}:{block.line}: the page says\n{expected}\nbut it prints\n"
                    f"{printed.getvalue()}"
                )
    finally:
        os.chdir(before)
    return n


def broken_links(path: pathlib.Path) -> list[str]:
    """Links of a page to files or headings that do not exist. Links into the web are not tried."""
    text = read_by_people(path.read_text(encoding="utf-8"))
    code = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
    broken = []
    for target in _LINK.findall(code.sub("", text)):
        if re.match(r"\w+:", target):
            continue
        name, _, heading = target.partition("#")
        file = path.parent / name if name else path
        is_there = file.exists() and (
            not heading or heading in anchors(file.read_text(encoding="utf-8"))
        )
        if not is_there:
            broken.append(target)
    return broken


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    found = set()
    for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
        found.add(re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-"))
    return found


def has_picture_or_example(text: str) -> bool:
    return "](" in "".join(re.findall(r"!\[[^\]]*\]\([^)]*\)", text)) or any(
        b.kind in ("python", "text", "sh") for b in blocks(text)
    )


def run_program(path: pathlib.Path, folder: pathlib.Path, options: list[str]) -> None:
    """Run a program as `python PATH OPTIONS` does; what it prints is folder/"printed.txt"."""
    sys.argv = [str(path), *options]
    sys.path.insert(0, str(path.parent))
    os.chdir(folder)
    with open(folder / "printed.txt", "w", encoding="utf-8") as printed:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(path), run_name="__main__")


def _answered(path: pathlib.Path, folder: pathlib.Path, options: list[str]) -> str:
    """Run a page or a program in a fork of this process; "" or what went wrong."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        wrong = ""
        try:
            if path.suffix == ".py":
                run_program(path, folder, options)
            else:
                run(path, folder)
        except BaseException:
            wrong = traceback.format_exc()
        with open(writing, "w", encoding="utf-8") as out:
            out.write(wrong)
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as answer:
        wrong = answer.read()
    _, status = os.waitpid(child, 0)
    return wrong or (f"the process ended with status {status}" if status else "")


def serve() -> None:
    """Lines of JSON [page or program, folder, options...] in, lines of JSON out: "" or what went
    wrong."""
    import torch

    import koila

    torch.set_num_threads(1)
    torch.manual_seed(0)
    koila.lazy(torch.ones(2))  # the engine starts once, for all
    torch.optim.Adam([torch.nn.Parameter(torch.ones(1))]).step()  # and torch's compiler is imported
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what pages print by other ways than sys.stdout is no answer
    for line in sys.stdin:
        path, folder, *options = json.loads(line)
        answer = _answered(pathlib.Path(path), pathlib.Path(folder), options)
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        for name in sys.argv[1:]:
            with tempfile.TemporaryDirectory() as folder:
                print(name, run(pathlib.Path(name).resolve(), pathlib.Path(folder)), "examples ran")

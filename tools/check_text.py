#!/usr/bin/env python3
"""Check the text of the sources: the formatters, and rules that no formatter knows.

    python tools/check_text.py            every check; exit status 1 if one finds something
    python tools/check_text.py --whole    the functions that are long on purpose, with their reason

Needs clang-format, ruff and lizard (requirements-test.txt).
"""

from __future__ import annotations

import argparse
import ast
import io
import pathlib
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import lizard

ROOT = pathlib.Path(__file__).resolve().parents[1]
COLUMNS = 100
FUNCTION_LINES = 60  # lines that are not blank and not comment
FUNCTION_COMPLEXITY = 20  # McCabe's cyclomatic number
REASON = "Whole because"  # above a function that is longer or more complex, with the reason

SHIPPED = ("src/", "include/", "cli/", "python/")
C_FOLDERS = (*SHIPPED, "tests/", "fuzz/", "bench/")
C_OR_CPP = (".c", ".h", ".cpp", ".hpp")

# A user's files, in examples of what is printed or typed.
EXAMPLE_FILES = {"file.py", "script.py", "train.py"}


class Finding(NamedTuple):
    """Something to mend: its place and what it is."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def tracked(suffixes: tuple[str, ...], folders: tuple[str, ...] = ("",)) -> list[str]:
    """Files of the tree, sorted. Outside a git checkout: those on disk."""
    p = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = p.stdout.splitlines()
    if p.returncode:
        names = [f.relative_to(ROOT).as_posix() for f in ROOT.rglob("*") if f.is_file()]
    found = [n for n in names if n.endswith(suffixes) and n.startswith(folders)]
    return sorted(n for n in found if (ROOT / n).is_file())


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# ---- C as tokens

C_TOKEN = re.compile(
    r"""(?P<comment>/\*.*?\*/|//[^\n]*)
      | (?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
      | (?P<directive>(?m:^[ \t]*\#(?:\\\n|(?!/\*)[^\n])*))
      | (?P<word>\w+)
      | (?P<space>\s+)
      | (?P<mark>.)""",
    re.VERBOSE | re.DOTALL,
)


def c_tokens(text: str) -> Iterator[tuple[str, str, int]]:
    """(kind, text, line) of every token; preprocessor lines are one token each."""
    line = 1
    for m in C_TOKEN.finditer(text):
        kind = m.lastgroup or "mark"
        yield kind, m[0], line
        line += m[0].count("\n")


def c_code(text: str) -> list[tuple[str, int]]:
    """Words, strings and marks with their lines: no comments, no directives, no space."""
    return [(t, n) for k, t, n in c_tokens(text) if k in ("word", "string", "mark")]


# ---- one thing a statement

KEYWORDS_BEFORE_GROUP = {"return", "if", "while", "switch", "case", "sizeof"}


def bracket_kind(before: tuple[str, str]) -> str:
    """What an opening parenthesis begins, after these two tokens: "for", "call" or "group"."""
    if before[1] == "for":
        return "for"
    if before == ("__attribute__", "("):
        return "call"
    is_name = re.fullmatch(r"\w+", before[1]) and before[1] not in KEYWORDS_BEFORE_GROUP
    return "call" if is_name or before[1] in (")", "]") else "group"


def commas_and_nested(name: str, text: str) -> Iterator[Finding]:
    """The comma operator inside brackets, and one ?: inside another."""
    stack: list[str] = []  # open brackets: "call", "group", "for", "index", "block"
    questions: list[int] = []  # depths of the ?: that are open
    before = ("", "")
    for token, line in c_code(text):
        if token in "([{":
            stack.append({"(": bracket_kind(before), "[": "index", "{": "block"}[token])
        elif token in ")]}":
            del stack[-1:]
            questions = [q for q in questions if q <= len(stack)]
        elif token == ",":
            if stack and stack[-1] == "group" and not is_type_list(before[1]):
                yield Finding(name, line, "a comma joins two expressions: make them statements")
            questions = [q for q in questions if q < len(stack)]
        elif token == ";":
            questions = []
        elif token == "?":
            if questions:
                yield Finding(name, line, "?: inside ?:")
            questions.append(len(stack))
        before = (before[1], token)


def is_type_list(before: str) -> bool:
    """Is this the comma of a function pointer's parameters, as in (*fn)(int, int)?"""
    return before in {"int", "char", "void", "size_t", "bool", "double", "..."}


def broken_statements() -> list[Finding]:
    out: list[Finding] = []
    for name in tracked((".c", ".h"), SHIPPED):
        out += commas_and_nested(name, read(name))
    return out


# ---- width and format


def long_lines() -> list[Finding]:
    """Lines of C and C++ beyond 100 columns (ruff finds Python's as E501; tables are exempt)."""
    out = []
    for name in tracked(C_OR_CPP, C_FOLDERS):
        for n, line in enumerate(read(name).splitlines(), 1):
            if len(line) > COLUMNS:
                out.append(Finding(name, n, f"{len(line)} columns"))
    return out


def tool(name: str) -> str:
    """A program that pip put beside this interpreter, or one on the path."""
    beside = pathlib.Path(sys.executable).parent / name
    return str(beside) if beside.exists() else name


def unformatted() -> list[Finding]:
    """Places that clang-format and ruff would change."""
    out = []
    files = tracked(C_OR_CPP, C_FOLDERS)
    p = subprocess.run(
        [tool("clang-format"), "--dry-run", *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for m in re.finditer(r"^(\S+?):(\d+):\d+: warning: (.*)$", p.stderr, re.M):
        out.append(Finding(m[1], int(m[2]), "not as clang-format writes it"))
    for words in (["format", "--check", "."], ["check", "--quiet", "."]):
        p = subprocess.run(
            [tool("ruff"), *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if p.returncode:
            out.append(Finding(f"ruff {' '.join(words)}", 0, p.stdout.strip()))
    return out


# ---- long functions


class Function(NamedTuple):
    path: str
    line: int
    name: str
    n_lines: int
    complexity: int
    reason: str  # "" when none is given


def reason_for(lines: list[str], first: int) -> str:
    """The sentence that begins with `Whole because`, in the comment above line `first` (from 1) or
    in the docstring below it."""
    at = first - 2
    above: list[str] = []
    while at >= 0 and re.match(r"\s*(/\*|\*|#|@)|.*\*/\s*$", lines[at]):
        above.insert(0, lines[at])
        at -= 1
    below = lines[first - 1 : first + 24]
    for block in (above, below):
        text = " ".join(re.sub(r"^\s*(/\*+|\*/|\*|#)\s?", "", line).strip() for line in block)
        if m := re.search(rf"{REASON} .*?[.;](?=\s|\*|\"|$)", text):
            return m[0]
    return ""


def large_functions(names: Iterable[str]) -> list[Function]:
    """Functions above either limit, with the reason that is given for each."""
    out = []
    for name in names:
        lines = read(name).splitlines()
        for f in lizard.analyze_file(str(ROOT / name)).function_list:
            if f.nloc > FUNCTION_LINES or f.cyclomatic_complexity > FUNCTION_COMPLEXITY:
                reason = reason_for(lines, f.start_line)
                out.append(
                    Function(name, f.start_line, f.name, f.nloc, f.cyclomatic_complexity, reason)
                )
    return out


def unexplained_functions() -> list[Finding]:
    names = tracked((".c", ".h"), SHIPPED) + tracked((".py",), ("python/", "tools/"))
    return [
        Finding(
            f.path,
            f.line,
            f"{f.name}: {f.n_lines} lines, complexity {f.complexity}, and no `{REASON} ...` above",
        )
        for f in large_functions(names)
        if not f.reason
    ]


# ---- comments with names that no longer exist


def comments(name: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every comment; of Python also the docstrings."""
    text = read(name)
    if not name.endswith((".py", ".pyi")):
        yield from ((line, t) for kind, t, line in c_tokens(text) if kind == "comment")
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                if isinstance(first.value.value, str):
                    yield first.lineno, first.value.value


def words_of_code(name: str) -> set[str]:
    """Identifiers outside comments; also those in strings (C looks up Python functions by name)."""
    text = read(name)
    if name.endswith((".py", ".pyi")):
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        kept = " ".join(t.string for t in tokens if t.type != tokenize.COMMENT)
    else:
        kept = " ".join(t for kind, t, _ in c_tokens(text) if kind != "comment")
    return set(re.findall(r"\w+", kept))


FILE_NAMED = re.compile(r"(?<![\w.*<{-])((?:[\w-]+/)*[\w-]+\.(?:c|h|def|py|pyi))\b(?![\w(*])")
SYMBOL_NAMED = re.compile(r"\bkoila__?\w+(\*)?")  # koila__emit_*: a family


def stale_comments(names: Iterable[str]) -> list[Finding]:
    """Comments that name a file, or a function or type of ours, that does not exist."""
    everything = [pathlib.PurePosixPath(n) for n in tracked(("",))]
    folders = {part for n in everything for part in n.parts[:-1]}
    endings = {"/" + "/".join(n.parts[i:]) for n in everything for i in range(len(n.parts))}
    code: set[str] = set()
    for name in tracked((".c", ".h", ".def", ".py", ".pyi", ".build", ".toml", ".sh")):
        if name.endswith((".build", ".toml", ".sh")):
            code |= set(re.findall(r"\w+", read(name)))
        else:
            code |= words_of_code(name)
    out = []
    for name in names:
        for line, text in comments(name):
            for m in FILE_NAMED.finditer(text):
                path = m[1].split("/")
                ours = len(path) == 1 or path[0] in folders
                exists = f"/{m[1]}" in endings or (len(path) == 1 and m[1] in EXAMPLE_FILES)
                if ours and not exists:
                    out.append(Finding(name, line, f"{m[1]} does not exist"))
            for m in SYMBOL_NAMED.finditer(text):
                if m[1]:
                    exists = any(word.startswith(m[0][:-1]) for word in code)
                else:
                    exists = m[0] in code
                if not exists:
                    out.append(Finding(name, line, f"{m[0]} does not exist"))
    return out


# ---- notes: one definition each, and an index

NOTE = re.compile(r"Note \[([^\]]+)\]")
# A note is the paragraph of a comment that begins with `Note [X]. `; elsewhere `Note [X]` refers.
NOTE_DEFINED = re.compile(r"(?:\A|\n[ \t]*\n)[ \t/*#]*Note \[([^\]]+)\]\. ")


def notes() -> tuple[dict[str, list[str]], list[Finding]]:
    """Note → the files that define it; and the references to notes that nobody defines."""
    defined: dict[str, list[str]] = {}
    used: list[tuple[str, int, str]] = []
    for name in tracked((".c", ".h", ".def", ".py"), SHIPPED):
        for line, text in comments(name):
            text = re.sub(r"\n[ \t]*\*[ \t]?", "\n", text)
            for m in NOTE_DEFINED.finditer(text):
                defined.setdefault(m[1], []).append(name)
            joined = re.sub(r"\s+", " ", text)
            used += [(name, line, m[1]) for m in NOTE.finditer(joined)]
    lost = [
        Finding(n, at, f"Note [{x}] is defined nowhere") for n, at, x in used if x not in defined
    ]
    twice = [
        Finding(where[1], 0, f"Note [{x}] is defined in {where[0]} already")
        for x, where in defined.items()
        if len(where) > 1
    ]
    return defined, lost + twice


def broken_notes() -> list[Finding]:
    """Notes without a definition or with two, and an index in ARCHITECTURE.md that differs."""
    defined, out = notes()
    text = read("ARCHITECTURE.md")
    listed = dict(re.findall(r"^- Note \[([^\]]+)\]: `([^`]+)`", text, re.M))
    for x, where in sorted(defined.items()):
        if listed.get(x) != where[0]:
            out.append(Finding("ARCHITECTURE.md", 0, f"the index lacks Note [{x}]: `{where[0]}`"))
    for x in sorted(listed.keys() - defined.keys()):
        out.append(Finding("ARCHITECTURE.md", 0, f"the index has Note [{x}], which does not exist"))
    return out


def stale_in_tree() -> list[Finding]:
    names = tracked((".c", ".h", ".def"), C_FOLDERS)
    return stale_comments(
        names + tracked((".py", ".pyi"), ("python/", "tests/", "tools/", "bench/"))
    )


CHECKS = {
    "format": unformatted,
    "width": long_lines,
    "statements": broken_statements,
    "functions": unexplained_functions,
    "comments": stale_in_tree,
    "notes": broken_notes,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="how the text must read")
    parser.add_argument("checks", nargs="*", help=f"some of: {', '.join(CHECKS)}; nothing: all")
    parser.add_argument("--whole", action="store_true", help="list functions long on purpose")
    args = parser.parse_args()
    if unknown := set(args.checks) - CHECKS.keys():
        parser.error(f"expected some of {', '.join(CHECKS)}, got {', '.join(sorted(unknown))}")
    n = 0
    for check in args.checks or CHECKS:
        found = CHECKS[check]()
        n += len(found)
        print(*found, sep="\n", end="\n" if found else "")
        print(f"{check}: {len(found)} found")
    if args.whole:
        for f in large_functions(tracked((".c", ".h"), SHIPPED) + tracked((".py",), ("python/",))):
            if f.reason:
                print(f"{f.path}:{f.line}: {f.name}: {f.n_lines} lines, {f.complexity}: {f.reason}")
    return n > 0


if __name__ == "__main__":
    sys.exit(main())

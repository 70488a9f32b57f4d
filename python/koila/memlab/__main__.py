"""python -m koila.memlab: profile a script without changing it; show and compare saved results.

run  [-f FUNC]... [-c COLUMN]... [-g DEVICE] [-o FILE] [-t FILE] (script.py | -m module) args...
     FUNC: a function of the script ("train", "Net.forward") or "module:function"; none: every
     function the script defines. The script's exit code is kept. The report goes to stderr, or to
     FILE (.txt .html .json .csv). -t: also record the memory over time, with its owners at the
     peak: .html, .pickle for PyTorch's memory viewer, .txt .json .csv.
top  [-i SECONDS] (script.py | -m module) args...
     the memory while it runs, on stderr
view FILE.json
     a saved table or snapshot as text
diff A.json B.json
     two saved snapshots, by name; or two saved tables, by the peak of each line
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
import threading
import types
from collections.abc import Sequence
from typing import Any

from .. import _core
from .._script import execute, load
from . import control, devices, snapshots, timelines, utils
from .line_profiler import DEFAULT_COLUMNS, LineProfiler


def _load(args: argparse.Namespace) -> tuple[types.CodeType, dict[str, Any]]:
    own = [args.script, *args.args] if args.m and args.script else args.args
    return load(args.script, args.m, own)


def codes_inside(code: types.CodeType, prefix: str = "") -> list[tuple[str, types.CodeType]]:
    """[(qualified name, code)] of every function defined in a module's code."""
    found: list[tuple[str, types.CodeType]] = []
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            name = prefix + const.co_name
            is_class = (
                "__qualname__" in const.co_names
                and const.co_name.isidentifier()
                and not const.co_flags & 2
            )
            if not is_class and not const.co_name.startswith("<"):
                found.append((name, const))
            found += codes_inside(const, f"{name}." if is_class else f"{name}.<locals>.")
    return found


def _imported(module: str, path: str) -> Any:
    """-f module:function."""
    try:
        target: Any = importlib.import_module(module)
        for part in path.split("."):
            target = getattr(target, part)
    except SystemExit as leaving:
        raise ValueError(
            f"-f {module}:{path}: importing {module} ended the program (exit code {leaving.code})"
        ) from None
    except (ImportError, AttributeError) as error:
        raise ValueError(f"-f {module}:{path}: {error}") from None
    return target


def _add(
    profiler: LineProfiler,
    wanted: str | None,
    args: argparse.Namespace,
    inside: list[tuple[str, types.CodeType]],
) -> None:
    """Profile the function `wanted`; None: all functions of the script, `inside`."""
    module, colon, path = (wanted or "").rpartition(":")
    own = {"__main__", args.m or os.path.splitext(os.path.basename(args.script))[0]}
    if colon and not (module in own and (not args.m or path in dict(inside))):
        profiler.add_function(_imported(module, path))
        return
    if colon:  # The script's own function runs, not that of a second import of the script.
        wanted = path
    chosen = [(name, c) for name, c in inside if wanted is None or name == wanted]
    if wanted and not chosen:
        raise ValueError(
            f"-f {wanted}: not in the script; it has "
            f"{', '.join(n for n, _ in inside) or 'no function'}"
        )
    for name, c in chosen:
        profiler.add_code(c, name)


def run(args: argparse.Namespace) -> int:
    if args.output:
        utils.format_of(args.output)
    if args.timeline:
        utils.format_of(args.timeline, timelines.FORMATS)
    code, namespace = _load(args)
    device = int(args.gpu) if args.gpu.isdigit() else args.gpu
    profiler = LineProfiler(target_gpu=device)
    inside = codes_inside(code)
    for wanted in args.function or [None]:
        _add(profiler, wanted, args, inside)
    devices.listen()
    record = timelines.timeline(device=device) if args.timeline else None
    with record or contextlib.nullcontext(), profiler:
        status = execute(code, namespace)
    try:
        if record is not None:
            record.save(args.timeline)
        display = profiler.display(columns=args.column or DEFAULT_COLUMNS)
        if args.output:
            display.save(args.output)
        else:
            display.print(sys.stderr)
    except Exception as error:
        sys.stderr.write(f"koila.memlab: {error}\n")
    return status


def top(args: argparse.Namespace) -> int:
    code, namespace = _load(args)
    control.start()
    done = threading.Event()

    def watch() -> None:
        high = 0
        while not done.wait(args.interval):
            kind, count = _core.memlab_devices()
            parts = []
            for device in range(1 + count):
                allocated, reserved = _core.memlab_now(device)
                high = max(high, allocated)
                held = "" if device == 0 else f" reserved {utils.readable_size(reserved)}"
                parts.append(f"{devices.name(device)} {utils.readable_size(allocated)}{held}")
            sys.stderr.write(f"{'  '.join(parts)}  highest seen {utils.readable_size(high)}\n")

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        return execute(code, namespace)
    finally:
        done.set()
        watcher.join(1)


def _saved(path: str) -> Any:
    """A snapshot (dict) or a table (list) that was saved as .json."""
    with open(path, encoding="utf-8") as f:
        try:
            data = json.load(f)
        except ValueError:
            data = None
    if (isinstance(data, dict) and "rows" in data) or (
        isinstance(data, list) and all(isinstance(d, dict) and "lines" in d for d in data)
    ):
        return data
    raise ValueError(f"{path}: expected a snapshot or a table of lines, saved as .json")


def view(args: argparse.Namespace) -> int:
    data = _saved(args.file)
    if isinstance(data, dict):
        rows = sorted(data["rows"], key=lambda r: -r["bytes"])
        for r in rows:
            size = utils.readable_size(r["bytes"])
            print(
                f"{r['name']:<40s}{r['kind']:>10s}{str(tuple(r['shape'])):>20s}{size:>10s}  "
                f"{r['line'] or ''}".rstrip()
            )
        return 0
    for function in data:
        print(f"## {function['function']} ({function['file']}:{function['line']})\n")
        columns = [c for c in (function["lines"] or [{}])[0] if c not in {"line", "code"}]
        print(" ".join(f"{c:>24s}" for c in columns), " line code")
        for line in function["lines"]:
            cells = (
                ""
                if line[c] is None
                else utils.readable_size(line[c])
                if "byte" in c or c in {"rise", "delta", "alloc", "freed", "rss", "backward"}
                else str(line[c])
                for c in columns
            )
            print(
                " ".join(f"{cell:>24s}" for cell in cells),
                f"{line['line']:>5d} {line['code']}".rstrip(),
            )
        print()
    return 0


def diff(args: argparse.Namespace) -> int:
    a, b = _saved(args.a), _saved(args.b)
    if type(a) is not type(b):
        raise ValueError(
            f"{args.a} and {args.b}: expected two snapshots or two tables, got one of each"
        )
    if isinstance(a, dict):
        before, after = (
            snapshots.bytes_by_name(
                (r["name"], r["kind"], r["bytes"], r["line"]) for r in data["rows"]
            )
            for data in (a, b)
        )
        answer = snapshots.compare(before, after, by_name_only=True)
    else:
        answer = snapshots.diff(
            *([{**f, **line} for f in data for line in f["lines"]] for data in (a, b))
        )
    sys.stdout.write(str(answer))
    return 0


# Whole because it is the table of all verbs and options.
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m koila.memlab",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", metavar="{run,top,view,diff}", required=True)
    for name, function in (("run", run), ("top", top)):
        p = verbs.add_parser(
            name,
            help="profile a script" if name == "run" else "the memory of a script while it runs",
        )
        p.set_defaults(do=function)
        if name == "run":
            p.add_argument(
                "-f",
                "--function",
                action="append",
                metavar="FUNC",
                help='"train", "Net.forward" or "module:function"; none: all of the script\'s',
            )
            p.add_argument(
                "-c",
                "--column",
                action="append",
                help="as 'active_bytes.all.peak', 'rise', 'hits'; repeatable",
            )
            p.add_argument(
                "-g",
                "--gpu",
                default="0",
                metavar="DEVICE",
                help="the device shown: an index, cpu, cuda:1",
            )
            p.add_argument(
                "-o",
                "--output",
                metavar="FILE",
                help="the table goes there (.txt .html .json .csv) and not to stderr",
            )
            p.add_argument(
                "-t",
                "--timeline",
                metavar="FILE",
                help="memory over time (.html .pickle .txt .json .csv)",
            )
        else:
            p.add_argument(
                "-i",
                "--interval",
                type=float,
                default=1.0,
                metavar="SECONDS",
                help="between two lines; default 1",
            )
        p.add_argument("-m", metavar="module", help="run this module instead of a script")
        p.add_argument("script", nargs="?")
        p.add_argument("args", nargs=argparse.REMAINDER, help="the script's own")
    p = verbs.add_parser("view", help="a saved table or snapshot as text")
    p.add_argument("file", help="saved as .json")
    p.set_defaults(do=view)
    p = verbs.add_parser("diff", help="two saved snapshots or tables, compared")
    p.add_argument("a", help="saved as .json")
    p.add_argument("b", help="saved as .json, later")
    p.set_defaults(do=diff)
    args = parser.parse_args(argv)
    try:
        return int(args.do(args))
    except (OSError, ValueError, KeyError) as error:
        sys.stderr.write(f"koila.memlab {args.verb}: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())

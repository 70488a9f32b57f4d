#!/usr/bin/env python3
"""The law of the layers: which C file may include which. One list; a file that is not in it is an error, so that the list stays whole.

    python tools/check_layers.py [root]       prints what breaks the law; exit status 1 if anything does
"""

import fnmatch
import pathlib
import re
import sys

# Left to right: a module may include itself, its own layer and every layer before it.
ENGINE = [
    ["base", "plan_costs"],  # plan_costs: numbers only
    ["status", "alloc", "vec"],
    ["arena"],
    ["dtype", "shape"],
    ["table"],
    ["graph"],
    ["graph_text"],
    ["ops", "pseudo", "place", "placer", "rules", "emit"],
    ["rules_*"],
    ["cost", "schedule"],
    ["live"],
    ["plan"],
    ["predict"],
    ["print"],
]
# Beside the engine: they stand on base … arena alone (and on their own kind), know no graph, and are what the extension may use directly.
BESIDE = {
    "the allocator model": ["cache", "cache_*", "snapshot", "snapshot_*", "replay", "replay_*", "device"],
    "the CPU's memory": ["ptrtab", "ledger", "freemem"],
    "the memory laboratory": ["meter", "text", "linetab", "linetext", "columns", "history", "report", "tags", "view"],
}
BELOW_BESIDE = 3  # layers of ENGINE that those may see
PLAN_SEES_BESIDE = {"plan", "live", "predict", "print"}  # the planner on CUDA asks the allocator model


def layer(module):
    for i, names in enumerate(ENGINE):
        if any(fnmatch.fnmatch(module, n) for n in names):
            return i
    return None


def kind(module):
    for name, members in BESIDE.items():
        if any(fnmatch.fnmatch(module, n) for n in members):
            return name
    return None


def may(module, other):
    """May src/<module> include src/<other>.h?"""
    if module == other:
        return True
    if other == "print":
        return False
    if fnmatch.fnmatch(module, "rules_*") and fnmatch.fnmatch(other, "rules_*"):
        return False
    at, to = layer(module), layer(other)
    if at is not None and to is not None:
        return to <= at
    if kind(module) is not None:
        return kind(module) == kind(other) or (to is not None and to < BELOW_BESIDE)
    return kind(other) == "the allocator model" and module in PLAN_SEES_BESIDE


def includes(path):
    for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        m = re.match(r'\s*#\s*include\s+([<"])([^>"]+)[>"]', line)
        if m:
            yield n, m[1], m[2]


def broken(root):
    """Every break of the law as text."""
    out, seen = [], {}
    files = [p for d in ("src", "cli", "python/ext", "include") for p in sorted((root / d).rglob("*.[ch]"))]
    for path in files:
        name = path.relative_to(root)
        if path.suffix == ".c":
            if path.name in seen:
                out.append(f"{name}: the same name as {seen[path.name]}")
            seen[path.name] = name
        where = name.parts[0]
        module = path.stem
        if where == "src" and layer(module) is None and kind(module) is None:
            out.append(f"{name}: not in the list of tools/check_layers.py")
            continue
        for n, bracket, target in includes(path):
            local = pathlib.PurePath(target)
            at = f"{name}:{n}: includes {target}"
            if where in ("src", "cli", "include") and re.match(r"(Python\.h|torch/|ATen/|c10/)", target):
                out.append(f"{at}: {where}/ knows nothing of Python or torch")
            if bracket == "<" or target.startswith("koila/") or where == "include":
                continue
            if where == "src":
                if local.suffix == ".h" and not may(module, local.stem):
                    out.append(f"{at}: not allowed from {module}")
            elif not (path.parent / target).exists() and not (where == "python" and kind(local.stem) is not None):
                out.append(f"{at}: {where}/ sees koila.h and its own headers only")
    return out


if __name__ == "__main__":
    found = broken(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent))
    print(*found, sep="\n", end="\n" if found else "")
    print(f"{len(found)} breaks of the law" if found else "the layers hold")
    sys.exit(bool(found))

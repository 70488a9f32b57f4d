#!/usr/bin/env python3
"""The law of the rooms: which folder may see which, by includes and by calls. In python/ext no two
files may use each other, directly or through others.

    python tools/check_layers.py                    includes, read from the sources
    python tools/check_layers.py --objects build    and calls, read from the objects of a build (nm)
    python tools/check_layers.py --draw             the wings and the arrows between them, as text

Exit status 1 if anything breaks the law.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator

# Each room, with the rooms whose headers and functions it may use besides its own. A folder that is
# missing here is an error, so the law stays complete. "koila.h" is the whole public C interface.
CORE = {
    "src/base": [],
    "src/graph": ["src/base"],
    "src/placement": ["src/base", "src/graph"],
    "src/engine": ["src/base", "src/graph", "src/placement"],
    "src/allocator": ["src/base"],
    "src/memory": ["src/base"],
    "src/predict": ["src/base", "src/graph", "src/placement", "src/engine", "src/allocator"],
}
# The parts of the core that hold no graph: the extension may use their inner headers too.
TOOLS_OF_THE_CORE = ["src/base", "src/memory"]
GROUND = ["koila.h", *TOOLS_OF_THE_CORE]
EXTENSION = {
    "python/ext/ground": GROUND,
    "python/ext/memlab": [*GROUND, "python/ext/ground"],
    "python/ext/capture": [*GROUND, "python/ext/ground", "python/ext/memlab"],
    "python/ext/run": [*GROUND, "python/ext/ground", "python/ext/memlab", "python/ext/capture"],
    "python/ext": [
        "koila.h",
        "python/ext/ground",
        "python/ext/memlab",
        "python/ext/capture",
        "python/ext/run",
    ],
}
ROOMS = {**CORE, "cli": ["koila.h"], **EXTENSION}

# Another wing may include only these headers of the room.
DOORS = {
    ("python/ext/capture", "python/ext/memlab"): {"memlab/credit.h"},
    ("python/ext/run", "python/ext/memlab"): {"memlab/credit.h"},
}
# The public headers, and the room that each belongs to: inside src/ they obey the same law.
PUBLIC = {
    "koila/base.h": "src/base",
    "koila/graph.h": "src/graph",
    "koila/plan.h": "src/engine",
    "koila/cache.h": "src/allocator",
    "koila/snapshot.h": "src/allocator",
    "koila/device.h": "src/allocator",
    "koila/predict.h": "src/predict",
    "koila/koila.h": "koila.h",
}
# Headers inside a room that only the named files may include; no family of rules sees another.
PRIVATE = {
    "placement/placer.h": {"src/placement/walk.h", "src/placement/rewrite.c"},
    "placement/walk.h": {
        "src/placement/attempt.c",
        "src/placement/free_values.c",
        "src/placement/origin.c",
        "src/placement/place.c",
        "src/placement/place_call.c",
    },
    "engine/schedule_state.h": {
        "src/engine/schedule.c",
        "src/engine/loops.c",
        "src/engine/policy.c",
        "src/engine/emit.c",
    },
    "engine/outline_state.h": {
        "src/engine/outline.c",
        "src/engine/outline_bound.c",
        "src/engine/outline_choice.c",
    },
}
FOREIGN = re.compile(r"(Python\.h|torch/|ATen/|c10/)")
INCLUDE = re.compile(r'\s*#\s*include\s+([<"])([^>"]+)[>"]')


def room_of(path: str) -> str | None:
    """The room that a file lies in, or None."""
    folder = str(pathlib.PurePosixPath(path).parent)
    return folder if folder in ROOMS else None


def includes(path: pathlib.Path) -> Iterator[tuple[int, str, str]]:
    """(line, bracket, target) of every #include."""
    for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if m := INCLUDE.match(line):
            yield n, m[1], m[2]


def target_room(root: pathlib.Path, path: pathlib.Path, target: str) -> tuple[str, str] | None:
    """(room, header as its room names it) of a quoted include; None: there is no such file."""
    if target in PUBLIC:
        return PUBLIC[target], target
    for base in ("src", "python/ext", "cli"):
        if (root / base / target).exists():
            room = room_of(f"{base}/{target}")
            return (room, target) if room else None
    if (path.parent / target).exists():
        room = room_of(str((path.parent / target).resolve().relative_to(root.resolve())))
        return (room, target) if room else None
    return None


def may_include(name: str, room: str, other: str, header: str) -> bool:
    """May file `name` of `room` include `header` of room `other`?"""
    if header in PRIVATE and name not in PRIVATE[header]:
        return False
    if other == room:
        stem, wanted = pathlib.PurePath(name).stem, pathlib.PurePath(header).stem
        family = stem.startswith("rules_") and wanted.startswith("rules_") and stem != wanted
        return not family
    if header in PUBLIC and "koila.h" in ROOMS[room]:
        return True
    if other not in ROOMS[room]:
        return False
    doors = DOORS.get((room, other))
    return doors is None or header in doors


def broken_includes(root: pathlib.Path) -> list[str]:
    """Every include that breaks the law, as text."""
    out: list[str] = []
    seen: dict[str, str] = {}
    for top in ("src", "cli", "python/ext", "include"):
        for path in sorted((root / top).rglob("*.[ch]")):
            name = path.relative_to(root).as_posix()
            if path.suffix == ".c":
                if path.name in seen:
                    out.append(f"{name}: the same name as {seen[path.name]}")
                seen[path.name] = name
            room = PUBLIC.get(name.removeprefix("include/")) if top == "include" else room_of(name)
            if room is None:
                out.append(f"{name}: its folder is not in the list of tools/check_layers.py")
                continue
            for n, bracket, target in includes(path):
                at = f"{name}:{n}: includes {target}"
                if top != "python/ext" and FOREIGN.match(target):
                    out.append(f"{at}: {top}/ knows nothing of Python or torch")
                if bracket == "<" or room == "koila.h" or target.endswith(".def"):
                    continue
                found = target_room(root, path, target)
                if found is None:
                    out.append(f"{at}: there is no such header")
                elif not may_include(name, room, *found):
                    out.append(f"{at}: not allowed from {room}")
    return out


def object_room(path: pathlib.Path) -> str | None:
    """The room of an object that Meson made, which it names after the path of the source."""
    rooms = sorted(ROOMS, key=len, reverse=True)
    for room in rooms:
        if path.name.startswith(room.replace("/", "_") + "_"):
            return room
    return None


def symbols(path: pathlib.Path) -> tuple[set[str], set[str]]:
    """(defined, undefined) external symbols of an object."""
    text = subprocess.run(
        ["nm", "-P", str(path)], check=True, capture_output=True, text=True
    ).stdout
    defined, undefined = set(), set()
    for line in text.splitlines():
        name, kind = line.split()[:2]
        if kind == "U":
            undefined.add(name)
        elif kind.isupper() or kind in "vw":
            defined.add(name)
    return defined, undefined


def broken_calls(objects: Iterable[pathlib.Path]) -> list[str]:
    """Every symbol that a room uses and only a room defines that it may not see, as text."""
    owner: dict[str, str] = {}
    uses: list[tuple[pathlib.Path, str, set[str]]] = []
    for path in sorted(objects):
        room = object_room(path)
        if room is None:
            continue
        defined, undefined = symbols(path)
        owner.update(dict.fromkeys(defined, room))
        uses.append((path, room, undefined))
    out = []
    for path, room, undefined in uses:
        allowed = {room, *ROOMS[room]}
        for name in sorted(undefined & owner.keys()):
            public = "koila.h" in allowed and re.match(r"koila_[a-z]", name)
            if owner[name] not in allowed and not public:
                out.append(f"{path.name}: uses {name} of {owner[name]}: not allowed from {room}")
    if not uses:
        out.append("no object of any room was found: build first")
    return out


def uses_of_files(objects: Iterable[pathlib.Path]) -> dict[str, dict[str, set[str]]]:
    """Of each object of python/ext: the others that it uses, and the symbols."""
    owner: dict[str, str] = {}
    undefined: dict[str, set[str]] = {}
    for path in sorted(objects):
        room = object_room(path)
        if room is None or not room.startswith("python/ext"):
            continue
        name = path.name.removesuffix(".c.o").removeprefix("python_ext_")
        defined, undefined[name] = symbols(path)
        owner.update(dict.fromkeys(defined, name))
    uses: dict[str, dict[str, set[str]]] = {name: {} for name in undefined}
    for name, symbols_used in undefined.items():
        for symbol in symbols_used & owner.keys():
            if owner[symbol] != name:
                uses[name].setdefault(owner[symbol], set()).add(symbol)
    return uses


def circles(objects: Iterable[pathlib.Path]) -> list[str]:
    """Files of python/ext that use each other, also through others: each arrow of each circle."""
    uses = uses_of_files(objects)
    reached: dict[str, set[str]] = {}
    for name in uses:
        seen: set[str] = set()
        todo = list(uses[name])
        while todo:
            other = todo.pop()
            if other not in seen:
                seen.add(other)
                todo += uses[other]
        reached[name] = seen
    return [
        f"{name} uses {', '.join(sorted(names))} of {other}, which uses it again: a circle"
        for name in sorted(uses)
        for other, names in sorted(uses[name].items())
        if name in reached[other]
    ]


def arrows(root: pathlib.Path) -> dict[str, set[str]]:
    """The rooms that each room includes."""
    out: dict[str, set[str]] = {room: set() for room in ROOMS}
    for room in ROOMS:
        for path in sorted((root / room).glob("*.[ch]")):
            for _, bracket, target in includes(path):
                found = target_room(root, path, target) if bracket == '"' else None
                if found and found[0] != room:
                    out[room].add(found[0])
    return out


def main() -> int:
    here = pathlib.Path(__file__).parent.parent
    parser = argparse.ArgumentParser(description="the law of the rooms")
    parser.add_argument("root", nargs="?", type=pathlib.Path, default=here)
    parser.add_argument("--objects", type=pathlib.Path, help="a build folder: check calls as well")
    parser.add_argument("--draw", action="store_true", help="print the arrows between the rooms")
    args = parser.parse_args()
    if args.draw:
        for room, others in arrows(args.root).items():
            print(f"{room:<20} → {', '.join(sorted(others)) or '(nothing)'}")
    found = broken_includes(args.root)
    if args.objects:
        objects = list(args.objects.rglob("*.c.o"))
        found += broken_calls(objects) + circles(objects)
    print(*found, sep="\n", end="\n" if found else "")
    print(f"{len(found)} breaks of the law" if found else "the rooms keep the law")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Measure the recipes, and write their tables into docs/recipes.

    python tools/measure_recipes.py [--turns 5] [--only clip]

A page has a table between `<!-- table: clip.py -->` and `<!-- end -->`; what stands there are the
arguments of `python examples/...`. For numbers that are told to others, on a machine that does
nothing else.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
TABLE = re.compile(r"(<!-- table: (.*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def table_of(recipe: str, turns: int) -> str:
    """What `python examples/RECIPE --table` prints, from its first row on."""
    name, *options = recipe.split()
    printed = subprocess.run(
        [sys.executable, f"examples/{name}", *options, "--table", "--turns", str(turns)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    return "".join(line for line in printed.splitlines(True) if line.startswith("|"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", default="", help="recipes whose name has this text")
    args = parser.parse_args()
    for page in sorted((ROOT / "docs/recipes").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        for found in TABLE.finditer(text):
            if args.only in found[2]:
                new = f"{found[1]}\n{table_of(found[2], args.turns)}\n{found[3]}"
                text = text.replace(found[0], new)
                print(found[2], new, sep="\n", flush=True)
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

"""Instructions per event of the C mechanisms, by callgrind: noise does not change them. Exits 1 if
one exceeds its bound.

python bench/instructions.py        needs gcc and valgrind
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The measured counts plus a quarter. Valgrind hides the steady counter, so they include
# clock_gettime.
BOUNDS = {
    "quiet": 185,
    "event": 1400,
    "ledger": 336,
}
WHAT = {
    "quiet": "line event, nothing allocated",
    "event": "line event with an allocation",
    "ledger": "allocate and free in the ledger",
}


def main() -> int:
    bad = 0
    with tempfile.TemporaryDirectory() as d:
        exe = f"{d}/bench"
        sources = [
            ROOT / "bench/bench_linetab.c",
            *(
                ROOT / f"src/{m}.c"
                for m in (
                    "memory/linetab",
                    "memory/meter",
                    "memory/ledger",
                    "memory/ptrtab",
                    "base/alloc",
                    "base/idset",
                    "base/status",
                    "base/vec",
                )
            ),
        ]
        subprocess.run(
            [
                "gcc",
                "-O3",
                "-std=gnu11",
                "-DNDEBUG",
                "-D_GNU_SOURCE",
                f"-I{ROOT}/include",
                f"-I{ROOT}/src",
                *map(str, sources),
                "-lpthread",
                "-o",
                exe,
            ],
            check=True,
        )
        for what, bound in BOUNDS.items():
            n = []
            for times in (1000, 11000):
                p = subprocess.run(
                    [
                        "valgrind",
                        "--tool=callgrind",
                        f"--callgrind-out-file={d}/out",
                        exe,
                        what,
                        str(times),
                    ],
                    capture_output=True,
                    text=True,
                )
                n.append(int(re.search(r"Collected : (\d+)", p.stderr).group(1)))
            each = (n[1] - n[0]) / 10000
            bad += each > bound
            print(
                f"{WHAT[what]:<40s}{each:8.1f} instructions   bound "
                f"{bound}{'   EXCEEDED' if each > bound else ''}"
            )
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())

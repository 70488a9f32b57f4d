"""Every supported torch's own allocator against the model, on the simulated device; no GPU.

    python tools/allocator_matrix.py OUT [--versions 2.10.0,2.11.0] [--wheels DIR]
    ... --koila build/koila     the command that checks: else that of this tree's build folder

For each version it makes an environment OUT/venv-VERSION with PyTorch's CUDA wheel on the simulated
device (tests/fakecuda/build.sh without numbers; some 530 MB to download, 900 of 2.10, and 2 GB on
disk; a wheel in DIR is used instead). It records the histories of tools/record_history.py with
addresses laid in three ways, and four with kernels that take time, and has `koila simulate` replay
each under the rules of that version. OUT/matrix.md is the table of docs/allocator.md, and names
every recording that is not exact. Environments that are there are used as they are. Two minutes a
version, once its environment is made. It is not part of CI."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = "2.10.0,2.11.0,2.12.0,2.12.1,2.13.0,2.14.1,2.15.0"
LAYOUTS = ("first", "up", "down")
SLOW = "random-default,random-expandable,random-split32-cap,two-streams"
HEAD = "| torch | recordings | exact | not checkable | differ | not recorded | statistics differ |"


def environment(version: str, out: Path, wheels: Path | None) -> Path:
    """The Python of an environment with that torch on the simulated device."""
    venv = out / f"venv-{version}"
    python = venv / "bin" / "python"
    ready = out / f"venv-{version}.ready"
    if not ready.exists():
        command = ["bash", str(ROOT / "tests" / "fakecuda" / "build.sh"), str(venv)]
        if wheels and (found := sorted(wheels.glob(f"torch-{version}-*.whl"))):
            command.append(str(found[0]))
        env = {**os.environ, "TORCH_VERSION": version, "FAKECUDA_NUMBERS": "0"}
        env["PYTHON"] = sys.executable
        subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
        # the models that are recorded lie with the tests
        subprocess.run([str(python), "-m", "pip", "install", "-q", "pytest"], check=True)
        ready.touch()
    return python


def recorded(python: Path, folder: Path, koila: str, only: str, **settings: str) -> dict[str, Any]:
    """What was found of each recording, by name."""
    command = [str(python), str(ROOT / "tools" / "record_history.py"), str(folder)]
    command += ["--jobs", "2", "--koila", koila, *(["--only", only] if only else [])]
    env = {k: v for k, v in os.environ.items() if not k.startswith("FAKECUDA_")}
    env |= {"FAKECUDA_NUMBERS": "0", "OMP_NUM_THREADS": "1", **settings}
    subprocess.run(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads((folder / "checks.json").read_text())["found"]
    return found


def summary(version: str, runs: dict[str, dict[str, Any]]) -> tuple[str, list[str]]:
    """A line of the table, and one for each recording that is not exact."""
    n: Counter[str] = Counter()
    lines = []
    for run, found in runs.items():
        for name, row in found.items():
            kind = row["verdict"].split(":")[0].split(" with ")[0]
            n[kind] += 1
            n["recordings"] += 1
            statistics = bool(kind == "exact" and row["stats"])
            n["statistics"] += statistics
            if kind != "exact" or statistics:
                why = row.get("reason") or row["verdict"]
                lines.append(f"{version} {run} {name}: {'statistics' if statistics else why}"[:200])
    counts = [n[k] for k in ("recordings", "exact", "not checkable", "differs", "not recorded")]
    return "| " + " | ".join([version, *map(str, counts), str(n["statistics"])]) + " |", lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--versions", default=VERSIONS)
    parser.add_argument("--wheels", type=Path, help="a folder of wheels, used where one fits")
    parser.add_argument("--koila", default=str(ROOT / "build" / "koila"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    table, problems = [HEAD, "|---|---|---|---|---|---|---|"], []
    for version in args.versions.split(","):
        python = environment(version, args.out.resolve(), args.wheels)
        runs = {
            layout: recorded(
                python, args.out / version / layout, args.koila, "", FAKECUDA_ADDRESSES=layout
            )
            for layout in LAYOUTS
        }
        runs["slow kernels"] = recorded(
            python, args.out / version / "slow", args.koila, SLOW, FAKECUDA_KERNEL_US="300"
        )
        line, wrong = summary(version, runs)
        table.append(line)
        problems += wrong
        print(line, flush=True)
        (args.out / "matrix.md").write_text("\n".join([*table, "", *problems]) + "\n")
    print(*problems, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Is a step that fits faster in slices? Plain PyTorch and `koila.micro_batch("fastest")` in turns.

    python bench/bench_fastest.py [--models conv,mlp,gpt2,lstm] [--steps 70] [--turns 5]

The models of bench_resident.py, one thread, all memory there is. koila takes `--steps` steps to
find a size; then steps of both take turns. Told: seconds and page faults of a step, medians, and
the slices that koila has come to.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time

import bench_resident
import torch

import koila

MODELS = "conv,mlp,gpt2,lstm"


def measure(name: str, n_steps: int, turns: int) -> None:
    torch.set_num_threads(1)
    model, batch, loss_of = bench_resident.made(name)

    def plain() -> None:
        loss_of(model, *batch).backward()

    def fastest() -> None:
        with koila.micro_batch("fastest"):
            loss_of(model, *koila.lazy(*batch)).backward()

    def taken(step) -> tuple[float, int]:
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        start = time.perf_counter()
        step()
        seconds = time.perf_counter() - start
        return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults

    plain()
    for _ in range(n_steps):
        fastest()
    rounds = [(taken(plain), taken(fastest)) for _ in range(turns)]
    told = []
    for what, taken_by in zip(("plain", "fastest"), zip(*rounds, strict=True), strict=True):
        seconds, faults = (statistics.median(v) for v in zip(*taken_by, strict=True))
        told.append(f"{what} {seconds:.2f} s, {faults:,.0f} page faults")
    ratio = statistics.median(lazily[0] / eagerly[0] for eagerly, lazily in rounds)
    n_slices = koila.last_plan().n_micro_batches
    print(f"{name}: {'; '.join(told)}; {ratio:.2f} in {n_slices} slices", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=MODELS, help="which, separated by commas")
    parser.add_argument("--steps", type=int, default=70, help="in which koila finds a size")
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    names = given.models.split(",")
    if len(names) == 1:
        measure(names[0], given.steps, given.turns)
    for name in names if len(names) > 1 else []:
        rest = ["--steps", str(given.steps), "--turns", str(given.turns)]
        subprocess.run([sys.executable, __file__, "--models", name, *rest], check=True)

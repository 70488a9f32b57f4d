#!/usr/bin/env python3
"""Draw the memory of one training step over time, plain PyTorch and koila under a budget:

    python tools/draw_memory.py            docs/memory.svg, the step of examples/digits.py
    python tools/draw_memory.py --long     docs/memory_long.svg, that of examples/long_context.py

Needs koila, scikit-learn and matplotlib. All curves are measured: every event of torch's CPU
allocator during one warm step, recorded by koila.memlab.timeline.
"""

import argparse
import pathlib
import sys
from typing import NamedTuple

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from torch.nn import functional as F

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))
import digits  # noqa: E402
import long_context  # noqa: E402

import koila  # noqa: E402
from koila import memlab  # noqa: E402

MIB = 2**20
GREY = "#7d8590"  # readable on a white and on a black page
COLORS = {
    "plain PyTorch": "#e5534b",
    "each block checkpointed": "#c69026",
    "koila": "#4184e4",
}
LONG_TOKENS = 4096  # fewer than the example's: the picture is the same
N_COLUMNS = 300  # of a picture: of each the lowest and the highest moment are drawn


class Picture(NamedTuple):
    path: str
    curves: dict[str, list[tuple[float, int]]]  # (seconds, bytes), by name
    budget: int
    unit: tuple[str, float]  # of time, and how many are a second


def curve(step) -> list[tuple[float, int]]:
    """(seconds, bytes) of the second call of step()."""
    step()
    with memlab.timeline() as timeline:
        step()
    return thinned(timeline.curve())


def thinned(points) -> list[tuple[float, int]]:
    """Few enough points to draw, with the same outline."""
    columns: dict[int, list[tuple[float, int]]] = {}
    for seconds, held in points:
        columns.setdefault(int(seconds / points[-1][0] * N_COLUMNS), []).append((seconds, held))
    out: list[tuple[float, int]] = []
    for column in columns.values():
        ends = (min(column, key=lambda p: p[1]), max(column, key=lambda p: p[1]))
        out += sorted({column[0], *ends, column[-1]})
    return out


def peak(points) -> int:
    return max(held for _, held in points)


def digits_step() -> Picture:
    x, y, _, _ = digits.data()
    model = digits.make_model()

    def plain() -> None:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()

    def lazily() -> None:
        model.zero_grad()
        input, label = koila.lazy(x, y, batch=0)
        F.cross_entropy(model(input), label).backward()

    curves = {"plain PyTorch": curve(plain)}
    budget = peak(curves["plain PyTorch"]) // 3
    with koila.budget(budget):
        curves["koila"] = curve(lazily)
    return Picture("memory.svg", curves, budget, ("ms", 1e3))


def long_step() -> Picture:
    text, n_words = long_context.document(LONG_TOKENS)
    model = long_context.WordGPT(LONG_TOKENS, n_words)
    data = text[:, :-1], text[:, 1:]
    curves = {}
    for name, model.checkpoints in (("plain PyTorch", False), ("each block checkpointed", True)):
        curves[name] = curve(lambda: long_context.step(model, *data))
    model.checkpoints = False
    budget = peak(curves["each block checkpointed"]) // 3
    with koila.budget(budget):
        curves["koila"] = curve(lambda: long_context.step(model, *koila.lazy(*data)))
    return Picture("memory_long.svg", curves, budget, ("s", 1))


def draw(picture: Picture) -> None:
    unit, a_second = picture.unit
    plt.rcParams.update({"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 11})
    plt.rcParams.update({name: GREY for name in ("text.color", "axes.labelcolor")})
    figure, axes = plt.subplots(figsize=(7.2, 3.2), layout="constrained")
    for name, points in picture.curves.items():
        times = [seconds * a_second for seconds, _ in points]
        held = [n_bytes / MIB for _, n_bytes in points]
        axes.step(times, held, where="post", color=COLORS[name], linewidth=1.6)
        axes.fill_between(times, held, step="post", color=COLORS[name], alpha=0.18, linewidth=0)
        top = max(range(len(held)), key=held.__getitem__)
        axes.annotate(
            f"{name}: {held[top]:.1f} MiB",
            (times[top], held[top]),
            xytext=(6, 5),
            textcoords="offset points",
            color=COLORS[name],
        )
    budget = picture.budget / MIB
    axes.axhline(budget, color=GREY, linestyle="--", linewidth=1)
    end = max(points[-1][0] for points in picture.curves.values()) * a_second
    axes.text(end, budget * 1.03, f"budget {budget:.1f} MiB", ha="right", color=GREY)
    axes.set_xlabel(f"time in the step, {unit}")
    axes.set_ylabel("MiB held by torch")
    axes.set_xlim(0, end)
    axes.set_ylim(0, max(map(peak, picture.curves.values())) / MIB * 1.15)
    axes.tick_params(colors=GREY)
    for side in axes.spines.values():
        side.set_color(GREY)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(ROOT / "docs" / picture.path, transparent=True, metadata={"Date": None})
    told = (f"{name} {peak(points) / MIB:.1f} MiB" for name, points in picture.curves.items())
    print(f"wrote {picture.path}: budget {budget:.1f} MiB, " + ", ".join(told))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--long", action="store_true")
    memlab.start()
    draw(long_step() if parser.parse_args().long else digits_step())


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Draw the memory of one training step over time, plain PyTorch and koila under a budget:

    python tools/draw_memory.py            docs/memory.svg, the step of examples/digits.py
    python tools/draw_memory.py --long     docs/memory_long.svg, that of examples/long_context.py
    python tools/draw_memory.py --memlab   docs/pictures/{cost,lending,out_of_memory}.svg: what the
                                           examples of docs/memlab's pages hold

Needs koila, scikit-learn and matplotlib. All curves are measured: every event of torch's CPU
allocator during one warm step, recorded by koila.memlab.timeline.
"""

import argparse
import contextlib
import pathlib
import sys
import tempfile
from typing import NamedTuple

import matplotlib
import torch

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib import ticker
from torch import nn
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
    "held": "#4184e4",
}
LONG_TOKENS = 4096  # fewer than the example's: the picture is the same
EVENTS = ("allocations and frees, in their order", 1)
N_COLUMNS = 300  # of a picture: of each the lowest and the highest moment are drawn


class Picture(NamedTuple):
    """path: below docs. curves: {name: [(seconds or events, bytes)]}. levels: {name: bytes}, drawn
    dashed. along: what the horizontal axis is, and how many of its units are one of the curve's."""

    path: str
    curves: dict[str, list[tuple[float, int]]]
    levels: dict[str, int]
    along: tuple[str, float]


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


def by_event(timeline) -> list[tuple[float, int]]:
    """(number of the event, bytes from then on), to the end of the last: for blocks so short that
    their times are noise."""
    held = [n_bytes for _, n_bytes in timeline.curve()]
    return list(enumerate([*held, held[-1]]))


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
    return Picture("memory.svg", curves, {"budget": budget}, ("time in the step, ms", 1e3))


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
    return Picture("memory_long.svg", curves, {"budget": budget}, ("time in the step, s", 1))


def cost() -> Picture:
    """What `measure` counts around the block of docs/memlab/cost.md."""

    torch.zeros(1000, 250).relu()  # warm
    with memlab.timeline() as timeline, memlab.measure("cpu") as m:
        a = torch.zeros(1000, 250)
        b = a.relu()
        del a
    del b
    levels = {"start": m.start, "start + rise": m.start + m.rise, "end": m.end}
    return Picture("pictures/cost.svg", {"held": by_event(timeline)}, levels, EVENTS)


def lending() -> Picture:
    """The memory of a model before, while and after it is lent: docs/memlab/lending.md."""
    model = nn.Linear(1000, 1000)

    def step() -> None:
        model(torch.ones(100, 1000))
        with memlab.Courtesy("cpu", to=tempfile.gettempdir()):
            torch.ones(1000, 700).relu_()  # somebody else
        model(torch.ones(100, 1000))

    step()
    with memlab.timeline() as timeline:
        step()
    return Picture("pictures/lending.svg", {"held": by_event(timeline)}, {}, EVENTS)


def out_of_memory() -> Picture:
    """Batches that are kept until one is refused: docs/memlab/out_of_memory.md."""
    budget = 14 * MIB
    asked = torch.zeros(1000, 1000).nbytes

    def step() -> None:
        kept = []
        with contextlib.suppress(RuntimeError), koila.budget(budget):
            while True:
                kept.append(torch.zeros(1000, 1000))

    with memlab.timeline() as timeline:
        step()
    held = by_event(timeline)
    levels = {"budget": budget, "with what was asked for": peak(held) + asked}
    return Picture("pictures/out_of_memory.svg", {"held": held}, levels, EVENTS)


def draw(picture: Picture) -> None:
    """All names stand above the curves, so that none is crossed."""
    along, scale = picture.along
    plt.rcParams.update({"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 11})
    plt.rcParams.update({"svg.hashsalt": "koila"})  # the same names of parts in each drawing
    plt.rcParams.update({name: GREY for name in ("text.color", "axes.labelcolor")})
    figure, axes = plt.subplots(figsize=(7.2, 3.4), layout="constrained")
    for name, points in picture.curves.items():
        times = [x * scale for x, _ in points]
        held = [n_bytes / MIB for _, n_bytes in points]
        label = f"{name}: {max(held):.1f} MiB"
        axes.step(times, held, where="post", color=COLORS[name], linewidth=1.6, label=label)
        axes.fill_between(times, held, step="post", color=COLORS[name], alpha=0.18, linewidth=0)
    styles = ("--", ":", "-.")
    for style, (name, n_bytes) in zip(styles, picture.levels.items(), strict=False):
        label = f"{name}: {n_bytes / MIB:.1f} MiB"
        axes.axhline(n_bytes / MIB, color=GREY, linestyle=style, linewidth=1.2, label=label)
    highest = max(*map(peak, picture.curves.values()), *picture.levels.values(), 1)
    legend = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 2, "frameon": False}
    axes.legend(labelcolor="linecolor", borderpad=0.2, handlelength=1.6, **legend)
    axes.set_xlabel(along)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    axes.set_ylabel("MiB held by torch")
    axes.set_xlim(0, max(points[-1][0] for points in picture.curves.values()) * scale)
    axes.set_ylim(0, highest / MIB * 1.05)
    axes.tick_params(colors=GREY)
    for side in axes.spines.values():
        side.set_color(GREY)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(ROOT / "docs" / picture.path, transparent=True, metadata={"Date": None})
    told = {name: peak(points) for name, points in picture.curves.items()} | picture.levels
    print(f"wrote {picture.path}:", {name: f"{n / MIB:.1f} MiB" for name, n in told.items()})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--memlab", action="store_true")
    args = parser.parse_args()
    memlab.start()
    if args.memlab:
        for picture in (cost, lending, out_of_memory):
            draw(picture())
    else:
        draw(long_step() if args.long else digits_step())


if __name__ == "__main__":
    main()

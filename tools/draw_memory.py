#!/usr/bin/env python3
"""Draw docs/memory.svg: the memory of one training step over time, plain PyTorch and koila.

    python tools/draw_memory.py [docs/memory.svg]

Needs koila, scikit-learn and matplotlib. Both curves are measured: every event of torch's CPU
allocator during one warm step of examples/digits.py, recorded by koila.memlab.timeline.
"""

import pathlib
import pickle
import sys
import tempfile

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from torch.nn import functional as F

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))
import digits  # noqa: E402

import koila  # noqa: E402
from koila import memlab  # noqa: E402

MIB = 2**20
GREY = "#7d8590"  # readable on a white and on a black page
COLORS = {"plain PyTorch": "#e5534b", "koila": "#4184e4"}


def curve(step) -> tuple[list[float], list[float]]:
    """(milliseconds, MiB) after every allocator event of the second call of step()."""
    step()
    with memlab.timeline() as timeline:
        step()
    with tempfile.TemporaryDirectory() as folder:
        timeline.save(f"{folder}/t.pickle")
        saved = pickle.loads(pathlib.Path(folder, "t.pickle").read_bytes())
    events = next(trace for trace in saved["device_traces"] if trace)
    first = events[0]["time_us"]
    now, times, held = timeline.start, [0.0], [timeline.start / MIB]
    for event in events:
        if event["action"] in ("alloc", "free_completed"):
            now += event["size"] if event["action"] == "alloc" else -event["size"]
            times.append((event["time_us"] - first) / 1000)
            held.append(now / MIB)
    return times, held


def main() -> None:
    out = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "docs" / "memory.svg")
    memlab.start()
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
    budget = int(max(curves["plain PyTorch"][1]) * MIB / 3)
    with koila.budget(budget):
        curves["koila"] = curve(lazily)

    plt.rcParams.update({"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 11})
    plt.rcParams.update({name: GREY for name in ("text.color", "axes.labelcolor")})
    figure, axes = plt.subplots(figsize=(7.2, 3.2), layout="constrained")
    for name, (times, held) in curves.items():
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
    axes.axhline(budget / MIB, color=GREY, linestyle="--", linewidth=1)
    end = max(times[-1] for times, _ in curves.values())
    axes.text(end, budget / MIB + 1, f"budget {budget / MIB:.1f} MiB", ha="right", color=GREY)
    axes.set_xlabel("time in the step, ms")
    axes.set_ylabel("MiB held by torch")
    axes.set_xlim(0, end)
    axes.set_ylim(0, max(curves["plain PyTorch"][1]) * 1.15)
    axes.tick_params(colors=GREY)
    for side in axes.spines.values():
        side.set_color(GREY)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, transparent=True, metadata={"Date": None})
    print(
        f"wrote {out.name}: " + ", ".join(f"{n} {max(h):.1f} MiB" for n, (_, h) in curves.items())
    )


if __name__ == "__main__":
    main()

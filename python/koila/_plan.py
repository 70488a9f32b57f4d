"""How a step ran, or would run, as text: `last_plan()`, `plans()`, `explain()`, and a page."""

from __future__ import annotations

import html
import os
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from . import _backward, _core, _hooks
from ._budget import readable
from ._undo import UndoWrites
from ._lazy import tree_map
from ._switch import refuse_when_off
from ._torch import ModesAside


class Loop(NamedTuple):
    """One pass over the slices. `n_nodes`: operators a slice runs; `n_targets`: values that must be
    whole at its end."""

    axis: int
    n_slices: int
    n_nodes: int
    n_targets: int
    peak_bytes: int


class _Gather(NamedTuple):
    operator: str
    shape: tuple[int, ...]
    bytes: int
    line: str


class Gather(_Gather):
    """An operator without a rule for the batch: its input was made whole, which is exact and costs
    memory. (operator, shape, bytes, "file.py:line")."""

    dtype: str

    @classmethod
    def of(
        cls, operator: str, dtype: str, shape: tuple[int, ...], n_bytes: int, line: str
    ) -> Gather:
        gather = cls(operator, shape, n_bytes, line)
        gather.dtype = dtype
        return gather

    @property
    def instead(self) -> str:
        """What a program can do so that the operator is cut; `""`: nothing is known."""
        return _core.instead_of(self.operator)

    @property
    def n_bytes(self) -> int:
        """`bytes`, by the name that loops and large tensors have."""
        return self.bytes


class Large(NamedTuple):
    """A tensor that is alive at the step's peak."""

    n_bytes: int
    dtype: str
    shape: tuple[int, ...]
    operator: str
    line: str


class Axis(NamedTuple):
    """A dimension that was cut in place of the rows, or within each row: `n_slices` slices of
    `slice_size` of its `size` entries. `dim`: of the first value of the batch that has it."""

    dim: int
    size: int
    slice_size: int
    n_slices: int


def _cut(n_slices: int, each: str, of: int, size: int) -> str:
    """`4 × 8 rows of 30, the last 6`, where each is "8 rows of 30"."""
    ragged = size % of if of else 0
    return f"{n_slices} × {each}" + (f", the last {ragged}" if ragged else "")


def _short(line: str) -> str:
    return os.path.basename(line)


def _typed(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"


class Plan:
    """How one step was cut (`last_plan()`), or would be (`explain()`). `str()` is a table.

    Attributes:
        batch, micro_batch, n_micro_batches: rows in all, rows of a slice, slices.
        axis: the `Axis` that was cut where no number of rows fitted: each slice has all rows then,
            or one row if `n_micro_batches` is not 1. `None`: rows were cut, or nothing.
        predicted_peak_bytes, measured_peak_bytes: all bytes that torch holds at the peak; measured
            is `None` where they were not counted; on a GPU, where an earlier peak was higher.
        base_bytes: bytes held before the step (model, data, optimizer); of `koila.plan()`: bytes
            that the step reads.
        budget_bytes: bytes that torch may hold; `None`: what was free.
        loops, gathers, largest: lists of `Loop`, `Gather`, `Large`.
        curve: (label, bytes) along the step.
        retries: times a slice did not fit and was cut again.
        n_recorded, n_run, replay_ratio: operators recorded; operators run, over all slices; work
            run per work recorded, by estimated time. Those of a backward count what ran before it
            for values that were read in the middle of its step.
        n_recomputed: operators of the forward pass that ran once more in each slice, because
            their results were dropped: nothing else fitted.
        n_offloaded, offloaded_bytes: values that waited in host memory between their uses in the
            forward and the backward pass, in each slice; their bytes.
        asked_by: "backward"; "item" (`.item()`, `float()`); "aten::nonzero" or another operator
            whose result depends on values; "read" (`print`, `if`, `.torch()`, `koila.run()`);
            "leaving" (a step was left without backward: what the program holds of it); "plan"
            (`koila.plan()`: nothing ran).
        asked_at: the program's line that asked, "file.py:12".
        fit: on a GPU, the answer of the model of torch's caching allocator: `fits`,
            `peak_allocated`, `peak_reserved`, `n_retries`, `n_simulations`, and `margin_bytes`,
            kept free since a step like this ran out of memory. `None`: the sum of live bytes
            decided.
    """

    batch: int
    micro_batch: int
    n_micro_batches: int
    predicted_peak_bytes: int
    measured_peak_bytes: int | None
    base_bytes: int
    budget_bytes: int | None
    retries: int
    n_recorded: int
    n_run: int
    replay_ratio: float
    n_recomputed: int
    n_offloaded: int
    offloaded_bytes: int
    asked_by: str
    asked_at: str
    fit: dict[str, Any] | None
    axis: Axis | None

    def __init__(self, raw: dict[str, Any], values: Iterable[torch.Tensor] | None = None) -> None:
        self._raw = raw
        # Weak: a plan keeps no step in memory.
        self._values = None if values is None else [weakref.ref(v) for v in values]
        for name in Plan.__annotations__:
            setattr(self, name, raw.get(name))
        self.axis = None if raw["axis"] is None else Axis(*raw["axis"])
        self.loops = [Loop(*(d[f] for f in Loop._fields)) for d in raw["loops"]]
        self.gathers = [Gather.of(*g) for g in raw["gathers"]]
        self.largest = [Large(*t) for t in raw["largest"]]
        self.curve: list[tuple[str, int]] = list(raw["curve"])

    # ---- as text

    def _head(self) -> list[tuple[str, str]]:
        def size(n: int | None, otherwise: str) -> str:
            return otherwise if n is None else readable(n)

        rows = f"{self.micro_batch} rows of {self.batch}"
        cut = _cut(self.n_micro_batches, rows, self.micro_batch, self.batch)
        if self.n_micro_batches == 1:
            cut = f"whole, {self.batch} rows"
        if self.axis is not None:
            a = self.axis
            each = f"{a.slice_size} of {a.size:,} along dim {a.dim}"
            along = _cut(a.n_slices, each, a.slice_size, a.size)
            cut = along if self.n_micro_batches == 1 else f"{cut}, each {along}"
        table = [
            ("batch", cut),
            ("predicted peak", size(self.predicted_peak_bytes, "unknown")),
            (
                "measured peak",
                size(
                    self.measured_peak_bytes,
                    "not run" if self._values is not None else "not measured",
                ),
            ),
            ("held before", size(self.base_bytes, "unknown")),
            ("budget", size(self.budget_bytes, "what is free")),
            (
                "operators",
                f"{self.n_recorded} recorded, {self.n_run} run"
                + (f", {self.n_recomputed} computed again" if self.n_recomputed else "")
                + (f", {self.replay_ratio:.2f} per slice" if self.n_run else ""),
            ),
        ]
        if self.n_offloaded:
            waiting = f"{self.n_offloaded} values, {readable(self.offloaded_bytes)}"
            table.append(("in host memory", waiting))
        if self.fit is not None:
            margin = (
                f", {readable(self.fit['margin_bytes'])} kept free"
                if self.fit["margin_bytes"]
                else ""
            )
            table.append(
                (
                    "reserved",
                    f"{readable(self.fit['peak_reserved'])}{margin}"
                    if self.fit["fits"]
                    else f"does not fit by the allocator's model{margin}; tried all the same",
                )
            )
        return table + ([("retries", str(self.retries))] if self.retries else [])

    def _tables(self) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
        return [
            (
                "loops",
                ("", "slices", "operators", "made whole", "peak"),
                [
                    (
                        str(i),
                        str(p.n_slices),
                        str(p.n_nodes),
                        str(p.n_targets),
                        readable(p.peak_bytes),
                    )
                    for i, p in enumerate(self.loops)
                ],
            ),
            (
                "gathered (an operator needs it whole)",
                ("bytes", "tensor", "operator", "line"),
                [
                    (readable(g.n_bytes), _typed(g.dtype, g.shape), g.operator, _short(g.line))
                    for g in self.gathers
                ],
            ),
            (
                "largest at the peak",
                ("bytes", "tensor", "operator", "line"),
                [
                    (readable(t.n_bytes), _typed(t.dtype, t.shape), t.operator, _short(t.line))
                    for t in self.largest[:10]
                ],
            ),
        ]

    def __str__(self) -> str:
        head = self._head()
        width = max(len(k) for k, _ in head)
        lines = [f"{k:<{width}}  {v}" for k, v in head]
        for title, names, rows in self._tables():
            if rows:
                widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
                lines += ["", title]
                lines += [
                    "  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
                    for row in (names, *rows)
                ]
        for instead in dict.fromkeys(g.instead for g in self.gathers):
            lines += ["", instead] if instead else []
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<koila.Plan: {self._head()[0][1]}, peak {readable(self.predicted_peak_bytes)}>"

    # ---- as files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan. `*.html`: one self-contained page; `*.kgraph`: the recorded step, for the
        `koila` command; `*.txt`: the table.

        Raises:
            ValueError: another ending, or a `.kgraph` of a step that is no longer there.
        """
        path = os.fspath(path)
        ending = os.path.splitext(path)[1]
        if ending == ".kgraph":
            if self._values is None:
                is_saved = _core.save_graph(self._raw["number"], path)
            else:
                values = [v for ref in self._values if (v := ref()) is not None]
                is_saved = len(values) == len(self._values)
                if is_saved:
                    _core.save_graph(_step_of(values), path)
            if not is_saved:
                raise ValueError(
                    f"Plan.save({path!r}): expected the plan of one of the last {_MOST_PLANS} runs "
                    "of this thread, got that of an older step, whose graph is gone"
                )
            return
        if ending not in (".html", ".txt"):
            raise ValueError(
                f"Plan.save({path!r}): expected a name that ends in .html, .kgraph or .txt, got "
                f"{ending or 'no ending'!r}"
            )
        with open(path, "w", encoding="utf-8") as f:
            f.write(_page(self) if ending == ".html" else f"{self}\n")


# ---- the page

_STYLE = """
:root {
  color-scheme: light dark; --ink: #1d2330; --dim: #667085; --page: #fff; --card: #f6f7f9;
  --line: #d9dde4; --mark: #2f6fde; --limit: #c2410c;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e6e9ef; --dim: #98a2b3; --page: #14171d; --card: #1c2129; --line: #323a46;
    --mark: #6ea2ff; --limit: #fb923c;
  }
}
body {
  font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 70rem; margin: 2rem auto; padding: 0 1rem;
}
h1 { font-size: 1.4rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
dl { display: flex; flex-wrap: wrap; gap: .75rem; margin: 0; }
dl div { background: var(--card); padding: .6rem .9rem; border-radius: .5rem; }
dt { color: var(--dim); font-size: .85rem; } dd { margin: 0; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th { text-align: left; color: var(--dim); font-weight: 500; }
th, td {
  padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); white-space: nowrap;
  font-variant-numeric: tabular-nums;
}
td:nth-child(n+2) { font-family: ui-monospace, monospace; font-size: .9em; }
svg { width: 100%; height: auto; background: var(--card); border-radius: .5rem; }
svg text { fill: var(--dim); font-size: 12px; }
"""


_MOST_POINTS, _MOST_TITLES = 2000, 400  # of a curve on a page


def _svg(plan: Plan) -> str:
    """Bytes over the step: one area, the budget as a line if it is near, a title for each point."""
    curve = plan.curve or [("", 0)]
    w, h, left, top, bottom = 960, 300, 74, 14, 28
    peak = max(n for _, n in curve)
    limit = plan.budget_bytes
    near = limit is not None and limit <= 3 * max(peak, 1)
    scale = max(peak, limit if near and limit is not None else 0, 1) * 1.05

    def x(i: int) -> float:
        return left + (w - left - 10) * i / max(len(curve) - 1, 1)

    def y(n: float) -> float:
        return top + (h - top - bottom) * (1 - n / scale)

    step = max(1, len(curve) // _MOST_POINTS)  # each group of points shows its highest
    points = [
        max(range(i, min(i + step, len(curve))), key=lambda j: curve[j][1])
        for i in range(0, len(curve), step)
    ]
    path = " ".join(f"{x(i):.1f},{y(curve[i][1]):.1f}" for i in points)
    out = [f'<svg viewBox="0 0 {w} {h}" role="img" aria-label="memory over the step">']
    for k in range(5):
        n = scale / 1.05 * k / 4
        out.append(
            f'<line x1="{left}" x2="{w - 10}" y1="{y(n):.1f}" y2="{y(n):.1f}" '
            'stroke="var(--line)"/>'
        )
        out.append(
            f'<text x="{left - 8}" y="{y(n) + 4:.1f}" text-anchor="end">{readable(n)}</text>'
        )
    base = f"{y(0):.1f}"
    out.append(
        f'<polygon points="{x(points[0]):.1f},{base} {path} {x(points[-1]):.1f},{base}" '
        'fill="var(--mark)" fill-opacity=".15"/>'
    )
    out.append(f'<polyline points="{path}" fill="none" stroke="var(--mark)" stroke-width="1.5"/>')
    if near and limit is not None:
        out.append(
            f'<line x1="{left}" x2="{w - 10}" y1="{y(limit):.1f}" y2="{y(limit):.1f}" '
            'stroke="var(--limit)" stroke-dasharray="6 4"/>'
        )
        out.append(
            f'<text x="{w - 14}" y="{y(limit) - 5:.1f}" text-anchor="end">budget '
            f"{readable(limit)}</text>"
        )
    for i in points[:: max(1, len(points) // _MOST_TITLES)]:
        label, n = curve[i]
        out.append(
            f'<circle cx="{x(i):.1f}" cy="{y(n):.1f}" r="5" '
            f'fill="transparent"><title>{html.escape(f"{label}: {readable(n)}")}</title></circle>'
        )
    out.append(f'<text x="{left}" y="{h - 8}">{html.escape(curve[0][0])}</text>')
    out.append(
        f'<text x="{w - 10}" y="{h - 8}" text-anchor="end">{html.escape(curve[-1][0])}</text></svg>'
    )
    return "\n".join(out)


def _page(plan: Plan) -> str:
    def cells(tag: str, row: Iterable[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in row) + "</tr>"

    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width">'
    ]
    parts.append(
        f"<title>koila: a step's memory</title><style>{_STYLE}</style></head><body><h1>koila: a "
        "step's memory</h1><dl>"
    )
    parts += [
        f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd></div>" for k, v in plan._head()
    ]
    parts += ["</dl><h2>memory over the step</h2>", _svg(plan)]
    for title, names, rows in plan._tables():
        if rows:
            parts.append(
                f'<h2>{html.escape(title)}</h2><div class="wide"><table>{cells("th", names)}'
            )
            parts += [cells("td", row) for row in rows]
            parts.append("</table></div>")
    return "\n".join([*parts, "</body></html>\n"])


# ---- asking


def last_plan() -> Plan | None:
    """The plan of the last step that ran a backward, in this thread or asyncio task; `None` before
    the first step.

    A value that is read in the middle of a step, an evaluation and `koila.plan()` do not hide it;
    `plans()` has theirs. Where no backward has run since the settings were changed (`budget`,
    `micro_batch`, `strict`), it is the plan of what ran last.
    """
    raw = _core.last_plan()
    return None if raw is None else Plan(raw)


_MOST_PLANS = 16


def plans() -> list[Plan]:
    """The plans of the last 16 runs of this thread or asyncio task, the newest last. `asked_by` and
    `asked_at` say what asked for each: a backward, a value that was read, `koila.plan()`."""
    return [Plan(raw) for raw in _core.plans(_MOST_PLANS)]


def _step_of(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """`values`; for a loss (a scalar with a graph) also the gradients of its backward, which is
    recorded and not run."""
    out = list(values)
    context = _core.context()
    for loss in values:
        if loss.numel() == 1 and loss.requires_grad:
            leaves, reentrant = _backward._leaves([loss])
            if reentrant:  # such a checkpoint runs inside backward() only: only the forward is told
                continue
            hooks = _hooks.quiet_hooks(leaves, _hooks.BEFORE)
            context.explains = True
            try:
                # as Tensor.backward() does: a checkpoint enters its forward's default device again,
                # which torch cannot leave if it is on the stack already
                with ModesAside(), UndoWrites():  # type: ignore[no-untyped-call]
                    found = _backward._original(
                        (loss,),
                        (torch.ones_like(loss),),
                        True,
                        False,
                        tuple(leaves),
                        allow_unreachable=True,
                        accumulate_grad=False,
                    )
            finally:
                context.explains = False
                _hooks.wake_hooks(hooks)
            out += [g for g in found if g is not None and _core.is_lazy(g)]
    return out


def explain(*values: Any) -> Plan:
    """The plan of the step that would compute `values` (anything lazy) and, for a loss, its
    backward. Runs nothing.

    Returns:
        A `Plan`; print it: it names the largest tensors by line.

    Raises:
        ValueError: nothing lazy was given.
    """
    refuse_when_off(f"explain(<{len(values)} value{'' if len(values) == 1 else 's'}>)")
    lazies: list[torch.Tensor] = []

    def look(t: torch.Tensor, _dim: Any, _where: str) -> torch.Tensor:
        if _core.is_lazy(t):
            lazies.append(t)
        return t

    tree_map(look, values)
    if not lazies:
        kinds = ", ".join(type(v).__name__ for v in values) or "nothing"
        raise ValueError(
            f"explain(<{len(values)} value{'' if len(values) == 1 else 's'}>): expected a lazy "
            f"value, got {kinds}"
        )
    return Plan(_core.explain(_step_of(lazies)), lazies)

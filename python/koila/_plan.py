"""How a step ran, or would run: `last_plan()`, `plans()`, `explain()`; as text, page and data."""

from __future__ import annotations

import json
import os
import re
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from . import _backward, _core, _hooks, _pages
from ._budget import readable
from ._undo import UndoWrites
from ._lazy import tree_map
from ._switch import refuse_when_off
from ._torch import ModesAside


class Loop(NamedTuple):
    """One pass over the slices. `n_nodes`: operators a slice runs; `n_targets`: values that must be
    whole at its end. `ends_for`, `ends_at`: the operator, and its line, that makes one of these,
    before which the next loop cannot begin. `compiled`: its full slices ran as a function of
    `koila.compile()`."""

    axis: int
    n_slices: int
    n_nodes: int
    n_targets: int
    peak_bytes: int
    ends_for: str = ""
    ends_at: str = ""
    compiled: bool = False


class _Gather(NamedTuple):
    operator: str
    shape: tuple[int, ...]
    bytes: int
    line: str


class Gather(_Gather):
    """An operator without a rule for the batch: its input was made whole, which is exact and costs
    memory. (operator, shape, bytes, "file.py:line")."""

    dtype: str
    module: str  # under `module_names()`; "": none, or not known

    @classmethod
    def of(
        cls, operator: str, dtype: str, shape: tuple[int, ...], n_bytes: int, line: str
    ) -> Gather:
        line, module = line_and_module(line)
        gather = cls(operator, shape, n_bytes, line)
        gather.dtype, gather.module = dtype, module
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
    """A tensor that is alive at the step's peak. `n_bytes`: what is held of it; `held`: "slice",
    "whole", or "some slices"; `held_shape`: of one slice, or of the whole. `shape`, `whole_bytes`:
    of all of it. `module`: under `module_names()`, the module that made it, or ""."""

    n_bytes: int
    dtype: str
    shape: tuple[int, ...]
    operator: str
    line: str
    held: str
    held_shape: tuple[int, ...]
    whole_bytes: int
    module: str


def _large(raw: tuple[Any, ...]) -> Large:
    n_bytes, dtype, shape, operator, line, held, held_shape, whole_bytes = raw
    line, module = line_and_module(line)
    return Large(n_bytes, dtype, shape, operator, line, held, held_shape, whole_bytes, module)


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


def cut_in_words(plan: Plan) -> str:
    """`3 × 4 rows of 10, the last 2`; `whole, 10 rows`."""
    rows = f"{plan.micro_batch} rows of {plan.batch}"
    cut = _cut(plan.n_micro_batches, rows, plan.micro_batch, plan.batch)
    if plan.n_micro_batches == 1:
        cut = f"whole, {plan.batch} rows"
    if plan.axis is None:
        return cut
    a = plan.axis
    each = f"{a.slice_size} of {a.size:,} along dim {a.dim}"
    along = _cut(a.n_slices, each, a.slice_size, a.size)
    return along if plan.n_micro_batches == 1 else f"{cut}, each {along}"


_WITH_MODULE = re.compile(r"(.*) \(([^()]*)\)(:\d+)", re.DOTALL)


def line_and_module(line: str) -> tuple[str, str]:
    """`("train.py:12", "layers.3.conv")` of `"train.py (layers.3.conv):12"`; without one `""`."""
    found = _WITH_MODULE.fullmatch(line)
    return (found[1] + found[3], found[2]) if found else (line, "")


def in_short(line: str, module: str = "") -> str:
    """`train.py:12`, or `train.py:12 (layers.3.conv)`, of a path and line."""
    line, named = line_and_module(line)
    module = module or named
    return os.path.basename(line) + (f" ({module})" if module else "")


def _size(n: int | None, otherwise: str) -> str:
    return otherwise if n is None else readable(n)


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


class _Table(NamedTuple):
    title: str
    names: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str

    def without_empty_columns(self) -> _Table:
        full = [i for i in range(len(self.names)) if any(row[i] for row in self.rows)]
        rows = [tuple(row[i] for i in full) for row in self.rows]
        return self._replace(names=tuple(self.names[i] for i in full), rows=rows)


def _typed(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"


class Plan:
    """How one step was cut (`last_plan()`), or would be (`explain()`). `str()` is a table.

    Attributes:
        batch, micro_batch, n_micro_batches: rows in all, rows of a slice, slices.
        n_fewest: the fewest slices that fit. More were run where they are faster, or to see whether
            they are (`micro_batch(None)`, `micro_batch("fastest")`).
        axis: the `Axis` that was cut where no number of rows fitted: each slice has all rows then,
            or one row if `n_micro_batches` is not 1. `None`: rows were cut, or nothing.
        predicted_peak_bytes, measured_peak_bytes: all bytes that torch holds at the peak; measured
            is `None` where they were not counted; on a GPU, where an earlier peak was higher.
        predicted_uncompiled: loops ran compiled for the first time (`koila.compile()`). What they
            take is measured then; the prediction is of the same loops uncompiled.
        plain_peak_bytes: the predicted peak of the same step with all rows at once, as plain
            PyTorch runs it; `None`: not known; of `koila.plan(device=)`: `prediction` has it.
        base_bytes: bytes held before the step (model, data, optimizer); of `koila.plan()`: bytes
            that the step reads.
        budget_bytes: bytes that torch may hold; `None`: what was free.
        loops, gathers, largest: lists of `Loop`, `Gather`, `Large`.
        curve: (label, bytes) along the step.
        retries: times a slice did not fit and was cut again.
        n_recorded, n_run, replay_ratio: operators recorded; operators run, over all slices; work
            run per work recorded, by estimated time. Those of a backward count what ran before it
            for values that were read in the middle of its step.
        time_ratio: the estimated time of the plan per that of each recorded operator once: work,
            and what calling an operator takes whatever its size, which many slices multiply.
            Recorded operators count as they are written out for the dimension that is cut, so it
            compares plans that cut the same: with rows and another dimension at once it is larger.
        n_recomputed: operators of the forward pass that ran once more in each slice, because
            their results were dropped: nothing else fitted.
        n_offloaded, offloaded_bytes: values that waited in host memory between their uses in the
            forward and the backward pass, in each slice; their bytes.
        n_reads: of a backward: runs for values that were read before it in its step.
        seconds: that the run took, without the recording of the step; `None`: nothing ran.
        n_aside: steps like this one that torch has done alone since, because koila stepped aside
            (see `lazy()`); what they took was not measured.
        asked_by: "backward"; "item" (`.item()`, `float()`); "aten::nonzero" or another operator
            whose result depends on values; "read" (`print`, `if`, `.torch()`, `koila.run()`);
            "leaving" (a step was left without backward: what the program holds of it); "plan"
            (`koila.plan()`: nothing ran).
        asked_at: the program's line that asked, "file.py:12".
        fit: on a GPU, the answer of the model of torch's caching allocator: `fits`,
            `peak_allocated`, `peak_reserved`, `n_retries`, `n_simulations`, and `margin_bytes`,
            kept free since a step like this ran out of memory. `None`: the sum of live bytes
            decided.

    Example:
        >>> with micro_batch(4):
        ...     F.cross_entropy(model(lazy(images)), labels).backward()
        >>> plan = last_plan()
        >>> plan.batch, plan.micro_batch, plan.n_micro_batches, plan.gathers
        (12, 4, 3, [])
        >>> plan.save("plan.html")
    """

    batch: int
    micro_batch: int
    n_micro_batches: int
    n_fewest: int
    predicted_peak_bytes: int
    measured_peak_bytes: int | None
    predicted_uncompiled: bool
    base_bytes: int
    budget_bytes: int | None
    retries: int
    n_recorded: int
    n_run: int
    replay_ratio: float
    time_ratio: float
    n_recomputed: int
    n_offloaded: int
    offloaded_bytes: int
    plain_peak_bytes: int | None
    n_reads: int
    seconds: float | None
    n_aside: int
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
        self.largest = [_large(t) for t in raw["largest"]]
        self.curve: list[tuple[str, int]] = list(raw["curve"])

    # ---- as text

    @property
    def is_cut(self) -> bool:
        """Is it more than one slice?"""
        return self.n_micro_batches > 1 or self.axis is not None

    def _peaks(self) -> list[tuple[str, str]]:
        did_not_run = "not run" if self._values is not None or self.asked_by == "plan" else None
        uncompiled = ", of the loops uncompiled" * self.predicted_uncompiled
        table = [
            ("predicted peak", readable(self.predicted_peak_bytes) + uncompiled),
            ("measured peak", _size(self.measured_peak_bytes, did_not_run or "not measured")),
        ]
        if self.plain_peak_bytes is not None:
            table.append(("plain would need", readable(self.plain_peak_bytes)))
        return [
            *table,
            ("held before", readable(self.base_bytes)),
            ("budget", _size(self.budget_bytes, "what is free")),
        ]

    def _work(self) -> list[tuple[str, str]]:
        run = f"{self.n_recorded} of the program"
        if self.n_run:
            run += f", {self.n_run} run over all slices"
        table = [("operators", run)]
        if self.n_run or self.n_recomputed:
            table.append(("computed again", self._again()))
        if self.n_offloaded:
            waiting = f"{self.n_offloaded} values, {readable(self.offloaded_bytes)}"
            table.append(("in host memory", waiting))
        if self.seconds is not None:
            table.append(("time", _time(self.seconds)))
        return table

    def _again(self) -> str:
        more = round(100 * (self.replay_ratio - 1))
        text = f"+{more} % work" if more > 0 else "nothing"
        if self.n_recomputed:
            text += f", {self.n_recomputed} results that were dropped"
        return text

    def _batch(self) -> str:
        cut = cut_in_words(self)
        if self.n_fewest < self.n_micro_batches:
            cut += f"; {self.n_fewest} would fit, more for speed"
        if self.n_aside:
            since = "1 step" if self.n_aside == 1 else f"{self.n_aside:,} steps"
            cut += f"; stepped aside, plain PyTorch since {since}"
        return cut

    def _head(self) -> list[tuple[str, str]]:
        table = [("batch", self._batch()), *self._peaks(), *self._work()]
        if self.fit is not None:
            margin = (
                f", {readable(self.fit['margin_bytes'])} kept free"
                if self.fit["margin_bytes"]
                else ""
            )
            reserved = f"{readable(self.fit['peak_reserved'])}{margin}"
            if not self.fit["fits"]:
                reserved = f"does not fit by the allocator's model{margin}; tried all the same"
            table.append(("reserved", reserved))
        if self.n_reads:
            table.append(("values read before", f"{self.n_reads} runs"))
        return table + ([("retries", str(self.retries))] if self.retries else [])

    def _tables(self) -> list[_Table]:
        loops = [
            (str(i), str(p.n_slices), f"{p.n_nodes}{', compiled' * p.compiled}", str(p.n_targets))
            + (readable(p.peak_bytes), p.ends_for, in_short(p.ends_at))
            for i, p in enumerate(self.loops)
        ]
        gathers = [
            (readable(g.n_bytes), _typed(g.dtype, g.shape), g.operator, in_short(g.line, g.module))
            for g in self.gathers
        ]
        largest = [
            (readable(t.n_bytes), t.held, _typed(t.dtype, t.held_shape))
            + (
                (_typed(t.dtype, t.shape), readable(t.whole_bytes))
                if t.held != "whole"
                else ("", "")
            )
            + (t.operator, in_short(t.line, t.module))
            for t in self.largest[:10]
        ]
        return [
            _Table(
                "loops over the slices",
                ("", "slices", "operators each", "made whole", "peak", "ends for", "line"),
                loops,
                "made whole: values that a slice adds to, or joins, so that they are whole when "
                "the loop ends; the next loop begins where an operator needs one of them",
            ),
            _Table(
                "gathered (an operator needs it whole)",
                ("bytes", "tensor", "operator", "line"),
                gathers,
                "",
            ),
            _Table(
                "largest at the peak",
                ("bytes", "held", "shape", "whole", "its bytes", "operator", "line"),
                largest,
                "",
            ).without_empty_columns(),
        ]

    def __str__(self) -> str:
        head = self._head()
        width = max(len(k) for k, _ in head)
        lines = [f"{k:<{width}}  {v}" for k, v in head]
        for t in self._tables():
            if t.rows:
                lines += ["", t.title, *_pages.columns(t.names, t.rows)]
                lines += [f"  ({t.note})"] if t.note and len(t.rows) > 1 else []
        for instead in dict.fromkeys(g.instead for g in self.gathers):
            lines += ["", instead] if instead else []
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<koila.Plan: {self._head()[0][1]}, peak {readable(self.predicted_peak_bytes)}>"

    def _body(self) -> list[str]:
        parts = [_pages.facts(self._head()), _pages.heading("memory over the step")]
        along = "operators of the step, in the order in which they run"
        parts.append(_pages.curve(self.curve, readable, along, self.budget_bytes))
        for t in self._tables():
            if t.rows:
                parts += [_pages.heading(t.title), _pages.table(t.names, t.rows)]
                parts += [_pages.note(t.note)] if t.note and len(t.rows) > 1 else []
        return parts

    def _repr_html_(self) -> str:
        return _pages.fragment(self._body())

    # ---- as data and files

    def to_dict(self) -> dict[str, Any]:
        """All attributes as JSON has them: lists, dicts, numbers, texts. Bytes and seconds are
        numbers; `loops`, `gathers` and `largest` are lists of dicts with their attributes."""
        out: dict[str, Any] = {name: getattr(self, name) for name in Plan.__annotations__}
        out["axis"] = None if self.axis is None else self.axis._asdict()
        out["loops"] = [loop._asdict() for loop in self.loops]
        out["gathers"] = [
            {**g._asdict(), "dtype": g.dtype, "module": g.module} for g in self.gathers
        ]
        out["largest"] = [t._asdict() for t in self.largest]
        out["curve"] = [list(point) for point in self.curve]
        return out

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan. `*.html`: one self-contained page; `*.json`: `to_dict()`; `*.kgraph`: the
        recorded step, for the `koila` command; `*.txt`: the table.

        Raises:
            ValueError: another ending, or a `.kgraph` of a step that is no longer there.
        """
        path = os.fspath(path)
        ending = os.path.splitext(path)[1]
        if ending == ".kgraph":
            self._save_graph(path)
        elif ending == ".html":
            _write(path, _pages.page("koila: a step's memory", self._body()))
        elif ending == ".json":
            _write(path, json.dumps(self.to_dict(), indent=1) + "\n")
        elif ending == ".txt":
            _write(path, f"{self}\n")
        else:
            raise ValueError(
                f"Plan.save({path!r}): expected a name that ends in .html, .json, .kgraph or .txt, "
                f"got {ending or 'no ending'!r}"
            )

    def _save_graph(self, path: str) -> None:
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


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as f:
        f.write(text)


class Plans(list[Plan]):
    """What `plans()` returns: a list that shows itself as a table."""

    _NAMES = ("asked by", "at", "batch", "peak", "measured", "time")

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                p.asked_by,
                in_short(p.asked_at),
                cut_in_words(p),
                readable(p.predicted_peak_bytes),
                _size(p.measured_peak_bytes, ""),
                "" if p.seconds is None else _time(p.seconds),
            )
            for p in self
        ]

    def __str__(self) -> str:
        return "\n".join(_pages.columns(self._NAMES, self._rows())) if self else "no plans"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return _pages.fragment([_pages.table(self._NAMES, self._rows())])


# ---- asking


def last_plan() -> Plan | None:
    """The plan of the last step that ran a backward, in this thread or asyncio task; `None` before
    the first step.

    A value that is read in the middle of a step, an evaluation and `koila.plan()` do not hide it;
    `plans()` has theirs. Where no backward has run since the settings were changed (`budget`,
    `micro_batch`, `strict`), it is the plan of what ran last. Of a step in which koila has stepped
    aside (see `lazy()`) it is the plan of the recorded step that it is like, and `n_aside` is not
    0.

    Example:
        >>> F.cross_entropy(model(lazy(images)), labels).backward()
        >>> last_plan().n_micro_batches, last_plan().asked_by
        (1, 'backward')
    """
    raw = _core.last_plan()
    return None if raw is None else Plan(raw)


_MOST_PLANS = 16


def plans() -> Plans:
    """The plans of the last 16 runs of this thread or asyncio task, the newest last. `asked_by` and
    `asked_at` say what asked for each: a backward, a value that was read, `koila.plan()`.

    Example:
        >>> _ = model(lazy(images)).sum().item()
        >>> plans()[-1].asked_by
        'item'
    """
    return Plans(Plan(raw) for raw in _core.plans(_MOST_PLANS))


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
    backward. Runs nothing. Of plain tensors of a step in which koila has stepped aside (see
    `lazy()`): the plan of the recorded step that it is like.

    Returns:
        A `Plan`; print it: it names the largest tensors by line.

    Raises:
        ValueError: nothing lazy was given.

    Example:
        >>> with micro_batch(4):
        ...     explain(F.cross_entropy(model(lazy(images)), labels)).n_micro_batches
        3
    """
    refuse_when_off(f"explain(<{len(values)} value{'' if len(values) == 1 else 's'}>)")
    lazies: list[torch.Tensor] = []
    n_plain = 0

    def look(t: torch.Tensor, _dim: Any, _where: str) -> torch.Tensor:
        nonlocal n_plain
        if _core.is_lazy(t):
            lazies.append(t)
        n_plain += not _core.is_lazy(t)
        return t

    tree_map(look, values)
    if not lazies and n_plain and _core.is_aside():
        return Plan(_core.last_plan() or {})
    if not lazies:
        kinds = ", ".join(type(v).__name__ for v in values) or "nothing"
        raise ValueError(
            f"explain(<{len(values)} value{'' if len(values) == 1 else 's'}>): expected a lazy "
            f"value, got {kinds}"
        )
    return Plan(_core.explain(_step_of(lazies)), lazies)

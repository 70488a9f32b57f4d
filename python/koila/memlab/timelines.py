"""timeline: memory over time by source line, and its owners at the peak."""

from __future__ import annotations

import csv
import io
import json
import os
import pickle
import sys
from collections.abc import Sequence
from typing import Any

from .. import _cells, _core, _pages
from . import control, devices, tensors, utils
from .snapshots import module_of, summed

FORMATS = {
    ".txt": "text",
    ".html": "html",
    ".json": "json",
    ".csv": "csv",
    ".pickle": "pickle",
    ".pkl": "pickle",
}


class timeline:
    """Record every allocator event of one device in the `with` block, with its line and module.
    Only one timeline records at a time.

    model: a Module or a dict of them, whose submodules and parameters give names; optimizers:
    likewise. device: as for `measure`.
    limit: the number of events kept, 32 bytes each. Later ones are counted in `.n_lost` and are in
    no other number.

    After the block: `.start .peak .end` (bytes), `.n_events`; at the peak `.at_peak` [{name, kind,
    bytes, line, module, stack}] (stack: the program's lines, the outermost first), `.by_kind()
    .by_module() .by_line()`; `.curve()`; `str()`; `.save(path)`: .txt .html .json .csv, and
    .pickle, which PyTorch's memory viewer opens.

    A block freed before the end has the kind "gone": its line and module are known, its name is
    not.

    Raises:
        UnsupportedError: this device does not report every event, see `backend()`.
        RuntimeError: another timeline is recording.

    >>> with timeline(model) as t:
    ...     step()
    >>> t.save("step.html")
    """

    def __init__(
        self,
        model: tensors.Models = None,
        optimizers: tensors.Optimizer | Sequence[tensors.Optimizer] = (),
        device: devices.Device | None = None,
        limit: int = 4_000_000,
    ) -> None:
        self._names = tensors.Names(
            tensors.check_models(model, "timeline(model)"),
            tensors.check_optimizers(optimizers, "timeline(optimizers)"),
        )
        self._models: dict[str, Any] = (
            model if isinstance(model, dict) else {} if model is None else {"": model}
        )
        self._device = (
            devices.current() if device is None else devices.resolve(device, "timeline(device)")
        )
        self._limit = limit
        self._is_over = False
        self._record: _core.Timeline | None = None
        self.at_peak: list[dict[str, Any]] = []

    def __enter__(self) -> timeline:
        control.check_hooked(self._device, "timeline")
        record = _core.Timeline(self._device, self._limit)
        self._was_tracing = _core.memlab_tracing()
        if self._device == 0:
            _core.memlab_trace(True)  # without lines if they cannot be known
        torch = sys.modules.get("torch")
        held = tensors.blocks_of(self._device) if self._device else []
        record.begin(
            torch.nn.Module if torch is not None else None,
            [(address, n) for address, n, state in held if state == "active_allocated"],
        )
        self._record = record
        return self

    def __exit__(self, *exc: object) -> None:
        record = self._over()
        record.end()
        self._is_over = True
        if not self._was_tracing:
            _core.memlab_trace(False)
        modules = {
            id(m): f"{prefix}.{name}".strip(".") or "the model"
            for prefix, model in self._models.items()
            for name, m in model.named_modules()
        }
        self._models = {}
        rows: dict[int, tensors.Row] = {}
        for r in self._names.collect():
            if r[tensors.DEVICE] == devices.name(self._device) and r[tensors.BYTES] > 0:
                rows.setdefault(r[tensors.DATA], r)
        for address, n, site, module, _, stays, callers in record.at_peak():
            row = rows.get(address) if stays else None
            lines = [f"{_cells.file_shown(f)}:{at}" for f, at in ([site] if site else []) + callers]
            line = lines[0] if lines else None
            name, kind = (
                (str(row[tensors.NAME]), str(row[tensors.KIND]))
                if row
                else (None, "block" if stays else "gone")
            )
            owner = (
                module_of(name, kind)
                if name is not None and kind in {"parameter", "buffer", "grad", "optimizer"}
                else None
            )
            where = modules.get(module) if owner is None else owner or "the model"
            self.at_peak.append(
                dict(name=name, kind=kind, bytes=n, line=line, module=where)
                | {"stack": lines[::-1]}
            )
        self.at_peak.sort(key=lambda row: -row["bytes"])

    @property
    def start(self) -> int:
        return self._over().start

    @property
    def peak(self) -> int:
        return self._over().peak

    @property
    def end(self) -> int:
        return self._over().end_bytes

    @property
    def n_events(self) -> int:
        return self._over().n_events

    @property
    def n_lost(self) -> int:
        return self._over().n_lost

    def _over(self) -> _core.Timeline:
        if self._record is None:
            raise RuntimeError("timeline: nothing was recorded; use it as a context manager")
        return self._record

    def curve(self) -> list[tuple[float, int]]:
        """[(seconds since the beginning, bytes held from then on)]: `.start`, then each event."""
        record = self._over()
        events = record.events()
        held = self.start
        points = [(0.0, held)]
        for _, change, _, ns in events[len(events) - record.n_events :]:  # not what was held before
            held += change
            points.append((ns * 1e-9, held))
        return points

    def by_kind(self) -> dict[str, int]:
        """{kind: bytes} at the peak, largest first."""
        return summed((r["kind"], r["bytes"]) for r in self.at_peak)

    def by_module(self) -> dict[str | None, int]:
        """{module path: bytes} at the peak; None: allocated outside the model."""
        return summed((r["module"], r["bytes"]) for r in self.at_peak)

    def by_line(self) -> dict[str | None, int]:
        """{'file:line': bytes} at the peak; None: the line is not known."""
        return summed((r["line"], r["bytes"]) for r in self.at_peak)

    def __repr__(self) -> str:
        if self._record is None or not self._is_over:
            return f"<koila.memlab.timeline of {devices.name(self._device)}: not over>"
        return f"<koila.memlab.timeline of {devices.name(self._device)}: {self._first_line()}>"

    def _repr_html_(self) -> str | None:
        return _pages.fragment(self._body()) if self._is_over else None

    def to_dict(self) -> dict[str, Any]:
        """All numbers as JSON has them; `save("*.json")` writes them."""
        numbers: dict[str, Any] = dict(
            start=self.start,
            peak=self.peak,
            end=self.end,
            n_events=self.n_events,
            n_lost=self.n_lost,
        )
        for title, table in self._tables():
            numbers[f"by_{title}"] = {str(k): n for k, n in table.items()}
        return {**numbers, "at_peak": self.at_peak}

    def _tables(self) -> list[tuple[str, dict[Any, int]]]:
        return [("kind", self.by_kind()), ("module", self.by_module()), ("line", self.by_line())]

    def _first_line(self) -> str:
        return (
            f"highest {utils.readable_size(self.peak)}, at the beginning "
            f"{utils.readable_size(self.start)}, at the end {utils.readable_size(self.end)}, "
            f"{self.n_events} events"
            + (f", {self.n_lost} later ones not recorded" if self.n_lost else "")
        )

    def __str__(self) -> str:
        self._over()
        out = [f"{self._first_line()}\n"]
        for title, table in self._tables():
            out.append(f"\nat the peak, by {title}\n")
            out += [
                f"{utils.readable_size(n):>12s}  {'not known' if key is None else key}\n"
                for key, n in table.items()
            ]
        return "".join(out)

    def save(self, path: utils.Path) -> None:
        """Write to a .txt, .html, .json, .csv or .pickle file."""
        format = utils.format_of(path, FORMATS)
        if format == "pickle":
            with open(path, "wb") as f:
                pickle.dump(self._viewer_data(), f, protocol=4)
            return
        utils.write(path, getattr(self, f"_as_{format}")())

    def _as_text(self) -> str:
        return str(self)

    def _as_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    def _as_csv(self) -> str:
        buffer = io.StringIO()
        columns = ("name", "kind", "bytes", "line", "module")
        writer = csv.DictWriter(buffer, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(self.at_peak)
        return buffer.getvalue()

    def _as_html(self) -> str:
        return _pages.page("Memory over time", self._body())

    def _body(self) -> list[str]:
        parts = [_cells.cells_in(self._over().body())]
        stacks = [(r["stack"] or ["line not known"], r["bytes"]) for r in self.at_peak]
        parts.append(_pages.heading("At the peak, by call stack"))
        parts.append(_pages.flames(stacks, utils.readable_size))
        for title, table in self._tables()[:2]:
            rows = [
                (utils.readable_size(n), "not known" if key is None else str(key))
                for key, n in table.items()
            ]
            parts += [_pages.heading(f"By {title}"), _pages.table(("bytes", title), rows)]
        return parts

    def _viewer_data(self) -> dict[str, Any]:
        """The dictionary that torch.cuda.memory._snapshot() gives: one trace of allocations and
        frees, with frames."""
        frames: dict[Any, list[dict[str, Any]]] = {None: []}
        trace: list[dict[str, Any]] = []
        for address, n, site, ns in self._over().events():
            if site is not None and site not in frames:
                frames[site] = [
                    dict(filename=site[0], line=site[1], name=os.path.basename(site[0]))
                ]
            event = dict(
                addr=address, size=abs(n), stream=0, time_us=ns // 1000, frames=frames[site]
            )
            for action in ("alloc",) if n > 0 else ("free_requested", "free_completed"):
                trace.append({"action": action, **event})
        return {
            "segments": [],
            "device_traces": [trace],
            "external_annotations": [],
            "allocator_settings": {},
        }

"""snapshot and diff: the contents of memory at one moment, and the changes between two."""

from __future__ import annotations

import bisect
import csv
import io
import json
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from .. import _cells, _core, _pages
from . import devices, tensors, utils

Key = TypeVar("Key")


class Row(NamedTuple):
    """One tensor, or one block without a tensor. bytes: of its storage, 0 if another row has it;
    line: 'file:line' under start(trace=True)."""

    name: str
    aliases: tuple[str, ...]
    kind: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    bytes: int
    storage_bytes: int
    offset: int
    shared_with: str | None
    node: str | None
    line: str | None


_names = tensors.Names()  # numbers anonymous tensors, one series for the process


class Snapshot:
    """The tensors and blocks of one moment; holds no tensor. `.rows`, `.by_kind()`, `.by_module()`,
    `.total(device)`, `.save(path)`, `str()`; `.annotate(recorded)` writes the names into a memory
    snapshot of PyTorch's."""

    def __init__(self, names: tensors.Names) -> None:
        self.pid = os.getpid()
        self.rows: list[Row] = []
        names.numbers, names.counter = _names.numbers, _names.counter
        rows = names.collect(shared_saved=True)
        self.books = {
            d: tensors.books(rows, d)
            for d in {r[tensors.DEVICE] for r in rows} | {"cpu"}
            if d == "cpu" or ":" in d
        }
        aliases = _aliases(names)
        for r in rows:
            name, kind = r[tensors.NAME], r[tensors.KIND]
            site = (
                _core.memlab_site(r[tensors.DATA])
                if r[tensors.DEVICE] == "cpu" and r[tensors.DATA]
                else None
            )
            node = name.partition(".")[0] if kind == "saved" else None
            line = f"{_cells.file_shown(site[0])}:{site[1]}" if site else None
            self.rows.append(
                Row(name, aliases.get(name, ()), kind, r[tensors.SHAPE], r[tensors.DTYPE],
                    r[tensors.DEVICE], max(r[tensors.BYTES], 0), r[tensors.STORAGE_BYTES],
                    r[tensors.OFFSET], r[tensors.FIRST], node, line)
            )  # fmt: skip
        self._at = [
            (r[tensors.DEVICE], r[tensors.DATA], r[tensors.NAME], r[tensors.KIND])
            for r in rows
            if r[tensors.BYTES] > 0
        ]
        found = {r[tensors.DATA] for r in rows}
        for i, (address, n, site) in enumerate(
            b for b in _core.memlab_blocks() if b[0] not in found
        ):
            line = f"{_cells.file_shown(site[0])}:{site[1]}" if site else None
            self.rows.append(
                Row(f"block{i}", (), "block", (), "", "cpu", n, n, 0, None, None, line)
            )

    def by_kind(self) -> dict[str, int]:
        """{kind: bytes}, largest first."""
        return summed((r.kind, r.bytes) for r in self.rows)

    def by_module(self) -> dict[str, int]:
        """{module path: bytes of its parameters, gradients, buffers and optimizer states}; '' is
        the model itself."""
        return summed(
            (module_of(r.name, r.kind), r.bytes)
            for r in self.rows
            if r.kind in {"parameter", "buffer", "grad", "optimizer"}
        )

    def total(self, device: devices.Device | None = None) -> int:
        """Bytes of all storages listed, on one device or on all."""
        wanted = (
            None
            if device is None
            else devices.name(devices.resolve(device, "Snapshot.total(device)"))
        )
        return sum(r.bytes for r in self.rows if wanted is None or r.device == wanted)

    def annotate(self, recorded: dict[str, Any]) -> dict[str, Any]:
        """Write names into `recorded`, the result of `torch.cuda.memory._snapshot()` of the same
        moment. It is changed and returned.

        A block that holds one of our rows, and its allocation, get a first frame with the row's
        name and kind. PyTorch's memory viewer and `koila report` show it in place of the line.

        >>> recorded = snapshot(model, optimizer).annotate(torch.cuda.memory._snapshot())
        >>> pickle.dump(recorded, open("named.pickle", "wb"))
        """
        if not isinstance(recorded, dict) or "segments" not in recorded:
            raise TypeError(
                "Snapshot.annotate: expected the dict of torch.cuda.memory._snapshot(), got "
                f"{type(recorded).__name__}"
            )
        places: dict[str, list[tuple[int, str]]] = {}
        for device, address, name, kind in self._at:
            places.setdefault(device, []).append((address, f"{name} ({kind})"))
        for found in places.values():
            found.sort()
        names: dict[tuple[int, int], str] = {}  # (device, address of a block) -> what stands in it
        for segment in recorded["segments"]:
            at, index = segment["address"], segment.get("device", 0)
            found = places.get(f"{_core.memlab_devices()[0] or 'cuda'}:{index}", [])
            for block in segment["blocks"]:
                at = block.get("address", at)
                here = found[
                    bisect.bisect_left(found, (at, "")) : bisect.bisect_left(
                        found, (at + block["size"], "")
                    )
                ]
                if here and block.get("state", "active_allocated") == "active_allocated":
                    names[index, at] = ", ".join(name for _, name in here)
                    _name_first(block, names[index, at])
                at += block["size"]
        for index, trace in enumerate(recorded.get("device_traces", [])):
            for event in reversed(trace):  # the newest allocation of an address is the live one
                if event["action"] == "alloc" and (index, event["addr"]) in names:
                    _name_first(event, names.pop((index, event["addr"])))
        return recorded

    def __sub__(self, other: Snapshot) -> Diff:
        return diff(other, self)

    def __str__(self) -> str:
        out = [f"{'Name':<40s}{'Kind':>10s}{'Size':>20s}{'Bytes':>10s}  Line\n"]
        for r in sorted(self.rows, key=lambda r: -r.bytes):
            line = f"{r.name:<40s}{r.kind:>10s}{str(r.shape):>20s}"
            line += f"{utils.readable_size(r.bytes):>10s}  {r.line or ''}"
            out.append(line.rstrip() + "\n")
        out += [f"{kind:<70s}{utils.readable_size(n):>10s}\n" for kind, n in self.by_kind().items()]
        return "".join(out)

    def __repr__(self) -> str:
        kinds = ", ".join(f"{k} {utils.readable_size(n)}" for k, n in self.by_kind().items())
        return f"<koila.memlab.Snapshot: {utils.readable_size(self.total())}; {kinds}>"

    def _repr_html_(self) -> str:
        return _pages.fragment(self._body())

    def _body(self) -> list[str]:
        kinds = [(k, utils.readable_size(n)) for k, n in self.by_kind().items()]
        rows = [
            (utils.readable_size(r.bytes), r.name, r.kind, f"{r.dtype}{list(r.shape)}")
            + (r.device, ", ".join(r.aliases) or r.shared_with or "", r.line or "")
            for r in sorted(self.rows, key=lambda r: -r.bytes)
        ]
        names = ("bytes", "name", "kind", "tensor", "device", "also known as", "line")
        return [
            _pages.facts([("in all", utils.readable_size(self.total())), *kinds]),
            _pages.heading("tensors and blocks"),
            _pages.table(names, rows),
        ]

    def to_dict(self) -> dict[str, Any]:
        """What `save("*.json")` writes: `pid`, `by_kind` and `rows`."""
        rows = [r._asdict() for r in self.rows]
        return {"pid": self.pid, "by_kind": self.by_kind(), "rows": rows}

    def save(self, path: utils.Path) -> None:
        """Write to a .txt, .html, .json or .csv file."""
        format = utils.format_of(path)
        if format == "text":
            text = str(self)
        elif format == "json":
            text = json.dumps(self.to_dict(), default=str, indent=1)
        elif format == "csv":
            buffer = io.StringIO()
            writer = csv.writer(buffer)
            writer.writerow(Row._fields)
            writer.writerows(self.rows)
            text = buffer.getvalue()
        else:
            text = _pages.page("koila.memlab: what memory holds", self._body())
        utils.write(path, text)


def _name_first(entry: dict[str, Any], name: str) -> None:
    entry["frames"] = [dict(filename="koila.memlab", line=0, name=name), *entry.get("frames", [])]


def summed(pairs: Iterable[tuple[Key, int]]) -> dict[Key, int]:
    total: dict[Key, int] = {}
    for key, n in pairs:
        total[key] = total.get(key, 0) + n
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def module_of(name: str, kind: str) -> str:
    """The path of the module that a parameter, gradient, buffer or optimizer state belongs to, by
    its name; '' is the model itself."""
    if kind == "optimizer":
        name = name.partition(".")[2].rpartition(".")[0]
    if kind == "grad":
        name = name.rpartition(".")[0]
    return name.rpartition(".")[0]


def _aliases(names: tensors.Names) -> dict[str, tuple[str, ...]]:
    """{first name: the other names} of tied parameters and buffers."""
    first: dict[int, str] = {}
    others: dict[str, tuple[str, ...]] = {}
    for prefix, ref in names.models:
        model = ref()
        if model is None:
            continue
        for name, p in [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]:
            known = first.setdefault(id(p), prefix + name)
            if known != prefix + name:
                others[known] = (*others.get(known, ()), prefix + name)
    return others


def snapshot(
    model: tensors.Models = None, optimizers: tensors.Optimizer | Sequence[tensors.Optimizer] = ()
) -> Snapshot:
    """The contents of memory now. model: a Module or a dict of them; optimizers: give names to
    their states.

    >>> snapshot(model, optimizer).by_kind()["parameter"]
    268
    """
    call = "snapshot(model)"
    return Snapshot(
        tensors.Names(
            tensors.check_models(model, call),
            tensors.check_optimizers(optimizers, "snapshot(optimizers)"),
        )
    )


_Changes = list[tuple[str, int]]
_BY_NAME_ONLY = "snapshots of different processes: compared by name only"


class Diff:
    """The changes: `.new`, `.gone`, `.grown` as [(name, bytes)] (bytes signed), `.total`, `str()`.
    `.by_name_only`: the snapshots are from different processes."""

    def __init__(
        self, new: _Changes, gone: _Changes, grown: _Changes, by_name_only: bool = False
    ) -> None:
        def order(pairs: _Changes) -> _Changes:
            return sorted(pairs, key=lambda pair: -abs(pair[1]))

        self.new, self.gone, self.grown, self.by_name_only = (
            order(new),
            order(gone),
            order(grown),
            by_name_only,
        )
        self.total = sum(n for pairs in (new, gone, grown) for _, n in pairs)

    def __str__(self) -> str:
        out = [f"{_BY_NAME_ONLY}\n"] if self.by_name_only else []
        for title, pairs in (("new", self.new), ("gone", self.gone), ("grown", self.grown)):
            out += [f"{title:<6s}{name:<60s}{utils.readable_size(n):>12s}\n" for name, n in pairs]
        return "".join(out) + f"{'total':<66s}{utils.readable_size(self.total):>12s}\n"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [
            (change, name, utils.readable_size(n))
            for change, pairs in (("new", self.new), ("gone", self.gone), ("grown", self.grown))
            for name, n in pairs
        ]
        rows.append(("total", "", utils.readable_size(self.total)))
        notes = [_pages.note(_BY_NAME_ONLY)] if self.by_name_only else []
        return _pages.fragment([*notes, _pages.table(("", "name", "bytes"), rows)])


def diff(a: Snapshot | list[dict[str, Any]], b: Snapshot | list[dict[str, Any]]) -> Diff:
    """From a to b: two Snapshots, or two `records()` of a line profiler (then a line's bytes are
    its peak).

    >>> before = snapshot(model)
    >>> kept = torch.ones(1000, 1000)
    >>> "3.81M" in str(diff(before, snapshot(model)))
    True
    """
    if isinstance(a, Snapshot) and isinstance(b, Snapshot):
        before, after = _bytes_by_name(a), _bytes_by_name(b)
        other = a.pid != b.pid
    elif isinstance(a, list) and isinstance(b, list):
        before, after, other = _bytes_by_line(a), _bytes_by_line(b), False
    else:
        raise TypeError(
            f"diff: expected two Snapshots or two records(), got {type(a).__name__} and "
            f"{type(b).__name__}"
        )
    return compare(before, after, other)


def compare(before: dict[str, int], after: dict[str, int], by_name_only: bool) -> Diff:
    """From one {name: bytes} to another."""
    return Diff(
        [(k, n) for k, n in after.items() if k not in before],
        [(k, -n) for k, n in before.items() if k not in after],
        [(k, n - before[k]) for k, n in after.items() if k in before and n != before[k]],
        by_name_only,
    )


def _bytes_by_name(s: Snapshot) -> dict[str, int]:
    return bytes_by_name((r.name, r.kind, r.bytes, r.line) for r in s.rows)


def bytes_by_name(rows: Iterable[tuple[str, str, int, str | None]]) -> dict[str, int]:
    """rows: (name, kind, bytes, line). Blocks without a tensor have no lasting name: they are
    summed by line."""
    return summed(
        (
            name
            if kind != "block"
            else f"blocks without a tensor{f' from {line}' if line else ''}",
            n,
        )
        for name, kind, n, line in rows
    )


def _bytes_by_line(records: list[dict[str, Any]]) -> dict[str, int]:
    return {
        f"{r['function']} ({r['file']}:{r['line']})": r["active_bytes.all.peak"]
        for r in records
        if r.get("active_bytes.all.peak") is not None
    }

"""on_oom: what filled the memory when it ran out. The exception is raised on, unchanged."""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
from types import TracebackType
from typing import Any, Literal, TextIO

from .. import _cells, _core
from . import tensors, utils


class on_oom(contextlib.ContextDecorator):
    """Report when memory runs out inside. The same exception is raised on.

    Printed: the request and its line, the largest storages with names, totals by kind, and the
    bytes that no tensor explains. Names come from the models that the garbage collector knows and
    from local variables of the frames in the traceback.

    top: the number of storages. stream: where to print; None: sys.stderr at that moment. Allocates
    nothing on the device and changes no state of the allocator.

    >>> with on_oom():
    ...     step()
    """

    def __new__(cls, top: Any = 20, stream: TextIO | None = None) -> Any:
        return cls()(top) if callable(top) else super().__new__(cls)  # @on_oom without brackets

    def __init__(self, top: int = 20, stream: TextIO | None = None) -> None:
        self.top, self.stream = top, stream

    def __repr__(self) -> str:
        return f"<koila.memlab.on_oom: the {self.top} largest>"

    def __enter__(self) -> on_oom:
        tensors.ready()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> Literal[False]:
        if error is None or getattr(error, "_koila_autopsy", False):
            return False
        if not _core.is_out_of_memory(error):
            return False
        stream = sys.stderr if self.stream is None else self.stream
        try:
            error._koila_autopsy = True  # type: ignore[attr-defined]  # the innermost on_oom speaks
            stream.write(autopsy(error, where, self.top))
        except Exception as trouble:  # never in the way of the user's exception
            with contextlib.suppress(Exception):
                stream.write(f"koila.memlab.on_oom: {type(trouble).__name__}: {trouble}\n")
        return False


def autopsy(error: BaseException, where: TracebackType | None, top: int) -> str:
    """The text of on_oom."""
    asked = re.search(r"(?:tried to allocate|Tried to allocate) ([0-9.]+ ?\w+)", str(error))
    out = [f"Out of memory: asked for {asked.group(1) if asked else '?'}\n"]
    user = [f for f in traceback.extract_tb(where) if not f.filename.startswith(_cells.library())]
    if user:
        out.append(
            f"at {_cells.file_shown(user[-1].filename)}:{user[-1].lineno}: {user[-1].line or ''}\n"
        )
    rows = tensors.names_around().collect()
    local_names = _local_names(where)
    largest = sorted((r for r in rows if r[tensors.BYTES] > 0), key=lambda r: -r[tensors.BYTES])
    out.append(f"\n{'Largest storages':<40s}{'Size':>20s}{'Used MEM':>10s}\n")
    for r in largest[:top]:
        names = local_names.get(r[tensors.STORAGE])
        size = str(r[tensors.SHAPE] or (1,))
        out.append(
            f"{r[tensors.NAME]:<40s}{size:>20s}{utils.readable_size(r[tensors.BYTES]):>10s}  "
            f"{r[tensors.DEVICE]}"
        )
        site = _core.memlab_site(r[tensors.DATA])
        known_as = "  " + ", ".join(names) if names else ""
        out.append(known_as + (f"  {_cells.file_shown(site[0])}:{site[1]}\n" if site else "\n"))
    totals: dict[tuple[str, str], int] = {}
    for r in rows:
        if r[tensors.BYTES] > 0:
            key = (r[tensors.DEVICE], r[tensors.KIND])
            totals[key] = totals.get(key, 0) + r[tensors.BYTES]
    out.append("\n")
    for (device, kind), n in sorted(totals.items(), key=lambda item: -item[1]):
        out.append(f"{device} {kind:<20s}{utils.readable_size(n):>10s}\n")
    for device in sorted({d for d, _ in totals} - {"meta"}):
        b = tensors.books(rows, device)
        out.append(
            f"{device} allocated {utils.readable_size(b['truth'])}, not held by a tensor found "
            f"{utils.readable_size(b['loose'][0])}, "
        )
        out.append(f"unexplained {utils.readable_size(b['unexplained'])}\n")
    return "".join(out)


def _local_names(where: TracebackType | None) -> dict[int, list[str]]:
    """{storage: ["function: variable"]} of the frames in a traceback."""
    torch = sys.modules["torch"]
    found: dict[int, list[str]] = {}
    while where is not None:
        frame = where.tb_frame
        for name, value in list(frame.f_locals.items()):
            if issubclass(type(value), torch.Tensor) and torch._C._has_storage(value):
                found.setdefault(torch._C._storage_address(value), []).append(
                    f"{frame.f_code.co_name}: {name}"
                )
        where = where.tb_next
    return found

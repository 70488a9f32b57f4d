"""MemReporter: which tensors fill each device now, under which names, and what the rest is."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

from .. import _core
from . import devices, tensors, utils
from .snapshots import Snapshot
from .tensors import BYTES, DEVICE, FIRST, NAME, NUMEL, SHAPE

_RULE = "-" * 79
_HEADER = f"{'Element type':<40s}{'Size':>20s}{'Used MEM':>10s}\n{_RULE}\n"


def readable_size(num_bytes: object) -> str:
    return utils.readable_size(num_bytes)


def _unit(device: str) -> int:
    """The bytes to whose multiple the device's allocator rounds."""
    return 1 if device in {"cpu", "meta"} else 512


class MemReporter:
    """List every tensor with its storage's bytes, and account for the rest of the allocator's
    bytes.

    model: a Module, or a dict of them; gives names to parameters and buffers. pre_collect: call
    gc.collect() first. Holds weak references only, and never keeps memory alive.

    >>> reporter = MemReporter(model)
    >>> reporter.report()
    Element type                                            Size  Used MEM
    ...
    0.weight                                              (8, 4)   128.00B
    ...
    """

    def __init__(self, model: tensors.Models = None, pre_collect: bool = False) -> None:
        self._names = tensors.Names(tensors.check_models(model, "MemReporter(model)"))
        self._pre_collect = pre_collect
        self._rows: list[tensors.Row] = []
        self._books: dict[str, dict[str, Any]] = {}
        self.device_tensor_stat: dict[Any, list[tuple[str, tuple[int, ...], int, int]]] = {}
        self._looked = False  # what is empty may have been looked at all the same

    def add_optimizer(self, optimizer: tensors.Optimizer) -> None:
        """Name this optimizer's states, before or after its first step."""
        ref = tensors.check_optimizer(optimizer, "MemReporter.add_optimizer")
        if not any(r() is optimizer for r in self._names.optimizers):
            self._names.optimizers.append(ref)

    def collect_tensor(self) -> None:
        """Collect the tensors that exist now."""
        if self._pre_collect:
            gc.collect()
        self._rows = self._names.collect(shared_saved=True)
        counted = {devices.name(i) for i in range(1 + _core.memlab_devices()[1])}
        self._books = {
            d: tensors.books(self._rows, d) for d in {r[DEVICE] for r in self._rows} & counted
        }

    def get_stats(self) -> None:
        """Group the collected tensors by device, into `device_tensor_stat`: {torch.device: [(name,
        size, numel, bytes)]}."""
        torch = sys.modules.get("torch")
        self.device_tensor_stat = {}
        self._looked = True
        for row in self._listed():
            n = -(-max(row[BYTES], 0) // _unit(row[DEVICE])) * _unit(row[DEVICE])
            self.device_tensor_stat.setdefault(row[DEVICE], []).append(
                (row[NAME], row[SHAPE] or (1,), row[NUMEL], n)
            )
        if torch is not None:
            self.device_tensor_stat = {
                torch.device(d): rows for d, rows in self.device_tensor_stat.items()
            }

    def _listed(self, verbose: bool = False) -> list[tensors.Row]:
        """Rows shown: a saved tensor whose storage is listed already only when verbose."""
        return (
            self._rows
            if verbose
            else [r for r in self._rows if r[tensors.KIND] != "saved" or r[FIRST] is None]
        )

    def print_stats(
        self, verbose: bool = False, target_device: devices.Device | None = None
    ) -> None:
        """Print the collected tensors. verbose: name the row of a shared storage, and list saved
        tensors that share one."""
        sys.stdout.write(self.text(verbose, target_device))

    def text(self, verbose: bool = False, target_device: devices.Device | None = None) -> str:
        parts = [_HEADER]
        wanted = None if target_device is None else self._matching(target_device)
        shown = self._listed(verbose)
        for device in sorted({r[DEVICE] for r in shown}) if self.device_tensor_stat else ():
            if wanted is None or wanted(device):
                parts.append(
                    self._device_text([r for r in shown if r[DEVICE] == device], device, verbose)
                )
        if wanted is not None and len(parts) == 1 and self._looked:
            parts.append(f"No tensors on {target_device}\n")
        return "".join(parts)

    @staticmethod
    def _matching(device: devices.Device) -> Callable[[str], bool]:
        if not isinstance(device, int) or isinstance(device, bool):
            text = str(device)
            if text in {"cuda", "xpu", "meta"}:
                return lambda d: d == text or d.startswith(text + ":")
            if text == "cpu":
                return lambda d: d == "cpu"
        number = devices.resolve(device, "print_stats(target_device)")
        return lambda d: d == devices.name(number)

    def _device_text(self, rows: list[tensors.Row], device: str, verbose: bool) -> str:
        body, elements, used = _core.report_rows(rows, verbose, _unit(device))
        lines = [
            f"Storage on {device}\n",
            body,
            f"{_RULE}\nTotal Tensors: {elements} \tUsed Memory: {readable_size(used)}\n",
        ]
        books = self._books.get(device)
        if books:
            lines.append(f"The allocated memory on {device}: {readable_size(books['truth'])}\n")
            loose_bytes, n = books["loose"]
            if loose_bytes:
                lines.append(
                    f"Not held by a tensor found: {readable_size(loose_bytes)} in {n} "
                    f"block{'s' * (n != 1)}\n"
                )
            for key, title in (
                ("rounding", "Allocator rounding"),
                ("waiting", "Waiting for another stream"),
                ("unexplained", "Unexplained"),
            ):
                if books[key]:
                    lines.append(f"{title}: {readable_size(books[key])}\n")
            if books["borrowed"]:
                lines.append(f"Borrowed memory: {readable_size(books['borrowed'])}\n")
        return "".join(lines) + f"{_RULE}\n"

    def report(self, verbose: bool = False, device: devices.Device | None = None) -> None:
        """collect_tensor(); get_stats(); print_stats(verbose, device)."""
        self.collect_tensor()
        self.get_stats()
        self.print_stats(verbose, device)

    def __repr__(self) -> str:
        state = f"{len(self._rows)} tensors collected" if self._looked else "nothing collected yet"
        return f"<koila.memlab.MemReporter: {state}>"

    def snapshot(self) -> Snapshot:
        """A Snapshot of now, with this reporter's names."""
        return Snapshot(self._names)

"""Courtesy: lend the device's memory for a while. Storages are copied out and emptied in place;
tensors, views and graphs stay as they are."""

from __future__ import annotations

import functools
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from .. import _core, _errors
from . import devices, tensors, utils

if TYPE_CHECKING:
    import torch

_PATIENCE = "koila.memlab.Courtesy: {} was yielded; restore() it first"


class _Away:
    """One storage whose bytes are elsewhere; holds a weak reference to it."""

    def __init__(self, name: str, storage: torch.UntypedStorage, home: _Home) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        self.name, self.n, self.address = name, storage.nbytes(), storage._cdata
        self.ref, self.home = StorageWeakRef(storage), home

    def storage(self) -> Any:
        """The storage, or None if it was freed."""
        torch = sys.modules["torch"]
        return (
            None if self.ref.expired() else torch.UntypedStorage._new_with_weak_ptr(self.ref.cdata)
        )


def _bytes_of(storage: torch.UntypedStorage) -> Any:
    torch = sys.modules["torch"]
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class Courtesy:
    """Give back the memory of all tensors for a while, and restore them later, unchanged.

    device: None: all accelerators; "cpu" moves CPU storages out of PyTorch's memory.
    to: "cpu", "pinned" or a directory.
    optimizers: for names in `.skipped` and in errors.
    `.yield_memory()` -> bytes given back; `.restore()` -> bytes taken again. As a context manager
    it yields on entry and restores on exit. `.yielded`: True while storages are away. `.skipped`:
    [(name, bytes, reason)] of storages that cannot be moved (shared, borrowed, not resizable).

    Values come back bit-equal; aliases, versions, gradients and a graph in flight survive. It is
    all or nothing: on failure everything is as it was. While yielded, an operator on a yielded
    tensor raises RuntimeError on the yielding thread. Reads that bypass the dispatcher
    (`tolist()`, `numpy()`, another thread) are not caught on every version of torch. The
    accelerator's context itself stays.

    Raises:
        ValueError: no such device, or `to` is none of the three.
        UnsupportedError: CUDA graphs are being captured or alive. Nothing was moved.
        MemoryError, OutOfMemory: no room on the host, or on the device at restore; the text says
            how many bytes are missing.

    >>> with Courtesy("cpu", to=".", optimizers=[optimizer]) as lent:
    ...     lent.yielded
    True
    >>> lent.yielded
    False
    """

    def __repr__(self) -> str:
        return f"<koila.memlab.Courtesy: {'memory is given back' if self.yielded else 'at rest'}>"

    def __init__(
        self,
        device: devices.Device | None = None,
        to: utils.Path = "cpu",
        optimizers: Iterable[tensors.Optimizer] = (),
    ) -> None:
        self._to = to
        self._devices: set[str] | None = None
        if device is not None:
            index = devices.resolve(device, "Courtesy(device)")
            if str(device).partition(":")[0] != "cpu" and not devices_there():
                raise ValueError(f"Courtesy(device={device!r}): there is no accelerator")
            self._devices = {devices.name(index)}
        if not isinstance(to, (str, os.PathLike)):
            raise TypeError(f'Courtesy(to={to!r}): expected "cpu", "pinned" or a directory')
        if to not in {"cpu", "pinned"} and not os.path.isdir(to):
            raise ValueError(
                f'Courtesy(to={to!r}): expected "cpu", "pinned" or a directory that exists'
            )
        self._names = tensors.Names(
            optimizers=[tensors.check_optimizer(o, "Courtesy(optimizers)") for o in optimizers]
        )
        self._away: list[_Away] = []
        self._guard: Any = None
        self.skipped: list[tuple[str, int, str]] = []

    @property
    def yielded(self) -> bool:
        return bool(self._away)

    def __enter__(self) -> Courtesy:
        self.yield_memory()
        return self

    def __exit__(self, *exc: object) -> None:
        self.restore()

    def yield_memory(self) -> int:
        torch = sys.modules.get("torch")
        if torch is None or (self._devices is None and not devices_there()):
            return 0
        _refuse_graphs(torch)
        names = tensors.names_around()
        names.optimizers += self._names.optimizers
        self.skipped = []
        moved: list[_Away] = []
        _synchronize(torch)
        try:
            with torch.no_grad():
                for row in names.collect(with_tensors=True):
                    self._yield_one(torch, row, moved)
        except BaseException as error:
            self._bring_back(torch, moved)
            if is_no_memory(error):
                raise MemoryError(
                    "Courtesy.yield_memory: no host memory for "
                    f"{getattr(error, 'n_missing', '?')} bytes; nothing was moved"
                ) from error
            raise
        self._away += moved
        _empty_caches(torch)
        if self._away and self._guard is None:
            self._guard = _guard(self)
            self._guard.__enter__()
        return sum(a.n for a in moved)

    def _yield_one(self, torch: Any, row: tensors.Row, moved: list[_Away]) -> None:
        device = row[tensors.DEVICE]
        if row[tensors.BYTES] <= 0 or (
            device not in self._devices if self._devices is not None else device in {"cpu", "meta"}
        ):
            return
        storage = torch._C.TensorBase.untyped_storage(row[-1])
        reason = (
            "shared between processes"
            if storage.is_shared() and device == "cpu"
            else "not resizable"
            if not storage.resizable()
            else None
        )
        if row[tensors.OWNER] == "borrowed":
            reason = reason or "borrowed memory"
        if reason:
            self.skipped.append((row[tensors.NAME], row[tensors.BYTES], reason))
            return
        try:
            away = _Away(row[tensors.NAME], storage, _Home(torch, self._to, storage))
        except (OSError, RuntimeError, MemoryError, ValueError) as error:
            error.n_missing = storage.nbytes()  # type: ignore[union-attr]
            raise
        moved.append(away)
        storage.resize_(0)
        _poison(storage, _PATIENCE.format(away.name))

    def restore(self) -> int:
        torch = sys.modules.get("torch")
        if not self._away:
            return 0
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.leave()
        try:
            n = self._bring_back(torch, self._away)
        except BaseException:
            if guard is not None:
                self._guard = _guard(self)
                self._guard.__enter__()
            raise
        self._away = []
        return n

    def _bring_back(self, torch: Any, away: list[_Away]) -> int:
        """Refill storages; all or none."""
        done: list[tuple[_Away, Any]] = []
        try:
            with torch.no_grad():
                for a in away:
                    storage = a.storage()
                    if storage is None:
                        continue
                    _poison(storage, None)
                    done.append((a, storage))
                    storage.resize_(a.n)
                    a.home.read(torch, storage)
            _synchronize(torch)
        except BaseException as error:
            for a, storage in done:
                storage.resize_(0)
                _poison(storage, _PATIENCE.format(a.name))
            if is_no_memory(error):
                missing = sum(a.n for a in away) - sum(a.n for a, _ in done[:-1])
                raise _errors.OutOfMemory(
                    f"Courtesy.restore: {missing} bytes are missing on the device; nothing was "
                    "restored, try again"
                ) from error
            raise
        for a in away:
            a.home.close()
        return sum(a.n for a, _ in done)


class _Home:
    """Where a storage's bytes are kept: private pages, pinned memory, or a file."""

    def __init__(self, torch: Any, to: utils.Path, storage: torch.UntypedStorage) -> None:
        self._file: Any = None
        self._map: mmap.mmap | None = None
        self._buffer: Any = None
        n = storage.nbytes()
        if to == "pinned":
            self._buffer = torch.empty(n, dtype=torch.uint8, device="cpu", pin_memory=True)
        elif to == "cpu":
            try:
                self._map = mmap.mmap(-1, n)
            except OSError as error:
                raise MemoryError(str(error)) from None
            self._buffer = torch.frombuffer(self._map, dtype=torch.uint8)
        else:
            self._file = tempfile.TemporaryFile(dir=to)
            os.posix_fallocate(self._file.fileno(), 0, n)
            self._buffer = torch.frombuffer(mmap.mmap(self._file.fileno(), n), dtype=torch.uint8)
        self._buffer.copy_(_bytes_of(storage))
        if self._file is not None:
            self._buffer = None  # the pages go to the file

    def read(self, torch: Any, storage: torch.UntypedStorage) -> None:
        buffer = self._buffer
        if self._file is not None:
            buffer = torch.frombuffer(
                mmap.mmap(self._file.fileno(), storage.nbytes()), dtype=torch.uint8
            )
        _bytes_of(storage).copy_(buffer)

    def close(self) -> None:
        self._buffer = self._map = None
        if self._file is not None:
            self._file.close()


def devices_there() -> int:
    devices.listen()
    return _core.memlab_devices()[1]


def is_no_memory(error: BaseException) -> bool:
    return isinstance(error, OSError) or _core.is_out_of_memory(error)


def _synchronize(torch: Any) -> None:
    if devices_there():
        torch.accelerator.synchronize()


def _empty_caches(torch: Any) -> None:
    if devices_there() and torch.cuda.is_available() and torch.cuda.is_initialized():
        if hasattr(torch._C, "_cuda_clearCublasWorkspaces"):
            torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def _refuse_graphs(torch: Any) -> None:
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return
    if torch.cuda.is_current_stream_capturing():
        raise _errors.UnsupportedError(
            "Courtesy.yield_memory: a CUDA graph is being captured; nothing was moved"
        )
    if any(tuple(s.get("segment_pool_id", (0, 0))) != (0, 0) for s in torch.cuda.memory_snapshot()):
        raise _errors.UnsupportedError(
            "Courtesy.yield_memory: CUDA graphs are alive and keep addresses; delete them first; "
            "nothing was moved"
        )


@functools.cache
def _poisons() -> tuple[Callable[[int, str], None], Callable[[int], None]] | None:
    """torch's own two functions (set, clear) that make access to a storage raise; None if this
    version lacks them. They are tried out."""
    import torch

    refuse: Any = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
    allow: Any = getattr(torch._C, "_clear_storage_data_ptr_access_error_msg", None)
    scratch = torch.UntypedStorage(1)
    try:
        refuse(scratch._cdata, "refused")
        allow(scratch._cdata)
        scratch.data_ptr()
    except (TypeError, RuntimeError):
        return None
    return refuse, allow


def _poison(storage: torch.UntypedStorage, text: str | None) -> None:
    """Let torch refuse access to an emptied storage, if it can. text: the error's text; None: allow
    access again."""
    poisons = _poisons()
    if poisons is None:
        return
    refuse, allow = poisons
    if text is None:
        allow(storage._cdata)
    else:
        refuse(storage._cdata, text)


def _guard(courtesy: Courtesy) -> Any:
    """A dispatch mode that refuses operators on yielded tensors."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
    from torch.utils._pytree import tree_leaves

    class Guard(TorchDispatchMode):
        on = True

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if self.on:
                away = {a.address: a for a in courtesy._away}
                for leaf in tree_leaves((args, kwargs)):
                    if isinstance(leaf, torch.Tensor) and torch._C._has_storage(leaf):
                        a = away.get(torch._C._storage_address(leaf))  # type: ignore[attr-defined]
                        if a is not None and leaf.numel() and leaf.untyped_storage().nbytes() == 0:
                            raise RuntimeError(_PATIENCE.format(a.name))
            return func(*args, **(kwargs or {}))

        def leave(self) -> None:
            """Remove it. If other modes were entered meanwhile, it stays below them and does
            nothing."""
            self.on = False
            if _get_current_dispatch_mode() is self:
                self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    return Guard()  # type: ignore[no-untyped-call]

"""What torch's CPU allocator really held, and the loop people write by hand, for comparison."""

import contextlib
import gc
import os

import torch

import koila
from koila import _core
from koila._torch import VERSION

try:
    import fakecuda
except ImportError:
    fakecuda = None


def installed():
    return not _core.cpu_bytes_install().startswith("unsupported")


@contextlib.contextmanager
def memory_only():
    """On the simulated device (tests/fakecuda) operators allocate and compute nothing in here, so
    that models of a GPU's size take no time. On a GPU this changes nothing."""
    if fakecuda:
        fakecuda.numbers(False)
    try:
        yield
    finally:
        if fakecuda:
            fakecuda.numbers(True)


def workspace_of_a_product():
    """Bytes. From torch 2.15 on each product on a GPU takes cuBLAS's workspace for itself, of 32
    MiB, and gives it back; before, it is there from the first one on."""
    return torch.backends.cuda.cublas_workspace_size() if VERSION >= (2, 15) else 0


@contextlib.contextmanager
def products_without_workspace():
    """For claims about a model's own megabytes: workspace_of_a_product() is 0."""
    if VERSION < (2, 15):
        yield
        return
    torch.backends.cuda.cublas_workspace_size(0)
    torch.backends.cuda.cublaslt_workspace_size(0)
    try:
        yield
    finally:
        torch._C._cuda_resetCublasWorkspaceSize()
        torch._C._cuda_resetCublasLtWorkspaceSize()


class Held:
    """Bytes above what was held at the start, at their highest."""

    def __enter__(self):
        self.base = _core.cpu_bytes_current()
        _core.cpu_bytes_reset_peak()
        return self

    def __exit__(self, *exc):
        self.peak = _core.cpu_bytes_peak() - self.base
        self.kept = _core.cpu_bytes_current() - self.base


_collected_in = None


def collect_garbage():
    """What other tests left would become room in the midst of this one. Once a test: after
    thousands of tests it takes up to 2 s."""
    global _collected_in
    test = os.environ.get("PYTEST_CURRENT_TEST")
    if test is None or test != _collected_in:
        gc.collect()
    _collected_in = test


def only(n_bytes):
    """Torch may hold so many bytes more than it does now: plain PyTorch is refused beyond, koila
    cuts its steps."""
    collect_garbage()
    return koila.budget(_core.cpu_bytes_current() + n_bytes)


def out_of_memory(e):
    return (
        isinstance(e, (torch.OutOfMemoryError, MemoryError))
        or "memory" in str(e)
        or "could not create a primitive" in str(e)
    )


def eager_step(model, loss, batch):
    loss(model, *batch).backward()


def by_hand_step(model, loss, batch, m):
    """Micro-batching as everybody writes it; right for a mean over rows only, whose weight is the
    slice's share of the rows."""
    n = len(batch[0])
    for i in range(0, n, m):
        part = [t[i : i + m] for t in batch]
        (loss(model, *part) * (len(part[0]) / n)).backward()


def koila_step(model, loss, batch, m=None):
    with koila.micro_batch(m) if m is not None else contextlib.nullcontext():
        batch = koila.lazy(*batch)
        loss(model, *(batch if isinstance(batch, tuple) else (batch,))).backward()


def clear(model):
    model.zero_grad(set_to_none=True)


def needs(model, data, loss):
    """Bytes above the gradients that a step needs in slices of one row."""
    base = _core.cpu_bytes_current()
    koila_step(model, loss, data, 1)
    plan = koila.last_plan()
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    clear(model)
    return plan.measured_peak_bytes - base - gradients, gradients

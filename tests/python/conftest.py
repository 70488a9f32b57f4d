"""One thread a process (bit-equality is a claim about the same kernels), koila's settings put back
after each test, long tests on demand.

KOILA_DEVICE=cuda: tensors that name no device are made there, so that the tests of exactness run on
a GPU, with the kernels that give the same bits twice."""

import os
import signal

import pytest
import torch

torch.set_num_threads(1)
LONG = os.environ.get("KOILA_LONG") == "1"
DEVICE = os.environ.get("KOILA_DEVICE", "cpu")
if DEVICE != "cpu":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first product
    torch.set_default_device(DEVICE)
    torch.use_deterministic_algorithms(True, warn_only=True)


def pytest_configure(config):
    config.addinivalue_line("markers", "long: runs only with KOILA_LONG=1")


def pytest_collection_modifyitems(items):
    if not LONG:
        skip = pytest.mark.skip(reason="long: KOILA_LONG=1 runs it")
        for item in items:
            if "long" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def _settings_are_put_back():
    yield
    try:
        from koila import _core
    except ImportError:
        return
    _core.configure(micro_batch=None, budget=None, strict=False, fastest=False)


@pytest.fixture
def ctrl_c():
    """SIGINT raises KeyboardInterrupt; a shell that starts us in the background has it ignored, and
    then Python installs no handler."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)

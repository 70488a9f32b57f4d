"""Turns the numbers of the simulated device on. PyTorch finds `load` by the entry point
torch.backends when it is imported. FAKECUDA_NUMBERS=0 leaves kernels that do nothing."""

import ctypes
import os
from pathlib import Path

_library = None


def load() -> None:
    global _library
    import torch

    if os.environ.get("FAKECUDA_NUMBERS", "1") != "0" and torch.version.cuda:
        file = Path(__file__).parent / "fakecuda_numbers.so"
        torch.ops.load_library(str(file))
        _library = ctypes.CDLL(str(file))
        _library.fakecuda_computed.restype = ctypes.c_longlong
        _library.fakecuda_untrue.restype = ctypes.c_longlong
        _library.fakecuda_asserted.restype = ctypes.c_longlong


def numbers(on: bool) -> None:
    """Do operators compute (True), or do they only allocate?"""
    if _library:
        _library.fakecuda_numbers(int(on))


def computed() -> int:
    """How many operators were computed."""
    return _library.fakecuda_computed() if _library else 0


def untrue() -> int:
    """How many of the computed operators allocated differently from a device: CUDA's own host code
    did not run to the end, or it returned another shape than the CPU."""
    return _library.fakecuda_untrue() if _library else 0


def asserted() -> int:
    """How many operators raised an error that a device's host code lets pass: there a kernel
    asserts later, after which the process can do nothing more on the device."""
    return _library.fakecuda_asserted() if _library else 0


def calls() -> dict[str, int]:
    """How often functions of the runtime were called, of those that wait for the device, ask it,
    or take memory: {name: calls}, without those that were not called."""
    import torch

    version = str(torch.version.cuda).split(".")[0]
    called = ctypes.CDLL(f"libcudart.so.{version}").fakecuda_called  # torch has loaded it
    called.restype = ctypes.c_char_p
    found, n, i = {}, ctypes.c_ulonglong(), 0
    while name := called(i, ctypes.byref(n)):
        found[name.decode()] = n.value
        i += 1
    return found

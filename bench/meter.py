"""Time and memory of a step, on the CPU or on a GPU. For the programs beside it.

meter.add_option(parser)         --device cpu|cuda
meter.use(options.device)
with meter.device():             what is made inside lies there; steps are better timed outside,
    ...                          for inside every function of torch costs more
"""

from __future__ import annotations

import argparse
import time

import torch

from koila import _core

MIB = 2**20
_device = "cpu"


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))


def use(device: str) -> None:
    """Measures there from now on, and says on which GPU. The CPU with one thread."""
    global _device
    _device = device
    if device == "cpu":
        torch.set_num_threads(1)
        _core.cpu_bytes_install()
    else:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)


def device() -> torch.device:
    return torch.device(_device)


def clock() -> float:
    """Seconds of processor time; with a GPU those of the clock, when the GPU has done all."""
    if _device == "cpu":
        return time.process_time()
    wait()
    return time.perf_counter()


def wait() -> None:
    """Until the GPU has done all."""
    if _device != "cpu":
        torch.cuda.synchronize()


def held() -> int:
    """Bytes that torch's allocator has given out."""
    return int(_core.cpu_bytes_current()) if _device == "cpu" else torch.cuda.memory_allocated()


def reset_peak() -> None:
    if _device == "cpu":
        _core.cpu_bytes_reset_peak()
    else:
        torch.cuda.reset_peak_memory_stats()


def peak() -> int:
    """The most bytes that it had given out since `reset_peak()`."""
    return int(_core.cpu_bytes_peak()) if _device == "cpu" else torch.cuda.max_memory_allocated()

"""What several of memlab's test files say alike."""

import inspect
import os
import subprocess
import sys
import textwrap

import torch

# Where tensors that name no device are made; those of other threads name it. Scripts in processes
# of their own make theirs on the CPU and ask for it.
HERE = os.environ.get("KOILA_DEVICE", "cpu")


def block(n):
    """The bytes of a block for n bytes: a GPU's allocator hands out multiples of 512 (and for more
    than 1 MiB sometimes more)."""
    return n if HERE == "cpu" else -(-n // 512) * 512


def bytes_now():
    """The bytes in tensors, by another count than memlab's where there is one."""
    from koila import _core

    return _core.cpu_bytes_current() if HERE == "cpu" else torch.cuda.memory_allocated()


def python(*args, code=0, timeout=240, cwd=None, **environment):
    """Run in a process of its own, which must exit with `code`: its CompletedProcess."""
    p = subprocess.run(
        [sys.executable, *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        env={**os.environ, **environment},
    )
    assert p.returncode == code, p.stdout[-6000:] + p.stderr[-6000:]
    return p


def fresh(body, code=0, **environment):
    """Run in a process that has no other tensors and has not started to count: its output."""
    head = (
        "import gc, json, sys, torch\nimport koila._core as core\n"
        "from koila import memlab\nfrom koila.memlab import *\n"
    )
    head += inspect.getsource(ran)
    return python(
        "-W", "ignore", "-c", head + textwrap.dedent(body), code=code, **environment
    ).stdout


def cli(*args, code=0, cwd=None):
    return python("-m", "koila.memlab", *args, code=code, cwd=cwd)


def ran(p, func=None, device=None):
    """The records of the lines that ran."""
    return [r for r in p.records(func, device=device) if r["hits"] is not None]


def rows(p, func, *columns):
    """{line of the function: (columns...)}; lines that ran only."""
    first = p.records(func)[0]["line"]
    return {r["line"] - first: tuple(r[c] for c in columns) for r in ran(p, func)}


# The report of a layer of 1024 x 1024, its input of 512 rows and the mean of its output, after
# backward.
LAYER_REPORT = textwrap.dedent("""\
    Element type                                            Size  Used MEM
    -------------------------------------------------------------------------------
    Storage on {device}
    weight                                          (1024, 1024)     4.00M
    weight.grad                                     (1024, 1024)     4.00M
    bias                                                 (1024,)     4.00K
    bias.grad                                            (1024,)     4.00K
    Tensor0                                          (512, 1024)     2.00M
    Tensor1                                                 (1,) {mean:>9s}
    -------------------------------------------------------------------------------
    Total Tensors: 2623489 \tUsed Memory: 10.01M
    The allocated memory on {device}: 10.01M
    -------------------------------------------------------------------------------
""")

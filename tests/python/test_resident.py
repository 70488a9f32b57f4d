"""Limits on the resident memory of the process: a budget that says so, and a control group's, told
by files like its own. In a container that kills, koila lives where plain PyTorch does not."""

import ctypes
import importlib.util
import os
import pathlib
import sys
import time

import pytest
import torch
from conftest import LONG
from helpers import run_python
from memory_helpers import installed
from torch import nn
from torch.nn import functional as F

import koila
from koila import _core, lazy

pytestmark = [
    pytest.mark.skipif(not installed(), reason="torch's CPU memory cannot be counted here"),
    pytest.mark.about_the_cpu("the resident memory of the process"),
]

MIB = 1 << 20
ROWS, WIDTH = 4096, 512  # 16 MiB a layer
ROOT = pathlib.Path(__file__).parents[2]


def resident(with_files=False):
    return _core.resident()["with_files" if with_files else "now"]


def made():
    torch.manual_seed(0)
    layers = [f for _ in range(4) for f in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 10)).double()
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    return model, x, torch.randint(0, 10, (ROWS,))


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return [loss.item(), *(p.grad.clone() for p in model.parameters())]


def assert_close(got, expected):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.fixture
def trimmed():
    """What earlier tests left in the C library's heap is no room of ours."""
    ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture
def group(tmp_path):
    """group(n, parent=None): from now on a control group leaves n bytes to this process, and its
    parent as many as it says. Both versions are known; this is the second."""
    folder = tmp_path / "sys/fs/cgroup/jobs/one"
    folder.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/jobs/one\n")
    mount = "31 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    (tmp_path / "proc/self/mountinfo").write_text(mount)

    def leaves(n_bytes, parent=None, high=None):
        for where, n in ((folder, n_bytes), (folder.parent, parent)):
            (where / "memory.max").write_text(f"{resident() + n}\n" if n else "max\n")
            (where / "memory.current").write_text(f"{resident()}\n")
        (folder / "memory.high").write_text(f"{resident() + high}\n" if high else "max\n")
        _core.limits_from(str(tmp_path))

    yield leaves
    _core.limits_from("")


def slices_of(model, x, y):
    got = gradients(model, F.cross_entropy(model(lazy(x, batch=0)), y))
    return got, koila.last_plan().n_micro_batches


def test_a_step_is_cut_for_the_limit_of_a_control_group_or_of_one_above(group, trimmed):
    model, x, y = made()
    whole = gradients(model, F.cross_entropy(model(x), y))
    for limits in ((96 * MIB,), (4096 * MIB, 96 * MIB), (None, None, 96 * MIB)):
        group(*limits)
        got, n = slices_of(model, x, y)
        assert n > 1, limits
        assert_close(got, whole)
    group(2048 * MIB, 4096 * MIB)
    got, n = slices_of(model, x, y)
    assert n == 1
    assert_close(got, whole)


def test_a_limit_holds_beside_a_budget_on_torchs_bytes(group, trimmed):
    model, x, y = made()
    group(96 * MIB)
    with koila.budget("8GiB"):
        assert slices_of(model, x, y)[1] > 1
    group(4096 * MIB)
    with koila.budget(_core.cpu_bytes_current() + 64 * MIB):
        assert slices_of(model, x, y)[1] > 1


def test_a_limit_that_is_already_passed_raises_and_says_what_is_not_torchs(group, trimmed):
    model, x, y = made()
    group(1)
    with pytest.raises(koila.OutOfMemory, match=r"resident memory, \d+\.\d MiB are not torch's"):
        slices_of(model, x, y)


def test_a_resident_budget_stays_kept_and_gradients_are_the_same(trimmed):
    model, x, y = made()
    whole = gradients(model, F.cross_entropy(model(x), y))
    assert slices_of(model, x, y)[1] == 1  # what koila imports for its first step is resident now
    ctypes.CDLL(None).malloc_trim(0)
    budget = resident(with_files=True) + 64 * MIB  # the step needs 96
    found = []
    with koila.budget(budget, resident=True):  # which a comparison may be refused
        for _ in range(2):
            got, n = slices_of(model, x, y)
            assert n > 1
            found.append(got)
            assert resident(with_files=True) <= budget
            assert koila.last_plan().budget_bytes + _core.resident()["base"] <= budget
    for got in found:
        assert_close(got, whole)
    assert slices_of(model, x, y)[1] == 1


def test_under_a_resident_budget_torch_refuses_what_would_pass_it(trimmed):
    with koila.budget(resident(with_files=True) + 64 * MIB, resident=True):
        kept = torch.ones(40 * MIB // 4)
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            torch.empty(40 * MIB // 4)
        del kept
        torch.empty(40 * MIB // 4)
    torch.empty(4096 * MIB)


def test_freed_memory_that_the_c_library_keeps_is_given_back_before_torch_is_refused(trimmed):
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    with koila.budget(resident(with_files=True) + 128 * MIB, resident=True):
        pieces = [torch.ones(16 << 10) for _ in range(1600)]  # 100 MiB, below mmap's threshold
        wedge = libc.malloc(16 << 10)  # keeps the heap from shrinking by itself
        del pieces
        trims = _core.resident()["trims"]
        filled = torch.ones(80 * MIB // 4)
        assert _core.resident()["trims"] > trims or resident() < _core.resident()["base"] + 90 * MIB
        libc.free(wedge)
        assert filled[0] == 1


def test_memory_taken_beside_torch_in_a_step_cuts_smaller_and_is_learned(group, trimmed):
    """An operator that keeps memory of its own: the plan was too optimistic, yet the step ends."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    held = []

    @torch.library.custom_op("koila_resident::hoard", mutates_args=())
    def hoard(x: torch.Tensor) -> torch.Tensor:
        if not held:
            held.append(libc.malloc(64 * MIB))
            ctypes.memset(held[0], 1, 64 * MIB)
        return x.clone()

    hoard.register_fake(lambda x: torch.empty_like(x))
    hoard.register_autograd(lambda ctx, grad: grad)
    koila.register_rule("koila_resident::hoard", "S0->S0")
    model, x, y = made()
    expected = gradients(model, F.cross_entropy(model(x), y))
    ctypes.CDLL(None).malloc_trim(0)
    group(160 * MIB)
    limit = resident() + 160 * MIB
    got = gradients(model, F.cross_entropy(model(hoard(lazy(x, batch=0))), y))
    assert held and resident() <= limit
    assert_close(got, expected)
    assert koila.last_plan().retries > 0 and _core.resident()["learned"] > 0
    libc.free(held[0])
    learned = _core.resident()["learned"]
    for _ in range(10):
        slices_of(model, x[:64], y[:64])
    assert _core.resident()["learned"] < learned / 10


def test_where_all_fits_the_system_is_not_asked_for_each_block():
    model, x, y = made()
    slices_of(model, x, y)
    before = _core.resident()
    slices_of(model, x, y)
    after = _core.resident()
    assert after["looks"] - before["looks"] <= 3 and after["trims"] == before["trims"]


def small_step(n_reads=0):
    out = F.linear(lazy(torch.ones(8, 4)), torch.ones(3, 4, requires_grad=True))
    for _ in range(n_reads):
        out = out * 2
        out.sum().item()
    out.sum().backward()


@pytest.mark.parametrize("n_reads", [0, 5])
def test_steps_and_reads_that_need_little_seldom_ask_the_system(n_reads):
    small_step(n_reads)
    before, started = _core.resident()["asked"], time.monotonic()
    for _ in range(50):
        small_step(n_reads)
    passed = time.monotonic() - started
    assert _core.resident()["asked"] - before <= 1 + passed / 0.1


def test_a_step_that_needs_much_of_what_is_free_asks_each_time_and_is_guarded(group, trimmed):
    model, x, y = made()
    group(400 * MIB)
    for _ in range(2):
        before = _core.resident()
        slices_of(model, x, y)
        after = _core.resident()
        assert after["asked"] > before["asked"] and after["looks"] > before["looks"]


@pytest.mark.parametrize("is_known", [True, False])
def test_a_large_step_right_after_a_small_one_is_planned_with_what_is_free_then(
    group, trimmed, tmp_path, is_known
):
    """The group's usage rises between the two: no answer of before is trusted."""
    model, x, y = made()
    if not is_known:
        x, y = x[:-64], y[:-64]
    group(700 * MIB)
    if is_known:
        assert slices_of(model, x, y)[1] == 1
    ctypes.CDLL(None).malloc_trim(0)
    small_step()
    used = tmp_path / "sys/fs/cgroup/jobs/one/memory.current"
    limit = int((used.parent / "memory.max").read_text())
    used.write_text(f"{limit - 64 * MIB}\n")
    assert slices_of(model, x, y)[1] > 1


def test_a_forked_child_asks_the_system_itself():
    small_step()
    before = _core.resident()["asked"]
    read, write = os.pipe()
    child = os.fork()
    if not child:
        small_step()
        os.write(write, bytes([_core.resident()["asked"] > before]))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 1) == b"\1"


@pytest.mark.parametrize("amount", [None, {"cpu": None}, {"cuda:0": 10**9}])
def test_a_resident_budget_needs_the_cpus_amount(amount):
    with pytest.raises(ValueError, match="resident=True.: expected an amount for the CPU"):
        koila.budget(amount, resident=True)


def test_a_resident_fraction_is_of_the_free_memory_beyond_what_is_resident():
    with koila.budget(0.5, resident=True):
        budget = _core.configure()["cpu_budget"]
        assert _core.configure()["resident"] and budget > resident(with_files=True)
    assert not _core.configure()["resident"]


# ---- what is freed, where there is plenty of room

FAULTS = """
import resource
import torch
from torch import nn
import koila

def block(n, m):
    return nn.Conv2d(n, m, 3, padding=1), nn.BatchNorm2d(m), nn.ReLU(), nn.MaxPool2d(2)

net = nn.Sequential(*block(3, 16), *block(16, 32), nn.Flatten(), nn.Linear(2048, 10))
x = torch.randn(32, 3, 32, 32)
faults = []
for _ in range(40):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    with koila.step_aside(False):
        loss = net(koila.lazy(x)).pow(2).mean()
        net.zero_grad()
        loss.backward()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(sum(faults[20:]))
"""


def test_recorded_steps_take_no_pages_anew_where_there_is_room():
    assert int(run_python(FAULTS)) < 2000  # in 20 steps: now and then a few blocks lie elsewhere
    said = {"MALLOC_TRIM_THRESHOLD_": str(128 << 10)}  # by the user, which counts
    assert int(run_python(FAULTS, env=said)) > 10_000


# ---- killed, by the kernel where this is allowed, else by a program that watches


def tool():
    spec = importlib.util.spec_from_file_location(
        "bench_resident", ROOT / "bench/bench_resident.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("told", ["container", "budget"] if LONG else ["container"])
@pytest.mark.parametrize("by_kernel", [True, False] if LONG else [True])
def test_in_a_container_that_kills_plain_dies_and_koila_lives(by_kernel, told):
    bench = tool()
    watch = not by_kernel or not bench.groups_are_allowed()
    limit = 420 * MIB
    found = bench.run(
        "small mlp",
        "koila",
        limit + (told == "budget") * 120 * MIB,
        2,
        watch=watch,
        budget=told == "budget",
    )
    assert found.what == "alive", found.text
    assert bench.run("small mlp", "plain", limit, 1, watch=watch).what == "killed"

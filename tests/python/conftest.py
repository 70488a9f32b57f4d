"""One thread a process (bit-equality is a claim about the same kernels), koila's settings put back
after each test, long tests on demand.

koila does not step aside (test_aside.py turns that on): a test that repeats a step many times is
about steps that koila runs.

KOILA_DEVICE=cuda: tensors that name no device are made there, so that the tests run on a GPU, with
the kernels that give the same bits twice. Left out there is what is marked
`about_the_cpu("why")`: a claim about the host's memory, or about what a host's tensors alone can
do."""

import os
import signal
import subprocess
import sys

import pytest
import torch

os.environ.setdefault("KOILA_STEP_ASIDE", "0")  # of programs that tests start, too
torch.set_num_threads(1)
LONG = os.environ.get("KOILA_LONG") == "1"
DEVICE = os.environ.get("KOILA_DEVICE", "cpu")
if DEVICE != "cpu":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first product
    torch.set_default_device(DEVICE)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.allow_tf32 = False  # ten bits, of which slices round others


def pytest_addoption(parser):
    parser.addoption("--known-failures", metavar="FILE", help="leave the tests of this list out")
    parser.addoption("--only-known-failures", action="store_true", help="run only those")
    parser.addoption("--known-skips", metavar="FILE", help="fail if a test skips that is not there")
    parser.addoption(
        "--doubt-backwards",
        action="store_true",
        help="record each backward that is known, and fail if it comes out otherwise",
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "long: runs only with KOILA_LONG=1")
    config.addinivalue_line(
        "markers", "about_the_cpu(why): a claim about the CPU, left out where KOILA_DEVICE is not"
    )
    config.addinivalue_line(
        "markers",
        "kernel_asserts: its error is found in a kernel, after which a process can do nothing more "
        "on a GPU: left out there, run on the CPU and on the simulated device",
    )
    if config.getoption("--known-skips") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Skips(config.getoption("--known-skips")))
    if config.getoption("--doubt-backwards"):
        import koila

        koila.lazy(torch.zeros(2))
        koila._core.backwards_doubted(True)


def leave_known_failures_out(config, items):
    """A line of the list is `test  # cause`; a test that fails in every case may stand without its
    [case]."""
    with open(config.getoption("--known-failures"), encoding="utf-8") as file:
        tests = [line.split("  #")[0].strip() for line in file]
    known = {t for t in tests if t and not t.startswith("#")}
    wanted = config.getoption("--only-known-failures")
    kept = []
    left_out = []
    for item in items:
        is_known = not known.isdisjoint({item.nodeid, item.nodeid.split("[")[0]})
        (kept if is_known == wanted else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


class Skips:
    """Every test that skipped, but those that wait for KOILA_LONG, is in the list, and the list is
    short. A line is `test  # what ends it`."""

    MOST = 15

    def __init__(self, path):
        with open(path, encoding="utf-8") as file:
            lines = [line for line in file if line.strip() and not line.startswith("#")]
        self.known = {line.split("  #")[0].strip() for line in lines}
        self.wrong = [f"no reason: {line.strip()}" for line in lines if "  # " not in line]
        if len(lines) > self.MOST:
            self.wrong.append(f"{len(lines)} tests may skip, at most {self.MOST} should")

    def pytest_runtest_logreport(self, report):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        if report.skipped and "long: KOILA_LONG" not in reason and report.nodeid not in self.known:
            self.wrong.append(f"{report.nodeid}: {reason}")

    pytest_collectreport = pytest_runtest_logreport  # a whole file

    def pytest_sessionfinish(self, session):
        if self.wrong and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        for line in self.wrong:
            terminalreporter.write_line(f"skipped, and not in --known-skips: {line}", red=True)


def leave_out(config, items, marker):
    config.hook.pytest_deselected(items=[i for i in items if i.get_closest_marker(marker)])
    items[:] = [i for i in items if not i.get_closest_marker(marker)]


def simulated_device():
    """The module that simulates a GPU (tests/fakecuda); None where tensors are on the CPU or on a
    real one."""
    if DEVICE == "cpu" or "(fake)" not in torch.cuda.get_device_name():
        return None
    import fakecuda

    return fakecuda


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """On the simulated device: does the test need to be marked?"""
    fakecuda = simulated_device()
    before = fakecuda.asserted() if fakecuda else 0
    result = yield
    if fakecuda and fakecuda.asserted() > before and not item.get_closest_marker("kernel_asserts"):
        pytest.fail("a kernel asserts, which ends the process on a GPU: mark it kernel_asserts")
    return result


def pytest_collection_modifyitems(config, items):
    if DEVICE != "cpu":
        leave_out(config, items, "about_the_cpu")
        if not simulated_device():
            leave_out(config, items, "kernel_asserts")
    if config.getoption("--known-failures"):
        leave_known_failures_out(config, items)
    if not LONG:
        skip = pytest.mark.skip(reason="long: KOILA_LONG=1 runs it")
        for item in items:
            if item.get_closest_marker("long"):  # keywords have the folders' names too
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def _settings_are_put_back():
    yield
    try:
        from koila import _core
    except ImportError:
        return
    _core.configure(
        micro_batch=None, budget=None, own_budget=False, strict=False, slices="auto", axes="any"
    )
    _core.configure_process(budget=None)


@pytest.fixture
def no_default_device():
    """Under KOILA_DEVICE=cuda too: for tests that name the device of each tensor."""
    torch.set_default_device(None)
    yield
    torch.set_default_device(None if DEVICE == "cpu" else DEVICE)


@pytest.fixture
def ctrl_c():
    """SIGINT raises KeyboardInterrupt; a shell that starts us in the background has it ignored, and
    then Python installs no handler."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def inductor():
    """Skips where torch alone cannot compile either: no C++ compiler, or torch without its headers,
    as Debian's python3-torch is."""
    program = "import torch; torch.compile(lambda x: x.sin() + 1)(torch.ones(64))"
    tried = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    if tried.returncode:
        errors = [line for line in tried.stderr.splitlines() if "error" in line.lower()]
        pytest.skip(f"torch.compile alone: {errors[-1] if errors else tried.stderr[-500:]}")

"""Nothing stays: after many steps, good and bad, torch's bytes, the objects of the extension and
the process are what they were."""

import pytest
from helpers import run_python

pytestmark = pytest.mark.about_the_cpu("bytes and resident memory of the host")
PRELUDE = """
import gc, weakref, torch, koila, psutil
from koila import lazy, _core
from torch import nn
from torch.nn import functional as F

torch.set_num_threads(1)
counted = not _core.cpu_bytes_install().startswith("unsupported")
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(inplace=True), nn.Linear(64, 4)
)
x0, y0 = torch.randn(32, 16), torch.randint(0, 4, (32,))


def step():
    model.zero_grad(set_to_none=True)
    with koila.micro_batch(7):
        x, y = lazy(x0, y0)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
    return loss


def lazies():
    gc.collect()
    return sum(issubclass(type(o), koila.LazyTensor) for o in gc.get_objects())


def steady(f, n=60, slack=8 << 20):
    for _ in range(10):
        f()
    gc.collect()
    model.zero_grad(set_to_none=True)
    torch_before, rss = _core.cpu_bytes_current(), psutil.Process().memory_info().rss
    blocks = len(gc.get_objects())
    for _ in range(n):
        f()
    model.zero_grad(set_to_none=True)
    assert lazies() == 0, lazies()
    assert _core.cpu_bytes_current() == torch_before, (_core.cpu_bytes_current(), torch_before)
    assert len(gc.get_objects()) - blocks < 100, len(gc.get_objects()) - blocks
    assert psutil.Process().memory_info().rss - rss < slack, (
        psutil.Process().memory_info().rss - rss
    )
"""


def test_steps_leave_nothing():
    run_python(PRELUDE + "\nsteady(step)\n")


def test_steps_without_the_garbage_collector_leave_nothing():
    run_python(PRELUDE + "\ngc.disable()\nsteady(step)\n")


def test_graphs_that_never_run_leave_nothing():
    run_python(
        PRELUDE
        + "\ndef f():\n    x, y = lazy(x0, y0)\n    F.cross_entropy(model(x), y)\nsteady(f)\n"
    )


def test_values_in_the_middle_leave_nothing():
    run_python(
        PRELUDE
        + """
def f():
    with koila.micro_batch(7), torch.no_grad():
        x, y = lazy(x0, y0)
        h = model(x)
        h[:, 0].mul_(2)
        assert (
            float(h.sum()) is not None
            and h.argmax(1).tolist()
            and repr(h)
            and h[y > 1].sum().item() is not None
        )


steady(f)
"""
    )


def test_errors_leave_nothing():
    run_python(
        PRELUDE
        + """
def f():
    with koila.micro_batch(7):
        x, y = lazy(x0, y0)
        for bad in (
            lambda: x @ x,
            lambda: lazy(x0, y0[:3]),
            lambda: lazy(x0, batch=9),
            lambda: x.view(5, 5),
            lambda: koila.budget("2Gb?"),
        ):
            try:
                bad()
            except Exception:
                pass
        h = model(x)
        h.register_hook(lambda g: 1 / 0)
        try:
            F.cross_entropy(h, y).backward()
        except ZeroDivisionError:
            pass
        else:
            raise SystemExit("no error")


steady(f)
"""
    )


def test_refused_allocations_leave_nothing():
    run_python(
        PRELUDE
        + """
if counted:
    n = [0]
    def f():
        n[0] += 3
        _core.cpu_bytes_fail_nth(n[0] % 150 + 1)
        try: step()
        except Exception: pass
        finally: _core.cpu_bytes_fail_nth(0)
    steady(f, n=120)
"""
    )


def test_reports_leave_nothing(tmp_path):
    run_python(
        PRELUDE
        + f"""
def f():
    step()
    p = koila.last_plan()
    str(p); p.save({str(tmp_path / "r.html")!r}); p.save({str(tmp_path / "r.kgraph")!r})
    x = lazy(x0)
    koila.explain(model(x).sum())
steady(f)
"""
    )


def test_the_input_dies_with_the_step():
    run_python(
        PRELUDE
        + """
def once():
    a, b = x0.clone(), y0.clone()
    refs = [weakref.ref(a), weakref.ref(b)]
    x, y = lazy(a, b)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    del a, b, x, y
    return refs, float(loss)
refs, value = once()
gc.collect()
assert all(r() is None for r in refs)
"""
    )


def test_a_kept_loss_keeps_only_itself():
    run_python(
        PRELUDE
        + """
if counted:
    step(); model.zero_grad(set_to_none=True); gc.collect()
    before = _core.cpu_bytes_current()
    kept = [step().detach() for _ in range(20)]
    model.zero_grad(set_to_none=True); gc.collect()
    assert _core.cpu_bytes_current() - before <= 20 * 64, _core.cpu_bytes_current() - before
"""
    )

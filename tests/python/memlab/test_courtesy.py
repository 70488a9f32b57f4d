"""Courtesy on CPU storages: every clause, failures injected at each copy and each refill."""

import gc
import weakref

import numpy as np
import pytest
import torch

import koila._core as core
from koila import memlab
from koila._errors import OutOfMemory, UnsupportedError
from koila.memlab import Courtesy
from koila.memlab import courtesy as module

memlab.start()


@pytest.fixture(autouse=True)
def clean():
    gc.collect()
    core.cpu_bytes_set_limit(None)
    yield
    core.cpu_bytes_set_limit(None)
    core.cpu_bytes_fail_nth(0)


def training(seed=0):
    torch.manual_seed(seed)
    m = torch.nn.Sequential(
        torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 2), torch.nn.BatchNorm1d(2)
    )
    o = torch.optim.Adam(m.parameters(), lr=0.01)
    x = torch.randn(16, 20)

    def forward():
        return m(x).exp().sum()

    def finish(loss):
        o.zero_grad()
        loss.backward()
        o.step()
        return loss.item()

    return m, o, x, forward, finish


@pytest.mark.parametrize("to", ["cpu", "dir"])
def test_everything_is_away_and_comes_back_bit_equal(to, tmp_path):
    m, o, x, forward, finish = training()
    finish(forward())
    view, sparse = x[3:, ::2], torch.eye(5).to_sparse()
    tied = m[0].weight.detach()
    seen = {id(p): (p.detach().clone(), p._version) for p in m.parameters()}
    finger = [t.clone() for t in (x, view, sparse.to_dense())]
    loss = forward()  # a graph in flight
    base = core.cpu_bytes_current()
    c = Courtesy(device="cpu", to="cpu" if to == "cpu" else str(tmp_path), optimizers=[o])
    n = c.yield_memory()
    skipped = sum(b for _, b, _ in c.skipped)
    assert n > 0 and c.yielded and base - core.cpu_bytes_current() == n
    assert core.cpu_bytes_current() <= skipped + 64
    assert c.restore() == n and not c.yielded and core.cpu_bytes_current() == base
    assert all(
        torch.equal(p, seen[id(p)][0]) and p._version == seen[id(p)][1] for p in m.parameters()
    )
    assert all(torch.equal(a, b) for a, b in zip(finger, (x, view, sparse.to_dense())))
    assert view._base is x and tied.data_ptr() == m[0].weight.data_ptr()
    finish(loss)
    x[3, 0] = 77
    assert view[0, 0] == 77


def test_loss_curve_is_the_same_with_a_courtesy_in_every_step():
    def curve(lend):
        m, o, x, forward, finish = training()
        out = []
        for _ in range(50):
            loss = forward()
            if lend:
                with Courtesy(device="cpu"):
                    pass
            out.append(finish(loss))
        return out

    assert curve(False) == curve(True)


def test_operators_on_yielded_tensors_raise_and_name_them():
    m = torch.nn.Linear(3, 3)
    free = None
    with Courtesy(device="cpu"):
        with pytest.raises(RuntimeError, match="was yielded; restore"):
            m.weight + 1
        with pytest.raises(RuntimeError, match="yielded"):
            m(torch.ones(1, 3))
        free = torch.ones(3) * 2  # new tensors work
    assert free.sum() == 6 and torch.isfinite(m.weight + 1).all()


def test_twice_and_nested_find_nothing_to_do():
    t = torch.zeros(1000)
    a, b = Courtesy(device="cpu"), Courtesy(device="cpu")
    assert a.restore() == 0
    n = a.yield_memory()
    assert n >= 4000 and a.yield_memory() == 0 and b.yield_memory() == 0
    assert b.restore() == 0 and a.restore() == n and a.restore() == 0
    assert t.sum() == 0


def test_exceptions_restore_too():
    t = torch.ones(10)
    with pytest.raises(KeyError), Courtesy(device="cpu"):
        raise KeyError
    assert t.sum() == 10


def test_what_cannot_be_moved_is_said():
    a = np.ones(100)
    borrowed = torch.from_numpy(a)
    shared = torch.ones(50).share_memory_()
    exported = torch.ones(30)
    held = exported.numpy()
    c = Courtesy(device="cpu")
    with c:
        assert borrowed.sum() == 100 and shared.sum() == 50 and held.sum() == 30
    reasons = {(n, why) for _, n, why in c.skipped}
    assert (800, "not resizable") in reasons or (800, "borrowed memory") in reasons
    assert any(n == 200 and "shared" in why for n, why in reasons)
    assert (120, "not resizable") in reasons


def test_what_dies_while_away_is_not_restored():
    t, keep = torch.zeros(5000), torch.zeros(100)
    ref = weakref.ref(t)
    c = Courtesy(device="cpu")
    n = c.yield_memory()
    del t
    gc.collect()
    assert ref() is None
    assert c.restore() == n - 20000
    assert keep.sum() == 0


def test_no_room_on_the_host_puts_everything_back(monkeypatch):
    live = [torch.full((100,), float(i)) for i in range(6)]
    real, base = module._Home, core.cpu_bytes_current()
    for nth in range(1, 7):
        calls = [0]

        def failing(*args):
            calls[0] += 1
            if calls[0] == nth:
                raise MemoryError("planted")
            return real(*args)

        monkeypatch.setattr(module, "_Home", failing)
        c = Courtesy(device="cpu")
        with pytest.raises(MemoryError, match=r"no host memory for \d+ bytes; nothing was moved"):
            c.yield_memory()
        assert core.cpu_bytes_current() == base and not c.yielded
        assert [float(t[0]) for t in live] == [0, 1, 2, 3, 4, 5]


def test_no_room_on_restore_leaves_it_yielded_and_can_be_tried_again():
    live = [torch.full((1000,), float(i)) for i in range(5)]
    c = Courtesy(device="cpu")
    n = c.yield_memory()
    for nth in range(1, 6):
        low = core.cpu_bytes_current()
        core.cpu_bytes_fail_nth(nth)
        with pytest.raises(OutOfMemory, match=r"\d+ bytes are missing"):
            c.restore()
        core.cpu_bytes_fail_nth(0)
        assert c.yielded and core.cpu_bytes_current() == low
        with pytest.raises(RuntimeError, match="yielded"):
            live[0] + 1
    assert c.restore() == n
    assert [float(t[0]) for t in live] == [0, 1, 2, 3, 4]


@pytest.mark.skipif(torch.cuda.is_available(), reason="claims about machines without CUDA")
def test_without_an_accelerator():
    t = torch.ones(3)
    with Courtesy() as nothing:
        assert not nothing or t.sum() == 3
    assert Courtesy().yield_memory() == 0
    with pytest.raises(ValueError, match="no accelerator"):
        Courtesy(device="cuda")


@pytest.mark.parametrize(
    "capturing, pools, says",
    [
        (True, [], "being captured"),
        (False, [(0, 1)], "CUDA graphs are alive"),
        (False, [(0, 0)], None),
    ],
)
def test_cuda_graphs_are_refused_and_nothing_is_moved(monkeypatch, capturing, pools, says):
    t = torch.ones(1000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(
        torch.cuda, "memory_snapshot", lambda: [{"segment_pool_id": p} for p in pools]
    )
    if says is None:
        module._refuse_graphs(torch)
        return
    held, c = core.cpu_bytes_current(), Courtesy(device="cpu")
    with pytest.raises(UnsupportedError, match=says):
        c.yield_memory()
    assert core.cpu_bytes_current() == held and not c.yielded and t.sum() == 1000


def test_bad_destination():
    with pytest.raises(ValueError, match='"cpu", "pinned" or a directory'):
        Courtesy(device="cpu", to="/no/such/place")
    with pytest.raises(TypeError, match="param_groups"):
        Courtesy(device="cpu", optimizers=[3])


def test_wrappers_and_lstm_weights_come_back_aliased():
    lstm = torch.nn.LSTM(4, 4, num_layers=2)
    x = torch.randn(5, 2, 4)
    before = lstm(x)[0].detach().clone()
    with Courtesy(device="cpu"):
        pass
    assert torch.equal(lstm(x)[0], before)


@pytest.mark.parametrize(
    "device, to, error",
    [
        (1.5, "cpu", TypeError),
        ([], "cpu", TypeError),
        ("gpu", "cpu", ValueError),
        ("cuda:", "cpu", ValueError),
        ("cpu", 3, TypeError),
    ],
)
def test_what_is_no_device_and_no_destination(device, to, error):
    with pytest.raises(error, match="expected"):
        Courtesy(device=device, to=to)

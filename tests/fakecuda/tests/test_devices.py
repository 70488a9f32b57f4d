"""Several devices (FAKECUDA_DEVICES=2): memory of each its own, copies between them, and a model on
both that trains as on the CPU. In processes of their own: the number is read once."""

import os
import subprocess
import sys

import pytest

BEGINNING = """
import copy
import torch
from torch import nn
from torch.nn import functional as F

D = torch.float64
torch.manual_seed(0)
"""

COPIES = """
assert torch.cuda.device_count() == 2
assert torch.cuda.can_device_access_peer(0, 1)
x = torch.randn(1000, 7, dtype=D)
a = x.to("cuda:0")
b = a.to("cuda:1")
assert b.device == torch.device("cuda:1") and torch.equal(b.cpu(), x)
assert torch.equal(b.t().to("cuda:0").cpu(), x.t())  # strides of its own
assert a.data_ptr() != b.data_ptr()
b.add_(1)
assert torch.equal(a.cpu(), x) and torch.equal(a.copy_(b).cpu(), x + 1)
assert torch.equal(a.to("cuda:1", torch.float32).cpu(), (x + 1).float())
try:
    a + b
except RuntimeError as e:
    assert "same device" in str(e)
else:
    raise AssertionError("operands of two devices")
"""

MEMORY = """
free = [torch.cuda.mem_get_info(d)[0] for d in (0, 1)]
x = torch.empty(64 << 20, dtype=torch.uint8, device="cuda:1")
now = [torch.cuda.mem_get_info(d)[0] for d in (0, 1)]
assert now[0] == free[0] and free[1] - now[1] == 64 << 20
assert torch.cuda.memory_allocated(0) == 0 and torch.cuda.memory_allocated(1) == 64 << 20
try:
    torch.empty(3 << 30, dtype=torch.uint8, device="cuda:1")
except torch.cuda.OutOfMemoryError as e:
    assert "GPU 1" in str(e)
else:
    raise AssertionError("more than there is")
torch.empty(1 << 30, dtype=torch.uint8, device="cuda:0")
"""

RESULTS = """
a, b = torch.randn(6, 6, dtype=D), torch.randn(6, 6, dtype=D)
there = a.to("cuda:1")
assert torch.cuda.current_device() == 0
for f in (
    lambda x: x.unique(),
    lambda x: x.masked_select(x > 0),
    lambda x: x.nonzero(),
    lambda x: torch.linalg.inv(x),
    lambda x: x.to_sparse().coalesce(),
    lambda x: torch.nn.functional.scaled_dot_product_attention(*(x[None, None],) * 3),
):
    out = f(there)
    assert out.device == torch.device("cuda:1"), out.device
    torch.testing.assert_close(out.cpu().to_dense(), f(a).to_dense(), rtol=1e-12, atol=1e-12)
torch.cuda.manual_seed_all(3)
with torch.cuda.device(1):
    torch.manual_seed(3)
    r = torch.rand(4, device="cuda")
    state = torch.cuda.get_rng_state(1)
    s = torch.rand(4, device="cuda:1")
    torch.cuda.set_rng_state(state, 1)
assert r.device.index == 1 and torch.equal(s, torch.rand(4, device="cuda:1"))
"""

SPLIT = """
class Split(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.devices = first, second
        self.a = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.LayerNorm(16)).double().to(first)
        self.b = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 3)).double().to(second)

    def forward(self, x):
        return self.b(self.a(x.to(self.devices[0])).to(self.devices[1]))


def train(*devices):
    torch.manual_seed(0)
    model = Split(*devices)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for _ in range(5):
        x, y = torch.randn(8, 6, dtype=D), torch.randint(0, 3, (8,))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y.to(devices[1]))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [p.detach().cpu() for p in model.parameters()]


there, here = train("cuda:0", "cuda:1"), train("cpu", "cpu")
torch.testing.assert_close(there, here, rtol=1e-10, atol=1e-12)
"""

EVENTS = """
streams = [torch.cuda.Stream(d) for d in (0, 1)]
x = torch.ones(4, device="cuda:0")
with torch.cuda.stream(streams[0]):
    torch.cuda._sleep(17_000_000)
    done = streams[0].record_event()
assert not done.query()
streams[1].wait_event(done)
with torch.cuda.stream(streams[1]):
    y = x.to("cuda:1", non_blocking=True)
assert not streams[1].query()
torch.cuda.synchronize(1)
assert streams[1].query() and done.query() and y.sum() == 4
"""


@pytest.mark.parametrize(
    "code",
    [COPIES, MEMORY, RESULTS, SPLIT, EVENTS],
    ids=["copies", "memory", "results", "split", "events"],
)
def test_two_devices(code):
    env = os.environ | {"FAKECUDA_DEVICES": "2", "FAKECUDA_MEMORY": "2GiB"}
    done = subprocess.run(
        [sys.executable, "-c", BEGINNING + code],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr

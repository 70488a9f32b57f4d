"""Processes that reduce among devices: torch's ProcessGroupNCCL over shared memory. Each test runs
one program in two or three processes."""

import os
import socket
import subprocess
import sys

import pytest

BEGINNING = """
import copy, datetime, faulthandler, os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

faulthandler.dump_traceback_later(100, exit=True)  # a rank that waits for ever says where
rank, n = int(sys.argv[1]), int(sys.argv[2])
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[3])
torch.set_num_threads(1)
torch.cuda.set_device(0)
dist.init_process_group("nccl", rank=rank, world_size=n, device_id=torch.device("cuda:0"))


def mine(dtype, shape=(3, 1001)):
    g = torch.Generator().manual_seed(rank)
    return torch.randint(-4, 9, shape, generator=g).to(dtype).abs()


def of(r, dtype, shape=(3, 1001)):
    g = torch.Generator().manual_seed(r)
    return torch.randint(-4, 9, shape, generator=g).to(dtype).abs()
"""

ENDING = """
dist.barrier()
dist.destroy_process_group()
print("right", flush=True)
os._exit(0)
"""


def processes(code, n=2, env=(), ending=ENDING):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", BEGINNING + code + ending, str(rank), str(n), str(port)],
            env=os.environ | {"FAKECUDA_MEMORY": "2GiB"} | dict(env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(n)
    ]
    try:
        outs = [p.communicate(timeout=150)[0] for p in started]
    finally:
        for p in started:
            p.kill()
    return outs


COLLECTIVES = """
from functools import reduce

TYPES = [torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16]
TYPES += [torch.float32, torch.float64]
combine = {
    dist.ReduceOp.SUM: lambda a, b: a + b,
    dist.ReduceOp.PRODUCT: lambda a, b: a * b,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}
for dtype in TYPES:
    all_of = [of(r, dtype) for r in range(n)]
    for op, f in combine.items():
        x = mine(dtype).cuda()
        dist.all_reduce(x, op)
        assert torch.equal(x.cpu(), reduce(f, all_of)), (dtype, op)
    x = mine(dtype).cuda()
    dist.all_reduce(x, dist.ReduceOp.AVG)
    mean = sum(t.double() for t in all_of) / n
    if dtype.is_floating_point:
        torch.testing.assert_close(x.cpu(), mean.to(dtype))
    else:
        assert torch.equal(x.cpu(), mean.floor().to(dtype))
    outs = [torch.empty_like(x) for _ in range(n)]
    dist.all_gather(outs, mine(dtype).cuda())
    assert all(torch.equal(a.cpu(), b) for a, b in zip(outs, all_of))
    x = mine(dtype).cuda()
    dist.broadcast(x, 1)
    assert torch.equal(x.cpu(), all_of[1])
    whole = mine(dtype, (n * 4, 5)).cuda()
    part = torch.empty(4, 5, dtype=dtype, device="cuda")
    dist.reduce_scatter_tensor(part, whole)
    expected = sum(of(r, dtype, (n * 4, 5)) for r in range(n))
    assert torch.equal(part.cpu(), expected[rank * 4 : rank * 4 + 4])
    back = torch.empty(n * 4, 5, dtype=dtype, device="cuda")
    dist.all_gather_into_tensor(back, part)
    assert torch.equal(back.cpu(), expected)
    x = mine(dtype).cuda()
    dist.reduce(x, n - 1)
    if rank == n - 1:
        assert torch.equal(x.cpu(), sum(all_of).to(dtype))
    out = torch.empty(n * 2, dtype=dtype, device="cuda")
    dist.all_to_all_single(out, torch.full((n * 2,), rank, device="cuda").to(dtype))
    assert out.tolist() == [r for r in range(n) for _ in range(2)]
x = torch.ones(6, device="cuda", dtype=torch.float64)
dist.all_reduce(x, dist._make_nccl_premul_sum(0.25))
assert x.eq(0.25 * n).all()
"""

MESSAGES = """
big = 3_000_000  # more bytes than a ring holds, both ways at once
there, back = torch.full((big,), float(rank), device="cuda"), torch.empty(big, device="cuda")
right, left = (rank + 1) % n, (rank - 1) % n
for _ in range(2):
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, there, right), dist.P2POp(dist.irecv, back, left)]
    )
    for w in works:
        w.wait()
    assert back.eq(left).all()
small = torch.empty(3, device="cuda")
if rank == 0:
    dist.send(torch.tensor([1.0, 2.0, 3.0], device="cuda"), 1)
elif rank == 1:
    dist.recv(small, 0)
    assert small.tolist() == [1, 2, 3]
pair = dist.new_group([0, 1])
if rank < 2:
    x = torch.ones(4, device="cuda")
    dist.all_reduce(x, group=pair)
    assert x.eq(2).all()
objects = [None] * n
dist.all_gather_object(objects, {"rank": rank})
assert objects == [{"rank": r} for r in range(n)]
"""

GRAPH = """
x = torch.zeros(4, device="cuda")
dist.all_reduce(x)
g = torch.cuda.CUDAGraph()
with torch.cuda.graph(g, capture_error_mode="thread_local"):
    y = x * 2
    dist.all_reduce(y)
for k in range(3):
    x.fill_(k + rank)
    g.replay()
    assert y.eq(sum(2 * (k + r) for r in range(n))).all()
"""

TRAINED = """
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

D = torch.float64


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.LayerNorm(17), nn.Linear(17, 3)).double()


def batches():
    torch.manual_seed(1)
    return [(torch.randn(4 * n, 6, dtype=D), torch.randint(0, 3, (4 * n,))) for _ in range(4)]


def train(model, device, rows, parameters=None):
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for x, y in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows].to(device)), y[rows].to(device)).backward()
        optimizer.step()


expected = make()
train(expected, "cpu", slice(None))
expected = list(expected.parameters())
own = slice(4 * rank, 4 * rank + 4)

net = make().cuda()
train(nn.parallel.DistributedDataParallel(net), "cuda", own)
for p, e in zip(net.parameters(), expected):
    torch.testing.assert_close(p.cpu(), e, rtol=1e-10, atol=1e-12)

net = make().cuda()
for part in net:
    if list(part.parameters()):
        fully_shard(part)
fully_shard(net)
train(net, "cuda", own)
for p, e in zip(net.parameters(), expected):
    torch.testing.assert_close(p.full_tensor().cpu(), e, rtol=1e-10, atol=1e-12)

net = FullyShardedDataParallel(make().cuda(), use_orig_params=True)
train(net, "cuda", own)
with FullyShardedDataParallel.summon_full_params(net):
    for p, e in zip(net.parameters(), expected):
        torch.testing.assert_close(p.cpu(), e, rtol=1e-10, atol=1e-12)
"""

DEAD = """
if rank == 1:
    os._exit(3)
try:
    x = torch.ones(4, device="cuda")
    dist.all_reduce(x)
    dist.all_reduce(x)
except RuntimeError as e:  # DistBackendError is one
    print("refused:", e, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("code", [COLLECTIVES, MESSAGES], ids=["collectives", "messages"])
def test_collectives_give_what_torch_documents(code, n):
    outs = processes(code, n)
    assert all("right" in o for o in outs), "\n".join(outs)


def test_a_collective_in_a_graph_runs_at_every_replay():
    outs = processes(GRAPH)
    assert all("right" in o for o in outs), "\n".join(outs)


def test_data_parallel_and_sharded_models_train_as_on_one_cpu():
    outs = processes(TRAINED)
    assert all("right" in o for o in outs), "\n".join(outs)


def test_who_waits_for_a_process_that_is_gone_is_told():
    outs = processes(DEAD, env={"FAKECUDA_NCCL_SECONDS": "3"}, ending="")
    assert "refused:" in outs[0] and "remote process exited" in outs[0] or "waited" in outs[0], outs

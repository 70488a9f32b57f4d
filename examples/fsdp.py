"""Two processes with fully sharded parameters (FSDP2). The module runs unchanged, on real slices of
each rank's batch. It communicates in every slice, so the ranks agree on the number of slices.

    python examples/fsdp.py
"""

import os
import socket

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import multiprocessing, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import koila
from koila import lazy


def train(rank, wrap, run):
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float64)[rank::2] / 16
    y = torch.tensor(digits.target)[rank::2]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).double()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    model = run(fully_shard(model))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(30):
        input, label = wrap(x[:800], y[:800])
        loss = F.cross_entropy(model(input), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    accuracy = (model(x[800:]).argmax(1) == y[800:]).double().mean().item()
    return loss.item(), accuracy


def work(rank, port):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    expected = train(rank, lambda *values: values, lambda model: model)
    with koila.micro_batch(200):  # the same on all ranks
        # the only additions: lazy() in the loop, opaque() around the sharded model
        loss, accuracy = train(rank, lazy, koila.opaque)
    print(
        f"rank {rank}: {koila.last_plan().n_micro_batches} slices, loss {loss:.6f}, plain "
        f"{expected[0]:.6f}, accuracy {100 * accuracy:.0f} %",
        flush=True,
    )
    assert abs(loss - expected[0]) < 1e-6 and accuracy > 0.85
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        free_port = s.getsockname()[1]
    multiprocessing.spawn(work, args=(free_port,), nprocs=2)

"""Two processes with DistributedDataParallel. Each cuts its batch for its own budget; gradients are
exchanged once a step, with any number of slices.

python examples/ddp.py
"""

import os
import socket

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import multiprocessing, nn
from torch.nn import functional as F

import koila
from koila import lazy


def work(rank, port):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32)[rank::2] / 16
    y = torch.tensor(digits.target)[rank::2]
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with koila.micro_batch([200, 77][rank]):  # the two need not agree
        for step in range(30):
            input, label = lazy(x[:800], y[:800])  # the only line added
            loss = F.cross_entropy(model(input), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    plan = koila.last_plan()
    accuracy = (model(x[800:]).argmax(1) == y[800:]).float().mean().item()
    print(
        f"rank {rank}: {plan.n_micro_batches} slices of {plan.micro_batch}, loss "
        f"{loss.item():.3f}, accuracy {100 * accuracy:.0f} %",
        flush=True,
    )
    mine = nn.utils.parameters_to_vector(model.parameters()).detach()
    both = [torch.zeros_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    assert torch.equal(*both), "the ranks have drifted apart"
    assert accuracy > 0.85
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        free_port = s.getsockname()[1]
    multiprocessing.spawn(work, args=(free_port,), nprocs=2)

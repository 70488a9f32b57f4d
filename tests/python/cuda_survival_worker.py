"""Training steps on a GPU with little memory left, each in a process of its own: forked before CUDA
starts, which takes a tenth of a new interpreter. Prints what happened as JSON. Used by
test_cuda_survival.py.

cuda_survival_worker.py memory MODEL SITUATION   which slices finish, koila's and those by hand
cuda_survival_worker.py numbers MODEL SITUATION  how far gradients of cut steps are from plain ones
cuda_survival_worker.py long|taken MODEL SITUATION
"""

import json
import multiprocessing
import os
import random
import sys

import torch
import torch._dynamo  # an optimizer imports it, which would take most of each case's time
from memory_helpers import (
    by_hand_step,
    clear,
    eager_step,
    fakecuda,
    koila_step,
    memory_only,
    workspace_of_a_product,
)
from torch import nn
from torch.nn import functional as F

import koila

MIB = 1 << 20
SITUATIONS = ("cap", "budget", "fragmented", "others")
FRACTIONS = {
    "mlp": [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0],
    "language": [0.3, 0.6, 1.0],
    "images": [0.3, 0.6, 1.0],
}
LONG_STEP = 900
OTHERS = "FAKECUDA_OTHERS"  # the simulated device's file of bytes that other processes hold


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        return x + self.body(x)


def mlp(is_small):
    width, b, dtype = (128, 128, torch.float64) if is_small else (512, 1024, torch.float32)
    model = nn.Sequential(
        nn.Linear(64, width), *(Block(width) for _ in range(4)), nn.Linear(width, 16)
    )
    return model.to(dtype), (torch.randn(b, 8, 64, dtype=dtype), torch.randint(0, 16, (b, 8)))


class Attention(nn.Module):
    """A causal language model: embedding, blocks of fused attention, logits over a vocabulary."""

    def __init__(self, vocabulary, width, n_blocks, heads=4):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(n_blocks))
        self.mlp = nn.ModuleList(Block(width) for _ in range(n_blocks))
        self.heads = heads

    def forward(self, tokens):
        x = self.embed(tokens)
        b, t, c = x.shape
        for qkv, block in zip(self.qkv, self.mlp):
            parts = qkv(x).chunk(3, -1)
            q, k, v = (u.view(b, t, self.heads, -1).transpose(1, 2) for u in parts)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = block(x + y.transpose(1, 2).reshape(b, t, c))
        return self.head(x)


def language(is_small):
    b, t, vocabulary, width = (64, 32, 97, 64) if is_small else (96, 128, 4000, 256)
    model = Attention(vocabulary, width, 3)
    model.to(torch.float64 if is_small else torch.float32)
    return model, (torch.randint(0, vocabulary, (b, t)), torch.randint(0, vocabulary, (b, t)))


def images(is_small):
    b, size, c, dtype = (96, 16, 16, torch.float64) if is_small else (96, 64, 48, torch.float32)
    layers = []
    for i in range(4):
        layers += [nn.Conv2d(c if i else 3, c, 3, padding=1), nn.GroupNorm(4, c), nn.ReLU(True)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, 10))
    x = torch.randn(b, 3, size, size, dtype=dtype)
    return model.to(dtype), (x, torch.randint(0, 10, (b,)))


MODELS = {"mlp": mlp, "language": language, "images": images}


def loss(model, x, y):
    out = model(x)
    return F.cross_entropy(out.flatten(0, -2), y.flatten())


def made(name, is_small):
    torch.manual_seed(0)
    model, batch = MODELS[name](is_small)
    return model.cuda(), tuple(t.cuda() for t in batch)


# ---- little memory


def of_random_sizes(model, batch, fraction, need):
    """30 steps of random sizes, and tensors of many sizes that stay: free memory is in pieces
    afterwards. fraction: of the whole batch that would fit; it needs so many bytes. Returns what
    stays."""
    draw = random.Random(7)
    kept = []
    for _ in range(30):
        n = draw.randint(1, int(len(batch[0]) * fraction / 2))
        eager_step(model, loss, tuple(t[:n] for t in batch))
        kept.append(torch.empty(draw.randint(1, need // 300), dtype=torch.uint8, device="cuda"))
        if len(kept) > 8:
            del kept[draw.randrange(len(kept))]
    return kept


CONTEXT = 600 * MIB  # of a device's memory: more than a process takes before its first tensor


def hold(n_bytes, ready, done):
    """In a process of its own: keeps so much of the device until `done`."""
    taken = torch.empty(n_bytes, dtype=torch.uint8, device="cuda")
    ready.set()
    done.wait()
    del taken


def another_process_takes(n_bytes):
    """Returns what gives it back."""
    spawn = multiprocessing.get_context("spawn")
    ready, done = spawn.Event(), spawn.Event()
    other = spawn.Process(target=hold, args=(n_bytes, ready, done))
    other.start()
    if not ready.wait(timeout=120):
        other.kill()
        raise RuntimeError(f"the process that was to take {n_bytes} bytes did not start")

    def give_back():
        done.set()
        other.join()

    return give_back


def others_take(n_bytes):
    """Another process takes all that is free but n_bytes. Returns what gives it back."""
    free = torch.cuda.mem_get_info()[0]
    if not fakecuda:
        return another_process_takes(max(free - n_bytes - CONTEXT, 0))
    with open(os.environ[OTHERS], "w") as f:
        f.write(str(free - n_bytes))
    return lambda: os.remove(os.environ[OTHERS])


def limited(situation, limit, mode):
    """From now on torch may reserve `limit` bytes. Returns what ends that."""
    if situation == "others":
        return others_take(max(limit - torch.cuda.memory_reserved(), 0))
    if situation == "budget" and mode == "koila":
        koila.set_budget(limit)
        return lambda: koila.set_budget(None)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(limit / total)
    return lambda: torch.cuda.set_per_process_memory_fraction(1.0)


# ---- cases, each in a process of its own


def train(step, optimizer, n_steps=2):
    for _ in range(n_steps):
        optimizer.zero_grad(set_to_none=True)
        step()
        optimizer.step()


def by_hand(model, batch, optimizer):
    """The largest micro-batch that finishes, of all that cut the batch differently; 0: none."""
    n = len(batch[0])
    for m in sorted({-(-n // k) for k in range(1, n + 1)}, reverse=True):
        try:
            train(lambda m=m: by_hand_step(model, loss, batch, m), optimizer)
            return m
        except torch.OutOfMemoryError:
            clear(model)
            torch.cuda.empty_cache()
    return 0


def memory_case(name, situation, mode, fraction, need):
    """need: bytes that plain PyTorch reserves for the step. mode "peak" returns them."""
    with memory_only():
        model, batch = made(name, is_small=False)
        optimizer = torch.optim.AdamW(model.parameters())
        small = tuple(t[:2] for t in batch)
        train(
            lambda: (koila_step if mode == "koila" else eager_step)(model, loss, small), optimizer
        )
        clear(model)
        torch.cuda.empty_cache()
        held = torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        if mode == "peak":
            train(lambda: eager_step(model, loss, batch), optimizer)
            return {"need": torch.cuda.max_memory_reserved() - held}
        end = limited(situation, held + int(need * fraction), mode)
        if situation == "fragmented":
            kept = of_random_sizes(model, batch, fraction, need)  # noqa: F841
            clear(model)
        out = {"ok": True, "m": len(batch[0])}
        try:
            if mode == "hand":
                out["m"] = by_hand(model, batch, optimizer)
                out["ok"] = out["m"] > 0
            elif mode == "eager":
                train(lambda: eager_step(model, loss, batch), optimizer)
            else:
                train(lambda: koila_step(model, loss, batch), optimizer)
                plan = koila.last_plan()
                out |= {"m": plan.micro_batch, "retries": plan.retries}
        except torch.OutOfMemoryError as e:
            out |= {"ok": False, "m": 0, "error": str(e)[:300]}
        end()
        out["reserved"] = torch.cuda.max_memory_reserved() - held
        return out


def numbers_of(tensors):
    return [t.detach().cpu().numpy() for t in tensors]


def gradients(model):
    return numbers_of(p.grad for p in model.parameters())


def errors(expected, got):
    """The largest difference of each tensor, in its largest entry."""
    return [float(abs(a - b).max() / abs(a).max()) for a, b in zip(expected, got)]


def after_a_small_step(model, batch, step):
    """Whatever is made once is made. Returns the bytes that torch reserves."""
    step(model, loss, tuple(t[:2] for t in batch))
    clear(model)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_reserved()


def plain_case(name):
    """(bytes that plain PyTorch reserves for the step, gradients)"""
    model, batch = made(name, is_small=True)
    held = after_a_small_step(model, batch, eager_step)
    eager_step(model, loss, batch)
    return torch.cuda.max_memory_reserved() - held, gradients(model)


def share_of(need, fraction):
    """Bytes for a part of a step that needs `need`."""
    whole = workspace_of_a_product()  # however few the rows are
    return whole + int((need - whole) * fraction)


def numbers_case(name, situation, fraction, need, expected):
    model, batch = made(name, is_small=True)
    if situation == "fragmented":
        after_a_small_step(model, batch, eager_step)
    held = after_a_small_step(model, batch, koila_step)
    end = limited(situation, held + share_of(need, fraction), "koila")
    kept = of_random_sizes(model, batch, fraction / 4, need) if situation == "fragmented" else []
    clear(model)
    koila_step(model, loss, batch)
    end()
    del kept
    return {
        "slices": koila.last_plan().n_micro_batches,
        "errors": errors(expected, gradients(model)),
    }


# ---- 1,000 steps


def long_case(wrap, n_steps):
    """Trains under a cap that a normal step passes with ease. Returns (slices of each step, the
    parameters)."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 4)
    )
    model.to("cuda", torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    draw = torch.Generator().manual_seed(1)
    slices = []
    for i in range(n_steps):
        t = 16 * (8 if i == LONG_STEP else 1)
        x = torch.randn(32, t, 8, generator=draw, dtype=torch.float64).cuda()
        y = torch.randint(0, 4, (32, t), generator=draw).cuda()
        if i == 10 and wrap:  # whatever is made once is made
            limited("cap", torch.cuda.memory_reserved() + 20 * MIB, "")
        try:
            optimizer.zero_grad()
            loss(model, *(koila.lazy(x, y) if wrap == "koila" else (x, y))).backward()
        except torch.OutOfMemoryError as e:
            return f"{type(e).__name__} at step {i}", None
        optimizer.step()
        slices.append(koila.last_plan().n_micro_batches if wrap == "koila" else 1)
    return slices, numbers_of(model.parameters())


def long(n_steps):
    expected = apart(long_case, "", n_steps)[1]
    slices, got = apart(long_case, "koila", n_steps)
    plain = apart(long_case, "plain", n_steps)[0]
    return {"plain": plain, "slices": slices, "errors": got and errors(expected, got)}


# ---- memory that goes while a step runs


def taken_case(name, need, expected):
    model, batch = made(name, is_small=True)
    after_a_small_step(model, batch, koila_step)
    ends, calls = [], []

    @koila.opaque
    def take(x):
        calls.append(len(x))
        if len(calls) == 2:  # it was recorded on few rows; now it runs, so the plan is made
            ends.append(others_take(share_of(need, 1 / 3)))
        return x * 1.0

    koila_step(nn.Sequential(take_layer(take), *model), loss, batch)
    ends.pop()()
    plan = koila.last_plan()
    return {
        "slices": plan.n_micro_batches,
        "retries": plan.retries,
        "errors": errors(expected, gradients(model)),
    }


class take_layer(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


# ---- processes


def apart(case, *args):
    """What a case returns, run in a process of its own."""
    fork = multiprocessing.get_context("fork")
    mine, its = fork.Pipe(duplex=False)
    process = fork.Process(target=lambda: its.send(case(*args)))
    process.start()
    its.close()
    try:
        return mine.recv()
    finally:
        process.join()


def main(what, name, situation):
    if what == "long":
        return long(1000)
    if what == "memory":
        need = apart(memory_case, name, situation, "peak", 1.0, 0)["need"]
        out = {}
        for f in FRACTIONS[name]:
            with_spare = need + (32 * MIB if f == 1.0 else 0)  # plain PyTorch just fits
            modes = ("eager", "hand", "koila") if f in (0.3, 1.0) else ("hand", "koila")
            out[f] = {m: apart(memory_case, name, situation, m, f, with_spare) for m in modes}
        return out
    need, expected = apart(plain_case, name)
    if what == "taken":
        return apart(taken_case, name, need, expected)
    cut = {f: apart(numbers_case, name, situation, f, need, expected) for f in (0.3, 0.5)}
    return {"cut": cut}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))

"""Random programs: views, in-place writes, factories, reductions, products and indexing, on shapes
where another size often equals the batch. Placed and sliced, every value that is alive at the end
must equal eager's. Deterministic by seed.

    python tests/oracle/test_fuzz.py FIRST LAST       # seeds; prints what fails
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import slow


class Program:
    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        self.B = rng.choice([4, 6])
        self.other = rng.choice([self.B, 3, 2])
        g = torch.Generator().manual_seed(seed)
        shapes = [(self.B, self.other), (self.other, self.B), (self.B, 2, self.other), (self.B,)]
        self.inputs, self.dims = [], []
        for _ in range(rng.randint(1, 3)):
            s = rng.choice(shapes)
            self.inputs.append(torch.rand(s, generator=g, dtype=torch.float64) + 0.1)
            self.dims.append(
                s.index(self.B) if rng.random() < 0.7 else len(s) - 1 - s[::-1].index(self.B)
            )
        # some programs have two axes; when both have as many rows, sizes tell nothing
        self.axes = (
            [rng.randrange(2) for _ in self.inputs]
            if seed % 3 == 0 and len(self.inputs) > 1
            else [0] * len(self.inputs)
        )
        if 0 not in self.axes:
            self.axes[0] = 0
        self.reals = [
            torch.rand(rng.choice(shapes), generator=g, dtype=torch.float64) for _ in range(2)
        ]
        self.steps = rng.randint(3, 12)
        self.seed = seed
        self.log = []

    def __call__(self, *inputs):
        rng = random.Random(self.seed + 1)
        self.log.clear()
        pool = [*inputs, *[r.clone() for r in self.reals]]
        for _ in range(self.steps):
            for _ in range(20):
                name = rng.choice([n for n in dir(self) if n.startswith("op_")])
                x = rng.choice(pool[-6:] if rng.random() < 0.7 else pool)
                try:
                    y = getattr(self, name)(rng, x, pool)
                except (RuntimeError, IndexError, ValueError, TypeError):
                    continue
                if y is None:
                    continue
                ys = [
                    t
                    for t in (y if isinstance(y, (tuple, list)) else [y])
                    if isinstance(t, torch.Tensor) and t.numel() < 3000 and t.is_floating_point()
                ]
                if any(not t.isfinite().all() or t.abs().max() > 1e6 for t in ys if t.numel()):
                    raise Unfit
                self.log.append((name, tuple(x.shape), [tuple(t.shape) for t in ys]))
                pool += ys
                break
        return pool[len(inputs) :] + [p * 1 for p in pool[: len(inputs)]]

    # -- each gets (rng, x, pool); raises when it does not fit
    def op_unary(self, rng, x, pool):
        return getattr(torch, rng.choice(["sin", "tanh", "neg", "abs", "sigmoid"]))(x)

    def op_scalar(self, rng, x, pool):
        return rng.choice([lambda: x * 0.5, lambda: x + 1, lambda: x / 2, lambda: 1 - x])()

    def op_binary(self, rng, x, pool):
        return getattr(torch, rng.choice(["add", "sub", "mul", "maximum"]))(x, rng.choice(pool))

    def op_div(self, rng, x, pool):
        return x / (rng.choice(pool).abs() + 1)

    def op_reduce(self, rng, x, pool):
        return getattr(torch, rng.choice(["sum", "mean", "amax", "logsumexp"]))(
            x, rng.randrange(x.dim()), rng.random() < 0.5
        )

    def op_all(self, rng, x, pool):
        return getattr(x, rng.choice(["sum", "mean", "std", "norm", "max"]))()

    def op_var(self, rng, x, pool):
        return torch.var(x, rng.randrange(x.dim()), correction=0, keepdim=rng.random() < 0.5)

    def op_softmax(self, rng, x, pool):
        return getattr(torch, rng.choice(["softmax", "log_softmax", "cumsum"]))(
            x, rng.randrange(x.dim())
        )

    def op_transpose(self, rng, x, pool):
        return x.transpose(rng.randrange(x.dim()), rng.randrange(x.dim()))

    def op_reshape(self, rng, x, pool):
        n = x.numel()
        k = rng.choice([d for d in range(1, n + 1) if n % d == 0])
        return x.reshape(rng.choice([(k, n // k), (n,), (k, -1, 1), (-1, k)]))

    def op_merge(self, rng, x, pool):
        d = rng.randrange(x.dim() - 1)
        return x.flatten(d, d + 1)

    def op_split_dim(self, rng, x, pool):
        d = rng.randrange(x.dim())
        return x.unflatten(d, (rng.choice([2, 3, self.B]), -1))

    def op_unsqueeze(self, rng, x, pool):
        return x.unsqueeze(rng.randrange(x.dim() + 1)) if x.dim() < 4 else None

    def op_squeeze(self, rng, x, pool):
        return rng.choice([lambda: x.squeeze(), lambda: x.squeeze(rng.randrange(x.dim()))])()

    def op_expand(self, rng, x, pool):
        return x.unsqueeze(0).expand(self.B, *x.shape) if x.dim() < 3 else None

    def op_select(self, rng, x, pool):
        d = rng.randrange(x.dim())
        return x.select(d, rng.randrange(x.shape[d]))

    def op_slice(self, rng, x, pool):
        d = rng.randrange(x.dim())
        a = rng.randrange(x.shape[d])
        return x.narrow(d, a, rng.randint(1, x.shape[d] - a))

    def op_halves(self, rng, x, pool):
        return x.split(self.B, rng.randrange(x.dim()))

    def op_cat(self, rng, x, pool):
        return torch.cat([x, rng.choice(pool)], rng.randrange(x.dim()))

    def op_stack(self, rng, x, pool):
        return (
            torch.stack([x, rng.choice(pool)], rng.randrange(x.dim() + 1)) if x.dim() < 4 else None
        )

    def op_repeat(self, rng, x, pool):
        return x.repeat(*[rng.choice([1, 2]) for _ in x.shape])

    def op_flip(self, rng, x, pool):
        return x.flip(rng.randrange(x.dim()))

    def op_matmul(self, rng, x, pool):
        return (
            x @ rng.choice([y for y in pool]).transpose(-1, -2)
            if rng.random() < 0.5
            else x.transpose(-1, -2) @ rng.choice(pool)
        )

    def op_addmm(self, rng, x, pool):
        y = rng.choice(pool)
        return torch.addmm(rng.choice(pool), x, y)

    def op_zeros_written(self, rng, x, pool):
        z = torch.zeros(x.shape, dtype=x.dtype)
        d = rng.randrange(x.dim())
        z.narrow(d, 0, x.shape[d] - 1).copy_(x.narrow(d, 1, x.shape[d] - 1))
        return z

    def op_accumulate(self, rng, x, pool):
        z = torch.zeros((3, *x.shape[1:]), dtype=x.dtype)
        return z.index_add_(0, torch.arange(x.shape[0]) % 3, x)

    def op_ones(self, rng, x, pool):
        return torch.full(tuple(x.shape), 0.5, dtype=x.dtype) * (x if rng.random() < 0.7 else 1)

    def op_empty(self, rng, x, pool):
        return torch.empty_like(x).fill_(0.3) + x

    def op_write(self, rng, x, pool):
        y = x * 1
        view = rng.choice(
            [
                lambda: y,
                lambda: y.transpose(0, -1),
                lambda: y.select(rng.randrange(y.dim()), 0),
                lambda: y.narrow(0, 0, max(1, y.shape[0] - 1)),
                lambda: y.reshape(-1),
            ]
        )()
        rng.choice(
            [
                lambda: view.mul_(0.5),
                lambda: view.add_(rng.choice(pool)),
                lambda: view.copy_(rng.choice(pool)),
                lambda: view.fill_(0.25),
                lambda: view.zero_(),
            ]
        )()
        return y

    def op_total(self, rng, x, pool):
        return torch.zeros((), dtype=x.dtype).add_(x.mean()).add_(rng.choice(pool).sum())

    def op_index(self, rng, x, pool):
        return x[torch.arange(x.shape[0]), torch.arange(x.shape[0]) % x.shape[1]]

    def op_index_select(self, rng, x, pool):
        d = rng.randrange(x.dim())
        return x.index_select(d, torch.arange(x.shape[d]).flip(0))

    def op_gather(self, rng, x, pool):
        d = rng.randrange(x.dim())
        return x.gather(
            d, (rng.choice([p for p in pool if p.shape == x.shape]) * 10).long() % x.shape[d]
        )

    def op_embed(self, rng, x, pool):
        table = rng.choice([p for p in pool if p.dim() == 2])
        return (
            torch.nn.functional.embedding((x * 10).long().abs() % table.shape[0], table)
            if x.dim() < 3
            else None
        )

    def op_where(self, rng, x, pool):
        return torch.where(rng.choice(pool) > 0.5, x, rng.choice(pool))

    def op_sort(self, rng, x, pool):
        return x.sort(rng.randrange(x.dim()))[0]

    def op_bmm(self, rng, x, pool):
        y = rng.choice([p for p in pool if p.dim() == 3])
        return torch.bmm(x, y.transpose(1, 2))

    def op_tril(self, rng, x, pool):
        return x.tril()


class Unfit(Exception):
    """Numbers too large to compare."""


def judge(seed):
    program = Program(seed)
    torch.manual_seed(seed)
    try:
        recording = slow.record(program, program.inputs, program.dims, program.axes)
    except Unfit:
        return "unfit"
    B = program.B
    ways = [[B - 1, 1], [1] * B, [B // 2, B - B // 2], [B]]
    if max(program.axes):
        ways = [[w, v] for w, v in zip(ways, ways[1:] + ways[:1])]
    for how in ("koila__place", "koila__place_cut"):
        run = recording.place(how)
        try:
            run.check(ways, atol=1e-8, rtol=1e-8)
        finally:
            run.close()
    return "ok"


@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_random_programs(first):
    for seed in range(first, first + 100):
        try:
            judge(seed)
        except Exception as e:
            raise AssertionError(f"seed {seed}: {type(e).__name__}: {e}") from e


if __name__ == "__main__":
    first, last = int(sys.argv[1]), int(sys.argv[2])
    counts: dict[str, int] = {}
    for seed in range(first, last):
        try:
            result = judge(seed)
        except NotImplementedError:
            result = "not recorded"
        except Exception as e:
            result = "WRONG"
            print(f"seed {seed}: {type(e).__name__}: {str(e)[:400]}", flush=True)
        counts[result] = counts.get(result, 0) + 1
    print(counts)
    sys.exit("WRONG" in counts)

"""Random models with loops over time in Python: what is read at each time, in which order, what the
state does, how results are joined, and what stands between the loops.

A model is a seed: it makes the same choices on plain and on lazy tensors, since they depend on
sizes alone."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIZES = (19, 33, 48, 67, 96, 130)


def sizes(seed: int) -> list[int]:
    """Samples, and the lengths of one sequence or of two."""
    r = random.Random(seed)
    lengths = [r.choice(SIZES) for _ in range(1 + (r.random() < 0.3))]
    return [r.choice((1, 1, 2)), *lengths]


def _orders(r: random.Random, times: int) -> list[int]:
    kind = r.randrange(6)
    forward = list(range(times))
    if kind == 0:
        return forward[::-1]
    if kind == 1:
        return forward[:: r.randint(2, 3)]
    if kind == 2:
        return forward[r.randrange(times // 2) :]
    if kind == 3:
        return [t - times for t in forward]
    if kind == 4:
        return r.sample(forward, times)
    return forward


def _readers(kind: int, x: Tensor) -> Callable[[int], Tensor]:
    """What gives x at time t as [samples, width]."""
    times = x.shape[1]
    if kind == 0:
        items = x.unbind(1)
        return lambda t: items[t]
    if kind == 1:
        turned = x.transpose(0, 1)
        return lambda t: turned[t]
    if kind == 2:
        turned = x.transpose(1, 2).contiguous()
        return lambda t: turned[..., t]
    if kind == 3:
        return lambda t: x[:, t % times : t % times + 1].squeeze(1)
    if kind == 4:
        parts = x.split(1, 1)
        return lambda t: parts[t].flatten(1)
    return lambda t: x[:, t]


class Model(nn.Module):
    """Model `seed`, of one or two sequences: [samples, times, 4]."""

    def __init__(self, seed: int):
        super().__init__()
        self.seed = seed
        r = random.Random(seed)
        self.samples, self.times, *others = sizes(seed)
        self.others = sum(others)
        self.width = r.randint(6, 12)
        n = self.width
        self.first = nn.Linear(4, n)
        self.w, self.u = (nn.Parameter(torch.randn(n, n) / n**0.5) for _ in range(2))
        self.v = nn.Parameter(torch.randn(n))
        self.cell = nn.GRUCell(n, n)
        self.conv = nn.Conv1d(n, n, 3, padding=2, groups=n)

    def step(self, r: random.Random, x: Tensor, h: Tensor, whole: Tensor, kind: int) -> Tensor:
        if kind == 0:
            return torch.tanh(x @ self.w + h @ self.u)
        if kind == 1:
            return torch.sigmoid(x) * h + x * self.v
        if kind == 2:
            return self.cell(x, h)
        if kind == 3:
            g = h * torch.sigmoid(x)
            g += x
            return g.mul_(0.5)
        if kind == 4:
            return torch.where(x > 0, h, x * self.v) * 0.9
        if kind == 5:
            return F.dropout(h * 0.5 + x, 0.3)
        if kind == 6:
            return torch.cat([x, h], 1)[:, 1 : 1 + self.width].sin()
        if kind == 7:
            return (h + x + whole.mean(1)).tanh()
        if kind == 8:
            h = h * 0.5
            h[:, :2] = x[:, -2:]
            return h * self.v
        if kind == 9:
            made = (x + h).sin()
            return made.as_strided((self.samples, self.width), (self.width, 1)) * 0.7
        return h * 0.3 + torch.stack([x, h.exp().clamp(max=2)]).amax(0)

    def loop(self, r: random.Random, x: Tensor, y: Tensor) -> Tensor:
        """A loop over x, which reads y too."""
        times = _orders(r, self.times)
        read, other = _readers(r.randrange(9), x), _readers(r.randrange(9), y)
        reads_other, reads_before = r.random() < 0.5, r.random() < 0.3
        kind, joins = r.randrange(11), r.randrange(7)
        h = x.new_zeros(self.samples, self.width) if r.random() < 0.7 else x.mean(1)
        into = torch.zeros_like(x)
        outs = []
        for t in times:
            now = read(t)
            if reads_other:
                now = now * other(t)
            if reads_before:
                now = now + read((t - 1) % self.times)
            h = self.step(r, now, h, y, kind)
            outs.append(h)
            if joins == 6:
                into[:, t] = h
        if joins == 6:
            return into
        if joins == 0:
            return x + h[:, None]
        if joins == 1:
            return x * sum(outs).unsqueeze(1) / len(outs)
        if joins == 2:
            made = torch.stack(outs).transpose(0, 1)
        elif joins == 3:
            made = torch.stack(outs, -1).transpose(1, 2)
        elif joins == 4:
            made = torch.cat([h.unsqueeze(1) for h in outs], 1)
        else:
            made = torch.stack(outs if r.random() < 0.5 else outs[::-1], 1)
        missing = self.times - made.shape[1]
        return torch.cat([made, x[:, :missing]], 1) if missing else made

    def between(self, r: random.Random, x: Tensor, y: Tensor) -> Tensor:
        kind = r.randrange(16)
        if kind == 0:
            return torch.tanh(x @ self.w)
        if kind == 1:
            return x * torch.sigmoid(y)
        if kind == 2:
            return F.layer_norm(x, (self.width,), self.v)
        if kind == 3:
            return x.softmax(1) * y
        if kind == 4:
            return x.cumsum(1) / self.times
        if kind == 5:
            return x.flip(1) + y
        if kind == 6:
            return x.roll(1, 1)
        if kind == 7:
            return x - x.mean(1, keepdim=True)
        if kind == 8:
            return self.conv(x.transpose(1, 2))[..., : self.times].transpose(1, 2)
        if kind == 9:
            return (x @ y.transpose(1, 2)).softmax(-1) @ x
        if kind == 10:
            return F.dropout(x, 0.2)
        if kind == 11:
            return F.pad(x[:, 1:], (0, 0, 0, 1))
        if kind == 12:
            return x.sum(-1, keepdim=True).sin().expand(-1, -1, self.width) * self.v
        if kind == 13:
            return torch.cat([x[:, ::2], y[:, 1::2]], 1)
        if kind == 14:
            z = x * 1.5
            z[:, 1:] += y[:, :-1]
            return z
        return x.reshape(-1, self.width).mul(self.v).view_as(x)

    def over_another(self, r: random.Random, x: Tensor, ys: Tensor) -> Tensor:
        """A loop over the second sequence: its last state, or its mean, is added to all times."""
        y, h, outs = self.first(ys).cos(), x.mean(1), []
        kind, read = r.choice((0, 1, 2, 3, 4, 8, 10)), _readers(r.randrange(9), y)
        for t in range(self.others):
            h = self.step(r, read(t), h, x, kind)
            outs.append(h)
        return x + (h if r.random() < 0.5 else torch.stack(outs, 1).tanh().mean(1))[:, None]

    def forward(self, x: Tensor, ys: Tensor | None = None) -> Tensor:
        r = random.Random(self.seed + 1)
        pool = [self.first(x).sin()]
        if ys is not None:
            pool.append(self.over_another(r, pool[0], ys))
        for i in range(r.randint(2, 5)):
            a, b = pool[-1 - r.randrange(min(2, len(pool)))], r.choice(pool)
            takes = self.loop if i == 0 or r.random() < 0.4 else self.between
            pool.append(takes(r, a, b))
        return pool[-1] + 0.1 * r.choice(pool)

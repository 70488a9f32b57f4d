"""Random programs of views, in-place writes, `out=`, metadata changes, factories and random
operators, with a loss and a backward.

A program is a seed: the same seed makes the same choices on plain and on lazy tensors, because
choices depend only on shapes and flags, which must agree. Everything that a user could notice is
logged: exceptions by type, shapes, strides, version counters, flags, Python values read on the way,
and at the end contents, loss, gradients and the generator's state.

    eager = run(seed, batch_dim, lazily=None)
    lazy = run(seed, batch_dim, lazily=koila.lazy)
    compare(eager, lazy, exact=True)
"""

from __future__ import annotations

import contextlib
import gc
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

BATCH = 6
WITHOUT_RANDOM = "vvvwwwfffmnps"
_seeding = threading.Lock()  # the default generator belongs to all threads


class Refused(Exception):
    """koila said UnsupportedError: the program is not compared."""


@dataclass
class Outcome:
    log: list[str] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    loss: torch.Tensor | None = None
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    generator: bytes = b""
    given: torch.Tensor | None = None  # the tensor handed to lazy(): never written


def _views(r: random.Random, t: torch.Tensor) -> torch.Tensor:
    n = t.dim()
    d = r.randrange(n) if n else 0
    size = t.shape[d] if n else 1
    kind = r.randrange(17)
    if n == 0 or t.numel() == 0:
        return t.view(1) if n == 0 and kind < 8 else t.unsqueeze(0)
    if kind == 0:
        return t[r.randrange(t.shape[0])]
    if kind == 1:
        a = r.randrange(size)
        return t.narrow(d, a, r.randint(1, size - a))
    if kind == 2:
        return t.select(d, r.randrange(size))
    if kind == 3:
        return t.transpose(d, r.randrange(n))
    if kind == 4:
        return t.unsqueeze(r.randint(0, n))
    if kind == 5:
        return t.squeeze()
    if kind == 6:
        return t.view(-1)
    if kind == 7:
        return t.reshape(t.shape[0], -1)
    if kind == 8:
        return r.choice(t.unbind(d))
    if kind == 9:
        return r.choice(t.split(r.randint(1, size), d))
    if kind == 10:
        return r.choice(t.chunk(r.randint(1, 3), d))
    if kind == 11:
        return t.diagonal() if n >= 2 else t.flip(0)
    if kind == 12:
        return t.permute(r.sample(range(n), n))
    if kind == 13:
        return t.unsqueeze(d).expand(*t.shape[:d], r.randint(1, 3), *t.shape[d:])
    if kind == 14:
        return t[..., :: r.randint(1, 2)]
    if kind == 15:
        return (
            t.detach() if r.random() < 0.5 else t.alias() if hasattr(t, "alias") else t.view_as(t)
        )
    return t.flatten()


def _write(r: random.Random, t: torch.Tensor, pool: list[torch.Tensor]) -> torch.Tensor:
    kind = r.randrange(19)
    u = r.choice(pool)
    c = round(r.uniform(0.5, 1.5), 3)
    if kind == 0:
        return t.add_(c)
    if kind == 1:
        return t.mul_(c)
    if kind == 2:
        return t.add_(u)
    if kind == 3:
        return t.mul_(u)
    if kind == 4:
        return t.copy_(u)
    if kind == 5:
        return t.fill_(c)
    if kind == 6:
        return t.zero_()
    if kind == 7:
        return t.relu_()
    if kind == 8:
        return t.sigmoid_()
    if kind == 9:
        return t.clamp_(-c, c)
    if kind == 10:
        t[r.randrange(t.shape[0])] = c
        return t
    if kind == 11:
        t[..., : r.randint(1, 2)] = u if r.random() < 0.5 else c
        return t
    if kind == 12:
        t[t > 0] = c
        return t
    if kind == 13:
        return t.masked_fill_(u > 0, c)
    if kind == 14:
        index = torch.tensor([r.randrange(t.shape[0]) for _ in range(r.randint(1, 3))])
        return t.index_add_(0, index, t.detach()[index].clone() * c)
    if kind == 15:
        index = torch.tensor([r.randrange(t.shape[0]) for _ in range(2)])
        t[index] = t.new_full((), c)
        return t
    if kind == 16:
        return t.add_(u, alpha=c)
    if kind == 17:
        return t.addcmul_(u, u, value=0.1)
    return t.tanh_()


def _fresh(
    r: random.Random, t: torch.Tensor, pool: list[torch.Tensor], w: torch.Tensor
) -> torch.Tensor:
    kind = r.randrange(18)
    u = r.choice(pool)
    c = round(r.uniform(0.5, 1.5), 3)
    if kind == 0:
        return t + u
    if kind == 1:
        return t * u
    if kind == 2:
        return t * c + 1
    if kind == 3:
        return torch.tanh(t)
    if kind == 4:
        return torch.sigmoid(t)
    if kind == 5:
        return t.clone()
    if kind == 6:
        return t @ w
    if kind == 7:
        return t.sum(r.randrange(t.dim()) if t.dim() else (), keepdim=r.random() < 0.5)
    if kind == 8:
        return t.mean()
    if kind == 9:
        return torch.cat([t, u], r.randrange(max(t.dim(), 1)))
    if kind == 10:
        return torch.stack([t, u])
    if kind == 11:
        return torch.softmax(t, -1)
    if kind == 12:
        return t.contiguous() if r.random() < 0.5 else t.reshape(-1)
    if kind == 13:
        return t.new_zeros(t.shape).copy_(t) * c
    if kind == 14:
        out = torch.empty_like(t)
        out.copy_(t)
        out[..., :1] = c
        return out
    if kind == 15:
        return torch.where(t > u, t, u)
    if kind == 16:
        return t[t.detach().argsort(0)[0]] if t.dim() == 1 else t.flip(0)
    return t.new_ones(t.shape) * t


def _random(r: random.Random, t: torch.Tensor) -> torch.Tensor:
    kind = r.randrange(8)
    if kind == 0:
        return torch.dropout(t, 0.5, True)
    if kind == 1:
        return t * torch.rand_like(t)
    if kind == 2:
        return t + torch.randn_like(t)
    if kind == 3:
        return t * torch.bernoulli(torch.sigmoid(t.detach()))
    if kind == 4:
        return t * torch.empty_like(t).bernoulli_(0.4)
    if kind == 5:
        return t.new_empty(t.shape).normal_() * t
    if kind == 6:
        noise = torch.empty_like(t)
        noise[:, : max(1, t.shape[1] // 2)].normal_()
        noise[:, max(1, t.shape[1] // 2) :].zero_()
        return t + noise
    return t.new_empty(t.shape).uniform_(-1, 1) + t


def _metadata(r: random.Random, t: torch.Tensor) -> torch.Tensor:
    kind = r.randrange(4)
    if kind == 0:
        return t.t_()
    if kind == 1:
        return t.unsqueeze_(0)
    if kind == 2:
        return t.squeeze_()
    return t.transpose_(0, t.dim() - 1)


def _samples(r: random.Random, t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A loop over samples: rows or parts of a dimension, each through a little net, then joined or
    added up."""
    if not t.dim() or not t.numel() or not t.dtype.is_floating_point:
        return t
    d = r.randrange(t.dim())
    size = t.shape[d]
    kind = r.randrange(5)
    if kind == 0:
        parts = list(t.unbind(d))
    elif kind == 1:
        parts = list(t.split(r.randint(1, size), d))
    elif kind == 2:
        parts = list(t.chunk(r.randint(1, 4), d))
    elif kind == 3:
        order = [r.randrange(-size, size) for _ in range(r.randint(1, size))]
        parts = [t.select(d, i) for i in order]
    else:
        n = r.randint(1, size)
        parts = [t.narrow(d, i, min(n, size - i)) for i in range(0, size, n)]

    def net(x: torch.Tensor) -> torch.Tensor:
        if x.dim() and x.shape[-1] == w.shape[0]:
            x = (x @ w).tanh()
        return (x * 1.5 + 0.1).sigmoid()

    layers = r.randrange(4)
    if layers == 3:
        parts = [net(x).add_(0.5).mul_(x) for x in parts]
    elif layers:
        parts = [net(x) for x in parts]
    kind = r.randrange(5)
    if kind == 0 and all(x.shape == parts[0].shape for x in parts):
        return torch.stack(parts, r.randint(0, parts[0].dim()))
    if kind == 1 and parts[0].dim():
        return torch.cat(parts, min(d, parts[0].dim() - 1))
    if kind == 2:
        total = torch.zeros((), dtype=t.dtype)
        for x in parts:
            total += x.sum()
        return total
    if kind == 3:
        return torch.stack([x.mean() for x in parts])
    total = parts[0].sum() * 0.5
    for i, x in enumerate(parts):
        total = total - x.pow(2).sum() if i % 2 else total + x.sum()
    return total


def _no_grad(r: random.Random, t: torch.Tensor, pool: list[torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        kind = r.randrange(5)
        if kind == 0:
            return t.mul_(0.5)
        if kind == 1:
            return torch.add(t, 1, out=torch.empty_like(t))
        if kind == 2:
            target = t.detach()
            torch.mul(t, 2, out=target)
            return target
        version = t._version
        if kind == 3:
            torch._foreach_mul_([t], 0.5)
        else:
            torch._foreach_add_([t], [t.clone()])
        # not counted by some of CUDA's own kernels, nor by any under another's mode
        if t._version == version:
            torch.autograd.graph.increment_version(t)
        return t


def _made(r: random.Random, t: torch.Tensor) -> torch.Tensor:
    """A buffer as programs make them, with the batch on some axis or on none."""
    shape = r.choice(
        [
            tuple(t.shape),
            (BATCH, 5),
            (3, BATCH),
            (2, BATCH, 5),
            (BATCH, 4, 5),
            (4, BATCH, 5),
            (BATCH,),
            (BATCH, BATCH),
            (4, 5),
        ]
    )
    kind = r.randrange(5)
    if kind == 0:
        return torch.zeros(shape, dtype=t.dtype)
    if kind == 1:
        return torch.ones(*shape, dtype=t.dtype)
    if kind == 2:
        return torch.full(shape, 0.5, dtype=t.dtype)
    if kind == 3:
        return torch.empty(shape, dtype=t.dtype).normal_()
    out = torch.zeros(shape, dtype=t.dtype)
    for i in range(out.shape[0]):
        out[i, ..., : r.randint(1, 3)] = 0.1 * i
    return out


def _exposed(r: random.Random, t: torch.Tensor) -> torch.Tensor:
    """What is done with a plain tensor's memory behind the dispatcher's back."""
    kind = r.randrange(4)
    if kind == 0:
        t.detach().numpy()[...] += 0.25
    elif kind == 1:
        torch.from_dlpack(t.detach())
    elif kind == 2:
        assert (
            t.data_ptr()
            == t.detach().untyped_storage().data_ptr() + t.storage_offset() * t.element_size()
        )
    else:
        t.detach().apply_(lambda v: v * 0.5)
    return t


def _behind(r: random.Random, w: torch.Tensor) -> None:
    """A write that no version counter shows, to the parameter. What was recorded from it before is
    StaleValueError's; eager's value otherwise."""
    kind = r.randrange(6)
    c = round(r.uniform(0.8, 1.2), 3)
    if kind == 0:
        w.data.mul_(c)
    elif kind == 1:
        w.data[r.randrange(w.shape[0])] = c
    elif kind == 2:
        w.detach().numpy()[...] *= c
    elif kind == 3:
        w.data = w.data * c
    elif kind == 4:
        # of a GPU's memory, DLPack's writes are not seen: docs/limits.md
        (w.data if w.is_cuda else torch.from_dlpack(w.detach())).add_(0.01)
    else:
        w.detach().T.data.clamp_(-1, 1)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _Mode(TorchDispatchMode):
    """Changes what some operators give."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.tanh.default, torch.ops.aten.mm.default):
            return result * 1.5
        return result


def _strided(r: random.Random, t: torch.Tensor) -> torch.Tensor:
    size = tuple(t.shape)
    return t.as_strided(size[:1] or (1,), (1,), t.storage_offset())


def run(
    seed: int,
    batch_dim: int = 0,
    lazily: Callable[..., Any] | None = None,
    *,
    steps: int = 12,
    dtype: torch.dtype = torch.float64,
    kinds: str = "vvvwwwfffrmnps",
    refusals: tuple[type[BaseException], ...] = (),
    nudge: int | None = None,
) -> Outcome:
    """Run program `seed`, on plain tensors or on what `lazily(x, batch=batch_dim)` makes of them. v
    views, w writes, f fresh, r random, m metadata, n no_grad, p Python values, s as_strided, z
    torch.zeros and its like, e the memory of such a tensor, d writes by the back door, o another
    mode or default dtype from here on. nudge: the seed of random steps of one unit in the last
    place, up or down, of two thirds of the inputs."""
    with contextlib.ExitStack() as others:  # other people's modes
        return _run(seed, batch_dim, lazily, steps, dtype, kinds, refusals, others, nudge)


def _run(
    seed: int,
    batch_dim: int,
    lazily: Callable[..., Any] | None,
    steps: int,
    dtype: torch.dtype,
    kinds: str,
    refusals: tuple[type[BaseException], ...],
    others: contextlib.ExitStack,
    nudge: int | None,
) -> Outcome:
    r = random.Random(seed)
    shape = [4, 5]
    shape.insert(batch_dim, BATCH)
    with _seeding:
        torch.manual_seed(seed)
        x = torch.randn(shape, dtype=dtype)
        w = torch.randn(shape[-1], shape[-1], dtype=dtype, requires_grad=True)
    if nudge is not None:
        _nudge([x, w.detach()], nudge)
    given = x.clone()
    out = Outcome(given=given)
    data: Any = given
    if lazily is not None:
        data = lazily(given, batch=batch_dim)
    pool: list[torch.Tensor] = [data * 1.0, data @ w]
    if r.random() < 0.3:
        pool.append(data)
    relaid: set[int] = set()
    buffers: list[torch.Tensor] = []  # whose memory nobody has asked for
    for step in range(steps):
        kind = r.choice(kinds)
        at = r.randrange(len(pool))
        t = pool[at]
        state = r.getstate()
        try:
            if kind == "v":
                new = _views(r, t)
            elif kind == "w":
                new = _write(r, t, pool)
            elif kind == "f":
                new = _fresh(r, t, pool, w)
            elif kind == "r":
                new = _random(r, t)
            elif kind == "m":
                new = _metadata(r, t)
            elif kind == "l":
                new = _samples(r, t, w)
            elif kind == "n":
                new = _no_grad(r, t, pool)
            elif kind == "s":
                new = _strided(r, t)
            elif kind == "d":
                _behind(r, w)
                new = t @ w if t.dim() and t.shape[-1] == w.shape[0] else t
            elif kind == "o":
                others.close()
                choice = r.randrange(4)
                if choice == 0:
                    others.enter_context(_Mode())
                elif choice == 1:
                    others.enter_context(default_dtype(torch.float64))
                new = t / 2 if choice < 2 else (t > 0).sum(-1) / 3
            elif kind == "z":
                new = _made(r, t)
                buffers.append(new)
            elif kind == "e":
                # Once: like autograd, a recording does not notice that numpy writes memory.
                new = _exposed(r, buffers.pop(r.randrange(len(buffers)))) if buffers else t
            else:
                value = float(t.detach().sum()) if r.random() < 0.7 else bool((t > 0).any())
                out.log.append(f"{step} value {value!r}")
                new = t
        except refusals as e:
            raise Refused(str(e)) from None
        except (RuntimeError, ValueError, IndexError, TypeError) as e:
            out.log.append(f"{step} {kind} raises {type(e).__name__}: {_said(e)}")
            new = t
        # whatever a choice drew before it raised, both worlds go on from the same place
        r.setstate(state)
        r.random()
        if kind == "m":
            relaid.add(at)
        try:
            told = _describe(new, any(new is pool[i] for i in relaid), refusals)
        except refusals as e:
            raise Refused(str(e)) from None
        out.log.append(f"{step} {kind}{at} {told}")
        if not any(new is p for p in pool) and new.numel() < 3000:
            pool.append(new)
    if r.random() < 0.5:
        others.close()
    try:
        total: Any = 0
        for i, t in enumerate(pool):
            if t.dtype.is_floating_point and t.numel():
                total = total + (t * (0.3 + 0.1 * i)).sin().sum()
        out.loss = total.detach()
        if total.requires_grad:
            total.backward()
    except refusals as e:
        raise Refused(str(e)) from None
    except (RuntimeError, IndexError) as e:
        # with a changed layout, a subclass' autograd may trip over a saved view (a select beyond
        # the new size) before it finds it out of date
        out.log.append("backward raises" + ("" if relaid else f" {type(e).__name__}: {_said(e)}"))
    others.close()
    out.values = [t.detach() for t in pool]
    out.gradients = [w.grad]
    out.generator = torch.default_generator.get_state().numpy().tobytes()
    if lazily is not None:
        try:
            out.values = [plain(t) for t in out.values]
            out.loss = plain(out.loss) if out.loss is not None else None
            out.gradients = [None if g is None else plain(g) for g in out.gradients]
        except refusals as e:
            raise Refused(str(e)) from None
        assert torch.equal(given, x), "the tensor handed to lazy() was written"
    return out


def _nudge(tensors: Sequence[torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for t in tensors:
        steps = torch.randint(-1, 2, t.shape, generator=generator, dtype=t.dtype, device="cpu")
        t.mul_(1 + torch.finfo(t.dtype).eps * steps.to(t.device))


def together(
    seeds: Sequence[int],
    lazily: Callable[..., Any] | None,
    refusals: tuple[type[Exception], ...],
    kinds: str = WITHOUT_RANDOM,
    rows: int | None = None,
) -> list[Outcome | None]:
    """Programs `seeds`, each in a thread of its own, all at once, in slices of `rows`. None:
    refused. They draw no random numbers, for the generator belongs to all threads."""
    import koila

    found: list[Any] = [None] * len(seeds)

    def work(i: int, seed: int) -> None:
        try:
            with koila.micro_batch(rows):
                found[i] = run(seed, seed % 2, lazily, kinds=kinds, refusals=refusals)
            found[i].generator = b""
        except Refused:
            pass
        except BaseException as e:
            found[i] = e

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(seeds)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for outcome in found:
        if isinstance(outcome, BaseException):
            raise outcome
    return found


def _describe(t: torch.Tensor, relaid: bool, refusals: tuple[type[BaseException], ...]) -> str:
    """What a user can see of `t`. Left out: the stride of a dimension of one element, which
    addresses nothing, and shape functions choose it as they like; and, of a tensor whose layout was
    written in place (`relaid`), whether it is a view."""
    strides = tuple(d if n > 1 else None for n, d in zip(t.shape, t.stride()))
    is_view = None if relaid else t._is_view()
    text = f"{tuple(t.shape)} {strides} {t.storage_offset()} v{t._version} view={is_view}"
    try:
        return f"{text} grad={t.requires_grad} leaf={t.is_leaf}"
    except refusals:
        raise
    except RuntimeError as e:
        # a view of a split whose base was written: autograd refuses to look at it
        return f"{text} {_said(e)}"


def _said(e: Exception) -> str:
    """The beginning of a message; the reshape of a subclass has another name in autograd's, and
    Python asks a subclass first when it compares: `a > b` is `b < a`."""
    return str(e).replace("ReshapeAlias", "View").partition(" a (")[0][:60]


@contextlib.contextmanager
def views_replayed() -> Iterator[None]:
    """Plain PyTorch, but autograd writes the gradient of a written view as it does for subclasses:
    it replays the view's function, where for a plain tensor it takes the view by memory. The two
    are the same in mathematics, and now and then not in the last bit."""
    from koila._layout import view_by_memory

    writes = {
        name: getattr(torch.Tensor, name) for name in ("t_", "squeeze_", "unsqueeze_", "transpose_")
    }

    def in_place(name: str) -> Any:
        def method(self: torch.Tensor, *args: int) -> torch.Tensor:
            if not self._is_view():
                views = [t for t in gc.get_objects() if type(t) is torch.Tensor and t._base is self]
                writes[name](self, *args)
                with torch.enable_grad():
                    for v in views:
                        if (
                            torch._C._autograd._get_creation_meta(v)
                            == torch._C._autograd.CreationMeta.DEFAULT
                        ):
                            torch._C._swap_tensor_impl(v, view_by_memory(self, v))
                return self
            unseen = self.requires_grad and torch.ops.aten.is_leaf(self)
            if (unseen and torch.is_grad_enabled()) or torch._C._autograd._get_creation_meta(
                self
            ) != torch._C._autograd.CreationMeta.DEFAULT:
                return writes[name](self, *args)  # raises
            writes[name](self.data, *args)  # raises, where the layout is impossible
            torch._C._autograd._unsafe_set_version_counter((self,), (self._version + 1,))
            with torch.enable_grad():
                torch._C._swap_tensor_impl(self, getattr(self, name[:-1])(*args))
            return self

        return method

    for name in writes:
        setattr(torch.Tensor, name, in_place(name))
    try:
        with torch.autograd._force_original_view_tracking(True):
            yield
    finally:
        for name, write in writes.items():
            setattr(torch.Tensor, name, write)


def plain(t: torch.Tensor) -> torch.Tensor:
    from koila import LazyTensor

    return t.torch() if isinstance(t, LazyTensor) else t


def compare(
    a: Outcome,
    b: Outcome,
    *,
    exact: bool,
    tolerance: float = 1e-11,
    rounding: dict[str, float] | None = None,
) -> list[str]:
    """Differences, in words; empty when the two are the same. rounding: what is allowed on top of
    `tolerance` to what bears that name (roundings())."""
    bad: list[str] = []
    allowed = rounding or {}
    for i, (p, q) in enumerate(zip(a.log, b.log)):
        if p != q and not (not exact and " value " in p and " value " in q):
            bad.append(f"log {i}: {p!r} against {q!r}")
            break
    if len(a.log) != len(b.log):
        bad.append(f"log lengths {len(a.log)} and {len(b.log)}: {a.log[-1]!r} {b.log[-1]!r}")

    def same(name: str, p: torch.Tensor | None, q: torch.Tensor | None) -> None:
        if (p is None) != (q is None):
            bad.append(f"{name}: one is missing")
        elif p is not None and q is not None:
            if p.shape != q.shape or p.dtype != q.dtype:
                bad.append(f"{name}: {p.dtype}{tuple(p.shape)} against {q.dtype}{tuple(q.shape)}")
            elif exact and not torch.equal(p.nan_to_num(), q.nan_to_num()):
                bad.append(f"{name}: differs by {(p - q).abs().max().item():.3g}")
            elif not exact and not torch.allclose(
                p, q, rtol=tolerance, atol=tolerance + allowed.get(name, 0.0), equal_nan=True
            ):
                bad.append(f"{name}: differs by {(p - q).abs().max().item():.3g}")

    for name, p, q in _pairs(a, b):
        same(name, p, q)
    if a.generator != b.generator:
        bad.append("the generator's state")
    return bad


_Pairs = list[tuple[str, torch.Tensor | None, torch.Tensor | None]]


def _pairs(a: Outcome, b: Outcome) -> _Pairs:
    """What both left, by name."""
    values = [(f"value {i}", p, q) for i, (p, q) in enumerate(zip(a.values, b.values))]
    gradients = [(f"gradient {i}", p, q) for i, (p, q) in enumerate(zip(a.gradients, b.gradients))]
    return [*values, ("loss", a.loss, b.loss), *gradients]


_NUDGES = 4
_MOST_ROUNDING = 1e-9  # of the largest entry: beyond it a program is not explained by rounding


def roundings(eager: Outcome, seed: int, **options: Any) -> dict[str, float]:
    """How far program `seed` itself magnifies rounding: how far each of its tensors moves in plain
    PyTorch when its inputs move by a unit in the last place. Slices differ from the whole by such
    units (a product of matrices of fewer rows adds in another order), and sin(1e4 * x) makes 1e-8
    of them."""
    moved: dict[str, float] = {}
    for nudge in range(_NUDGES):
        other = run(seed, seed % 2, nudge=nudge, **options)
        for name, p, q in _pairs(eager, other):
            if p is None or q is None or p.shape != q.shape or not p.is_floating_point():
                continue
            finite = p.isfinite() & q.isfinite()
            if finite.any():
                most = _MOST_ROUNDING * p[finite].abs().max().item()
                by = min(2 * (p - q)[finite].abs().max().item(), most)
                moved[name] = max(moved.get(name, 0.0), by)
    return moved


def against(eager: Outcome, ours: Outcome, seed: int, *, exact: bool, **options: Any) -> list[str]:
    """Differences of program `seed`, run with these `options`, from plain PyTorch. Exact: bit-equal
    to it in one of the two ways in which its autograd writes the gradient of a view. Not exact: but
    for what the program makes of rounding."""
    bad = compare(eager, ours, exact=exact)
    if bad and exact and not compare(eager, ours, exact=False):
        with views_replayed():
            other = run(seed, seed % 2, **options)
            other.generator = eager.generator
            return compare(other, ours, exact=exact)
    if bad and not exact:
        return compare(eager, ours, exact=False, rounding=roundings(eager, seed, **options))
    return bad

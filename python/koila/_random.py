"""Random operators. The user's generator advances as in eager, and the numbers of a slice are a
part of the numbers of the whole."""

from __future__ import annotations

import functools
from typing import Any
from collections.abc import Callable

from ._torch import torch
from . import _core
from ._budget import budget
from ._calls import redispatch, run_on_reals, write_real
from ._errors import UnsupportedError
from ._shapes import real_error
from ._special import special

aten = torch.ops.aten

_advance_one: dict[Any, bool] = {}


def default_generator(device: torch.device) -> Any:
    """The default generator of this device."""
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda":
        return torch.cuda.default_generators[
            torch.cuda.current_device() if device.index is None else device.index
        ]
    raise UnsupportedError(f"a random operator on {device} is not captured yet")


def random_write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Advance the generator exactly as eager does, and record its state before."""
    self = args[0]
    if not _core.is_lazy(self):
        return write_real(func, args, kwargs)
    if _core.is_planning():
        # koila.plan(): nothing will be drawn, so no generator moves, and any device will do
        return _core.record(func, args, {k: v for k, v in kwargs.items() if k != "generator"})
    kwargs = dict(kwargs)
    if 0 in self.stride():  # elements that share memory: eager refuses before it draws
        real_error(func, args, kwargs)
    given, default = kwargs.pop("generator", None), default_generator(self.device)
    generator = default if given is None else given
    words = _words(func, self.dtype, args[1:], kwargs) if self.device.type == "cpu" else 0
    if words:  # nothing is drawn now, so eager's error for wrong bounds is raised here
        func(torch.empty(0, dtype=self.dtype), *args[1:], **kwargs)
        state = _core.generator_take(generator, words * self.numel())
    else:
        state = _advance(generator, func, self, args, kwargs)
    result = _core.record(func, args, kwargs)
    _core.random(self, default, state, words)
    return result


_in_order = (aten.bernoulli_.float, aten.uniform_.default)
_known_words: dict[Any, int] = {}


def _words(func: Any, dtype: torch.dtype, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The number of 32-bit words of the CPU generator that each element takes, in the order of
    memory. 0: not drawn that way on this build, or unknown."""
    if func not in _in_order:
        return 0
    if (func, dtype) not in _known_words:
        _known_words[func, dtype] = next(
            (n for n in (1, 2) if _takes(n, func, dtype, rest, kwargs)), 0
        )
    return _known_words[func, dtype]


_not_of_the_step = budget(None)  # what koila tries itself, once, is not refused for a step's budget


@_not_of_the_step
def _takes(
    n_words: int, func: Any, dtype: torch.dtype, rest: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Does a draw in parts equal the draw of the whole, in the order of memory, and does each
    element move the state by n_words? Tried on this build."""
    sizes = (1, 2, 13, 16, 31, 100, 311, 625, 2000)
    state = torch.Generator().manual_seed(20).get_state()

    def draw(like: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator()
        generator.set_state(at)
        func(like, *rest, **kwargs, generator=generator)
        return like, generator.get_state()

    whole, end = draw(torch.empty(sum(sizes), dtype=dtype, device="cpu"), state)
    turned, turned_end = draw(
        torch.empty(31, sum(sizes) // 31 + 1, dtype=dtype, device="cpu").t(), state
    )
    if not torch.equal(turned.t().flatten()[: len(whole)], whole):
        return False
    at = 0
    for size in sizes:
        skipped = state.clone()
        try:
            _core.generator_skip(skipped, n_words * at)
        except ValueError:  # another build's generator
            return False
        part, _ = draw(torch.empty(size, dtype=dtype, device="cpu"), skipped)
        if not torch.equal(part, whole[at : at + size]):
            return False
        at += size
    for reached, n in ((end, whole.numel()), (turned_end, turned.numel())):
        skipped = state.clone()
        _core.generator_skip(skipped, n_words * n)
        if not torch.equal(skipped, reached):
            return False
    return True


def _advance(generator: Any, func: Any, like: torch.Tensor, args: Any, kwargs: Any) -> bytes:
    """Draw as eager does; only one element if that provably leaves the same state. Returns the
    state before."""
    size, stride = tuple(like.size()), tuple(like.stride())
    if _draws_once(func, like.dtype) and like.numel() > 0:
        size, stride = (1,), (1,)
    dummy = torch.empty_strided(size, stride, dtype=like.dtype, device=like.device)
    rest = [
        torch.full(a.size(), 0.5, dtype=a.dtype) if isinstance(a, torch.Tensor) else a
        for a in args[1:]
    ]
    return _core.generator_draw(
        generator, func._op, (dummy, *rest), {**kwargs, "generator": generator}
    )


def _draws_once(func: Any, dtype: torch.dtype) -> bool:
    """Does a draw of any size take one number from the generator, as bernoulli_(p) through MKL
    does? Tried on this build, not assumed."""
    if func is not aten.bernoulli_.float:
        return False
    key = (func, dtype)
    if key not in _advance_one:
        _advance_one[key] = _self_test(func, dtype)
    return _advance_one[key]


@_not_of_the_step
def _self_test(func: Any, dtype: torch.dtype) -> bool:
    def after(make: Callable[[], torch.Tensor]) -> bytes:
        g = torch.Generator().manual_seed(20)
        func(make(), 0.3, generator=g)
        func(make(), 0.3, generator=g)
        return g.get_state().numpy().tobytes()

    sizes = (1, 2, 3, 7, 15, 16, 17, 31, 100, 623, 624, 625, 1000, 4097, 70001)
    makes: list[Callable[[], torch.Tensor]] = [
        functools.partial(torch.empty, n, dtype=dtype) for n in sizes
    ]
    makes += [
        lambda: torch.empty(6, 8, dtype=dtype).t(),
        lambda: torch.empty(9, 9, dtype=dtype)[:, ::2],
        lambda: torch.empty(4, 5, 6, dtype=dtype)[:, :3],
    ]
    first = after(makes[0])
    return all(after(m) == first for m in makes)


@special("bernoulli")
def _bernoulli(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    fresh = redispatch(
        aten.empty_like.default, args[:1], {"memory_format": torch.contiguous_format}
    )
    p = args[1] if len(args) > 1 else kwargs.get("p", args[0])
    rest = {k: v for k, v in kwargs.items() if k == "generator"}
    write = aten.bernoulli_.Tensor if isinstance(p, torch.Tensor) else aten.bernoulli_.float
    return redispatch(write, (fresh, p), rest)


def _is_fused(device: torch.device) -> bool:
    return device.type != "cpu" and not _core.is_planning()


def _laid_out_as(x: Any) -> Any:
    """Memory without values, in which the kernel finds its way as it does in `x`. A GPU's dropout
    takes several elements at a time where they lie dense and begin at a multiple of theirs, which
    decides who draws which number (get_vector_size of torch's Dropout.cu)."""
    most_at_a_time = 16
    ahead = x.storage_offset() % most_at_a_time
    if x.is_contiguous() and not ahead:
        return redispatch(aten.empty_like.default, (x,), {})
    extent = 1 + sum((n - 1) * step for n, step in zip(x.size(), x.stride()))
    flat = redispatch(aten.new_empty.default, (x, (ahead + extent,)), {})
    return redispatch(aten.as_strided.default, (flat, x.size(), x.stride(), ahead), {})


@special("native_dropout")
def _native_dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, p, train = args[0], args[1], args[2] if len(args) > 2 else kwargs.get("train")
    if x.numel() == 0:
        return x, redispatch(aten.empty_like.default, (x,), {})
    if train is False:
        return redispatch(aten.clone.default, (x,), {}), redispatch(
            aten.ones_like.default, (x,), {"dtype": torch.bool}
        )
    if _is_fused(x.device):
        # One kernel that draws by position: its mask is the same for all that lie like this one.
        like = _laid_out_as(x)
        generator = default_generator(x.device)
        # The generator moves as eager would move it.
        dummy = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device)
        state = _core.generator_draw(generator, func._op, (dummy, p, True), {})
        _, mask = _core.record(func, (like, p, True), {})
        _core.random(mask, generator, state, 0)
    else:
        mask = redispatch(aten.empty_like.default, (x,), {"dtype": torch.bool})
        mask = redispatch(aten.bernoulli_.float, (mask, 1 - p), {})
    out = redispatch(aten.mul.Tensor, (x, mask), {})
    return redispatch(aten.mul.Tensor, (out, 0.0 if p == 1 else 1.0 / (1.0 - p)), {}), mask


@special("_cudnn_rnn")
def _cudnn_rnn(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """cuDNN draws dropout between layers, by place in the whole: then it runs whole, now."""
    x, weights, stride, weight_buf = args[:4]
    dropout, train = args[11], args[12]
    apart = weight_buf is None
    if (dropout and train) or _core.is_planning():
        return run_on_reals(func, args, kwargs)
    if apart and any(map(_core.is_lazy, weights)):
        return run_on_reals(func, args, kwargs)
    if apart:
        weight_buf = _flat(weights, stride, x.size(-1), args)
    hidden = [_contiguous(h) for h in args[4:6]]
    results = _core.record(func, (x, weights, stride, weight_buf, *hidden, *args[6:]), kwargs)
    # The kernel gives back the argument itself, which the schema does not say.
    return (*results[:4], weight_buf)


def _flat(weights: Any, stride: int, n_features: int, args: tuple[Any, ...]) -> Any:
    """The weights in one piece of memory, as the kernel makes them for itself where they are not
    (always so in bfloat16). The aliases move into it, the weights stay where they are."""
    mode, hidden, projected, layers, batch_first = args[6:11]
    return aten._cudnn_rnn_flatten_weight.default(
        [w.detach() for w in weights],
        stride,
        n_features,
        mode,
        hidden,
        projected,
        layers,
        batch_first,
        args[13],
    )


@special("_cudnn_rnn_backward")
def _cudnn_rnn_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    batch_first, batch_sizes = args[14], args[18]
    hidden, output = [_contiguous(h) for h in args[4:6]], args[6]
    if batch_first and not batch_sizes:  # the kernel's memory has time first
        turn = (output, 0, 1)
        output = _contiguous(redispatch(aten.transpose.int, turn, {}))
        output = redispatch(aten.transpose.int, (output, 0, 1), {})
    else:
        output = _contiguous(output)
    return _core.record(func, (*args[:4], *hidden, output, *args[7:]), kwargs)


def _contiguous(t: Any) -> Any:
    """Rows of a whole are not contiguous where the batch is no first dimension; cuDNN's layers
    refuse such states, and would misread such results."""
    if t is None or not _core.is_lazy(t):
        return t
    return redispatch(aten.clone.default, (t,), {"memory_format": torch.contiguous_format})

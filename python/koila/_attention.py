"""Fused attention of a GPU. Without dropout it is recorded as it is; with dropout as an operator of
koila's own, which draws any rows of the batch as the whole would.

The kernels draw from Philox, a generator that gives any of its numbers at once: the numbers of
batch row b begin at the generator's offset plus b times a distance. So a slice runs the same kernel
with the generator moved to its first row. Distances:

- memory-efficient: heads * queries * keys (torch's mem_eff_attention kernels: a number of its own
  for each element of the attention matrix, dropout_batch_head_rng_offset);
- flash: heads * 32 (torch's flash_attn kernels: a number for each head and lane of a warp; the
  place in the matrix selects the subsequence).

Whether the installed kernels do so is tried, never assumed: _draws_by_row. cuDNN's attention with
dropout runs whole, and so does one whose rows cannot begin at a multiple of 4, which is all that a
generator can be moved to."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NamedTuple
from collections.abc import Iterator

from ._torch import torch
from . import _core
from ._calls import run_on_reals
from ._own_operators import OwnOperator, own_operators
from ._random import default_generator
from ._special import special

aten = torch.ops.aten
_EFFICIENT = aten._scaled_dot_product_efficient_attention.default
_EFFICIENT_BACKWARD = aten._scaled_dot_product_efficient_attention_backward.default
_FLASH = aten._scaled_dot_product_flash_attention.default
_FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_backward.default

# Attention kernels of CUDA have torch's tag of what draws. Forward draws with dropout alone;
# backward never does: it is given the generator's state of then.
forwards = {
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_cudnn_attention",
    "_efficient_attention_forward",
    "_flash_attention_forward",
}
backwards = {
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
}

_OFFSET_STEP = 4  # of a CUDA generator: numbers of one Philox block
_FLASH_NUMBERS = 32  # of a head: the lanes of a warp
_UINT64 = 1 << 64


class Call(NamedTuple):
    """An attention with dropout, forward or backward, without its tensors."""

    p: float
    causal: bool
    scale: float | None
    flash: bool


class Given(NamedTuple):
    """The tensors of a backward, in the order of its operator."""

    grad: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: Any
    out: torch.Tensor
    sums: torch.Tensor  # the logsumexp of each query


def _distance(q: torch.Tensor, k: torch.Tensor, flash: bool) -> int:
    """How far the numbers of a row of the batch are from those of the next. q, k: [B, H, L, D]."""
    heads, queries = q.shape[1], q.shape[2]
    return heads * (_FLASH_NUMBERS if flash else queries * k.shape[2])


# ---- the operators


@contextlib.contextmanager
def _drawing_at(device: torch.device, seed: int, offset: int) -> Iterator[None]:
    """The default generator of `device` stands there, and afterwards again where it stood."""
    generator = default_generator(device)
    before = generator.get_state()
    try:
        generator.manual_seed(seed)
        generator.set_offset(offset)
        yield
    finally:
        generator.set_state(before)


def _first_draw(draws: torch.Tensor) -> tuple[int, int]:
    """Seed and offset of the first row; a seed from 2^63 on is negative."""
    seed, offset = draws[0].tolist() if len(draws) else (0, 0)
    return seed, offset


def kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, with_sums: bool, call: Call
) -> tuple[Any, ...]:
    if call.flash:
        return tuple(_FLASH(q, k, v, call.p, call.causal, False, scale=call.scale))
    return tuple(_EFFICIENT(q, k, v, bias, with_sums, call.p, call.causal, scale=call.scale))


def kernel_backward(given: Given, draw: tuple[int, int], call: Call) -> tuple[torch.Tensor, ...]:
    grad, q, k, v, bias, out, sums = given
    if call.flash:
        # as the forward kernel returns them; it does not use the second either
        state = torch.tensor([draw[0] % _UINT64, draw[1]], dtype=torch.uint64).to(q.device)
        unused = torch.empty((), dtype=torch.uint64, device=q.device)
        arguments = (grad, q, k, v, out, sums, None, None, q.shape[2], k.shape[2])
        gradients = _FLASH_BACKWARD(
            *arguments, call.p, call.causal, state, unused, scale=call.scale
        )
        return tuple(gradients)
    seed, offset = (torch.tensor(n, dtype=torch.int64) for n in draw)
    wanted = [True, True, True, False]
    before = (grad, q, k, v, bias, out, sums, seed, offset)
    gradients = _EFFICIENT_BACKWARD(*before, call.p, wanted, call.causal, scale=call.scale)
    return tuple(gradients[:3])


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: Any,
    draws: torch.Tensor,
    with_sums: bool,
    p: float,
    causal: bool,
    scale: float | None,
    flash: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    with _drawing_at(q.device, *_first_draw(draws)):
        out, sums = kernel(q, k, v, bias, with_sums, Call(p, causal, scale, flash))[:2]
    return out, sums


def _in_parts(arguments: tuple[Any, ...]) -> tuple[Given, torch.Tensor, Call]:
    """The arguments of koila::dropout_attention_backward: its tensors, `draws`, the rest."""
    n = len(Given._fields)
    return Given(*arguments[:n]), arguments[n], Call(*arguments[n + 1 :])


def _backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    given, draws, call = _in_parts(arguments)
    return kernel_backward(given, _first_draw(draws), call)


def _fake_forward(q: Any, k: Any, v: Any, bias: Any, draws: Any, *rest: Any) -> Any:
    return kernel(q, k, v, bias, rest[0], Call(*rest[1:]))[:2]


def _fake_backward(*arguments: Any) -> Any:
    given, _, call = _in_parts(arguments)
    return kernel_backward(given, (0, 0), call)


@own_operators("CUDA")
def _operators() -> list[OwnOperator]:
    """koila::dropout_attention and koila::dropout_attention_backward.

    draws: int64[B, 2] on the CPU, the generator's seed and offset of every row; it is cut like the
    rows of q. sums: the logsumexp of each query."""
    rest = "float p, bool causal, float? scale, bool flash)"
    forward = (
        "dropout_attention(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor draws, "
        f"bool with_sums, {rest} -> (Tensor, Tensor)"
    )
    backward = (
        "dropout_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, "
        f"Tensor? bias, Tensor out, Tensor sums, Tensor draws, {rest} -> "
        "(Tensor, Tensor, Tensor)"
    )
    return [
        OwnOperator(forward, _forward, _fake_forward),
        OwnOperator(backward, _backward, _fake_backward),
    ]


# ---- are rows drawn as said above?

_MOST_TRIED = 256  # answers that are kept
_tried: dict[tuple[Any, ...], bool] = {}


def _draws_by_row(q: torch.Tensor, k: torch.Tensor, call: Call) -> bool:
    """Do the kernels of this build draw any row as the whole does, and does the generator move by
    the sum of the distances? Tried once for each dtype and size of a head."""
    key = (call.flash, q.dtype, q.shape[3], q.device)
    answer = _tried.get(key)
    if answer is None:
        try:
            answer = _try_rows(q.dtype, q.shape[3], q.device, call.flash)
        except RuntimeError:  # no kernel for this: eager will say so in its own words
            answer = False
        if len(_tried) >= _MOST_TRIED:
            _tried.clear()
        _tried[key] = answer
    return answer


def _try_rows(dtype: torch.dtype, head: int, device: torch.device, flash: bool) -> bool:
    rows, heads, length = 3, 2, 36  # more than one tile of 32
    call = Call(0.5, False, None, flash)
    source = torch.Generator().manual_seed(20)
    shape = (4, rows, heads, length, head)
    q, k, v, grad = torch.randn(shape, generator=source, device="cpu").to(device, dtype)
    distance = _distance(q, k, flash)
    seed, offset = 20, 4 * _OFFSET_STEP

    def part(begin: int, end: int, at: int) -> tuple[list[torch.Tensor], int]:
        x, y, z, g = (t[begin:end] for t in (q, k, v, grad))
        with _drawing_at(device, seed, at):
            out, sums = kernel(x, y, z, None, True, call)[:2]
            moved = default_generator(device).get_offset() - at
        back = kernel_backward(Given(g, x, y, z, None, out, sums), (seed, at), call)
        return [out, *back], moved

    whole, moved = part(0, rows, offset)
    other, _ = part(1, rows, offset)  # begins at the wrong number: it must differ
    own, _ = part(1, rows, offset + distance)
    return (
        moved == rows * distance
        and not torch.equal(other[0], whole[0][1:])
        and all(torch.equal(a, b[1:]) for a, b in zip(own, whole))
    )


# ---- recording


@functools.cache
def _position_of_dropout(func: Any) -> int:
    return [a.name for a in func._schema.arguments].index("dropout_p")


def _dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    at = _position_of_dropout(func)
    p: float = args[at] if at < len(args) else kwargs.get("dropout_p", 0.0)
    return p


def _named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name, defaults included."""
    schema = func._schema.arguments
    given = {a.name: a.default_value for a in schema if a.has_default_value()}
    return {**given, **{a.name: value for a, value in zip(schema, args)}, **kwargs}


def _draws_of_rows(rows: int, distance: int, seed: int, offset: int) -> torch.Tensor:
    """int64[rows, 2]: seed and offset of each row. A seed above 2^63 is kept as its 64 bits."""
    signed = seed - _UINT64 if seed >= _UINT64 // 2 else seed
    draws = torch.full((rows, 2), signed, dtype=torch.int64, device="cpu")
    draws[:, 1] = torch.arange(rows, device="cpu") * distance + offset
    return draws


@special(*forwards)
def _attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _dropout(func, args, kwargs) == 0:
        return _core.record(func, args, kwargs)
    if func not in (_EFFICIENT, _FLASH):
        return run_on_reals(func, args, kwargs)
    a = _named(func, args, kwargs)
    if _core.is_planning():
        return _planned(func, a)
    q, k, v, bias = a["query"], a["key"], a["value"], a.get("attn_bias")
    call = Call(a["dropout_p"], a["is_causal"], a.get("scale"), func is _FLASH)
    distance = _distance(q, k, call.flash)
    generator = default_generator(q.device)
    if distance % _OFFSET_STEP or not _draws_by_row(q, k, call) or a.get("return_debug_mask"):
        return run_on_reals(func, args, kwargs)
    seed, offset = generator.initial_seed(), generator.get_offset()
    draws = _draws_of_rows(q.shape[0], distance, seed, offset)
    with_sums = call.flash or a["compute_log_sumexp"]
    out, sums = _core.record(
        _operators().dropout_attention.default, (q, k, v, bias, draws, with_sums, *call), {}
    )
    generator.set_offset(offset + q.shape[0] * distance)
    if not call.flash:
        return out, sums, *(torch.tensor(n, dtype=torch.int64) for n in draws[0].tolist())
    state = torch.tensor([seed, offset], dtype=torch.uint64, device="cpu").to(q.device)
    unused = torch.empty((), dtype=torch.uint64, device=q.device)
    debug_mask = torch.empty((0,), dtype=q.dtype, device=q.device)
    return out, sums, None, None, q.shape[2], k.shape[2], state, unused, debug_mask


def _planned(func: Any, a: dict[str, Any]) -> Any:
    """A planned step draws nothing, and its device may not be here: rows are taken to be drawn by
    their own numbers, as all builds so far do."""
    q, k, flash = a["query"], a["key"], func is _FLASH
    call = Call(a["dropout_p"], a["is_causal"], a.get("scale"), flash)
    draws = _draws_of_rows(q.shape[0], _OFFSET_STEP, 0, 0)
    out, sums = _core.record(
        _operators().dropout_attention.default,
        (q, k, a["value"], a.get("attn_bias"), draws, True, *call),
        {},
    )
    nothing = torch.zeros((), dtype=torch.int64, device="cpu")
    if not flash:
        return out, sums, nothing, nothing
    return out, sums, None, None, q.shape[2], k.shape[2], nothing, nothing, nothing


@special(*backwards)
def _attention_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    is_ours = func is _EFFICIENT_BACKWARD or func is _FLASH_BACKWARD
    if not is_ours or _dropout(func, args, kwargs) == 0:
        return _core.record(func, args, kwargs)
    a = _named(func, args, kwargs)
    flash = func is _FLASH_BACKWARD
    q, k, bias = a["query"], a["key"], a.get("attn_bias")
    # flash keeps both numbers in the first
    state = [a["philox_seed"]] if flash else [a["philox_seed"], a["philox_offset"]]
    distance = _distance(q, k, flash)
    wants_bias = bias is not None and a["grad_input_mask"][3]
    call = Call(a["dropout_p"], a["is_causal"], a.get("scale"), flash)
    is_cut = not any(_core.is_lazy(t) for t in state) and not wants_bias
    grad = a["grad_out"] if flash else a["grad_out_"]
    if is_cut and _core.is_planning():
        draws = _draws_of_rows(q.shape[0], _OFFSET_STEP, 0, 0)
    elif not is_cut or distance % _OFFSET_STEP or not _draws_by_row(q, k, call):
        return _core.record(func, args, kwargs)
    else:
        seed, offset = state[0].tolist() if flash else (t.item() for t in state)
        draws = _draws_of_rows(q.shape[0], distance, seed, offset)
    given = Given(grad, q, k, a["value"], bias, a["out"], a["logsumexp"])
    operator = _operators().dropout_attention_backward.default
    gradients = _core.record(operator, (*given, draws, *call), {})
    return tuple(gradients) if flash else (*gradients, None)

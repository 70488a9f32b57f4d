"""Fused attention of a GPU. Without dropout it is recorded as it is; with dropout as an operator of
koila's own, which draws any rows of the batch as the whole would.

The kernels draw from Philox, a generator that gives any of its numbers at once: the numbers of
batch row b begin at the generator's offset plus b times a distance. So a slice runs the same kernel
with the generator moved to its first row. Distances:

- memory-efficient: heads * queries * keys (torch's mem_eff_attention kernels: a number of its own
  for each element of the attention matrix, dropout_batch_head_rng_offset);
- flash: heads * 32 (torch's flash_attn kernels: a number for each head and lane of a warp; the
  place in the matrix selects the subsequence);
- cuDNN: nobody tells. It is given a seed and an offset, and its frontend calls the mask one tensor
  of random numbers, [batch, heads, queries, keys]. Three distances are tried, at the shapes of the
  call itself, since cuDNN chooses its kernels by shape.

Whether the installed kernels do so is tried, never assumed: _distance. Where no distance makes
slices draw what the whole draws, bit for bit, the attention runs whole; so does one whose rows
cannot begin at a multiple of 4, which is all that a generator can be moved to."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NamedTuple
from collections.abc import Callable, Iterator

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
_CUDNN = aten._scaled_dot_product_cudnn_attention.default
_CUDNN_BACKWARD = aten._scaled_dot_product_cudnn_attention_backward.default

FLASH, EFFICIENT, CUDNN = range(1, 4)  # as src/placement/rules_attention.c numbers them
_KERNELS = {
    _FLASH: FLASH,
    _FLASH_BACKWARD: FLASH,
    _EFFICIENT: EFFICIENT,
    _EFFICIENT_BACKWARD: EFFICIENT,
    _CUDNN: CUDNN,
    _CUDNN_BACKWARD: CUDNN,
}

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
    kernel: int


class Given(NamedTuple):
    """The tensors of a backward, in the order of its operator."""

    grad: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: Any
    out: torch.Tensor
    sums: torch.Tensor  # the logsumexp of each query


class _Matrix(NamedTuple):
    """Of a row of the batch: what its attention computes."""

    heads: int
    queries: int
    keys: int

    @staticmethod
    def of(q: torch.Tensor, k: torch.Tensor) -> _Matrix:
        return _Matrix(q.shape[1], q.shape[2], k.shape[2])

    def elements(self) -> int:
        return self.heads * self.queries * self.keys

    def blocks(self) -> int:
        return self.elements() // _OFFSET_STEP

    def lanes(self) -> int:
        return self.heads * _FLASH_NUMBERS


_Distance = Callable[[_Matrix], int]  # from the numbers of a row of the batch to those of the next
_DISTANCES: dict[int, tuple[_Distance, ...]] = {
    FLASH: (_Matrix.lanes,),
    EFFICIENT: (_Matrix.elements,),
    CUDNN: (_Matrix.elements, _Matrix.blocks, _Matrix.lanes),
}


def _advance(rows: int, matrix: _Matrix, kernel: int) -> int:
    """How far an attention of so many rows moves the generator, which is torch's own doing."""
    numbers = rows * (matrix.lanes() if kernel == FLASH else matrix.elements())
    return -(-numbers // _OFFSET_STEP) * _OFFSET_STEP


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
    if call.kernel == FLASH:
        return tuple(_FLASH(q, k, v, call.p, call.causal, False, scale=call.scale))
    fused = _CUDNN if call.kernel == CUDNN else _EFFICIENT
    return tuple(fused(q, k, v, bias, with_sums, call.p, call.causal, scale=call.scale))


def kernel_backward(given: Given, draw: tuple[int, int], call: Call) -> tuple[torch.Tensor, ...]:
    grad, q, k, v, bias, out, sums = given
    if call.kernel == FLASH:
        # as the forward kernel returns them; it does not use the second either
        state = torch.tensor([draw[0] % _UINT64, draw[1]], dtype=torch.uint64).to(q.device)
        unused = torch.empty((), dtype=torch.uint64, device=q.device)
        arguments = (grad, q, k, v, out, sums, None, None, q.shape[2], k.shape[2])
        gradients = _FLASH_BACKWARD(
            *arguments, call.p, call.causal, state, unused, scale=call.scale
        )
        return tuple(gradients)
    seed, offset = (torch.tensor(n, dtype=torch.int64) for n in draw)
    if call.kernel == CUDNN:
        before = (grad, q, k, v, out, sums, seed.to(q.device), offset.to(q.device), bias)
        lengths = (None, None, q.shape[2], k.shape[2])
        return tuple(_CUDNN_BACKWARD(*before, *lengths, call.p, call.causal, scale=call.scale))
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
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    with _drawing_at(q.device, *_first_draw(draws)):
        out, sums = kernel(q, k, v, bias, with_sums, Call(*rest))[:2]
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
    rest = "float p, bool causal, float? scale, int kernel)"
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


class _Trial(NamedTuple):
    """Shapes and settings of the attention that is tried."""

    call: Call
    dtype: torch.dtype
    device: torch.device
    key_heads: int
    matrix: _Matrix
    heads_of: tuple[int, int]  # sizes of a head of q and k, and of v
    masked: bool

    @staticmethod
    def of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, call: Call) -> _Trial:
        """cuDNN's is the call's own. Those of torch's kernels have more than one tile of 32: that
        all shapes of a dtype and size of a head draw alike is seen in their text."""
        if call.kernel == CUDNN:
            call = call._replace(p=_TRIED_DROPOUT)
            sizes = (q.shape[3], v.shape[3])
            own = (k.shape[1], _Matrix.of(q, k), sizes, bias is not None)
            return _Trial(call, q.dtype, q.device, *own)
        call = Call(_TRIED_DROPOUT, False, None, call.kernel)
        sizes = (q.shape[3], q.shape[3])
        return _Trial(call, q.dtype, q.device, 2, _Matrix(2, 36, 36), sizes, False)


_TRIED_DROPOUT = 0.5
_TRIED_ROWS = 6
_TRIED_SLICES = ((1, 6), (0, 3), (2, 4), (5, 6))  # of other numbers of rows than the whole
_MOST_TRIED = 256  # answers that are kept
_tried: dict[_Trial, _Distance] = {}


def _nowhere(matrix: _Matrix) -> int:
    """The distance where none was found."""
    return 0


def _distance(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, call: Call
) -> int | None:
    """How far the numbers of a row of the batch are from those of the next, as the kernels of this
    build have shown it; None if they have not, or a generator cannot be moved so far. A planned
    step draws nothing, and its device may not be here: rows are taken to be drawn by their own
    numbers, as all builds so far do, but for cuDNN's."""
    if _core.is_planning():
        return None if call.kernel == CUDNN else _OFFSET_STEP
    trial = _Trial.of(q, k, v, bias, call)
    found = _tried.get(trial)
    if found is None:
        found = _first_that_draws(trial)
        if len(_tried) >= _MOST_TRIED:
            _tried.clear()
        _tried[trial] = found
    distance = found(_Matrix.of(q, k))
    return distance if distance and distance % _OFFSET_STEP == 0 else None


def _first_that_draws(trial: _Trial) -> _Distance:
    for distance_of in _DISTANCES[trial.call.kernel]:
        try:
            if distance_of(trial.matrix) % _OFFSET_STEP == 0 and _draws_by_row(trial, distance_of):
                return distance_of
        except RuntimeError:  # no kernel for this: eager will say so in its own words
            break
    return _nowhere


def rows_found_by(x: torch.Tensor, kernel_number: int) -> str:
    """For tools/gpu_report.py: the distance at which attention of x to itself draws its rows."""
    trial = _Trial.of(x, x, x, None, Call(_TRIED_DROPOUT, False, None, kernel_number))
    return _first_that_draws(trial).__name__.strip("_")


def _draws_by_row(trial: _Trial, distance_of: _Distance) -> bool:
    """Do the kernels of this build draw any row as the whole does, and does the generator move as
    _advance says?"""
    call, dtype, device, key_heads, matrix, heads_of, masked = trial
    source = torch.Generator().manual_seed(20)

    def random(heads: int, length: int, size: int) -> torch.Tensor:
        shape = (_TRIED_ROWS, heads, length, size)
        return torch.randn(shape, generator=source, device="cpu").to(device, dtype)

    q = random(matrix.heads, matrix.queries, heads_of[0])
    k = random(key_heads, matrix.keys, heads_of[0])
    v = random(key_heads, matrix.keys, heads_of[1])
    grad = random(matrix.heads, matrix.queries, heads_of[1])
    bias = random(1, matrix.queries, matrix.keys) if masked else None
    distance = distance_of(matrix)
    seed, offset = 20, 4 * _OFFSET_STEP

    def part(begin: int, end: int, at: int) -> tuple[list[torch.Tensor], int]:
        x, y, z, g = (t[begin:end] for t in (q, k, v, grad))
        b = None if bias is None else bias[begin:end]
        with _drawing_at(device, seed, at):
            out, sums = kernel(x, y, z, b, True, call)[:2]
            moved = default_generator(device).get_offset() - at
        back = kernel_backward(Given(g, x, y, z, b, out, sums), (seed, at), call)
        return [out, *back], moved

    whole, moved = part(0, _TRIED_ROWS, offset)
    other, _ = part(1, _TRIED_ROWS, offset)  # begins at the wrong number: it must differ
    if moved != _advance(_TRIED_ROWS, matrix, call.kernel) or torch.equal(other[0], whole[0][1:]):
        return False
    for begin, end in _TRIED_SLICES:
        own, _ = part(begin, end, offset + begin * distance)
        if not all(torch.equal(a, b[begin:end]) for a, b in zip(own, whole)):
            return False
    return True


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
    if func not in _KERNELS:
        return run_on_reals(func, args, kwargs)
    a = _named(func, args, kwargs)
    q, k, v, bias = a["query"], a["key"], a["value"], a.get("attn_bias")
    call = Call(a["dropout_p"], a["is_causal"], a.get("scale"), _KERNELS[func])
    with_sums = a.get("compute_log_sumexp", True)  # flash always gives them
    is_odd = a.get("return_debug_mask") or (call.kernel == CUDNN and not with_sums)
    distance = None if is_odd else _distance(q, k, v, bias, call)
    if distance is None:
        return run_on_reals(func, args, kwargs)
    if _core.is_planning():
        return _planned(a, call)
    generator = default_generator(q.device)
    seed, offset = generator.initial_seed(), generator.get_offset()
    draws = _draws_of_rows(q.shape[0], distance, seed, offset)
    out, sums = _core.record(
        _operators().dropout_attention.default, (q, k, v, bias, draws, with_sums, *call), {}
    )
    generator.set_offset(offset + _advance(q.shape[0], _Matrix.of(q, k), call.kernel))
    state = [torch.tensor(n, dtype=torch.int64) for n in draws[0].tolist()]
    if call.kernel == EFFICIENT:
        return out, sums, *state
    lengths = (None, None, q.shape[2], k.shape[2])
    if call.kernel == CUDNN:
        return out, sums, *lengths, *(n.to(q.device) for n in state), None
    both = torch.tensor([seed, offset], dtype=torch.uint64, device="cpu").to(q.device)
    unused = torch.empty((), dtype=torch.uint64, device=q.device)
    return out, sums, *lengths, both, unused, torch.empty((0,), dtype=q.dtype, device=q.device)


def _planned(a: dict[str, Any], call: Call) -> Any:
    """Without the generator of a device that may not be here."""
    q, k = a["query"], a["key"]
    draws = _draws_of_rows(q.shape[0], _OFFSET_STEP, 0, 0)
    out, sums = _core.record(
        _operators().dropout_attention.default,
        (q, k, a["value"], a.get("attn_bias"), draws, True, *call),
        {},
    )
    nothing = torch.zeros((), dtype=torch.int64, device="cpu")
    if call.kernel == EFFICIENT:
        return out, sums, nothing, nothing
    return out, sums, None, None, q.shape[2], k.shape[2], nothing, nothing, nothing


@special(*backwards)
def _attention_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func not in _KERNELS or _dropout(func, args, kwargs) == 0:
        return _core.record(func, args, kwargs)
    a = _named(func, args, kwargs)
    q, k, v, bias = a["query"], a["key"], a["value"], a.get("attn_bias")
    call = Call(a["dropout_p"], a["is_causal"], a.get("scale"), _KERNELS[func])
    efficient, flash = call.kernel == EFFICIENT, call.kernel == FLASH
    # flash keeps both numbers in the first
    state = [a["philox_seed"]] if flash else [a["philox_seed"], a["philox_offset"]]
    wants_bias = efficient and bias is not None and a["grad_input_mask"][3]
    is_whole = wants_bias or any(_core.is_lazy(t) for t in state)
    distance = None if is_whole else _distance(q, k, v, bias, call)
    if distance is None:
        return _core.record(func, args, kwargs)
    if _core.is_planning():
        seed, offset = 0, 0
    else:
        seed, offset = state[0].tolist() if flash else (t.item() for t in state)
    draws = _draws_of_rows(q.shape[0], distance, seed, offset)
    grad = a["grad_out_" if efficient else "grad_out"]
    given = Given(grad, q, k, v, bias, a["out"], a["logsumexp"])
    operator = _operators().dropout_attention_backward.default
    gradients = _core.record(operator, (*given, draws, *call), {})
    return (*gradients, None) if efficient else tuple(gradients)

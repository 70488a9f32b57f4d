"""Packed sequences: `pack_padded_sequence`, recurrent layers and `pad_packed_sequence` on lazy
tensors.

A packed tensor has its rows interleaved by time, so no slice of it belongs to a few rows of the
batch. But it holds the same numbers as a padded tensor [T, B, ...], which can be cut. So for every
packed tensor made here its padded form is recorded first, and the packed one as a gather of that:

    data.padded = x                         # pack_padded_sequence
    data = pack_rows(data.padded)

    out.padded = packed_rnn(data.padded)    # a layer
    out = pack_rows(out.padded)

    y = out.padded                          # pad_packed_sequence

Who takes the padded form leaves the gather without a user, and what nobody uses is never run. For
autograd the packed tensors are the nodes, as in eager: their gradients are packed and have a padded
form in the same way. An operator on packed `.data` itself runs whole; its result is padded again
where a layer takes it.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple
from collections.abc import Callable

from ._torch import torch
from . import _core
from ._instead import instead
from ._recurrent import LSTM, MODES, operators
from ._tensor import LazyTensor, plain

rnn: Any = torch.nn.utils.rnn
Tensor = torch.Tensor
aten = torch.ops.aten


class Layout(NamedTuple):
    """Where the rows of a batch lie in a packed tensor. Rows are numbered as the user has them."""

    lengths: Tensor  # int64[B]
    places: Tensor  # int64[B, 2]: length and rank; lazy where the batch was packed before lazy()
    rows: Tensor  # int64[N]: of each packed element its number in the padded [T * B]
    offsets: Tensor  # int64[T]: where each step begins in the packed tensor
    batch_sizes: Tensor  # an alias of the sequence's, which owns this
    order: Tensor | None  # sorted_indices
    per_row: int  # elements of a row that a plan counts with


_PARTS = 4  # of a batch, for whose longest part each row is counted


def _per_row(lengths: Tensor) -> int:
    """Packed elements of a row on average, in the longest of some parts of the batch: where the
    rows are sorted, the first slice has the longest."""
    size = -(-len(lengths) // _PARTS)
    return max((-(-int(part.sum()) // len(part)) for part in lengths.split(size)), default=0)


def _layout(batch_sizes: Tensor, order: Tensor | None, places: Tensor | None = None) -> Layout:
    """On the CPU, where batch_sizes lie; `order` lies where the data do."""
    n_rows = int(batch_sizes[0])
    rows = torch.arange(n_rows, device="cpu")
    in_order = rows if order is None else order.cpu()
    by_rank = (batch_sizes.unsqueeze(1) > rows).sum(0)
    ranks = in_order.argsort()
    lengths = by_rank[ranks]
    steps = torch.arange(len(batch_sizes), device="cpu")
    runs = steps.unsqueeze(1) < by_rank
    numbers = steps.unsqueeze(1) * n_rows + in_order
    if places is None:
        places = torch.stack([lengths, ranks], 1)
    offsets = batch_sizes.cumsum(0) - batch_sizes
    sizes = batch_sizes.detach()
    return Layout(lengths, places, numbers[runs], offsets, sizes, order, _per_row(lengths))


def _layout_of(packed: Any) -> Layout | None:
    """None: no layout that can be cut, or none at all."""
    sizes, order = packed.batch_sizes, packed.sorted_indices
    known: Layout | None = getattr(sizes, "_koila_layout", None)
    if known is None or known.order is not order:
        if isinstance(sizes, LazyTensor) or isinstance(order, LazyTensor) or not len(sizes):
            return None
        known = sizes._koila_layout = _layout(sizes, order)
    return known if len(known.rows) == len(packed.data) else None


# ---- the padded form of a packed tensor


class _Padded(NamedTuple):
    padded: Tensor  # [T, B, ...]; unheld
    layout: Layout
    ends_in_zeros: bool  # where no row runs; else anything may stand there
    at: tuple[Any, ...]  # the values that both stood for


def _at(data: Tensor, padded: Tensor) -> tuple[Any, ...]:
    (tape, v), (other, w) = _core.handle_info(data), _core.handle_info(padded)
    versions = () if data.is_inference() else (data._version, padded._version)
    return id(tape), v, id(other), w, versions


class _Formed(threading.local):
    """The packed tensors of this thread with a padded form. A form keeps the record of its step, so
    it goes with the step."""

    def __init__(self) -> None:
        self.refs: list[weakref.ref[Tensor]] = []


formed = _Formed()


def forget() -> None:
    """Drop the padded forms of steps that are over."""
    left = []
    for ref in formed.refs:
        data: Any = ref()
        if data is None or not hasattr(data, "_koila_padded"):
            continue
        if _core.tape_of(data._koila_padded.padded).closed:
            del data._koila_padded
        else:
            left.append(ref)
    formed.refs = left


def _pack(padded: Tensor, layout: Layout, ends_in_zeros: bool) -> Tensor:
    """The packed tensor whose padded form this is. Below autograd."""
    padded = padded.detach()
    data: Tensor = _core.record(operators().pack_rows.default, (padded, layout.rows), {})
    if _core.is_lazy(data) and _core.is_lazy(padded):
        _core.unheld(padded)
        data._koila_padded = _Padded(padded, layout, ends_in_zeros, _at(data, padded))  # type: ignore[attr-defined]
        formed.refs.append(weakref.ref(data))
    return data


def _known(data: Tensor, layout: Layout) -> _Padded | None:
    """The padded form that `data` has, if neither was written since."""
    known: _Padded | None = getattr(data, "_koila_padded", None)
    if known is None or known.layout is not layout or not _core.is_lazy(data):
        return None
    if _at(data, known.padded) != known.at:
        return None
    if _core.is_concrete(data) and not _core.is_concrete(known.padded):
        return None
    return known


def _unpack(data: Tensor, layout: Layout) -> tuple[Tensor, bool]:
    """(the padded form of `data`, does it end in zeros?)"""
    known = _known(data, layout)
    if known is not None:
        return known.padded, known.ends_in_zeros
    arguments = (data, layout.places, layout.offsets)
    return _core.record(operators().unpack_rows.default, arguments, {}), True


def _runs(layout: Layout, n_dims: int) -> Tensor:
    """bool[T, B, 1, ...]: does the row run at this step?"""
    steps = torch.arange(len(layout.batch_sizes), device="cpu")
    runs = steps.unsqueeze(1) < layout.lengths
    return runs[(...,) + (None,) * (n_dims - 2)]


def _filled(padded: Tensor, layout: Layout, value: float) -> Tensor:
    number = torch.full((), value, dtype=padded.dtype, device="cpu")
    runs = _runs(layout, padded.dim()).to(padded.device)
    return torch.where(runs, padded, plain(number))


# ---- as autograd sees it


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, padded: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        return _pack(padded, layout, False)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if torch.is_grad_enabled():
            return _Unpack.apply(gradient, ctx.layout), None  # type: ignore[no-untyped-call]
        padded, ends_in_zeros = _unpack(gradient, ctx.layout)
        return padded.detach() if ends_in_zeros else _filled(padded, ctx.layout, 0), None


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, data: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        padded, ends_in_zeros = _unpack(data, layout)
        return padded.clone() if ends_in_zeros else _filled(padded, layout, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if torch.is_grad_enabled():
            return _Pack.apply(gradient, ctx.layout), None  # type: ignore[no-untyped-call]
        return _pack(gradient, ctx.layout, False), None


class _Drop(torch.autograd.Function):
    """Dropout between layers. The mask is drawn now, as eager draws it: packed, one byte for each
    element."""

    @staticmethod
    def forward(ctx: Any, data: Tensor, layout: Layout, p: float) -> Tensor:
        ctx.layout, ctx.p = layout, p
        mask = aten.empty.memory_format(list(data.shape), dtype=data.dtype, device="cpu")
        if p == 1 or _core.is_planning():  # eager draws nothing either when all is dropped
            aten.zero_(mask)
        else:
            mask.bernoulli_(1 - p)
        ctx.mask = mask.bool()
        return _Drop._times_noise(ctx, data)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if torch.is_grad_enabled():
            return gradient * _Drop._noise(ctx.mask, gradient.dtype, ctx.p), None, None
        return _Drop._times_noise(ctx, gradient), None, None

    @staticmethod
    def _noise(mask: Tensor, dtype: torch.dtype, p: float) -> Tensor:
        return mask.to(dtype) if p == 1 else mask.to(dtype) / (1 - p)

    @staticmethod
    def _times_noise(ctx: Any, data: Tensor) -> Tensor:
        padded, ends_in_zeros = _unpack(data, ctx.layout)
        arguments = (ctx.mask, ctx.layout.places, ctx.layout.offsets)
        kept = _core.record(operators().unpack_rows.default, arguments, {})
        return _pack(padded * _Drop._noise(kept, data.dtype, ctx.p), ctx.layout, ends_in_zeros)


class _Call(NamedTuple):
    """A layer without its tensors."""

    mode: int
    biased: bool
    projected: bool
    layers: int  # on a GPU all, for cuDNN; else one
    function: Callable[..., Any]  # torch's own, for gradients of gradients
    keeps: bool  # a backward may come


class _Layer(torch.autograd.Function):
    """Layers, in one or both directions. hx, cx: [layers x directions, B, H] or None for zeros."""

    @staticmethod
    def forward(
        ctx: Any, data: Tensor, hx: Any, cx: Any, layout: Layout, call: _Call, *weights: Tensor
    ) -> Any:
        padded, _ = _unpack(data, layout)
        states = (layout.places, hx, cx, list(weights))
        numbers = (call.mode, call.biased, call.projected, call.layers)
        out, h, c, work = _core.record(
            operators().packed_rnn.default,
            (padded, *states, *numbers, layout.per_row, call.keeps),
            {},
        )
        ctx.layout, ctx.call, ctx.n_weights = layout, call, len(weights)
        ctx.set_materialize_grads(False)
        if call.keeps:
            again = None if data.device.type == "cpu" else out  # the CPU's is in `work`
            ctx.save_for_backward(data, hx, cx, padded, work, again, *weights)
        packed = _pack(out, layout, True)
        return (packed, h, c) if call.mode == LSTM else (packed, h)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if all(g is None for g in gradients):
            return (None,) * len(ctx.needs_input_grad)
        if torch.is_grad_enabled():
            return _written_out(ctx, gradients)
        data, hx, cx, padded, work, out, *weights = ctx.saved_tensors
        layout, call, needs = ctx.layout, ctx.call, ctx.needs_input_grad
        g_out = None if gradients[0] is None else _unpack(gradients[0], layout)[0]
        g_c = gradients[2] if call.mode == LSTM else None
        wants_weights = any(needs[-ctx.n_weights :])
        gx, gh, gc, *of_weights = _core.record(
            operators().packed_rnn_backward.default,
            (
                *(g_out, gradients[1], g_c, padded, layout.places, hx, cx, weights, work, out),
                *(call.mode, call.biased, call.projected, call.layers, needs[0], wants_weights),
            ),
            {},
        )
        if len(of_weights) == 1 and isinstance(of_weights[0], (list, tuple)):
            of_weights = list(of_weights[0])
        return (
            _pack(gx, layout, True) if needs[0] else None,
            gh if needs[1] else None,
            gc if needs[2] else None,
            None,
            None,
            *(of_weights[i] if needs[-ctx.n_weights + i] else None for i in range(ctx.n_weights)),
        )


def _written_out(ctx: Any, gradients: Any) -> Any:
    """The gradients with a graph of their own: of torch's own steps, recorded one by one."""
    data, hx, cx, _, _, _, *weights = ctx.saved_tensors
    layout, call, needs = ctx.layout, ctx.call, ctx.needs_input_grad
    n = len(weights) // (2 + 2 * call.biased + call.projected)
    two = n == 2 * call.layers
    rows = len(layout.lengths)
    sizes = ((n, rows, weights[1].shape[1]), (n, rows, weights[0].shape[0] // 4))
    with torch.enable_grad():
        states = []
        for state, size in zip((hx, cx), sizes):
            state = data.new_zeros(size) if state is None else state
            states.append(state if layout.order is None else state.index_select(1, layout.order))
        given = tuple(states) if call.mode == LSTM else states[0]
        results = call.function(
            data, layout.batch_sizes, given, weights, call.biased, call.layers, 0.0, True, two
        )
        out, *ends = results
        if layout.order is not None:
            ends = [end.index_select(1, layout.order.argsort()) for end in ends]
        inputs = [data, hx, cx, None, None, *weights]
        wanted = [i for i, t in enumerate(inputs) if t is not None and needs[i]]
        made = [(r, g) for r, g in zip((out, *ends), gradients) if g is not None]
        found = torch.autograd.grad(
            [r for r, _ in made],
            [inputs[i] for i in wanted],
            [g for _, g in made],
            create_graph=True,
            allow_unused=True,
        )
    results = [None] * len(inputs)
    for i, gradient in zip(wanted, found):
        results[i] = gradient
    return tuple(results)


# ---- in place of torch's functions


def _is_ours(data: Any) -> bool:
    return (
        isinstance(data, LazyTensor)
        and _core.is_lazy(data)
        and data.device.type in ("cpu", "cuda")
        and torch._C._functorch.peek_interpreter_stack() is None
    )


_CUDNN_TAKES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _runs_on(data: Tensor, module: Any, keeps: bool) -> bool:
    """Can koila's operator compute the layers there? On a GPU they are cuDNN's, which has a
    backward only in training, and a dropout that no slice can draw."""
    return data.device.type == "cpu" or (
        torch.backends.cudnn.enabled
        and torch.version.hip is None
        and data.dtype in _CUDNN_TAKES
        and (module.training or not keeps)
        and not (module.training and module.dropout and module.num_layers > 1)
    )


def pack_padded_sequence(
    original: Callable[..., Any], input: Any, lengths: Any, batch_first: bool, enforce_sorted: bool
) -> Any:
    if isinstance(lengths, LazyTensor):
        lengths = plain(lengths)
    if not _is_ours(input) or input.dim() < 2:
        return original(input, lengths, batch_first, enforce_sorted)
    if not isinstance(lengths, Tensor):
        lengths = torch.as_tensor(lengths, dtype=torch.int64, device="cpu")
    given = lengths = plain(lengths).to(dtype=torch.int64)
    if lengths.dim() != 1 or len(lengths) != input.size(0 if batch_first else 1):
        return original(input, given, batch_first, enforce_sorted)
    order = None
    if not enforce_sorted:
        lengths, order = torch.sort(lengths, descending=True)
    padded = input.transpose(0, 1) if batch_first else input
    # torch's own errors, and batch_sizes; of something small
    small: Any = torch.arange(padded.size(0), device="cpu").unsqueeze(1).expand(padded.shape[:2])
    if order is not None:
        small = small.index_select(1, order)
    batch_sizes: Any
    _, batch_sizes = torch._VF._pack_padded_sequence(
        small.t() if batch_first else small, lengths, batch_first
    )
    if len(batch_sizes) > padded.size(0):
        return original(input, given, batch_first, enforce_sorted)
    order = None if order is None else order.to(input.device)
    layout = batch_sizes._koila_layout = _layout(batch_sizes, order)
    if len(batch_sizes) < padded.size(0):
        padded = padded.narrow(0, 0, len(batch_sizes))
    data = _Pack.apply(padded, layout)  # type: ignore[no-untyped-call]
    return rnn._packed_sequence_init(data, batch_sizes, order, None)


def pad_packed_sequence(
    original: Callable[..., Any],
    sequence: Any,
    batch_first: bool,
    padding_value: float,
    total_length: int | None,
) -> Any:
    if not isinstance(sequence, rnn.PackedSequence) or not _is_ours(sequence.data):
        return original(sequence, batch_first, padding_value, total_length)
    layout = _layout_of(sequence)
    more = 0 if total_length is None else total_length - len(sequence.batch_sizes)
    if layout is None or more < 0:
        return original(sequence, batch_first, padding_value, total_length)
    out = _Unpack.apply(sequence.data, layout)  # type: ignore[no-untyped-call]
    if padding_value != 0:
        out = _filled(out, layout, padding_value)
    if more:
        sides = [0, 0] * (out.dim() - 1) + [0, more]
        out = torch.nn.functional.pad(out, sides, value=padding_value)
    if batch_first:
        out = out.transpose(0, 1)
        if sequence.unsorted_indices is not None:  # eager selects the rows, which copies
            out = out.contiguous()
    return out, layout.lengths.clone()


def _states_fit(module: Any, hx: Any, n_rows: int, data: Tensor) -> bool:
    """Are they as the module wants them? If not, torch's own code says what is wrong."""
    n = module.num_layers * (2 if module.bidirectional else 1)
    sizes = [(n, n_rows, module.proj_size or module.hidden_size)]
    if module.mode == "LSTM":
        sizes.append((n, n_rows, module.hidden_size))
        if not isinstance(hx, (tuple, list)) or len(hx) != 2:
            return False
    states = list(hx) if module.mode == "LSTM" else [hx]
    return all(
        isinstance(h, Tensor)
        and tuple(h.shape) == size
        and h.dtype == data.dtype
        and h.device == data.device
        for h, size in zip(states, sizes)
    )


def _is_known(module: Any, data: Tensor) -> bool:
    """Layers whose sizes and weights fit the data."""
    weights = module._flat_weights
    return (
        data.dtype.is_floating_point
        and module.mode in MODES
        and module.input_size == data.size(1)
        and all(isinstance(w, Tensor) for w in weights)
        and all(w.dtype == data.dtype and w.device == data.device for w in weights)
    )


def recur(module: Any, packed: Any, hx: Any) -> Any:
    """What `module(packed, hx)` returns, recorded layer by layer; None: torch's own code must do
    it."""
    data = packed.data
    if not _is_ours(data) or data.dim() != 2 or torch._C._is_any_autocast_enabled():
        return None
    layout = _layout_of(packed)
    if layout is None or not _is_known(module, data):
        return None
    if hx is not None and not _states_fit(module, hx, len(layout.lengths), data):
        return None
    states = [None, None] if hx is None else list(hx) if module.mode == "LSTM" else [hx, None]
    weights = list(module._flat_weights)
    given = [data, *(s for s in states if s is not None), *weights]
    keeps = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    if not _runs_on(data, module, keeps):
        return None
    return _layers(module, packed, layout, states, weights, keeps)


def _layers(
    module: Any, packed: Any, layout: Layout, states: list[Any], weights: list[Tensor], keeps: bool
) -> Any:
    data = packed.data
    at_once = 1 if data.device.type == "cpu" else module.num_layers
    n_states = at_once * (2 if module.bidirectional else 1)
    n_calls = module.num_layers // at_once
    per_call = len(weights) // n_calls
    is_lstm = module.mode == "LSTM"
    call = _Call(
        MODES[module.mode],
        module.bias,
        module.proj_size > 0,
        at_once,
        getattr(torch._VF, module.mode.lower()),
        keeps,
    )
    ends = []
    for i in range(n_calls):
        own = [None if s is None else s[i * n_states : (i + 1) * n_states] for s in states]
        of_call = weights[i * per_call : (i + 1) * per_call]
        data, *end = _Layer.apply(data, *own, layout, call, *of_call)  # type: ignore[no-untyped-call]
        ends.append(end)
        if module.training and 0 < module.dropout and i + 1 < n_calls:
            data = _Drop.apply(data, layout, module.dropout)  # type: ignore[no-untyped-call]
    last = [torch.cat(list(of), 0) if len(ends) > 1 else of[0] for of in zip(*ends)]
    out = rnn.PackedSequence(
        data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices
    )
    return out, tuple(last) if is_lstm else last[0]


def lazy_packed(
    packed: Any, whole: Callable[[Tensor], Tensor], rows: Callable[[Tensor], Tensor]
) -> Any:
    """A lazy PackedSequence. whole, rows: make a tensor lazy as it is, and cut along its rows."""
    layout = _layout(packed.batch_sizes, packed.sorted_indices)
    layout = layout._replace(places=rows(layout.places))
    batch_sizes = packed.batch_sizes.clone()
    batch_sizes._koila_layout = layout
    return rnn.PackedSequence(
        whole(packed.data), batch_sizes, packed.sorted_indices, packed.unsorted_indices
    )


# ---- installing


def install() -> None:
    instead(
        rnn.pack_padded_sequence,
        pack_padded_sequence,
        "input, lengths, batch_first=False, enforce_sorted=True",
        "input, lengths",
    )
    instead(
        rnn.pad_packed_sequence,
        pad_packed_sequence,
        "sequence, batch_first=False, padding_value=0.0, total_length=None",
        "getattr(sequence, 'data', None)",
    )

"""Recurrent layers over sequences of different lengths, as operators that can be cut by rows.

Torch runs a packed layer step by step: each step takes the rows that are still running, and its
backward writes each step into a buffer of the whole. The operators here compute one layer, in both
directions, with the same operators in the same order, so that they give the same bits. They take
the sequences padded, [T, B, ...], with two numbers of each row:

    places  int64[B, 2]: a row's length, and its rank among the rows by falling length

The rows of a slice, ordered by rank, are a packed batch again. On a GPU all layers are one call of
cuDNN, as in eager; `places` and what is computed of them stay on the CPU, where cuDNN wants them.

    koila::packed_rnn           a layer; its workspace is what backward needs, packed
    koila::packed_rnn_backward
    koila::pack_rows            padded -> packed: rows of [T * B, ...] by number
    koila::unpack_rows          packed -> padded, with zeros
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ._own_operators import OwnOperator, own_operators
from ._torch import DATA, torch

LSTM, GRU, TANH, RELU = range(4)
MODES = {"LSTM": LSTM, "GRU": GRU, "RNN_TANH": TANH, "RNN_RELU": RELU}
GATES = (4, 3, 1, 1)  # by mode, each as wide as the hidden state

Tensor = torch.Tensor
aten = torch.ops.aten


class _Forward(NamedTuple):
    """The arguments of koila::packed_rnn."""

    x: Tensor
    places: Tensor
    hx: Any  # None: zeros
    cx: Any
    weights: list[Tensor]
    mode: int
    biased: bool
    projected: bool
    layers: int
    per_row: int
    keeps: bool  # a backward may come


class _Backward(NamedTuple):
    """The arguments of koila::packed_rnn_backward."""

    g_out: Any  # gradients of what packed_rnn gives, None where there is none
    g_h: Any
    g_c: Any
    x: Tensor
    places: Tensor
    hx: Any
    cx: Any
    weights: list[Tensor]
    work: Tensor
    out: Any  # given for cuDNN alone
    mode: int
    biased: bool
    projected: bool
    layers: int
    wants_x: bool
    wants_weights: bool


_Arguments = _Forward | _Backward


class Steps(NamedTuple):
    """A packed batch: its rows by falling length, and where each element of it lies."""

    order: Tensor  # [B] the row that has this rank
    sizes: list[int]  # rows that run at this step
    time: Tensor  # [N] of each packed element
    row: Tensor  # [N]


def steps_of(places: Tensor) -> Steps:
    order = places[:, 1].argsort()
    lengths = places[order, 0]
    longest = int(lengths[0]) if len(lengths) else 0
    runs: Tensor = torch.arange(longest, device="cpu").unsqueeze(1) < lengths
    time, rank = runs.nonzero().unbind(1)
    return Steps(order, runs.sum(1).tolist(), time, order[rank])


def _steps_on(device: torch.device, places: Tensor) -> Steps:
    s = steps_of(places)
    return Steps(s.order.to(device), s.sizes, s.time.to(device), s.row.to(device))


def _packed(x: Tensor, s: Steps) -> Tensor:
    """The rows of x[T, B, ...] that exist, [N, ...], in packed order."""
    steps, rows = x.shape[:2]
    if x.is_contiguous():
        return x.flatten(0, 1).index_select(0, s.time * rows + s.row)
    if x.transpose(0, 1).is_contiguous():
        return x.transpose(0, 1).flatten(0, 1).index_select(0, s.row * steps + s.time)
    return x[s.time, s.row]


def _padded(packed: Tensor, steps: int, s: Steps) -> Tensor:
    """[T, B, ...] with zeros where no row runs."""
    rows = len(s.order)
    out = packed.new_zeros((steps * rows, *packed.shape[1:]))
    out.index_copy_(0, s.time * rows + s.row, packed)
    return out.view(steps, rows, *packed.shape[1:])


def _in_rows(by_rank: Tensor, s: Steps) -> Tensor:
    return torch.empty_like(by_rank).index_copy_(0, s.order, by_rank)


class _Weights(NamedTuple):
    """Of one direction; also their gradients, None until there is one."""

    w_ih: Any
    w_hh: Any
    b_ih: Any
    b_hh: Any
    w_hr: Any


def _directions(a: _Arguments) -> list[_Weights]:
    n = 2 + 2 * a.biased + a.projected
    out = []
    for at in range(0, len(a.weights), n):
        own = a.weights[at : at + n]
        b_ih, b_hh = own[2:4] if a.biased else (None, None)
        out.append(_Weights(own[0], own[1], b_ih, b_hh, own[-1] if a.projected else None))
    return out


def _sizes(ways: list[_Weights]) -> tuple[int, int]:
    """Of h, which may be projected, and of c."""
    w = ways[0]
    out = w.w_hh.shape[1]
    return out, out if w.w_hr is None else w.w_hr.shape[1]


class _Kept(NamedTuple):
    """What a direction keeps for its backward, packed: views of the workspace."""

    gates: Tensor  # LSTM i f g o; GRU r z and h's part of n; [N, 4H or 3H], else [N, 0]
    cells: Tensor  # LSTM c, GRU n; [N, H], else [N, 0]
    hidden: Tensor  # h, [N, H or the projection]


def _columns(mode: int, hidden: int, out: int) -> tuple[int, int, int]:
    gates = GATES[mode] * hidden if mode in (LSTM, GRU) else 0
    return gates, hidden if mode in (LSTM, GRU) else 0, out


def kept_columns(mode: int, hidden: int, out: int) -> int:
    return sum(_columns(mode, hidden, out))


def _kept(work: Tensor, n: int, d: int, mode: int, hidden: int, out: int) -> _Kept:
    columns = _columns(mode, hidden, out)
    at = d * n * sum(columns)
    parts = []
    for width in columns:
        parts.append(work[at : at + n * width].view(n, width))
        at += n * width
    return _Kept(*parts)


def _linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    y: Tensor = torch._C._nn.linear(x, w, b)
    return y


def _lstm_step(igates: Tensor, h: Tensor, c: Tensor, w: _Weights, kept: Any) -> Tensor:
    gates, cell, hidden = kept
    width = cell.shape[1]
    torch.add(_linear(h, w.w_hh, w.b_hh), igates, out=gates)
    i, f, g, o = gates.unsafe_split(width, 1)
    i.sigmoid_(), f.sigmoid_(), g.tanh_(), o.sigmoid_()
    torch.mul(f, c, out=cell).add_(i * g)
    if w.w_hr is None:
        return torch.mul(o, cell.tanh(), out=hidden)
    y: Tensor = hidden.copy_(torch.matmul(o * cell.tanh(), w.w_hr.t()))
    return y


def _gru_step(igates: Tensor, h: Tensor, w: _Weights, kept: Any) -> Tensor:
    gates, new, hidden = kept
    width = new.shape[1]
    own = _linear(h, w.w_hh, w.b_hh)
    ir, iz, i_new = igates.unsafe_split(width, 1)
    hr, hz, h_new = own.unsafe_split(width, 1)
    r, z, h_part = gates.unsafe_split(width, 1)
    torch.add(hr, ir, out=r).sigmoid_()
    torch.add(hz, iz, out=z).sigmoid_()
    h_part.copy_(h_new)
    torch.add(i_new, h_new.mul_(r), out=new).tanh_()
    return torch.sub(h, new, out=hidden).mul_(z).add_(new)


def _plain_step(igates: Tensor, h: Tensor, w: _Weights, kept: Any, mode: int) -> Tensor:
    hidden: Tensor = kept[2]
    torch.add(_linear(h, w.w_hh, w.b_hh), igates, out=hidden)
    return hidden.tanh_() if mode == TANH else hidden.relu_()


def _run_direction(
    igates: Tensor,
    h0: Tensor,
    c0: Tensor,
    w: _Weights,
    kept: _Kept,
    s: Steps,
    mode: int,
    back: bool,
) -> tuple[Tensor, Tensor]:
    """Fills `kept`. h0, c0 and the results are ordered by rank."""
    ends = _ends(s.sizes)
    h_end, c_end = torch.empty_like(h0), torch.empty_like(c0)
    running = s.sizes[-1] if back and s.sizes else len(h0)
    h, c = h0[:running], c0[:running]
    for t in reversed(range(len(s.sizes))) if back else range(len(s.sizes)):
        size = s.sizes[t]
        if size > running:  # backward in time, more rows join
            h = torch.cat([h, h0[running:size]])
            c = torch.cat([c, c0[running:size]]) if mode == LSTM else c
        elif size < running:  # forward, rows end
            h_end[size:running] = h[size:]
            h = h[:size]
            if mode == LSTM:
                c_end[size:running] = c[size:]
                c = c[:size]
        running = size
        part = slice(ends[t] - size, ends[t])
        own = (kept.gates[part], kept.cells[part], kept.hidden[part])
        if mode == LSTM:
            h, c = _lstm_step(igates[part], h, c, w, own), own[1]
        elif mode == GRU:
            h = _gru_step(igates[part], h, w, own)
        else:
            h = _plain_step(igates[part], h, w, own, mode)
    h_end[:running] = h
    if mode == LSTM:
        c_end[:running] = c
    return h_end, c_end


def _ends(sizes: list[int]) -> list[int]:
    ends, at = [], 0
    for size in sizes:
        at += size
        ends.append(at)
    return ends


def _states(a: _Arguments, w: _Weights, s: Steps, d: int) -> tuple[Tensor, Tensor]:
    """h0 and c0 of direction d, by rank."""
    rows = len(s.order)
    sizes = _sizes([w])
    h, c = (
        a.x.new_zeros(rows, size) if state is None else state[d].index_select(0, s.order)
        for state, size in zip((a.hx, a.cx), sizes)
    )
    return h, c


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a = _Forward(*arguments)
    with torch.no_grad():
        s = steps_of(a.places)
        packed = _packed(a.x, s)
        n = len(packed)
        ways = _directions(a)
        out, hidden = _sizes(ways)
        columns = kept_columns(a.mode, hidden, out)
        work = a.x.new_empty(len(ways) * n * columns if a.keeps else 0)
        outputs, h_ends, c_ends = [], [], []
        for d, w in enumerate(ways):
            own = work if a.keeps else a.x.new_empty(n * columns)
            kept = _kept(own, n, d if a.keeps else 0, a.mode, hidden, out)
            h0, c0 = _states(a, w, s, d)
            igates = _linear(packed, w.w_ih, w.b_ih)
            h, c = _run_direction(igates, h0, c0, w, kept, s, a.mode, d == 1)
            del igates
            outputs.append(kept.hidden)
            h_ends.append(_in_rows(h, s))
            c_ends.append(_in_rows(c, s) if a.mode == LSTM else c[:, :0])
        y = _padded(outputs[0] if len(ways) == 1 else torch.cat(outputs, 1), a.x.shape[0], s)
        return y, torch.stack(h_ends), torch.stack(c_ends), work


# ---- backward


class _Sums:
    """Gradients of the weights of a direction, added up in autograd's order."""

    def __init__(self) -> None:
        self.of: dict[str, Tensor] = {}

    def add(self, name: str, gradient: Tensor) -> None:
        if name in self.of:
            self.of[name] += gradient
        else:
            self.of[name] = gradient

    def of_inputs(self, gates: Tensor, packed: Any, biased: bool) -> None:
        if biased:
            self.add("b_ih", gates.sum(0))
        self.add("w_ih", _of_weight(gates, packed))


def _of_weight(gradient: Tensor, x: Tensor) -> Tensor:
    return gradient.t().mm(x)


class _Way:
    """A direction on its way back: the gradients that go from step to step."""

    def __init__(self, mode: int, w: _Weights, kept: _Kept, sums: _Sums | None) -> None:
        self.mode, self.w, self.kept, self.sums = mode, w, kept, sums

    def linear(self, gradient: Tensor, h: Tensor) -> Tensor:
        if self.sums is not None:
            if self.w.b_hh is not None:
                self.sums.add("b_hh", gradient.sum(0))
            self.sums.add("w_hh", _of_weight(gradient, h))
        return gradient.mm(self.w.w_hh)

    def lstm(
        self, part: slice, dh: Tensor, dc: Tensor, h: Tensor, c: Tensor, to: Tensor
    ) -> tuple[Tensor, Tensor]:
        """to: gets the gradient of the gates. Returns those of the states before."""
        cell = self.kept.cells[part]
        i, f, g, o = self.kept.gates[part].unsafe_split(cell.shape[1], 1)
        ti, tf, tg, to_ = to.unsafe_split(cell.shape[1], 1)
        curved = cell.tanh()
        if self.w.w_hr is not None:
            if self.sums is not None:
                self.sums.add("w_hr", _of_weight(dh, o * curved))
            dh = dh.mm(self.w.w_hr)
        dc = dc + aten.tanh_backward(dh * o, curved)
        aten.sigmoid_backward.grad_input(dh * curved, o, grad_input=to_)
        aten.sigmoid_backward.grad_input(dc * g, i, grad_input=ti)
        aten.tanh_backward.grad_input(dc * i, g, grad_input=tg)
        aten.sigmoid_backward.grad_input(dc * c, f, grad_input=tf)
        return self.linear(to, h), dc * f

    def gru(self, part: slice, dh: Tensor, h: Tensor, to: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the two gradients of the state before, in autograd's order."""
        new = self.kept.cells[part]
        r, z, h_part = self.kept.gates[part].unsafe_split(new.shape[1], 1)
        tr, tz, tn = to.unsafe_split(new.shape[1], 1)
        through = dh * z
        aten.tanh_backward.grad_input(dh + through.neg(), new, grad_input=tn)
        aten.sigmoid_backward.grad_input(dh * (h - new), z, grad_input=tz)
        aten.sigmoid_backward.grad_input(tn * h_part, r, grad_input=tr)
        return through, self.linear(torch.cat([tr, tz, tn * r], 1), h)

    def simple(self, part: slice, dh: Tensor, h: Tensor, to: Tensor) -> Tensor:
        hidden = self.kept.hidden[part]
        if self.mode == TANH:
            aten.tanh_backward.grad_input(dh, hidden, grad_input=to)
        else:
            aten.threshold_backward.grad_input(dh, hidden, 0, grad_input=to)
        return self.linear(to, h)


def _before(t: int, back: bool, s: Steps, ends: list[int], states: Tensor, first: Tensor) -> Tensor:
    """The states from which step t began. states: those after all steps, packed."""
    size, last = s.sizes[t], len(s.sizes) - 1
    if not back:
        return first[:size] if t == 0 else states[ends[t - 1] - s.sizes[t - 1] :][:size]
    if t == last:
        return first[:size]
    before = states[ends[t + 1] - s.sizes[t + 1] : ends[t + 1]]
    joined = len(before)
    return before if joined == size else torch.cat([before, first[joined:size]])


def _back_direction(
    way: _Way, s: Steps, back: bool, go: Any, ends_of: tuple[Any, Any], first: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """go: gradient of the outputs, [N, out], or None. ends_of: of the last states; first: the
    first states; both by rank. Returns the gradients of the gates, [N, gates], h0 and c0."""
    h0, c0 = first
    width = c0.shape[1]
    ends = _ends(s.sizes)
    n = ends[-1] if ends else 0
    gates = h0.new_empty(n, GATES[way.mode] * width)
    gh0, gc0 = torch.empty_like(h0), torch.empty_like(c0)
    gh_end = torch.zeros_like(h0) if ends_of[0] is None else ends_of[0]
    gc_end = torch.zeros_like(c0) if ends_of[1] is None else ends_of[1]
    running = len(h0) if back else 0
    # of the state after the step at hand: (parts in the order in which autograd adds them)
    dh: tuple[Tensor, ...] = (gh_end if back else gh_end[:0],)
    dc = gc_end if back else gc_end[:0]
    for t in range(len(s.sizes)) if back else reversed(range(len(s.sizes))):
        size = s.sizes[t]
        part = slice(ends[t] - size, ends[t])
        if size != running:
            whole = dh[0] if len(dh) == 1 else dh[0] + dh[1]
            if size > running:  # rows end at this step
                dh = (torch.cat([whole, gh_end[running:size]]),)
                dc = torch.cat([dc, gc_end[running:size]])
            else:  # rows begin after it
                gh0[size:running], gc0[size:running] = whole[size:], dc[size:]
                dh, dc = (whole[:size],), dc[:size]
        running = size
        parts = dh if go is None else (go[part], *dh)
        total = parts[0]
        for more in parts[1:]:
            total = total + more
        h = _before(t, back, s, ends, way.kept.hidden, h0)
        if way.mode == LSTM:
            c = _before(t, back, s, ends, way.kept.cells, c0)
            before, dc = way.lstm(part, total, dc, h, c, gates[part])
            dh = (before,)
        elif way.mode == GRU:
            dh = way.gru(part, total, h, gates[part])
        else:
            dh = (way.simple(part, total, h, gates[part]),)
    gh0[:running] = dh[0] if len(dh) == 1 else dh[0] + dh[1]
    gc0[:running] = dc
    return gates, gh0, gc0


def _backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    a = _Backward(*arguments)
    with torch.no_grad():
        s = steps_of(a.places)
        ways = _directions(a)
        out, hidden = _sizes(ways)
        go = None if a.g_out is None else _packed(a.g_out, s)
        packed = _packed(a.x, s) if a.wants_weights else None
        gx: Any = None
        found: list[Any] = [None] * len(ways)
        for d in reversed(range(len(ways))):
            w, sums = ways[d], _Sums() if a.wants_weights else None
            kept = _kept(a.work, len(s.time), d, a.mode, hidden, out)
            way = _Way(a.mode, w, kept, sums)
            h_end, c_end = (
                None if g is None else g[d].index_select(0, s.order) for g in (a.g_h, a.g_c)
            )
            own = None if go is None else go[:, d * out : (d + 1) * out]
            first = _states(a, w, s, d)
            gates, gh, gc = _back_direction(way, s, d == 1, own, (h_end, c_end), first)
            if a.wants_x:
                more = gates.mm(w.w_ih)
                gx = more if gx is None else gx.add_(more)
            if sums is not None:
                sums.of_inputs(gates, packed, a.biased)
            found[d] = (_in_rows(gh, s), _in_rows(gc, s) if a.mode == LSTM else gc[:, :0], sums)
        names = ["w_ih", "w_hh", *(["b_ih", "b_hh"] if a.biased else []), *(["w_hr"] * a.projected)]
        return (
            _padded(gx, a.x.shape[0], s) if a.wants_x else a.x.new_empty(0),
            torch.stack([h for h, _, _ in found]),
            torch.stack([c for _, c, _ in found]),
            [sums.of[name] for _, _, sums in found if sums is not None for name in names],
        )


# ---- by cuDNN

_CUDNN_MODES = {RELU: 0, TANH: 1, LSTM: 2, GRU: 3}


class _Cudnn(NamedTuple):
    """What both calls of cuDNN take beside the tensors of a slice."""

    weights: list[Tensor]
    per_way: int  # weights of a direction of a layer
    buffer: Tensor  # a copy of the weights, in one piece
    numbers: tuple[Any, ...]  # mode, hidden size, size of the projection, layers, batch_first

    @staticmethod
    def of(a: _Arguments) -> _Cudnn:
        per_way = 2 + 2 * a.biased + a.projected
        weights = [DATA.__get__(w) for w in a.weights]  # flattening counts a version
        out, hidden = _sizes(_directions(a))
        numbers = (_CUDNN_MODES[a.mode], hidden, out if a.projected else 0, a.layers, False)
        both = len(weights) == 2 * a.layers * per_way
        buffer = aten._cudnn_rnn_flatten_weight.default(  # moves these aliases into it
            list(weights), per_way, a.x.shape[2], *numbers, both
        )
        return _Cudnn(weights, per_way, buffer, numbers)

    def given(self) -> tuple[Any, ...]:
        return self.weights, self.per_way, self.buffer

    def rest(self, trains: bool, sizes: list[int]) -> tuple[Any, ...]:
        *numbers, layers, _ = self.numbers
        both = len(self.weights) == 2 * layers * self.per_way
        return *self.numbers, 0.0, trains, both, sizes, None


def _first_states(a: _Arguments, s: Steps) -> tuple[Any, Any]:
    """By rank, [layers x directions, B, H]. The second is None but in an LSTM."""
    ways = _directions(a)

    def state(given: Any, size: int) -> Tensor:
        if given is not None:
            chosen: Tensor = given.index_select(1, s.order)
            return chosen
        return a.x.new_zeros(len(ways), len(s.order), size)

    out, hidden = _sizes(ways)
    return state(a.hx, out), state(a.cx, hidden) if a.mode == LSTM else None


def _rows_of(by_rank: Tensor, s: Steps) -> Tensor:
    return torch.empty_like(by_rank).index_copy_(1, s.order, by_rank)


def _forward_cudnn(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a = _Forward(*arguments)
    with torch.no_grad():
        s = _steps_on(a.x.device, a.places)
        call = _Cudnn.of(a)
        y, h, c, reserve, _ = aten._cudnn_rnn.default(
            *(_packed(a.x, s), *call.given(), *_first_states(a, s)),
            *call.rest(a.keeps, s.sizes),
        )
        c = _rows_of(c, s) if a.mode == LSTM else h[..., :0]
        return _padded(y, a.x.shape[0], s), _rows_of(h, s), c, reserve


def _backward_cudnn(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    a = _Backward(*arguments)
    with torch.no_grad():
        s = _steps_on(a.x.device, a.places)
        call = _Cudnn.of(a)
        is_lstm = a.mode == LSTM
        g_ends = [None if g is None else g.index_select(1, s.order) for g in (a.g_h, a.g_c)]
        gx, gh, gc, of_weights = aten._cudnn_rnn_backward.default(
            *(_packed(a.x, s), *call.given(), *_first_states(a, s), _packed(a.out, s)),
            *(None if a.g_out is None else _packed(a.g_out, s), *g_ends),
            *call.rest(True, s.sizes),
            a.work.clone(),  # cuDNN writes into it, and another backward may come
            [a.wants_x, True, is_lstm, a.wants_weights],
        )
        return (
            _padded(gx, a.x.shape[0], s) if a.wants_x else a.x.new_empty(0),
            _rows_of(gh, s),
            _rows_of(gc, s) if is_lstm else gh[..., :0],
            of_weights if a.wants_weights else [],
        )


# ---- packed and padded


def _pack(x: Tensor, rows: Tensor) -> Tensor:
    return x.flatten(0, 1).index_select(0, rows.to(x.device))


def _unpack(data: Tensor, places: Tensor, offsets: Tensor) -> Tensor:
    """offsets: [T], where each step begins in data."""
    lengths, ranks = places.unbind(1)
    steps = len(offsets)
    runs = torch.arange(steps, device="cpu").unsqueeze(1) < lengths
    at = torch.where(runs, offsets.unsqueeze(1) + ranks, 0).flatten()
    out = data.index_select(0, at.to(data.device))
    out[~runs.flatten().to(data.device)] = 0
    return out.view(steps, len(places), *data.shape[1:])


# ---- what they give, for tensors without values


def _fake_forward(*arguments: Any) -> Any:
    a = _Forward(*arguments)
    ways = _directions(a)
    n_ways = len(ways) // a.layers
    out, hidden = _sizes(ways)
    steps, rows = a.x.shape[:2]
    kept = rows * a.per_row * kept_columns(a.mode, hidden, out) * len(ways) if a.keeps else 0
    if a.x.device.type == "cpu":
        work = a.x.new_empty(kept)
    else:  # cuDNN's reserve
        work = a.x.new_empty(kept * a.x.element_size(), dtype=torch.uint8)
    return (
        a.x.new_empty(steps, rows, out * n_ways),
        a.x.new_empty(len(ways), rows, out),
        a.x.new_empty(len(ways), rows, hidden if a.mode == LSTM else 0),
        work,
    )


def _fake_backward(*arguments: Any) -> Any:
    a = _Backward(*arguments)
    ways = _directions(a)
    out, hidden = _sizes(ways)
    steps, rows, features = a.x.shape
    return (
        a.x.new_empty(steps, rows, features) if a.wants_x else a.x.new_empty(0),
        a.x.new_empty(len(ways), rows, out),
        a.x.new_empty(len(ways), rows, hidden if a.mode == LSTM else 0),
        [w.new_empty(w.shape) for w in a.weights] if a.wants_weights else [],
    )


def _fake_pack(x: Any, rows: Any) -> Any:
    return x.new_empty((rows.shape[0], *x.shape[2:]))


def _fake_unpack(data: Any, places: Any, offsets: Any) -> Any:
    return data.new_empty((offsets.shape[0], places.shape[0], *data.shape[1:]))


@own_operators("CPU", "CUDA")
def operators() -> list[OwnOperator]:
    """torch.ops.koila with the operators above."""
    rest = "int mode, bool biased, bool projected, int layers"
    states = "Tensor places, Tensor? hx, Tensor? cx, Tensor[] weights"
    layer = (
        f"packed_rnn(Tensor x, {states}, {rest}, int per_row, bool keeps) -> "
        "(Tensor, Tensor, Tensor, Tensor)"
    )
    layer_backward = (
        f"packed_rnn_backward(Tensor? g_out, Tensor? g_h, Tensor? g_c, Tensor x, {states}, "
        f"Tensor work, Tensor? out, {rest}, bool wants_x, bool wants_weights) -> "
        "(Tensor, Tensor, Tensor, Tensor[])"
    )
    unpack = "unpack_rows(Tensor data, Tensor places, Tensor offsets) -> Tensor"
    return [
        OwnOperator(layer, _forward, _fake_forward, _forward_cudnn),
        OwnOperator(layer_backward, _backward, _fake_backward, _backward_cudnn),
        OwnOperator("pack_rows(Tensor x, Tensor rows) -> Tensor", _pack, _fake_pack),
        OwnOperator(unpack, _unpack, _fake_unpack),
    ]

"""Packed sequences: a recurrent layer over rows of different lengths is cut by rows, and gives what
plain PyTorch gives: to the bit when it is not cut."""

import copy
import gc
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F

# by name, before the first lazy(): how most programs import them
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    pad_sequence,
    unpack_sequence,
)

import koila
from helpers import compare, compare_programs, model_state, plain
from koila import _packed, _recurrent, lazy

B, T, C, H = 12, 8, 5, 6
LENGTHS = [3, 8, 1, 5, 8, 2, 7, 4, 1, 6, 5, 3]


@pytest.fixture(autouse=True)
def wide():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def batch():
    return torch.randn(B, T, C), torch.randint(0, 3, (B,))


class Net(torch.nn.Module):
    """Features, packed, recurrent, padded again; a head on the outputs, one on the last states."""

    def __init__(self, layer=torch.nn.LSTM, lengths=None, call=None, pad=None, **kw):
        super().__init__()
        kw.setdefault("batch_first", True)
        self.features = torch.nn.Linear(C, C)
        self.recurrent = layer(C, H, **kw)
        ways = 2 if self.recurrent.bidirectional else 1
        self.head = torch.nn.Linear(ways * (self.recurrent.proj_size or H), 3)
        self.lengths = LENGTHS if lengths is None else lengths
        self.call = {"enforce_sorted": False} if call is None else call
        self.pad = {} if pad is None else pad

    def forward(self, x, hx=None):
        first = self.recurrent.batch_first
        x = self.features(x if first else x.transpose(0, 1))
        packed = pack_padded_sequence(x, self.lengths, batch_first=first, **self.call)
        out, last = self.recurrent(packed, hx)
        assert isinstance(out, PackedSequence)
        y, lengths = pad_packed_sequence(out, batch_first=first, **self.pad)
        if isinstance(self.lengths, list):
            assert lengths.tolist() == self.lengths
        states = last if isinstance(last, tuple) else (last,)
        return self.head(y if first else y.transpose(0, 1)), states


def loss_of(model, x, y):
    out, states = model(x)
    loss = F.cross_entropy(out.sum(1), y) + out.square().sum()
    for state in states:
        loss = loss + state.square().mean()
    return loss


def compare_nets(make, **options):
    options.setdefault("gather_bytes_per_row", 0)
    compare(make, batch, loss_of, **options)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("layer", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_layers_are_cut_by_rows_and_equal_to_the_bit_when_whole(layer, both, layers):
    compare_nets(lambda: Net(layer, bidirectional=both, num_layers=layers))


OPTIONS = {
    "time first": {"batch_first": False},
    "without biases": {"bias": False},
    "projected": {"proj_size": 4, "num_layers": 2, "bidirectional": True},
    "projected, without biases": {"proj_size": 4, "bias": False},
    "dropout": {"num_layers": 3, "dropout": 0.4},
    "all dropped": {"num_layers": 2, "dropout": 1.0},
    "sorted": {"lengths": sorted(LENGTHS, reverse=True), "call": {}},
    "padded with a number": {"pad": {"padding_value": 1.5}},
    "padded to a length": {"pad": {"total_length": T + 3, "padding_value": -1.0}},
    "shorter than the padding": {"lengths": [min(n, 4) for n in LENGTHS]},
    "all of one length": {"lengths": [T] * B},
    "one step": {"lengths": [1] * B},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options):
    compare_nets(lambda: Net(**options))


def test_relu_without_biases():
    compare_nets(lambda: Net(torch.nn.RNN, nonlinearity="relu", bias=False, bidirectional=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types_are_as_exact(dtype):
    """Whole, too: products over padded rows may add the same numbers in another order."""
    torch.set_default_dtype(dtype)
    tol, tol_whole = (1e-5, 1e-6) if dtype == torch.float32 else (0.1, 0.01)
    compare_nets(lambda: Net(bidirectional=True), tol=tol, tol_whole=tol_whole)


@pytest.mark.parametrize("layer", [torch.nn.LSTM, torch.nn.GRU])
def test_given_states_are_rows_of_the_batch_and_get_gradients(layer):
    def program(wrap):
        torch.manual_seed(2)
        model = Net(layer, num_layers=2)
        x = torch.randn(B, T, C)
        h, c = torch.randn(B, 2, H, requires_grad=True), torch.randn(B, 2, H, requires_grad=True)
        xs, hs, cs = wrap(x, h, c)
        hs, cs = hs.transpose(0, 1), cs.transpose(0, 1)
        out, states = model(xs, (hs, cs) if layer is torch.nn.LSTM else hs)
        (out.square().mean() + sum(s.sum() for s in states)).backward()
        got = {"h": plain(h.grad), **model_state(model)}
        return got | ({"c": plain(c.grad)} if layer is torch.nn.LSTM else {})

    compare_programs(program, B, gather_bytes_per_row=0)


def test_no_gather_is_made_under_strict():
    model = Net(num_layers=2, bidirectional=True)
    x, y = lazy(*batch())
    with koila.micro_batch(3), koila.strict():
        loss_of(model, x, y).backward()
    assert koila.last_plan().n_micro_batches == 4


def test_what_is_recorded_does_not_grow_with_the_lengths():
    def recorded(steps):
        model = Net(lengths=[steps] * B)
        x, y = lazy(torch.randn(B, steps, C), torch.randint(0, 3, (B,)))
        loss_of(model, x, y).backward()
        return koila.last_plan().n_recorded

    assert recorded(40) == recorded(2) < 80


def test_lengths_may_be_a_list_a_tensor_or_lazy():
    def program(kind):
        def of(wrap):
            torch.manual_seed(2)
            model, lengths = Net(), torch.tensor(LENGTHS, device="cpu")
            x, y = batch()
            x, y, lazy_lengths = wrap(x, y, lengths)
            model.lengths = {"tensor": lengths, "lazy": lazy_lengths, "list": LENGTHS}[kind]
            loss_of(model, x, y).backward()
            return model_state(model)

        return of

    for kind in ("list", "tensor", "lazy"):
        compare_programs(program(kind), B, gather_bytes_per_row=8)


# ---- packed sequences that come in and go out


def packed_rows(rows, sort=False):
    """Torch makes the lengths on the default device, and wants them on the CPU."""
    with torch.device("cpu"):
        return pack_sequence(rows, enforce_sorted=sort)


def packed_batch(sort=False):
    rows = [torch.randn(n, C) for n in (sorted(LENGTHS, reverse=True) if sort else LENGTHS)]
    return packed_rows(rows, sort)


@pytest.mark.parametrize("sort", [False, True])
def test_a_packed_sequence_can_be_made_lazy(sort):
    def program(wrap):
        torch.manual_seed(2)
        packed, y = packed_batch(sort), torch.randint(0, 3, (B,))
        layer, head = torch.nn.GRU(C, H, 2, bidirectional=True), torch.nn.Linear(H, 3)
        given = copy.deepcopy(packed)
        packed, y = wrap(packed, y)
        assert isinstance(packed, PackedSequence)

        def loss_of_packed():
            out, h = layer(packed)
            assert isinstance(out, PackedSequence)
            return F.cross_entropy(head(h[-1]), y) + pad_packed_sequence(out)[0].square().sum()

        loss = loss_of_packed()
        loss.backward()
        assert torch.equal(given.data, plain(packed.data))
        return {"loss": plain(loss), **model_state(layer), **model_state(head)}

    compare_programs(program, B, gather_bytes_per_row=0)


def test_the_data_of_a_lazy_packed_sequence_gets_a_gradient():
    def program(wrap):
        torch.manual_seed(2)
        packed = packed_batch()
        packed.data.requires_grad_()
        layer = torch.nn.LSTM(C, H)
        out, _ = layer(wrap(packed))
        pad_packed_sequence(out)[0].square().sum().backward()
        return {"data": plain(packed.data.grad), **model_state(layer)}

    compare_programs(program, B)


def test_lazy_twice_is_lazy_once_and_none_is_not_batched():
    packed = packed_batch()
    once = lazy(packed)
    assert lazy(once) is once and lazy((once, packed.data.new_zeros(B)))[0] is once
    left, x = lazy(packed, torch.zeros(3, 2), batch=(None, 0))
    assert left is packed and x.shape == (3, 2)


def test_a_packed_sequence_with_another_number_of_rows_is_refused():
    with pytest.raises(ValueError, match="expected one size along axis 0, got 12"):
        lazy(packed_batch(), torch.zeros(B + 1))
    with pytest.raises(ValueError, match="expected an int or None for a PackedSequence"):
        lazy((packed_batch(),), batch=((0, 0, None, None),))


def test_run_makes_a_packed_result_plain():
    torch.manual_seed(2)
    layer, packed = torch.nn.LSTM(C, H), packed_batch()
    expected, _ = layer(packed)
    got = koila.run(layer(lazy(packed))[0])
    assert isinstance(got, PackedSequence) and type(got.data) is torch.Tensor
    assert torch.equal(expected.data, got.data)


def test_sequences_are_padded_packed_and_unpacked():
    def program(wrap):
        torch.manual_seed(2)
        x = wrap(torch.randn(B, T, C))
        layer = torch.nn.GRU(C, H)
        rows = [x[i, : LENGTHS[i]] for i in range(B)]
        out, _ = layer(packed_rows(rows))
        parts = unpack_sequence(out)
        assert [len(p) for p in parts] == LENGTHS
        again, _ = layer(pack_padded_sequence(pad_sequence(rows), LENGTHS, False, False))
        loss = sum(p.square().mean() for p in parts) + again.data.sum()
        loss.backward()
        return {"loss": plain(loss), **model_state(layer)}

    compare_programs(program, B, split=False)


# ---- everything else that a program does with packed data: right, although not always cut


def captions(wrap, model, words, targets):
    """Embedding of packed words, recurrent, loss on packed data against packed targets."""
    words, targets = wrap(words, targets)
    packed = pack_padded_sequence(words, LENGTHS, True, False)
    wanted = pack_padded_sequence(targets, LENGTHS, True, False)
    embedded = model[0](packed.data)
    out, _ = model[1](PackedSequence(embedded, *packed[1:]))
    return F.cross_entropy(model[2](out.data), wanted.data)


def caption_model():
    return torch.nn.ModuleList(
        [torch.nn.Embedding(20, C), torch.nn.LSTM(C, H), torch.nn.Linear(H, 20)]
    )


def test_operators_on_packed_data():
    def program(wrap):
        torch.manual_seed(2)
        model = caption_model()
        words, targets = torch.randint(0, 20, (2, B, T))
        loss = captions(wrap, model, words, targets)
        loss.backward()
        return {"loss": plain(loss), **model_state(model)}

    compare_programs(program, B, split=False)


def with_packed(change):
    """A program that does `change(packed)` between packing and the layer; a dict of what it
    keeps."""

    def program(wrap):
        torch.manual_seed(2)
        model = Net()
        x = wrap(torch.randn(B, T, C))
        packed = pack_padded_sequence(model.features(x), LENGTHS, True, False)
        packed, later = change(packed)
        out, _ = model.recurrent(packed)
        loss = pad_packed_sequence(out)[0].square().sum()
        loss.backward()
        return {"loss": plain(loss), **model_state(model), **later()}

    return program


def written(packed):
    packed.data.mul_(2)
    return packed, dict


def written_padded(packed):
    return PackedSequence(packed.data + 0, *packed[1:]), dict


def hooked(packed):
    seen = []
    packed.data.register_hook(lambda g: seen.append(plain(g)))
    packed.data.register_hook(lambda g: g * 2)
    return packed, lambda: {"seen": seen[0]}


def retained(packed):
    packed.data.retain_grad()
    return packed, lambda: {"kept": plain(packed.data.grad)}


def clipped(packed):
    return packed._replace(data=packed.data.clamp(-0.5, 0.5)), dict


@pytest.mark.parametrize("change", [written, written_padded, hooked, retained, clipped])
def test_packed_data_that_is_changed_or_watched(change):
    compare_programs(with_packed(change), B, split=False)


def test_a_write_to_what_was_packed_or_padded_comes_too_late():
    def program(wrap):
        torch.manual_seed(2)
        layer, x = torch.nn.GRU(C, H), wrap(torch.randn(T, B, C), torch.zeros(T, B))[0] * 1
        packed = pack_padded_sequence(x, LENGTHS, enforce_sorted=False)
        x.mul_(3)
        out, _ = layer(packed)
        first, _ = pad_packed_sequence(out)
        first.mul_(0)
        second, _ = pad_packed_sequence(out)
        loss = second.square().sum() + first.sum() + x.sum()
        loss.backward()
        return {"loss": plain(loss), "x": plain(x), **model_state(layer)}

    compare_programs(program, B, batch=1, split=False)


def test_planted_faults_are_caught(monkeypatch):
    steps_of, at = _recurrent.steps_of, _packed._at
    monkeypatch.setattr(
        _recurrent, "steps_of", lambda places: steps_of((places - torch.tensor([1, 0])).clamp(1))
    )  # rows end a step too early
    with pytest.raises(AssertionError):
        compare_nets(Net)
    monkeypatch.setattr(
        _recurrent, "steps_of", lambda places: steps_of(places * torch.tensor([1, 0]))
    )
    with pytest.raises((AssertionError, RuntimeError)):  # rows in no order
        compare_nets(Net)
    monkeypatch.setattr(_recurrent, "steps_of", steps_of)
    compare_nets(Net)
    monkeypatch.setattr(_packed, "_at", lambda data, padded: ())  # a write is not noticed
    with pytest.raises(AssertionError):
        compare_programs(with_packed(written), B, split=False)
    monkeypatch.setattr(_packed, "_at", at)
    compare_programs(with_packed(written), B, split=False)


@pytest.mark.about_the_cpu("cuDNN's layers have no gradients of gradients, in eager neither")
def test_gradients_of_gradients():
    def program(wrap):
        torch.manual_seed(2)
        model = Net(bidirectional=True, num_layers=2, dropout=0.3)
        x = torch.randn(B, T, C, requires_grad=True)
        (xs,) = (wrap(x),)
        out, _ = model(xs)
        (g,) = torch.autograd.grad(out.square().sum(), xs, create_graph=True)
        (g.square().sum() + out.sum()).backward()
        return {"x": plain(x.grad), **model_state(model)}

    compare_programs(program, B, split=False, tol_whole=1e-12)


def test_frozen_weights_and_frozen_inputs():
    def program(wrap):
        torch.manual_seed(2)
        model = Net(bidirectional=True)
        model.recurrent.requires_grad_(False)
        model.recurrent.weight_hh_l0.requires_grad_()
        loss = loss_of(model, *wrap(*batch()))
        loss.backward()
        frozen = Net()
        frozen.features.requires_grad_(False)
        other = loss_of(frozen, *wrap(*batch()))
        other.backward()
        return {"loss": plain(loss + other), **model_state(model), **model_state(frozen)}

    compare_programs(program, B, gather_bytes_per_row=0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation(mode):
    def program(wrap):
        torch.manual_seed(2)
        model = Net(torch.nn.GRU, num_layers=2, dropout=0.5).eval()
        with mode():
            out, (h,) = model(wrap(torch.randn(B, T, C)))
            return {"out": plain(out), "h": plain(h)}

    compare_programs(program, B, gather_bytes_per_row=0)


def test_a_checkpointed_layer():
    from torch.utils.checkpoint import checkpoint

    def program(wrap):
        torch.manual_seed(2)
        model = Net(num_layers=2, dropout=0.5)
        x, y = wrap(*batch())
        out, h, c = checkpoint(lambda x: (lambda o, s: (o, *s))(*model(x)), x, use_reentrant=False)
        (F.cross_entropy(out.sum(1), y) + h.sum() + c.sum()).backward()
        return model_state(model)

    compare_programs(program, B, gather_bytes_per_row=0)


def of_the_batch(a, b, x):
    """Two backwards in one run: the gradients of a lazy tensor are lazy."""
    (first,) = torch.autograd.grad(a, x, retain_graph=True)
    (second,) = torch.autograd.grad(b, x)
    return first * second


TWICE = {
    "two losses": lambda a, b, x: (a.backward(retain_graph=True), b.backward()),
    "one loss twice": lambda a, b, x: (a.backward(retain_graph=True), a.backward()),
    "both, then one": lambda a, b, x: ((a + b).backward(retain_graph=True), a.backward()),
    "of the batch": of_the_batch,
}


@pytest.mark.parametrize("read_between", [False, True])
@pytest.mark.parametrize("backwards", TWICE.values(), ids=TWICE)
@pytest.mark.parametrize("layer", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_two_backwards_of_one_forward_give_both_gradients(layer, backwards, read_between):
    """cuDNN's backward writes into what its forward left for it."""

    def program(wrap):
        torch.manual_seed(2)
        model = Net(layer, num_layers=2)
        x, y = wrap(*batch())
        x.requires_grad_()
        out, states = model(x)
        a = F.cross_entropy(out.sum(1), y)
        b = out.square().mean() + sum(s.square().mean() for s in states)
        if read_between:
            a.item()
        found = backwards(a, b, x)
        more = {} if isinstance(found, tuple) else {"value:product": plain(found)}
        return {"loss:a": plain(a), "loss:b": plain(b), **more, **model_state(model)}

    compare_programs(program, B, split=not read_between)


def test_states_that_go_on_into_the_next_step():
    def program(wrap):
        torch.manual_seed(2)
        model, state, losses = Net(), None, {}
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            out, state = model(wrap(torch.randn(B, T, C)), state)
            loss = out.square().mean()
            loss.backward()
            optimizer.step()
            state = tuple(s.detach() for s in state)
            losses[f"loss {step}"] = plain(loss)
        return {**losses, **model_state(model)}

    compare_programs(program, B)


def test_a_packed_sequence_that_is_used_in_two_steps():
    def program(wrap):
        torch.manual_seed(2)
        layer, head = torch.nn.GRU(C, H), torch.nn.Linear(H, 3)
        optimizer = torch.optim.SGD([*layer.parameters(), *head.parameters()], 0.1)
        x, y = wrap(*batch())
        kept = pack_padded_sequence(x, LENGTHS, True, False)
        given = wrap(packed_batch())
        losses = {}
        for step in range(3):
            for name, packed in (("kept", kept), ("given", given)):
                out, h = layer(packed)
                loss = F.cross_entropy(head(h[-1]), y) + pad_packed_sequence(out)[0].mean()
                loss.backward()
                losses[f"{name} {step}"] = plain(loss)
            optimizer.step()
        return {**losses, **model_state(layer), **model_state(head)}

    compare_programs(program, B, split=False)


def test_a_step_is_let_go_although_its_packed_results_are_held():
    model, held, tapes = Net(), [], []
    for _ in range(3):
        x, y = lazy(*batch())
        packed = pack_padded_sequence(model.features(x), LENGTHS, True, False)
        out, (h, _) = model.recurrent(packed)
        (F.cross_entropy(model.head(h[-1]), y) + out.data.mean()).backward()
        held.append((packed, out))
        tapes.append(koila._core.tape_of(x))
    del x, y, packed, out, h
    lazy(torch.zeros(2))
    assert [t.n_handles for t in tapes] == [0, 0, 0]


def test_layouts_are_in_no_circle():
    gc.collect()
    gc.disable()
    try:
        layout = weakref.ref(pack_padded_sequence(lazy(batch()[0]), LENGTHS, True, False).data)
        sizes = pack_padded_sequence(lazy(batch()[0]), LENGTHS, True, False).batch_sizes
        rows = weakref.ref(sizes._koila_layout.rows)
        del sizes
        assert layout() is None and rows() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "cell", [torch.nn.LSTMCell, torch.nn.GRUCell, torch.nn.RNNCell], ids=lambda c: c.__name__
)
@pytest.mark.parametrize("buffer", ["list", "rows first", "time first"])
def test_recurrences_by_hand_over_time_are_cut_and_run_once(cell, buffer):
    class ByHand(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = cell(C, H), torch.nn.Linear(H, 3)

        def forward(self, x):
            state, outs = None, []
            rows_first = torch.zeros(len(x), x.shape[1], H)
            time_first = torch.zeros(x.shape[1], len(x), H)
            for t in range(x.shape[1]):
                state = self.cell(x[:, t], state)
                h = state[0] if isinstance(state, tuple) else state
                outs.append(h)
                if buffer == "rows first":
                    rows_first[:, t] = h
                elif buffer == "time first":
                    time_first[t] = h
            if buffer == "list":
                return self.head(torch.stack(outs, 1).sum(1))
            return self.head(rows_first.sum(1) if buffer == "rows first" else time_first.sum(0))

    compare(ByHand, batch, lambda m, x, y: F.cross_entropy(m(x), y), gather_bytes_per_row=0)

    def run(steps):
        x, y = lazy(torch.randn(B, steps, C), torch.randint(0, 3, (B,)))
        with koila.micro_batch(3), koila.strict():
            F.cross_entropy(ByHand()(x), y).backward()
        plan = koila.last_plan()
        assert plan.n_run <= 4 * plan.n_recorded
        return plan.n_recorded

    few, more, most = run(4), run(8), run(12)
    assert most - more == more - few  # linear in the steps


def _starts(n, layers):
    """Of states [layers, B, n], or [B, n] of a cell."""
    size = (B, n) if layers is None else (layers, B, n)
    once = (1, n) if layers is None else (layers, 1, n)
    start = torch.nn.Parameter(torch.randn(once))
    return {
        "none": (start, lambda: None),
        "plain": (start, lambda: torch.linspace(-1, 1, B * n * (layers or 1)).view(size)),
        "learnt": (start, lambda: start.expand(size).contiguous()),
    }


RECURRENT = ["LSTMCell", "GRUCell", "RNNCell", "LSTM", "GRU", "RNN"]


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("start", ["none", "plain", "learnt"])
def test_what_starts_from_any_state_is_cut_and_runs_once(name, start):
    class Recurrent(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.is_cell = name.endswith("Cell")
            kind = getattr(torch.nn, name)
            self.of = kind(C, H) if self.is_cell else kind(C, H, 2, batch_first=True)
            self.learnt, self.state = _starts(H, None if self.is_cell else 2)[start]
            self.head = torch.nn.Linear(H, 3)

        def forward(self, x):
            state = self.state()
            if state is not None and "LSTM" in name:
                state = (state, -state)
            if not self.is_cell:
                return self.head(self.of(x, state)[0].sum(1))
            for t in range(x.shape[1]):
                state = self.of(x[:, t], state)
            return self.head(state[0] if isinstance(state, tuple) else state)

    def loss(m, x, y):
        return F.cross_entropy(m(x), y) + m.learnt.square().sum()

    compare(Recurrent, batch, loss, gather_bytes_per_row=0)
    plan = koila.last_plan()
    assert plan.replay_ratio == 1 and plan.n_reads == 0, "something was computed at once"


@pytest.mark.parametrize("name", RECURRENT)
def test_a_state_goes_on_to_the_next_step_and_stays_cut(name):
    kind = getattr(torch.nn, name)

    def train(wrap):
        torch.manual_seed(3)
        is_cell = name.endswith("Cell")
        m = kind(C, H) if is_cell else kind(C, H, 2, batch_first=True)
        state, out = None, {}
        for i in range(3):
            x = wrap(batch()[0] * (1 + i))
            y, after = (m(x[:, 0], state),) * 2 if is_cell else m(x, state)
            y = y[0] if isinstance(y, tuple) else y
            y.square().mean().backward()
            state = tuple(s.detach() for s in after) if "LSTM" in name else after.detach()
            out[f"value:{i}"] = plain(y)
        return out | model_state(m)

    compare_programs(train, B)
    plan = koila.last_plan()
    assert plan.replay_ratio == 1 and plan.n_reads == 0, "something was computed at once"


def test_a_scripted_cell_is_one_as_before():
    lazy(torch.zeros(2))
    m = torch.jit.script(torch.nn.LSTMCell(C, H))
    x = torch.randn(B, C)
    for a, b in zip(m(x), torch.jit.script(m)(x, None)):
        assert torch.equal(a, b)


@pytest.mark.kernel_asserts
def test_errors_are_eagers():
    x = torch.randn(B, T, C)
    calls = [
        lambda v: pack_padded_sequence(v, LENGTHS, True),
        lambda v: pack_padded_sequence(v, [0] * B, True, False),
        lambda v: pack_padded_sequence(v, LENGTHS[:4], True),
        lambda v: pack_padded_sequence(v, [*LENGTHS, 1], True, False),
        lambda v: pack_padded_sequence(v, [], True, False),
        lambda v: pad_packed_sequence(
            pack_padded_sequence(v, LENGTHS, True, False), total_length=T - 1
        ),
        lambda v: torch.nn.LSTM(C + 1, H)(pack_padded_sequence(v, LENGTHS, True, False)),
        lambda v: torch.nn.GRU(C, H)(
            pack_padded_sequence(v, LENGTHS, True, False), torch.zeros(1, B, H + 1)
        ),
    ]
    for call in calls:
        with pytest.raises(Exception) as eager:
            call(x)
        with pytest.raises(type(eager.value)) as ours:
            call(lazy(x))
        assert str(ours.value) == str(eager.value)


@pytest.mark.kernel_asserts
def test_lengths_that_do_not_fit_are_packed_as_eager_packs_them():
    x = torch.randn(B, T, C)
    for lengths in (LENGTHS[:4], [T + 1] * B):
        expected = pack_padded_sequence(x, lengths, True, False)
        got = pack_padded_sequence(lazy(x), lengths, True, False)
        assert torch.equal(expected.data, plain(got.data))
        assert torch.equal(expected.batch_sizes, got.batch_sizes)


def test_plain_programs_run_no_code_of_packed_ones():
    """torch.compile would try to compile a frame of koila's."""
    lazy(torch.zeros(2))
    files = set()

    def look(frame, event, argument):
        files.add(frame.f_code.co_filename)

    layer, x = torch.nn.LSTM(C, H), torch.randn(B, T, C)
    sys.setprofile(look)
    try:
        pad_packed_sequence(layer(pack_padded_sequence(x, LENGTHS, True, False))[0])
    finally:
        sys.setprofile(None)
    assert files and not [f for f in files if f.endswith(("koila/_packed.py", "_recurrent.py"))]


def test_plain_programs_keep_torchs_functions():
    lazy(torch.zeros(2))
    x = torch.randn(B, T, C)
    packed = pack_padded_sequence(x, LENGTHS, batch_first=True, enforce_sorted=False)
    assert packed.data.grad_fn is None and type(packed.data) is torch.Tensor
    scripted = torch.jit.script(_scripted)
    lengths = torch.tensor(LENGTHS, device="cpu")
    assert torch.equal(scripted(x, lengths), _scripted(x, lengths))


def _scripted(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(packed, batch_first=True)[0]


def test_a_default_device_does_not_move_what_says_where_rows_lie(no_default_device):
    expected = model_state(stepped(lambda *v: v))
    torch.set_default_device("meta")
    try:
        with koila.micro_batch(5):
            got = stepped(lazy)
    finally:
        torch.set_default_device(None)
    for name, value in model_state(got).items():
        assert torch.allclose(value, expected[name], atol=1e-12), name


def stepped(wrap):
    """A model on the CPU after a backward, whatever the default device is."""
    with torch.device("cpu"):
        torch.manual_seed(2)
        model, (x, y) = Net(bidirectional=True, pad={"padding_value": 1.5}), batch()
    loss_of(model, *wrap(x, y)).backward()
    return model

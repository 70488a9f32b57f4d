"""A backward that was recorded before is not recorded again: its nodes are copied. Claims: the copy
is what recording gives; whatever the backward graph does not show makes it recorded."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from memory_helpers import installed, only
from program_generator import Refused, compare, run
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from zoo import MLP, ConvNet, Encoder, Recurrent, ResNet, UNet, bert, ce, gpt2, images, llama
from zoo import padded, rows_of, tokens, vit

import koila
from koila import _capture, _core, lazy


@pytest.fixture(autouse=True)
def nothing_known():
    """Nothing is known, and torch's nodes were looked at. A step that another test's lazy tensors
    keep open is over after a backward: the first step of a test begins with nothing before it."""
    (lazy(torch.zeros(2)) * nn.Parameter(torch.ones(2))).sum().backward()
    _core.backwards_doubted(False)
    yield
    _core.backwards_doubted(False)


def known_in(f):
    """(what f() gives, how many backwards in it were known)"""
    before = _core.n_backwards_copied()
    result = f()
    return result, _core.n_backwards_copied() - before


def gradients(model):
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    return found


def are_equal(a, b):
    return all((x is None and y is None) or torch.equal(x, y) for x, y in zip(a, b, strict=True))


def text_loss(model, ids):
    return model(input_ids=ids, labels=ids).loss


MODELS = {
    "mlp": (lambda: MLP().double(), rows_of(5), ce),
    "convolutions": (lambda: ConvNet().double(), images(), ce),
    "batch norm": (lambda: ResNet().double(), images(), ce),
    "unet": (lambda: UNet().double(), images(), lambda m, x, y: F.mse_loss(m(x), x)),
    "encoder": (lambda: Encoder().double(), rows_of(5, 8), ce),
    "gpt2": (lambda: gpt2().double(), tokens(), text_loss),
    "llama": (lambda: llama().double(), tokens(), text_loss),
    "bert": (
        lambda: bert().double(),
        padded(),
        lambda m, ids, mask, y: m(input_ids=ids, attention_mask=mask, labels=y).loss,
    ),
    "vit": (lambda: vit().double(), images(), lambda m, x, y: m(pixel_values=x, labels=y).loss),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rows", [None, 2])
def test_a_step_that_repeats_copies_what_recording_gives(name, rows):
    make, batches, loss_of = MODELS[name]
    torch.manual_seed(0)
    model = make()
    batch = batches()

    def step():
        with koila.micro_batch(rows) if rows else nullcontext():
            loss = loss_of(model, *lazy(batch))
            loss.backward()
        return [loss.detach().torch(), *gradients(model)]

    recorded = [step(), step(), step()][0]
    for _ in range(3):
        again, n_known = known_in(step)
        assert n_known == 1
        assert are_equal(recorded, again)
    _core.backwards_doubted(True)  # and the graphs are the same, node by node
    assert known_in(lambda: [step() for _ in range(4)])[1] == 2


def test_a_recurrent_net_may_be_recorded_again_and_is_exact():
    torch.manual_seed(0)
    model = Recurrent().double()
    x, y = rows_of(4, 5)()
    found = []
    for wrap in (lambda v: v, *[lazy] * 5):
        ce(model, *wrap((x, y))).backward()
        found.append(gradients(model))
    for gradient in found[2:]:
        assert are_equal(found[1], gradient)
    for a, b in zip(found[0], found[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("seed", range(60))
def test_random_programs_that_repeat_are_exact(seed):
    """Views, writes, factories, random operators: the last run of a program equals eager's, and
    where its backward is known, recording gives the same nodes."""
    try:
        outcomes = [run(seed, seed % 2, lazily=how) for how in (None, *[lazy] * 4)]
        assert not compare(outcomes[0], outcomes[-1], exact=False)
        _core.backwards_doubted(True)
        for _ in range(4):
            run(seed, seed % 2, lazily=lazy)
    except Refused:
        pytest.skip("refused")


class Twice(torch.autograd.Function):
    factor = 2.0

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient * Twice.factor


class Net(nn.Module):
    """Two layers and what a test puts between them: between(i, hidden) in step i."""

    def __init__(self, between):
        super().__init__()
        self.one = nn.Linear(5, 6)
        self.two = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.randn(6))
        self.between = between

    def forward(self, i, x):
        return self.two(self.between(self, i, self.one(x).tanh()))


def hook_tensor(net, i, h):
    h.register_hook(lambda g: g * (1 + i))
    return h


def hook_node(net, i, h):
    h.grad_fn.register_hook(lambda ins, outs: tuple(g * (1 + i) for g in ins))
    return h


def hook_node_before(net, i, h):
    h.grad_fn.register_prehook(lambda outs: tuple(g * (1 + i) for g in outs))
    return h


def custom(net, i, h):
    Twice.factor = 1.0 + i
    return Twice.apply(h)


def packed(net, i, h):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * (1 + i)):
        return h * h


def packed_one(net, i, h):
    out = h * h
    out.grad_fn._raw_saved_self.register_hooks(lambda t: t, lambda t: t * (1 + i))
    return out


def recomputed(net, i, h):
    return checkpoint(lambda v: (v * (1 + i)).tanh(), h, use_reentrant=False)


def plain_number(net, i, h):
    return h * (net.scale * (1 + i))


def plain_power(net, i, h):
    return h * net.scale ** (1 + i)


def plain_function(net, i, h):
    Twice.factor = 1.0 + i
    return h * Twice.apply(net.scale)


def lazy_number(net, i, h):
    return h * (1 + i)


def frozen(net, i, h):
    net.scale.requires_grad_(i < 3)
    return h * net.scale


def cut_off(net, i, h):
    return h * net.scale + (h.detach() if i == 3 else h)


def other_weight(net, i, h):
    return h @ (
        net.two.weight.t() @ net.two.weight if i < 3 else net.one.weight @ net.one.weight.t()
    )


# What differs in the last of five steps, though its forward pass calls (nearly) the same operators.
# True: the steps before it are known.
DIFFERENCES = {
    hook_tensor: False,
    hook_node: False,
    hook_node_before: False,
    custom: False,
    packed: False,
    packed_one: False,
    recomputed: False,
    plain_number: True,
    plain_power: False,
    plain_function: False,
    lazy_number: True,
    frozen: True,
    cut_off: True,
    other_weight: False,
}


def five_steps(between, wrap):
    torch.manual_seed(0)
    net = Net(between).double()
    x = torch.randn(8, 5, dtype=torch.float64)
    found = []
    for i in (0, 0, 0, 0, 3):
        net(i, wrap(x)).square().mean().backward()
        found += gradients(net)
    return found


@pytest.mark.parametrize("between", DIFFERENCES, ids=lambda f: f.__name__)
def test_what_differs_in_a_step_is_seen(between):
    expected = five_steps(between, lambda x: x)
    got, n_known = known_in(lambda: five_steps(between, lazy))
    assert (n_known > 0) == DIFFERENCES[between]
    for a, b in zip(expected, got, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_the_checker_sees_a_number_that_nobody_looked_at(monkeypatch):
    """The planted fault: what plain nodes have saved is not compared."""
    plain_part = _capture.plain_part
    monkeypatch.setattr(_capture, "plain_part", lambda roots: ("", plain_part(roots)[1]))
    expected = five_steps(plain_number, lambda x: x)
    got = five_steps(plain_number, lazy)
    assert not all(map(torch.allclose, expected, got))
    _core.backwards_doubted(True)
    with pytest.raises(AssertionError, match="came out otherwise"):
        five_steps(plain_number, lazy)


def test_a_plain_tensor_with_a_graph_behind_it_is_copied_too():
    """Positions that are embedded anew in each step are no part of the tape."""

    def between(net, i, h):
        return h * F.embedding(torch.arange(6), net.scale[:, None]).squeeze(1)

    expected = five_steps(between, lambda x: x)
    five_steps(between, lazy)  # torch numbers nodes while calls are seen for the first time
    got, n_known = known_in(lambda: five_steps(between, lazy))
    assert n_known == 5
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def net_and_batch():
    torch.manual_seed(0)
    return MLP().double(), *rows_of(5)()


def test_a_state_that_autograd_follows_into_the_next_step_is_recorded():
    """Its graph leads to calls of another tape."""

    def train(wrap):
        torch.manual_seed(0)
        cell = nn.RNNCell(5, 6).double()
        x = torch.randn(8, 5, dtype=torch.float64)
        state = torch.zeros(8, 6, dtype=torch.float64)
        found = []
        for i in range(5):
            state = cell(wrap(x), state * (1.0 + i))
            state.square().mean().backward(retain_graph=True)
            found += gradients(cell)
        return found

    for a, b in zip(train(lambda v: v), train(lazy), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_two_backwards_of_one_graph_are_both_known():
    model, x, y = net_and_batch()

    def step():
        loss = ce(model, *lazy((x, y)))
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(model)

    first = [step(), step(), step()][0]
    again, n_known = known_in(step)
    assert n_known == 2
    assert are_equal(first, again)


def test_a_second_backward_is_refused_as_by_torch():
    model, x, y = net_and_batch()
    for _ in range(5):
        loss = ce(model, *lazy((x, y)))
        loss.backward()
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()
    assert known_in(lambda: ce(model, *lazy((x, y))).backward())[1] == 1


def test_a_weight_written_before_the_backward_is_refused_as_by_torch():
    model, x, y = net_and_batch()
    for _ in range(4):
        ce(model, *lazy((x, y))).backward()
    loss = ce(model, *lazy((x, y)))
    with torch.no_grad():
        model.layers[3].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.skipif(not installed(), reason="torch's CPU memory cannot be counted here")
@pytest.mark.about_the_cpu("what is too large for a budget is computed again")
def test_weights_written_between_two_backwards_of_a_step_are_told_apart():
    """As by an optimizer, between the critic's backward and the generator's. The first backward
    left transposes of weights, of which torch tells no graph any more once these were written."""
    images = torch.randn(8, 512, 4, dtype=torch.float64)

    def step(wrap, room):
        torch.manual_seed(1)
        maker, critic = (
            nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, n)).double() for n in (4, 1)
        )
        with only(room):  # the images that were made are not kept
            made = maker(wrap(images))
            critic(made.detach()).mean().backward()
            with torch.no_grad():
                for p in critic.parameters():
                    p.mul_(0.5)
            scores = critic(made)
        scores.mean().backward()
        return [*gradients(maker), *gradients(critic)]

    expected = step(lambda t: t, 1 << 30)
    for _ in range(3):
        for e, got in zip(expected, step(lazy, 130 << 10), strict=True):
            torch.testing.assert_close(got, e, rtol=1e-12, atol=1e-15)


def test_nothing_that_was_saved_outlives_a_known_backward():
    """While the loss is kept, as a list of losses keeps it."""
    model, x, y = net_and_batch()
    losses, hidden = [], []
    model.layers[0].register_forward_hook(lambda m, a, out: hidden.append(weakref.ref(out)))
    n_before = _core.n_backwards_copied()
    for _ in range(6):
        loss = ce(model, *lazy((x, y)))
        loss.backward()
        losses.append(loss)
        del loss
        gc.collect()
    assert _core.n_backwards_copied() - n_before >= 3
    assert [h() for h in hidden] == [None] * 6


def test_a_gradient_that_is_asked_for_by_a_hook_of_a_leaf_is_seen_once():
    model, x, y = net_and_batch()
    seen = []
    model.layers[0].weight.register_hook(lambda g: seen.append(g.clone()))
    for _ in range(5):
        ce(model, *lazy((x, y))).backward()
    assert len(seen) == 5
    assert all(torch.equal(seen[0], g) for g in seen)


@pytest.mark.parametrize(
    "around",
    [
        torch.autograd.detect_anomaly,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autograd.graph.save_on_cpu(),
    ],
    ids=["anomaly", "autocast", "save_on_cpu"],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_mode_around_the_backward_makes_it_recorded(around):
    model, x, y = net_and_batch()
    for _ in range(4):
        ce(model, *lazy((x, y))).backward()

    def step():
        with around():
            ce(model, *lazy((x, y))).backward()

    assert known_in(step)[1] == 0


def test_gradients_of_gradients_are_recorded():
    model, x, y = net_and_batch()
    for _ in range(4):
        ce(model, *lazy((x, y))).backward()

    def step():
        ce(model, *lazy((x, y))).backward(create_graph=True)

    torch.set_warn_always(True)  # another test's backward may have had the only warning
    try:
        with pytest.warns(UserWarning, match="create_graph"):
            assert known_in(step)[1] == 0
    finally:
        torch.set_warn_always(False)


def test_other_sizes_are_known_for_themselves():
    model, *_ = net_and_batch()

    def step(b):
        x, y = rows_of(5, b=b)()
        ce(model, *lazy((x, y))).backward()

    known_in(lambda: [step(b) for b in (6, 4) * 3])
    assert known_in(lambda: [step(b) for b in (6, 4, 5)])[1] == 2


@pytest.mark.parametrize("kind", ["nothing", "frozen", "hook", "later", "unused", "retained"])
def test_a_known_backward_taken_at_once_is_that_of_each_leaf_looked_at(kind, monkeypatch):
    """What is known of a backward to all leaves is asked in one call, where nobody watches them."""

    def train(looks):
        torch.manual_seed(0)
        _core.backwards_doubted(False)  # forgets all
        model, spare = MLP().double(), nn.Parameter(torch.ones(3, dtype=torch.double))
        x, y = rows_of(5)()
        seen, found = [], []
        if kind == "frozen":
            next(model.parameters()).requires_grad_(False)
        if kind == "hook":
            next(model.parameters()).register_hook(lambda g: seen.append(g.sum()))
        if kind == "later":
            next(model.parameters()).register_post_accumulate_grad_hook(
                lambda p: seen.append(p.grad.sum())
            )
        with monkeypatch.context() as m:
            if looks:
                m.setattr(_core, "backward_at_once", lambda *_: None)
            for _ in range(4):
                a, b = lazy(x.double(), y)
                loss = ce(model, a, b) + (spare.detach().sum() if kind == "unused" else 0)
                loss.backward(retain_graph=kind == "retained")
                found += [None if g is None else g.clone() for g in gradients(model)]
                if kind == "retained":
                    loss.backward()
                    found += gradients(model)
        return found + seen

    (looked, n), (at_once, m) = known_in(lambda: train(True)), known_in(lambda: train(False))
    assert n == m > 0 and len(looked) == len(at_once) and are_equal(looked, at_once)


def test_gradients_that_are_one_tensor_are_two_when_they_are_known():
    def train():
        _core.backwards_doubted(False)  # forgets all
        a, b = (nn.Parameter(torch.ones(4, dtype=torch.double)) for _ in range(2))
        for _ in range(4):
            a.grad = b.grad = None
            x = lazy(torch.ones(6, 4, dtype=torch.double))
            total = x + a + b
            total.sin().sum().backward()
        a.grad.zero_()
        return b.grad, total.torch()

    (b, total), n = known_in(train)
    assert n == 2 and torch.allclose(b, 6 * torch.full((4,), 3.0, dtype=torch.double).cos())
    assert torch.equal(total, torch.full((6, 4), 3.0, dtype=torch.double))


def test_a_known_backward_that_fails_leaves_no_gradients(monkeypatch):
    _core.backwards_doubted(False)  # forgets all
    w = nn.Parameter(torch.ones(4, dtype=torch.double))

    def step():
        w.grad = None
        (lazy(torch.ones(6, 4, dtype=torch.double)) * w).sin().sum().backward()
        return w.grad

    expected = [step() for _ in range(3)][0]
    with monkeypatch.context() as m:

        def raises(*_):
            raise ValueError("planted")

        m.setattr(_core, "accumulate", raises)
        with pytest.raises(ValueError, match="planted"):
            step()
    assert w.grad is None
    assert torch.equal(step(), expected)


class Nests(nn.Module):
    """Gives a nesting of results."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()

    def forward(self, x):
        return self.inner(x), None


def as_it_is():
    torch.manual_seed(0)
    return koila.opaque(Nests()), torch.randn(6, 8, dtype=torch.double)


def test_the_backward_of_a_module_that_runs_as_it_is_is_copied_too():
    model, x = as_it_is()

    def step():
        with koila.micro_batch(2):
            model(lazy(x))[0].pow(2).mean().backward()
        return gradients(model)

    model(x)[0].pow(2).mean().backward()
    expected = gradients(model)
    first = [step() for _ in range(4)][-1]
    again, n_known = known_in(step)
    assert n_known == 1 and are_equal(first, again)
    for a, b in zip(expected, again, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    _core.backwards_doubted(True)  # and the graphs are the same, node by node
    assert known_in(lambda: [step() for _ in range(4)])[1] == 2


def test_a_graph_of_a_module_that_is_kept_is_recorded_and_gone_through_again():
    model, x = as_it_is()

    def step(wrap):
        loss = model(wrap(x))[0].pow(2).mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(model)

    expected = step(lambda v: v)
    for _ in range(5):
        found, n_known = known_in(lambda: step(lazy))
        assert n_known == 0
        for a, b in zip(expected, found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_a_second_backward_of_a_module_that_runs_as_it_is_is_refused_as_by_torch():
    model, x = as_it_is()
    for _ in range(5):
        loss = model(lazy(x))[0].pow(2).mean()
        n_known = known_in(loss.backward)[1]
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()
    assert n_known == 1


def test_a_parameter_of_a_module_written_before_the_backward_is_refused_as_by_torch():
    model, x = as_it_is()
    for _ in range(5):
        model(lazy(x))[0].pow(2).mean().backward()
    loss = model(lazy(x))[0].pow(2).mean()
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_that_lie_otherwise_than_in_the_step_before_are_recorded():
    """What is known of a module changes between steps, not what is recorded of its call."""
    model, x = as_it_is()

    def step():
        model(lazy(x))[0].pow(2).mean().backward()
        return gradients(model)

    for _ in range(4):
        step()
    assert known_in(step)[1] == 1
    (call,) = model._run._known.values()
    call.laid._strides = {1: (1, 16)}
    call.laid.version += 1
    first, n_known = known_in(step)
    assert n_known == 0
    again, n_known = known_in(step)
    assert n_known == 1 and are_equal(first, again)


def test_a_hook_behind_a_module_that_runs_as_it_is_is_called():
    model, x = as_it_is()
    seen = []
    for i in range(8):
        out = model(lazy(x))[0]
        if i > 5:
            out.register_hook(lambda g: seen.append(g.shape))
        n_known = known_in(out.pow(2).mean().backward)[1]
        assert i < 4 or n_known == (i < 6)
        model.zero_grad()
    assert len(seen) == 2

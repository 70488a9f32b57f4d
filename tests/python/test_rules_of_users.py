"""What users say of operators and modules that koila does not know: `koila.opaque` runs them as
they are, `koila.register_rule` says how they slice."""

import copy

import pytest
import torch
from conftest import DEVICE
from helpers import SLICES, compare, compare_programs, plain
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import koila
from koila import lazy

B = 6


def batch():
    return torch.randn(B, 5, dtype=torch.float64), torch.randint(0, 4, (B,))


def module():
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4)).double()


def opaque_step(make, call, loss=lambda out, y: F.cross_entropy(out, y)):
    """A model whose whole forward goes through `call(model)`: plain where the input is plain,
    opaque where it is lazy."""

    def f(m, x, y):
        return loss((koila.opaque(call(m)) if isinstance(x, koila.LazyTensor) else call(m))(x), y)

    compare(make, batch, f, slices=SLICES, tol=1e-12)


# ---- opaque


def test_a_module_and_its_parameters_gradients():
    opaque_step(module, lambda m: m)


def test_a_module_in_the_middle():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.middle, self.last = (
                nn.Linear(5, 5).double(),
                module(),
                nn.Linear(4, 4).double(),
            )

        def forward(self, x):
            middle = koila.opaque(self.middle) if isinstance(x, koila.LazyTensor) else self.middle
            return self.last(middle(self.first(x)).relu())

    compare(Model, batch, lambda m, x, y: F.cross_entropy(m(x), y))


def test_a_module_in_train_mode_stays_in_train_mode_and_keeps_its_training_behaviour():
    class Loud(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(5, 4).double()

        def forward(self, x):
            return self.inner(x) * (3.0 if self.training else 1.0)

    seen = []

    def loss(m, x, y):
        out = F.cross_entropy((koila.opaque(m) if isinstance(x, koila.LazyTensor) else m)(x), y)
        seen.append(m.training)
        return out

    compare(Loud, batch, loss)
    assert all(seen)


def test_a_frozen_parameter_gets_no_gradient():
    def make():
        m = module()
        m[0].weight.requires_grad_(False)
        return m

    opaque_step(make, lambda m: m)


def test_a_function_without_parameters():
    def twist(x):
        return x.sort(1).values * x.exp()

    def program(wrap):
        torch.manual_seed(3)
        w = torch.randn(5, dtype=torch.float64, requires_grad=True)
        x, _ = batch()
        x = wrap(x)
        h = x * w
        out = (koila.opaque(twist) if isinstance(h, koila.LazyTensor) else twist)(h).square().mean()
        out.backward()
        return {"value:out": plain(out), "grad:w": plain(w.grad)}

    compare_programs(program, B)


def test_nested_outputs_keep_their_structure():
    def pieces(x):
        return {"sums": (x.sum(1), [x * 2]), "none": None, "same": x}

    def program(wrap):
        torch.manual_seed(3)
        w = torch.randn(5, dtype=torch.float64, requires_grad=True)
        h = wrap(batch()[0]) * w
        out = (koila.opaque(pieces) if isinstance(h, koila.LazyTensor) else pieces)(h)
        assert (
            list(out) == ["sums", "none", "same"]
            and out["none"] is None
            and isinstance(out["sums"][1], list)
        )
        loss = out["sums"][0].square().mean() + out["sums"][1][0].mean() + out["same"].tanh().sum()
        loss.backward()
        return {"value:loss": plain(loss), "grad:w": plain(w.grad)}

    compare_programs(program, B)


def test_keyword_arguments_and_plain_values_pass_through():
    def scale(x, *, by, how="mul"):
        return x * by if how == "mul" else x / by

    def program(wrap):
        torch.manual_seed(3)
        w = torch.randn(5, dtype=torch.float64, requires_grad=True)
        h = wrap(batch()[0]) * w
        f = koila.opaque(scale) if isinstance(h, koila.LazyTensor) else scale
        loss = (f(h, by=3.0) + f(h, by=2.0, how="div")).square().mean()
        loss.backward()
        return {"value:loss": plain(loss), "grad:w": plain(w.grad)}

    compare_programs(program, B)


class Compiled:
    """What torch.compile returns behaves so: a callable that wants real tensors of its own, and
    looks at their values and addresses."""

    def __init__(self, fn):
        self._fn, self.shapes = fn, []

    def __call__(self, x):
        assert type(x) is torch.Tensor and x.data_ptr() != 0 and x.isfinite().all()
        self.shapes.append(tuple(x.shape))
        return self._fn(x)


def test_a_compiled_looking_callable_sees_real_slices():
    def program(wrap):
        torch.manual_seed(3)
        w = torch.randn(5, dtype=torch.float64, requires_grad=True)
        h = wrap(batch()[0]) * w
        f = Compiled(lambda t: t.sin() * t)
        loss = (koila.opaque(f) if isinstance(h, koila.LazyTensor) else f)(h).sum(1).square().mean()
        loss.backward()
        if isinstance(h, koila.LazyTensor):
            n = koila.last_plan().micro_batch
            assert (n, 5) in f.shapes and max(s[0] for s in f.shapes) == max(n, 2)
        return {"value:loss": plain(loss), "grad:w": plain(w.grad)}

    compare_programs(program, B)


def test_under_no_grad():
    m = module()
    x, _ = batch()
    with torch.no_grad():
        expected = m(x)
        for n in (B, 4, 1):
            with koila.micro_batch(n):
                assert torch.allclose(
                    koila.run(koila.opaque(m)(lazy(x))), expected, rtol=1e-12, atol=0
                )


def test_plain_values_call_it_as_it_is():
    m = module()
    x, _ = batch()
    assert torch.equal(koila.opaque(m)(x), m(x))


def test_twice_in_a_step_adds_up():
    compare(
        module,
        batch,
        lambda m, x, y: F.cross_entropy(
            (f := koila.opaque(m) if isinstance(x, koila.LazyTensor) else m)(x) + f(x * 2), y
        ),
    )


def test_buffers_are_not_touched_by_finding_shapes():
    m = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).double().eval()
    before = copy.deepcopy(m.state_dict())
    x, y = batch()
    F.cross_entropy(koila.opaque(m)(lazy(x)), y).backward()
    assert all(torch.equal(v, m.state_dict()[k]) for k, v in before.items())


def test_a_result_that_is_no_tensor_is_refused():
    with pytest.raises(koila.UnsupportedError, match="tensors"):
        koila.opaque(lambda x: (x, 3))(lazy(batch()[0]))


def test_a_frozen_part_of_a_module_that_trains_stays_frozen():
    m = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).double().train()
    m[1].eval()
    x, y = batch()
    F.cross_entropy(koila.opaque(m)(lazy(x)), y).backward()
    assert [k.training for k in m.modules()] == [True, True, False]


def hooked(m, calls):
    """Sees a gradient once, and changes it."""
    m[0].weight.register_hook(lambda g: (calls.append(g.shape), g * g.abs().sum())[1])


def frozen_later(m, calls):
    m.after = lambda: m[0].weight.requires_grad_(False)


def thawed_later(m, calls):
    m[0].weight.requires_grad_(False)
    m.after = lambda: m[0].weight.requires_grad_(True)


@pytest.mark.parametrize("change", [hooked, frozen_later, thawed_later])
@pytest.mark.parametrize("wrap", [koila.opaque, lambda m: m])
@pytest.mark.parametrize("rows", [None, 5])
def test_hooks_and_flags_of_parameters_mean_what_they_do_in_eager(change, wrap, rows):
    """With a hook, or flags changed since the step was recorded, an opaque module cannot run with
    its own parameters: the hook would see each slice's gradient."""
    x, y = batch()
    found = []
    for is_lazy in (False, True):
        torch.manual_seed(0)
        m, calls = module(), []
        change(m, calls)
        with koila.micro_batch(rows):
            f = wrap(m) if is_lazy else m
            loss = F.cross_entropy(f(lazy(x) if is_lazy else x), y)
            getattr(m, "after", lambda: None)()
            loss.backward()
        found.append(([p.grad for p in m.parameters()], calls))
    (eager, eager_calls), (got, calls) = found
    assert calls == eager_calls
    for e, g in zip(eager, got, strict=True):
        if e is None or g is None:
            assert e is g
        else:
            torch.testing.assert_close(g, e, rtol=1e-12, atol=1e-14)


def test_an_opaque_module_with_the_parameters_of_a_functional_call():
    def f(m, x, y):
        f = koila.opaque(m) if isinstance(x, koila.LazyTensor) else m
        names = [n for n, _ in f.named_parameters()]
        others = [p * 1.5 for p in m.parameters()]
        out = torch.func.functional_call(f, dict(zip(names, others, strict=True)), (x,))
        return F.cross_entropy(out, y)

    compare(module, batch, f, slices=SLICES, tol=1e-12)


def test_a_structure_that_depends_on_the_arguments():
    f = koila.opaque(lambda x, two=False: (x, x + 1) if two else x * 2)
    x = torch.randn(B, 5)
    with torch.no_grad():
        one, two = f(lazy(x)), f(lazy(x), two=True)
    assert (
        torch.equal(koila.run(one), x * 2)
        and isinstance(two, tuple)
        and torch.equal(koila.run(two[1]), x + 1)
    )


def test_calls_are_forgotten_with_their_step():
    import gc

    from koila import _opaque

    gc.collect()
    before = len(_opaque._calls)
    m = module()
    for _ in range(5):
        x, y = batch()
        F.cross_entropy(koila.opaque(m)(lazy(x)), y).backward()
    del x, y
    gc.collect()
    assert len(_opaque._calls) <= before + 1


def test_the_same_call_in_every_step_is_the_same_operator():
    m = module()
    f = koila.opaque(m)
    x, y = batch()
    calls = []
    m.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(3):
        with koila.micro_batch(4):
            F.cross_entropy(f(lazy(x)), y).backward()
        calls.append(0)
    # two slices, each run once; its shapes are looked for once
    assert "".join(map(str, calls)) == "1110" + "110" * 2 and len(f._run._known) == 1
    run = koila._opaque.Runner(lambda t, k: t * k, None)
    for k in range(100):  # an argument that is another one each time is not kept for ever
        assert torch.equal(koila.run(run(lazy(x), k)), x * k)
    assert len(run._known) <= 64


def test_arguments_that_are_equal_but_not_alike_are_told_apart():
    f = koila.opaque(
        lambda t, k: t * 1 if isinstance(k, bool) else t * 2 if isinstance(k, int) else t * 3
    )
    x = batch()[0]
    for k, by in ((1, 2), (True, 1), (1.0, 3), (1, 2), ([1], 3)):
        with koila.micro_batch(4):
            assert torch.equal(koila.run(f(lazy(x), k)), x * by)


def test_an_opaque_module_is_a_part_of_a_model():
    """Parameters, modes, buffers, copies and checkpoints are those of the module inside."""

    def make():
        return nn.Sequential(
            nn.Linear(5, 7),
            koila.opaque(nn.Sequential(nn.Linear(7, 6), nn.Tanh())),
            nn.Linear(6, 4),
        ).double()

    compare(
        make,
        batch,
        lambda m, x, y: F.cross_entropy(m(x), y),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
    m = make()
    assert len(list(m.parameters())) == 6 and not m.eval()[1].module[1].training
    twin = copy.deepcopy(m)
    twin.load_state_dict(m.state_dict())
    x, _ = batch()
    with torch.no_grad(), koila.micro_batch(4):
        assert torch.allclose(koila.run(twin(lazy(x))), m(x), rtol=1e-12)
        twin[1].module[0].weight.zero_()
        assert not torch.allclose(koila.run(twin(lazy(x))), m(x)) and m[1].module[0].weight.any()


def test_an_opaque_module_inside_of_a_checkpoint():
    """In its first call, too, which looks at what two rows give."""
    make = lambda: nn.Sequential(  # noqa: E731
        nn.Linear(5, 7), koila.opaque(nn.Sequential(nn.Linear(7, 6), nn.Tanh()).double())
    ).double()

    def loss(m, x, y):
        return checkpoint(m, x, use_reentrant=False).square().mean()

    compare(make, batch, loss)


# ---- register_rule


@pytest.fixture(scope="module")
def ops():
    """mytest::cube knows its backward, which is a custom operator as well; mytest::weigh contracts
    with a weight; mytest::plain has no rule."""
    lib = torch.library.Library("mytest", "FRAGMENT")
    for name in ("cube", "unruled"):
        lib.define(f"{name}(Tensor x) -> Tensor")
        lib.define(f"{name}_backward(Tensor g, Tensor x) -> Tensor")
        lib.impl(name, lambda x: x.pow(3), DEVICE.upper())
        lib.impl(name + "_backward", lambda g, x: 3 * g * x.square(), DEVICE.upper())
        torch.library.register_fake(f"mytest::{name}", torch.empty_like, lib=lib)
        torch.library.register_fake(
            f"mytest::{name}_backward", lambda g, x: torch.empty_like(g), lib=lib
        )

        def backward(ctx, g, name=name):
            return getattr(torch.ops.mytest, name + "_backward")(g, *ctx.saved_tensors)

        torch.library.register_autograd(
            f"mytest::{name}",
            backward,
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
            lib=lib,
        )
    lib.define("weigh(Tensor x, Tensor w) -> Tensor")
    lib.impl("weigh", lambda x, w: x @ w, DEVICE.upper())
    torch.library.register_fake(
        "mytest::weigh", lambda x, w: x.new_empty(x.shape[0], w.shape[1]), lib=lib
    )
    torch.library.register_autograd(
        "mytest::weigh",
        lambda ctx, g: (
            torch.ops.mytest.weigh(g, ctx.saved_tensors[1].t()),
            torch.ops.mytest.weigh(ctx.saved_tensors[0].t(), g),
        ),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
        lib=lib,
    )
    yield torch.ops.mytest
    lib._destroy()


def custom_program(op):
    def program(wrap):
        torch.manual_seed(3)
        w = torch.randn(5, dtype=torch.float64, requires_grad=True)
        loss = op(wrap(batch()[0]) * w).square().mean()
        loss.backward()
        return {"value:loss": plain(loss), "grad:w": plain(w.grad)}

    return program


def test_without_a_rule_it_is_gathered_and_exact_and_strict_says_so(ops):
    compare_programs(custom_program(ops.unruled), B, split=False)
    with koila.micro_batch(2), koila.strict(), pytest.raises(koila.GatherError, match="unruled"):
        custom_program(ops.unruled)(lazy)


def test_with_rules_for_it_and_its_backward_nothing_is_gathered(ops):
    koila.register_rule(ops.cube, "S0->S0")
    koila.register_rule("mytest::cube_backward", "S0,S0->S0")
    compare_programs(custom_program(ops.cube), B, gather_bytes_per_row=0)
    with koila.micro_batch(2), koila.strict():
        custom_program(ops.cube)(lazy)


def test_a_custom_operator_that_says_no_shapes_runs_at_once_on_values():
    @torch.library.custom_op("mytest::shapeless", mutates_args=())
    def shapeless(x: torch.Tensor) -> torch.Tensor:
        if x.size(1) == 3:
            raise ValueError("three columns")
        return x * 3

    torch.library.register_autograd("mytest::shapeless", lambda ctx, g: g * 3)

    def program(wrap):
        x = wrap(batch()[0])
        w = torch.full((x.size(1), 4), 0.5, dtype=x.dtype, requires_grad=True)
        shapeless(x @ w).square().sum().backward()
        with pytest.raises(ValueError, match="three columns"):
            shapeless(x[:, :1].expand(-1, 3).clone())
        return {"w": w.grad}

    compare_programs(program, B)


def test_a_rule_that_comes_after_a_step_counts_from_the_next():
    @torch.library.custom_op("mytest::late", mutates_args=())
    def late(x: torch.Tensor) -> torch.Tensor:
        return x.pow(3)

    late.register_fake(torch.empty_like)
    x = batch()[0]
    seen = []
    for rule in (None, "S0->S0"):
        if rule:
            koila.register_rule(late, rule)
        with torch.no_grad(), koila.micro_batch(2):
            assert torch.allclose(koila.run(late(lazy(x) * 2).sum()), (x * 2).pow(3).sum())
        seen.append(len(koila.last_plan().gathers))
    assert seen == [1, 0]


def test_several_rules_and_a_partial_sum(ops):
    koila.register_rule(ops.weigh.default, "S0,R->S0", "R,S1->S1", "S1,S0->P")

    def program(wrap):
        torch.manual_seed(3)
        w = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
        x, y = batch()
        x, y = wrap(x, y)
        loss = F.cross_entropy(ops.weigh(x, w), y)
        loss.backward()
        return {"value:loss": plain(loss), "grad:w": plain(w.grad)}

    compare_programs(program, B, gather_bytes_per_row=0)
    with koila.micro_batch(2), koila.strict():
        program(lazy)


def test_a_wrong_claim_gives_wrong_numbers_which_the_comparison_sees(ops):
    """The planted fault: the oracle above would notice a rule that lies."""
    lib = torch.library.Library("mytest", "FRAGMENT")
    lib.define("centre(Tensor x) -> Tensor")
    lib.impl("centre", lambda x: x - x.mean(0), DEVICE.upper())
    torch.library.register_fake("mytest::centre", torch.empty_like, lib=lib)
    koila.register_rule("mytest::centre", "S0->S0")
    x = torch.randn(B, 5, dtype=torch.float64)
    with torch.no_grad(), koila.micro_batch(2):
        assert not torch.allclose(koila.run(torch.ops.mytest.centre(lazy(x))), x - x.mean(0))


@pytest.mark.parametrize(
    "rule",
    [
        "",
        "S0",
        "->",
        "S0->",
        "->S0",
        "Q->S0",
        "S0->S0->S0",
        "S->S0",
        "S99->S0",
        "S0,,S0->S0",
        "S0->S0;",
        "S-1->S0",
        "S0 S0->S0",
    ],
)
def test_a_rule_that_cannot_be_read_is_a_value_error(ops, rule):
    with pytest.raises(ValueError, match="rule"):
        koila.register_rule("mytest::bad", rule)


@pytest.mark.parametrize("op", ["cube", "mytest.cube", "", torch.ops.aten.add, 3, None])
def test_what_is_no_operator_is_a_value_error(op):
    with pytest.raises(ValueError, match="register_rule"):
        koila.register_rule(op, "S0->S0")


def test_no_rule_at_all_is_a_value_error(ops):
    with pytest.raises(ValueError, match="at least one"):
        koila.register_rule(ops.cube)

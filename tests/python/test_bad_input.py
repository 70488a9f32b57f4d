"""Bad input gets the error of the contract, naming what was asked; and nothing is lost."""

import os
import signal
import threading
import types

import numpy as np
import pytest
import torch
from helpers import model_state, plain, run_python
from torch import nn
from torch.nn import functional as F

import koila
from koila import lazy

D = torch.float64


def net():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)).double()


def xy(n=6):
    return torch.randn(n, 5, dtype=D), torch.randint(0, 4, (n,))


def world(model):
    return {
        **model_state(model),
        "rng": torch.get_rng_state(),
        **{f"version {n}": torch.tensor(p._version) for n, p in model.named_parameters()},
    }


def unchanged(before, model):
    after = world(model)
    assert before.keys() == after.keys()
    for k, b in before.items():
        a = after[k]
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b)), f"{k} changed"


# ---- lazy()


@pytest.mark.parametrize(
    "values, options, words",
    [
        ((), {}, ["<0 values>", "at least one value"]),
        ((torch.ones(6, 3),), {"batch": 2}, ["batch=2", "got 2", "f32[6, 3]"]),
        ((torch.ones(6, 3),), {"batch": -3}, ["batch=-3", "f32[6, 3]"]),
        ((torch.ones(6, 3), torch.ones(6)), {"batch": 1}, ["batch=1", "f32[6]"]),
        (
            (torch.ones(256, 3, 32, 32), torch.ones(255, dtype=torch.long)),
            {},
            ["lazy(<2 values>, batch=0)", "256 (f32[256, 3, 32, 32]) and 255 (i64[255])"],
        ),
        (
            ({"a": torch.ones(3), "b": [torch.ones(4)]},),
            {},
            ["3 (f32[3] at ['a']) and 4 (f32[4] at ['b'][0])"],
        ),
        (
            (torch.ones(3, 4), torch.ones(5, 3)),
            {"batch": (0, 0)},
            ["3 (f32[3, 4]) and 5 (f32[5, 3])"],
        ),
        (("a string",), {}, ["at least one tensor", "str"]),
        ((3,), {}, ["at least one tensor", "int"]),
        ((None,), {}, ["at least one tensor", "NoneType"]),
        ((np.ones(2),), {}, ["at least one tensor", "ndarray", "torch.as_tensor(x)"]),
        ((nn.Linear(2, 2),), {}, ["at least one tensor", "Linear", "The model stays as it is"]),
        (
            (nn.Sequential(nn.Linear(2, 2)),),
            {},
            ["at least one tensor", "Sequential", "The model stays as it is"],
        ),
        ((torch.ones(3),), {"batch": "0"}, ["batch='0'", "expected an int"]),
        ((torch.ones(3),), {"batch": True}, ["bool"]),
        ((torch.ones(3),), {"batch": 0.0}, ["float"]),
        ((torch.ones(3), torch.ones(3)), {"batch": (0,)}, ["expected 2", "got 1"]),
        (({"a": torch.ones(3)},), {"batch": {"b": 0}}, ["'a'", "'b'"]),
        ((torch.ones(3),), {"batch": None}, ["batched", "none"]),
    ],
)
def test_lazy_refuses_and_names_what_was_asked(values, options, words):
    with pytest.raises(ValueError) as e:
        lazy(*values, **options)
    for word in words:
        assert word in str(e.value)


@pytest.mark.parametrize(
    "make, word",
    [
        (lambda: torch.eye(4).to_sparse(), "sparse_coo"),
        (lambda: torch.eye(4).to_sparse_csr(), "sparse_csr"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (lambda: torch.quantize_per_tensor(torch.ones(4, 2), 0.1, 0, torch.quint8), "quantized"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_tensor_that_has_no_rows_to_cut_is_refused(make, word):
    with pytest.raises(koila.UnsupportedError, match=word):
        lazy(make())


def test_non_tensors_pass_through():
    x, a, b, c = lazy(torch.ones(3), 3, "s", None)
    assert isinstance(x, koila.LazyTensor) and (a, b, c) == (3, "s", None)


def test_a_lazy_tensor_again_is_the_same():
    x, y = lazy(torch.randn(6, 3), torch.arange(6))
    assert lazy(x) is x
    a, b = lazy(x, y)
    assert a is x and b is y
    with pytest.raises(ValueError, match="6 .*and 5 "):
        lazy(x, torch.ones(5))


def test_a_lazy_tensor_beside_a_new_one():
    given, other = torch.randn(6, 3), torch.randn(6, 3)
    with koila.micro_batch(4):
        x = lazy(given) * 2
        a, b = lazy(x, other)
        assert a is x
        assert torch.equal(koila.run(a + b), given * 2 + other)


@pytest.mark.parametrize(
    "again, words",
    [
        (
            lambda x: lazy(x, batch=1),
            [
                "lazy(<1 value>, batch=1) at ",
                "test_bad_input.py:",
                "f32[6, 6, 4] is lazy along axis 0",
                "along axis 1",
            ],
        ),
        (
            lambda x: lazy({"a": [x]}, batch={"a": [-2]}),
            ["f32[6, 6, 4] is lazy along axis 0", "along axis 1"],
        ),
        (lambda x: lazy(torch.ones(6), x, batch=(0, 1)), ["<2 values>", "axis 0", "axis 1"]),
        (
            lambda x: lazy(x.transpose(0, 1) * 2),
            ["axis 1 already", "along axis 0", "It was made at ", "test_bad_input.py:"],
        ),
        (lambda x: lazy(x.sum(0)), ["f32[6, 4] is one value made of the whole batch", "axis 0"]),
        (
            lambda x: lazy(x.sort(0)[0]),
            ["f32[6, 6, 4] is one value made of the whole batch", "axis 0"],
        ),
    ],
)
def test_a_value_that_is_lazy_in_another_way_is_refused(again, words):
    x = lazy(torch.randn(6, 6, 4))
    with pytest.raises(ValueError) as e:
        again(x)
    for word in words:
        assert word in str(e.value)
    assert tuple((x * 2).torch().shape) == (6, 6, 4)


def test_a_value_that_is_lazy_in_the_same_way_stays():
    x = lazy(torch.randn(6, 6, 4))
    for again, dim in ((x * 2, 0), (x.transpose(0, 1), 1), (x.flatten(0, 1), 0)):
        assert lazy(again, batch=dim) is again
        again.torch()
        assert lazy(again, batch=dim) is again
    zeros = x.new_zeros(3, 6)
    assert lazy(zeros, batch=1) is zeros
    one = lazy(torch.randn(1, 3)) * 2
    assert lazy(one) is one


def test_a_state_kept_from_an_earlier_step_is_lazy_anew():
    """Truncated backpropagation through time: what the last step left is cut again, along any
    axis."""
    w = torch.randn(4, 4, dtype=D, requires_grad=True)
    state = lazy(torch.randn(6, 4, dtype=D)) @ w
    state.sum().backward()
    state = state.detach()
    with koila.micro_batch(2):
        for dim in (0, 1):
            fresh = lazy(state, batch=dim)
            assert fresh is not state and torch.allclose(
                koila.run((fresh * 2).sum()), state.torch().mul(2).sum(), atol=1e-12
            )
            assert koila.last_plan().n_micro_batches == state.shape[dim] // 2


def test_an_empty_batch_is_right():
    x = lazy(torch.ones(0, 3))
    assert (
        type(x) is koila.LazyTensor
        and tuple((x * 2).torch().shape) == (0, 3)
        and torch.isnan(koila.run(x.mean()))
    )


@pytest.mark.parametrize(
    "loss",
    [F.mse_loss, F.l1_loss, F.huber_loss, F.smooth_l1_loss, F.binary_cross_entropy_with_logits],
)
@pytest.mark.parametrize("rows", [None, 2])
def test_a_mean_loss_over_nothing_is_what_it_is_in_pytorch(loss, rows):
    """No row of the batch, or none that the mask takes: NaN forward, zeros backward. torch's shape
    function of the backward divides by the number of elements."""
    for n, mask in ((0, torch.zeros(0, dtype=torch.bool)), (6, torch.zeros(6, dtype=torch.bool))):
        found = []
        for wrap in (lambda *a: a, lazy):
            w = torch.ones(5, requires_grad=True)
            with koila.micro_batch(rows):
                x, m = wrap(torch.linspace(-1, 1, 5 * n).view(n, 5), mask)
                nothing = loss((x * w)[m], x[m])
                (nothing + (x * w).sum()).backward()
                found.append((koila.run(nothing), w.grad))
        assert torch.isnan(found[0][0]) and torch.isnan(found[1][0])
        torch.testing.assert_close(found[1][1], found[0][1])


# ---- budget and micro_batch


@pytest.mark.parametrize(
    "amount",
    [
        -1,
        0,
        0.0,
        -0.5,
        "2Gb?",
        "2Gb",
        "",
        "GiB",
        "-3MB",
        "0",
        "0GiB",
        "1.5.2MB",
        1.5,
        "150%",
        float("nan"),
        float("inf"),
        True,
        [1],
        "9999TiB",
        2**60,
        {"cpu": "x"},
        {"gpu7": 1},
    ],
)
@pytest.mark.parametrize("where", [koila.budget, koila.set_budget])
def test_a_bad_budget_is_refused_by_name(amount, where):
    before = koila._core.configure()
    with pytest.raises(ValueError) as e:
        where(amount)
    assert where.__name__ in str(e.value) and "expected" in str(e.value)
    assert koila._core.configure() == before


def test_settings_decorate_generators_and_coroutines():
    """Their body runs after the call has returned: it ran without the setting."""
    now = lambda: koila._core.configure()["micro_batch"]  # noqa: E731

    @koila.micro_batch(3)
    def rows():
        yield now()
        sent = yield now()
        yield sent, now()

    @koila.micro_batch(3)
    async def later():
        return now()

    before = now()
    g = rows()
    assert (
        next(g) == 3
        and now() == before
        and next(g) == 3
        and g.send("x") == ("x", 3)
        and now() == before
    )
    g.close()
    assert list(koila.micro_batch(3)(lambda: [now()])()) == [3]
    with pytest.raises(StopIteration) as done:
        later().send(None)
    assert (
        done.value.value == 3
        and now() == before
        and rows.__name__ == "rows"
        and later.__name__ == "later"
    )


@pytest.mark.parametrize(
    "amount, n_bytes",
    [
        (1000, 1000),
        ("512MB", 512_000_000),
        ("2GiB", 2 << 30),
        ("1.5 kib", 1536),
        ("10MiB", 10 << 20),
        ({"cpu": "1MB", "cuda:0": 0.5}, 1_000_000),
    ],
)
def test_a_budget_in_words_is_the_right_number(amount, n_bytes):
    if torch.cuda.is_available() and isinstance(amount, dict):
        pytest.skip("the dict's CPU entry is for machines without CUDA")
    with koila.budget(amount):
        assert koila._core.configure()["budget"] == n_bytes
        with koila.budget(None):
            assert koila._core.configure()["budget"] is None
        assert koila._core.configure()["budget"] == n_bytes
    assert koila._core.configure()["budget"] is None


def test_a_fraction_is_of_what_is_free():
    with koila.budget(0.5):
        half = koila._core.configure()["budget"]
    with koila.budget("50%"):
        again = koila._core.configure()["budget"]
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < half < total and abs(half - again) < 0.2 * half


def test_settings_work_as_decorators_and_come_back_after_an_exception():
    @koila.budget("1GiB")
    @koila.micro_batch(3)
    @koila.strict()
    def f(depth):
        s = koila._core.configure()
        assert (s["budget"], s["micro_batch"], s["strict"]) == (1 << 30, 3, True)
        if depth:
            f(depth - 1)
        raise KeyError("out")

    before = koila._core.configure()
    with pytest.raises(KeyError):
        f(0)
    with pytest.raises(KeyError):
        f(2)
    assert koila._core.configure() == before


@pytest.mark.parametrize("size", [0, -1, 1.0, "fast", True, [2]])
def test_a_bad_micro_batch_is_refused_by_name(size):
    with pytest.raises(ValueError, match="micro_batch"):
        koila.micro_batch(size)


@pytest.mark.parametrize(
    "text, ok", [("2GiB", True), ("0.5", True), ("2Gb?", False), ("-1", False)]
)
def test_the_environment_variable(text, ok):
    p = run_python(
        "import koila; print(koila._core.configure()['budget'])",
        check=False,
        env={"KOILA_BUDGET": text},
    )
    if ok:
        assert p.returncode == 0 and int(p.stdout) > 0
    else:
        assert p.returncode == 1 and "KOILA_BUDGET" in p.stderr.splitlines()[-1]


def test_a_micro_batch_larger_than_the_batch_is_the_whole():
    with koila.micro_batch(100):
        x = lazy(torch.ones(6, 2))
        assert float((x * 2).sum()) == 24
    assert koila.last_plan().n_micro_batches == 1


# ---- steps


def test_backward_of_a_non_scalar_is_torch_s_own_error():
    model = net()
    x, y = xy()
    with pytest.raises(RuntimeError) as eager:
        model(x).backward()
    before = world(model)
    with pytest.raises(RuntimeError) as ours:
        model.eval()(lazy(x)).backward()
    model.train()
    unchanged(before, model)
    assert str(ours.value) == str(eager.value)


def test_backward_twice_is_torch_s_own_error():
    x, y = xy()
    texts = []
    for wrap in (lambda *v: v, lazy):
        model = net()
        a, b = wrap(x, y)
        loss = F.cross_entropy(model(a), b)
        loss.backward()
        before = world(model)
        with pytest.raises(RuntimeError) as e:
            loss.backward()
        unchanged(before, model)
        texts.append(str(e.value))
    assert texts[0] == texts[1]


def test_a_value_read_after_the_parameters_changed_is_stale():
    model = net().eval()
    with koila.micro_batch(4):
        (x,) = (lazy(xy()[0]),)
        out = model(x)
        with torch.no_grad():
            model[0].weight.add_(1)
        with pytest.raises(
            koila.StaleValueError,
            match=r"tensor f64\[5, 8\], read at .*test_bad_input.py:\d+, which has been written "
            r"since",
        ):
            out.sum().item()
        assert isinstance(koila.StaleValueError("x"), koila.KoilaError)


def test_statistics_of_a_forward_that_became_stale_are_a_warning_and_not_a_second_error():
    model = net()
    before = model[1].running_mean.clone()
    out = model(lazy(xy()[0]))
    with torch.no_grad():
        model[0].weight.add_(1)
    with pytest.warns(RuntimeWarning, match=r"running statistics \(2\) stay as they were"):
        del out
    assert torch.equal(before, model[1].running_mean)


@pytest.mark.kernel_asserts
@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="notes came with Python 3.11")
def test_an_error_that_only_the_data_can_cause_names_the_line_and_the_rows():
    x, y = xy()
    y[5] = 9
    with koila.micro_batch(2):
        a, b = lazy(x, y)
        loss = F.cross_entropy(net()(a), b)
        with pytest.raises(IndexError, match="Target 9 is out of bounds") as e:
            loss.backward()
    (note,) = e.value.__notes__
    assert (
        "aten::nll_loss_" in note
        and "test_bad_input.py:" in note
        and note.endswith("on rows 4 to 5 of 6")
    )


def test_torch_too_old_is_refused_politely():
    p = run_python("import torch; torch.__version__ = '2.1.0'; import koila", check=False)
    assert p.returncode == 1
    last = p.stderr.strip().splitlines()[-1]
    assert "2.1.0" in last and "2.10" in last, p.stderr


def test_no_torch_is_refused_politely():
    p = run_python("import sys; sys.modules['torch'] = None; import koila", check=False)
    assert p.returncode == 1
    assert "torch" in p.stderr.strip().splitlines()[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without CUDA is meant")
def test_a_lazy_cuda_tensor_without_cuda_is_refused_and_never_aborts():
    p = run_python(
        """
import torch, koila
from torch._subclasses.fake_tensor import FakeTensorMode

with FakeTensorMode():
    t = torch.empty(6, 2, device="cuda")
for f in (
    lambda: koila.lazy(t),
    lambda: koila.lazy(torch.ones(6, 2)).to("cuda"),
    lambda: koila.lazy(torch.ones(6, 2)).cuda(),
):
    try:
        print(koila.run(f()))
    except Exception as e:
        print("refused", type(e).__name__, str(e)[:80])
assert float(koila.run(koila.lazy(torch.ones(6, 2)).sum())) == 12
""",
        check=False,
    )
    assert p.returncode == 0, p.stderr
    assert p.stdout.count("refused") == 3, p.stdout


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x @ torch.ones(3, 3, dtype=D),
        lambda x: x.view(7, 7),
        lambda x: x + torch.ones(7),
        lambda x: x.log_softmax(9),
        lambda x: x.sum(5),
        lambda x: F.embedding(x, x),
        lambda x: F.cross_entropy(x, x.long()[:3, 0]),
        lambda x: nn.Linear(5, 3)(x),
        lambda x: x @ torch.ones(5, 3),
        lambda x: torch.addmm(torch.ones(3), x, torch.ones(5, 3)),
        lambda x: F.conv1d(x[:, None], torch.ones(2, 1, 3)),
        lambda x: F.cross_entropy(x, x[:, 0].int()),
        lambda x: F.binary_cross_entropy(x.sigmoid(), x.long()),
        lambda x: F.layer_norm(x, (5,), torch.ones(5)),
        lambda x: x.index_add(0, torch.tensor([0]), torch.ones(1, 5)),
        lambda x: x.index_add(0, torch.tensor([0]), torch.ones(1, 3, dtype=D)),
        lambda x: x & x,
        lambda x: F.avg_pool3d(x.expand(1, 1, 3, *x.shape), 2, divisor_override=0),
        *(
            lambda x, f=f, dtype=dtype: f(x, torch.arange(len(x), dtype=dtype))
            for dtype in (torch.float32, torch.int16)
            for f in (
                lambda x, i: F.embedding(i, x),
                lambda x, i: x.index_select(0, i),
                lambda x, i: x.index_copy(0, i, x),
                lambda x, i: x.index_fill(0, i, 1.0),
                lambda x, i: (x * 1).index_fill_(0, i, 1.0),
                lambda x, i: x.index_reduce(0, i, x, "prod"),
            )
        ),
        lambda x: x.index_add(0, torch.zeros(len(x)), x),
        lambda x: x.index_copy(0, torch.arange(len(x), dtype=torch.int32), x),
        lambda x: x.index_fill(0, torch.zeros(1, dtype=torch.int32), 1.0),
    ],
)
def test_a_mistake_of_the_user_is_torch_s_error_at_the_user_s_line(wrong):
    x, _ = xy()
    with pytest.raises(Exception) as eager:
        wrong(x)
    with pytest.raises(eager.type) as ours:
        wrong(lazy(x))
    assert any(
        entry.path.name == "test_bad_input.py"
        if hasattr(entry.path, "name")
        else "test_bad_input.py" in str(entry.path)
        for entry in ours.traceback
    )


def test_an_operator_that_has_no_kernel_is_torch_s_error_and_does_not_poison_what_follows():
    x, y = xy()
    with pytest.raises(NotImplementedError):
        x.long().softmax(1)
    u, v = lazy(x, y)
    with pytest.raises(NotImplementedError):
        u.long().softmax(1)
    model = net()
    F.cross_entropy(model(u), v).backward()
    assert all(p.grad is not None for p in model.parameters())


# ---- interruptions


@pytest.mark.parametrize(
    "error",
    [ValueError("from the hook"), KeyboardInterrupt(), koila.KoilaError("mine")],
    ids=lambda e: type(e).__name__,
)
@pytest.mark.parametrize("which", ["tensor", "parameter", "module", "forward"])
def test_a_hook_that_raises_changes_nothing_and_its_exception_comes_out(error, which):
    model = net()
    x, y = lazy(*xy())

    def boom(*_):
        raise error

    handle = {
        "tensor": lambda: None,
        "parameter": lambda: model[0].weight.register_hook(boom),
        "module": lambda: model[2].register_full_backward_hook(boom),
        "forward": lambda: model[2].register_forward_hook(boom),
    }[which]()
    before = {k: v for k, v in world(model).items() if "value:buffer" not in k}
    with koila.micro_batch(4), pytest.raises(type(error)) as e:
        h = model(x)
        if which == "tensor":
            h.register_hook(boom)
        F.cross_entropy(h, y).backward()
    assert e.value is error
    after = world(model)
    for k, b in before.items():
        assert (after[k] is None) == (b is None) and (b is None or torch.equal(after[k], b)), (
            f"{k} changed"
        )
    if handle is not None:
        handle.remove()
    # and the model still trains, exactly
    reference = net()
    reference.load_state_dict(model.state_dict())
    a, b = xy()
    F.cross_entropy(reference(a), b).backward()
    with koila.micro_batch(4):
        u, v = lazy(a, b)
        F.cross_entropy(model(u), v).backward()
    assert torch.allclose(model[0].weight.grad, reference[0].weight.grad, rtol=1e-12)


def test_control_c_in_the_middle_of_a_step_changes_nothing(ctrl_c):
    """A real signal, at several moments of a step that takes a while."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(256, 512), nn.BatchNorm1d(512), nn.Tanh(), nn.Linear(512, 256)
    ).double()
    data = torch.randn(512, 256, dtype=D)
    interrupted = 0
    for k in range(6):
        model.zero_grad()
        with koila.micro_batch(16):
            x = lazy(data)
            loss = model(x).square().mean()
            before = {n: v for n, v in world(model).items()}
            timer = threading.Timer(0.002 + 0.012 * k, lambda: os.kill(os.getpid(), signal.SIGINT))
            try:
                # inside: on a busy machine the signal can come before start() returns
                timer.start()
                loss.backward()
                timer.join()
                for _ in range(100000):
                    pass
            except KeyboardInterrupt:
                interrupted += 1
                after = world(model)
                done = after["grad:0.weight"] is not None
                if not done:
                    for n, b in before.items():
                        assert (after[n] is None) == (b is None) and (
                            b is None or torch.equal(after[n], b)
                        ), f"{n} changed"
            timer.join()
    assert interrupted > 0
    # still exact
    reference = nn.Sequential(
        nn.Linear(256, 512), nn.BatchNorm1d(512), nn.Tanh(), nn.Linear(512, 256)
    ).double()
    reference.load_state_dict(model.state_dict())
    reference(data).square().mean().backward()
    model.zero_grad()
    with koila.micro_batch(100):
        model(lazy(data)).square().mean().backward()
    assert torch.allclose(model[0].weight.grad, reference[0].weight.grad, rtol=1e-9, atol=1e-14)


# ---- loaders


def test_an_empty_loader_and_a_smaller_last_batch():
    def train(wrap, n):
        torch.manual_seed(3)
        model = net()
        data = torch.utils.data.TensorDataset(*xy(n))
        losses = []
        for x, y in wrap(torch.utils.data.DataLoader(data, batch_size=4)):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            losses.append(plain(loss))
        return losses, model_state(model)

    with koila.micro_batch(3):
        assert train(lazy, 0)[0] == []
        (a, ga), (b, gb) = train(lambda v: v, 10), train(lazy, 10)
    assert torch.allclose(torch.stack(a), torch.stack(b), rtol=1e-12)
    assert all(torch.allclose(ga[k], gb[k], rtol=1e-11) for k in ga)


def test_a_loader_is_not_taken_for_a_batch_and_a_batch_not_for_a_loader():
    assert type(lazy([torch.ones(2)])) is list
    assert isinstance(lazy(iter([torch.ones(2)])), koila._lazy.LazyLoader)
    assert not isinstance(types.SimpleNamespace(), koila._lazy.LazyLoader)


def test_explain_of_nothing_lazy():
    with pytest.raises(ValueError, match="lazy value"):
        koila.explain(torch.ones(3))
    with pytest.raises(ValueError):
        koila.explain()


def test_opaque_of_what_cannot_be_called():
    with pytest.raises(ValueError, match=r"opaque\(3\): expected a module or a function, got int"):
        koila.opaque(3)


def test_data_parallel_over_several_gpus_is_refused():
    model, (x, _) = net(), xy()
    state = world(model)
    several = nn.DataParallel(model)
    several.device_ids = [0, 1]
    with pytest.raises(koila.UnsupportedError, match="DataParallel over 2 GPUs"):
        several(lazy(x))
    unchanged(state, model)

"""What a lazy tensor does where torch never asks the dispatcher: each door one by one, against a
plain tensor."""

import copy
import io
import pickle
import sys

import numpy as np
import pytest
import torch
from helpers import REAL_GPU, torch_version

import koila
from koila import LazyTensor, UnsupportedError, _core, _tensor, lazy


@pytest.fixture
def x():
    torch.manual_seed(3)
    return torch.randn(6, 4, dtype=torch.float64)


def doubled(x):
    return lazy(x) * 2


def test_numpy_tolist_array_are_the_values(x):
    y = doubled(x)
    assert np.array_equal(y.numpy(force=True), (x * 2).numpy(force=True))
    assert y.tolist() == (x * 2).tolist()


@pytest.mark.about_the_cpu("NumPy sees the host's memory only")
def test_numpy_sees_the_values(x):
    y = doubled(x)
    assert np.array_equal(y.numpy(), (x * 2).numpy())
    assert np.array_equal(np.asarray(y), (x * 2).numpy())
    assert np.asarray(y, dtype=np.float32).dtype == np.float32
    assert np.allclose(np.add(y, 1), (x * 2 + 1).numpy())


def test_numpy_of_what_requires_grad_is_eagers_error(x):
    y = doubled(x) * torch.ones(4, dtype=x.dtype, requires_grad=True)
    for door in (lambda t: t.numpy(), np.asarray):
        with pytest.raises(RuntimeError, match="Can't call numpy"):
            door(y)
    assert np.array_equal(y.detach().numpy(force=True), (x * 2).numpy(force=True))
    assert np.array_equal(y.numpy(force=True), (x * 2).numpy(force=True))


def test_python_numbers(x):
    s, e = doubled(x).sum(), (x * 2).sum()
    assert float(s) == float(e) and s.item() == e.item() and bool(s > 0) == bool(e > 0)
    assert int(s) == int(e) and complex(s) == complex(e) and f"{s:.3f}" == f"{e:.3f}"
    i = lazy(torch.tensor([2, 1, 0])).max()
    assert [10, 20, 30][i] == 30 and range(5)[i] == 2
    assert (0.0 in doubled(x)) == (0.0 in x * 2)
    assert len(doubled(x)) == 6 and len(list(doubled(x))) == 6


def test_print_repr_format(x):
    y, e = doubled(x), x * 2
    assert repr(y) == repr(e) and str(y) == str(e) and f"{y}" == f"{e}"
    w = torch.ones(4, dtype=x.dtype, requires_grad=True)
    assert repr(doubled(x) * w) == repr((x * 2) * w)
    assert repr(lazy(x).requires_grad_()) == repr(x.clone().requires_grad_())


def test_pickle_and_save_write_plain_tensors(x):
    y = doubled(x)
    back = pickle.loads(pickle.dumps({"y": y}))["y"]
    assert type(back) is torch.Tensor and torch.equal(back, x * 2)
    file = io.BytesIO()
    torch.save([y], file)
    file.seek(0)
    assert torch.equal(torch.load(file)[0], x * 2)


def test_deepcopy(x):
    y = copy.deepcopy(doubled(x))
    assert torch.equal(y, x * 2) and not isinstance(y, LazyTensor)
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(doubled(x) * torch.ones(4, dtype=x.dtype, requires_grad=True))


def test_torch_is_differentiable(x):
    w = torch.ones(4, dtype=x.dtype, requires_grad=True)
    t = (doubled(x) * w).torch()
    assert type(t) is torch.Tensor and t.requires_grad
    t.square().sum().backward()
    v = torch.ones(4, dtype=x.dtype, requires_grad=True)
    (x * 2 * v).square().sum().backward()
    assert torch.equal(w.grad, v.grad)


def test_as_subclass(x):
    class Mine(torch.Tensor):
        pass

    w = torch.ones(4, dtype=x.dtype, requires_grad=True)
    t = (doubled(x) * w).as_subclass(Mine)
    assert type(t) is Mine
    t.sum().backward()
    assert torch.equal(w.grad, (x * 2).sum(0))


@pytest.mark.parametrize(
    "door",
    [
        lambda y: y.data_ptr(),
        lambda y: y.share_memory_(),
        lambda y: y.apply_(lambda v: v),
        lambda y: y.map_(y, lambda a, b: a),
        lambda y: y.untyped_storage(),
        lambda y: y.storage(),
        lambda y: y.set_(torch.ones(3)),
        lambda y: y.resize_(3, 3),
        lambda y: torch.ops.aten.as_strided_(y, (300,), (1,)),
        lambda y: torch.utils.swap_tensors(y, torch.ones(3)),
    ],
)
def test_what_has_no_meaning_is_refused_and_nothing_changes(x, door):
    y = doubled(x)
    with pytest.raises((UnsupportedError, RuntimeError)):
        door(y)
    assert torch.equal(y.torch(), x * 2)


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
LAYOUTS_OF_NOTHING = [
    ((), (), 0),
    ((0,), (1,), 0),
    ((3, 0, 2), (2, 2, 1), 4),
    ((2, 3), (3, 1), 0),
    ((2, 3), (1, 2), 5),
    ((4, 5, 6), (0, 6, 1), 0),
    ((2, 3, 4, 5), (60, 1, 15, 3), 7),
]


def facts_of(t):
    keys = torch._C._dispatch_keys(t).raw_repr()
    contiguous = [
        t.is_contiguous(memory_format=f)
        for f in (torch.contiguous_format, torch.channels_last)
        if f is torch.contiguous_format or t.dim() == 4
    ]
    said = (
        type(t),
        t.dtype,
        t.device,
        t.layout,
        t.size(),
        t.stride(),
        t.storage_offset(),
        t.numel(),
        contiguous,
        keys,
        t.requires_grad,
        t.is_leaf,
        t.grad_fn,
        t._base,
    )
    return (
        *said,
        t.is_inference() or t._version,
        t.is_inference(),
        t._use_count(),
        sys.getrefcount(t),
        t.is_conj(),
        t.is_neg(),
        t.__dict__,
    )


def needs_wrappers_by_parts():
    """Torch 2.11 makes other wrappers: koila asks it for each. From 2.13 on they are known."""
    if not _tensor.learn_wrappers():
        assert torch_version() < (2, 13)
        pytest.skip("wrappers by parts: torch 2.13 ends it")


@pytest.mark.parametrize("inference", [False, True])
def test_a_wrapper_made_by_parts_is_the_one_torch_makes_from_arguments(inference):
    for dtype in DTYPES:
        for size, stride, offset in LAYOUTS_OF_NOTHING:
            with torch.inference_mode(inference):
                pair = _core.wrapper_pair((dtype, torch.device("cpu"), size, stride, offset))
            needs_wrappers_by_parts()
            assert pair[1] is not None
            # asked alike: CPython 3.14 counts references by how they are asked for
            known, made = (facts_of(t) for t in pair)
            assert made == known
            with pytest.raises(RuntimeError, match="data pointer"):
                torch._C.TensorBase.data_ptr(pair[1])


def test_each_wrapper_counts_its_own_writes():
    a, b = (
        _core.wrapper_pair((torch.float32, torch.device("cpu"), (2,), (1,), 0))[1] for _ in range(2)
    )
    torch._C._autograd._unsafe_set_version_counter((a,), (3,))
    assert (a._version, b._version) == (3, 0)


@pytest.mark.parametrize("what", ["keys", "sizes", "nothing"])
def test_a_torch_that_makes_other_wrappers_is_noticed(what, monkeypatch):
    pair = _core.wrapper_pair

    def other(meta):
        known, made = pair(meta)
        if what == "nothing":
            return known, None
        if what == "keys":
            return known, torch.Tensor._make_wrapper_subclass(
                LazyTensor,
                meta[2],
                meta[3],
                meta[4],
                None,
                meta[0],
                torch.strided,
                torch.device("meta"),
            )
        return known, pair((meta[0], meta[1], (3, 2), *meta[3:]))[1]

    needs_wrappers_by_parts()
    monkeypatch.setattr(_core, "wrapper_pair", other)
    assert not _tensor.learn_wrappers()


def test_a_step_is_the_same_where_wrappers_are_made_by_arguments(x):
    needs_wrappers_by_parts()

    def step(by_parts):
        was = _core.wrap_by_parts(by_parts)
        try:
            w = torch.linspace(-1, 1, 16, dtype=x.dtype).reshape(4, 4).requires_grad_()
            y = lazy(x) @ w
            z = y[1:].t().relu().sum(1) + y[:, 2].mean()
            text = _core.tape_of(z).text()
            z.square().sum().backward()
            return w.grad, text
        finally:
            _core.wrap_by_parts(was)

    (a, said_a), (b, said_b) = step(True), step(False)
    assert torch.equal(a, b) and said_a == said_b and _core.wrap_by_parts(True)


def test_a_function_registered_with_torch_for_lazy_tensors_is_called(x):
    with torch.library._scoped_library("koila_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda t: t * 2, "CompositeExplicitAutograd")
        twice = torch.ops.koila_test.twice
        y = doubled(x)
        assert torch.equal(twice(y).torch(), x * 4)  # recorded: the operator is known from here on
        asked = []
        library._register_torch_dispatch_rule(
            "twice",
            LazyTensor,
            lambda cls, func, types, args, kwargs: asked.append(func) or args[0],
        )
        assert torch.equal(twice(y).torch(), x * 2) and asked == [twice.default]
        assert _core.find_rule(twice.default, torch.Tensor) is None


def test_the_data_pointer_of_nothing_is_an_error_in_c_too(x):
    with pytest.raises(RuntimeError):
        torch.Tensor.data_ptr(doubled(x))


def test_dlpack(x):
    assert torch.equal(torch.from_dlpack(doubled(x)), x * 2)


def test_new(x):
    y = doubled(x)
    assert torch.equal(y.new_tensor([1.0, 2.0]), torch.tensor([1.0, 2.0], dtype=x.dtype))
    assert y.new(3).dtype == x.dtype and y.new([1, 2]).tolist() == [1.0, 2.0]
    assert torch.equal(y.new_full((6, 2), 3).torch(), torch.full((6, 2), 3.0, dtype=x.dtype))


def test_metadata_is_eagers(x):
    y, e = doubled(x), x * 2
    for f in (
        lambda t: t.type(),
        lambda t: t.stride(),
        lambda t: t.is_contiguous(),
        lambda t: t.storage_offset(),
        lambda t: t[2:].storage_offset(),
        lambda t: t.device,
        lambda t: t.dtype,
        lambda t: t.layout,
        lambda t: t.element_size(),
        lambda t: t.nbytes,
        lambda t: t.is_floating_point(),
        lambda t: t.is_shared(),
        lambda t: t.is_pinned(),
        lambda t: t.t().is_contiguous(),
        lambda t: t.T.stride(),
        lambda t: t.dim(),
        lambda t: t.numel(),
        lambda t: t.is_leaf,
        lambda t: hash(t) == id(t),
    ):
        assert f(y) == f(e)


# -- data and grad


def test_a_real_tensor_given_lazy_data_holds_plain_contents(x):
    real = torch.zeros(6, 4, dtype=x.dtype)
    real.data = doubled(x)
    assert torch.equal(real + 0, x * 2)


def test_a_lazy_tensor_given_data_has_the_new_contents(x):
    for make in (lambda: torch.ones(2, 3), lambda: lazy(torch.ones(2, 3)) * 1):
        y = doubled(x)
        y.data = make()
        assert y.shape == (2, 3) and torch.equal((y + 1).torch(), torch.full((2, 3), 2.0))


def test_data_of_a_lazy_tensor_shares_its_contents(x):
    y, e = doubled(x), x * 2
    y.data.mul_(3)
    e.data.mul_(3)
    assert torch.equal(y.torch(), e) and y._version == e._version


def test_what_was_recorded_from_a_tensor_keeps_its_contents_when_data_is_replaced(x):
    p = torch.ones(4, dtype=x.dtype)
    y = lazy(x) * p
    p.data = torch.full((4,), 5.0, dtype=x.dtype)
    z = lazy(x) * p
    assert torch.equal(y.torch(), x) and torch.equal(z.torch(), x * 5)


def test_a_lazy_gradient_given_to_a_parameter_is_plain_for_who_reads_it(x):
    p = torch.nn.Parameter(torch.ones(6, 4, dtype=x.dtype))
    p.grad = doubled(x)
    assert type(p.grad) is torch.Tensor and torch.equal(p.grad, x * 2)
    p.grad = None
    assert p.grad is None


def test_the_given_tensor_is_never_written(x):
    before = x.clone()
    y = lazy(x)
    y.add_(1)
    y[0] = 5
    y.data.zero_()
    assert (
        torch.equal(y.torch(), torch.zeros_like(x)) and torch.equal(x, before) and x._version == 0
    )


# -- lazy data written into plain tensors


def test_writing_lazy_data_into_a_plain_tensor(x):
    real = torch.zeros(6, 4, dtype=x.dtype)
    assert real.copy_(doubled(x)) is real and torch.equal(real, x * 2)
    real.add_(lazy(x))
    real[0] = lazy(x)[1]
    e = x * 2 + x
    e[0] = x[1]
    assert torch.equal(real, e)
    out = torch.empty(6, 4, dtype=x.dtype)
    torch.add(lazy(x), 1, out=out)
    assert torch.equal(out, x + 1)


def test_earlier_reads_of_a_buffer_keep_its_contents_when_lazy_data_is_written(x):
    buffer = torch.ones(6, 4, dtype=x.dtype)
    y = lazy(x)
    z = y + buffer
    buffer.copy_(y * 7)
    assert torch.equal(z.torch(), x + 1) and torch.equal((y + buffer).torch(), x + x * 7)


# -- values in the middle


def test_masks_and_data_dependent_operators(x):
    y = doubled(x)
    e = x * 2
    assert torch.equal(koila.run(y[y > 0]), e[e > 0])
    assert torch.equal(koila.run(y.nonzero()), e.nonzero())
    assert torch.equal(koila.run(torch.masked_select(y, y > 0)), torch.masked_select(e, e > 0))
    assert torch.equal(y, e) and torch.equal(koila.run(y.unique()), e.unique())
    i = lazy(torch.tensor([1, 1, 0, 3]))
    assert torch.bincount(i).tolist() == [1, 2, 0, 1]
    assert bool((y == y).all()) and torch.allclose(y, e)


def test_rows_chosen_by_a_mask_are_differentiable(x):
    w, v = (torch.ones(4, dtype=x.dtype, requires_grad=True) for _ in range(2))
    y, e = lazy(x) * w, x * v
    y[x[:, 0] > 0].square().sum().backward()
    e[x[:, 0] > 0].square().sum().backward()
    assert torch.equal(w.grad, v.grad)


def test_only_the_mask_is_made_concrete(x):
    big = x.repeat(1, 500)  # what is small and held is made on the way
    y = doubled(big)
    z = y * 3
    z[y > 0].sum()
    assert not _core.is_concrete(z) and not _core.is_concrete(y)


def test_a_higher_order_operator_is_refused(x):
    with pytest.raises((UnsupportedError, RuntimeError, NotImplementedError)):
        torch.ops.higher_order.cond(lazy(x).sum() > 0, lambda t: t + 1, lambda t: t - 1, (lazy(x),))


def test_another_tensor_class_with_a_dispatch_of_its_own_is_refused(x):
    from torch._subclasses.fake_tensor import FakeTensorMode

    fake = FakeTensorMode().from_tensor(x)
    with pytest.raises((UnsupportedError, AssertionError)):
        lazy(x) + fake
    with pytest.raises(UnsupportedError):
        _core.lazy_leaf(fake, None, 0)


def test_swap_tensors_of_two_lazies(x):
    a, b = doubled(x), lazy(x)[:3] + 1
    torch.utils.swap_tensors(a, b)
    assert a.shape == (3, 4) and torch.equal(a.torch(), x[:3] + 1) and torch.equal(b.torch(), x * 2)


# -- metadata in place


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.t_(),
        lambda t: t.unsqueeze_(1),
        lambda t: t.transpose_(0, 1),
        lambda t: t.unsqueeze_(0).squeeze_(0),
        lambda t: t.squeeze_(),
    ],
)
def test_metadata_in_place(x, change):
    y, e = lazy(x) * 2, x * 2
    assert change(y) is y
    change(e)
    assert y.shape == e.shape and y.stride() == e.stride() and torch.equal((y + 1).torch(), e + 1)
    y.mul_(2)
    assert torch.equal(y.torch(), e.mul_(2))


LAYOUTS = [
    lambda t: t.t_(),
    lambda t: t.unsqueeze_(1),
    lambda t: t.transpose_(0, 1),
    lambda t: t.squeeze_(),
]


def layout_step(x, change, rows, take):
    """Everything a user can see of a tensor whose layout is written while `take` of its memory is
    alive, and of what is computed from both."""
    w = torch.linspace(-1, 1, 16, dtype=x.dtype).reshape(4, 4).requires_grad_()
    with koila.micro_batch(rows):
        base = x @ w
        y = base[1:5] if take == "view" else base
        v = y.detach() if take == "alias" else y.view(-1)
        u = y[1:]
        old = v * 2
        assert change(y) is y
        v[1:3].sin_() if take != "alias" else v.mul_(2)
        u.mul_(0.5)
        y.add_(1)
        if take != "view":
            y.retain_grad()
        loss = (
            (old.sin() if take == "alias" else v.cos()).sum()
            + (u**3).sum()
            + (y * torch.arange(y.shape[-1])).sum()
            + base.tanh().sum()
        )
        (by_y,) = torch.autograd.grad(loss, y, retain_graph=True)
        loss.backward()
        said = [
            y.shape,
            y.stride(),
            y._version,
            v._version,
            y._is_view(),
            v._base is y,
            u._base is y,
            y.is_leaf,
            y.grad_fn is not None,
        ]
        return [
            koila.run(t) for t in (loss.detach(), by_y, w.grad, y.detach(), v.detach(), u.detach())
        ] + ([koila.run(y.grad)] if take != "view" else []), said


@pytest.mark.parametrize("take", ["base", "view", "alias"])
@pytest.mark.parametrize("rows", [None, 4, 1])
@pytest.mark.parametrize("change", LAYOUTS)
def test_metadata_in_place_with_views_alive(x, change, rows, take):
    values, said = layout_step(lazy(x), change, rows, take)
    expected, told = layout_step(x, change, None, take)
    assert said == told
    for p, q in zip(values, expected):
        assert (
            torch.equal(p, q)
            if rows is None and take != "view"
            else torch.allclose(p, q, rtol=1e-12, atol=1e-12)
        )


def test_metadata_in_place_is_refused_where_autograd_could_not_follow(x):
    w = torch.ones(4, 4, dtype=x.dtype, requires_grad=True)
    y = lazy(x) @ w
    v = y.view(-1)
    with torch.no_grad(), pytest.raises(UnsupportedError, match="without underscore"):
        y.t_()
    hook = v.register_hook(lambda g: g)
    with pytest.raises(UnsupportedError, match="without underscore"):
        y.t_()
    with pytest.raises(UnsupportedError, match="without underscore"):
        torch.ops.aten.t_(y)
    assert y.shape == (6, 4) and y._version == 0
    hook.remove()
    assert y.t_().shape == (4, 6) and torch.equal(v.torch(), (x @ w).view(-1))


def test_metadata_in_place_raises_what_eager_raises(x):
    wrong = [
        (lambda t: t[0].unbind(0)[1].unsqueeze_(0), "multiple views"),
        (lambda t: t.unsqueeze(0).t_(), "<= 2"),
        (lambda t: t.unsqueeze_(7), "out of range"),
    ]
    for f, text in wrong:
        for make in (
            lambda: x @ torch.ones(4, 4, dtype=x.dtype, requires_grad=True),
            lambda: lazy(x) @ torch.ones(4, 4, dtype=x.dtype, requires_grad=True),
        ):
            y = make()
            keep = y.view(-1)
            with pytest.raises((RuntimeError, IndexError), match=text):
                f(y)
            assert y._version == 0 and keep.shape == (24,)


@pytest.mark.parametrize("within", [True, False])
@pytest.mark.parametrize("written", [True, False])
def test_as_strided_of_a_view_is_differentiated_as_eager_does(x, within, written):
    """Plain autograd drops the gradient beyond the view, but no more once the memory is written."""

    def step(x):
        w = torch.linspace(-1, 1, 16, dtype=x.dtype).reshape(4, 4).requires_grad_()
        y = x @ w
        s = y[1:4].as_strided((3, 2), (4, 2), 5 if within else 1)
        if written:
            y.mul_(2)
        (s.sin().sum() + y.sum()).backward()
        return w.grad

    with koila.micro_batch(4):
        if written and not within:
            with pytest.raises(UnsupportedError, match="as_strided of the tensor"):
                step(lazy(x))
        else:
            assert torch.allclose(step(lazy(x)), step(x), rtol=1e-12)


def test_as_strided_does_not_count_from_the_middle_of_the_memory(x):
    """A batch is often some rows of a larger tensor. Eager counts an offset from its first row."""
    rows = x[1:4]
    batch = lazy(rows)
    with pytest.raises(UnsupportedError, match="clone"):
        batch.as_strided((2,), (1,), 0)
    with pytest.raises(UnsupportedError, match="clone"):
        batch[1:].as_strided((2,), (1,), 0)
    assert torch.equal(koila.run(batch.as_strided((2,), (1,)) * 1), rows.as_strided((2,), (1,)))
    whole = lazy(rows.clone())
    assert torch.equal(koila.run(whole.as_strided((2,), (1,), 1) * 1), rows[0, 1:3])
    assert torch.equal(koila.run((batch * 1).as_strided((2,), (1,), 1) * 1), rows[0, 1:3])


@pytest.mark.parametrize("stride", [(2, 1, 2, 6), (12, 6, 2, 1), (99, 1, 2, 8)])
@pytest.mark.parametrize("rows", [None, 1])
def test_a_write_through_as_strided_lands_whatever_the_strides(stride, rows):
    """Also where what runs is laid out otherwise than what was recorded: a gap, or a free stride of
    a dimension of size 1."""

    def step(g):
        z = g.new_empty_strided((1, 2, 3, 2), stride)
        z.copy_(g)
        s = z.as_strided((2,), (1,), 0)
        s.copy_(s * 0.5)
        return z, s, z.squeeze(0)

    g = torch.arange(12.0).reshape(1, 2, 3, 2)
    with koila.micro_batch(rows):
        for p, q in zip(step(lazy(g, batch=3) * 1), step(g * 1)):
            assert torch.equal(koila.run(p), q)


# -- writes whose arguments share memory


def test_only_what_shares_memory_can_overlap(x):
    def step(x):
        a, b = x * 2, x * 3
        a[:, :2].addcmul_(a[:, 2:], b[:, 1:3])  # b's columns lie where a's do, in other memory
        return a

    assert torch.equal(step(lazy(x)).torch(), step(x))


def test_a_copy_of_itself_is_nothing_also_where_elements_share_memory(x):
    for make in (lambda: x * 1, lambda: lazy(x) * 1):
        base = make()
        e, again = (base.unsqueeze(1).expand(6, 3, 4) for _ in range(2))
        assert e.copy_(e) is e and e.copy_(again) is e
        with pytest.raises(RuntimeError, match="single memory location"):
            e.copy_(base.unsqueeze(1))
        with pytest.raises(RuntimeError, match="single memory location"):
            e.copy_(make().unsqueeze(1))


@pytest.mark.parametrize(
    "given, write",
    [
        (lambda: torch.ones(6, 1).expand(6, 4), lambda x: x[:, 1].zero_()),
        (lambda: torch.ones(6, 1).expand(6, 4), lambda x: x.detach().__setitem__((0, 1), 3.0)),
        (lambda: torch.ones(1, 4).expand(6, 4), lambda x: x[2].mul_(5)),
        (lambda: torch.ones(9).unfold(0, 4, 1), lambda x: x.add_(1)),
        (lambda: torch.ones(16).as_strided((4, 4), (3, 2)), lambda x: x[0].add_(1)),
    ],
)
def test_a_write_to_one_of_several_elements_in_one_place_of_the_batch_is_refused(given, write):
    """Eager changes all of them: each slice would have its own."""
    x, plain = lazy(given()), given()
    write(plain)
    assert (plain != 1).sum() > 0
    with pytest.raises(koila.UnsupportedError, match=r"one element of memory .*clone\(\)"):
        write(x)
    assert torch.equal(x.torch(), given())  # nothing was written
    copy, expected = lazy(given().clone()), given().clone()
    write(copy)
    write(expected)
    assert torch.equal(copy.torch(), expected)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(
    "other",
    [lambda ids: ids[:, :-1], lambda ids: ids[:, 1:-1].unflatten(1, (2, 2)), lambda ids: ids],
)
def test_a_write_to_one_of_two_batches_in_one_memory_is_refused(other, together):
    """inputs and labels are often views of one tensor, which eager's write changes in both."""
    ids = torch.arange(36.0).view(6, 6)
    given = ids[:, 1:], other(ids)
    labels, inputs = lazy(*given) if together else (lazy(given[0]), lazy(given[1]))
    with pytest.raises(koila.UnsupportedError, match=r"shares memory .*clone\(\)"):
        labels[:, 0] = -100
    assert torch.equal(inputs.torch(), given[1]) and torch.equal(labels.torch(), given[0])


def test_batches_side_by_side_in_one_memory_are_written_each_by_itself():
    table = torch.arange(36.0).view(6, 6)
    x, y, last = lazy(table[:, :3], table[:, 3:5], table[:, 5].double())
    x.mul_(2)
    y[:, 0] += x.sum(1)
    last.zero_()
    a, b = table[:, :3] * 2, table[:, 3:5].clone()
    b[:, 0] += a.sum(1)
    assert torch.equal(x.torch(), a) and torch.equal(y.torch(), b) and not last.torch().any()
    x = lazy(table)
    x.add_(1)
    again = lazy(table)  # made after the write, of what the tensor is
    assert torch.equal(again.torch(), table) and torch.equal(x.torch(), table + 1)


def test_a_write_that_reads_what_it_writes_is_refused_unless_it_goes_element_by_element(x):
    i = torch.tensor([1, 2, 3, 0])
    for f in (
        lambda y: y.mul_(y),
        lambda y: y.addcmul_(y, y),
        lambda y: y.copy_(y),
        lambda y: torch.where(y > 0, y, -y, out=y),
        lambda y: y.floor_divide_(y),
    ):
        for rows in (None, 2):
            with koila.micro_batch(rows):
                assert torch.equal(f(lazy(x[:4]) * 1).torch(), f(x[:4] * 1))
    for f in (
        lambda y: y.addmm_(y, y),
        lambda y: torch.mm(y, y, out=y),
        lambda y: y.index_add_(0, i, y),
        lambda y: y.masked_scatter_(y > 0, y),
        lambda y: torch.gather(y, 0, i[None], out=y[:1]),
    ):
        with pytest.raises(RuntimeError, match="depends on the order|single memory location"):
            f(lazy(x[:4]) * 1)


@pytest.mark.parametrize("large", [False, True])
def test_overlapping_arguments_are_refused_whatever_their_size(large):
    """Above a size eager's own check is not tried; ours must then find what overlaps, and nothing
    else."""
    n = (1 << 23) if large else 6
    with torch.no_grad():
        y = lazy(torch.zeros(2, n, dtype=torch.float16)) * 1
        y[:, : n // 2].add_(y[:, n // 2 :])
        y[0].add_(y[1])
        for bad in (
            lambda: y[:, 1:].add_(y[:, :-1]),
            lambda: y[:, 1:].copy_(y[:, :-1]),
            lambda: y[0, ::2].mul_(y[0, : n // 2]),
        ):
            with pytest.raises(RuntimeError, match="memory|overlap|depends on the order"):
                bad()


def test_what_cannot_be_viewed_says_so_at_once(x):
    for make in (lambda: x.view(2, 3, 4) * 1, lambda: lazy(x).view(2, 3, 4) * 1):
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            make()[:, 1:2].view(-1)


# -- foreach


def test_foreach(x):
    with torch.no_grad():
        a, b = [lazy(x) * 1, lazy(x) * 2], [x * 1, x * 2]
        for f in (
            lambda t: torch._foreach_add_(t, 1),
            lambda t: torch._foreach_mul_(t, [2.0, 3.0]),
            lambda t: torch._foreach_addcmul_(t, t, t, 0.5),
            lambda t: torch._foreach_sqrt_(torch._foreach_abs(t)),
            lambda t: torch._foreach_add_(t, [x, x], alpha=2),
            lambda t: torch._foreach_lerp_(t, [x, x], 0.3),
            lambda t: torch._foreach_clamp_min_(t, 0.1),
            lambda t: torch._foreach_maximum_(t, [x, x]),
        ):
            f(a)
            f(b)
        for p, q in zip(a, b):
            assert torch.equal(koila.run(p), q)
            # CUDA's own lerp_ of a list counts no version: autograd would not notice it
            assert p._version == q._version + (x.is_cuda)
        for p, q in zip(torch._foreach_norm(a), torch._foreach_norm(b)):
            # CUDA's norm of a list adds in another order than that of a tensor
            torch.testing.assert_close(koila.run(p), q, rtol=1e-14 if REAL_GPU else 0, atol=0)


def test_foreach_counts_versions_so_that_autograd_notices(x):
    w = torch.ones(4, dtype=x.dtype, requires_grad=True)
    y = lazy(x) * w
    z = y * y
    with torch.no_grad():
        torch._foreach_mul_([y], 2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64],
)
def test_a_list_of_lazy_scalars_becomes_a_tensor(dtype):
    """What loggers do: torch asks each item for its Python value with the dispatcher switched
    off."""
    given = torch.randn(6, 4)

    def scalars(x):
        return [row.sum().to(dtype) for row in x]

    with koila.micro_batch(4):
        for make in (torch.tensor, torch.as_tensor, lambda v: torch.tensor([v, v])):
            expected, got = make(scalars(given)), make(scalars(lazy(given)))
            assert type(got) is torch.Tensor and got.dtype == dtype and torch.equal(expected, got)
        assert torch.equal(
            torch.tensor([[given.max(), 1.0]]), torch.tensor([[lazy(given).max(), 1.0]])
        )

"""Modules and functions that run as they are: their forward once a slice, and compiled ones with
their compiled kernels."""

import copy
import gc
import pickle
import time
import weakref

import pytest
import torch
from conftest import DEVICE
from torch import nn
from torch.nn import functional as F

import koila
from koila import _compile, _core, lazy

B = 12


class Counts(nn.Module):
    """Counts its calls: with a graph, and without."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls = inner, []

    def forward(self, x):
        self.calls.append("graph" if torch.is_grad_enabled() else "none")
        return self.inner(x)


def mlp(hidden=64):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, hidden), nn.GELU(), nn.Linear(hidden, 32), nn.Tanh()
    ).double()


def batch(rows=B):
    torch.manual_seed(1)
    return torch.randn(rows, 32).double(), torch.randn(rows, 32).double()


def gradients(model, step):
    model.zero_grad()
    step().backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_alike(found, expected):
    for f, e in zip(found, expected, strict=True):
        assert (f is None) == (e is None), "a parameter that nothing uses has no gradient"
        if f is not None:
            torch.testing.assert_close(f, e, rtol=1e-12, atol=1e-14)


def test_forward_runs_once_a_slice_where_its_backward_is_in_the_same_loop():
    model = Counts(mlp())
    opaque = koila.opaque(model)
    x, y = batch()
    expected = gradients(model, lambda: F.mse_loss(model(x), y))
    for _ in range(2):
        with koila.micro_batch(4):
            a, b = lazy(x, y)
            loss = F.mse_loss(opaque(a), b)
            model.calls.clear()
            assert_alike(gradients(model, lambda loss=loss: loss), expected)
        assert model.calls == ["graph"] * 3


def test_slices_of_a_module_are_run_without_torchs_dispatcher():
    """It takes a module's parameters apart and puts them together again, for each slice."""
    model = mlp()
    opaque = koila.opaque(model)
    x, y = batch()
    expected = gradients(model, lambda: F.mse_loss(model(x), y))
    with koila.micro_batch(4), torch.autograd.profiler.profile() as profile:
        a, b = lazy(x, y)
        assert_alike(gradients(model, lambda: F.mse_loss(opaque(a), b)), expected)
    assert koila.last_plan().n_micro_batches == 3
    names = [event.name for event in profile.function_events]
    assert names.count("aten::tanh_backward") >= 3, "the profiler sees what the module does"
    assert names.count("koila::opaque_kept") == 1, "once, when it was recorded"
    assert names.count("koila::opaque_backward") == 1


def test_a_loop_that_has_no_backward_runs_the_forward_without_a_graph():
    """A contrastive loss: one encoder runs for its embeddings alone, and again for its backward."""
    model = Counts(mlp())
    opaque = koila.opaque(model)

    def loss(f, x, y):
        scores = F.normalize(f(x), dim=1) @ F.normalize(f(y), dim=1).t()
        return F.cross_entropy(scores, torch.arange(B, device=DEVICE))

    x, y = batch()
    expected = gradients(model, lambda: loss(model, x, y))
    with koila.micro_batch(4):
        lazy_loss = loss(opaque, *lazy(x, y))
        model.calls.clear()
        assert_alike(gradients(model, lambda: lazy_loss), expected)
    # two encoders of three slices have a graph each once; what runs before them has none
    assert model.calls.count("graph") == 6 and model.calls.count("none") > 0


class Grows(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.scale, self.more = mlp(), None, nn.Sequential()

    def forward(self, x):
        out = self.body(x)
        return self.more(out if self.scale is None else out * self.scale)


def test_a_module_that_gets_parameters_between_steps_gets_their_gradients():
    model = Grows()
    opaque = koila.opaque(model)
    x, y = batch()
    width = model(x).shape[1]

    def freeze():
        model.body.requires_grad_(False)

    def scale():
        model.scale = nn.Parameter(torch.rand(width, dtype=x.dtype, device=DEVICE))

    def append():
        model.more.append(nn.Linear(width, width, dtype=x.dtype, device=DEVICE))

    def replace():
        model.more[0] = nn.Linear(width, width, dtype=x.dtype, device=DEVICE)

    def remove():
        model.scale = None

    for change in (list, scale, append, replace, freeze, remove):
        change()
        expected = gradients(model, lambda: F.mse_loss(model(x), y))
        with koila.micro_batch(4):
            for _ in range(2):
                a, b = lazy(x, y)
                assert_alike(gradients(model, lambda: F.mse_loss(opaque(a), b)), expected)


def test_a_second_backward_through_a_retained_graph_runs_the_module_again():
    model = Counts(mlp())
    opaque = koila.opaque(model)
    x, y = batch()
    expected = gradients(model, lambda: F.mse_loss(model(x), y))
    with koila.micro_batch(4):
        a, b = lazy(x, y)
        loss = F.mse_loss(opaque(a), b)
        loss.backward(retain_graph=True)
        model.zero_grad()
        assert_alike(gradients(model, lambda: loss), expected)


def test_a_value_that_is_read_in_the_middle_leaves_the_gradients_as_they_are():
    model = mlp()
    opaque = koila.opaque(model)
    x, y = batch()
    expected = gradients(model, lambda: F.mse_loss(model(x), y))

    def step():
        a, b = lazy(x, y)
        out = opaque(a)
        assert torch.allclose(out.sum().torch(), model(x).sum())
        return F.mse_loss(out, b)

    with koila.micro_batch(4):
        assert_alike(gradients(model, step), expected)


def test_dropout_in_a_slice_is_the_same_forward_and_backward():
    """Its gradient is that of the mask which made its result."""
    drop = koila.opaque(nn.Dropout(0.5))
    x, _ = batch()
    scale = torch.ones((), dtype=x.dtype, device=x.device, requires_grad=True)
    with koila.micro_batch(4):
        out = drop(lazy(x) * scale)
        out.sum().backward()
    assert scale.grad.isfinite()
    w = torch.ones_like(x, requires_grad=True)
    with koila.micro_batch(4):
        made = []
        drop.module.register_forward_hook(lambda m, i, o: made.append(o.detach().clone()))
        drop(lazy(x) * w[:1].expand(1, 32)).sum().backward()
    whole = torch.cat(made[-3:])
    assert torch.allclose(w.grad[0], whole.sum(0))


@pytest.mark.about_the_cpu("predicted bytes are compared with those of the CPU's allocator")
@pytest.mark.parametrize("rows", [2, 4, 12])
def test_what_waits_for_the_backward_is_planned_with_from_the_second_step_on(rows):
    model = mlp(1024)
    opaque = koila.opaque(model)
    x, y = batch()
    for _ in range(3):
        with koila.micro_batch(rows):
            a, b = lazy(x, y)
            F.mse_loss(opaque(a), b).backward()
    plan = koila.last_plan()
    assert abs(plan.predicted_peak_bytes / plan.measured_peak_bytes - 1) <= 0.02


@pytest.mark.about_the_cpu("predicted bytes are compared with those of the CPU's allocator")
@pytest.mark.parametrize("width", [128, 512], ids=["rows prevail", "parameters prevail"])
def test_what_a_backward_frees_while_it_makes_gradients_is_not_counted_beside_them(width):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(6)]
    model = koila.opaque(nn.Sequential(*layers))
    x = torch.randn(1000, width)
    for _ in range(4):
        with koila.micro_batch(300):
            model(lazy(x)).square().mean().backward()
    plan = koila.last_plan()
    assert abs(plan.predicted_peak_bytes / plan.measured_peak_bytes - 1) <= 0.02


@pytest.mark.about_the_cpu("predicted bytes are compared with those of the CPU's allocator")
def test_a_first_step_that_was_planned_with_a_wrong_guess_does_not_spoil_the_second():
    """The guess is what two rows hold in evaluation mode, without the masks of dropout."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Dropout(), nn.GELU()) for _ in range(4)]
    model = koila.opaque(nn.Sequential(*layers))
    x = torch.randn(4000, 64)
    for _ in range(2):
        with koila.micro_batch(1000):
            model(lazy(x)).square().mean().backward()
    plan = koila.last_plan()
    assert abs(plan.predicted_peak_bytes / plan.measured_peak_bytes - 1) <= 0.02


class Product(torch.autograd.Function):
    """x @ w, whose gradient of w lies in memory by columns where so told, as compilers make those
    of convolutions."""

    @staticmethod
    def forward(ctx, x, w, by_columns):
        ctx.save_for_backward(x, w)
        ctx.by_columns = by_columns
        return x @ w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        stride = (1, len(w)) if ctx.by_columns else w.stride()
        to = w.new_empty_strided(w.shape, stride)
        return g @ w.t(), torch.add(x.t() @ g, 0, out=to), None


def test_gradients_in_an_order_of_their_own_are_copied_once_a_step_not_once_a_slice():
    class Model(nn.Module):
        def __init__(self, by_columns):
            super().__init__()
            torch.manual_seed(0)
            self.w, self.by_columns = nn.Parameter(torch.randn(32, 16).double()), by_columns

        def forward(self, x):
            return Product.apply(x, self.w, self.by_columns)

    x, _ = batch()

    def copies(model):
        opaque = koila.opaque(model)
        expected = gradients(model, lambda: model(x).square().sum())
        for _ in range(2):  # learns the order
            with torch.autograd.profiler.profile() as profile, koila.micro_batch(4):
                found = gradients(model, lambda: opaque(lazy(x)).square().sum())
            assert_alike(found, expected)
            assert model.w.grad.stride() == model.w.stride()
        assert koila.last_plan().n_micro_batches == 3
        return sum(e.name == "aten::copy_" for e in profile.function_events)

    assert copies(Model(by_columns=True)) <= copies(Model(by_columns=False)) + 1


def test_a_result_that_the_graph_shares_is_not_overwritten():
    """tanh's backward reads its result, which the step goes on to write in place."""
    model = mlp()
    opaque = koila.opaque(model)
    x, y = batch()
    expected = gradients(model, lambda: F.mse_loss(model(x).mul(2), y))
    for _ in range(3):
        with koila.micro_batch(4):

            def step():
                a, b = lazy(x, y)
                out = opaque(a).clone()
                return F.mse_loss(out.mul_(2), b)

            assert_alike(gradients(model, step), expected)


# ---- compiled modules


class Backend:
    """Of torch.compile: runs the graph as it is, and tells how often it compiled, and on what."""

    def __init__(self):
        self.n_compiled, self.rows = 0, []

    def __call__(self, graph, inputs):
        self.n_compiled += 1

        def run(*args):
            self.rows.append(max(len(a) for a in args if isinstance(a, torch.Tensor) and a.dim()))
            return graph.forward(*args)

        return run


@pytest.fixture
def backend():
    torch._dynamo.reset()
    yield Backend()
    torch._dynamo.reset()


def as_it_is(self, h):
    return h


class Rows(nn.Module):
    """A linear layer; `mix` makes its rows depend on each other, or on their number."""

    def __init__(self, mix=as_it_is):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.mix = nn.Linear(32, 32), mix
        self.norm = nn.BatchNorm1d(32)
        self.register_buffer("seen", torch.zeros(32))
        self.double()

    def forward(self, x):
        return self.mix(self, self.linear(x)).tanh()


def broken(self, h):
    torch._dynamo.graph_break()
    return h * 2


@pytest.mark.parametrize("mix", [lambda self, h: h, broken], ids=["one graph", "graph break"])
@pytest.mark.parametrize("options", [{}, {"dynamic": True}, {"dynamic": False}], ids=str)
@pytest.mark.parametrize("before", [False, True], ids=["new", "used before"])
def test_a_compiled_module_is_compiled_for_its_slices_once(backend, mix, options, before):
    model = Rows(mix)
    x, y = batch()
    expected = gradients(model, lambda: F.mse_loss(model(x), y))
    compiled = torch.compile(model, backend=backend, **options)
    if before:
        gradients(model, lambda: F.mse_loss(compiled(x), y))

    def step():
        a, b = lazy(x, y)
        return F.mse_loss(compiled(a), b)

    n_compiled = []
    for _ in range(3):
        backend.rows.clear()
        with koila.micro_batch(5):  # 5, 5, 2
            assert_alike(gradients(model, step), expected)
        n_compiled.append(backend.n_compiled)
        assert backend.rows and max(backend.rows) <= 32  # a weight has 32
    assert n_compiled[0] == n_compiled[1] == n_compiled[2]
    assert n_compiled[0] <= (3 if mix is broken else 1) * 3  # 12, 5 and 2 rows


def seen(self, h):
    self.seen.add_(h.detach().sum(0))
    return h + self.seen


@pytest.mark.parametrize(
    "mix",
    [
        lambda self, h: h / len(h),
        lambda self, h: h + torch.arange(len(h), device=h.device)[:, None],
        lambda self, h: h - h.mean(0),
        lambda self, h: h * torch.tensor(float(len(h)), device=h.device),
        lambda self, h: h.flip(0),
        lambda self, h: self.norm(h),
        lambda self, h: h.t(),
        lambda self, h: h.square().mean(),
        seen,
    ],
    ids="rows positions mean constant flip norm transposed loss buffer".split(),
)
def test_a_compiled_module_whose_rows_depend_on_each_other_is_recorded_as_it_was_written(
    backend, mix
):
    def loss(f, x, y):
        out = f(x)
        return out.square().mean() + (out * 2 if out.dim() == 0 else (out.sum(1) ** 2).mean())

    found = []
    x, y = batch()
    for compiles in (False, True):
        model = Rows(mix)
        f = torch.compile(model, backend=backend) if compiles else model
        with koila.micro_batch(5):
            got = gradients(model, lambda: loss(f, lazy(x) if compiles else x, y))
        found.append([*got, *model.buffers()])
    assert not backend.rows
    assert_alike(found[1], found[0])


def test_a_compiled_part_of_a_model_is_run_as_it_is(backend):
    model = nn.Sequential(nn.Linear(32, 32), Rows(), nn.Linear(32, 32)).double()
    x, y = batch()
    expected = gradients(model, lambda: F.mse_loss(model(x), y))
    model[1] = torch.compile(model[1], backend=backend, fullgraph=True)
    with koila.micro_batch(5):
        assert_alike(gradients(model, lambda: F.mse_loss(model(lazy(x)), y)), expected)
    assert backend.rows


def test_compiled_functions_are_recorded_as_they_were_written(backend):
    model = Rows()
    x, y = batch()
    expected = gradients(model, lambda: F.mse_loss(model(x).sin(), y))
    sine = torch.compile(torch.sin, backend=backend)
    for _ in range(2):
        F.mse_loss(sine(model(x)), y)  # compiled on plain tensors before
        backend.rows.clear()
        with koila.micro_batch(5):
            assert_alike(gradients(model, lambda: F.mse_loss(sine(model(lazy(x))), y)), expected)
        assert not backend.rows


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_module_that_compiled_itself_runs_on_slices_from_its_second_lazy_call_on(
    backend, fullgraph
):
    model = nn.Sequential(nn.Linear(32, 32), Rows(), nn.Linear(32, 32)).double()
    x, y = batch()
    expected = gradients(model, lambda: F.mse_loss(model(x), y))
    model[1].compile(backend=backend, fullgraph=fullgraph)
    n_compiled = []
    for i in range(4):
        F.mse_loss(model(x), y)  # plain calls in between are torch's own
        backend.rows.clear()
        with koila.micro_batch(5):
            assert_alike(gradients(model, lambda: F.mse_loss(model(lazy(x)), y)), expected)
        assert bool(backend.rows) == (i > 0)
        n_compiled.append(backend.n_compiled)
    assert n_compiled[1] == n_compiled[2] == n_compiled[3]


@pytest.fixture
def ranks(tmp_path):
    """A process group of this process. Torch joins gloo's threads with the GIL held, and one of
    them may still wait for the GIL, to let go of the last collective's tensors: so they rest
    before."""
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/r", rank=0, world_size=1)
    yield
    time.sleep(0.2)
    torch.distributed.destroy_process_group()


def test_a_compiled_module_inside_distributed_data_parallel_runs_on_slices(backend, ranks):
    model = Rows()
    del model.norm  # DistributedDataParallel asks for parameters that are used
    x, y = batch()
    expected = gradients(model, lambda: F.mse_loss(model(x), y))
    parallel = nn.parallel.DistributedDataParallel(torch.compile(model, backend=backend))
    reduced = []

    def reduce(state, bucket):
        reduced.append(bucket.buffer().numel())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    parallel.register_comm_hook(None, reduce)
    for _ in range(2):
        backend.rows.clear()
        with koila.micro_batch(5):
            step = gradients(model, lambda: F.mse_loss(parallel(lazy(x)), y))
        assert_alike(step, expected)
        assert backend.rows
    assert len(reduced) == 2, "once a step, not once a slice"


@pytest.mark.parametrize("by_itself", [False, True])
def test_a_compiled_module_is_freed_and_copied_like_another(backend, by_itself):
    def step(model):
        x, y = batch()
        with koila.micro_batch(5):
            return gradients(model, lambda: F.mse_loss(model(lazy(x)), y))

    def alive():
        model = Rows()
        compiled = model if by_itself else torch.compile(model, backend=backend)
        if by_itself:
            model.compile(backend=backend)
        for _ in range(2):
            expected = step(compiled)
        assert_alike(step(copy.deepcopy(compiled)), expected)
        assert_alike(pickle.loads(pickle.dumps(model)).parameters(), model.parameters())
        return weakref.ref(model), weakref.ref(compiled)

    made = alive()
    torch._dynamo.reset()
    gc.collect()
    assert [r() for r in made] == [None, None]


def test_evaluation_mode_and_no_grad_run_a_compiled_module_too(backend):
    model = Rows(lambda self, h: self.norm(h)).eval()
    compiled = torch.compile(model, backend=backend)
    x, _ = batch()
    with torch.no_grad(), koila.micro_batch(5):
        torch.testing.assert_close(koila.run(compiled(lazy(x))), model(x), rtol=1e-12, atol=0)
    assert backend.rows


# ---- what cannot run on slices as it is: its step's loops are compiled


@pytest.fixture
def loops(monkeypatch):
    """Counts how often compiled loops ran. Inductor compiles nothing here."""

    class Loops:
        n_run = 0

    def run(graph, given):
        Loops.n_run += 1
        return graph(*given)

    _core.forget()
    torch._dynamo.reset()
    monkeypatch.setattr(
        "torch._inductor.compile_fx.compile_fx_inner",
        lambda graph, inputs: lambda given: run(graph, given),
    )
    yield Loops
    torch._dynamo.reset()


def loss_of(out, y):
    return F.cross_entropy(out, y.argmax(1), ignore_index=3) + F.mse_loss(out, y)


class WithLoss(nn.Module):
    """As a model of Hugging Face that is given labels."""

    def __init__(self):
        super().__init__()
        self.model = mlp()

    def forward(self, inputs, labels=None):
        out = self.model(inputs)
        return {"loss": loss_of(out, labels), "logits": out}


def in_a_function(compile, model, x, y):
    return compile(loss_of)(model.model(x), y)


def in_a_closure(compile, model, x, y):
    out = model.model(x)
    return compile(lambda: loss_of(out, y))()


def in_a_step(compile, model, x, y):
    return compile(lambda x, y: loss_of(model.model(x), y))(x, y)


def in_a_module(compile, model, x, y):
    return compile(model)(x, labels=y)["loss"]


def around_ddp(compile, model, x, y):
    return compile(nn.parallel.DistributedDataParallel(model))(x, labels=y)["loss"]


@pytest.mark.about_the_cpu("loops are compiled there alone")
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("way", [in_a_function, in_a_step, in_a_module, around_ddp])
def test_a_loss_inside_what_torch_compiled_runs_compiled_on_slices(ranks, loops, way, fullgraph):
    model, kept = WithLoss(), {}
    x, y = batch(13)

    def compiled(f):  # once, as programs do
        return kept.setdefault("f", torch.compile(f, fullgraph=fullgraph))

    expected = gradients(model, lambda: way(lambda f: f, model, x, y))
    for n in range(4):
        loops.n_run = 0
        with koila.micro_batch(4):
            a, b = lazy(x, y)
            assert_alike(gradients(model, lambda: way(compiled, model, a, b)), expected)
        assert _compile.wait(60)
        assert (loops.n_run > 0) == all(loop.compiled for loop in koila.last_plan().loops)
        assert bool(loops.n_run) == (n >= 2), "from the third step on, in each full slice"
    n_loops = len(koila.last_plan().loops)
    assert loops.n_run == 3 * n_loops
    with koila.micro_batch(4):  # the same step, which nobody compiled
        a, b = lazy(x, y)
        assert_alike(gradients(model, lambda: way(lambda f: f, model, a, b)), expected)
    assert loops.n_run == 3 * n_loops


@pytest.mark.about_the_cpu("loops are compiled there alone")
def test_a_compiled_closure_runs_compiled_on_slices(loops):
    model = WithLoss()
    x, y = batch(13)
    expected = gradients(model, lambda: in_a_closure(lambda f: f, model, x, y))
    for _ in range(3):
        with koila.micro_batch(4):
            a, b = lazy(x, y)
            step = gradients(model, lambda a=a, b=b: in_a_closure(torch.compile, model, a, b))
            assert_alike(step, expected)
        assert _compile.wait(60)
    assert loops.n_run


@pytest.mark.about_the_cpu("loops are compiled there alone")
def test_loops_are_not_compiled_for_code_that_another_backend_compiled(backend, loops):
    model = WithLoss()
    x, y = batch(13)
    f = torch.compile(model, backend=backend)
    for _ in range(4):
        with koila.micro_batch(4):
            a, b = lazy(x, y)
            f(a, labels=b)["loss"].backward()
        assert _compile.wait(60)
    assert not loops.n_run and not backend.rows


@pytest.mark.about_the_cpu("Inductor's kernels for a GPU need Triton")
@pytest.mark.usefixtures("inductor")
def test_inductor_compiles_the_loops_of_a_step_whose_loss_torch_compiled():
    """Compared with the compiled module itself, on the whole batch."""
    torch._dynamo.reset()
    model = WithLoss()
    x, y = batch(13)
    compiled = torch.compile(model)
    expected = gradients(model, lambda: compiled(x, labels=y)["loss"])
    for _ in range(3):
        with koila.micro_batch(4):
            a, b = lazy(x, y)
            assert_alike(gradients(model, lambda a=a, b=b: compiled(a, labels=b)["loss"]), expected)
        assert _compile.wait(300)
    assert all(loop.compiled for loop in koila.last_plan().loops)
    torch._dynamo.reset()


@pytest.mark.about_the_cpu("Inductor's kernels for a GPU need Triton")
@pytest.mark.usefixtures("inductor")
def test_inductors_kernels_run_on_slices_and_their_memory_is_predicted():
    torch._dynamo.reset()
    model = mlp(1024)
    x, y = batch()
    expected = gradients(model, lambda: F.mse_loss(model(x), y))
    compiled = torch.compile(model)

    def step():
        a, b = lazy(x, y)
        return F.mse_loss(compiled(a), b)

    for _ in range(3):
        with koila.micro_batch(4):
            assert_alike(gradients(model, step), expected)
    plan = koila.last_plan()
    assert plan.n_micro_batches == 3
    assert abs(plan.predicted_peak_bytes / plan.measured_peak_bytes - 1) <= 0.02
    torch._dynamo.reset()


def scores(loss):
    """Such a loss, of classes that depend on the rows."""

    def of(out, y):
        return loss(out[:, :8], y.abs().argmax(1) % 8)

    return of


def sums_of_rows(out, y):
    return F.cross_entropy(out, y, reduction="none").sum() / 100


LOSSES = {
    "a function": lambda f: scores(f(lambda out, y: F.cross_entropy(out, y))),
    "no label": lambda f: scores(f(lambda out, y: F.cross_entropy(out, y, ignore_index=3))),
    "rows": lambda f: scores(f(sums_of_rows)),
    "a module": lambda f: scores(f(nn.CrossEntropyLoss())),
    "weights": lambda f: scores(f(nn.CrossEntropyLoss(torch.arange(1.0, 9).double()))),
    "a sum": lambda f: scores(f(nn.CrossEntropyLoss(reduction="sum"))),
    "squares": lambda f: f(nn.MSELoss()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_compiled_loss_beside_a_compiled_module_is_that_of_all_rows(name):
    """Where the last slice is a smaller one too. The module's forward runs once a slice."""
    model = mlp()
    compiled = torch.compile(model, backend="eager")
    plain, loss = (
        LOSSES[name](lambda f: f),
        LOSSES[name](lambda f: torch.compile(f, backend="eager")),
    )
    for rows in (12, 10):
        x, y = batch(rows)
        expected = gradients(model, lambda x=x, y=y: plain(model(x), y))
        for _ in range(2):
            with koila.micro_batch(4):
                a, b = lazy(x, y)
                assert_alike(gradients(model, lambda a=a, b=b: loss(compiled(a), b)), expected)
            plan = koila.last_plan()
            assert plan.loops[-1].n_slices == 3 and plan.replay_ratio < 1.1, "labels alone"

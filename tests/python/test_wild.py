"""What real programs do to a lazy tensor: each is right or raises the contract's error; never a
crash, never a wrong number."""

import collections
import copy
import dataclasses
import pickle
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers import compare_programs, model_state, plain, run_python
from torch import nn
from torch.nn import functional as F
from zoo import B

import koila
from koila import _statistics, lazy

D = torch.float64


@pytest.fixture(autouse=True)
def _sliced():
    with koila.micro_batch(4):
        yield


def net():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def xy(n=B):
    return torch.randn(n, 5, dtype=D), torch.randint(0, 4, (n,))


def check(body, tol=1e-12, split=False, **kw):
    """body(model, x, y, wrap) -> dict; eager ≡ lazy for it and for what it leaves in the model."""

    def program(wrap):
        model = net()
        x, y = wrap(*xy())
        return {
            "value:" + k: plain(v) for k, v in (body(model, x, y, wrap) or {}).items()
        } | model_state(model)

    compare_programs(program, B, tol=tol, split=split, **kw)


def survives(code):
    """In a fresh process, so that a crash is a failed test and not a dead session. Prints 'right'
    or the contract's error."""
    p = run_python(
        "import torch, koila\nfrom koila import lazy\nfrom torch import nn\nD = torch.float64\n"
        + code,
        check=False,
    )
    assert p.returncode in (0, 1), f"crashed with {p.returncode}\n{p.stderr}"
    if p.returncode == 1:
        assert "koila" in p.stderr.splitlines()[-1] and "Error" in p.stderr.splitlines()[-1], (
            p.stderr
        )
    return p.stdout


# ---- 1. doors that bypass the dispatcher


def test_1_real_data_set_to_a_lazy():
    survives("""
real, x = torch.zeros(6, 2), torch.randn(6, 2)
with koila.micro_batch(4):
    l = lazy(x)
    real.data = l * 2
    assert torch.equal(real, x * 2), real
    assert type(real) is torch.Tensor
""")


def test_1_moving_average_through_data():
    def body(model, x, y, wrap):
        centre = nn.Parameter(torch.zeros(4, dtype=D), requires_grad=False)
        h = model(x)
        centre.data = 0.9 * centre.data + 0.1 * h.detach().mean(0)
        centre.data.mul_(0.5)
        loss = F.cross_entropy(h, y) + (h.mean(0) * centre).sum()
        loss.backward()
        return {"loss": loss, "centre": centre}

    check(body)


def test_1_lazy_data_set_to_a_real():
    survives("""
x, z = torch.randn(6, 2), torch.randn(6, 2)
l = lazy(x) * 1
l.data = z
assert torch.equal(koila.run(l), z)
assert torch.equal(koila.run(l + 1), z + 1)
""")


def test_1_grad_set_to_a_lazy_is_plain_for_who_reads_it():
    def body(model, x, y, wrap):
        p = model[2].bias
        p.grad = model(x).detach().sum(0) * 0.1
        assert not isinstance(p.grad, koila.LazyTensor) or torch.is_tensor(koila.run(p.grad))
        torch.optim.SGD([p], lr=0.5).step()
        return {"p": p}

    check(body)


def test_1_swap_tensors_with_a_lazy():
    survives("""
real, x = torch.zeros(6, 2), torch.randn(6, 2)
l = lazy(x) * 2
try:
    torch.utils.swap_tensors(real, l)
except RuntimeError:  # koila's refusal, or torch's own
    assert torch.equal(real, torch.zeros(6, 2)) and torch.equal(koila.run(l), x * 2)
else:
    assert torch.equal(koila.run(real), x * 2) and torch.equal(koila.run(l), torch.zeros(6, 2))
""")


DOORS = [
    "l.data_ptr()",
    "l.untyped_storage().data_ptr()",
    "l.share_memory_()",
    "l.__dlpack__()",
    "torch.from_dlpack(l)",
    "l.apply_(lambda v: v + 1)",
    "l.map_(l, lambda a, b: a)",
    "l.new_tensor([1.0])",
    "l.new(2)",
    "l.storage()",
    "l.resize_(2, 2)",
    "l.set_(torch.zeros(2))",
    "l.is_shared()",
    "l.pin_memory()",
    "l.numpy()",
    "l.__array__()",
    "memoryview(l.numpy())",
    "l.__cuda_array_interface__",
    "l.type(torch.float64)",
    "l.data.fill_(3)",
    "l.to_sparse()",
    "l.to_mkldnn()",
    "l.is_coalesced()",
    "torch._C._to_dlpack(l)",
    "l.storage_offset()",
    "l.element_size()",
    "l._version",
    "torch.quantize_per_tensor(l, 0.1, 0, torch.qint8)",
    "l.names",
    "l.rename('a', 'b')",
    "l.numpy(force=True)",
    "l.__reduce_ex__(2)",
]


def test_1_no_door_crashes():
    """Each in a forked child: a crash of one is seen as its exit status, and the others still
    run."""
    out = run_python(
        f"""
import os, sys, torch, koila
torch.set_num_threads(1)
koila.run(koila.lazy(torch.randn(2, 2)) + 1)
for e in {DOORS!r}:
    pid = os.fork()
    if pid == 0:
        status = 9
        try:
            x = torch.randn(6, 2)
            with koila.micro_batch(4):
                l = koila.lazy(x) * 2
                try:
                    eval(e)
                except (koila.KoilaError, RuntimeError, TypeError, AttributeError):
                    pass
                except (NotImplementedError, ValueError, BufferError):
                    pass
                l = koila.lazy(x) * 2
                status = 0 if torch.equal(koila.run(l + 1), x * 2 + 1) else 8
        except BaseException as error:
            print(e, type(error).__name__, error, file=sys.stderr, flush=True)
        finally:
            os._exit(status)
    print(e, "->", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
print("all tried")
"""
    )
    lines = out.splitlines()
    assert lines[-1] == "all tried" and len(lines) == len(DOORS) + 1
    assert not [line for line in lines[:-1] if not line.endswith("-> 0")]


# ---- 2. as_subclass


def test_2_as_subclass_keeps_values_and_gradients():
    class Mine(torch.Tensor):
        pass

    def body(model, x, y, wrap):
        h = model(x).as_subclass(Mine)
        loss = F.cross_entropy(h.as_subclass(torch.Tensor) if type(h) is Mine else h, y)
        loss.backward()
        return {"loss": loss.as_subclass(torch.Tensor) if type(loss) is Mine else loss}

    check(body)


# ---- 3. inference mode delivers composite operators whole


@pytest.mark.parametrize(
    "f",
    [
        lambda m, x, y: F.linear(x, m[0].weight, m[0].bias),
        lambda m, x, y: torch.matmul(x.reshape(-1, 1, 5), m[0].weight.T).squeeze(1),
        lambda m, x, y: torch.einsum("bi,oi->bo", x, m[0].weight),
        lambda m, x, y: torch.stack(m(x).chunk(2, 1), 0).sum(0),
        lambda m, x, y: F.cross_entropy(m(x), y, reduction="none"),
        lambda m, x, y: m(x).to(torch.float32).type_as(x).reshape(-1, 2, 2).flatten(1),
    ],
)
def test_3_composites_in_inference_mode_are_sliced(f):
    def body(model, x, y, wrap):
        with torch.inference_mode():
            return {"out": f(model, x, y)}

    check(body, split=True, gather_bytes_per_row=16)


# ---- 4. Python values in the middle


def test_4_values_in_the_middle():
    def body(model, x, y, wrap):
        h = model(x)
        k = torch.tensor([10, 20, 30, 40])
        picked = [10, 20, 30, 40][y.max()]
        assert picked == int(k[int(y.max())])
        if x.min() < -5:
            h = h * 2
        assert not (y >= 0).logical_not().any() and bool((y >= 0).all())
        best = h.detach().argmax(1).cpu().numpy()
        counts = torch.bincount(y, minlength=4)
        rows = torch.unique(y.reshape(-1, 2), dim=0)
        assert h.tolist()[0][0] == h[0, 0].item() and torch.equal(h, h)
        loss = F.cross_entropy(h, y) * (1 + best.sum() * 0.01)
        loss.backward()
        return {"loss": loss, "counts": counts, "rows": rows, "range": torch.arange(int(y.sum()))}

    check(body)


def test_4_a_conjugate_read_in_the_middle():
    """`.item()` and its like run inside `__torch_dispatch__`, where torch ignores the flag that
    makes a view a conjugate, or negative, one."""

    def body(model, x, y, wrap):
        f = torch.fft.rfft(model(x), dim=1)
        power = f * f.conj()
        lag = torch.topk(
            torch.fft.irfft(power * torch.fft.rfft(x[:, :4], dim=1).conj(), n=4, dim=1).mean(0), 2
        )[1]
        v = [f.conj()[0, 1].item(), power[1, 1].item(), f.conj().imag[2, 1].item()]
        at = torch.nonzero(f.conj().imag[:, 1] > -f.real[:, 0].abs())[:, 0]
        loss = (model(x)[:, lag[0]] * v[0].imag + v[1].real + v[2]).sum() + power.real.mean()
        loss.backward()
        return {"loss": loss, "lag": lag, "values": torch.tensor(v), "at": at}

    check(body)


@pytest.mark.parametrize(
    "how",
    [
        "z.conj().resolve_conj()",
        "torch.resolve_conj(z.mT.conj()).mT",
        "z.conj().conj().resolve_conj()",
        "z.conj()",
        "z.resolve_conj()",
    ],
)
@pytest.mark.parametrize("write", ["c.mul_(2)", "z.mul_(2j)"])
def test_4_a_resolved_conjugate_is_a_copy(how, write):
    """Torch copies what is flagged as a conjugate and returns everything else as it is."""

    def body(model, x, y, wrap):
        h = model(x)
        z = torch.complex(h, h * 2)
        c = eval(how, {"z": z, "torch": torch})
        flags = [
            z.is_conj(),
            z.conj().is_conj(),
            torch.is_conj(z.conj()[:, 0]),
            c.is_conj(),
            z.conj().real.is_conj(),
            z.conj().conj().is_conj(),
        ]
        eval(write, {"z": z, "c": c})
        loss = (z.real + z.imag * 3 + c.real.sin()).square().mean() + torch.view_as_real(
            c.resolve_conj()
        ).sum()
        loss.backward()
        return {"loss": loss, "flags": torch.tensor(flags)}

    check(body)


@pytest.mark.parametrize(
    "write",
    ["z.conj().imag.mul_(2)", "z.conj()[:1].real.zero_()", "torch.view_as_real(z.mH).add_(1)"],
)
def test_4_writing_the_parts_of_a_conjugate_is_refused(write):
    h = lazy(torch.randn(6, 3), batch=0) * 2
    z = torch.complex(h, h)
    if "view_as_real" in write:  # plain torch refuses as well
        with pytest.raises(RuntimeError):
            eval(write, {"z": koila.run(z), "torch": torch})
    with pytest.raises(koila.UnsupportedError, match="conjugate view"):
        eval(write, {"z": z, "torch": torch})
    assert torch.equal(koila.run(z.conj().imag), -koila.run(h))  # reading is fine


def test_4_python_protocols():
    x = torch.arange(12.0).reshape(6, 2)
    h = lazy(x) * 2
    e = x * 2
    assert len(h) == 6 and h.shape == (6, 2) and [tuple(r.shape) for r in h] == [(2,)] * 6
    assert h[0, 1].item() == 2.0 and float(h[0, 1]) == 2.0 and int(h[2, 0]) == 8 and bool(h[0, 1])
    assert str(e)[7:-1] in str(h) and "2." in repr(h) and f"{h[0, 1]:.1f}" == "2.0"
    assert (
        np.array_equal(h.numpy(force=True), e.numpy(force=True))
        and (h.is_cuda or np.array_equal(np.asarray(h), np.asarray(e)))
        and h.tolist() == e.tolist()
    )
    assert torch.equal(pickle.loads(pickle.dumps(h)), e) and torch.equal(
        koila.run(copy.deepcopy(h)), e
    )
    assert (
        isinstance(h, torch.Tensor)
        and torch.is_tensor(h)
        and h.dtype == torch.float32
        and h.device == x.device
    )
    assert type(h.torch()) is torch.Tensor and torch.equal(h.torch(), e) and torch.equal(h.run(), e)
    assert h[0].max() in e and (h > 3)[1, 0]
    array = h.numpy(force=True) if h.is_cuda else h.numpy()
    assert np.allclose(np.ones((6, 2)) + array, (e + 1).cpu())


def test_4_torch_save_gives_a_plain_tensor(tmp_path):
    x = torch.randn(6, 2)
    torch.save({"h": lazy(x) * 2}, tmp_path / "h.pt")
    loaded = torch.load(tmp_path / "h.pt", weights_only=False)["h"]
    assert torch.equal(koila.run(loaded), x * 2)


# ---- 5. a plain loss over lazy values


def test_5_a_loss_added_up_in_a_real_zero():
    def program(wrap):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        out = {}
        for k in range(3):
            x, y = wrap(*xy())
            total = torch.zeros(1, dtype=D)
            total += F.cross_entropy(model(x), y)
            total += 0.1 * model[0](x).square().mean()
            optimizer.zero_grad()
            total.backward()
            for p in model.parameters():
                assert type(p.grad) is torch.Tensor
            optimizer.step()
            out[f"loss:{k}"] = plain(total)
        return out | model_state(model)

    compare_programs(program, B, tol=1e-11, split=False)


def test_5_a_second_loss_added_to_a_real_zero_is_still_cut():
    """The first `+=` makes small values that are held concrete: the rows that the second reads are
    all known by then."""

    def program(wrap):
        model = net()
        x, y = wrap(*xy())
        total, rows, labels = torch.zeros((), dtype=D), x.sin().reshape(-1, 5), y.view(-1) * 1
        for k in range(2):
            total += F.cross_entropy(model(rows) * (k + 1), labels)
        total.backward()
        return {"value:total": plain(total), **model_state(model)}

    compare_programs(program, B, slices=("even", "one"))
    assert koila.last_plan().loops and koila.last_plan().loops[-1].n_slices == B


def test_5_a_step_that_cannot_be_cut_says_that_it_runs_whole():
    """All that the second loss reads are a few ids, known by then, which lie time first in their
    only dimension: nothing is left to cut."""

    def program(wrap):
        table = torch.nn.Embedding(5, 3, dtype=D)
        y = wrap(torch.randint(0, 5, (B, 9, 2)))
        total, ids = torch.zeros((), dtype=D), y[..., 0].t().contiguous().view(-1)
        for k in range(2):
            total += (table(ids) * (k + 1)).sin().mean()
        total.backward()
        return {"value:total": plain(total), **model_state(table)}

    compare_programs(program, B, split=False, slices=("even", "one"))
    plan = koila.last_plan()
    assert (plan.n_micro_batches, plan.micro_batch, plan.batch, plan.loops) == (
        1,
        B,
        B,
        [],
    ) and "whole" in str(plan)


def test_5_a_batch_that_was_looked_at_is_still_cut():
    def body(model, x, y, wrap):
        x = x / 2
        seen = x.numpy(force=True).sum()
        loss = model(x).square().mean()
        loss.backward()
        return {"loss": loss, "seen": torch.tensor(seen)}

    check(body, split=True, slices=("even", "one"))
    assert koila.last_plan().loops and koila.last_plan().loops[-1].n_slices == B


@pytest.mark.parametrize(
    "start",
    [
        "torch.zeros(())",
        "torch.tensor(0.0)",
        "torch.zeros_like(w.sum())",
        "torch.empty(1).zero_()",
        "0",
    ],
)
def test_5_other_real_starts(start):
    def body(model, x, y, wrap):
        w = model[0].weight.detach()
        total = eval(start, {"torch": torch, "w": w})
        for i in range(3):
            total = total + F.cross_entropy(model(x), y) * i
        if isinstance(total, torch.Tensor):
            total = total.sum()
        total.backward()
        return {"total": total.double()}

    check(body)


# ---- 6. cached-gradient losses: a hook that runs a step of its own


def test_6_reentrant_backward_in_a_hook():
    def body(model, x, y, wrap):
        with torch.no_grad():
            reps = model[0](x)
        reps = reps.detach().requires_grad_()
        loss = F.cross_entropy(model[2](model[1](reps)), y)
        (cache,) = torch.autograd.grad(loss, reps)

        def again(grad):
            with torch.enable_grad():
                surrogate = (model[0](x) * cache).sum()
            surrogate.backward()

        handle = reps.register_hook(again)
        reps.backward(torch.ones_like(reps))
        handle.remove()
        return {"loss": loss, "cache": cache}

    check(body)


# ---- 7. autograd inside autograd


class Adjoint(torch.autograd.Function):
    """Gradients of parameters packed in one vector, by autograd.grad inside backward: what adjoint
    solvers do."""

    @staticmethod
    def forward(ctx, x, flat, f):
        ctx.f = f
        with torch.no_grad():
            out = f(x, flat)
        ctx.save_for_backward(x, flat)
        return out

    @staticmethod
    def backward(ctx, g):
        x, flat = ctx.saved_tensors
        with torch.enable_grad():
            x, flat = x.detach().requires_grad_(), flat.detach().requires_grad_()
            out = ctx.f(x, flat)
            gx, gf = torch.autograd.grad(out, (x, flat), g, allow_unused=True)
        return gx, gf, None


def test_7_grad_inside_a_function_s_backward():
    def body(model, x, y, wrap):
        flat = torch.cat([model[0].weight.flatten(), model[0].bias])

        def f(v, w):
            return (v @ w[:40].view(8, 5).T + w[40:]).tanh()

        h = Adjoint.apply(x.requires_grad_(), flat, f)
        loss = F.cross_entropy(model[2](h), y)
        loss.backward()
        return {"loss": loss, "x": x.grad}

    check(body)


# ---- 8. TorchScript; fill_diagonal_


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.l(x)
        out[:, 0] = out[:, 1] * 2
        out[:, 2:].mul_(0.5)
        return out


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_8_a_scripted_module_that_writes_views_of_its_output():
    def program(wrap):
        torch.manual_seed(7)
        model = torch.jit.script(Scripted().double())
        x, y = wrap(*xy())
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return {"loss:l": plain(loss)} | model_state(model)

    compare_programs(program, B, split=False)


def test_8_fill_diagonal_and_as_strided():
    def body(model, x, y, wrap):
        h = model(x)
        s = torch.mm(h, h.t()).fill_diagonal_(-1e9)
        d = torch.as_strided(h, (B,), (4,), 1)
        loss = F.cross_entropy(s, (torch.arange(B) + 1) % B) + d.sum()
        loss.backward()
        return {"loss": loss}

    try:
        check(body)
    except koila.UnsupportedError:
        pass


# ---- 9. values that outlive the step


@pytest.mark.parametrize("part", ["gather", "select", "view", "chunk"])
@pytest.mark.parametrize("grad", [False, True])
def test_9_a_view_of_what_is_gone_is_used_in_every_later_step(part, grad):
    """PPO's old log-probabilities: a view, whose base no variable holds, compared with in step
    after step."""

    def body(model, x, y, wrap):
        def of(h):
            h = h.log_softmax(-1)
            return {
                "gather": h.gather(1, y[:, None]).squeeze(1),
                "select": h[:, 0],
                "view": h.view(-1),
                "chunk": torch.stack(h.chunk(2, 1)).sum(0),
            }[part]

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.set_grad_enabled(grad):
            old = of(model(x)).detach()
            halves = model(x).detach().chunk(2, 1)
        for _ in range(3):
            ratio = (of(model(x)) - old).exp()
            loss = (
                -ratio.clamp(0.8, 1.2).mean()
                + (model(x)[:, :2] - halves[0] * halves[1]).square().mean()
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return {"loss": loss, "old": old, "half": halves[1]}

    check(body, tol=1e-11)


def test_9_kept_losses_and_logits_are_the_ones_of_their_step():
    def program(wrap):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        losses, predictions, total = [], [], 0
        for k in range(3):
            x, y = wrap(*xy())
            logits = model(x)
            loss = F.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            predictions.append(logits)
            total += loss.detach()
        out = {f"loss:{k}": plain(v) for k, v in enumerate(losses)}
        out |= {f"value:soft {k}": plain(v.detach().softmax(1)) for k, v in enumerate(predictions)}
        out["value:total"] = plain(total)
        out["value:all"] = plain(torch.cat([p.detach() for p in predictions]))
        return out | model_state(model)

    compare_programs(program, B, tol=1e-11, split=False)


def test_9_a_value_never_saved_is_stale_not_wrong():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x0, y0 = xy()
    x, y = lazy(x0, y0)
    other = model(x)  # not part of the step: made concrete only when asked for
    expected = model(x0).detach()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    try:
        assert torch.allclose(koila.run(other), expected)
    except koila.StaleValueError as e:
        assert "test_wild.py" in str(e) or "addmm" in str(e)


# ---- 10. state kept in real tensors


def test_10_running_state_is_updated_exactly_once():
    def program(wrap):
        model = net()
        running = torch.zeros(4, dtype=D)
        codebook = torch.ones(4, 4, dtype=D)
        bank = torch.zeros(10, 4, dtype=D)
        bins = torch.zeros(4, dtype=D)
        total = torch.zeros((), dtype=D)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for k in range(3):
            x, y = wrap(*xy())
            h = model(x)
            with torch.no_grad():
                running.mul_(0.9).add_(h.mean(0), alpha=0.1)
                codebook.lerp_(F.one_hot(y, 4).double().T @ h, 0.25)
                bank.index_put_((torch.arange(B) + k,), h.detach())
                bins.scatter_add_(0, y, torch.ones_like(y, dtype=D))
                total += (h.argmax(1) == y).sum()
            loss = F.cross_entropy(h - running, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        state = dict(running=running, codebook=codebook, bank=bank, bins=bins, total=total)
        assert all(type(t) is torch.Tensor for t in state.values())
        return {"value:" + k: plain(v) for k, v in state.items()} | model_state(model)

    compare_programs(program, B, tol=1e-11, split=False)


class Activated(nn.BatchNorm1d):
    """A batch norm with a forward of its own, as in timm."""

    def forward(self, x):
        mean, var = self.running_mean, self.running_var
        return F.relu(F.batch_norm(x, mean, var, self.weight, self.bias, self.training, 0.2))


def normalized(norm=nn.BatchNorm1d):
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 8), norm(8), nn.Linear(8, 4)).double()


def a_plain_batch(model, x, other):
    return {"other": model(other).square().mean()}


def a_plain_batch_in_evaluation(model, x, other):
    model.eval()
    with torch.no_grad():
        found = model(other)
    model.train()
    return {"other": found}


def a_plain_batch_and_a_lazy_one(model, x, other):
    return {"other": model(other).square().mean(), "again": model(-x).square().mean()}


def their_values(model, x, other):
    return {"mean": model[1].running_mean.clone(), "var": getattr(model[1], "running_var") * 1}


def their_state_dict(model, x, other):
    return {k: v.clone() for k, v in model.state_dict().items()}


def a_copy(model, x, other):
    return dict(copy.deepcopy(model).named_buffers())


def a_pickle(model, x, other):
    return dict(pickle.loads(pickle.dumps(model)).named_buffers())


def a_moving_average_of_buffers(model, x, other):
    average = [b.clone() * 0 for b in model.buffers()]
    for a, b in zip(average, model.buffers(), strict=True):
        a.add_(b)
    return {str(i): a for i, a in enumerate(average)}


def a_write(model, x, other):
    mean = model[1].running_mean = model[1].running_mean * 2
    return {"mean": mean}


READERS = [
    a_plain_batch,
    a_plain_batch_in_evaluation,
    a_plain_batch_and_a_lazy_one,
    their_values,
    their_state_dict,
    a_copy,
    a_pickle,
    a_moving_average_of_buffers,
    a_write,
]


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, Activated])
@pytest.mark.parametrize("reader", READERS, ids=lambda f: f.__name__)
def test_10_running_statistics_read_before_backward_are_eager_s(reader, norm):
    def program(wrap):
        model, found = normalized(norm), {}
        for k in range(2):
            (x, _), other = wrap(*xy()), xy()[0]
            loss = model(x).square().mean()
            read = reader(model, x, other)
            (loss + sum(v for v in read.values() if v.dim() == 0 and v.requires_grad)).backward()
            found |= {f"value:{k} {name}": plain(v) for name, v in read.items()}
        return found | {"loss:loss": plain(loss)} | model_state(model)

    compare_programs(program, B, tol=1e-12, split=False)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, Activated])
@pytest.mark.parametrize("functional", [False, True])
def test_10_a_step_reads_its_own_statistics_at_no_cost(norm, functional, monkeypatch):
    model, computed = normalized(norm), []
    monkeypatch.setattr(_statistics, "_compute", lambda *_: computed.append(1))
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    x = lazy(xy()[0])
    for _ in range(2):
        out = torch.func.functional_call(model, state, (x,)) if functional else model(x)
        loss = (out * model(-x)).square().mean()
        assert _statistics._guarded
        loss.backward()
        assert not computed and type(model[1].__dict__["_buffers"]) is dict


def test_10_buffers_that_come_and_go_in_a_step_are_those_of_the_module():
    norm = nn.BatchNorm1d(5)
    out = norm(lazy(torch.randn(8, 5)))
    mine = torch.ones(2)
    norm.register_buffer("mine", mine)
    norm._buffers.update(more=mine)
    assert norm._buffers.pop("mine") is mine and "mine" not in norm._buffers
    out.sum().backward()
    assert type(norm._buffers) is dict and "mine" not in norm._buffers and norm.more is mine


def test_10_statistics_that_cannot_be_computed_any_more_say_so():
    model = normalized()
    loss = model(lazy(xy()[0])).sum()
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.raises(koila.StaleValueError, match=r"statistics of a BatchNorm1d.*f64\[5, 8"):
        model.state_dict()
    model.load_state_dict(normalized().state_dict())  # reads none
    del loss


def test_10_a_value_whose_state_was_written_twice_says_so():
    """The first write meets no lazy tensor and is not seen; the second one finds other contents."""
    center, w = torch.ones(5, dtype=D), torch.ones(5, dtype=D, requires_grad=True)
    x, _ = lazy(*xy())
    loss = ((x - center) * w).square().sum()
    torch.ops.aten.mul_.Scalar(center, 0.9)  # not seen: see plain_writes.c
    center.add_(x.mean(0))
    with pytest.raises(koila.StaleValueError, match=r"written since .*\(in place, by op"):
        loss.backward()
    assert w.grad is None


# ---- 11. several values before backward


def test_11_reading_values_before_backward():
    def body(model, x, y, wrap):
        h = model(x)
        loss = F.cross_entropy(h, y)
        log = {
            "loss": loss.item(),
            "entropy": float(-(h.softmax(1) * h.log_softmax(1)).sum(1).mean()),
            "accuracy": (h.argmax(1) == y).double().mean().item(),
        }
        if log["entropy"] > 100:
            return {}
        loss.backward()
        return {"loss": loss, **{"log " + k: torch.tensor(v, dtype=D) for k, v in log.items()}}

    check(body)


# ---- 12. the batch axis in disguise


@pytest.mark.parametrize(
    "f",
    [
        lambda m, x, y: F.cross_entropy(m(torch.cat([x] * 3)), torch.cat([y] * 3)),
        lambda m, x, y: F.cross_entropy(m(x.repeat(3, 1)), y.repeat(3)),
        lambda m, x, y: F.cross_entropy(m(x.repeat_interleave(3, 0)), y.repeat_interleave(3)),
        lambda m, x, y: m(x.repeat(2, 1)).view(2, B, 4).mean(0).square().mean(),
        lambda m, x, y: m(x.repeat_interleave(2, 0)).view(B, 2, 4).mean(1).square().mean(),
        lambda m, x, y: (m(torch.stack([x, x * 2])).diff(dim=0)).square().mean(),
        lambda m, x, y: m(x[:, None].expand(-1, 3, -1).reshape(-1, 5)).view(-1, 3, 4).amax(1).sum(),
        lambda m, x, y: F.cross_entropy(torch.cat([m(x), m(-x)], 0), torch.cat([y, y], 0)),
        lambda m, x, y: sum(c.square().mean() for c in m(torch.cat([x, -x])).chunk(2)),
    ],
)
def test_12_repeats_of_the_batch(f):
    def body(model, x, y, wrap):
        loss = f(model, x, y)
        loss.backward()
        return {"loss": loss}

    check(body)


# ---- 13. rows in another order, graphs


def mixup(m, x, y):
    p = torch.tensor([3, 1, 5, 0, 2, 4])
    return 0.4 * F.cross_entropy(m(0.4 * x + 0.6 * x[p]), y) + 0.6 * F.cross_entropy(m(x), y[p])


def mined_pairs(m, x, y):
    e = F.normalize(m(x), dim=1)
    d = torch.cdist(e.detach(), e.detach()) + torch.eye(B) * 9
    hardest = d.argmin(1)
    return (e - e[hardest]).square().sum(1).mean()


def message_passing(m, x, y):
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 2], [1, 2, 0, 4, 5, 3, 2, 1]])
    h = m[0](x)
    for _ in range(2):
        messages = h.index_select(0, edges[0])
        h = torch.zeros_like(h).scatter_add(0, edges[1][:, None].expand(-1, 8), messages).tanh() + h
    graph = torch.tensor([0, 0, 0, 1, 1, 1])
    pooled = torch.zeros(2, 8, dtype=D).index_add(0, graph, h)
    return F.cross_entropy(m[2](pooled), torch.tensor([1, 3]))


@pytest.mark.parametrize("f", [mixup, mined_pairs, message_passing])
def test_13_rows_in_another_order(f):
    def body(model, x, y, wrap):
        loss = f(model, x, y)
        loss.backward()
        return {"loss": loss}

    check(body)


# ---- 14. a running partial must be whole before a row may see it


@pytest.mark.parametrize(
    "f",
    [
        lambda m, x, y: (m(x) - m(x).mean(0)).square().mean(),
        lambda m, x, y: F.cross_entropy(m(x) * m(x).sum(), y),
        lambda m, x, y: (
            (F.layer_norm(m(x).sum(0).expand(B, 4) * m(x), (4,)) * torch.linspace(1, 2, 4, dtype=D))
            .square()
            .mean()
        ),
        lambda m, x, y: (F.layer_norm(m(x), (4,), m(x).mean(0), m(x).sum(0)) * y[:, None]).mean(),
        lambda m, x, y: (m(x) / m(x).abs().amax()).sum().exp(),
        lambda m, x, y: (m(x).sum() * m(x).sum()).sqrt() if True else None,
    ],
)
def test_14_partials_are_made_whole_before_rows_use_them(f):
    def body(model, x, y, wrap):
        loss = f(model, x, y)
        loss.backward()
        return {"loss": loss}

    check(body)


# ---- 15. casts, shifts, counted tokens


def test_15_cast_logits_shifted_labels_counted_tokens():
    def body(model, x, y, wrap):
        t = torch.stack([y, y, (y + 1) % 4], 1).masked_fill(x[:, :3] < -0.5, -100)
        logits = torch.stack([model(x), model(-x), model(x * 2)], 1).float().double()
        labels = F.pad(t, (0, 1), value=-100)[..., 1:].contiguous()
        n = labels.ne(-100).sum()
        loss = (
            F.cross_entropy(logits.view(-1, 4), labels.view(-1), reduction="sum", ignore_index=-100)
            / n
        )
        loss.backward()
        return {"n": n, "loss": loss}

    # the cast to float32 and back makes gradients depend on nothing but the row
    check(body, split=True)


# ---- containers


class Point(NamedTuple):
    x: torch.Tensor
    name: str
    y: torch.Tensor


@dataclasses.dataclass
class Record:
    image: torch.Tensor
    label: torch.Tensor
    meta: dict


@dataclasses.dataclass(frozen=True)
class Frozen:
    image: torch.Tensor
    k: int = 3


class Output(collections.OrderedDict):
    """An ordered dict with attributes, as model outputs are."""

    def __init__(self, *args, note=None):
        super().__init__(*args)
        self.note = note

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class TensorDict:
    """Checks the batch size of what is put in, as tensor dicts do; no Mapping."""

    def __init__(self, items, batch_size):
        self._items, self.batch_size = {}, torch.Size(batch_size)
        for k, v in items.items():
            self[k] = v

    def keys(self):
        return self._items.keys()

    def __getitem__(self, k):
        return self._items[k]

    def __setitem__(self, k, v):
        if v.shape[: len(self.batch_size)] != self.batch_size:
            raise RuntimeError(f"batch size {self.batch_size}, got {v.shape}")
        self._items[k] = v

    def __copy__(self):
        return TensorDict(self._items, self.batch_size)


class Slotted(list):
    tag = None


def is_lazy(t):
    return isinstance(t, koila.LazyTensor)


def test_containers_come_back_as_what_they_were():
    x, y = torch.randn(6, 3), torch.arange(6)
    p = lazy(Point(x, "a", y))
    assert type(p) is Point and is_lazy(p.x) and is_lazy(p.y) and p.name == "a"
    r = lazy(Record(x, y, {"w": x, "k": 3}))
    assert type(r) is Record and is_lazy(r.image) and is_lazy(r.meta["w"]) and r.meta["k"] == 3
    f = lazy(Frozen(x))
    assert type(f) is Frozen and is_lazy(f.image) and f.k == 3
    o = lazy(Output({"a": x, "b": None}, note="n"))
    assert type(o) is Output and is_lazy(o.a) and o["b"] is None and o.note == "n"
    d = lazy(collections.defaultdict(list, a=x))
    assert d.default_factory is list and is_lazy(d["a"])
    t = lazy(TensorDict({"a": x, "b": y}, [6]))
    assert type(t) is TensorDict and t.batch_size == (6,) and is_lazy(t["a"])
    s = Slotted([x, 3])
    s.tag = "t"
    out = lazy(s)
    assert type(out) is Slotted and out.tag == "t" and is_lazy(out[0]) and out[1] == 3 and s[0] is x
    a, (b, c) = lazy(x, [y, "s"])
    assert is_lazy(a) and is_lazy(b) and c == "s"
    assert not is_lazy(x) and type(x) is torch.Tensor


def test_one_tensor_given_twice_stays_one():
    x = torch.randn(6, 3)
    a, d = lazy(x, {"again": x})
    assert a is d["again"]


def test_batch_encoding_and_model_output():
    transformers = pytest.importorskip("transformers")
    e = lazy(
        transformers.BatchEncoding(
            {
                "input_ids": torch.ones(6, 4, dtype=torch.long),
                "attention_mask": torch.ones(6, 4, dtype=torch.long),
            }
        )
    )
    assert (
        type(e) is transformers.BatchEncoding
        and is_lazy(e["input_ids"])
        and is_lazy(e.attention_mask)
    )
    assert is_lazy({**e}["input_ids"]) and is_lazy(e.to("cpu")["input_ids"])
    m = lazy(transformers.modeling_outputs.BaseModelOutput(last_hidden_state=torch.ones(6, 4)))
    assert is_lazy(m.last_hidden_state) and is_lazy(m[0])


def test_batch_given_as_a_structure():
    x, t = torch.randn(6, 3), torch.randn(4, 6)
    a, b = lazy(x, t, batch=(0, 1))
    assert is_lazy(a) and is_lazy(b)
    c = lazy({"x": x, "w": t}, batch={"x": 0, "w": None})
    assert is_lazy(c["x"]) and c["w"] is t
    d = lazy(Point(x, "n", t), batch={"x": 0, "name": None, "y": -1})
    assert is_lazy(d.x) and is_lazy(d.y)
    (e,) = (lazy(x, batch=(0,)),)
    assert is_lazy(e)
    f = lazy(Record(x, t, {}), batch={"image": 0, "label": 1, "meta": None})
    assert is_lazy(f.label)
    g = lazy(x, torch.tensor(3.0))
    assert is_lazy(g[0]) and not is_lazy(g[1])


def apply_to_collection(data: Any, fn):
    """How trainers move batches: containers are taken apart and rebuilt."""
    if isinstance(data, torch.Tensor):
        return fn(data)
    if isinstance(data, dict):
        return type(data)({k: apply_to_collection(v, fn) for k, v in data.items()})
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(apply_to_collection(v, fn) for v in data))
    if isinstance(data, (list, tuple)):
        return type(data)(apply_to_collection(v, fn) for v in data)
    return data


def test_helpers_that_move_batches_keep_them_lazy():
    batch = lazy({"x": torch.randn(6, 3), "p": Point(torch.randn(6, 2), "n", torch.arange(6))})
    moved = apply_to_collection(batch, lambda t: t.to("cpu", non_blocking=True))
    assert is_lazy(moved["x"]) and is_lazy(moved["p"].y)
    assert is_lazy(moved["p"].y.long().flatten()) and is_lazy(moved["x"].cpu().float().contiguous())


def test_distributions_with_validate_args():
    def body(model, x, y, wrap):
        d = torch.distributions.Normal(model(x), torch.ones(B, 4, dtype=D), validate_args=True)
        c = torch.distributions.Categorical(logits=model(x), validate_args=True)
        loss = -d.log_prob(x[:, :4]).mean() - c.log_prob(y).mean() - 0.01 * c.entropy().mean()
        loss.backward()
        return {"loss": loss}

    check(body)


def test_loader_passes_length_and_attributes_through():
    data = torch.utils.data.TensorDataset(torch.randn(10, 3), torch.arange(10))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    wrapped = lazy(loader)
    assert len(wrapped) == 3 and wrapped.batch_size == 4 and wrapped.dataset is data
    sizes = []
    for x, y in wrapped:
        assert is_lazy(x) and is_lazy(y)
        sizes.append(len(x))
    assert sizes == [4, 4, 2]
    assert [
        len(x)
        for x, y in lazy(
            b for b in [(torch.ones(3, 1), torch.ones(3)), (torch.ones(1, 1), torch.ones(1))]
        )
    ] == [3, 1]
    assert (
        list(
            lazy(
                torch.utils.data.DataLoader(
                    torch.utils.data.TensorDataset(torch.zeros(0, 3)), batch_size=4
                )
            )
        )
        == []
    )
    with pytest.raises(AttributeError):
        wrapped.no_such_thing

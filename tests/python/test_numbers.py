"""Operators of which src/graph/ops.def says ANY_NUMBERS give the same metas whatever the values of
their numbers are: a call that differs from a known one in these only is not described anew.

KOILA_LONG=1: all layouts and dtypes."""

import itertools
import os
import re

import pytest
import torch
from conftest import DEVICE, LONG

from koila import _core, _shapes, lazy
from koila._torch import VERSION

aten = torch.ops.aten
ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
with open(os.path.join(ROOT, "src", "graph", "ops.def")) as f:
    MARKED = re.findall(r'"aten::([\w.]+)".*F\(ANY_NUMBERS\)', f.read())

FLOATS = [0.5, 0.0, 1.0, -2.0, 1e300, float("nan")]
INTS = [2, 0, 1, -(2**40)]
if LONG:
    FLOATS += [-0.0, -1.0, 2.0, 3.0, -2.5, 1e-300, 65520.0, float("inf"), -float("inf")]
    INTS += [-1, 3, 300, 2**62]
NUMBERS = {"number", "float", "Optional[number]", "Optional[float]"}
OTHERS = {"Tensor", "bool", "Optional[str]", "Optional[Generator]", "List[bool]"}
SIZES = {"addmm": [(3, 5), (3, 4), (4, 5)], "baddbmm": [(2, 3, 5), (2, 3, 4), (2, 4, 5)]}
SIZES["addmv"] = [(3,), (3, 4), (4,)]

LAYOUTS = {
    "contiguous": lambda dtype: torch.ones(3, 4, dtype=dtype, device=DEVICE),
    "expanded": lambda dtype: torch.ones(3, 1, dtype=dtype, device=DEVICE).expand(3, 4),
    "transposed": lambda dtype: torch.ones(4, 3, dtype=dtype, device=DEVICE).t(),
    "a row": lambda dtype: torch.ones(4, dtype=dtype, device=DEVICE),
    "one element": lambda dtype: torch.ones((), dtype=dtype, device=DEVICE),
    "with gaps": lambda dtype: torch.ones(3, 8, dtype=dtype, device=DEVICE)[:, ::2],
    "empty": lambda dtype: torch.ones(0, 4, dtype=dtype, device=DEVICE),
}
DTYPES = [(torch.float32, torch.float32), (torch.float16, torch.float64)]
PAIRS = [("contiguous", "contiguous"), ("expanded", "transposed"), ("with gaps", "a row")]
if LONG:
    DTYPES += [(torch.float16, torch.float16), (torch.bfloat16, torch.float32)]
    PAIRS = list(itertools.product(LAYOUTS, LAYOUTS))


def overloads(name):
    """An operator and its in-place twin, which has the same facts."""
    base, _, overload = name.partition(".")
    for packet in (getattr(aten, base, None), getattr(aten, base + "_", None)):
        func = getattr(packet, overload or "default", None)
        if func is not None:
            yield func


def calls(func):
    """(the places of numbers, a function from numbers to the arguments) for tensors of all kinds.
    A number may stand for the second tensor too, as in x * 2."""
    arguments = func._schema.arguments
    kinds = [str(a.type) for a in arguments]
    numbers = [i for i, kind in enumerate(kinds) if kind in NUMBERS]
    tensors = [i for i, kind in enumerate(kinds) if kind == "Tensor"]
    base = func._schema.name.removeprefix("aten::").removesuffix("_")
    may_be_numbers = [] if "backward" in base or base in SIZES else tensors[1:2]
    for instead in ([], may_be_numbers) if may_be_numbers else ([],):
        places = sorted(numbers + instead)
        here = [i for i in tensors if i not in instead]
        if not places:
            continue
        for layouts, dtypes in itertools.product(PAIRS, DTYPES):
            given = {}
            for n, i in enumerate(here):
                dtype = dtypes[n > 0]
                if base in SIZES:
                    given[i] = torch.ones(SIZES[base][n], dtype=dtype, device=DEVICE)
                else:
                    given[i] = LAYOUTS[layouts[n > 0]](dtype)

            def build(values, given=given, places=places):
                args, kwargs = [], {}
                for i, a in enumerate(arguments):
                    if i in places:
                        value = values[places.index(i)]
                    elif i in given:
                        value = given[i]
                    elif kinds[i] == "bool":
                        value = False
                    elif a.name == "rounding_mode":
                        value = "floor"
                    else:
                        continue
                    if a.kwarg_only:
                        kwargs[a.name] = value
                    else:
                        args.append(value)
                return tuple(args), kwargs

            yield places, build


def described(func, call):
    try:
        answer = _shapes.shape(func, *call)
    except Exception as e:
        return type(e).__name__
    return "only values tell" if callable(answer) else answer


def differing(func):
    """Calls of which the answer depends on the value of a number. And how many were asked."""
    found, n = [], 0
    for places, build in calls(func):
        for values in (FLOATS, INTS):
            wanted = described(func, build([values[0]] * len(places)))
            for at, value in itertools.product(range(len(places)), values[1:]):
                numbers = [values[0]] * len(places)
                numbers[at] = value
                got = described(func, build(numbers))
                n += not isinstance(got, str)
                if got != wanted:
                    found.append((numbers, build(numbers), wanted, got))
    return found, n


def test_marked_operators_take_no_sizes_and_no_dimensions():
    assert len(MARKED) > 40
    for name in MARKED:
        for func in overloads(name):
            kinds = {str(a.type) for a in func._schema.arguments}
            assert kinds <= NUMBERS | OTHERS, (name, kinds - NUMBERS - OTHERS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MARKED)
def test_what_a_call_gives_depends_on_no_value_of_a_number(name):
    if name == "hardtanh" and VERSION < (2, 13):
        pytest.skip("its shape function refuses bounds in the wrong order, which its kernel takes")
    n_asked = 0
    for func in overloads(name):
        found, n = differing(func)
        n_asked += n
        assert not found, (func, len(found), found[0])
    assert n_asked, "no call of it is right: nothing was compared"


def test_an_operator_that_depends_on_a_value_is_found():
    assert differing(aten.exponential.default)[0]
    assert differing(aten.softshrink.default)[0]
    assert not {"exponential", "softshrink"} & set(MARKED)


@pytest.fixture
def n_described(monkeypatch):
    """How many calls were described by FakeTensor."""
    counted = []
    ask = _shapes._fake_call
    monkeypatch.setattr(_shapes, "_fake_call", lambda f, *a: counted.append(f) or ask(f, *a))
    _core.memo_clear()
    return counted


def _step(wrap, x, v):
    """The numbers v and 1 + v reach operators of all kinds; also views that are written."""
    w = torch.ones(4, 4, device=DEVICE).requires_grad_()
    y = torch.addmm(wrap(x) * v, wrap(x), w, alpha=v) / (1 + v)
    y = torch.lerp(y, y.square(), v) ** (1 + v) + torch.clamp(y, min=-v)
    z = y.detach().clone()
    z[1:].mul_(v).add_(z[:-1].clone(), alpha=v)
    loss = (torch.nn.functional.leaky_relu(y, v) * (y > v)).sum() + (z - v).sum()
    loss.backward()
    return [loss.detach(), z, w.grad]


def test_numbers_that_change_in_each_step_are_described_once(n_described):
    x = torch.rand(4, 4, device=DEVICE)
    for i in range(20):
        n_described.clear()
        v = 0.1 + i / 31
        for got, wanted in zip(_step(lazy, x, v), _step(lambda t: t, x, v), strict=True):
            got = got.torch() if _core.is_lazy(got) else got
            assert torch.allclose(got, wanted, rtol=1e-5), i
        assert bool(n_described) == (i == 0), (i, n_described)


def test_the_type_of_a_number_counts(n_described):
    x = lazy(torch.ones(3, 4, device=DEVICE, dtype=torch.int32))
    wide = lazy(torch.ones(3, 4, device=DEVICE))
    for number in (2, 3, 0.5, 0.25, True, 4, complex(1, 2), 0.125):
        for t in (x, wide):
            got, wanted = t * number, t.torch() * number
            assert got.dtype == wanted.dtype and torch.equal(got.torch(), wanted)


def test_errors_that_depend_on_a_value_come_where_they_came(n_described):
    x = lazy(torch.ones(3, 4, dtype=torch.int64, device=DEVICE))
    torch.sub(x, x, alpha=1.0)  # torch lets this one pass
    with pytest.raises(RuntimeError, match="alpha must not be a floating point number"):
        torch.sub(x, x, alpha=0.5)

"""What users say of operators and modules that koila does not know: `register_rule` and `opaque`."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from . import _core
from ._errors import UnsupportedError


def register_rule(op: Any, *alternatives: str) -> None:
    """Say how a custom operator behaves when the batch is sliced, so that it need not be gathered.

    op: an `OpOverload` (`torch.ops.mylib.op.default`), a packet with one overload, or a name such as `"mylib::op"`.
    alternatives: each names what every tensor argument is, `->`, and what every result is: `R` whole, `S<d>` sliced along dimension d,
        `P` a partial sum over slices. The first that fits is taken: `register_rule("mylib::mm", "S0,R->S0", "R,S1->S1", "S1,S0->P")`.

    The claim is yours: a wrong rule gives wrong numbers. Arguments that hold sizes are not adapted to the slice.
    Raises: ValueError when a rule cannot be read.
    """
    if not alternatives:
        raise ValueError(f"register_rule({op!r}): expected at least one rule such as 'S0,R->S0', got none")
    name = op if isinstance(op, str) else getattr(op, "_schema", None) and op._schema.name + (f".{op._schema.overload_name}" if op._schema.overload_name else "")
    if not name:
        overloads = getattr(op, "overloads", None)
        if overloads is None or len(overloads()) != 1:
            raise ValueError(f"register_rule({op!r}): expected an operator with one overload, or its name 'namespace::name.overload'")
        return register_rule(getattr(op, overloads()[0]), *alternatives)
    if "::" not in name:
        raise ValueError(f"register_rule({op!r}): expected a name like 'namespace::name', got {name!r}")
    _core.register_rule(name.removesuffix(".default"), "; ".join(alternatives))


_functions: dict[int, Any] = {}  # of each call: the function, how its arguments are nested, its module and names of parameters
_structures: dict[int, tuple[Any, list[bool]]] = {}  # of each call: how its results are nested, which of them are tensors
_ids = itertools.count(1)
_library: Any = None


def _call(key: int, inputs: list[torch.Tensor], parameters: list[torch.Tensor]) -> Any:
    fn, rebuild, module, names = _functions[key]
    args, kwargs = rebuild(inputs)
    if module is None:
        return fn(*args, **kwargs)
    return torch.func.functional_call(module, dict(zip(names, parameters)), args, kwargs)


def _flat(key: int, result: Any) -> list[torch.Tensor]:
    """The tensors of a result; how they are nested, and where it has None instead of a tensor, is kept for whoever called the function."""
    leaves, structure = pytree.tree_flatten(result)
    if not all(x is None or isinstance(x, torch.Tensor) for x in leaves):
        raise UnsupportedError("opaque(): the function may return tensors, in any structure, and nothing else")
    _structures[key] = (structure, [x is not None for x in leaves])
    return [x for x in leaves if x is not None]


def _nested(key: int, tensors: Sequence[torch.Tensor]) -> Any:
    structure, there = _structures[key]
    rest = iter(tensors)
    return pytree.tree_unflatten([next(rest) if t else None for t in there], structure)


def _forget(key: int) -> None:
    _functions.pop(key, None)
    _structures.pop(key, None)


def _forward(inputs: list[torch.Tensor], parameters: list[torch.Tensor], key: int) -> list[torch.Tensor]:
    with torch.no_grad():
        results = _flat(key, _call(key, inputs, parameters))
    return [r.clone() if any(r is i for i in inputs) or r._is_view() else r for r in results]


class _WithAutograd:
    """Calls of the executor run below autograd; this puts it back for the recomputation inside."""

    _keys = ("AutogradFunctionality", "ADInplaceOrView", "AutogradCPU", "AutogradCUDA", "AutogradOther")

    def __enter__(self) -> None:
        self._before = []
        for name in self._keys:
            key = getattr(torch._C.DispatchKey, name)
            self._before.append((key, torch._C._dispatch_tls_is_dispatch_key_excluded(key)))
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
        self._grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)

    def __exit__(self, *_: Any) -> None:
        torch._C._set_grad_enabled(self._grad)
        for key, excluded in self._before:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, excluded)


def _backward(grads: list[torch.Tensor], inputs: list[torch.Tensor], parameters: list[torch.Tensor], key: int) -> list[torch.Tensor]:
    with _WithAutograd():
        fresh = [t.detach().requires_grad_(t.is_floating_point() or t.is_complex()) for t in [*inputs, *parameters]]
        results = _flat(key, _call(key, fresh[: len(inputs)], fresh[len(inputs) :]))
        wanted = [t for t in fresh if t.requires_grad]
        pairs = [(r, g) for r, g in zip(results, grads) if r.requires_grad]
        found = iter(torch.autograd.grad([r for r, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True) if pairs else [None] * len(wanted))
    out = []
    for t in fresh:
        g = next(found) if t.requires_grad else None
        out.append(torch.zeros_like(t) if g is None else g.detach().clone())
    return out


def _define() -> Any:
    """The operators koila::opaque and koila::opaque_backward, made at the first use of opaque()."""
    global _library
    if _library is None:
        _library = torch.library.Library("koila", "FRAGMENT")
        _library.define("opaque(Tensor[] inputs, Tensor[] parameters, int id) -> Tensor[]")
        _library.define("opaque_backward(Tensor[] grads, Tensor[] inputs, Tensor[] parameters, int id) -> Tensor[]")
        for key in ("CPU", "CUDA"):
            _library.impl("opaque", _forward, key)
            _library.impl("opaque_backward", _backward, key)
        torch.library.register_fake("koila::opaque", _fake_forward, lib=_library)
        torch.library.register_fake("koila::opaque_backward", lambda grads, inputs, parameters, id: [torch.empty_like(t) for t in [*inputs, *parameters]], lib=_library)
    return torch.ops.koila


def _fake_forward(inputs: list[torch.Tensor], parameters: list[torch.Tensor], id: int) -> list[torch.Tensor]:
    """Shapes of the results, from a run on two real rows of zeros: a compiled module or a custom kernel has no shape function."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    batch = inputs[0].shape[0]
    rows = min(2, batch)
    module = _functions[id][2]
    modes = [(m, m.training) for m in module.modules()] if module is not None else []
    with unset_fake_temporarily(), torch.random.fork_rng(devices=[]):
        real = [torch.zeros([rows if d == 0 and t.shape[0] == batch else s for d, s in enumerate(t.shape)], dtype=t.dtype, device=t.device) for t in inputs]
        try:
            if module is not None:
                module.eval()  # two rows of zeros must not touch running statistics
            results = _forward(real, [torch.zeros(p.shape, dtype=p.dtype, device=p.device) for p in parameters], id)
        finally:
            for m, training in modes:  # each its own: a frozen batch norm inside a model that trains stays frozen
                m.training = training
        shapes = [(tuple(r.shape), r.dtype) for r in results]
    return [inputs[0].new_empty((batch, *shape[1:]), dtype=dtype) for shape, dtype in shapes]


class _Opaque(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, key: int, n_inputs: int, *tensors: torch.Tensor) -> Any:
        ctx.key, ctx.n_inputs = key, n_inputs
        ctx.save_for_backward(*tensors)
        return tuple(_define().opaque(list(tensors[:n_inputs]), list(tensors[n_inputs:]), key))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        tensors = ctx.saved_tensors
        found = _define().opaque_backward(list(grads), list(tensors[: ctx.n_inputs]), list(tensors[ctx.n_inputs :]), ctx.key)
        return (None, None, *(g if t.is_floating_point() or t.is_complex() else None for g, t in zip(found, tensors)))


def opaque(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Run a module or a function as it is, on real slices of the batch, forward and backward: compiled modules, custom kernels.

    fn: takes tensors (in any structure) whose first dimension is the batch, or that are whole, and returns tensors whose first dimension is the
        batch. Rows must be independent: what fn makes of a row may depend on that row, on whole arguments and on its parameters only.

    Returns a callable (for a module: with its `parameters`, so an optimizer sees them through the module itself). Backward runs fn
    again on each slice. Buffers that fn writes, and random numbers that it draws, are its own business: they happen once per slice and run.
    Without lazy arguments fn is called directly.
    """
    module = fn if isinstance(fn, torch.nn.Module) else None

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        if not any(_core.is_lazy(x) for x in leaves if isinstance(x, torch.Tensor)):
            return fn(*args, **kwargs)
        at = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
        at.sort(key=lambda i: not _core.is_lazy(leaves[i]))  # a batched one first: it tells the number of rows
        constants = [None if isinstance(x, torch.Tensor) else x for x in leaves]

        def rebuild(tensors: list[torch.Tensor]) -> Any:
            values = list(constants)
            for i, t in zip(at, tensors):
                values[i] = t
            return pytree.tree_unflatten(values, structure)

        names, parameters = [], []
        for name, p in module.named_parameters() if module is not None else ():
            names.append(name)
            parameters.append(p)
        key = next(_ids)
        _functions[key] = (fn, rebuild, module, names)
        tensors = [leaves[i] for i in at]
        results = _Opaque.apply(key, len(tensors), *tensors, *parameters)
        for r in results[:1]:
            weakref.finalize(_core.tape_of(r) if _core.is_lazy(r) else r, _forget, key)
        return _nested(key, results)

    call.__wrapped__ = fn  # type: ignore[attr-defined]
    return call

"""`opaque()`: modules and functions that run as they are, on real slices, instead of being
recorded."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, overload

import torch
from torch.utils import _device, _pytree as pytree

from . import _core, _replica, _sharded
from ._errors import UnsupportedError
from ._own_operators import OwnOperator, own_operators


class _Exchanges:
    """Which modules run here just now, some with other parameters than their own, and in which
    thread. What two threads exchange at once they put back wrong."""

    def __init__(self) -> None:
        self._now: list[tuple[int, set[int]]] = []  # thread, ids of modules
        self._ended = threading.Condition()

    def _wait(self, module: torch.nn.Module) -> tuple[int, set[int]]:
        """Until no other thread runs this module here, or a part of it."""
        mine = threading.get_ident(), {id(m) for m in module.modules()}
        while any(t != mine[0] and not ids.isdisjoint(mine[1]) for t, ids in self._now):
            self._ended.wait()
        return mine

    @contextlib.contextmanager
    def of(self, module: torch.nn.Module) -> Iterator[None]:
        """Alone with this module; a thread may be so again inside. In a shield: who leaves it by an
        interrupt makes others wait for ever."""
        with self._ended:
            mine = self._wait(module)
            self._now.append(mine)
        try:
            yield
        finally:
            with self._ended:
                self._now = [m for m in self._now if m is not mine]
                self._ended.notify_all()

    def own_parameters(self, module: torch.nn.Module) -> dict[str, torch.Tensor]:
        with _core.shield, self._ended:
            self._wait(module)
            return dict(module.named_parameters())


_exchanges = _Exchanges()
# The threads that a child does not have would be waited for.
os.register_at_fork(after_in_child=_exchanges.__init__)  # type: ignore[misc]


def _autocast_now() -> tuple[tuple[str, torch.dtype], ...]:
    """The devices on which autocast is on, with its dtype there."""
    return tuple(
        (device, torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    )


class _Call:
    """A call of an opaque function without its tensors.

    Recorded operators refer to it by `key`. It lives as long as the function, and as long as a step
    holds such an operator. `needed`: which parameters need gradients. `results`: the nesting of the
    results, and which of them are tensors rather than None. `shapes`: for a sharded module, the
    shapes and dtypes of its results by those of its inputs. `device` and `autocast`: the
    program's default device and autocast at the call, for the function runs later, where others may
    be set.
    """

    __slots__ = (
        "__weakref__",
        "autocast",
        "device",
        "function",
        "key",
        "module",
        "names",
        "needed",
        "rebuild",
        "results",
        "shapes",
        "shards",
    )

    def __init__(
        self,
        function: Any,
        rebuild: Any,
        module: torch.nn.Module | None,
        needed: dict[str, bool],
        shards: list[torch.Tensor],
    ) -> None:
        self.function, self.rebuild, self.module = function, rebuild, module
        self.names, self.needed, self.shards = list(needed), list(needed.values()), shards
        self.device = _device.CURRENT_DEVICE
        self.autocast = _autocast_now()
        self.results: tuple[Any, list[bool]] | None = None
        self.shapes: dict[Any, list[tuple[tuple[int, ...], torch.dtype]]] = {}
        self.key = next(_keys)
        _calls[self.key] = self

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """No other thread runs the module here meanwhile."""
        if self.module is None or not self.names:
            return contextlib.nullcontext()
        return _exchanges.of(self.module)

    def own(self, parameters: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """The module's parameters, where they are the tensors `parameters`, and need the gradients
        that the call recorded. Then it can run as it is, and nobody who uses it meanwhile sees
        anything else. A hook would see the gradient of each slice. Inside `alone`."""
        if self.module is None or not self.names:
            return None
        there = dict(self.module.named_parameters())
        own = [there.get(name) for name in self.names]
        same = all(
            type(p) is torch.nn.Parameter
            and p.requires_grad == needed
            and not p._backward_hooks
            and (p is t or (type(t) is torch.Tensor and p.dtype is t.dtype and p.is_set_to(t)))
            for p, t, needed in zip(own, parameters, self.needed)
        )
        return own if same else None  # type: ignore[return-value]

    def __call__(
        self,
        inputs: list[torch.Tensor],
        parameters: list[torch.Tensor] | None,
        instead: torch.nn.Module | None = None,
    ) -> list[torch.Tensor]:
        """The tensors of the results. None is left out here and put back by `nested`. parameters:
        those that the module has meanwhile; None: its own. instead: called in place of the module,
        with parameters of its own. Inside `alone`."""
        args, kwargs = self.rebuild(inputs)
        with contextlib.ExitStack() as settings:
            if self.device is not None:
                settings.enter_context(self.device)
            for device, dtype in self.autocast:
                settings.enter_context(torch.autocast(device, dtype))
            if instead is not None:
                result = instead(*args, **kwargs)
            elif self.module is not None and self.names and parameters is not None:
                result = torch.func.functional_call(
                    self.module, dict(zip(self.names, parameters)), args, kwargs
                )
            else:
                result = self.function(*args, **kwargs)
        leaves, structure = pytree.tree_flatten(result)
        if not all(x is None or isinstance(x, torch.Tensor) for x in leaves):
            raise UnsupportedError(
                "opaque(): the function may return tensors, in any structure, and nothing else"
            )
        self.results = structure, [x is not None for x in leaves]
        return [x for x in leaves if x is not None]

    def nested(self, tensors: Any) -> Any:
        assert self.results is not None
        structure, there = self.results
        rest = iter(tensors)
        return pytree.tree_unflatten([next(rest) if t else None for t in there], structure)


_F = TypeVar("_F", bound=Callable[..., Any])
_calls: weakref.WeakValueDictionary[int, _Call] = weakref.WeakValueDictionary()
_keys = itertools.count(1)
_MAX_KNOWN = 64  # ways of calling one function that are kept


def ranks_of(keys: list[int]) -> _sharded.Ranks | None:
    """The ranks with which the opaque calls `keys` communicate; None: nothing is sharded. Called by
    the executor (ranks.c)."""
    shards = {k: c.shards for k in keys if (c := _calls.get(k)) is not None and c.shards}
    return _sharded.Ranks(shards) if shards else None


def _forward(
    inputs: list[torch.Tensor], parameters: list[torch.Tensor], key: int
) -> list[torch.Tensor]:
    call = _calls[key]
    with torch.no_grad(), call.alone():
        results = call(inputs, None if call.own(parameters) is not None else parameters)
    return [r.clone() if any(r is i for i in inputs) or r._is_view() else r for r in results]


class _WithAutograd:
    """Switch autograd on for the recomputation inside a call of the executor, which runs below
    it."""

    _keys = (
        "AutogradFunctionality",
        "ADInplaceOrView",
        "AutogradCPU",
        "AutogradCUDA",
        "AutogradOther",
    )

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


def _backward_of(
    grads: list[torch.Tensor], inputs: list[torch.Tensor], parameters: list[torch.Tensor], key: int
) -> list[torch.Tensor]:
    call = _calls[key]
    with _WithAutograd(), call.alone():
        own = call.own(parameters)
        fresh = [
            t.detach().requires_grad_(t.is_floating_point() or t.is_complex())
            for t in (inputs if own is not None else [*inputs, *parameters])
        ]
        fresh += own or []
        results = call(fresh[: len(inputs)], None if own is not None else fresh[len(inputs) :])
        pairs = [(r, g) for r, g in zip(results, grads) if r.requires_grad]
        wanted = [t for t in fresh if t.requires_grad]
        found: Iterator[torch.Tensor | None]
        if not pairs:
            found = iter([None] * len(wanted))
        elif call.shards:  # a sharded module adds to the .grad of its own parameters
            found = iter(
                _sharded.gradients(call.shards, pairs, wanted[: len(wanted) - len(parameters)])
            )
        else:
            found = iter(
                torch.autograd.grad(
                    [r for r, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True
                )
            )
    out = []
    for t in fresh:
        g = next(found) if t.requires_grad else None
        out.append(torch.zeros_like(t) if g is None else g.detach().clone())
    return out


@own_operators("CPU", "CUDA")
def _operators() -> list[OwnOperator]:
    """koila::opaque and koila::opaque_backward. id: of the call, in _calls."""
    forward = "opaque(Tensor[] inputs, Tensor[] parameters, int id) -> Tensor[]"
    backward = (
        "opaque_backward(Tensor[] grads, Tensor[] inputs, Tensor[] parameters, int id) -> Tensor[]"
    )
    return [
        OwnOperator(forward, _forward, _fake_forward),
        OwnOperator(backward, _backward_of, _fake_backward),
    ]


def _fake_backward(
    grads: list[torch.Tensor], inputs: list[torch.Tensor], parameters: list[torch.Tensor], id: int
) -> list[torch.Tensor]:
    return [torch.empty_like(t) for t in [*inputs, *parameters]]


def _fake_forward(
    inputs: list[torch.Tensor], parameters: list[torch.Tensor], id: int
) -> list[torch.Tensor]:
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    shapes = _calls[id].shapes.get(_sharded.shapes_key(inputs))
    if shapes is None:
        with unset_fake_temporarily():
            shapes = _shapes_of_rows(inputs, parameters, id)
    return [
        inputs[0].new_empty((inputs[0].shape[0], *shape[1:]), dtype=dtype)
        for shape, dtype in shapes
    ]


def _shapes_of_rows(
    inputs: list[torch.Tensor], parameters: list[torch.Tensor], id: int
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of the results, from a run on two real rows of zeros, because a compiled
    module or a custom kernel has no shape function."""
    batch = inputs[0].shape[0]
    rows = min(2, batch)
    call = _calls[id]
    # What other threads draw meanwhile is not to be drawn again: then the generator stays moved.
    alone = threading.active_count() == 1
    with torch.random.fork_rng(devices=[]) if alone else contextlib.nullcontext():
        real = [
            torch.zeros(
                [rows if d == 0 and t.shape[0] == batch else s for d, s in enumerate(t.shape)],
                dtype=t.dtype,
                device=t.device,
            )
            for t in inputs
        ]
        zeros = [torch.zeros(p.shape, dtype=p.dtype, device=p.device) for p in parameters]
        replica = None
        if call.module is not None and not call.shards:
            replica = _replica.evaluating(call.module, call.names, zeros)
        seen = None if replica is not None else call.module
        with torch.no_grad(), call.alone() if seen is not None else contextlib.nullcontext():
            with _evaluating(seen):
                results = call(real, zeros, replica)
    return [(tuple(r.shape), r.dtype) for r in results]


@contextlib.contextmanager
def _evaluating(module: torch.nn.Module | None) -> Iterator[None]:
    """The module itself in evaluation mode, for two rows of zeros must not touch running
    statistics."""
    modes = [(m, m.training) for m in module.modules()] if module is not None else []
    try:
        if module is not None:
            module.eval()
        yield
    finally:
        # Each its own mode: a frozen batch norm inside a model that trains stays frozen.
        for m, training in modes:
            m.training = training


class _Opaque(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, n_inputs: int, *tensors: torch.Tensor) -> Any:
        ctx.call, ctx.n_inputs = call, n_inputs
        ctx.save_for_backward(*tensors)
        return tuple(
            _operators().opaque(list(tensors[:n_inputs]), list(tensors[n_inputs:]), call.key)
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        tensors = ctx.saved_tensors
        found = _operators().opaque_backward(
            list(grads), list(tensors[: ctx.n_inputs]), list(tensors[ctx.n_inputs :]), ctx.call.key
        )
        return (
            None,
            None,
            *(
                g if t.is_floating_point() or t.is_complex() else None
                for g, t in zip(found, tensors)
            ),
        )


class _Runner:
    """Calls `function`; with a lazy argument it records the call instead."""

    def __init__(self, function: Callable[..., Any], module: torch.nn.Module | None) -> None:
        self._function, self._module = function, module
        self._known: dict[Any, _Call] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        at = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
        if not any(_core.is_lazy(leaves[i]) for i in at):
            return self._function(*args, **kwargs)
        at.sort(key=lambda i: not _core.is_lazy(leaves[i]))  # lazy ones first: they tell the rows
        tensors = [leaves[i] for i in at]
        needed: dict[str, bool] = {}
        shards: list[torch.Tensor] = []
        parameters: list[torch.Tensor] = []
        if self._module is not None and _sharded.is_sharded(self._module):
            _core.ranks_ask(ranks_of)
            shards, parameters = _sharded.shards(self._module)
        elif self._module is not None:
            named = _exchanges.own_parameters(self._module)
            parameters = list(named.values())
            needed = {name: p.requires_grad for name, p in named.items()}
        call = self._call(
            [None if isinstance(x, torch.Tensor) else x for x in leaves],
            structure,
            at,
            needed,
            shards,
        )
        if shards:
            _sharded.rows_shapes(
                call, tensors, lambda: _shapes_of_rows(tensors, parameters, call.key)
            )
        results = _Opaque.apply(call, len(tensors), *tensors, *parameters)  # type: ignore[no-untyped-call]
        for r in results[:1]:
            # The finalizer (any would do: id) keeps `call` alive until the step is gone.
            weakref.finalize(_core.tape_of(r) if _core.is_lazy(r) else r, id, call)
        return call.nested(results)

    def _call(
        self,
        constants: list[Any],
        structure: Any,
        at: list[int],
        needed: dict[str, bool],
        shards: list[torch.Tensor],
    ) -> _Call:
        """The `_Call` for these arguments. An equal call gets the same one, so that the recorder
        reuses its shapes and its plan."""

        def rebuild(tensors: list[torch.Tensor]) -> Any:
            values = list(constants)
            for i, t in zip(at, tensors):
                values[i] = t
            return pytree.tree_unflatten(values, structure)

        training = self._module is not None and self._module.training
        alike = (
            repr(structure),
            tuple(at),
            training,
            tuple(needed.items()),
            tuple(map(id, shards)),
            tuple((type(c), c) for c in constants),
            _device.CURRENT_DEVICE,
            _autocast_now(),
        )
        try:
            call = self._known.get(alike)
        except TypeError:  # an argument without a hash
            return _Call(self._function, rebuild, self._module, needed, shards)
        if call is None:
            if len(self._known) >= _MAX_KNOWN:  # an argument that is another one each time
                self._known.clear()
            call = self._known[alike] = _Call(self._function, rebuild, self._module, needed, shards)
        return call


class OpaqueModule(torch.nn.Module):
    """The result of `opaque(module)`: a module around the given one, `.module`, with its
    parameters, buffers and modes."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self.training = module.training
        self._run = _Runner(module, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> OpaqueModule:
        return OpaqueModule(copy.deepcopy(self.module, memo))

    def __reduce__(self) -> Any:
        return OpaqueModule, (self.module,)


@overload
def opaque(fn: torch.nn.Module) -> OpaqueModule: ...
@overload
def opaque(fn: _F) -> _F: ...
def opaque(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Run a module or a function as it is, on real slices of the batch, forward and backward:
    compiled modules, fully sharded ones (FSDP), custom kernels.

    fn: takes tensors (in any structure) whose first dimension is the batch, or that are whole, and
        returns tensors whose first dimension is the batch. Rows must be independent: a row of the
        results may depend on the same row of the arguments, on whole arguments and on the
        parameters only.

    Backward runs fn again on each slice. Buffers that fn writes and random numbers that it draws
    are not managed: they change once per slice and run. Without lazy arguments fn is called
    directly. A sharded module runs its collectives once per slice: the ranks agree on the number of
    slices before a step runs, and raise together where they cannot agree, or where one of them
    fails outside of the module.

    Returns: for a module an `OpaqueModule`, which can be a part of a model; for a function a
        function.
    """
    if isinstance(fn, torch.nn.Module):
        return OpaqueModule(fn)
    if not callable(fn):
        raise ValueError(
            f"opaque({fn!r}): expected a module or a function, got {type(fn).__name__}"
        )
    run = _Runner(fn, None)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    return call

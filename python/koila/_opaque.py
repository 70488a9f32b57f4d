"""`opaque()`: modules and functions that run as they are, on real slices, instead of being
recorded."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, overload

import torch
from torch.utils import _device, _pytree as pytree

from . import _core, _replica, _sharded
from ._errors import UnsupportedError
from ._own_operators import OwnOperator, own_operators
from ._torch import run_backward, untyped_storage


class _Running(threading.local):
    """here: does this thread run a module as it is?"""

    here = False


running = _Running()


class _Exchanges:
    """Which modules run here just now, some with other parameters than their own, and in which
    thread. What two threads exchange at once they put back wrong."""

    def __init__(self) -> None:
        self._now: list[tuple[int, torch.nn.Module]] = []  # thread, module
        self._lock = threading.RLock()  # of all that is here
        self._ended = threading.Condition(self._lock)
        self._n_waiting = 0  # threads that wait for it

    def _is_elsewhere(self, module: torch.nn.Module, thread: int) -> bool:
        others = [m for t, m in self._now if t != thread]
        if not others:  # mostly, and walking the modules takes time
            return False
        mine = {id(m) for m in module.modules()}
        return any(id(m) in mine for other in others for m in other.modules())

    def _wait(self, module: torch.nn.Module) -> None:
        """Until no other thread runs this module here, or a part of it."""
        thread = threading.get_ident()
        self._n_waiting += 1
        try:
            while self._is_elsewhere(module, thread):
                self._ended.wait()
        finally:
            self._n_waiting -= 1

    def begin(self, module: torch.nn.Module) -> tuple[int, torch.nn.Module]:
        """Alone with this module until `end()` of the result; a thread may be so again inside. In a
        shield: who leaves it by an interrupt makes others wait for ever."""
        mine = threading.get_ident(), module
        with self._lock:
            if self._now:
                self._wait(module)
            self._now.append(mine)
        return mine

    def end(self, mine: tuple[int, torch.nn.Module]) -> None:
        with self._lock:
            self._now = [m for m in self._now if m is not mine]
            if self._n_waiting:
                self._ended.notify_all()

    def parameters_of(self, module: torch.nn.Module) -> tuple[_Tables, dict[str, torch.Tensor]]:
        """The tables of parameters and parts that the module and its parts have, and its own
        parameters by name, both while no other thread exchanges them."""
        with _core.shield, self._lock:
            self._wait(module)
            tables = [
                (table, tuple(itertools.chain.from_iterable(table.items())))
                for m in module.modules()
                for table in (m._modules, m._parameters)
            ]
            return tables, dict(module.named_parameters())


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


def _edge(result: torch.Tensor) -> torch.autograd.graph.GradientEdge:
    """torch's get_gradient_edge(), in less time for the node of a function of Python's, as that of
    a compiled module is. Such a node does not keep the graph; that of a view does."""
    node = result.grad_fn
    keeps = result.view_as(result).grad_fn if isinstance(node, torch._C._FunctionBase) else None
    if node is None or keeps is None:
        return torch.autograd.graph.get_gradient_edge(result)
    return torch.autograd.graph.GradientEdge(node, result.output_nr, keeps)


class _Graph:
    """The autograd graph of one slice, from its forward to its backward.

    n_bytes: held by it alone; None: not known."""

    __slots__ = ("edges", "leaves", "n_bytes")

    def __init__(self, results: list[torch.Tensor], leaves: list[torch.Tensor]) -> None:
        # Edges rather than results, whose memory lives as long as the plan says.
        self.edges = [_edge(r) if r.requires_grad else None for r in results]
        self.leaves = leaves
        self.n_bytes: int | None = None

    def gradients(
        self, given: list[int], grads: list[torch.Tensor], wanted: list[int]
    ) -> list[torch.Tensor | None]:
        pairs = [(e, g) for i, g in zip(given, grads) if (e := self.edges[i]) is not None]
        leaves = [self.leaves[i] for i in wanted]
        if not pairs or not leaves:
            return [None] * len(leaves)
        edges, gradients = tuple(e for e, _ in pairs), tuple(g for _, g in pairs)
        # As torch.autograd.grad() ends: nothing here is lazy, and the engine checks shapes.
        found = run_backward(
            *(edges, gradients, False, False, tuple(leaves)),
            allow_unreachable=True,
            accumulate_grad=False,
        )
        return list(found)


class _Held:
    """The bytes that a slice's graph holds from forward to backward, beyond the arguments and the
    results: measured, to be planned with in the next step."""

    def __init__(self) -> None:
        self._per_row = 0
        self._measured: dict[int, int] = {}  # rows: bytes, since a step was recorded last

    def saw(self, rows: int, n_bytes: int) -> None:
        self._measured[max(rows, 1)] = n_bytes

    def per_row(self) -> int:
        """Of the largest slices, since other ones are those that were left over. At least one byte,
        for a graph without any would be a value that does not exist."""
        if self._measured:
            rows, n_bytes = max(self._measured.items())
            self._measured.clear()
            per_row = -(-n_bytes // rows)
            if abs(per_row - self._per_row) > self._per_row // 256:  # else the plan stays valid
                self._per_row = per_row
        return max(self._per_row, 1)


def _lie_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Of two tensors of one shape. Strides of dimensions of one entry mean nothing."""
    return all(n == 1 or x == y for n, x, y in zip(a.shape, a.stride(), b.stride()))


class _Laid:
    """How the gradients of parameters lie in memory, where not as the parameters do: what a
    compiler makes of a convolution's, for one. As they were in the largest slices, to be recorded
    so in the next step: in another order each slice's would be copied."""

    def __init__(self) -> None:
        self._rows = 0
        self._strides: dict[int, tuple[int, ...]] = {}  # by argument of the call
        self.version = 0  # of what listed() gives

    def saw(
        self,
        inputs: list[torch.Tensor],
        parameters: list[torch.Tensor],
        wanted: list[int],
        gradients: list[torch.Tensor],
    ) -> None:
        """Dense gradients of those of the arguments that are `wanted`."""
        n, rows = len(inputs), inputs[0].shape[0]
        if rows <= self._rows:
            return
        self._rows = rows
        self._strides = {
            at: g.stride()
            for at, g in zip(wanted, gradients)
            if at >= n and not _lie_alike(g, parameters[at - n])
        }
        self.version += 1

    def listed(self, wanted: list[int]) -> list[int]:
        """For an operator: of each such gradient its place in `wanted` and its strides."""
        found = []
        for i, at in enumerate(wanted):
            if at in self._strides:
                found += [i, *self._strides[at]]
        return found


def _bytes_now(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return int(_core.cpu_bytes_current())


def _storage(t: torch.Tensor) -> int:
    return int(untyped_storage(t)._cdata)


def _n_compiled() -> int:
    """A number that is another one when anything was compiled since."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return _core.n_values(getattr(dynamo, "compilation_time_metrics", {}))


_ALONE = 2  # a tensor's memory is used by the tensor, and by who asks
_n_users = torch._C._storage_Use_Count


def _is_alone(t: torch.Tensor) -> bool:
    """Is t dense, with memory that no other tensor uses?"""
    storage = untyped_storage(t)
    return _n_users(storage._cdata) <= _ALONE and storage.nbytes() == t.nbytes


def _has_own_memory(t: torch.Tensor, taken: set[int]) -> bool:
    """Is t dense, with memory that is in none of `taken`? Then it is from now on."""
    storage = untyped_storage(t)
    if storage._cdata in taken or storage.nbytes() != t.nbytes:
        return False
    taken.add(storage._cdata)
    return True


_Shapes = list[tuple[tuple[int, ...], torch.dtype]]  # shapes and dtypes of results

# What `kinds` says of an argument (rules_custom.c).
EITHER, ROWS, WHOLE, EACH = range(4)


class _Alone:
    """A context in which this thread runs a module as it is, and no other thread runs it here; None
    for a function."""

    __slots__ = ("_mine", "_module", "_outer")

    def __init__(self, module: torch.nn.Module | None) -> None:
        self._module = module

    def __enter__(self) -> None:
        self._mine = None if self._module is None else _exchanges.begin(self._module)
        self._outer, running.here = running.here, True

    def __exit__(self, *_: Any) -> None:
        running.here = self._outer
        if self._mine is not None:
            _exchanges.end(self._mine)


# Each table with its keys and what is there, one after the other.
_Tables = list[tuple[dict[str, Any], tuple[Any, ...]]]


class _Own:
    """A module's own parameters by name, remembered with the tables of parameters and parts that it
    and its parts have: to see that these hold what they did, and nothing more, takes less than a
    walk. Who shards a module exchanges its parameters."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        # The two belong together, and are set together: other threads read them.
        self._seen: tuple[_Tables, dict[str, torch.Tensor]] = [], {}

    def known(self) -> dict[str, torch.Tensor] | None:
        """None: they must be looked for."""
        tables, named = self._seen
        return named if tables and _core.are_as_seen(tables) else None

    def now(self) -> dict[str, torch.Tensor]:
        named = self.known()
        if named is None:
            self._seen = _exchanges.parameters_of(self.module)
            named = self._seen[1]
        return named


class _Call:
    """A call of an opaque function without its tensors.

    Recorded operators refer to it by `key`. It lives as long as the function, and as long as a step
    holds such an operator.

    needed: which parameters need gradients; differentiated: which arguments do, then which
        parameters.
    kinds: of each argument.
    results: the nesting of the results (None: the result is a tensor), and which of them are
        tensors rather than None.
    used: of each result, the parameters that it depends on; None: it is not known.
    of_rows: what the results are for two rows; shapes: for a sharded module, the same by its
        inputs.
    device, autocast: the program's default device and autocast at the call, for the function runs
        later, where others may be set.
    held: what waits for the backward; shared: the results that share memory with that.
    laid: how gradients of the parameters lie.
    pure: as in Runner.
    own_now: the module's own parameters, by name.
    """

    __slots__ = (
        "__weakref__",
        "autocast",
        "device",
        "differentiated",
        "function",
        "held",
        "key",
        "kinds",
        "laid",
        "module",
        "names",
        "needed",
        "of_rows",
        "own_now",
        "pure",
        "rebuild",
        "results",
        "shapes",
        "shards",
        "shared",
        "used",
    )

    def __init__(
        self,
        function: Any,
        rebuild: Any,
        own: _Own | None,
        needed: dict[str, bool],
        shards: list[torch.Tensor],
        differentiated: list[bool],
        kinds: list[int],
        used: list[set[int]] | None,
        pure: bool,
    ) -> None:
        self.pure = pure
        self.function, self.rebuild, self.own_now = function, rebuild, own
        self.module = None if own is None else own.module
        self.names, self.needed, self.shards = list(needed), list(needed.values()), shards
        self.differentiated, self.kinds, self.used = differentiated, kinds, used
        self.held = _Held()
        self.shared: set[int] = set()
        self.laid = _Laid()
        self.device = _device.CURRENT_DEVICE
        self.autocast = _autocast_now()
        self.results: tuple[Any, list[bool]] | None = None
        self.of_rows: _Shapes | None = None
        self.shapes: dict[Any, _Shapes] = {}
        self.key = next(_keys)
        _calls[self.key] = weakref.ref(self, functools.partial(_forget, self.key))

    def alone(self) -> _Alone:
        """No other thread runs the module here meanwhile."""
        return _Alone(self.module if self.names else None)

    def own(self, parameters: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """The module's parameters, where they are the tensors `parameters`, and need the gradients
        that the call recorded. Then it can run as it is, and nobody who uses it meanwhile sees
        anything else. A hook would see the gradient of each slice. Inside `alone`."""
        if self.own_now is None or not self.names:
            return None
        found = self.own_now.now()
        if _core.are_own(found, self.names, parameters, self.needed, torch.nn.Parameter):
            return parameters
        own: list[torch.Tensor] = []
        for name, t, needed in zip(self.names, parameters, self.needed):
            p = found.get(name)
            if type(p) is not torch.nn.Parameter or p.requires_grad != needed or p._backward_hooks:
                return None
            if p is not t and not (
                type(t) is torch.Tensor and p.dtype is t.dtype and p.is_set_to(t)
            ):
                return None
            own.append(p)
        return own

    def __call__(
        self,
        inputs: list[torch.Tensor],
        parameters: list[torch.Tensor] | None,
        instead: torch.nn.Module | None = None,
    ) -> list[torch.Tensor]:
        """The tensors of the results. None is left out here and put back by `nested`. parameters:
        those that the module has meanwhile; None: its own. instead: called in place of the module,
        with parameters of its own. Inside `alone`."""
        if self.device is None and not self.autocast:
            result = self._result(inputs, parameters, instead)
        else:
            with contextlib.ExitStack() as settings:
                if self.device is not None:
                    settings.enter_context(self.device)
                for device, dtype in self.autocast:
                    settings.enter_context(torch.autocast(device, dtype))
                result = self._result(inputs, parameters, instead)
        if type(result) is torch.Tensor:
            self.results = None, [True]
            return [result]
        leaves, structure = pytree.tree_flatten(result)
        if not all(x is None or isinstance(x, torch.Tensor) for x in leaves):
            raise UnsupportedError(
                "opaque(): the function may return tensors, in any structure, and nothing else"
            )
        self.results = structure, [x is not None for x in leaves]
        return [x for x in leaves if x is not None]

    def _result(
        self,
        inputs: list[torch.Tensor],
        parameters: list[torch.Tensor] | None,
        instead: torch.nn.Module | None,
    ) -> Any:
        args, kwargs = self.rebuild(inputs)
        if instead is not None:
            return instead(*args, **kwargs)
        if self.module is not None and self.names and parameters is not None:
            named = dict(zip(self.names, parameters))
            return torch.func.functional_call(self.module, named, args, kwargs)
        return self.function(*args, **kwargs)

    def unused(self, given: list[int]) -> set[int]:
        """Parameters that none of these results depends on: they have no gradient, as in plain
        PyTorch. Where it is not known, they have one of zeros."""
        if self.used is None:
            return set()
        return set(range(len(self.names))).difference(*(self.used[i] for i in given))

    def check(self, results: list[torch.Tensor], n_rows: int) -> None:
        """Raises where results have other sizes than those of two rows let expect."""
        found: _Shapes = [(r.shape, r.dtype) for r in results]
        expected = self.sizes(n_rows)
        if expected is not None and found != expected:
            found = [(tuple(shape), dtype) for shape, dtype in found]
            raise UnsupportedError(
                f"a module that runs as it is gave {found} for a slice of {n_rows} rows, expected "
                f"{expected}: its rows are not independent"
            )

    def sizes(self, n_rows: int) -> _Shapes | None:
        """Of the results for so many rows. None: sharded, what they are depends on the ranks."""
        if self.of_rows is None:
            return None
        return [((n_rows, *shape[1:]), dtype) for shape, dtype in self.of_rows]

    def nested(self, tensors: Any) -> Any:
        assert self.results is not None
        structure, there = self.results
        rest = iter(tensors)
        if structure is None:
            return next(rest)
        return pytree.tree_unflatten([next(rest) if t else None for t in there], structure)


_F = TypeVar("_F", bound=Callable[..., Any])
# By key. A recorded operator's call lives.
_calls: dict[int, Callable[[], Any]] = {}
_keys = itertools.count(1)
_MAX_KNOWN = 64  # ways of calling one function that are kept


def _forget(key: int, _: Any) -> None:
    _calls.pop(key, None)


def ranks_of(keys: list[int]) -> _sharded.Ranks | None:
    """The ranks with which the opaque calls `keys` communicate; None: nothing is sharded. Called by
    the executor (ranks.c)."""
    calls = {k: call() for k in keys if (call := _calls.get(k)) is not None}
    shards = {k: c.shards for k, c in calls.items() if c is not None and c.shards}
    return _sharded.Ranks(shards) if shards else None


def _forward(
    inputs: list[torch.Tensor], parameters: list[torch.Tensor], kinds: list[int], key: int
) -> list[torch.Tensor]:
    call = _calls[key]()
    with torch.no_grad(), call.alone():
        results = call(inputs, None if call.own(parameters) is not None else parameters)
    call.check(results, inputs[0].shape[0])
    given = set(map(id, [*inputs, *parameters]))
    return [r if _is_alone(r) and id(r) not in given else r.contiguous().clone() for r in results]


def _set_of(key: Any, *more: Any) -> Any:
    keys = torch._C.DispatchKeySet(key)
    for k in more:
        keys = keys.add(k)
    return keys


_AUTOGRAD = _set_of(
    torch._C.DispatchKey.AutogradFunctionality,
    torch._C.DispatchKey.ADInplaceOrView,
    torch._C.DispatchKey.AutogradCPU,
    torch._C.DispatchKey.AutogradCUDA,
    torch._C.DispatchKey.AutogradOther,
)


class _WithAutograd:
    """Switch autograd on for the recomputation inside a call of the executor, which runs below
    it. By a guard of torch's, which puts all of its thread's keys back."""

    __slots__ = ("_grad", "_guard")

    def __enter__(self) -> None:
        included = torch._C._dispatch_tls_local_include_set()
        excluded = torch._C._dispatch_tls_local_exclude_set() - _AUTOGRAD
        self._guard = torch._C._ForceDispatchKeyGuard(included, excluded)
        self._guard.__enter__()
        self._grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)

    def __exit__(self, *exception: Any) -> None:
        torch._C._set_grad_enabled(self._grad)
        self._guard.__exit__(*exception)


def _run_with_graph(
    call: _Call, inputs: list[torch.Tensor], parameters: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Run the call above autograd, inside `alone`: its results, and the leaves of their graph, for
    the inputs and the parameters."""
    own = call.own(parameters)
    given = inputs if own is not None else [*inputs, *parameters]
    leaves = [t.detach().requires_grad_(needed) for t, needed in zip(given, call.differentiated)]
    n = len(inputs)
    return call(leaves[:n], None if own is not None else leaves[n:]), [*leaves, *(own or [])]


def _forward_kept(
    inputs: list[torch.Tensor],
    parameters: list[torch.Tensor],
    kinds: list[int],
    held: int,
    shared: list[int],
    key: int,
) -> list[torch.Tensor]:
    """The results, and an empty tensor that has the graph as an attribute."""
    call, device, n_rows = _calls[key](), inputs[0].device, inputs[0].shape[0]
    token = torch.empty(0, dtype=torch.uint8, device=device)
    if not _core.wants_graph():
        return [*_forward(inputs, parameters, kinds, key), token]
    before, n_compiled = _bytes_now(device), _n_compiled()
    with _WithAutograd(), call.alone():
        results, leaves = _run_with_graph(call, inputs, parameters)
        graph = _Graph(results, leaves)
    call.check(results, n_rows)
    out = [r.detach() for r in results]
    del results, leaves
    if not _core.are_alone(out, _n_users):
        _take_from_graph(call, out, [*inputs, *parameters], shared)
    if _n_compiled() != n_compiled:
        _core.note_compiled()
    else:
        n_bytes = sum({_storage(r): untyped_storage(r).nbytes() for r in out}.values())
        graph.n_bytes = max(_bytes_now(device) - before - n_bytes, 0)
        call.held.saw(n_rows, graph.n_bytes)
    token._koila_graph = [graph]  # type: ignore[attr-defined]
    return [*out, token]


def _take_from_graph(
    call: _Call, results: list[torch.Tensor], given: list[torch.Tensor], shared: list[int]
) -> None:
    """Each of the results gets memory of its own, or that of the graph, where it is `shared`.
    given: inputs and parameters."""
    taken: set[int] | None = None
    for i, r in enumerate(results):
        if _is_alone(r):
            continue
        if taken is None:
            taken = {_storage(t) for t in given}
        if not _has_own_memory(r, taken):
            results[i] = r.contiguous().clone()
        elif i not in shared:
            # The graph has it too: from the next step on the plan knows, and nothing is copied.
            call.shared.add(i)
            results[i] = r.clone()


# Whole because it has as many arguments as a call of autograd.
def _backward_of(
    grads: list[torch.Tensor],
    inputs: list[torch.Tensor],
    parameters: list[torch.Tensor],
    kept: list[torch.Tensor],
    given: list[int],
    wanted: list[int],
    kinds: list[int],
    laid: list[int],
    key: int,
) -> list[torch.Tensor]:
    call, n_compiled = _calls[key](), _n_compiled()
    waiting: list[_Graph] = kept[-1]._koila_graph if kept else []  # type: ignore[attr-defined]
    with _WithAutograd(), call.alone():
        if waiting:
            graph = waiting.pop()
            if graph.n_bytes is None:
                _core.note_compiled()
            else:
                _core.note_used_up(graph.n_bytes)
        else:
            results, leaves = _run_with_graph(call, inputs, parameters)
            graph = _Graph(results, leaves)
            if call.shards:
                return _sharded_gradients(
                    call, results, grads, given, leaves[: len(inputs)], parameters, wanted
                )
            del results, leaves
        found = graph.gradients(given, grads, wanted)
    if _n_compiled() != n_compiled:
        _core.note_compiled()
    del graph
    if not _core.are_alone(found, _n_users):
        _take_apart(found, grads, [*inputs, *parameters], wanted)
    gradients: list[torch.Tensor] = found  # type: ignore[assignment]
    call.laid.saw(inputs, parameters, wanted, gradients)
    return gradients


def _take_apart(
    found: list[torch.Tensor | None],
    grads: list[torch.Tensor],
    given: list[torch.Tensor],
    wanted: list[int],
) -> None:
    """Each of `found` gets memory of its own; zeros take the place of None. given: inputs and
    parameters."""
    met = set(map(id, [*grads, *given]))
    for i, at in enumerate(wanted):
        g, found[i] = found[i], None
        if g is None:
            g = torch.zeros_like(given[at])
        elif id(g) in met or not _is_alone(g):
            g = g.clone()
        met.add(id(g))
        found[i] = g


def _sharded_gradients(
    call: _Call,
    results: list[torch.Tensor],
    grads: list[torch.Tensor],
    given: list[int],
    inputs: list[torch.Tensor],
    parameters: list[torch.Tensor],
    wanted: list[int],
) -> list[torch.Tensor]:
    """A sharded module adds to the .grad of its own parameters. Returns the gradients of the
    inputs and of this rank's part of each parameter."""
    pairs = [(results[i], g) for i, g in zip(given, grads) if results[i].requires_grad]
    leaves = [t for t in inputs if t.requires_grad]
    found = iter(_sharded.gradients(call.shards, pairs, leaves))
    of_inputs = [next(found) if t.requires_grad else None for t in inputs]
    all_found = list(zip([*of_inputs, *found], [*inputs, *parameters]))
    return [
        torch.zeros_like(t) if g is None else g.detach().clone()
        for g, t in (all_found[i] for i in wanted)
    ]


@own_operators("CPU", "CUDA")
def _operators() -> list[OwnOperator]:
    """See src/placement/rules_custom.c. id: of the call, in _calls."""
    forward = "(Tensor[] inputs, Tensor[] parameters, int[] kinds, "
    return [
        OwnOperator(f"opaque{forward}int id) -> Tensor[]", _forward, _fake_forward),
        OwnOperator(
            f"opaque_kept{forward}int held, int[] shared, int id) -> Tensor[]",
            _forward_kept,
            _fake_kept,
        ),
        OwnOperator(
            "opaque_backward(Tensor[] grads, Tensor[] inputs, Tensor[] parameters, Tensor[] kept, "
            "int[] given, int[] wanted, int[] kinds, int[] laid, int id) -> Tensor[]",
            _backward_of,
            _fake_backward,
        ),
    ]


def _fake_backward(
    grads: list[torch.Tensor],
    inputs: list[torch.Tensor],
    parameters: list[torch.Tensor],
    kept: list[torch.Tensor],
    given: list[int],
    wanted: list[int],
    kinds: list[int],
    laid: list[int],
    id: int,
) -> list[torch.Tensor]:
    all_given = [*inputs, *parameters]
    out = [torch.empty_like(all_given[i]) for i in wanted]
    rest = iter(laid)
    for i in rest:
        stride = list(itertools.islice(rest, out[i].dim()))
        out[i] = out[i].new_empty_strided(out[i].shape, stride)
    return out


def _fake_forward(
    inputs: list[torch.Tensor], parameters: list[torch.Tensor], kinds: list[int], id: int
) -> list[torch.Tensor]:
    call, n_rows = _calls[id](), inputs[0].shape[0]
    sizes = call.sizes(n_rows)
    if sizes is None:
        found = call.shapes[_sharded.shapes_key(inputs)]
        sizes = [((n_rows, *shape[1:]), dtype) for shape, dtype in found]
    return [inputs[0].new_empty(size, dtype=dtype) for size, dtype in sizes]


def _fake_kept(
    inputs: list[torch.Tensor],
    parameters: list[torch.Tensor],
    kinds: list[int],
    held: int,
    shared: list[int],
    id: int,
) -> list[torch.Tensor]:
    results = _fake_forward(inputs, parameters, kinds, id)
    return [*results, inputs[0].new_empty((len(inputs[0]), held), dtype=torch.uint8)]


def _as_it_is(t: torch.Tensor) -> torch.Tensor:
    return t


def _shapes_of_rows(inputs: list[torch.Tensor], parameters: list[torch.Tensor], id: int) -> _Shapes:
    """Shapes and dtypes of the results, from a run on two real rows of zeros, because a custom
    kernel has no shape function. What a graph of them holds is the first guess at what larger
    slices will hold."""
    batch = inputs[0].shape[0]
    rows = min(2, batch)
    call = _calls[id]()
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
        given = [
            p.detach()
            if call.pure and not _core.is_lazy(p)
            else torch.zeros(p.shape, dtype=p.dtype, device=p.device)
            for p in parameters
        ]
        instead = getattr(call.function, "_torchdynamo_orig_callable", None)
        if call.module is not None and not call.shards:
            instead = _replica.evaluating(call.module, call.names, given)
        seen = None if instead is not None else call.module
        grad = any(call.differentiated) and not call.shards
        for t, needed in zip([*real, *given] if grad else [], call.differentiated):
            t.requires_grad_(needed)
        with contextlib.ExitStack() as settings:
            settings.enter_context(_WithAutograd() if grad else torch.no_grad())
            # A checkpoint would count what is saved here.
            settings.enter_context(torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is))
            if seen is not None:
                settings.enter_context(call.alone())
            settings.enter_context(_evaluating(seen))
            results = call(real, given, instead)
            shapes = [(tuple(r.shape), r.dtype) for r in results]
            of_results = sum(r.numel() * r.element_size() for r in results)
            # What goes with them was held. A workspace of cuBLAS stays, from the first product on.
            before = _bytes_now(real[0].device)
            del results
            held = before - _bytes_now(real[0].device) - of_results
    call.held.saw(rows, max(held, 0))
    return shapes


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
        ctx.call, ctx.n_inputs, ctx.shared = call, n_inputs, sorted(call.shared)
        ctx.used = False
        ctx.set_materialize_grads(False)
        arguments = list(tensors[:n_inputs]), list(tensors[n_inputs:]), call.kinds
        if call.shards or not any(call.differentiated):
            ctx.save_for_backward(*tensors)
            return tuple(_operators().opaque(*arguments, call.key))
        held = call.held.per_row()
        *results, graph = _operators().opaque_kept(*arguments, held, ctx.shared, call.key)
        ctx.save_for_backward(*tensors, *(results[i] for i in ctx.shared), graph)
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        call, saved, n = ctx.call, ctx.saved_tensors, ctx.n_inputs
        n_tensors = len(ctx.needs_input_grad) - 2
        tensors, kept = saved[:n_tensors], saved[n_tensors:]
        given = [i for i, g in enumerate(grads) if g is not None]
        unused = call.unused(given)
        wanted = [
            i
            for i, (t, needed) in enumerate(zip(tensors, ctx.needs_input_grad[2:]))
            if (
                t.is_floating_point() or t.is_complex()
                if call.shards
                else needed and i - n not in unused
            )
        ]
        if not given or not wanted:
            return (None,) * len(ctx.needs_input_grad)
        found = _operators().opaque_backward(
            [grads[i] for i in given],
            list(tensors[:n]),
            list(tensors[n:]),
            # A graph is used up by its first backward; a second one runs the module again.
            [] if ctx.used else list(kept),
            given,
            wanted,
            call.kinds,
            call.laid.listed(wanted),
            call.key,
        )
        ctx.used = True
        of = dict(zip(wanted, found))
        return None, None, *(of.get(i) for i in range(n_tensors))


def _number_of(node: Any) -> int | None:
    """Decides the backward of this node of `_Opaque`, beside the recorded calls and the graph;
    None: it must be recorded. See backward_form.c."""
    call: _Call = node.call
    return None if node.used or call.shards else call.laid.version


_core.learn_function(_Opaque._backward_cls, _number_of)

# Arguments that are no nesting of others.
_PLAIN = {torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, str}


def _taken_apart(args: Any, kwargs: Any) -> tuple[list[Any], Any]:
    """The arguments of a call without their nesting, and the nesting: (how many have no name, names
    of the others), or torch's."""
    leaves = [*args, *kwargs.values()]
    if all(type(x) in _PLAIN or _core.is_lazy(x) for x in leaves):
        return leaves, (len(args), tuple(kwargs))
    return pytree.tree_flatten((args, kwargs))


def _put_together(leaves: list[Any], structure: Any) -> tuple[Any, Any]:
    if isinstance(structure, tuple):
        n, names = structure
        return tuple(leaves[:n]), dict(zip(names, leaves[n:]))
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    return args, kwargs


class Runner:
    """Calls `function`; with a lazy argument it records the call instead."""

    def __init__(
        self,
        function: Callable[..., Any],
        module: torch.nn.Module | None,
        learn: Callable[..., tuple[list[int], list[set[int]]] | None] | None = None,
        pure: bool = False,
    ) -> None:
        """learn: finds out whether rows are independent, from module and function, how its
        arguments are rebuilt from tensors, and these. Returns `kinds` and `used` of a call; None:
        it must be recorded. pure: each entry of the results, along their first dimension, depends
        on that of the arguments and on parameters alone, whatever the entries are, and nothing is
        written or drawn: the module may run with its own parameters to see what it gives."""
        self._function, self._module, self._learn = function, module, learn
        self._pure = pure
        self._own = None if module is None else _Own(module)
        self._known: dict[Any, _Call | None] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = _taken_apart(args, kwargs)
        at = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
        if not any(_core.is_lazy(leaves[i]) for i in at):
            return self._function(*args, **kwargs)
        at.sort(key=lambda i: not _core.is_lazy(leaves[i]))  # lazy ones first: they tell the rows
        tensors = [leaves[i] for i in at]
        needed: dict[str, bool] = {}
        shards: list[torch.Tensor] = []
        parameters: list[torch.Tensor] = []
        if self._module is not None and self._own is not None:
            named = self._own.known()
            if named is None and not _sharded.is_sharded(self._module):
                named = self._own.now()
            if named is None:
                _core.ranks_ask(ranks_of)
                shards, parameters = _sharded.shards(self._module)
            else:
                parameters = list(named.values())
                needed = {name: p.requires_grad for name, p in named.items()}
        constants = [None if isinstance(x, torch.Tensor) else x for x in leaves]
        call = self._call(constants, structure, at, tensors, needed, shards)
        if call is None:
            return self._function(*args, **kwargs)
        if shards:
            _sharded.rows_shapes(
                call, tensors, lambda: _shapes_of_rows(tensors, parameters, call.key)
            )
        elif call.of_rows is None:
            with _sharded.looking_up():
                call.of_rows = _shapes_of_rows(tensors, parameters, call.key)
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
        tensors: list[torch.Tensor],
        needed: dict[str, bool],
        shards: list[torch.Tensor],
    ) -> _Call | None:
        """The `_Call` for these arguments; None: it must be recorded. An equal call gets the same
        one, so that the recorder reuses its shapes and its plan, and what it has measured."""

        def rebuild(tensors: list[torch.Tensor]) -> Any:
            values = list(constants)
            for i, t in zip(at, tensors):
                values[i] = t
            return _put_together(values, structure)

        grad = torch.is_grad_enabled()
        flags = [*(t.requires_grad for t in tensors), *needed.values()]
        if shards:
            flags = [t.is_floating_point() or t.is_complex() for t in [*tensors, *shards]]
        differentiated = [grad and flag for flag in flags]
        n_rows = tensors[0].shape[:1]
        training = self._module is not None and self._module.training
        alike = (
            structure if isinstance(structure, tuple) else repr(structure),
            tuple(at),
            training,
            tuple(needed),
            tuple(differentiated),
            tuple(map(id, shards)),
            tuple((t.dtype, t.shape[t.shape[:1] == n_rows :]) for t in tensors),
            tuple((type(c), c) for c in constants),
            _device.CURRENT_DEVICE,
            _autocast_now(),
        )
        try:
            if alike in self._known:
                return self._known[alike]
            is_hashable = True
        except TypeError:  # an argument without a hash
            is_hashable = False
        learned: Any = [EACH if self._pure else EITHER] * len(tensors), None
        if self._learn is not None:
            learned = self._learn(self._module, self._function, rebuild, tensors)
        call = None
        if learned is not None:
            kinds, used = learned
            call = _Call(
                *(self._function, rebuild, self._own, needed, shards, differentiated),
                *(kinds, used, self._pure),
            )
        if len(self._known) >= _MAX_KNOWN:  # an argument that is another one each time
            self._known.clear()
        if is_hashable:
            self._known[alike] = call
        return call


class OpaqueModule(torch.nn.Module):
    """The result of `opaque(module)`: a module around the given one, `.module`, with its
    parameters, buffers and modes."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self.training = module.training
        self._run = Runner(module, module)

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

    The autograd graph of a slice waits for its backward; the bytes that it holds are measured, and
    planned with from the second step on. Where a plan has forward and backward in different loops,
    fn runs in each of them. Buffers that fn writes and random numbers that it draws are not
    managed: they change once per slice and run. Without lazy arguments fn is called directly. A
    sharded module runs again for its backward, and its collectives once per slice and run: the
    ranks agree on the number of slices before a step runs, and raise together where they cannot
    agree, or where one of them fails outside of the module.

    Returns: for a module an `OpaqueModule`, which can be a part of a model; for a function a
        function.

    Example:
        >>> scale = opaque(lambda x: x * torch.sigmoid(x))
        >>> with micro_batch(4):
        ...     scale(model(lazy(images))).sum().backward()
        >>> last_plan().n_micro_batches, last_plan().gathers
        (3, [])
    """
    if isinstance(fn, torch.nn.Module):
        return OpaqueModule(fn)
    if not callable(fn):
        raise ValueError(
            f"opaque({fn!r}): expected a module or a function, got {type(fn).__name__}"
        )
    run = Runner(fn, None)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    return call

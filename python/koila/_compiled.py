"""Modules that torch.compile made run as they are on slices of a lazy batch.

A compiled module cannot be recorded. It is called on slices, like the modules of `opaque()`, where
that gives what it gives on all rows. Whether it does is learned from its original code, once for
each way of calling it: the code is recorded for two small batches, and must be

  cut by rows   all results are rows in one loop, without a gather
  alike         the two recordings differ in nothing but the number of rows, where a shape has it
                (`x / len(x)` does: it would be divided by the rows of a slice)
  pure          it writes no buffers

All else is recorded as it was written: a loss or a batch norm in training mode inside the module,
and compiled functions. If it was Inductor that compiled them, the loops of the step's plan are
compiled, as by `koila.compile("on")`. So is the first call of a module that `module.compile()`
compiled: then what is called there is put behind a `_CompiledCall`.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from . import _core, _sharded
from ._errors import KoilaError
from ._opaque import ROWS, WHOLE, Runner, running
from ._torch import untyped_storage
from ._undo import UndoWrites

_SIZES = (7, 11)  # rows of the two recordings
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")

_TAKES_ROWS = "aten::native_group_norm("  # the number of rows is an argument, of no other effect


MODULE = "torch._dynamo.eval_frame"  # imported by programs that compile


class _Here(threading.local):
    learning = False
    uncounted = False  # a call that must be compiled as a whole, and need not now


_here = _Here()
_installed: list[Callable[..., Any]] = []  # the call of a compiled module, as torch wrote it


def install() -> None:
    """Lets compiled modules know lazy tensors. Called by `lazy()`; does nothing in programs that
    compile nothing."""
    dynamo: Any = sys.modules.get(MODULE)
    if _installed or dynamo is None or not hasattr(dynamo, "OptimizedModule"):
        return
    plainly = dynamo.OptimizedModule.__call__
    _installed.append(plainly)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _meets_lazies(args, kwargs):
            return plainly(self, *args, **kwargs)
        kept = self.__dict__.get("_koila_call")
        if kept is None:
            compiled = functools.partial(plainly, self)
            kept = self.__dict__["_koila_call"] = _CompiledCall(self, compiled, self)
        return kept.lazily(*args, **kwargs)

    dynamo.OptimizedModule.__call__ = call
    if hasattr(dynamo, "_callback_from_stance"):
        _leave_lazies_alone(dynamo)


class _CompiledCall:
    """A compiled call of a module, which runs on slices of lazy batches, where that may be. It lies
    in the module's dictionary; copies and pickles of the module have none.

    compiled: the call; told: has `get_compiler_config()`, or not.
    """

    def __init__(self, module: torch.nn.Module, compiled: Callable[..., Any], told: Any) -> None:
        self.module, self.compiled, self._told = module, compiled, told
        self._runner: Runner | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not _meets_lazies(args, kwargs):
            return self.compiled(*args, **kwargs)
        return self.lazily(*args, **kwargs)

    def lazily(self, *args: Any, **kwargs: Any) -> Any:
        """The call, with lazy tensors among the arguments."""
        if _here.learning:
            return self.compiled(*args, **kwargs)
        if self._runner is None and _may_be_cut(self.module, self._told):
            self._runner = Runner(self.compiled, self.module, _learned)
        return (self._runner or self.compiled)(*args, **kwargs)

    def __reduce__(self) -> Any:
        return type(None), ()


def _compiled_by_itself(called: Any) -> None:
    """`called` is what a compiled function runs: if that is a module which `module.compile()`
    compiled, its next call with lazy tensors runs on slices."""
    module = getattr(called, "__self__", None)
    if not isinstance(module, torch.nn.Module) or called.__name__ != "_call_impl":
        return
    compiled: Any = module._compiled_call_impl
    if compiled is not None and not isinstance(compiled, _CompiledCall):
        module.__dict__["_compiled_call_impl"] = _CompiledCall(module, compiled, compiled)


def _leave_lazies_alone(dynamo: Any) -> None:
    """What torch compiled runs its original code on lazy tensors: they are not traced."""
    chosen = dynamo._callback_from_stance
    count: Any = getattr(dynamo, "set_fullgraph_compiled_frame_count", None)

    def callback_from_stance(callback: Any) -> Any:
        # None: torch runs the original code anyway, as of zero_grad() of every optimizer
        if callback is not None and _core.is_recording() and not running.here:
            given = sys._getframe(1).f_locals  # of the wrapper around what was compiled
            lazies = _lazies_in((given.get("args"), given.get("kwargs"), _held(given.get("fn"))))
            if lazies:
                _compiled_by_itself(given.get("fn"))
                _here.uncounted |= bool(given.get("fullgraph_count_enabled"))
                if not _here.learning and _by_inductor(_backend_of(callback)):
                    _core.tape_of(lazies[0]).compiles = True
                return None
        return chosen(callback)

    def frame_count(n: int) -> int:
        """How many frames ran compiled since; with fullgraph=True none is an error."""
        found: int = count(n)
        uncounted, _here.uncounted = _here.uncounted and n < 0, False
        return 1 if uncounted else found

    dynamo._callback_from_stance = callback_from_stance
    if count is not None:
        dynamo.set_fullgraph_compiled_frame_count = frame_count


def _backend_of(callback: Any) -> Any:
    """As torch's own innermost_backend(), which 2.10 lacks."""
    while hasattr(callback, "_torchdynamo_orig_backend"):
        callback = callback._torchdynamo_orig_backend
    return callback


def _by_inductor(backend: Any) -> bool:
    """Does Inductor, which compiles koila's loops too, compile there?"""
    name = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", "")
    return bool(name == "inductor")


def _held(function: Any) -> list[Any]:
    """What a closure holds."""
    cells = getattr(function, "__closure__", None) or ()
    return [c.cell_contents for c in cells if c != types.CellType()]


def _lazies_in(given: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(given) if _core.is_lazy(x)]


def _meets_lazies(args: Any, kwargs: Any) -> bool:
    if running.here or not _core.is_recording():
        return False
    return any(map(_core.is_lazy, args)) or bool(_lazies_in((args, kwargs)))


def _may_be_cut(module: torch.nn.Module, told: Any) -> bool:
    parallel = torch.nn.parallel.DistributedDataParallel
    if any(isinstance(m, parallel) for m in module.modules()) or _sharded.is_sharded(module):
        return False  # they act on gradients by themselves
    config = getattr(told, "get_compiler_config", None)
    # The memory of what a CUDA graph gives is that of its next run.
    return not (config and (config() or {}).get("triton.cudagraphs"))


def _learned(
    module: torch.nn.Module,
    function: Callable[..., Any],
    rebuild: Callable[[list[torch.Tensor]], Any],
    tensors: list[torch.Tensor],
) -> tuple[list[int], list[set[int]]] | None:
    """What the arguments of a call are, and of each result the parameters that it depends on. None:
    it must be recorded."""
    n_rows = len(tensors[0]) if tensors[0].dim() else 0
    if n_rows < 2:
        return None
    kinds = [ROWS if _core.is_lazy(t) and t.dim() and len(t) == n_rows else WHOLE for t in tensors]

    def call(given: list[torch.Tensor]) -> Any:
        args, kwargs = rebuild(given)
        return function(*args, **kwargs)

    _here.learning = True
    open_step = _core.swap_open(None)
    before = _core.configure(dry=True, strict=False, slices="fewest")
    try:
        _core.configure(budget=None, micro_batch=1)
        small, large = (_recorded(module, call, tensors, kinds, n) for n in _SIZES)
    except (KoilaError, RuntimeError, TypeError, ValueError):
        return None  # its original raises, perhaps for such small batches alone
    finally:
        _core.configure(**before)
        _core.swap_open(open_step)
        _here.learning = False
    if small is None or large is None or not _are_alike(small, large):
        return None
    return kinds, small.used


class _Recording:
    """text: the graph; constants: plain tensors in it; used: of each result the parameters that it
    depends on."""

    def __init__(self, text: str, constants: list[torch.Tensor], used: list[set[int]]) -> None:
        self.text, self.constants, self.used = text, constants, used


def _recorded(
    module: torch.nn.Module,
    call: Callable[[list[torch.Tensor]], Any],
    tensors: list[torch.Tensor],
    kinds: list[int],
    n: int,
) -> _Recording | None:
    """The original code on a batch of n rows; None: it is not cut by rows in one loop."""
    real = [
        torch.zeros((n, *t.shape[1:]) if k == ROWS else t.shape, dtype=t.dtype, device=t.device)
        for t, k in zip(tensors, kinds)
    ]
    with UndoWrites() as writes:  # type: ignore[no-untyped-call]
        axis = _core.axis(n)
        _core.tape_open()
        given = [_core.lazy_leaf(t, axis, 0) if k == ROWS else t for t, k in zip(real, kinds)]
        results = [r for r in pytree.tree_leaves(call(given)) if r is not None]
        if not results or not all(map(_core.is_lazy, results)):
            return None
        if writes.wrote([*module.parameters(), *module.buffers(), *real]):
            return None
        if not _are_rows(results, n):
            return None
        tape = _core.tape_of(results[0])
        inputs = {untyped_storage(t).data_ptr() for t in real}
        constants = [
            t for _, t in _core.leaves_on(tape) if untyped_storage(t).data_ptr() not in inputs
        ]
        numbers = {id(p): i for i, p in enumerate(module.parameters())}
        return _Recording(tape.text(), constants, [_used(r, numbers) for r in results])


def _are_rows(results: list[torch.Tensor], n: int) -> bool:
    """Are all results rows of a batch of n, made in one loop without a gather or an effect?"""
    plan = _core.explain(results)
    if _core.tape_of(results[0]).n_effects or len(plan["loops"]) != 1 or plan["gathers"]:
        return False
    return all(r.dim() and len(r) == n and _core.cut_of(r)[:2] == ("slice", 0) for r in results)


def _used(result: torch.Tensor, numbers: dict[int, int]) -> set[int]:
    """The numbers of the parameters to which the result's graph leads."""
    found, seen, left = set(), set(), [result.grad_fn]
    while left:
        node: Any = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        number = numbers.get(id(getattr(node, "variable", None)))
        if number is not None:
            found.add(number)
        left += [n for n, _ in node.next_functions]
    return found


def _are_alike(small: _Recording, large: _Recording) -> bool:
    if small.used != large.used or len(small.constants) != len(large.constants):
        return False
    for a, b in zip(small.constants, large.constants):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if a.data_ptr() != b.data_ptr() and not torch.equal(a, b):
            return False
    a_lines, b_lines = small.text.split("\n"), large.text.split("\n")
    return len(a_lines) == len(b_lines) and all(map(_line_is_alike, a_lines, b_lines))


def _line_is_alike(a: str, b: str) -> bool:
    """Equal but for sizes: in brackets, at most one in each pair of [], the same multiple of the
    rows. (Strides, in braces, may have more; some operators have the rows as an argument.)"""
    if a == b or a.startswith("axis "):
        return True
    if _NUMBER.sub("#", a) != _NUMBER.sub("#", b):
        return False
    n_a, n_b = _SIZES
    takes_rows = _TAKES_ROWS in a
    n_sizes: dict[int, int] = {}  # by the place of the bracket
    for x, y in zip(_NUMBER.finditer(a), _NUMBER.finditer(b)):
        if x[0] == y[0]:
            continue
        opened = max(a.rfind("[", 0, x.start()), a.rfind("{", 0, x.start()))
        closed = max(a.rfind("]", 0, x.start()), a.rfind("}", 0, x.start()))
        n_sizes[opened] = n_sizes.get(opened, 0) + 1
        if opened <= closed and takes_rows and (x[0], y[0]) == (str(n_a), str(n_b)):
            continue
        if opened <= closed or (a[opened] == "[" and n_sizes[opened] > 1):
            return False
        if not x[0].isdigit() or not y[0].isdigit():
            return False
        if int(x[0]) % n_a or int(y[0]) != int(x[0]) // n_a * n_b:
            return False
    return True

"""The arguments of an operator's call, and calls that are made now, on values."""

from __future__ import annotations

from typing import Any
from collections.abc import Callable

from ._torch import BelowAutograd, ModesAside, torch, untyped_storage, view_flags
from . import _core
from ._errors import UnsupportedError
from ._tensor import LazyTensor, plain, values_of

aten = torch.ops.aten


def is_dense(t: torch.Tensor) -> bool:
    """Do sizes and strides describe it?"""
    return t.layout is torch.strided and not t.is_nested


def with_strides(t: torch.Tensor, meta: tuple[Any, ...]) -> torch.Tensor:
    """A copy of `t`, of any sizes, with the strides of `meta`."""
    return torch.empty_strided(t.size(), meta[3], dtype=meta[0], device=meta[1]).copy_(t)


def empty_like_meta(meta: tuple[Any, ...]) -> torch.Tensor:
    """An uninitialised tensor as it was recorded."""
    return torch.empty_strided(meta[2], meta[3], dtype=meta[0], device=meta[1])


def in_order(t: torch.Tensor, meta: tuple[Any, ...]) -> torch.Tensor:
    """`t`, of any sizes, dense in memory with its dimensions in the order of `meta`'s strides.
    Returns `t` itself if it is so already, else a copy."""
    dims = sorted(range(t.dim()), key=lambda d: (-meta[3][d], d))
    dense = torch.empty_permuted(t.size(), dims, dtype=t.dtype, device=t.device)
    if all(n <= 1 or a == b for n, a, b in zip(t.size(), t.stride(), dense.stride())):
        return t
    return dense.copy_(t)


def clone_exactly(t: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, also where they overlap."""
    n = 1 + sum((s - 1) * d for s, d in zip(t.size(), t.stride())) if t.numel() else 0
    return t.as_strided((n,), (1,)).clone().as_strided(t.size(), t.stride(), 0)


def empty_like_exactly(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device)


def enter_modes() -> Any:
    """Guards under which recorded calls run: as BelowAutograd, without autocast and without
    dispatch to Python. They end when the result dies."""
    return BelowAutograd(torch._C._DisableAutocast, torch._C._DisableTorchDispatch)


def map_tensors(f: Callable[[torch.Tensor], Any], x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return f(x)
    if isinstance(x, (list, tuple)):
        kind = type(x) if type(x) in (list, tuple) else list
        return kind(map_tensors(f, i) for i in x)
    return x


def map_call(
    f: Callable[[torch.Tensor], Any], args: Any, kwargs: Any
) -> tuple[list[Any], dict[str, Any]]:
    return [map_tensors(f, a) for a in args], {k: map_tensors(f, a) for k, a in kwargs.items()}


def tensors_of(args: Any, kwargs: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_call(lambda t: found.append(t), args, kwargs)
    return found


def lazies_of(args: Any, kwargs: Any) -> list[LazyTensor]:
    return [t for t in tensors_of(args, kwargs) if _core.is_lazy(t)]


def which_written(func: Any, args: Any, kwargs: Any) -> list[bool]:
    """For every tensor of the call in order: is it written?"""
    flags: list[bool] = []
    by_name = {
        a.name: a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments
    }
    positional = [
        a.alias_info is not None and a.alias_info.is_write
        for a in func._schema.arguments
        if not a.kwarg_only
    ]
    for write, a in zip(positional, args):
        flags += [write] * len(tensors_of((a,), {}))
    for name, a in kwargs.items():
        flags += [by_name[name]] * len(tensors_of((a,), {}))
    return flags


def redispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _core.dispatch(func, (LazyTensor,), args, kwargs)


def _call_plain(func: Any, args: Any, kwargs: Any) -> Any:
    a, k = map_call(plain, args, kwargs)
    with view_flags():
        return func(*a, **k)


def gather(func: Any, args: Any, kwargs: Any) -> None:
    """Make every lazy argument concrete, in one run, for an operator that runs on values. Sliced
    arguments are listed in `last_plan().gathers`, and `strict()` refuses them."""
    _core.gather(lazies_of(args, kwargs), func.name().removesuffix(".default"))


def run_on_reals(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make every lazy argument concrete, in one run, and call the operator now. The result is
    plain."""
    if any(t.is_meta for t in lazies_of(args, kwargs)):
        return _call_on_values(func, args, kwargs)
    gather(func, args, kwargs)
    return _call_plain(func, args, kwargs)


def _call_on_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator whose result is not known before it runs, on the values of `meta` tensors. A
    tensor that it returns has no values again."""
    a, k = map_call(values_of, args, kwargs)
    return map_tensors(lambda t: t.to("meta"), func(*a, **k))


def value_dependent(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator whose result is not known before it runs. Lazy tensors that it writes get the
    written contents."""
    flags = which_written(func, args, kwargs)
    if not any(flags):
        return run_on_reals(func, args, kwargs)
    gather(func, args, kwargs)
    return write_now(func, args, kwargs, flags)


def write_now(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], flags: list[bool]) -> Any:
    """Call the operator now. `flags`: for every tensor of the call in order, is it written? For a
    lazy tensor the operator writes a copy, and a write of that copy is recorded."""
    _core.concrete_all(lazies_of(args, kwargs))
    at = iter(flags)
    copies: list[tuple[Any, torch.Tensor]] = []

    def real(t: torch.Tensor) -> torch.Tensor:
        written = next(at)
        if written and _core.is_lazy(t):
            copies.append((t, clone_exactly(plain(t))))
            return copies[-1][1]
        if written:
            unshare(t)
        return plain(t)

    a, k = map_call(real, args, kwargs)
    with view_flags():
        result = func(*a, **k)
    if isinstance(result, torch.ScriptObject):
        result = _waited(result)
    elif isinstance(result, tuple):
        result = tuple(_waited(r) if isinstance(r, torch.ScriptObject) else r for r in result)
    for lazy, copied in copies:
        redispatch(aten.copy_.default, (lazy, copied), {})
    back = {id(c): t for t, c in copies}
    return map_tensors(lambda t: back.get(id(t), t), result)


def _waited(work: Any) -> Any:
    """Wait for a collective. Returns finished work for the caller, because some kinds of work write
    again, or hang, at a second wait. NCCL gives no work for a call that is not asynchronous: what
    comes after it on the stream waits."""
    from torch._C import _distributed_c10d as c10d

    if c10d.Work.unbox(work) is None:
        return work
    work.wait()
    done: Any = torch.futures.Future()
    done.set_result(None)
    return c10d._create_work_from_future(done).boxed()  # type: ignore[attr-defined]


def write_real(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write lazy data into a plain tensor: it becomes concrete now. Leaves recorded from that
    memory keep its old contents."""
    flags = which_written(func, args, kwargs)
    tensors = tensors_of(args, kwargs)
    written = [t for t, w in zip(tensors, flags) if w]
    if any(_core.is_lazy(t) for t in written):
        raise UnsupportedError(f"{func} writes a lazy and a plain tensor at once")
    _core.concrete_all(lazies_of(args, kwargs))
    for t in written:
        unshare(t)
    return _call_plain(func, args, kwargs)


def unshare(real: torch.Tensor) -> None:
    """Leaves recorded from the memory of `real` keep their contents: each gets a copy of its
    own."""
    tape = _core.current_tape()
    if tape is None:
        return
    memory = untyped_storage(real).data_ptr()
    for v, leaf in _core.leaves_on(tape):
        if leaf is real or untyped_storage(leaf).data_ptr() == memory:
            _own(tape, v, leaf)


def _own(tape: _core.Tape, v: int, leaf: torch.Tensor) -> None:
    with torch.no_grad():
        _core.replace_leaf(tape, v, clone_exactly(leaf.detach()))


def keep_contents(tape: _core.Tape, leaves: list[int]) -> None:
    """A plain tensor is about to be written: these leaves of its memory keep their contents. Not
    inside a transform, which would see the copy being made."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return
    with ModesAside(), torch.inference_mode(False):
        for v, leaf in _core.leaves_on(tape):
            if v in leaves:
                _own(tape, v, leaf)

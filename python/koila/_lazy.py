"""`lazy()`: find the tensors in the given values, check their batch sizes, and wrap them. All
checks come before the first wrapping, so a call that fails wraps nothing.

Everything here runs once per `lazy()` call, never once per operator.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, TypeVar, overload

import torch
from torch.utils.weak import WeakIdKeyDictionary

from . import _aside, _compiled, _core, _experts, _packed, _sharded
from ._errors import UnsupportedError
from ._switch import OFF

_T = TypeVar("_T")
_U = TypeVar("_U")
_V = TypeVar("_V")
Batch = Any  # int | None | a structure of them, like torch.func.vmap's in_dims
_Leaf = Callable[[torch.Tensor, Batch, str], Any]

_SHORT = {
    "float": "f", "int": "i", "uint": "u", "complex": "c", "bfloat": "bf",
}  # fmt: skip


def describe(t: torch.Tensor) -> str:
    """`f32[256, 3, 32, 32]`."""
    name = str(t.dtype).removeprefix("torch.")
    stem = name.rstrip("0123456789")
    return f"{_SHORT.get(stem, stem)}{name[len(stem) :]}[{', '.join(map(str, t.shape))}]"


# ---- containers: one walk, used by the look, the wrapping and run()


def _is_mapping(value: Any) -> bool:
    """Mappings, and classes that behave like one without saying so (tensor dicts)."""
    return isinstance(value, Mapping) or (
        not isinstance(value, type)
        and all(hasattr(type(value), name) for name in ("keys", "__getitem__", "__setitem__"))
    )


def _rebuild_mapping(value: Any, new: dict[Any, Any]) -> Any:
    """The same kind of mapping with other values. It is copied, because a constructor would lose
    attributes, default factories and encodings."""
    try:
        out = copy.copy(value)
        for key, item in new.items():
            out[key] = item
        return out
    except (TypeError, AttributeError):  # read-only mappings: they can be made from a dict
        return type(value)(new)


def _rebuild_sequence(value: Any, new: list[Any]) -> Any:
    """The same kind of list or (named) tuple with other items."""
    if type(value) is list:
        return new
    if isinstance(value, list):
        changed = copy.copy(value)
        changed[:] = new
        return changed
    return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)


def _taker(value: Any, leaf: _Leaf, packed: Any) -> Any:
    """Who takes this value in tree_map(); None: what is in it goes on."""
    if isinstance(value, torch.nn.utils.rnn.PackedSequence):
        return packed
    return leaf if isinstance(value, torch.Tensor) else None


def _is_container(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        or _is_mapping(value)
        or (dataclasses.is_dataclass(value) and not isinstance(value, type))
    )


def _below(dims: Batch, key: Any, keys: list[Any], where: str) -> Batch:
    """The part of `dims` that belongs to `value[key]`. An int or None reaches everything below
    it."""
    if dims is None or isinstance(dims, int):
        return dims
    if dataclasses.is_dataclass(dims) and not isinstance(dims, type):
        dims = {f.name: getattr(dims, f.name) for f in dataclasses.fields(dims)}
    if isinstance(dims, Mapping):
        if set(dims) != set(keys):
            raise ValueError(
                f"batch{where}: expected the keys {sorted(map(repr, keys))}, got "
                f"{sorted(map(repr, dims))}"
            )
        return dims[key]
    if isinstance(dims, (list, tuple)):
        if len(dims) != len(keys):
            raise ValueError(f"batch{where}: expected {len(keys)} entries, got {len(dims)}")
        return dims[keys.index(key)]
    raise ValueError(
        f"batch{where}: expected an int, None or a structure like the values, got "
        f"{type(dims).__name__}"
    )


def tree_map(
    leaf: _Leaf, value: Any, dims: Batch = None, where: str = "", packed: Any = None
) -> Any:
    """`value` with `leaf(tensor, dim, where)` in place of every tensor, and `packed(sequence, dim,
    where)` in place of every PackedSequence, which without `packed` is a tuple like any other. A
    container in which nothing changed is returned as it is."""
    if take := _taker(value, leaf, packed):
        return take(value, dims, where)
    if _is_mapping(value):
        keys = list(value.keys())
        new = {
            k: tree_map(leaf, value[k], _below(dims, k, keys, where), f"{where}[{k!r}]", packed)
            for k in keys
        }
        return value if all(new[k] is value[k] for k in keys) else _rebuild_mapping(value, new)
    if isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", None)  # a named tuple's dims may be given by name
        keys = list(names) if names and isinstance(dims, Mapping) else list(range(len(value)))
        out = [
            tree_map(leaf, item, _below(dims, keys[i], keys, where), f"{where}[{i}]", packed)
            for i, item in enumerate(value)
        ]
        same = all(a is b for a, b in zip(out, value, strict=True))
        return value if same else _rebuild_sequence(value, out)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        keys = [f.name for f in dataclasses.fields(value)]
        fields = {
            k: tree_map(
                leaf, getattr(value, k), _below(dims, k, keys, where), f"{where}.{k}", packed
            )
            for k in keys
        }
        if all(fields[k] is getattr(value, k) for k in keys):
            return value
        changed = copy.copy(value)
        for k, item in fields.items():
            object.__setattr__(changed, k, item)  # frozen ones too: the copy is ours
        return changed
    return value


# ---- the one line


class LazyLoader:
    """A loader whose batches are lazy. Length and attributes are the loader's own."""

    def __init__(self, loader: Any, batch: Batch) -> None:
        object.__setattr__(self, "_koila_loader", loader)
        object.__setattr__(self, "_koila_batch", batch)

    def __iter__(self) -> Iterator[Any]:
        for item in self._koila_loader:
            yield lazy(item, batch=self._koila_batch)

    def __len__(self) -> int:
        return len(self._koila_loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_koila_loader"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._koila_loader, name, value)

    def __repr__(self) -> str:
        name = repr(self._koila_loader)
        if " object at 0x" in name:  # Python's own, an address
            name = f"<{type(self._koila_loader).__name__}>"
        return f"lazy({name}, batch={self._koila_batch!r})"


@overload
def lazy(value: _T, /, *, batch: Batch = 0) -> _T: ...
@overload
def lazy(first: _T, second: _U, /, *, batch: Batch = 0) -> tuple[_T, _U]: ...
@overload
def lazy(first: _T, second: _U, third: _V, /, *, batch: Batch = 0) -> tuple[_T, _U, _V]: ...
@overload
def lazy(*values: Any, batch: Batch = 0) -> Any: ...
def lazy(*values: Any, batch: Batch = 0) -> Any:
    """Return the same values, lazy: everything computed from them runs one slice of the batch at a
    time, within the available memory.

    Args:
        values: tensors, or dicts, lists, (named) tuples, dataclasses and mappings that hold them,
            at any depth; all else passes through. Or one loader: an iterable of such batches.
        batch: the dimension that is the batch, for all; or a structure like `values` (as
            `torch.func.vmap`'s `in_dims`) of ints and `None` (not batched). A 0-dim tensor is not
            batched by `batch=0`.

    Returns:
        One value for one, a tuple for several, of the same kinds. A lazy tensor is a `torch.Tensor`
        with the full batch's shape; the tensor that was given is never written.

        Where nothing is to be cut koila steps aside: after 16 steps in a row with inputs of the
        same shapes, whose plans were whole and needed at most half of the memory that is free (or
        of the budget), plain copies are returned, and torch does the step alone. They answer
        `torch()`, `run()` and `koila.run()` as lazy tensors do, and are no `LazyTensor`. koila is
        back with the next call when anything is different: shapes, grad mode, settings, memory;
        and it looks at one step in 1024. A step that runs out of memory meanwhile raises torch's
        own error; from the next call on koila records again. `last_plan().n_aside` tells, and
        `koila.step_aside(False)` or `KOILA_STEP_ASIDE=0` turns it off. It never happens with
        inputs that require gradients, packed sequences, several calls of `lazy()` for one step,
        `strict()`, `micro_batch()`, inference mode, and where processes train together.

    Raises:
        ValueError: no value, no tensor, a batch dimension out of range, sizes that disagree, a
            value that is lazy along another dimension already (one that is lazy along the same
            dimension is returned as it is).
        UnsupportedError: a tensor that cannot be sliced (sparse, nested, quantised).
        OutOfMemory: torch holds more than the budget already.

    Example:
        >>> import torch
        >>> x, y = lazy(torch.randn(6, 2), torch.randn(6))
        >>> float(((x.sum(1) - y) ** 2).mean()) >= 0
        True

    Tensors without a batch dimension (parameters, their gradients, the optimizer's state) do not
    become smaller.
    """
    aside = _core.step_aside(values, batch)
    if aside is not None:
        return aside
    call = f"lazy(<{len(values)} value{'' if len(values) == 1 else 's'}>, batch={batch!r})"
    if not values:
        raise ValueError(f"{call}: expected at least one value, got none")
    if OFF:
        return values[0] if len(values) == 1 else values
    plain = _core.plain_inputs(values, batch)
    if plain is not None:
        return _plain_made_lazy(values, plain, call)
    if len(values) > 1:
        return _made_lazy(values, batch, values, call)
    value = values[0]
    if _is_loader(value):
        return LazyLoader(value, batch)
    return _made_lazy(value, _of_one(value, batch), values, call)


def _made_lazy(value: Any, batch: Batch, values: tuple[Any, ...], call: str) -> Any:
    """What `lazy(*values)` returns for `value`, all of them. Errors begin with `call`."""
    found, n_tensors, n_packed, n_to_pack = _look(value, batch, call)
    if n_tensors == 0:
        raise _no_tensor(values, call)
    if not found:
        if n_packed:  # lazy already
            return value
        if not _has_int(batch):
            raise ValueError(f"{call}: expected at least one batched value, got none")
        return value
    _check_sizes(found, call)
    again = {id(t) for t, d, _ in found if _core.is_lazy(t) and not _stays(t, d, call)}
    if all(_core.is_lazy(t) and id(t) not in again for t, _, _ in found):  # lazy already
        return value
    alone = found if not (again or n_packed or n_to_pack) and _aside.may() else None
    if alone and _core.takes_alone(alone):
        return _copied(value, batch)
    axis = _begin(found, alone, call)
    return _wrapped(value, batch, axis, again)


def _begin(found: _Found, alone: _Found | None, call: str) -> int:
    """The axis of the open step along which the tensors of `found` are cut. alone: they, if torch
    may do such steps alone."""
    first, d0, _ = found[0]
    if first.is_cpu:
        _core.held_fits(call)
    if _sharded.MODULE in sys.modules:
        _sharded.refuse_recording()
    if _compiled.MODULE in sys.modules:
        _compiled.install()
    if _experts.MODULE in sys.modules:
        _experts.install()
    if _packed.formed.refs:
        _packed.forget()
    axis: int = _core.axis(first.shape[d0])
    _core.watch_step(alone)
    return axis


def _plain_made_lazy(values: tuple[Any, ...], found: _Found, call: str) -> Any:
    """What `_made_lazy()` returns for what `_core.plain_inputs()` has found."""
    axis = _begin(found, found if _aside.may() else None, call)
    made: dict[int, Any] = {}
    for t, dim, _ in found:
        if id(t) not in made:  # one tensor given twice stays one
            made[id(t)] = _core.lazy_leaf(t, axis, dim)
    value = values[0] if len(values) == 1 else values
    if isinstance(value, torch.Tensor):
        return made[id(value)]
    new = [made.get(id(t), t) for t in value]
    return new if type(value) is list else tuple(new)


def _copied(value: Any, batch: Batch) -> Any:
    """`value` with plain copies of its batched tensors: torch does the step alone."""
    made: dict[int, torch.Tensor] = {}

    def copy_of(t: torch.Tensor, dim: Batch, where: str) -> torch.Tensor:
        if _dimension(t, dim, where) is None:
            return t
        if id(t) not in made:  # one tensor given twice stays one
            made[id(t)] = t.clone()
        return made[id(t)]

    return tree_map(copy_of, value, batch)


def _wrapped(value: Any, batch: Batch, axis: int, again: set[int]) -> Any:
    """`value` with lazy tensors in place of its batched ones, along `axis` of the open step. again:
    ids of lazy tensors that are plain by now."""
    made: dict[tuple[int, int], Any] = {}

    def wrap(t: torch.Tensor, dim: Batch, where: str) -> Any:
        d = _dimension(t, dim, where)
        if d is None or (_core.is_lazy(t) and id(t) not in again):
            return t
        key = (id(t), d)  # one tensor given twice stays one
        if key not in made:
            made[key] = _wrap(_core.concrete(t) if id(t) in again else t, axis, d)
        return made[key]

    def wrap_packed(packed: Any, dim: Batch, where: str) -> Any:
        if dim is None or _core.is_lazy(packed.data):
            return packed
        return _packed.lazy_packed(
            packed, lambda t: _wrap(t, None, 0), lambda t: _core.lazy_leaf(t, axis, 0)
        )

    return tree_map(wrap, value, batch, "", wrap_packed)


def _of_one(value: Any, batch: Batch) -> Batch:
    """What `batch` says of the only value: `in_dims=(0,)` for one argument is 0."""
    if isinstance(batch, (list, tuple)) and len(batch) == 1:
        if not (isinstance(value, (list, tuple)) and len(value) == 1):
            return batch[0]
    return batch


def _no_tensor(values: tuple[Any, ...], call: str) -> ValueError:
    kinds = ", ".join(sorted({type(v).__name__ for v in values}))
    advice = next((text for test, text in _INSTEAD if any(map(test, values))), "")
    return ValueError(f"{call}: expected at least one tensor, got {kinds}{advice}")


_Found = list[tuple[torch.Tensor, int, str]]  # (tensor, batch dimension, where in the values)


def _look(value: Any, batch: Batch, call: str) -> tuple[_Found, int, int, int]:
    """The batched tensors of `value` (for a packed sequence, a tensor with its rows), how many
    tensors there are, how many packed sequences are lazy already, and how many are not. Errors
    begin with `call`."""
    found: _Found = []
    n_tensors = n_packed = n_to_pack = 0

    def look(t: torch.Tensor, dim: Batch, where: str) -> torch.Tensor:
        nonlocal n_tensors
        n_tensors += 1
        d = _dimension(t, dim, where)
        if d is not None:
            found.append((t, d, where))
        return t

    def look_packed(packed: Any, dim: Batch, where: str) -> Any:
        nonlocal n_tensors, n_packed, n_to_pack
        n_tensors += 1
        if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int)):
            raise ValueError(
                f"expected an int or None for a PackedSequence{where and f' at {where}'}, got "
                f"{type(dim).__name__}"
            )
        if dim is not None and _core.is_lazy(packed.data):
            n_packed += 1
        elif dim is not None:
            n_to_pack += 1
            _check_sliceable(packed.data)
            found.append((packed.batch_sizes.new_empty(int(packed.batch_sizes[0])), 0, where))
        return packed

    try:
        tree_map(look, value, batch, "", look_packed)
    except ValueError as e:
        raise ValueError(f"{call}: {e}") from None
    except UnsupportedError as e:
        raise UnsupportedError(f"{call}: {e}") from None
    return found, n_tensors, n_packed, n_to_pack


def _check_sizes(found: _Found, call: str) -> None:
    """Raise ValueError when the batch sizes disagree."""
    (first, d0, where0) = found[0]
    size = first.shape[d0]
    for t, d, where in found:
        if t.shape[d] != size:
            along = f"axis {d0}" if d == d0 else f"axes {d0} and {d}"
            at0, at = (
                "" if re.fullmatch(r"(\[\d+\])?", w) else f" at {w}" for w in (where0, where)
            )
            raise ValueError(
                f"{call}: expected one size along {along}, got {size} ({describe(first)}{at0}) "
                f"and {t.shape[d]} ({describe(t)}{at})"
            )


def _stays(t: torch.Tensor, dim: int, call: str) -> bool:
    """Does `lazy(t)` return the lazy tensor `t` unchanged? Not if it is plain by now (a state kept
    from an earlier step): then it is made lazy anew.

    Raises:
        ValueError: the value is cut along another axis, or is one value for the whole batch. `lazy`
            would return it uncut along `dim`.
    """
    kind, at, made, here = _core.cut_of(t)
    if kind == "slice" and at != dim:
        matter = (
            f"{describe(t)} is lazy along axis {at} already, and cannot also be cut along axis "
            f"{dim}. Leave it as it is (batch={at} or None)"
        )
    elif kind == "whole":
        matter = (
            f"{describe(t)} is one value made of the whole batch, and cannot be cut along axis "
            f"{dim}. Leave it as it is (batch=None)"
        )
    else:
        return kind != "plain" or t.requires_grad or not _core.is_concrete(t)
    raise ValueError(
        f"{call}{here and f' at {here}'}: {matter}, or compute it first: lazy(x.torch(), "
        f"batch={dim}){made and f'. It was made at {made}'}"
    )


# lazy leaf -> the tensor it was made of. By identity, because == of tensors is an operator.
_given: MutableMapping[torch.Tensor, torch.Tensor] = WeakIdKeyDictionary()


def given_for(leaf: torch.Tensor) -> torch.Tensor | None:
    """The leaf that was handed to `lazy()` and gets the gradient of this lazy leaf, or None."""
    return _given.get(leaf)


class _Given(torch.autograd.Function):
    """Makes a tensor with a graph behind it lazy: its gradient goes on into that graph."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, axis: int | None, dim: int) -> torch.Tensor:
        return _core.lazy_leaf(t.detach(), axis, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None, None


def _wrap(t: torch.Tensor, axis: int | None, dim: int) -> torch.Tensor:
    if t.requires_grad and t.grad_fn is not None and torch.is_grad_enabled():
        given: torch.Tensor = _Given.apply(t, axis, dim)  # type: ignore[no-untyped-call]
        return given
    settled = _core.settled(t)
    leaf = _core.lazy_leaf(t if settled is None else settled, axis, dim)
    if t.requires_grad:
        leaf.requires_grad_()
        _given[leaf] = t
    return leaf


def _dimension(t: torch.Tensor, dim: Batch, where: str) -> int | None:
    """The batch dimension of `t`, not negative, or None."""
    if dim is None:
        return None
    at = where and f" at {where}"
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise ValueError(f"expected an int or None for {describe(t)}{at}, got {type(dim).__name__}")
    if dim == 0 and t.ndim == 0:
        return None
    _check_sliceable(t)
    if not -t.ndim <= dim < t.ndim:
        raise ValueError(
            f"expected a batch dimension that every tensor has, got {dim} for {describe(t)}{at}"
        )
    return dim % t.ndim


def _check_sliceable(t: torch.Tensor) -> None:
    """Raise UnsupportedError when `t` is no dense plain (or lazy) tensor on a device that this
    torch has."""
    if t.layout is not torch.strided or t.is_nested or t.is_quantized:
        kind = str(t.layout).removeprefix("torch.")
        if t.is_nested or t.is_quantized:
            kind = "nested" if t.is_nested else "quantized"
        raise UnsupportedError(
            f"a {kind} tensor cannot be sliced along the batch; pass it with batch=None, or make "
            "it dense first"
        )
    if (
        type(t).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        and not _core.is_lazy(t)
        and _core.settled(t) is None
    ):
        raise UnsupportedError(
            f"a {type(t).__name__} computes in its own way; koila slices plain tensors"
        )
    if t.is_cuda and not torch.cuda.is_available():
        raise UnsupportedError("a CUDA tensor, and this torch has no CUDA")


def _is_loader(value: Any) -> bool:
    return (
        not isinstance(value, torch.Tensor)
        and not _is_container(value)
        and hasattr(type(value), "__iter__")
        and not isinstance(value, (str, bytes, bytearray, set, frozenset, torch.nn.Module))
        and not hasattr(value, "__array__")
    )


_INSTEAD: list[tuple[Callable[[Any], bool], str]] = [
    (
        lambda v: isinstance(v, torch.nn.Module),
        ". The model stays as it is: make its input and labels lazy",
    ),
    (lambda v: hasattr(v, "__array__"), ". Make it a tensor first: torch.as_tensor(x)"),
]


def _has_int(dims: Batch) -> bool:
    if isinstance(dims, Mapping):
        return any(map(_has_int, dims.values()))
    if isinstance(dims, (list, tuple)):
        return any(map(_has_int, dims))
    return isinstance(dims, int)


def run(value: _T) -> _T:
    """The plain tensor of a lazy one (computed now, sliced if it must be); containers are walked,
    anything else is returned as it is.

    Example:
        >>> scores = model(lazy(images))
        >>> run({"scores": scores, "labels": labels})["scores"].shape
        torch.Size([12, 3])
    """
    plain: _T = tree_map(
        lambda t, _dim, _where: (
            _core.concrete(t) if _core.is_lazy(t) else t if (s := _core.settled(t)) is None else s
        ),
        value,
    )
    return plain

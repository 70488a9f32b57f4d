"""The Python part of the executor (python/ext/run): mode guards, bytes held, and the operators that
only rewrites use."""

from __future__ import annotations

import functools
from typing import Any

from ._host_memory import PSEUDO as _HOST_MEMORY
from ._query_rows import query_rows, query_rows_backward
from . import _spatial_rows as spatial
from ._torch import VERSION as VERSION
from ._torch import BelowAutograd, ModesAside as ModesAside, torch, untyped_storage


class _Guards(BelowAutograd):
    """Below autograd, no autocast, no inference mode and no torch functions while the object lives;
    the grad mode, which each call sets to the one it was recorded in, is put back at the end. (A
    value that is asked for in inference mode may be used outside, where eager's is a normal
    tensor.)"""

    __slots__ = ("_autocast", "_grad", "_inference", "_range")

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = self._range = None
        self._autocast: list[str] = []
        if torch._C._autograd._profiler_enabled():
            self._range = torch._C._profiler._RecordFunctionFast("koila: run")
            self._range.__enter__()
        if torch.is_inference_mode_enabled():
            self._inference = torch._C._InferenceMode(False)
            self._inference.__enter__()
        super().__init__(torch._C.DisableTorchFunctionSubclass)
        if torch._C._is_any_autocast_enabled():
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    torch.set_autocast_enabled(device, False)
                    self._autocast.append(device)

    def __del__(self) -> None:
        super().__del__()
        if self._inference is not None:
            self._inference.__exit__(None, None, None)
        torch._C._set_grad_enabled(self._grad)
        for device in self._autocast:
            torch.set_autocast_enabled(device, True)
        if self._range is not None:
            self._range.__exit__(None, None, None)


# Adds one tensor, or the product of two, to another, in place.
add_on = torch._C.TensorBase.add_
addmm_ = torch._C.TensorBase.addmm_
baddbmm_ = torch._C.TensorBase.baddbmm_
n_dispatch_modes = torch._C._len_torch_dispatch_stack
n_function_modes = torch._C._len_torch_function_stack


def add_rows(
    table: torch.Tensor, gradient: torch.Tensor, indices: torch.Tensor, padding: int
) -> torch.Tensor:
    """Adds embedding_dense_backward(gradient[..., E], indices[...], n, padding, False) to
    table[n, E], in place."""
    at = indices.reshape(-1)
    rows = gradient.reshape(-1, table.shape[1])
    if padding >= 0:
        rows = rows.masked_fill((at == padding).unsqueeze(1), 0)
    if table.is_cuda:  # index_add_ adds in any order there
        torch.ops.aten.index_put_.default(table, (at,), rows, True)
    else:
        torch.ops.aten.index_add_.default(table, 0, at, rows)
    return table


def guards() -> _Guards:
    return _Guards()


_KINDS = {
    "Tensor": "T",
    "int": "I",
    "SymInt": "I",
    "float": "F",
    "bool": "B",
    "ScalarType": "D",
    "Device": "V",
    "Layout": "L",
    "MemoryFormat": "M",
    "number": "S",
}


def _argument(argument: Any) -> tuple[str, str, bool, bool, bool, Any]:
    """(name, kind, is optional, is a list, has a default, default). kind: see direct.c."""
    kind = str(argument.real_type)
    optional = kind.startswith("Optional[")
    kind = kind.removeprefix("Optional[").removesuffix("]") if optional else kind
    is_list = kind.startswith("List[")
    kind = kind.removeprefix("List[").removesuffix("]") if is_list else kind
    has = argument.has_default_value()
    default = argument.default_value if has else None
    return argument.name, _KINDS.get(kind, "?"), optional, is_list, has, default


@functools.cache
def direct_schema(op: Any) -> tuple[str, str, tuple[Any, ...], int] | None:
    """(name, overload, arguments, number of results) of an operator that torch's C ABI can call;
    None: it is not ATen's, writes, or returns more than tensors."""
    if not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten":
        return None
    schema = op._schema
    if schema.is_mutable or any(str(r.real_type) != "Tensor" for r in schema.returns):
        return None
    arguments = tuple(_argument(a) for a in schema.arguments)
    return schema.name, schema.overload_name, arguments, len(schema.returns)


def own_generator(like: torch.Generator) -> tuple[torch.Generator, torch.Tensor, bytearray]:
    """A generator of the CPU of the same kind, and a tensor for its states, in memory that torch
    does not count."""
    own = type(like)()
    memory = bytearray(own.get_state().numel())
    return own, torch.frombuffer(memory, dtype=torch.uint8), memory


def held_bytes(leaves: list[tuple[torch.Tensor, bool]]) -> int:
    """Bytes held while a step with these leaves runs, for a step that is only planned. leaves:
    (tensor, is it a batch?); a batch on meta gives only its shape."""
    storages = {}
    for t, is_batch in leaves:
        if t.layout is torch.strided and not (is_batch and t.device.type == "meta"):
            storage = untyped_storage(t)
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def _moments(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """koila::moments of src/placement/pseudo.def. x: any shape. Returns f[3, *rest], where `rest`
    is x's shape without dims: count, mean and sum of squared deviations over dims."""
    n = 1
    for d in dims:
        n *= x.shape[d]
    wide = {
        torch.float16: torch.float32,
        torch.bfloat16: torch.float32,
        torch.float32: torch.float64,
    }.get(x.dtype, x.dtype)
    if n == 0:
        kept = [s for d, s in enumerate(x.shape) if d not in dims]
        return torch.zeros([3, *kept], dtype=wide, device=x.device)
    x = x if x.dtype in (torch.float32, torch.float64) else x.to(wide)
    # The mean of the deviations from the first mean is small, so exact. Two plain passes are faster
    # than Welford's one.
    about = x.mean(dims, keepdim=True)
    x = x - about
    rest = x.mean(dims).to(wide)
    squares = x.mul_(x).sum(dims).to(wide)
    mean = about.reshape(rest.shape).to(wide) + rest
    return torch.stack([torch.full_like(rest, n), mean, squares - rest * rest * n])


def _combine_moments(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Chan, Golub, LeVeque 1979: moments of the union of two sets."""
    n = a[0] + b[0]
    d = b[1] - a[1]
    share = torch.where(n > 0, b[0] / n, torch.zeros_like(n))
    return torch.stack([n, a[1] + d * share, a[2] + b[2] + d * d * a[0] * share])


def _own_rows(
    x: torch.Tensor, dim: int, n_dims: int, indices: list[torch.Tensor]
) -> list[torch.Tensor]:
    rows = torch.arange(x.shape[0], device=x.device)
    return [rows.view([-1 if k == dim else 1 for k in range(n_dims)]), *indices]


def _index_rows(x: torch.Tensor, dim: int, n_dims: int, indices: list[torch.Tensor]) -> Any:
    """koila::index_rows of src/placement/pseudo.def: x[arange(rows of x), indices...]."""
    return torch.ops.aten.index(x, _own_rows(x, dim, n_dims, indices))


def _index_put_rows(
    x: torch.Tensor,
    dim: int,
    n_dims: int,
    indices: list[torch.Tensor],
    values: torch.Tensor,
    accumulate: bool,
) -> Any:
    """koila::index_put_rows of src/placement/pseudo.def."""
    return torch.ops.aten.index_put(x, _own_rows(x, dim, n_dims, indices), values, accumulate)


def _laid_out(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """koila::laid_out of src/placement/pseudo.def."""
    return torch.empty_permuted(x.shape, dims, dtype=x.dtype, device=x.device).copy_(x)


def _offsets(indices: torch.Tensor, step: int) -> torch.Tensor:
    return torch.arange(0, indices.numel(), step, dtype=indices.dtype, device=indices.device)


def _bags(indices: torch.Tensor, step: int) -> torch.Tensor:
    """The bag number of each index."""
    n_bags = indices.numel() // step
    bags = torch.arange(n_bags, dtype=indices.dtype, device=indices.device)
    return bags.repeat_interleave(step)


def _embedding_bag(
    weight: Any, indices: Any, step: int, mode: int, weights: Any, padding: int, trains: bool
) -> Any:
    """koila::embedding_bag of src/placement/pseudo.def."""
    call = torch.ops.aten._embedding_bag if trains else torch.ops.aten._embedding_bag_forward_only
    return call(
        weight, indices, _offsets(indices, step), False, mode, False, weights, False, padding
    )


def _embedding_bag_backward(
    grad: Any,
    indices: Any,
    step: int,
    sizes: Any,
    most: Any,
    n: int,
    mode: int,
    weights: Any,
    padding: int,
) -> Any:
    """koila::embedding_bag_backward of src/placement/pseudo.def."""
    sizes, most = (indices.new_empty(0) if t is None else t for t in (sizes, most))
    offsets, bags = _offsets(indices, step), _bags(indices, step)
    return torch.ops.aten._embedding_bag_backward(
        grad, indices, offsets, bags, sizes, most, n, False, mode, False, weights, padding
    )


def _embedding_bag_weights_backward(
    grad: Any, weight: Any, indices: Any, step: int, mode: int, padding: int
) -> Any:
    """koila::embedding_bag_weights_backward of src/placement/pseudo.def."""
    return torch.ops.aten._embedding_bag_per_sample_weights_backward(
        grad, weight, indices, _offsets(indices, step), _bags(indices, step), mode, padding
    )


PSEUDO: dict[str, Any] = {
    "koila::moments": _moments,
    "koila::combine_moments": _combine_moments,
    "koila::index_rows": _index_rows,
    "koila::index_put_rows": _index_put_rows,
    "koila::laid_out": _laid_out,
    "koila::embedding_bag": _embedding_bag,
    "koila::embedding_bag_backward": _embedding_bag_backward,
    "koila::embedding_bag_weights_backward": _embedding_bag_weights_backward,
    "koila::conv_rows": spatial.conv_rows,
    "koila::conv_rows_weight": spatial.conv_rows_weight,
    "koila::max_pool_rows": spatial.max_pool_rows,
    "koila::max_pool_rows_backward": spatial.max_pool_rows_backward,
    "koila::avg_pool_rows": spatial.avg_pool_rows,
    "koila::avg_pool_rows_backward": spatial.avg_pool_rows_backward,
    "koila::resample_rows": spatial.resample_rows,
    "koila::resample_rows_backward": spatial.resample_rows_backward,
    "koila::pad_rows": spatial.pad_rows,
    "koila::pad_rows_backward": spatial.pad_rows_backward,
    "koila::query_rows": query_rows,
    "koila::query_rows_backward": query_rows_backward,
    **_HOST_MEMORY,
}

"""Operators of src/placement/pseudo.def that compute some rows of an image or a volume: the rows
first .. first + n along one spatial dimension of the result, from a whole input. A slice reads its
rows of the input and those beyond that its windows see, its halo. Zeros stand beyond the true edges
of the input only."""

from __future__ import annotations

import bisect
import functools
import math
from typing import Any, NamedTuple

from ._torch import torch

aten = torch.ops.aten
_BATCH_AND_CHANNELS = 2  # dimensions before the spatial ones


def _rows(x: torch.Tensor, dim: int, begin: int, end: int) -> torch.Tensor:
    """Rows begin .. end of x, zeros where it has none."""
    low, high = max(begin, 0), min(end, x.shape[dim])
    if low >= high:
        return x.new_zeros([end - begin if d == dim else s for d, s in enumerate(x.shape)])
    return _padded(x.narrow(dim, low, high - low), dim, low - begin, end - high)


def _padded(x: torch.Tensor, dim: int, before: int, after: int) -> torch.Tensor:
    """With so many rows of zeros; fewer than none cuts rows off."""
    if before == after == 0:
        return x
    return torch.constant_pad_nd(x, [0, 0] * (x.dim() - 1 - dim) + [before, after])


def _without(numbers: list[int], dim: int) -> list[int]:
    """With 0 for that dimension."""
    return [0 if d == dim - _BATCH_AND_CHANNELS else n for d, n in enumerate(numbers)]


def _extent(weight: torch.Tensor, dilation: list[int], dim: int) -> int:
    """Rows that a window spans."""
    return (weight.shape[dim] - 1) * dilation[dim - _BATCH_AND_CHANNELS] + 1


def _turned(
    weight: torch.Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    output_padding: list[int],
    groups: int,
    dim: int,
) -> tuple[torch.Tensor, list[int]] | None:
    """Weight and padding of the convolution that a transposed one of stride 1 is. Of some rows it
    makes no others beside."""
    axis = dim - _BATCH_AND_CHANNELS
    around = [(k - 1) * d - p for k, d, p in zip(weight.shape[2:], dilation, padding)]
    around[axis] = 0
    if any(s != 1 for s in stride) or any(_without(output_padding, dim)) or min(around) < 0:
        return None
    by_group = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
    turned = by_group.flip(list(range(_BATCH_AND_CHANNELS, weight.dim())))
    return turned.contiguous(), around


def conv_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    dim: int,
    first: int,
    n: int,
) -> Any:
    step, pad = stride[dim - _BATCH_AND_CHANNELS], padding[dim - _BATCH_AND_CHANNELS]
    extent = _extent(weight, dilation, dim)
    inner = _without(padding, dim)
    if not transposed:
        begin = first * step - pad
        seen = _rows(x, dim, begin, begin + (n - 1) * step + extent)
        return aten.convolution(
            seen, weight, bias, stride, inner, dilation, False, output_padding, groups
        )
    turned = _turned(weight, stride, padding, dilation, output_padding, groups, dim)
    if turned is not None:
        begin = first + pad - extent + 1
        seen = _rows(x, dim, begin, begin + n - 1 + extent)
        none = [0] * len(stride)
        return aten.convolution(
            seen, turned[0], bias, stride, turned[1], dilation, False, none, groups
        )
    # row i of the input makes the rows i * step - pad .. i * step - pad + extent
    low = max(0, -((extent - 1 - first - pad) // step))
    high = min(x.shape[dim], (first + n - 1 + pad) // step + 1)
    makes_none = low >= high
    if makes_none:
        low, high = 0, 1
    made = aten.convolution(
        x.narrow(dim, low, high - low),
        weight, None, stride, inner, dilation, True, _without(output_padding, dim), groups,
    )  # fmt: skip
    if makes_none:
        y = made.new_zeros([n if d == dim else s for d, s in enumerate(made.shape)])
    else:
        before = low * step - pad - first
        y = _padded(made, dim, before, n - before - made.shape[dim])
    return y if bias is None else y.add_(bias.view([-1] + [1] * (x.dim() - _BATCH_AND_CHANNELS)))


def conv_rows_weight(
    small: torch.Tensor,
    large: torch.Tensor,
    weight: torch.Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    dim: int,
    first: int,
) -> Any:
    step, pad = stride[dim - _BATCH_AND_CHANNELS], padding[dim - _BATCH_AND_CHANNELS]
    begin = first * step - pad
    end = begin + (small.shape[dim] - 1) * step + _extent(weight, dilation, dim)
    seen = _rows(large, dim, begin, end)
    inner = _without(padding, dim)
    none = [0] * len(stride)
    mask = [False, True, False]
    return aten.convolution_backward(
        small, seen, weight, None, stride, inner, dilation, False, none, groups, mask
    )[1]


# ---- pooling: a slice runs torch's own operator on some rows of the input, begun so many windows
# earlier that its padding touches none of the rows that are kept


class _Pool(NamedTuple):
    """The window along the dimension that is cut, of an input of `size` rows there."""

    size: int
    stride: int
    padding: int
    extent: int

    @classmethod
    def of(
        cls,
        size: int,
        axis: int,
        kernel: list[int],
        stride: list[int],
        padding: list[int],
        dilation: list[int] | None = None,
    ) -> _Pool:
        step = dilation[axis] if dilation else 1
        return cls(size, stride[axis], padding[axis], (kernel[axis] - 1) * step + 1)

    def first_window(self, first: int) -> int:
        """The window to begin with, for results from `first` on."""
        return max(0, first + -self.padding // self.stride)

    def end_row(self, last: int) -> int:
        """The rows of the input end there for a piece whose last window is that one."""
        return min(self.size, last * self.stride - self.padding + self.extent)

    def windows_of(self, first: int, n: int, n_windows: int) -> tuple[int, int]:
        """Those that see some of the rows first .. first + n of the input."""
        low = max(0, -((self.extent - 1 - first - self.padding) // self.stride))
        return low, min(n_windows, (first + n - 1 + self.padding) // self.stride + 1)

    def has_whole_windows(self, first: int, n: int) -> bool:
        """Do those that see some of these rows see no others?"""
        is_apart = self.padding == 0 and self.extent <= self.stride
        return is_apart and first % self.stride == 0 and n % self.stride == 0


def _alike(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """y, channels last if x is."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if last is None or x.is_contiguous() or not x.is_contiguous(memory_format=last):
        return y.contiguous()
    return y.contiguous(memory_format=last)


def _some(y: torch.Tensor, dim: int, first: int, n: int) -> torch.Tensor:
    return y if n == y.shape[dim] else y.narrow(dim, first, n).clone()


def max_pool_rows(
    x: torch.Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
    size: int,
    dim: int,
    begin: int,
    first: int,
    n: int,
) -> Any:
    axis = dim - (x.dim() - len(kernel))
    pool = _Pool.of(size, axis, kernel, stride, padding, dilation)
    window = pool.first_window(first)
    low = window * pool.stride
    length = pool.end_row(first + n - 1) - low
    call = aten.max_pool2d_with_indices if len(kernel) == 2 else aten.max_pool3d_with_indices
    piece = x.narrow(dim, low - begin, length)
    made = call(piece, kernel, stride, padding, dilation, ceil_mode)
    values, indices = (_some(t, dim, first - window, n) for t in made)
    inner = math.prod(x.shape[dim + 1 :])
    if axis == 0:
        return values, indices.add_(low * inner)
    planes = indices.div(length * inner, rounding_mode="floor")
    return values, indices.add_(planes.mul_(size - length).add_(low).mul_(inner))


def max_pool_rows_backward(
    grad: torch.Tensor,
    indices: torch.Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    sizes: list[int],
    dim: int,
    begin: int,
    first: int,
    n: int,
) -> Any:
    n_outer = grad.dim() - len(kernel)
    axis = dim - n_outer
    pool = _Pool.of(sizes[axis], axis, kernel, stride, padding, dilation)
    low, high = pool.windows_of(first, n, begin + grad.shape[dim])
    shape = [*grad.shape[:n_outer], *(n if d == axis else s for d, s in enumerate(sizes))]
    gx = grad.new_zeros(shape)
    if low >= high:
        return _alike(gx, grad)
    g, at = (t.narrow(dim, low - begin, high - low) for t in (grad, indices))
    inner = math.prod(sizes[axis + 1 :])
    rows = at.div(inner, rounding_mode="floor")
    planes = rows.div(pool.size, rounding_mode="floor")
    rows = rows - planes * pool.size - first
    local = (planes * n + rows) * inner + at % inner
    if not pool.has_whole_windows(first, n):
        inside = (rows >= 0) & (rows < n)
        g, local = g.where(inside, 0), local.where(inside, 0)
    gx.flatten(n_outer).scatter_add_(-1, local.flatten(n_outer), g.flatten(n_outer))
    return _alike(gx, grad)


def avg_pool_rows(
    x: torch.Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    ceil_mode: bool,
    counts_padding: bool,
    divisor: int | None,
    dim: int,
    begin: int,
    first: int,
    n: int,
) -> Any:
    size = begin + x.shape[dim]  # where x ends there is no row beyond that a window sees
    pool = _Pool.of(size, dim - (x.dim() - len(kernel)), kernel, stride, padding)
    window = pool.first_window(first)
    low = window * pool.stride
    call = aten.avg_pool2d if len(kernel) == 2 else aten.avg_pool3d
    piece = x.narrow(dim, low - begin, pool.end_row(first + n - 1) - low)
    made = call(piece, kernel, stride, padding, ceil_mode, counts_padding, divisor)
    return _some(made, dim, first - window, n)


def avg_pool_rows_backward(
    grad: torch.Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    ceil_mode: bool,
    counts_padding: bool,
    divisor: int | None,
    sizes: list[int],
    dim: int,
    begin: int,
    first: int,
    n: int,
) -> Any:
    n_outer = grad.dim() - len(kernel)
    axis = dim - n_outer
    pool = _Pool.of(sizes[axis], axis, kernel, stride, padding)
    low, high = pool.windows_of(first, n, begin + grad.shape[dim])
    outer = list(grad.shape[:n_outer])
    gx = grad.new_zeros([*outer, *(n if d == axis else s for d, s in enumerate(sizes))])
    if low >= high:
        return _alike(gx, grad)
    window = pool.first_window(low)
    begin_row, end_row = window * pool.stride, pool.end_row(high - 1)
    length = end_row - begin_row
    shape = [*outer, *(length if d == axis else s for d, s in enumerate(sizes))]
    n_windows = _n_windows(pool, length, ceil_mode)
    g = grad.new_zeros([n_windows if d == dim else s for d, s in enumerate(grad.shape)])
    g.narrow(dim, low - window, high - low).copy_(grad.narrow(dim, low - begin, high - low))
    call = aten.avg_pool2d_backward if len(kernel) == 2 else aten.avg_pool3d_backward
    made = call(
        g, grad.new_empty(shape), kernel, stride, padding, ceil_mode, counts_padding, divisor
    )
    begin_of, end_of = max(first, begin_row), min(first + n, end_row)
    if begin_of < end_of:
        some = made.narrow(dim, begin_of - begin_row, end_of - begin_of)
        gx.narrow(dim, begin_of - first, end_of - begin_of).copy_(some)
    return _alike(gx, grad)


def _n_windows(pool: _Pool, length: int, ceil_mode: bool) -> int:
    """Of an input of that length, as torch counts them."""
    more = pool.stride - 1 if ceil_mode else 0
    n = (length + 2 * pool.padding - pool.extent + more) // pool.stride + 1
    return n - 1 if ceil_mode and (n - 1) * pool.stride >= length + pool.padding else n


# ---- upsampling: row o of the result is made of the rows low[o] and high[o] of the input


_NEAREST, _NEAREST_EXACT, _LINEAR = range(3)  # as src/placement/rules_resample.c numbers them
_MODES = ("upsample_nearest{}d", "_upsample_nearest_exact{}d")
_LINEARS = ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d")


def _operator(mode: int, n_spatial: int, suffix: str = "") -> Any:
    name = _LINEARS[n_spatial - 1] if mode == _LINEAR else _MODES[mode].format(n_spatial)
    return getattr(aten, name + suffix)


class _Rows(NamedTuple):
    """Of all rows of the result: the rows that they are made of, and the share of the second."""

    low: torch.Tensor
    high: torch.Tensor | None  # None: all of low
    share: torch.Tensor | None
    lows: list[int]
    highs: list[int]


@functools.lru_cache(maxsize=64)
def _rows_made(
    mode: int, align: bool, size: int, made: int, scale: float | None, dtype: Any, device: Any
) -> _Rows:
    """With the arithmetic of torch's own kernels, in their type."""
    if mode != _LINEAR:
        numbers = torch.arange(size, dtype=dtype, device=device).view(1, 1, size)
        low = _operator(mode, 1)(numbers, [made], scale).flatten().long()
        rows: list[int] = low.tolist()
        return _Rows(low, None, None, rows, rows)
    at = torch.arange(made, dtype=dtype, device=device)
    rows_a_row = torch.tensor(size - align, dtype=dtype, device=device) / max(made - align, 1)
    if align:
        at = at * rows_a_row if made > 1 else torch.zeros_like(at)
    elif scale:
        at = ((at + 0.5) * (1.0 / scale) - 0.5).clamp_min(0)
    else:
        at = ((at + 0.5) * rows_a_row - 0.5).clamp_min(0)
    low = at.long().clamp_max(size - 1)
    high = (low + 1).clamp_max(size - 1)
    share = (at - low).clamp(0, 1)
    return _Rows(low, high, share, low.tolist(), high.tolist())


def _rows_of(
    x: torch.Tensor,
    mode: int,
    align: bool,
    sizes: list[int],
    made: list[int],
    axis: int,
    scales: tuple[float | None, ...],
) -> _Rows:
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    return _rows_made(mode, align, sizes[axis], made[axis], scales[axis], wide, x.device)


def _of_others(
    mode: int,
    align: bool,
    sizes: list[int],
    made: list[int],
    axis: int,
    scales: tuple[float | None, ...],
    suffix: str = "",
) -> Any:
    """The operator that resamples the other dimensions, without its last arguments; None: they stay
    as they are."""
    if all(a == b for d, (a, b) in enumerate(zip(sizes, made)) if d != axis):
        return None
    kept = [None if d == axis else s for d, s in enumerate(scales)]
    options = [align, *kept] if mode == _LINEAR else kept
    operator = _operator(mode, len(sizes), suffix)
    return lambda *first: operator(*first, *options)


def _with(numbers: list[int], axis: int, n: int) -> list[int]:
    return [n if d == axis else s for d, s in enumerate(numbers)]


def _beside(share: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    return share.view([-1 if d == dim else 1 for d in range(x.dim())])


def resample_rows(
    x: torch.Tensor,
    sizes: list[int],
    made: list[int],
    mode: int,
    align: bool,
    dim: int,
    begin: int,
    first: int,
    n: int,
    *scales: float | None,
) -> Any:
    axis = dim - _BATCH_AND_CHANNELS
    rows = _rows_of(x, mode, align, sizes, made, axis, scales)
    some = slice(first, first + n)
    y = x.index_select(dim, rows.low[some] - begin)
    if rows.high is not None and rows.share is not None:
        wide = y.to(rows.share.dtype)
        share = _beside(rows.share[some], y, dim)
        second = x.index_select(dim, rows.high[some] - begin)
        y = (wide * (1 - share)).addcmul_(second.to(wide.dtype), share)
    others = _of_others(mode, align, sizes, made, axis, scales)
    if others:
        y = others(y, _with(made, axis, n))
    return _alike(y.to(x.dtype), x)


def resample_rows_backward(
    grad: torch.Tensor,
    sizes: list[int],
    made: list[int],
    mode: int,
    align: bool,
    dim: int,
    begin: int,
    first: int,
    n: int,
    *scales: float | None,
) -> Any:
    axis = dim - _BATCH_AND_CHANNELS
    rows = _rows_of(grad, mode, align, sizes, made, axis, scales)
    low, high = bisect.bisect_left(rows.highs, first), bisect.bisect_left(rows.lows, first + n)
    wide = rows.share.dtype if rows.share is not None else grad.dtype
    outer = list(grad.shape[:_BATCH_AND_CHANNELS])
    gx = torch.zeros([*outer, *_with(sizes, axis, n)], dtype=wide, device=grad.device)
    g = grad.narrow(dim, low - begin, high - low).to(wide)
    others = _of_others(mode, align, sizes, made, axis, scales, "_backward")
    if others and low < high:
        n_rows = high - low
        g = others(g, _with(made, axis, n_rows), [*outer, *_with(sizes, axis, n_rows)])
    for index, numbers, is_second in ((rows.low, rows.lows, False), (rows.high, rows.highs, True)):
        begin_of = bisect.bisect_left(numbers, first)
        end_of = bisect.bisect_left(numbers, first + n)
        if index is None or begin_of >= end_of:
            continue
        part = g.narrow(dim, begin_of - low, end_of - begin_of)
        if rows.share is not None:
            share = rows.share[begin_of:end_of]
            part = part * _beside(share if is_second else 1 - share, part, dim)
        gx.index_add_(dim, index[begin_of:end_of] - first, part)
    return _alike(gx.to(grad.dtype), grad)


# ---- padding: row r of the result is row _source(r) of the input


_CONSTANT, _REFLECT, _REPLICATE = range(3)  # as src/placement/rules_conv.c numbers them
_PADS = {_REFLECT: "reflection_pad{}d", _REPLICATE: "replication_pad{}d"}


def _pads_of(pad: list[int], n_dims: int, dim: int) -> tuple[int, int, list[int]]:
    """Rows before and after along `dim`, and the list without them."""
    at = 2 * (n_dims - 1 - dim)
    return pad[at], pad[at + 1], [0 if at <= i <= at + 1 else p for i, p in enumerate(pad)]


def _source(row: int, mode: int, size: int) -> int:
    """The row that stands at `row` of an input that goes on beyond its `size` rows."""
    if mode == _REPLICATE:
        return min(max(row, 0), size - 1)
    return -row if row < 0 else 2 * (size - 1) - row if row >= size else row


def pad_rows(
    x: torch.Tensor, pad: list[int], mode: int, value: float, dim: int, first: int, n: int
) -> Any:
    before, _, others = _pads_of(pad, x.dim(), dim)
    size = x.shape[dim]
    if mode == _CONSTANT:
        begin = first - before
        low, high = min(max(begin, 0), size), min(max(begin + n, 0), size)
        at = 2 * (x.dim() - 1 - dim)
        others[at] = low - begin if high > low else n
        others[at + 1] = begin + n - high if high > low else 0
        made = torch.constant_pad_nd(x.narrow(dim, low, max(high - low, 0)), others, value)
        return _alike(made, x)
    rows = [_source(first + k - before, mode, size) for k in range(n)]
    y = x.index_select(dim, torch.tensor(rows, device=x.device))
    if any(others):
        y = getattr(aten, _PADS[mode].format(len(pad) // 2))(y, others)
    return _alike(y, x)


def _made_of(
    first: int, n: int, mode: int, size: int, before: int, after: int
) -> tuple[list[int], list[int]]:
    """The rows of the result that are made of the rows first .. first + n, and of which."""
    inside = range(first + before, first + n + before)
    low = range(before if mode == _REPLICATE and first == 0 else 0)
    high = range(size + before, size + before + (after if first + n == size else 0))
    if mode == _REFLECT:
        low = range(max(before - first - n + 1, 0), min(before - first + 1, before))
        last = 2 * (size - 1) + before  # row last - s is made of row s, too
        end = size + before
        high = range(max(last - first - n + 1, end), min(last - first + 1, end + after))
    rows = [*low, *inside, *high]
    return rows, [_source(r - before, mode, size) - first for r in rows]


def pad_rows_backward(
    grad: torch.Tensor, pad: list[int], mode: int, dim: int, first: int, n: int
) -> Any:
    before, after, others = _pads_of(pad, grad.dim(), dim)
    size = grad.shape[dim] - before - after
    rows, of = (
        torch.tensor(t, device=grad.device) for t in _made_of(first, n, mode, size, before, after)
    )
    g = grad.index_select(dim, rows)
    if any(others):
        shape = list(g.shape)
        for d in range(len(pad) // 2):
            shape[-1 - d] -= others[2 * d] + others[2 * d + 1]
        call = getattr(aten, _PADS[mode].format(len(pad) // 2) + "_backward")
        g = call(g, g.new_empty(shape), others)
    gx = g.new_zeros([n if d == dim else s for d, s in enumerate(g.shape)])
    return _alike(gx.index_add_(dim, of, g), grad)

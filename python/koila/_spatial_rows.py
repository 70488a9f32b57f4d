"""Operators of src/placement/pseudo.def that compute some rows of an image or a volume: the rows
first .. first + n along one spatial dimension of the result, from a whole input. A slice reads its
rows of the input and those beyond that its windows see, its halo. Zeros stand beyond the true edges
of the input only."""

from __future__ import annotations

from typing import Any

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

"""koila::query_rows and its backward of src/placement/pseudo.def: fused attention of some of the
queries of a sequence, which kernels take for the first ones.

A causal mask lets the queries first .. first + n see all keys before them, and among their own
those up to theirs. So a slice runs the kernel twice, without a mask on the keys before it and with
one on its own, and nothing on those after it; no mask is made. The two results are merged by the
logsumexp of their scores, as flash attention merges its tiles (Dao et al. 2022). Their gradients
need no merging: a kernel that is given the logsumexp of all keys gives the shares of those it
sees. So the keys before a slice are taken a quarter of all at a time: what a slice needs inside
hardly depends on its place, and is as small as that of the first ones."""

from __future__ import annotations

from typing import Any, NamedTuple

from ._torch import torch
from . import _attention

aten = torch.ops.aten
_CPU = 0  # as src/placement/rules_attention.c numbers it; the others are _attention's
_PARTS = 4  # of the keys before a slice, in backward
_PADDED_TO = 32  # the length of the logsumexp that the efficient kernel wants is a multiple of it


class _Kernel(NamedTuple):
    number: int
    scale: float | None

    def forward(self, q: Any, k: Any, v: Any, bias: Any, is_causal: bool) -> list[Any]:
        """All results; the logsumexp [B, H, n]."""
        if self.number == _CPU:
            on_cpu = aten._scaled_dot_product_flash_attention_for_cpu
            return list(on_cpu(q, k, v, 0.0, is_causal, attn_mask=bias, scale=self.scale))
        call = _attention.Call(0.0, is_causal, self.scale, self.number)
        results = list(_attention.kernel(q, k, v, bias, True, call))
        results[1] = results[1][..., : q.shape[2]].contiguous()
        return results

    def backward(self, given: _attention.Given, is_causal: bool) -> tuple[Any, ...]:
        """Gradients of q, k and v."""
        if self.number == _CPU:
            grad, q, k, v, bias, out, sums = given
            on_cpu = aten._scaled_dot_product_flash_attention_for_cpu_backward
            before = (grad, q, k, v, out, sums, 0.0, is_causal)
            return tuple(on_cpu(*before, attn_mask=bias, scale=self.scale))
        missing = -given.q.shape[2] % _PADDED_TO if self.number == _attention.EFFICIENT else 0
        sums = torch.constant_pad_nd(given.sums, [0, missing], float("inf"))
        call = _attention.Call(0.0, is_causal, self.scale, self.number)
        return _attention.kernel_backward(given._replace(sums=sums), (0, 0), call)


def _merged(seen: list[Any], own: list[Any]) -> list[Any]:
    """The results of attention to the keys of both."""
    sums = torch.logaddexp(seen[1], own[1])
    shares = [torch.exp(part[1] - sums).unsqueeze(-1) for part in (seen, own)]
    out = seen[0] * shares[0] + own[0] * shares[1]
    return [out.to(own[0].dtype), sums, *own[2:]]


def query_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    first: int,
    kernel: int,
    is_causal: bool,
    scale: float | None,
    with_sums: bool,
) -> tuple[Any, ...]:
    call = _Kernel(kernel, scale)
    if not is_causal:
        results = call.forward(q, k, v, bias, False)
    else:
        own = slice(first, first + q.shape[2])
        parts = []
        if first:
            parts.append(call.forward(q, k[:, :, :first], v[:, :, :first], None, False))
        if first < k.shape[2]:
            parts.append(call.forward(q, k[:, :, own], v[:, :, own], None, True))
        results = parts[0] if len(parts) == 1 else _merged(*parts)
    if not with_sums:
        results[1] = results[1][..., :0]
    return tuple(results)


def _zeros(like: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Zeros of that shape, laid out in memory as the kernel lays out a part of them."""
    order = sorted(range(like.dim()), key=part.stride, reverse=True)
    zeros = like.new_zeros([like.shape[d] for d in order])
    return zeros.permute([order.index(d) for d in range(like.dim())])


def query_rows_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    sums: torch.Tensor,
    first: int,
    kernel: int,
    is_causal: bool,
    scale: float | None,
) -> tuple[Any, ...]:
    call = _Kernel(kernel, scale)
    if not is_causal:
        return call.backward(_attention.Given(grad, q, k, v, bias, out, sums), False)
    gradients: list[torch.Tensor] = []
    n_keys = k.shape[2]
    step = max(q.shape[2], -(-n_keys // _PARTS))
    begins = range(0, min(first, n_keys), step)
    parts = [(slice(begin, min(begin + step, first)), False) for begin in begins]
    if first < n_keys:
        parts.append((slice(first, first + q.shape[2]), True))
    for keys, is_own in parts:
        given = _attention.Given(grad, q, k[:, :, keys], v[:, :, keys], None, out, sums)
        share = call.backward(given, is_own)
        if not gradients:
            gradients = [_zeros(t, part) for t, part in zip((q, k, v), share)]
        gq, gk, gv = gradients
        gq += share[0]
        gk[:, :, keys] = share[1]
        gv[:, :, keys] = share[2]
        del share  # before the next is made
    return tuple(gradients)

"""Fingerprints of memory that is not the CPU's, for watches.c (Note [Back doors] there).

The elements are read as words of at most 32 bits. Each row of words is multiplied by random words
of 64 bits and added up, twice, modulo 2^64; the sums go to the CPU, which takes their fingerprint.
Two contents of one row have the same sums with a probability of about 2^-64: the high bits of a
product depend on all bits of a word, and what a change of the words adds is a random number. One
pass over the elements on the device, one wait for it, some MiB beside it."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator

from ._torch import ModesAside, torch

ROW = 4096  # words that share one sum
PIECE = 256 * ROW  # elements that are multiplied at once

_WORDS = {1: torch.int8, 2: torch.int16}


@functools.cache
def _weights() -> torch.Tensor:
    draw = random.Random(0)
    words = [[draw.getrandbits(64) - (1 << 63) | 1 for _ in range(ROW)] for _ in range(2)]
    return torch.tensor(words, dtype=torch.int64, device="cpu")


def _elements(x: torch.Tensor) -> torch.Tensor:
    """Each element once, as it lies in memory, the dimensions in the order of the strides."""
    x = x.detach()
    if x.is_complex():
        x = torch.view_as_real(x.conj() if x.is_conj() else x)
    x = x._neg_view() if x.is_neg() else x
    for d in reversed(range(x.dim())):
        if x.stride(d) == 0 and x.size(d) > 1:
            x = x.select(d, 0)
    return x.permute(sorted(range(x.dim()), key=x.stride, reverse=True))


def _pieces(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """The elements in vectors of at most PIECE, without a copy where they are dense."""
    if x.is_contiguous():
        yield from x.view(-1).split(PIECE)
    elif x.numel() <= PIECE:
        yield x.contiguous().view(-1)
    else:
        n = max(1, PIECE // x[0].numel())
        for some in x.split(n):
            yield from _pieces(some[0] if n == 1 else some)


def _sums(vector: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
    words = vector.view(_WORDS.get(vector.element_size(), torch.int32))
    n = words.numel() // ROW * ROW
    sums = []
    for part in (words[:n].view(-1, ROW), words[n:].view(1, -1)):
        product = part * weights[0, : part.size(1)]
        sums.append(product.sum(1))
        sums.append(product.mul_(weights[1, : part.size(1)]).sum(1))
    return sums


def _on_the_host(x: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, which takes no memory on the device."""
    span = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride()))
    whole = x.as_strided((span,), (1,), x.storage_offset())
    return whole.cpu().as_strided(x.shape, x.stride(), 0)


def device_print(x: torch.Tensor) -> torch.Tensor | None:
    """A CPU tensor that all elements decide. None: a CUDA graph is being captured, which may not
    wait; a step may not run there either."""
    if x.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    aside = ModesAside()
    try:
        with torch.no_grad():
            x = _elements(x)
            try:
                weights = _weights().to(x.device)
                return torch.cat([s for v in _pieces(x) for s in _sums(v, weights)]).cpu()
            except torch.OutOfMemoryError:
                x = _on_the_host(x)
                return torch.cat([s for v in _pieces(x) for s in _sums(v, _weights())])
    finally:
        aside.back()

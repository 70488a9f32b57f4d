"""Operators of koila's own: torch.ops.koila.*, for what torch has no operator that can be cut."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from ._torch import SETTING_UP, torch


class OwnOperator(NamedTuple):
    """schema: in torch's notation, without the namespace. kernel: computes it. fake: gives results
    of the same shapes and dtypes, from tensors without memory. on_cuda: computes it there, if not
    kernel does. The executor calls `kernel` itself, without torch, where the operator's line in
    src/graph/ops.def has OPAQUE_CALL."""

    schema: str
    kernel: Callable[..., Any]
    fake: Callable[..., Any]
    on_cuda: Callable[..., Any] | None = None


def own_operators(*devices: str) -> Callable[[Callable[[], list[OwnOperator]]], Callable[[], Any]]:
    """A decorator of a function that lists operators. What it leaves takes no arguments, defines
    them for `devices` ("CPU", "CUDA") at its first call, and returns torch.ops.koila."""

    def decorate(listed: Callable[[], list[OwnOperator]]) -> Callable[[], Any]:
        libraries: list[Any] = []  # operators are gone when their library dies

        @functools.wraps(listed)
        def defined() -> Any:
            if not libraries:
                with SETTING_UP:
                    if not libraries:
                        libraries.append(_define(listed(), devices))
            return torch.ops.koila

        return defined

    return decorate


def _define(operators: list[OwnOperator], devices: tuple[str, ...]) -> Any:
    library = torch.library.Library("koila", "FRAGMENT")
    for schema, kernel, fake, on_cuda in operators:
        name = library.define(schema)
        for device in devices:
            library.impl(name, on_cuda if device == "CUDA" and on_cuda else kernel, device)
        torch.library.register_fake(f"koila::{name}", fake, lib=library)
        getattr(torch.ops.koila, name).default.koila_kernel = kernel
    return library

"""Modules like others, for a run that nobody who uses the others shall notice: they have their own
training flags, parameters and buffers. Other threads may use the others meanwhile."""

from __future__ import annotations

import sys
from typing import Any

import torch


class _Unlike(Exception):
    """A module whose copy would go on to call the module itself."""


def evaluating(
    module: torch.nn.Module, names: list[str], parameters: list[torch.Tensor]
) -> torch.nn.Module | None:
    """A module like this one in evaluation mode, with these parameters (by name) and with copies of
    the buffers; a compiled part is there as it was before. `None`: no such module can be made."""
    own = dict(module.named_parameters())
    values = {id(own[name]): value for name, value in zip(names, parameters)}
    try:
        return _copy(module, values, {})
    except _Unlike:
        return None


def _copy(
    module: torch.nn.Module, values: dict[int, torch.Tensor], made: dict[int, torch.nn.Module]
) -> torch.nn.Module:
    """values: by the id of a parameter; made: the copies so far, by the id of a module."""
    compiled = sys.modules.get("torch._dynamo.eval_frame")
    if compiled is not None and isinstance(module, compiled.OptimizedModule):
        return _copy(module._orig_mod, values, made)
    if isinstance(module, torch.jit.ScriptModule) or "forward" in module.__dict__:
        raise _Unlike
    if id(module) in made:
        return made[id(module)]
    # as torch's own replicas for data parallelism are made
    copy: Any = module.__new__(type(module))
    made[id(module)] = copy
    copy.__dict__ = {k: v for k, v in module.__dict__.items() if k != "_compiled_call_impl"}
    copy.__dict__["training"] = False
    copy.__dict__["_parameters"] = {
        k: None if p is None else _parameter(p, values) for k, p in module._parameters.items()
    }
    copy.__dict__["_buffers"] = {
        k: None if b is None else b.detach().clone() for k, b in module._buffers.items()
    }
    copy.__dict__["_modules"] = {
        k: None if m is None else _copy(m, values, made) for k, m in module._modules.items()
    }
    if "_flat_weights" in module.__dict__:  # a recurrent module's second list of its parameters
        copy.__dict__["_flat_weights"] = [
            None if p is None else _parameter(p, values) for p in copy._flat_weights
        ]
    return copy  # type: ignore[no-any-return]


def _parameter(p: Any, values: dict[int, torch.Tensor]) -> torch.nn.Parameter:
    return torch.nn.Parameter(values[id(p)] if id(p) in values else p.detach(), p.requires_grad)

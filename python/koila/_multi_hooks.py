"""Hooks of several tensors (`torch.autograd.graph.register_multi_grad_hook`).

Torch puts a hook on each of the tensors, and those find together what they saw in one run of its
engine. A backward of koila's is two runs: gradients of inner tensors come in the first, which
records, those of plain leaves in the second, which accumulates. Here both count as one."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import graph as _graph

from . import _core
from ._tensor import plain

_engine_meets: Any = torch._C._will_engine_execute_node


@dataclass
class _Seen:
    """What one backward has shown to the hooks of a group."""

    buffer: list[Any]  # gradients, by tensor
    expected: int  # how many will come
    n: int = 0  # how many came
    first: int | None = None  # the tensor whose gradient came first
    done: bool = False


@dataclass
class Round:
    """A backward of koila's, from its recording to its end. leaves: those whose gradients it
    takes."""

    leaves: list[torch.Tensor]
    seen: dict[int, _Seen] = field(default_factory=dict)  # by id of the group
    # the run of the engine that records (1) and the one that accumulates (0)
    tasks: dict[int, int] = field(default_factory=dict)


class _Group:
    """What the hooks of one call of register_multi_grad_hook share. nodes: of each tensor, in mode
    "all"."""

    def __init__(self, fn: Any, nodes: list[Any], mode: str) -> None:
        self.fn, self.nodes, self.mode = fn, nodes, mode

    def seen(self, during: Round) -> _Seen:
        if id(self) not in during.seen:
            # In the first run, which leaves are met cannot be asked of the engine.
            leaves = [getattr(node, "variable", None) for node in self.nodes]
            expected = sum(
                any(leaf is t for t in during.leaves) if leaf is not None else _engine_meets(node)
                for leaf, node in zip(leaves, self.nodes)
            )
            during.seen[id(self)] = _Seen([None] * len(self.nodes), expected)
        return during.seen[id(self)]


def _is_another(depth: Any) -> bool:
    """Does the engine run a backward inside koila's, of a hook?"""
    task = torch._C._current_graph_task_id()
    return bool(depth.round.tasks.setdefault(depth.level, task) != task)


class Part:
    """The hook of one tensor of a group. `torchs`: torch's own, for backwards of torch's own."""

    def __init__(self, group: _Group, index: int, torchs: Any) -> None:
        self.group, self.index, self.torchs = group, index, torchs

    def passes(self, here: Any) -> None:
        """The gradient of a plain leaf came while a backward was recorded; it comes again when it
        is accumulated, and is given to `fn` then."""
        during: Round | None = here.backward.round
        if during is not None and here.backward.level == 1:
            seen = self.group.seen(during)
            seen.first = self.index if seen.first is None else seen.first

    def __call__(self, gradient: Any) -> None:
        here = _core.backward_context((), None)
        depth = None if here is None else here.backward
        if depth is None or depth.round is None or depth.level > 1 or _is_another(depth):
            self.torchs(gradient)
            return
        seen = self.group.seen(depth.round)
        if seen.first is None:
            seen.first = self.index
        if self.group.mode == "any":
            if seen.first == self.index and not seen.done:
                seen.done = True
                self.group.fn(gradient)
            return
        seen.buffer[self.index] = gradient
        seen.n += 1
        if seen.n == seen.expected:
            # after the recording, all that was asked for has values
            fresh = seen.buffer if depth.level else [plain(g) for g in seen.buffer]
            self.group.fn(fresh)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.torchs, name)


def _group_of(torchs: Any) -> tuple[_Group, int] | None:
    """(group, index) as torch's own hook has them in its closure; None: not as known here."""
    if hasattr(torchs, "__wrapped__"):
        return _Group(torchs.__wrapped__, [], "any"), 0
    inside = inspect.getclosurevars(torchs).nonlocals
    if not {"fn", "grad_fns", "idx"} <= inside.keys():
        return None
    return _Group(inside["fn"], inside["grad_fns"], "all"), inside["idx"]


class _MultiHandle(_graph._MultiHandle):
    """Torch's handle of such hooks, which makes them understand backwards of koila's."""

    def __init__(self, handles: tuple[Any, ...]) -> None:
        super().__init__(handles)
        group = None
        for i, handle in enumerate(handles):
            hooks = handle.hooks_dict_ref()
            found = None if hooks is None else _group_of(hooks[handle.id])
            if hooks is None or found is None:
                return
            group = group or found[0]
            hooks[handle.id] = Part(group, i, hooks[handle.id])


def install() -> None:
    _graph._MultiHandle = _MultiHandle  # type: ignore[misc]

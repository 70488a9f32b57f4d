"""The part of a backward graph that lies behind plain tensors: embedded positions, weights that
were put together. No tape shows it, but its nodes say what they have saved. See known_backward.c.
"""

from __future__ import annotations

from typing import Any

import torch

from . import _core

# Nodes of plain tensors whose backward calls the same operators whatever the values are: their
# classes, without the number that torch puts at the end.
_PLAIN = frozenset(
    f"{name}Backward"
    for name in (
        "Add Alias Cat Clone Div Embedding Exp Expand Index Mean Mul Narrow Neg Permute Repeat "
        "Reshape ReshapeAlias Select Sigmoid Slice Split SplitWithSizes Squeeze Stack Sub Sum T "
        "Tanh ToCopy Transpose Unbind UnsafeView Unsqueeze View"
    ).split()
)
# Nodes that are looked at: each gets a Python object, and thousands of those in a row are a stack
# overflow when they die, see autograd_nodes.h.
_MOST = 500
_NUMBERS = (int, float, complex, str, type(None), torch.dtype, torch.device)


def plain_part(roots: list[Any]) -> tuple[str, list[torch.Tensor]] | None:
    """What the nodes behind plain tensors do: as text, and the tensors that they have saved. None:
    it cannot be told."""
    words: list[str] = []
    saved: list[torch.Tensor] = []
    seen: dict[Any, int] = {}
    stack = roots[::-1]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        if len(seen) == _MOST:
            return None
        seen[node] = len(seen)
        variable = getattr(node, "variable", None)
        if variable is not None:
            words.append(f"leaf {variable.dtype} {tuple(variable.shape)} {variable.device}")
        elif not _tell(node, words, saved):
            return None
        stack += [up for up, _ in node.next_functions if up is not None]
    first = min((n._sequence_nr() for n in seen if n.next_functions), default=0)
    for node in seen:
        ups = [(-1 if up is None else seen[up], at) for up, at in node.next_functions]
        words.append(f"{node._sequence_nr() - first if ups else 0} {ups}")
    return "\n".join(words), saved


_saved_names: dict[type, list[str]] = {}


def _tell(node: Any, words: list[str], saved: list[torch.Tensor]) -> bool:
    """Add what one plain node has saved. False: something that is not understood."""
    kind = type(node)
    if kind not in _saved_names:
        _saved_names[kind] = [name for name in dir(kind) if name.startswith("_saved_")]
    if kind.__name__.rstrip("0123456789") not in _PLAIN:
        return False
    words.append(kind.__name__)
    words += [f"{m.shape} {m.dtype} {m.device}" for m in node._input_metadata]
    for name in _saved_names[kind]:
        try:
            value = getattr(node, name)
        except RuntimeError:  # written since, or let go of: recording says so better
            return False
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, torch.Tensor) and not _core.is_lazy(item):
                words.append(f"{name} {item.shape} {item.stride()} {item.dtype} {item.device}")
                if not item.dim() and item.device.type == "cpu":
                    words.append(repr(item.item()))  # a number: a recorded call names its value
                saved.append(item)
            elif isinstance(item, _NUMBERS):
                words.append(f"{name} {item!r}")
            else:
                return False
    return True

"""The examples of docstrings, run by doctest.

python tests/python/docstring_examples.py koila.lazy koila.memlab.measure

An example may use the public names, and what a training program has: `model`, `optimizer`,
`images`, `labels`, `loader`, `step()`.
"""

from __future__ import annotations

import doctest
import io
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import koila
from koila import memlab

MODULES = {"koila": koila, "koila.memlab": memlab}
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def names() -> Iterator[str]:
    """Every public name that can have a docstring: constants have none."""
    for module, value in MODULES.items():
        for name in value.__all__:
            if callable(getattr(value, name)):
                yield f"{module}.{name}"


def docstring(full_name: str) -> str:
    module, _, name = full_name.rpartition(".")
    return getattr(MODULES[module], name).__doc__ or ""


def world() -> dict[str, Any]:
    """What an example may use."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters())
    images, labels = torch.randn(12, 4), torch.randint(3, (12,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    step.__qualname__ = "step"
    public = {n: getattr(m, n) for m in MODULES.values() for n in m.__all__}
    found = {"torch": torch, "nn": nn, "F": nn.functional, "koila": koila, "memlab": memlab}
    mine = {"model": model, "optimizer": optimizer, "images": images, "labels": labels}
    return public | found | mine | {"step": step, "loader": [(images, labels)]}


def wrong_of(text: str, name: str) -> str:
    """What doctest has to say of a docstring: "" where it has examples and they are right."""
    test = doctest.DocTestParser().get_doctest(text, world(), name, name, 0)
    if not test.examples:
        return f"{name} has no example"
    said = io.StringIO()
    doctest.DocTestRunner(optionflags=FLAGS).run(test, out=said.write)
    return said.getvalue()


if __name__ == "__main__":
    wrong = "".join(wrong_of(docstring(name), name) for name in sys.argv[1:])
    if wrong:
        sys.exit(wrong)

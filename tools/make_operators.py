"""Make docs/operators.md from src/graph/ops.def and src/placement/pseudo.def.

python tools/make_operators.py            write it
python tools/make_operators.py --check    fail if it is stale
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

HEAD = """# Operators that can be sliced

Made from `src/graph/ops.def` by `tools/make_operators.py`; do not edit.

An operator that is not here is *gathered*: its inputs are made whole, it runs once, and its results
are sliced again where needed. That is always right, and costs memory where the inputs are
activations. In-place operators (`relu_`) have the line of their functional twin (`relu`).

How to read the last column: one letter for each tensor argument, then the results. `S` sliced along
the batch (`S0`: the batch is dimension 0), `R` whole, `P` a partial sum (each slice has a term of
it). `S,R->S` reads: when the first argument is sliced and the second whole, the result is sliced.
Combinations that are not named make the arguments whole first, at the price of a barrier between
two loops.

An operator of your own gets its rule by `koila.register_rule`:

```python
import torch

import koila


@torch.library.custom_op("mylib::scale", mutates_args=())
def scale(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return x * by


scale.register_fake(lambda x, by: torch.empty_like(x))
koila.register_rule("mylib::scale", "S0,R->S0")

with koila.micro_batch(2), koila.strict():
    x = koila.lazy(torch.ones(6, 4))
    print(scale(x, torch.full((4,), 2.0)).sum().item())
```

```text
48.0
```
"""


def make() -> str:
    """The page: a table for each heading of ops.def; operators without a rule are not on it."""
    out, n = [HEAD], 0
    for line in (ROOT / "src/graph/ops.def").read_text().splitlines():
        if m := re.fullmatch(r"/\* ---- (.*) \*/", line):
            if m[1].startswith("gathered"):
                break
            title = re.sub(r" \((rules_\w+\.c|pseudo\.def)\)", r"", m[1])
            out += [f"\n## {title[0].upper()}{title[1:]}\n", "| operator | rule |", "|---|---|"]
        elif m := re.fullmatch(r'KOILA_OP\("([^"]+)",\s*(\w+),\s*"([^"]*)", .*\)', line):
            n += 1
            says = m[3].replace("|", "\\|")
            out.append(f"| `{m[1]}` | {'; '.join(s.strip() for s in re.split(r'  +', says))} |")
    out.append(f"\n{n} operators.\n")
    return "\n".join(out)


if __name__ == "__main__":
    path, text = ROOT / "docs/operators.md", make()
    if "--check" in sys.argv[1:]:
        if not path.exists() or path.read_text() != text:
            sys.exit("docs/operators.md is stale: run python tools/make_operators.py")
    else:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

"""`register_rule()`: a user's rule for an operator that koila does not know."""

from __future__ import annotations

from typing import Any

from . import _core


def register_rule(op: Any, *alternatives: str) -> None:
    """Tell how a custom operator behaves when the batch is sliced, so that it need not be gathered.

    op: an `OpOverload` (`torch.ops.mylib.op.default`), a packet with one overload, the result of
        `torch.library.custom_op`, or a name such as `"mylib::op"`.
    alternatives: each gives the placement of every tensor argument, `->`, and that of every result:
        `R` whole, `S<d>` sliced along dimension d, `P` a partial sum over slices. The first that
        fits is taken: `register_rule("mylib::mm", "S0,R->S0", "R,S1->S1", "S1,S0->P")`.

    The rule is not checked: a wrong rule gives wrong numbers. Arguments that hold sizes are not
    adapted to the slice.

    Raises:
        ValueError: a rule cannot be read, or `op` does not name one operator.

    Example:
        >>> @torch.library.custom_op("mylib::twice", mutates_args=())
        ... def twice(x: torch.Tensor) -> torch.Tensor:
        ...     return 2 * x
        >>> _ = twice.register_fake(torch.empty_like)
        >>> register_rule(twice, "S0->S0")
        >>> with strict(), micro_batch(4):
        ...     twice(lazy(torch.ones(12, 2))).sum().item()
        48.0
    """
    if not alternatives:
        raise ValueError(
            f"register_rule({op!r}): expected at least one rule such as 'S0,R->S0', got none"
        )
    op = getattr(op, "_opoverload", op)
    name = _name_of(op)
    if not name:
        overloads = getattr(op, "overloads", None)
        if overloads is None or len(overloads()) != 1:
            raise ValueError(
                f"register_rule({op!r}): expected an operator with one overload, or its name "
                "'namespace::name.overload'"
            )
        return register_rule(getattr(op, overloads()[0]), *alternatives)
    if "::" not in name:
        raise ValueError(
            f"register_rule({op!r}): expected a name like 'namespace::name', got {name!r}"
        )
    _core.register_rule(name.removesuffix(".default"), "; ".join(alternatives))


def _name_of(op: Any) -> str | None:
    """`"namespace::name.overload"` of a name or an overload; None: it is neither."""
    if isinstance(op, str):
        return op
    schema = getattr(op, "_schema", None)
    if not schema:
        return None
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else str(schema.name)

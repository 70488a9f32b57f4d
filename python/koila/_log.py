"""What koila says through `logging.getLogger("koila")`: how a step is cut, when that is chosen or
changes (INFO), and what makes it slow, with the line and a remedy (WARNING), once for each cause.

koila installs no handler; the environment variable `KOILA_LOG=INFO` does. C asks told() once a run,
until all of a run's plan is told (python/ext/run/tell.c).
"""

from __future__ import annotations

import logging
import os
from typing import Any

from . import _core
from ._budget import readable
from ._plan import Plan, cut_in_words, in_short

LOGGER = logging.getLogger("koila")

# Of a plan, what was told: bits that C keeps (cached.told of python/ext/run/run.h). And: nothing
# can be said now, and no change of a level will tell when; C asks again (python/ext/run/tell.c).
_SLOW, _CUT, _ASK_AGAIN = 1, 2, 4

MUCH_AGAIN = 1.25  # work run per work recorded, from which on it is worth a word
WORTH_A_WORD = 0.01  # of what the step needs beyond what was held before, for a gather
MANY_READS = 8  # runs for single values in one step
_MOST_CAUSES = 1000  # remembered; a program that makes code all the time begins anew

_told_causes: set[Any] = set()
_last_cut: dict[tuple[str, str], str] = {}


def told(number: int, before: int, retries: int) -> int:
    """Run `number` is over; `before`: what was told of its plan. Returns what is told now."""
    if LOGGER.disabled:
        return before | _ASK_AGAIN
    wanted = _SLOW if LOGGER.isEnabledFor(logging.WARNING) else 0
    if LOGGER.isEnabledFor(logging.INFO):
        wanted |= _CUT
    if not wanted & ~before and not (retries and wanted):
        return before
    raw = _core.plan_numbered(number)
    if raw is None:
        return before | _ASK_AGAIN
    plan = Plan(raw)
    if wanted & _CUT & ~before:
        _tell_cut(plan)
    if wanted & _SLOW:
        for cause, text in slow(plan):
            _once(cause, text)
    return before | wanted


def _once(cause: Any, text: str) -> None:
    if len(_told_causes) >= _MOST_CAUSES:
        _told_causes.clear()
    if cause not in _told_causes:
        _told_causes.add(cause)
        LOGGER.warning("%s", text)


def _tell_cut(plan: Plan) -> None:
    where = (plan.asked_by, plan.asked_at)
    cut = cut_in_words(plan)
    if _last_cut.get(where) == cut:
        return
    if len(_last_cut) >= _MOST_CAUSES:
        _last_cut.clear()
    _last_cut[where] = cut
    small = plan.asked_by != "backward" and not plan.is_cut
    LOGGER.log(logging.DEBUG if small else logging.INFO, "%s", cut_line(plan))


def cut_line(plan: Plan) -> str:
    """`step (train.py:12) cut into 4 × 360 rows of 1440: 18.7 MiB of 23.7 MiB; plain would need
    71.1 MiB`."""
    what = "step" if plan.asked_by == "backward" else f"run for values ({plan.asked_by})"
    if plan.asked_at:
        what += f" ({in_short(plan.asked_at)})"
    cut = f"cut into {cut_in_words(plan)}" if plan.is_cut else f"runs {cut_in_words(plan)}"
    text = f"{what} {cut}: {readable(plan.predicted_peak_bytes)}"
    if plan.budget_bytes is not None:
        text += f" of {readable(plan.budget_bytes)}"
    if plan.n_fewest < plan.n_micro_batches:
        text += f"; {plan.n_fewest} slices would fit, more are tried for speed"
    if plan.is_cut and plan.plain_peak_bytes is not None:
        text += f"; plain would need {readable(plan.plain_peak_bytes)}"
    if plan.n_recomputed:
        text += f"; {plan.n_recomputed} results computed again in each slice"
    if plan.n_offloaded:
        text += f"; {plan.n_offloaded} values wait in host memory"
    return text


def slow(plan: Plan) -> list[tuple[Any, str]]:
    """[(cause, text)] of what makes a step slow or large. Equal causes are told once."""
    found: list[tuple[Any, str]] = []
    for g in plan.gathers if plan.is_cut else ():
        if g.bytes < WORTH_A_WORD * (plan.predicted_peak_bytes - plan.base_bytes):
            continue
        remedy = g.instead or _remedy_of(g.operator)
        text = (
            f"{in_short(g.line, g.module) or 'a line that is not known'}: {g.operator} needs "
            f"{g.dtype}[{', '.join(map(str, g.shape))}] of the whole batch, "
            f"{readable(g.bytes)}. To avoid that: {remedy}"
        )
        found.append((("gather", g.operator, g.line), text))
    if plan.is_cut and plan.replay_ratio >= MUCH_AGAIN:
        found.append(_again(plan))
    if plan.n_reads >= MANY_READS:
        text = (
            f"{in_short(plan.asked_at)}: {plan.n_reads} values were asked for one by one before "
            "this backward, and each was a run of its own. To avoid that: ask after backward(), "
            "or for all at once, torch.stack([...]).tolist()"
        )
        found.append((("reads", plan.asked_at), text))
    if plan.retries:
        found.append((("retries", plan.asked_at), _ran_out(plan)))
    return found


def _remedy_of(operator: str) -> str:
    """What can be done about a gather by it. The rules of the operators of torch and of koila are
    known: those that need all rows have none that would help."""
    outside = "outside of the step it costs the same and is plain"
    if operator.startswith(("aten::", "koila::")):
        return outside
    return f"koila.register_rule() can say how it is cut, if its rows are independent; {outside}"


def _ran_out(plan: Plan) -> str:
    times = f"{plan.retries} time{'s' * (plan.retries != 1)}"
    why = "although the plan fitted"
    remedy = "If that comes back: a smaller koila.budget(), or koila.micro_batch(n)"
    if plan.budget_bytes is not None and plan.predicted_peak_bytes > plan.budget_bytes:
        why = (
            f"since {cut_in_words(plan)} need {readable(plan.predicted_peak_bytes)} of "
            f"{readable(plan.budget_bytes)}"
        )
        remedy = "To avoid that: koila.micro_batch() of fewer rows, or none, or a larger budget"
    return (
        f"{in_short(plan.asked_at)}: memory ran out {times} {why}, and the step was cut again. "
        f"{remedy}"
    )


def _again(plan: Plan) -> tuple[Any, str]:
    more = f"{100 * (plan.replay_ratio - 1):.0f} % of the step's work is computed again"
    ends = [loop for loop in plan.loops[:-1] if loop.ends_at]
    norms = [loop for loop in ends if "batch_norm" in loop.ends_for]
    if plan.n_recomputed and (plan.axis is not None or not norms):
        return ("again", "dropped", plan.asked_at), (
            f"{in_short(plan.asked_at)}: {more}, since not even one row fits the budget with all "
            "its results. To avoid that: a larger koila.budget()"
        )
    if norms:
        first = norms[0]
        lines = f"{in_short(first.ends_at)}: {first.ends_for}"
        lines += f" and {len(norms) - 1} more" if len(norms) > 1 else ""
        return ("again", first.ends_for, first.ends_at), (
            f"{lines} need{'s' * (len(norms) == 1)} statistics of the whole batch before the next "
            f"layer, so {more}. To avoid that: group norm, layer norm, or a batch norm in eval() "
            "mode; a larger koila.budget() keeps more results"
        )
    where = in_short(ends[0].ends_at if ends else plan.asked_at)
    why = f"{ends[0].ends_for} needs all rows" if ends else "values are asked for before backward()"
    return ("again", "loops", where), (
        f"{where}: {why} before the rest of the step, so {more}. To avoid that: a larger "
        "koila.budget() keeps more results"
    )


def from_environment() -> None:
    """`KOILA_LOG=INFO` (or another level's name): koila's messages go to stderr.

    Raises:
        ValueError: it is no level's name.
    """
    asked = os.environ.get("KOILA_LOG", "").strip()
    if not asked:
        return
    level = logging.getLevelName(asked.upper())
    if not isinstance(level, int):
        raise ValueError(
            f"KOILA_LOG={asked}: expected DEBUG, INFO, WARNING, ERROR or CRITICAL, got {asked!r}"
        )
    LOGGER.setLevel(level)
    if not LOGGER.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("koila: %(message)s"))
        LOGGER.addHandler(handler)
        LOGGER.propagate = False  # else a program with a handler of its own shows each line twice


def install() -> None:
    from_environment()
    _core.tell_to(told, getattr(LOGGER, "_cache", None))

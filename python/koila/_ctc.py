"""CTC, as operators that can be cut by rows.

Torch's own keep a table of forward sums whose size depends on the longest target, so that the
shapes of a recorded call were not known and it ran at once, on the scores of all rows. The
operators here tell a size for it, and know where a row finds its targets:

    log_probs       [T, B, C]
    targets         [B, S], padded; or [N], those of all rows one after another
    input_lengths   int64[B], as target_lengths
    begins          int64[B]: where a row begins in targets [N]; None for padded ones

    koila::ctc_loss           -> losses [B], the table: of each slice its own
    koila::ctc_loss_backward  -> the gradient of log_probs

Both call torch's own, so they give the same bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ._torch import torch
from . import _core
from ._calls import gather, value_dependent
from ._instead import instead
from ._own_operators import OwnOperator, own_operators
from ._special import special
from ._tensor import plain

Tensor = torch.Tensor
aten = torch.ops.aten

_NUMBERS = (torch.int64, torch.int32)  # what torch takes for targets and lengths


class _Samples(NamedTuple):
    """What both operators are told of the rows."""

    log_probs: Tensor
    targets: Tensor
    input_lengths: Tensor
    target_lengths: Tensor
    begins: Tensor | None


def _of_rows(*given: Any) -> tuple[Any, ...]:
    """The arguments of torch's operators: targets [N] are those of these rows. The lengths are
    lists, for as tensors they would have to lie where the scores do."""
    s = _Samples(*given)
    of_target = s.target_lengths.tolist()
    targets = s.targets
    if s.begins is not None:
        targets = targets.narrow(0, int(s.begins[0]), sum(of_target))
    return s.log_probs, targets, s.input_lengths.tolist(), of_target


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    *samples, longest, blank, zero_infinity = arguments
    losses, table = aten._ctc_loss.default(*_of_rows(*samples), blank, zero_infinity)
    return losses, table


def _backward(*arguments: Any) -> Tensor:
    grad, *samples, losses, table, blank, zero_infinity = arguments
    gradient: Tensor = aten._ctc_loss_backward.default(
        grad, *_of_rows(*samples), losses, table, blank, zero_infinity
    )
    return gradient


def _fake_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """longest: the most targets of a row; between them, before and after, there may be blanks."""
    *samples, longest, blank, zero_infinity = arguments
    log_probs = samples[0]
    steps, rows = log_probs.shape[:2]
    return log_probs.new_empty(rows), log_probs.new_empty(rows, steps, 2 * longest + 1)


def _fake_backward(*arguments: Any) -> Tensor:
    log_probs: Tensor = arguments[1]
    return log_probs.new_empty(log_probs.shape)


@own_operators("CPU", "CUDA")
def operators() -> list[OwnOperator]:
    """torch.ops.koila with the operators above."""
    samples = "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths"
    samples += ", Tensor? begins"
    rest = "int blank, bool zero_infinity"
    forward = f"ctc_loss({samples}, int longest, {rest}) -> (Tensor, Tensor)"
    backward = f"ctc_loss_backward(Tensor grad, {samples}, Tensor losses, Tensor table, {rest})"
    return [
        OwnOperator(forward, _forward, _fake_forward),
        OwnOperator(f"{backward} -> Tensor", _backward, _fake_backward),
    ]


def _samples(func: Any, log_probs: Any, targets: Any, *lengths: Any) -> _Samples | None:
    """None: none that can be cut, or such as torch refuses. Of targets one after another the
    lengths are made concrete, B numbers, for they say where each row has its own."""
    of_input, of_target = (
        n if isinstance(n, Tensor) else torch.tensor(n, dtype=torch.int64, device="cpu")
        for n in lengths
    )
    rows = log_probs.shape[1:2]
    if (
        not _core.is_lazy(log_probs)
        or log_probs.dim() != 3
        or targets.dim() not in (1, 2)
        or of_input.shape != rows
        or of_target.shape != rows
        or not all(t.dtype in _NUMBERS for t in (targets, of_input, of_target))
    ):
        return None
    if targets.dim() == 2:
        return _Samples(log_probs, targets, of_input, of_target, None)
    if of_target.is_meta:  # without values
        return _Samples(log_probs, targets, of_input, of_target, torch.empty_like(of_target))
    if _core.is_lazy(of_target) and not _core.is_concrete(of_target):
        gather(func, [of_target], {})
    known = plain(of_target).to(device="cpu", dtype=torch.int64)
    if int(known.sum()) != len(targets):
        return None
    return _Samples(log_probs, targets, of_input, of_target, known.cumsum(0) - known)


def _longest(s: _Samples) -> int:
    """The most targets of a row, as far as they are known: of padded ones their width, without
    values the mean."""
    if s.begins is None:
        return s.targets.shape[1]
    if s.begins.is_meta:
        return -(-len(s.targets) // len(s.begins))
    ends = torch.cat([s.begins[1:], s.begins.new_tensor([len(s.targets)])])
    return int((ends - s.begins).max())


@special("_ctc_loss")
def _ctc_loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    samples = None if kwargs else _samples(func, *args[:4])
    if samples is None:
        return value_dependent(func, args, kwargs)
    blank = args[4] if len(args) > 4 else 0
    zero_infinity = args[5] if len(args) > 5 else False
    rest = (_longest(samples), blank, zero_infinity)
    return _core.record(operators().ctc_loss.default, (*samples, *rest), {})


@special("_ctc_loss_backward")
def _ctc_loss_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, *given, losses, table, blank = args[:8]
    samples = None if kwargs else _samples(func, *given)
    if samples is None:
        return _core.record(func, args, kwargs)
    rest = (losses, table, blank, *(args[8:] or (False,)))
    return _core.record(operators().ctc_loss_backward.default, (grad, *samples, *rest), {})


def _where_the_scores_lie(original: Any, log_probs: Any, targets: Any, *rest: Any) -> Any:
    lengths = (n.to(log_probs.device) if isinstance(n, Tensor) else n for n in rest[:2])
    return original(log_probs, targets, *lengths, *rest[2:])


def install() -> None:
    """`F.ctc_loss` takes lengths that lie elsewhere than the scores. For tensors of a class of
    their own torch would divide by the lengths as they are, and refuse."""
    instead(
        torch.nn.functional.ctc_loss,
        _where_the_scores_lie,
        "log_probs, targets, input_lengths, target_lengths, blank=0, reduction='mean', "
        "zero_infinity=False",
        "log_probs",
    )

"""What a user's type checker says of ordinary uses of koila: checked by test_stubs.py with mypy
--strict, never run.

Each `assert_type` is a claim; each `type: ignore` is a wrong use that must be an error, for an
ignore that ignores nothing is one itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader
from typing_extensions import assert_type

import koila
from koila import memlab


def a_step(
    model: torch.nn.Module,
    loader: DataLoader[tuple[torch.Tensor, torch.Tensor]],
    x: torch.Tensor,
    y: torch.Tensor,
) -> torch.Tensor:
    assert_type(koila.lazy(x), torch.Tensor)
    assert_type(koila.lazy(x, y), tuple[torch.Tensor, torch.Tensor])
    assert_type(koila.lazy({"x": x}, batch={"x": 1}), dict[str, torch.Tensor])
    for x, y in koila.lazy(loader):
        assert_type((x, y), tuple[torch.Tensor, torch.Tensor])
    x, y = koila.lazy(x, y, batch=0)
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return assert_type(koila.run(loss), torch.Tensor)


def settings(device: torch.device) -> None:
    koila.set_budget("2GiB")
    koila.set_budget({"cpu": "2GiB"}, resident=True)
    koila.set_budget(None)
    koila.set_budget([1])  # type: ignore[arg-type]
    with koila.budget(0.8), koila.micro_batch(16), koila.axes("batch"), koila.strict():
        pass
    with koila.budget({"cuda:0": "20GiB", "cpu": None}), koila.micro_batch("fastest"):
        pass
    with koila.budget({device: 1 << 30}), koila.micro_batch(None), koila.host_memory("off"):
        pass
    with koila.step_aside(False):
        pass
    koila.micro_batch("fewest")
    with koila.compile("auto"):
        pass
    koila.compile(True)  # type: ignore[arg-type]
    koila.micro_batch("slowest")  # type: ignore[arg-type]
    koila.micro_batch(1.5)  # type: ignore[arg-type]
    koila.step_aside(0)  # type: ignore[arg-type]
    koila.axes("rows")  # type: ignore[arg-type]
    koila.host_memory("on")  # type: ignore[arg-type]
    koila.lasy(device)  # type: ignore[attr-defined]


@koila.budget("512MB")
def decorated(n: int) -> str:
    return str(n)


def plans(step: Any, loss: torch.Tensor) -> None:
    assert_type(decorated(1), str)
    decorated("1")  # type: ignore[arg-type]
    p = assert_type(koila.last_plan(), koila.Plan | None)
    print(p.n_micro_batches)  # type: ignore[union-attr]
    asked = [assert_type(q, koila.Plan).asked_by for q in koila.plans()]
    assert_type(asked, list[str])
    p = assert_type(koila.explain(loss), koila.Plan)
    assert_type(p.predicted_peak_bytes, int)
    assert_type(p.n_fewest, int)
    assert_type(p.measured_peak_bytes, int | None)
    assert_type(p.time_ratio, float)
    assert_type(
        [(g.operator, g.shape, g.n_bytes) for g in p.gathers],
        list[tuple[str, tuple[int, ...], int]],
    )
    assert_type(p.loops[0].n_slices, int)
    assert_type((p.plain_peak_bytes, p.seconds), tuple[int | None, float | None])
    assert_type(p.to_dict(), dict[str, Any])
    p.save("step.html")
    ahead = koila.plan(step, loss, device="h100-80gb", optimizer="adamw")
    assert_type(ahead.fits, bool)
    koila.plan(step, loss, optimiser="adamw")  # type: ignore[call-arg]
    koila.plan(step, loss, budget={"cpu": 1})  # type: ignore[arg-type]
    with koila.module_names():
        assert_type([t.module for t in p.largest], list[str])
    koila.progress(False)
    koila.progress("off")  # type: ignore[arg-type]
    with koila.on_step(lambda step: print(step.slices, step.plan)) as listener:
        assert_type(koila.last_plan(), koila.Plan | None)
    listener.remove()
    koila.on_step(3)  # type: ignore[arg-type]
    koila.register_rule("mine::op", "S0 -> S0")
    try:
        list(koila.opaque(torch.nn.Linear(2, 2)).parameters())
        assert_type(koila.opaque(decorated)(1), str)
    except koila.OutOfMemory as error:
        assert_type(error.missing_bytes, int)


@memlab.profile
def profiled(n: int) -> int:
    return n


@memlab.profile(columns=("rise", "hits"))
def with_columns(n: int) -> int:
    return n


@memlab.profile_every(2)
def every_second(n: int) -> int:
    return n


def laboratory(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    assert_type((profiled(1), with_columns(1), every_second(1)), tuple[int, int, int])
    profiled("1")  # type: ignore[arg-type]
    with memlab.LineProfiler(profiled, model, target_gpu="cpu") as profiler:
        profiled(1)
    profiler.print_stats()
    assert_type(profiler.records(profiled), list[dict[str, Any]])
    profiler.display(columns="rise").save("lines.html")
    memlab.LineProfiler(profiled, stats="sometimes")  # type: ignore[arg-type]
    reporter = memlab.MemReporter({"net": model})
    reporter.add_optimizer(optimizer)
    reporter.report(verbose=True, device=torch.device("cpu"))
    memlab.MemReporter("net")  # type: ignore[arg-type]
    before = memlab.snapshot(model, [optimizer])
    assert_type(before.by_kind(), dict[str, int])
    assert_type(memlab.diff(before, reporter.snapshot()).total, int)
    with (
        memlab.measure("cpu") as m,
        memlab.on_oom(top=5),
        memlab.Courtesy(to="pinned") as courtesy,
        memlab.timeline(model, optimizer) as t,
    ):
        profiled(1)
    assert_type((m.rise, m.peak, t.peak, courtesy.yielded), tuple[int, int, int, bool])
    assert_type(t.curve(), list[tuple[float, int]])
    m.height  # type: ignore[attr-defined]

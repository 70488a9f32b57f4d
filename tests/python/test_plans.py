"""What `last_plan()` and `plans()` tell: which run, what asked for it, and where."""

import asyncio
import gc
import inspect
import os
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import koila
from koila import lazy

BATCH = 12


def here(ahead=0):
    """This line of the caller, as `asked_at` tells lines."""
    frame = inspect.currentframe().f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno + ahead}"


def line_of(plan):
    return os.path.basename(plan.asked_at)


def make():
    torch.manual_seed(0)
    return nn.Linear(5, 3), torch.randn(BATCH, 5), torch.randint(0, 3, (BATCH,))


def train(model, x, y):
    F.cross_entropy(model(lazy(x)), y).backward()


def evaluate(model, x, rows=BATCH):
    with torch.no_grad():
        return model(lazy(x[:rows])).sum().item()


@pytest.fixture
def case():
    gc.collect()  # a step whose tensors lie in the garbage of other tests is open still
    with koila.micro_batch(None):  # settings are set: what ran before does not count
        yield make()


# ---- which run


def test_an_evaluation_does_not_hide_the_last_step(case):
    model, x, y = case
    train(model, x, y)
    evaluate(model, x, rows=7)
    assert (koila.last_plan().asked_by, koila.last_plan().batch) == ("backward", BATCH)
    assert [(p.asked_by, p.batch) for p in koila.plans()[-2:]] == [("backward", BATCH), ("item", 7)]


def test_a_value_that_is_read_does_not_hide_the_last_step(case):
    model, x, y = case
    train(model, x, y)
    recorded = model(lazy(x))
    assert recorded.mean().item() is not None
    assert koila.last_plan().asked_by == "backward"
    recorded.sum().backward()
    assert koila.last_plan().asked_by == "backward"
    assert [p.asked_by for p in koila.plans()[-3:]] == ["backward", "item", "backward"]


def test_before_any_backward_it_is_the_last_run(case):
    model, x, _ = case
    evaluate(model, x, rows=7)
    assert (koila.last_plan().asked_by, koila.last_plan().batch) == ("item", 7)


def test_new_settings_make_it_the_last_run_until_a_backward(case):
    model, x, y = case
    train(model, x, y)
    with koila.micro_batch(4):
        evaluate(model, x)
        assert (koila.last_plan().asked_by, koila.last_plan().n_micro_batches) == ("item", 3)
        train(model, x, y)
        evaluate(model, x[:8])
        assert (koila.last_plan().asked_by, koila.last_plan().n_micro_batches) == ("backward", 3)


def test_a_plan_ahead_does_not_hide_the_last_step(case):
    model, x, y = case
    train(model, x, y)
    koila.plan(lambda x, y: F.cross_entropy(model(x), y), x[:7], y[:7])
    assert (koila.plans()[-1].asked_by, koila.plans()[-1].batch) == ("plan", 7)
    assert koila.plans()[-1].n_run == 0
    evaluate(model, x)
    assert (koila.last_plan().asked_by, koila.last_plan().batch) == ("backward", BATCH)


def test_a_gradient_asked_for_by_autograd_is_a_backward_too(case):
    model, x, y = case
    torch.autograd.grad(F.cross_entropy(model(lazy(x)), y), [model.weight])
    assert koila.last_plan().asked_by == "backward"


# ---- what asked, and where


def test_a_run_tells_what_asked_for_it_and_at_which_line(case, capsys):
    model, x, y = case
    lines = []
    out = model(lazy(x))
    lines.append(("item", here(1)))
    out.sum().item()
    lines.append(("read", here(1)))
    if out.mean() > 0:
        pass
    lines.append(("aten::nonzero", here(1)))
    (out > 0).nonzero()
    lines.append(("read", here(1)))
    print(out[0])
    lines.append(("read", here(1)))
    koila.run(out * 2)
    lines.append(("backward", here(1)))
    F.cross_entropy(out, y).backward()
    assert [(p.asked_by, line_of(p)) for p in koila.plans()[-len(lines) :]] == lines


def test_a_step_that_is_left_says_so(case):
    _, x, _ = case
    norm = nn.BatchNorm1d(5)
    norm(lazy(x))
    assert koila.plans()[-1].asked_by == "leaving" and norm.num_batches_tracked == 1


def test_sixteen_runs_are_remembered_the_newest_last(case):
    model, x, y = case
    train(model, x, y)
    for rows in range(1, 20):
        evaluate(model, torch.ones(rows, 5), rows)
    assert [p.batch for p in koila.plans()] == list(range(4, 20))
    assert koila.last_plan().batch == BATCH, "the last step is remembered beside them"


def test_each_of_them_can_be_saved(case, tmp_path):
    model, x, y = case
    train(model, x, y)
    evaluate(model, x)
    step, evaluation = koila.plans()[-2:]
    step.save(tmp_path / "step.kgraph")
    evaluation.save(tmp_path / "evaluation.kgraph")
    assert "backward" in (tmp_path / "step.kgraph").read_text()
    assert "backward" not in (tmp_path / "evaluation.kgraph").read_text()


# ---- what reads ran counts for their step


@pytest.mark.parametrize("rows", [None, 4])
def test_a_step_counts_what_ran_for_its_reads(case, rows):
    model = nn.Linear(5, 200)  # its results are too large to be made in passing

    def step(reads):
        out = model(lazy(torch.ones(BATCH, 5)))
        if reads:
            out.mean().item()
        out.square().sum().backward()
        return koila.last_plan()

    with koila.micro_batch(rows):
        without, with_read, after = step(False), step(True), step(False)
    read = koila.plans()[-3]
    assert read.asked_by == "item" and read.n_run > 0
    assert with_read.n_run == without.n_run + (1 if rows is None else read.n_run), "the mean"
    assert without.n_recorded < with_read.n_recorded <= without.n_recorded + read.n_recorded
    assert (with_read.replay_ratio > without.replay_ratio) == (rows is not None)
    assert (after.n_run, after.replay_ratio) == (without.n_run, without.replay_ratio)


# ---- whose


def test_each_thread_has_its_own(case):
    model, x, y = case
    train(model, x, y)
    mine = koila.last_plan().asked_at
    found = []

    def work():
        found.append((koila.last_plan(), koila.plans()))
        evaluate(model, x, rows=7)
        found.append((koila.last_plan().batch, len(koila.plans())))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(None, []), (7, 1)]
    assert koila.last_plan().asked_at == mine and koila.plans()[-1].asked_by == "backward"


def test_each_asyncio_task_has_its_own(case):
    model, x, _ = case

    async def work(rows):
        found = []
        for _ in range(3):
            evaluate(model, x, rows)
            await asyncio.sleep(0)
            found += [koila.last_plan().batch, len(koila.plans())]
        return found

    async def main():
        return await asyncio.gather(work(3), work(5))

    assert asyncio.run(main()) == [[3, 1, 3, 2, 3, 3], [5, 1, 5, 2, 5, 3]]


def asked_from(file, line):
    """What `asked_at` tells of a value that is read there."""
    program = "\n" * (line - 1) + "float(lazy(torch.ones(2, 2)).sum())"
    exec(compile(program, file, "exec"), {"lazy": lazy, "torch": torch})
    return koila.last_plan().asked_at


@pytest.mark.parametrize("n", [1, 9, 10, 12345, 99999])
def test_lines_of_any_number_are_told(n):
    assert asked_from("/somewhere/program.py", n) == f"/somewhere/program.py:{n}"


@pytest.mark.parametrize("n", [290, 297, 298, 299, 300, 400])
def test_the_line_of_a_very_long_file_name_is_cut(n):
    file = "/" + "x" * (n - 1)
    assert asked_from(file, 12) == f"{file}:12"[:299]

"""Random programs of views, writes, metadata changes, factories and random operators: lazy ≡ eager,
in everything a user could notice."""

import pytest
import torch

import koila
import program_generator as programs
from conftest import LONG as LONG_RUNS
from helpers import REAL_GPU, Cut
from koila import UnsupportedError, lazy

WHOLE, SLICED, LONG = range(60), range(1000, 1025), range(2000, 3000)
OVERLAPPING = {29}  # writes several times to an element: which is the last one, a GPU does not say


def same(seed, rows):
    if REAL_GPU and seed in OVERLAPPING:
        return
    eager = programs.run(seed, seed % 2)
    try:
        with koila.micro_batch(rows):
            ours = programs.run(seed, seed % 2, lazy, refusals=(UnsupportedError,))
    except programs.Refused:
        return  # said so, and said why
    differences = programs.against(eager, ours, seed, exact=rows is None)
    assert not differences, (seed, differences)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", WHOLE)
def test_a_program_in_one_slice_is_bit_equal(seed):
    same(seed, None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rows", [4, 1])
@pytest.mark.parametrize("seed", SLICED)
def test_a_program_in_slices_is_equal(seed, rows):
    same(seed, rows)


@pytest.mark.about_the_cpu("torch's default device is a thread's own")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", [1000, *([] if not LONG_RUNS else range(4000, 6000, 4))])
def test_programs_in_threads_beside_each_other_are_equal(first):
    seeds = range(first, first + 4)
    ours = programs.together(seeds, lazy, (UnsupportedError,))
    for seed, outcome in zip(seeds, ours):
        eager = programs.run(seed, seed % 2, kinds=programs.WITHOUT_RANDOM)
        eager.generator = b""
        assert outcome is None or not programs.compare(eager, outcome, exact=False), seed


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rows", [None, 3, 4, 1])
@pytest.mark.parametrize("first", LONG[::50])
def test_many_programs(first, rows):
    for seed in range(first, first + 50):
        same(seed, rows)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rows", [None, 4, 1])
@pytest.mark.parametrize("seed", [302156, 8403347])
def test_a_view_that_nobody_looked_at_is_a_leaf_after_a_layout_write_too(seed, rows):
    eager = programs.run(seed, seed % 2)
    assert any("a leaf Variable that requires grad" in line for line in eager.log)
    with koila.micro_batch(rows):
        ours = programs.run(seed, seed % 2, lazy)
    assert not programs.compare(eager, ours, exact=False)


def test_rounding_that_a_program_magnifies_is_told_from_a_fault():
    """It takes the sine of 16,000: the gradient moves by 1e-7 for the last bits of the input."""
    seed = 8302146
    eager = programs.run(seed, seed % 2)
    with Cut(3, "both"):
        ours = programs.run(seed, seed % 2, lazy)
    assert not programs.against(eager, ours, seed, exact=False)
    moved = programs.run(seed, seed % 2, nudge=100)  # as no run that measures is
    assert programs.compare(eager, moved, exact=False)
    assert not programs.against(eager, moved, seed, exact=False)
    right = moved.gradients[0]
    moved.gradients[0] = right * (1 + 1e-9)
    assert programs.against(eager, moved, seed, exact=False)
    moved.gradients[0] = right.clone()
    moved.gradients[0][2, 3] += 1e-6
    assert programs.against(eager, moved, seed, exact=False)


def test_the_comparison_notices_a_lost_write():
    """A planted fault: a lazy world in which fill_ does nothing must not pass."""
    caught = 0
    fill = torch.Tensor.fill_
    for seed in range(40):
        eager = programs.run(seed, 0, kinds="vwwf")
        torch.Tensor.fill_ = lambda self, value: self
        try:
            ours = programs.run(seed, 0, kinds="vwwf")
        finally:
            torch.Tensor.fill_ = fill
        caught += bool(programs.compare(eager, ours, exact=True))
    assert caught > 0

"""Random programs of views, writes, metadata changes, factories and random operators: lazy ≡ eager,
in everything a user could notice."""

import pytest
import torch

import koila
import program_generator as programs
from conftest import LONG as LONG_RUNS
from helpers import REAL_GPU
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
def test_two_errors_in_one_write_may_come_in_another_order_after_a_layout_write(rows):
    seed = 302156
    eager = programs.run(seed, 0)
    with koila.micro_batch(rows):
        ours = programs.run(seed, 0, lazy)
    assert (
        len(programs.compare(eager, ours, exact=rows is None)) == 1
        and "a leaf Variable" in programs.compare(eager, ours, exact=False)[0]
    )
    assert not programs.against(eager, ours, seed, exact=rows is None)
    before_it = programs.Outcome(log=[line for line in eager.log if not line.startswith("9 m")])
    other = programs.Outcome(log=[line for line in ours.log if not line.startswith("9 m")])
    assert programs.against(before_it, other, seed, exact=False), (
        "without the layout write it is a difference"
    )


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

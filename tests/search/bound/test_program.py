"""The linear program of the bound, where less memory may be taken."""

from __future__ import annotations

import numpy as np
import pytest

from search.bound.program import Branch, Program
from search.bound.stretches import CutTimes, Sparse

FIRST = np.array([0, 2, 4])
MEMORY = np.array([[1.0, 3.0, 1.0, 3.0, 1.0, 3.0], [0.0] * 6])
MS = np.array([9.0, 1.0, 9.0, 4.0, 9.0, 7.0])
"""Three tables, each with a slow choice and a fast one that takes three times the memory."""


def a_program(room: float) -> Program:
    program = Program(FIRST, MEMORY, np.array([room, 0.0]))
    nothing = Sparse.of(np.zeros((0, 6)))
    program.add_cut(CutTimes(1.0, MS, nothing, nothing, np.zeros(0), np.zeros((0, 6), dtype=bool)))
    program.solve()
    return program


def test_the_largest_share_of_every_table() -> None:
    assert a_program(7.0).largest().tolist() == [1, 3, 4]


@pytest.mark.parametrize(
    ("part", "fast"), [(1.0, [1, 3, 5]), (0.7, [1, 3, 4]), (0.34, [1, 2, 4]), (0.0, [0, 2, 4])]
)
def test_with_less_memory_the_tables_that_gain_most_are_fast(part: float, fast: list[int]) -> None:
    assert a_program(20.0).within(part).tolist() == fast  # type: ignore[union-attr]


def test_afterwards_the_program_is_as_before() -> None:
    program = a_program(7.0)
    before = program.shares.copy(), program.optimum
    program.within(0.3)
    assert (program.shares == before[0]).all()
    assert program.optimum == before[1]
    program.solve()
    assert program.optimum == pytest.approx(before[1])


def test_where_nothing_fits_there_is_no_choice() -> None:
    program = a_program(7.0)
    assert program.within(-0.5) is None
    program.solve()
    assert program.largest().tolist() == [1, 3, 4]


def test_a_branch_is_sure_of_the_least_peak_of_the_options_that_it_has_one_of() -> None:
    peaks = Sparse.of(np.array([[1.0, 2.0, 5.0, 9.0, 0.0, 0.0]]))
    nothing = Sparse.of(np.zeros((1, 6)))
    times = CutTimes(0.0, MS, nothing, peaks, np.zeros(1), np.zeros((1, 6), dtype=bool))
    every, options = np.ones(6, dtype=bool), np.array([0, 1, 1, 1, 0, 0], dtype=bool)
    without = every & (np.arange(6) != 1)
    assert Branch(every).least(times).tolist() == [0.0]
    assert Branch(every, (options,)).least(times).tolist() == [2.0]
    assert Branch(without, (options,)).least(times).tolist() == [5.0]


def test_times_that_are_zero_are_not_stored() -> None:
    array = np.array([[0.0, 2.0, 0.0], [-1.5, 0.0, 0.0]])
    stored = Sparse.of(array)
    assert len(stored.values) == 2
    assert (stored.dense() == array).all()
    idles = array < 0
    times = CutTimes(0.0, np.arange(3.0), stored, Sparse.of(-array), np.zeros(2), idles)
    part = times.of(np.array([2, 0]))
    assert (part.beyond == array[:, [2, 0]]).all()
    assert (part.peak == -array[:, [2, 0]]).all()
    assert (part.idle == [[0.0, 0.0], [0.0, -1.5]]).all()

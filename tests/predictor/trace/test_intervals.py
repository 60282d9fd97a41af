"""Set operations on intervals against sets of whole microseconds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.trace.breakdown import Intervals

PAIRS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


def points(pairs: list[tuple[int, int]]) -> set[int]:
    return {t for a, b in pairs for t in range(a, b)}


def points_of(intervals: Intervals) -> set[int]:
    assert np.all(intervals.starts < intervals.ends)
    assert np.all(intervals.ends[:-1] < intervals.starts[1:])
    return points([(int(a), int(b)) for a, b in zip(intervals.starts, intervals.ends, strict=True)])


@given(PAIRS, PAIRS, st.integers(0, 40), st.integers(0, 40))
def test_like_sets(first: list, second: list, start: int, end: int) -> None:
    a, b = Intervals.merged(first), Intervals.merged(second)
    p, q = points(first), points(second)
    assert points_of(a) == p
    assert points_of(a | b) == p | q
    assert points_of(a & b) == p & q
    assert points_of(a - b) == p - q
    start, end = min(start, end), max(start, end)
    assert a.within(start, end) == len(p & set(range(start, end)))


def test_touching_intervals_merge() -> None:
    merged = Intervals.merged([(2.0, 3.0), (0.0, 2.0), (1.0, 1.0)])
    assert (merged.starts.tolist(), merged.ends.tolist()) == ([0.0], [3.0])


def test_large_times_keep_their_fractions() -> None:
    start = 1.7e15
    assert Intervals.merged([(start, start + 0.5)]).within(0, 2e15) == pytest.approx(0.5)

"""Sets of times as merged intervals."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Intervals:
    """Half-open intervals in order that neither overlap nor touch.

    Args:
        starts, ends: of each, in one unit; ``starts[i] < ends[i] < starts[i + 1]``.
    """

    starts: Times
    ends: Times

    @staticmethod
    def merged(pairs: Iterable[tuple[float, float]]) -> Intervals:
        """The union of ``(start, end)`` pairs in any order; empty ones vanish."""
        found = np.array([p for p in pairs if p[1] > p[0]], dtype=np.float64).reshape(-1, 2)
        found = found[np.argsort(found[:, 0], kind="stable")]
        if not len(found):
            return Intervals(found[:, 0], found[:, 1])
        reached = np.maximum.accumulate(found[:, 1])
        first = np.concatenate(([True], found[1:, 0] > reached[:-1]))
        last = np.concatenate((first[1:], [True]))
        return Intervals(found[first, 0], reached[last])

    def covers(self, points: Times) -> NDArray[np.bool_]:
        """Whether each point lies in an interval."""
        if not len(self.starts):
            return np.zeros(len(points), dtype=bool)
        index = np.searchsorted(self.starts, points, side="right") - 1
        inside: NDArray[np.bool_] = (index >= 0) & (points < self.ends[index])
        return inside

    def __or__(self, other: Intervals) -> Intervals:
        """In either."""
        pairs = np.concatenate(
            (
                np.column_stack((self.starts, self.ends)),
                np.column_stack((other.starts, other.ends)),
            )
        )
        return Intervals.merged([(float(a), float(b)) for a, b in pairs])

    def __and__(self, other: Intervals) -> Intervals:
        """In both."""
        points = self._points(other)
        return _from_pieces(points, self.covers(points) & other.covers(points))

    def __sub__(self, other: Intervals) -> Intervals:
        """In this but not in the other."""
        points = self._points(other)
        return _from_pieces(points, self.covers(points) & ~other.covers(points))

    def within(self, start: float, end: float) -> float:
        """Length of what lies between two times."""
        low = int(np.searchsorted(self.ends, start, side="right"))
        high = int(np.searchsorted(self.starts, end, side="left"))
        starts = np.maximum(self.starts[low:high], start)
        return float(np.sum(np.minimum(self.ends[low:high], end) - starts))

    def _points(self, other: Intervals) -> Times:
        return np.unique(np.concatenate((self.starts, self.ends, other.starts, other.ends)))


def _from_pieces(points: Times, inside: NDArray[np.bool_]) -> Intervals:
    """Intervals of the pieces between neighbouring points; ``inside`` says which belong."""
    change = np.diff(np.concatenate(([False], inside)).astype(np.int8))
    return Intervals(points[change == 1], points[change == -1])

"""Bound on the time of plans by one cycle of a timeline: a sum of maxima over the ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class CycleCut:
    """Lower bound on the time of plans from one cycle of a timeline.

    Collectives of all ranks split the cycle: each segment between two of them may run on another
    rank, and waits for the busiest one:

    ``time >= constant + even . mean load + sum over segments of max over ranks (segment . load)``.

    In every segment a rank also pays the floors of the groups that it launches.

    Args:
        constant: constant time of the cycle in ms.
        even: slopes in the mean load over the ranks, ``[groups, COLUMNS]`` in ms.
        segments: slopes of every segment, ``[segments, groups, COLUMNS]`` in ms.
        floors: launch floors of the groups, ``[segments, groups]`` in ms.
        groups: lookup groups of the plan that gave the cut. It does not hold for plans that lack
            any of these; empty if it holds for all plans.
    """

    constant: float
    even: Array
    segments: Array
    floors: Array
    groups: frozenset[int] = frozenset()

    def at(self, loads: Array, launched: NDArray[np.bool_]) -> float:
        """Return the least time of a plan in ms.

        Args:
            loads: loads of the ranks, ``[groups, ranks, COLUMNS]``.
            launched: True where a rank has shards of a group, ``[groups, ranks]``.
        """
        times = np.einsum("sgc,grc->sr", self.segments, loads) + self.floors @ launched
        even = float((self.even * loads.mean(axis=1)).sum())
        return self.constant + even + float(times.max(axis=1).sum())

    def is_like(self, other: CycleCut) -> bool:
        """Return True if the cuts are equal up to rounding."""
        if self.segments.shape != other.segments.shape:
            return False
        same = np.isclose(self.constant, other.constant) and np.allclose(self.even, other.even)
        return bool(same) and np.allclose(self.segments, other.segments)

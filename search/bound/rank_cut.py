"""A cut of the relaxation for plans whose shards lie on ranks: some stretches at the slowest rank.

Collectives of all ranks part the cycle of a cut, so every section between two of them may run on
another rank, and every such collective waits for its busiest one. Docs: docs/model.md, chapter 15.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from search.bound.relaxation import Cut

Array = NDArray[np.float64]


@dataclass(frozen=True)
class RankCut:
    """``time >= constant + rest . mean + sum over stretches of max over ranks (work . load)``.

    In every stretch a rank also takes the floors of the groups that it launches. The cut has to
    come from a relaxation whose hulls reach as far as the load of one rank can.

    Args:
        constant: of the cycle in ms.
        rest: slope of what is taken at the mean rank, ``[groups, COLUMNS]``.
        work: slopes of the stretches, ``[stretches, groups, COLUMNS]``.
        floors: of a launch of a group, ``[stretches, groups]``.
    """

    constant: float
    rest: Array
    work: Array
    floors: Array

    @classmethod
    def of(cls, cut: Cut) -> RankCut:
        """The cut with its sections and collectives as stretches."""
        work = np.concatenate([cut.segments + cut.uneven, cut.messages])
        floors = np.zeros(work.shape[:2])
        floors[: len(cut.floors)] = cut.floors
        return cls(cut.constant, cut.slope - work.sum(axis=0), work, floors)

    def at(self, loads: Array, launched: NDArray[np.bool_]) -> float:
        """The least time in ms of a plan.

        Args:
            loads: ``[groups, ranks, COLUMNS]``.
            launched: whether a rank has shards of a group, ``[groups, ranks]``.
        """
        stretches = np.einsum("sgc,grc->sr", self.work, loads) + self.floors @ launched
        rest = float((self.rest * loads.mean(axis=1)).sum())
        return self.constant + rest + float(stretches.max(axis=1).sum())

    def is_like(self, other: RankCut) -> bool:
        """Both are of the same cycle, at loads that make no difference."""
        if self.work.shape != other.work.shape or not np.isclose(self.constant, other.constant):
            return False
        return np.allclose(self.rest, other.rest) and np.allclose(self.work, other.work)

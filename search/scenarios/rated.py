"""Plans by another measure than their predicted time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from search.objective import Assignment, Objective, apply
from search.space.option import Choice

Array = NDArray[np.float64]
Rate = Callable[[Sequence[Assignment]], Array]
"""Plans -> a measure of each, ``[plans]``; less is better."""


class RatedObjective(Objective):
    """What a search minimises in place of the predicted time.

    Args:
        base: numbers the plans, and knows their memory.
        rate: the measure.
    """

    def __init__(self, base: Objective, rate: Rate) -> None:
        super().__init__(base.problem, base.space)
        self.scorer = base.scorer
        self.rate = rate

    def score(self, assignments: Sequence[Assignment]) -> Array:
        """The measure of each."""
        self.evaluations += len(assignments)
        return self.rate(assignments) if assignments else np.zeros(0)

    def score_neighbours(self, base: Assignment, changes: Sequence[Mapping[int, Choice]]) -> Array:
        """The measure of ``base`` with each of the changes."""
        return self.score([apply(base, change) for change in changes])

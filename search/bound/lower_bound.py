"""A lower bound on the predicted iteration time of every plan in a search space.

Every plan uses some set of exchanges (module x sharding type), which fixes the operations of its
graph. For each set, a linear program over fractional plans (each table mixes its options, memory is
pooled over all ranks) is minimised under the cuts of `search.bound.relaxation`, which are added
where the program's optimum violates them (Kelley 1960). The bound is the least over all sets; sets
are refined best first, so only those that could hold the optimum cost time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import chain, combinations

import numpy as np

from predictor.iteration.plan_scorer import PlanScorer
from search.bound.choices import BoundChoices
from search.bound.exchange_set import ExchangeSet
from search.problem import Problem
from search.space.option import Space

ROUNDING = 1e-9
"""Taken off the bound."""
MAX_SETS = 256
"""With more sets of exchanges than this, only the bound that holds for all sets is computed."""
FLOOR_STEPS = 20
"""Refinements of the bound that holds for all sets, where every set starts from."""


class LowerBound:
    """The bound of a problem over a space, refined step by step.

    Args:
        scorer: shares its shard loads with the search.
    """

    def __init__(self, problem: Problem, space: Space, scorer: PlanScorer) -> None:
        self.choices = BoundChoices(problem, space, scorer)
        self.sets: list[ExchangeSet] = []
        # sets that may still be refined, least bound first; the least bound of the others
        self._open: list[tuple[float, int, ExchangeSet]] | None = None
        self._fathomed = np.inf

    def solve(
        self,
        steps: int,
        upper_ms: float = np.inf,
        stop: Callable[[float], bool] = lambda bound: False,
    ) -> float:
        """The bound in ms after at most ``steps`` more refinements.

        Args:
            upper_ms: a plan with this time is known; sets above it need no more work.
            stop: asked after every step with the bound so far.
        """
        if self._open is None:
            self._begin()
        assert self._open is not None
        for _ in range(steps):
            if not self._open or self.proven_ms >= min(self._fathomed, upper_ms):
                break
            before, index, one = heapq.heappop(self._open)
            try:
                bound, done = one.refine()
            except KeyboardInterrupt:  # the bound is of all sets, also of this one
                heapq.heappush(self._open, (before, index, one))
                raise
            bound = max(bound, before)
            if done:
                self._fathomed = min(self._fathomed, bound)
            else:
                heapq.heappush(self._open, (bound, index, one))
            if stop(self.proven_ms):
                break
        return float(min(self.proven_ms, upper_ms) * (1 - ROUNDING))

    @property
    def proven_ms(self) -> float:
        """The least bound of all sets so far."""
        return min(self._fathomed, self._open[0][0] if self._open else np.inf)

    def _begin(self) -> None:
        floor = self._floor()
        self.sets = self._sets()
        self._open = [(floor, i, one) for i, one in enumerate(self.sets)]
        heapq.heapify(self._open)
        self._fathomed = np.inf if self._open else floor

    def promising(self, count: int) -> list[ExchangeSet]:
        """The solved sets with the lowest bounds; fewer, or none, where `solve` saw fewer."""
        seen = [one for one in self.sets if 0 < one.proven < np.inf]
        return sorted(seen, key=lambda one: one.proven)[:count]

    def _floor(self) -> float:
        """A bound that holds whatever the set of exchanges."""
        everything = ExchangeSet(self.choices, np.arange(len(self.choices.all)), exact=False)
        bound = 0.0
        for _ in range(FLOOR_STEPS):
            bound, done = everything.refine()
            if done:
                break
        return bound

    def _sets(self) -> list[ExchangeSet]:
        """All sets of exchanges that offer every table an option; none if they are too many."""
        choices = self.choices
        exchanges = [choices.exchange(c) for c in choices.all]
        kinds = sorted(set(exchanges))
        if 2 ** len(kinds) > MAX_SETS:
            return []
        needed = choices.undominated(np.arange(len(choices.all)))
        found = []
        for kept in chain.from_iterable(combinations(kinds, n) for n in range(1, len(kinds) + 1)):
            mine = np.flatnonzero([exchange in kept for exchange in exchanges])
            if len({choices.all[i].table for i in mine}) == choices.tables:
                found.append(ExchangeSet(choices, mine, exact=True, needed=needed[mine]))
        return found

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
from functools import cached_property
from itertools import chain, combinations

import numpy as np

from predictor.iteration.plan_scorer import PlanScorer
from search.bound.choices import BoundChoices
from search.bound.exchange_set import ExchangeSet
from search.bound.rank_excess import MAX_CHOICES
from search.problem import Problem
from search.space.option import Space

ROUNDING = 1e-9
"""Taken off the bound."""
MAX_SETS = 256
"""With more sets of exchanges than this, only the bound that holds for all sets is computed."""
FLOOR_STEPS = 20
"""Refinements of the bound that holds for all sets, where every set starts from."""
WORTH = 5e-3
"""Gap below which it is not worth while to look at what single ranks can hold."""
KNAPSACKS = 240
"""Knapsacks solved for that at effort 1; each takes hundredths of a second."""


class LowerBound:
    """The bound of a problem over a space, refined step by step.

    Args:
        scorer: shares its shard loads with the search.
    """

    def __init__(self, problem: Problem, space: Space, scorer: PlanScorer) -> None:
        self._problem = problem, space, scorer
        self.sets: list[ExchangeSet] = []
        # sets that may still be refined, least bound first, and those whose program is solved; the
        # least bound of the others
        self._open: list[tuple[float, int, ExchangeSet]] | None = None
        self._solved: list[tuple[float, int, ExchangeSet]] = []
        self._fathomed = np.inf

    @cached_property
    def choices(self) -> BoundChoices:
        """All choices of the space; for many tables and ranks this takes seconds."""
        return BoundChoices(*self._problem)

    @property
    def has_begun(self) -> bool:
        """Something is proven."""
        return self._open is not None

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
            if not self._open or self.proven_ms >= min(self._least_solved, upper_ms):
                break
            before, index, one = heapq.heappop(self._open)
            if one.proven > before:  # it was refined elsewhere
                heapq.heappush(self._open, (one.proven, index, one))
                continue
            try:
                bound, done = one.refine()
            except KeyboardInterrupt:  # the bound is of all sets, also of this one
                heapq.heappush(self._open, (before, index, one))
                raise
            bound = max(bound, before)
            heapq.heappush(self._solved if done else self._open, (bound, index, one))
            if stop(self.proven_ms):
                break
        return float(min(self.proven_ms, upper_ms) * (1 - ROUNDING))

    def tighten(
        self, steps: int, upper_ms: float, effort: float, stop: Callable[[float], bool]
    ) -> float:
        """The bound in ms with what single ranks can hold, where that can help; set after set, the
        least bound first.

        Args:
            steps: as of `solve`, for sets that are the least then.
            upper_ms: a plan with this time is known.
            effort: multiple of the default work.
            stop: asked often, with the bound so far.
        """
        left = max(1, round(KNAPSACKS * effort))
        while left > 0 and not stop(self.solve(steps, upper_ms, stop)):
            bound, _, one = self._solved[0] if self._solved else (np.inf, 0, None)
            if one is None or bound > self.proven_ms or bound * (1 + WORTH) >= upper_ms:
                break
            bound, used = one.fill_ranks(upper_ms, left, lambda: stop(self.proven_ms))
            left -= used
            before, _, _ = heapq.heappop(self._solved)
            self._fathomed = min(self._fathomed, max(bound, before))
        return float(min(self.proven_ms, upper_ms) * (1 - ROUNDING))

    @property
    def proven_ms(self) -> float:
        """The least bound of all sets so far; 0 before the first."""
        if self._open is None:
            return 0.0
        return min(self._least_solved, self._open[0][0] if self._open else np.inf)

    @property
    def _least_solved(self) -> float:
        """The least bound of the sets whose programs are solved."""
        return min(self._fathomed, self._solved[0][0] if self._solved else np.inf)

    def notes(self, upper_ms: float) -> tuple[str, ...]:
        """What the bound leaves out or did not get to, a sentence each; none where it is closed.

        Args:
            upper_ms: of the best plan known.
        """
        if self._open is None or self.proven_ms * (1 + WORTH) >= upper_ms:
            return ()
        found = []
        if self.choices.without_longest:
            found.append(
                f"The bound balances all tables: {len(self.choices.all)} options are more than the "
                f"{MAX_CHOICES} up to which it looks at longest shards"
            )
        if not self.sets:
            found.append(
                f"One bound holds for all sets of sharding types, as there are over {MAX_SETS} sets"
            )
        cut = sum(bound < min(upper_ms, self._least_solved) for bound, _, _ in self._open)
        if cut:
            found.append(
                f"The bound was cut short: {cut} of {len(self.sets)} sets of sharding types are "
                "not solved to the end"
            )
        if any(one.cut_short for one in self.sets):
            found.append("The bound was cut short: how tables fill single ranks was not settled")
        return tuple(found)

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

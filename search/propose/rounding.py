"""Plans from the linear programs of the lower bound.

Of a set of exchanges, the program's optimum (`search.bound.lower_bound`) mixes the options of a few
tables only: as many as it has binding rows. Every table takes its largest share, and what is left
is to place them. A second program leaves out options with a shard above the mean rank's work, which
no placement can balance.

Why: docs/decisions/0020.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from search.bound.exchange_set import ExchangeSet
from search.bound.lower_bound import LowerBound
from search.improve.balance import Balancer
from search.objective import Assignment, Objective
from search.partitioner import GreedyPartitioner
from search.surrogate import Surrogate

SETS = 4
"""Sets of exchanges that plans are made of, those with the lowest bounds first."""
FINISHED = 24
"""Sets that are solved to the end where the bound was cut short; each takes a moment."""
RESTARTS = 20
LARGE = 20_000
"""Tables times ranks beyond which a descent takes seconds: fewer sets, fewer restarts."""


class Rounding:
    """Proposes plans."""

    def __init__(self, objective: Objective, surrogate: Surrogate, seed: int) -> None:
        self.surrogate = surrogate
        self.placer = GreedyPartitioner(objective, surrogate)
        self.balancer = Balancer(objective, surrogate)
        self.world_size = objective.problem.topology.world_size
        self.seed = seed
        size = len(objective.space.options) * self.world_size
        share = min(1.0, LARGE / size)
        self.sets, self.restarts = max(2, round(SETS * share)), round(RESTARTS * share)

    def propose(self, bound: LowerBound, *, cut_short: bool = False) -> Iterator[Assignment]:
        """Balanced plans; none for sets whose options cannot be placed.

        Args:
            bound: solved, so that its sets have optima.
            cut_short: it ended before; then some promising sets are solved first. Of programs
                far from their optimum the shares are arbitrary.
        """
        sets = bound.promising(FINISHED if cut_short else self.sets)
        if cut_short:
            for one in sets:
                while not one.refine()[1]:
                    pass
            sets.sort(key=lambda one: one.proven)
        seen: set[tuple[int, ...]] = set()
        for one in sets[: self.sets]:
            for program in (one, self._divisible(one)):
                options = program.rounded()
                name = tuple(map(id, options))
                if name in seen:
                    continue
                seen.add(name)
                placed = self.placer.place_all(options)
                if placed is not None:
                    yield self.balancer.balance(placed, self.seed, self.restarts).assignment

    def _divisible(self, one: ExchangeSet) -> ExchangeSet:
        """The set without options whose largest shard exceeds the mean rank's work of its optimum
        in some phase; a table that has no other keeps the one that exceeds it least."""
        phases = [self.surrogate.phases(option) for option in one.options]
        mean = one.shares @ np.array([p.sum(axis=0) for p in phases]) / self.world_size
        excess = np.array([p.max(axis=0) for p in phases]) / np.maximum(mean, 1e-12)
        return one.without(np.maximum(excess.max(axis=1), 1.0))

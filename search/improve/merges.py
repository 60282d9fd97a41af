"""Moves that merge tables of one exchange into another of their module.

That saves an exchange with its collectives and launches. Single-table moves do not reach it,
because all but the last one save nothing, and the first may add an exchange.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import permutations

import numpy as np

from search.objective import Assignment, Objective, apply
from search.partitioner import GreedyPartitioner
from search.space.option import Choice, Option
from search.surrogate import Surrogate

Change = dict[int, Choice]
Exchange = tuple[str, str]

MOST = 100
"""Largest number of tables that move together; placing more costs more than it can gain."""


class ExchangeMerges:
    """Generator of changes of many tables at a time."""

    def __init__(self, objective: Objective, surrogate: Surrogate) -> None:
        self.objective, self.surrogate = objective, surrogate
        self.placer = GreedyPartitioner(objective, surrogate)
        self.exchanges = sorted({option.exchange for option in objective.space.every_option})
        self.cheapest = lru_cache(maxsize=1 << 16)(self._cheapest)

    def descend(self, plan: Assignment, ms: float) -> Iterator[tuple[Assignment, float]]:
        """Merge whole exchanges of few tables as long as that makes the plan faster; yield every
        plan on the way with its time."""
        while True:
            fitting = [merged for merged in self.whole(plan) if self.objective.fits(merged)]
            times = self.objective.score(fitting).tolist()
            best_ms, best = min(zip(times, range(len(times)), strict=True), default=(ms, -1))
            if best_ms >= ms:
                return
            plan, ms = fitting[best], best_ms
            yield plan, ms

    def whole(self, plan: Assignment) -> Iterator[Assignment]:
        """Yield the plan with all tables of one exchange, if they are few, in another exchange of
        their module; it may not fit."""
        used = [option.exchange for option, _ in plan]
        for source, target in permutations(self.exchanges, 2):
            tables = [table for table, exchange in enumerate(used) if exchange == source]
            if source[0] == target[0] and 0 < len(tables) <= MOST:
                change = self._change(plan, tables, target)
                if change:
                    yield apply(plan, change)

    def _change(self, base: Assignment, tables: Sequence[int], target: Exchange) -> Change:
        """Move tables to the target exchange, on their own ranks where that is legal; a table
        without an option there stays."""
        loads, used = self.surrogate.standing_without(base, tables)
        change: Change = {}
        for table in sorted(tables, key=lambda t: -self.surrogate.phases(base[t][0]).sum()):
            now, option = base[table], self.cheapest(table, target)
            if option is not None:
                own = self.objective.is_legal(option, now[1])
                ranks = now[1] if own else self.placer.best_ranks(option, loads, used)
                if ranks is not None:
                    now = change[table] = option, ranks
            np.add.at(loads, list(now[1]), self.surrogate.phases(now[0]))
            used += self.objective.footprint(*now)
        return change

    def _cheapest(self, table: int, target: Exchange) -> Option | None:
        """Return a table's option in an exchange with the least sum of phases; None if none."""
        options = self.objective.space.options[table]
        mine = [o for o in options if o.exchange == target]
        return min(mine, key=lambda o: float(self.surrogate.phases(o).sum()), default=None)

"""Block moves: tables of one exchange join another of their module.

All of them, which saves an exchange with its collectives and launches; or a random part, which
lets the collectives of one exchange overlap with the lookups of the other. Neither is reached by
changing tables one at a time, because the first change only adds an exchange.

Why: docs/decisions/0009.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import ceil

import numpy as np

from search.objective import Assignment, Objective
from search.partitioner import GreedyPartitioner
from search.space.option import Choice, Option
from search.surrogate import Surrogate

Change = dict[int, Choice]
Exchange = tuple[str, str]

PAIRS = 12
"""Pairs of exchanges tried per descent step."""
SHARES = (1.0, 0.5, 0.25)
"""Parts of an exchange's tables that move together."""
MOST = 100
"""Tables that move together at most; placing more costs more than it can gain."""


class Transfers:
    """Proposes block moves; what they propose may not fit."""

    def __init__(self, objective: Objective, surrogate: Surrogate, rng: random.Random) -> None:
        self.objective = objective
        self.surrogate = surrogate
        self.placer = GreedyPartitioner(objective, surrogate)
        self.random = rng
        options = objective.space.options
        self.cheapest = lru_cache(maxsize=1 << 16)(self._cheapest)
        self.known = sorted({surrogate.exchange(o) for table in options for o in table})

    def propose(self, base: Assignment, shares: Sequence[float] = SHARES) -> Iterator[Change]:
        """Block moves between random pairs of exchanges."""
        used = sorted({self.surrogate.exchange(option) for option, _ in base})
        pairs = [(a, b) for a in used for b in self.known if a != b and a[0] == b[0]]
        for source, target in self.random.sample(pairs, min(PAIRS, len(pairs))):
            members = [t for t, (o, _) in enumerate(base) if self.surrogate.exchange(o) == source]
            for share in shares:
                tables = self.random.sample(members, min(MOST, ceil(share * len(members))))
                change = self._move(base, tables, target)
                if change:
                    yield change

    def _move(self, base: Assignment, tables: Sequence[int], target: Exchange) -> Change:
        """These tables in the target exchange, on their own ranks where that is legal; a table
        that has no option there stays."""
        loads, used = self.surrogate.standing_without(base, tables)
        change: Change = {}
        for table in sorted(tables, key=lambda t: -self.surrogate.phases(base[t][0]).sum()):
            choice = self._choice(table, base[table], target, loads, used)
            if choice is not None:
                change[table] = choice
            option, ranks = choice or base[table]
            np.add.at(loads, list(ranks), self.surrogate.phases(option))
            used += self.objective.footprint(option, ranks)
        return change

    def _cheapest(self, table: int, target: Exchange) -> Option | None:
        """The option of a table in an exchange with the least sum of phases; None if none is."""
        options = self.objective.space.options[table]
        mine = [o for o in options if self.surrogate.exchange(o) == target]
        return min(mine, key=lambda o: float(self.surrogate.phases(o).sum()), default=None)

    def _choice(
        self, table: int, now: Choice, target: Exchange, loads: np.ndarray, used: np.ndarray
    ) -> Choice | None:
        option = self.cheapest(table, target)
        if option is None:
            return None
        if self.objective.is_legal(option, now[1]):
            return option, now[1]
        ranks = self.placer.best_ranks(option, loads, used)
        return None if ranks is None else (option, ranks)

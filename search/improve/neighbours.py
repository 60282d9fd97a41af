"""Neighbours of a plan: changes of one table, swaps of two, and moves of a group to an exchange."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from predictor.model.plan import ShardingType
from search.improve.merges import Change, ExchangeMerges
from search.objective import Assignment, Objective, apply
from search.space.option import Choice
from search.surrogate import Surrogate

SWAPPED = 64
"""Number of random tables that one is offered to swap with."""


class Neighbours:
    """Generator of the changes of a plan that fit in memory.

    Args:
        seed: seed of the order and of what is drawn.
    """

    def __init__(self, objective: Objective, surrogate: Surrogate, seed: int) -> None:
        self.objective, self.surrogate = objective, surrogate
        self.random = random.Random(seed)
        self.merges = ExchangeMerges(objective, surrogate)

    def of(self, base: Assignment) -> Iterator[Change]:
        """Yield all changes that fit, groups of tables first, then table by table."""
        used = self.objective.memory(base)
        order = self._order(base)
        single = chain.from_iterable(self._of_table(base, t, order) for t in order)
        for change in chain(self._merges(base), single):
            if self._fits(base, used, change):
                yield change

    def _merges(self, base: Assignment) -> Iterator[Change]:
        """Yield moves of all tables of one exchange into another one."""
        for merged in self.merges.whole(base):
            pairs = enumerate(zip(base, merged, strict=True))
            yield {table: after for table, (before, after) in pairs if after != before}

    def _order(self, base: Assignment) -> list[int]:
        """Return the tables in random order, those on a rank slowest in some phase first."""
        loads, _ = self.surrogate.standing(base)
        slowest = {*loads.argmax(axis=0).tolist()}
        order = self.random.sample(range(len(base)), len(base))
        return sorted(order, key=lambda table: slowest.isdisjoint(base[table][1]))

    def _of_table(self, base: Assignment, table: int, order: Sequence[int]) -> list[Change]:
        """Return every change of one table, and its swaps with tables after it in the order."""
        alone = chain(self._moves(base, table), self._options(base, table))
        later = order[order.index(table) + 1 :]
        later = self.random.sample(later, min(SWAPPED, len(later)))
        changes = [*({table: choice} for choice in alone), *self._swaps(base, table, later)]
        self.random.shuffle(changes)
        return changes

    def _fits(self, base: Assignment, used: np.ndarray, change: Change) -> bool:
        if (self.objective.memory_after(base, used, change) > self.objective.caps).any():
            return False
        space, joint = self.objective.space, apply(base, change)
        right = space.divides_right([option for option, _ in joint])
        return right and space.co_located([ranks for _, ranks in joint])

    def _moves(self, base: Assignment, table: int) -> Iterator[Choice]:
        """Yield moves of one unit of the table; of equal units on the same ranks one is moved."""
        option, ranks = base[table]
        start, visited = 0, set()
        for alternatives in self.objective.legal(option).units:
            width = len(alternatives[0])
            here = ranks[start : start + width]
            for there in alternatives if here not in visited else ():
                moved = (*ranks[:start], *there, *ranks[start + width :])
                if there != here and self.objective.is_legal(option, moved):
                    yield option, moved
            visited.add(here)
            start += width

    def _options(self, base: Assignment, table: int) -> Iterator[Choice]:
        """Yield other options for the table, placed greedily around the other tables."""
        loads, used = self.surrogate.standing_without(base, [table])
        for option in self.objective.space.options[table]:
            # one column shard gains nothing alone; whole exchanges are merged instead
            alone = option.sharding_type is ShardingType.COLUMN_WISE and option.num_shards == 1
            if option is not base[table][0] and not alone:
                placed = self.merges.placer.best_ranks(option, loads, used)
                if placed is not None:
                    yield option, placed

    def _swaps(self, base: Assignment, table: int, partners: Sequence[int]) -> Iterator[Change]:
        """Yield swaps of the table's ranks with those of others."""
        (first, here), legal = base[table], self.objective.is_legal
        for other in partners:
            second, there = base[other]
            if here != there and legal(first, there) and legal(second, here):
                yield {table: (first, there), other: (second, here)}

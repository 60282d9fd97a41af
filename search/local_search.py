"""Improves assignments on the true objective: the full timeline, many neighbours at a time.

Moves: one unit of a table to another rank, two tables swap ranks, one table changes its option.
Descent takes the best neighbour; at a local optimum a few tables are shaken (iterated local
search, Lourenço et al. 2003) until the budget of evaluations is spent.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np

from search.objective import Assignment, Choice, Objective, Ranks
from search.placement import Placer
from search.space import Option
from search.surrogate import PHASES, Surrogate

Change = dict[int, Choice]

NEIGHBOURS = 512
"""Neighbours scored before the best of them is taken."""
SHAKEN = 3
"""Tables changed at random to leave a local optimum."""


class LocalSearch:
    """Descent with restarts from shaken optima."""

    def __init__(self, objective: Objective, surrogate: Surrogate, seed: int) -> None:
        self.objective = objective
        self.surrogate = surrogate
        self.topology = objective.problem.topology
        self.placer = Placer(objective, surrogate)
        self.random = random.Random(seed)

    def improve(
        self,
        start: Assignment,
        evaluations: int,
        stop: Callable[[float], bool] = lambda best: False,
    ) -> tuple[Assignment, float]:
        """The best assignment found and its predicted time in ms.

        Args:
            start: an assignment that fits.
            evaluations: budget of plans to score.
            stop: asked after every descent step with the best time so far.
        """
        best, best_ms = start, float(self.objective.score([start])[0])
        limit = self.objective.evaluations + evaluations
        current, current_ms = best, best_ms
        while self.objective.evaluations < limit and not stop(best_ms):
            step = self._descend(current, current_ms)
            if step is not None:
                current, current_ms = step
            if current_ms < best_ms:
                best, best_ms = current, current_ms
            if step is None:
                current = self._shake(best)
                current_ms = float(self.objective.score([current])[0])
        return best, best_ms

    def _descend(self, base: Assignment, base_ms: float) -> tuple[Assignment, float] | None:
        """The best of the neighbours if it is better; they are scored in random order, by parts."""
        neighbours = list(self._neighbours(base))
        self.random.shuffle(neighbours)
        for start in range(0, len(neighbours), NEIGHBOURS):
            part = [c for c in neighbours[start : start + NEIGHBOURS]]
            times = self.objective.score_neighbours(base, part)
            first = int(np.argmin(times))
            if times[first] < base_ms * (1 - 1e-9):
                return apply(base, part[first]), float(times[first])
        return None

    def _shake(self, base: Assignment) -> Assignment:
        for _ in range(20):
            changed = base
            for table in self.random.sample(range(len(base)), min(SHAKEN, len(base))):
                choices = list(self._moves(changed, table)) + list(self._options(changed, table))
                if choices:
                    changed = apply(changed, {table: self.random.choice(choices)})
            if self.objective.fits(changed):
                return changed
        return base

    def _neighbours(self, base: Assignment) -> Iterator[Change]:
        used = self.objective.memory(base)
        for table in range(len(base)):
            for choice in [*self._moves(base, table), *self._options(base, table)]:
                change = {table: choice}
                if self._fits(base, used, change):
                    yield change
        for change in self._swaps(base):
            if self._fits(base, used, change):
                yield change

    def _fits(self, base: Assignment, used: np.ndarray, change: Change) -> bool:
        after = used
        for table, choice in change.items():
            after = after - self.objective.footprint(*base[table])
            after = after + self.objective.footprint(*choice)
        if (after > self.objective.caps).any():
            return False
        groups = self.objective.space.co_locate
        return not groups or self.objective.space.co_located(
            [ranks for _, ranks in apply(base, change)]
        )

    def _moves(self, base: Assignment, table: int) -> Iterator[Choice]:
        """One unit of the table elsewhere; like units of a table are moved once."""
        option, ranks = base[table]
        legal = option.legal_ranks(self.topology)
        start, seen = 0, set()
        for alternatives in legal.units:
            width = len(alternatives[0])
            here = ranks[start : start + width]
            for there in alternatives if here not in seen else ():
                moved = (*ranks[:start], *there, *ranks[start + width :])
                if there != here and self._one_group(legal.same_group, moved):
                    yield option, moved
            seen.add(here)
            start += width

    def _one_group(self, same_group: bool, ranks: Ranks) -> bool:
        return not same_group or len({self.topology.group_of(r) for r in ranks}) == 1

    def _options(self, base: Assignment, table: int) -> Iterator[Choice]:
        """Another option for the table, placed greedily around the others."""
        loads = np.zeros((self.topology.world_size, PHASES))
        used = np.zeros_like(self.objective.caps)
        for other, (option, ranks) in enumerate(base):
            if other != table:
                np.add.at(loads, list(ranks), self.surrogate.phases(option))
                used += self.objective.footprint(option, ranks)
        for option in self.objective.space.options[table]:
            if option != base[table][0]:
                placed = self.placer.best_ranks(option, loads, used)
                if placed is not None:
                    yield option, placed

    def _swaps(self, base: Assignment) -> Iterator[Change]:
        """Two tables of one unit each exchange their places."""
        movable: list[tuple[int, Option, Ranks]] = []
        for table, (option, ranks) in enumerate(base):
            legal = option.legal_ranks(self.topology)
            if len(legal.units) == 1 and len(legal.units[0]) > 1:
                movable.append((table, option, ranks))
        for i, (a, first, here) in enumerate(movable):
            for b, second, there in movable[i + 1 :]:
                if (
                    len(here) == len(there)
                    and here != there
                    and self._may(first, there, second, here)
                ):
                    yield {a: (first, there), b: (second, here)}

    def _may(self, first: Option, there: Ranks, second: Option, here: Ranks) -> bool:
        return there in first.legal_ranks(self.topology).units[0] and (
            here in second.legal_ranks(self.topology).units[0]
        )


def apply(base: Assignment, change: Change) -> Assignment:
    """The assignment with some tables changed."""
    return tuple(change.get(table, choice) for table, choice in enumerate(base))

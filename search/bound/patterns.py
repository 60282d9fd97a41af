"""Where memory and work meet on a rank: a bound from what single ranks can hold (patterns).

The programs of `search.bound.exchange_set` pool the memory of all ranks and balance their work. But
tables that cannot be divided fill ranks only in certain ways, and the fullest or busiest rank sets
the pace. Suppose that a plan is not slower than a target. Then no rank has more work in a segment
of a cycle than the target leaves for it, and what it holds fits its memory. With a price ``a_t`` on
every table, all ranks together hold tables worth ``sum a_t``; so if

    sum a_t  >  ranks * max over such patterns P of  sum of a_t over the tables in P

there is no such plan, and the target is a lower bound. The prices come from the linear program that
covers the tables by patterns (Gilmore and Gomory 1961), the maximum from a knapsack with at most
one option a table, whose proven bound is what counts (Farley 1990). Docs: docs/model.md, chapter
15.

Why: docs/decisions/0057.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp

from search.bound.knapsack import Knapsack
from search.bound.program import new_solver, solve_again
from search.bound.rank_items import RankItems

Array = NDArray[np.float64]
Ints = NDArray[np.intp]

UNCOVERED = 100.0
"""Cost of a table that no pattern holds, in patterns."""
EPSILON = 1e-7
BETTER = 1e-6
"""A pattern joins the program where its tables are worth this much more than 1."""
NEW = 6
"""Patterns that join the program at a time."""
BOXES = 24
"""Parts into which a target is divided, at most."""


@dataclass(frozen=True)
class _Box:
    """Plans whose slowest rank takes from ``low`` to ``high`` in each segment, ``[segments]``."""

    low: Array
    high: Array


class RankPatterns:
    """Refutes targets for the time of a cycle, ``constant + rest + sum of the slowest ranks``.

    Args:
        items: all that ranks can hold.
        ranks: how many there are.

    Attributes:
        left: knapsacks that may still be solved for the last target.
        cut_short: there were none left before an answer was known.
    """

    def __init__(self, items: RankItems, ranks: int) -> None:
        self.items = items
        self.ranks = ranks
        self.left = 0
        self.cut_short = False
        self.patterns: list[Ints] = []

    def refutes(
        self, target_ms: float, work: int, stop: Callable[[], bool] = lambda: False
    ) -> bool:
        """No plan's cycle is as short as the target: proven; False if that is not known.

        Args:
            work: knapsacks that may be solved.
            stop: whether to end now.
        """
        self.left, self.cut_short = work, False
        items = self.items
        room = target_ms - items.constant - items.least_rest
        boxes = [_Box(items.least, np.full(len(items.least), room))]
        for _ in range(BOXES):
            if not boxes:
                return True
            box = self._tight(boxes.pop(), room)
            if (box.low > box.high).any():
                continue
            peaks = self._peaks(box, room, target_ms, stop)
            if peaks is None:
                continue
            # patterns that together are no slower than the target refute nothing
            above = np.where(items.most > box.low, peaks - box.low, 0.0)
            if self.cut_short or above.sum() <= room - box.low.sum():
                return False
            boxes += _halves(box, int(np.argmax(above)), float(above.max()) / 2)
        return not boxes

    @staticmethod
    def _tight(box: _Box, room: float) -> _Box:
        """The box without what leaves other segments less than their least."""
        return replace(box, high=np.minimum(box.high, room - box.low.sum() + box.low))

    def _peaks(
        self, box: _Box, room: float, target_ms: float, stop: Callable[[], bool]
    ) -> Array | None:
        """None: it is proven that no plan below the target has its slowest ranks in the box. If
        not, the most that patterns which cover all tables take in every segment, ``[segments]``.
        """
        items = self.items
        limits = np.where(box.high < items.most, box.high, np.inf)
        added = room - box.low[~items.adds_up].sum()
        sizes = np.column_stack(
            [
                items.memory,
                items.work / np.maximum(limits, EPSILON),
                items.work[:, items.adds_up].sum(axis=1) / max(added, EPSILON),
            ]
        )
        able = np.flatnonzero((sizes <= 1 + EPSILON).all(axis=1))
        if len(np.unique(items.table[able])) < items.tables:
            return None
        cover = _Cover(items, able, self._rows(box), target_ms - items.constant)
        for pattern in self.patterns:
            if (sizes[pattern].sum(axis=0) <= 1 + EPSILON).all():
                cover.add(pattern)
        sizes = sizes[able][:, sizes[able].any(axis=0)]
        knapsack = Knapsack(items.table[able], np.minimum(sizes, 1.0))
        return None if self._refute(cover, knapsack, able, stop) else cover.peaks()

    def _rows(self, box: _Box) -> tuple[Array, Array]:
        """What an item adds to rows of the program, ``[items, rows]``, and what the rows leave of
        the target, ``[rows]``: with every segment at its mean, or one of them at its least."""
        items = self.items
        mean = items.work / self.ranks
        total = items.rest + mean.sum(axis=1)
        return (
            np.column_stack([total, total[:, None] - mean]),
            np.concatenate(([0.0], box.low)),
        )

    def _refute(
        self, cover: _Cover, knapsack: Knapsack, able: Ints, stop: Callable[[], bool]
    ) -> bool:
        while True:
            needed = cover.solve()
            if needed <= self.ranks * (1 + EPSILON):
                return False
            values, worth = cover.price(able)
            found = [able[p] for p in knapsack.fill(values)]
            better = [p for p in found if cover.worth(p) > 1 + BETTER][:NEW]
            if not better:
                if self.left <= 0 or stop():
                    self.cut_short = True
                    return False
                self.left -= 1
                most, pattern = knapsack.most(values)
                if worth > self.ranks * most * (1 + EPSILON):
                    return True
                better = [able[pattern]]
                if cover.worth(better[0]) <= 1 + BETTER:
                    return False
            for pattern in better:
                self.patterns.append(pattern)
                cover.add(pattern)


def _halves(box: _Box, segment: int, above: float) -> list[_Box]:
    """A box divided in a segment's range, so much above its low end."""
    middle = box.low[segment] + above
    high, low = box.high.copy(), box.low.copy()
    high[segment] = low[segment] = middle
    return [replace(box, low=low), replace(box, high=high)]


class _Cover:
    """The linear program: fewest patterns that cover all tables, under rows.

    Args:
        able: items that may be held.
        rows: what items add to the rows, ``[items, rows]``, and what is taken off their room.
        room: of every row.
    """

    def __init__(
        self, items: RankItems, able: Ints, rows: tuple[Array, Array], room: float
    ) -> None:
        self.items = items
        self.added, taken = rows
        self.room = room - taken
        self.solver = solver = new_solver()
        endless = solver.infinity()
        self.covers = [solver.Constraint(1.0, endless) for _ in range(items.tables)]
        self.rows = [solver.Constraint(-endless, room) for room in self.room.tolist()]
        self.objective = solver.Objective()
        self.objective.SetMinimization()
        for row in self.covers:
            self._variable(UNCOVERED, [(row, 1.0)])
        for row in self.rows:
            self._variable(UNCOVERED, [(row, -1.0)])
        self.patterns: list[tuple[pywraplp.Variable, Ints]] = []
        for item in able.tolist():
            self.add(np.array([item]))

    def _variable(
        self, cost: float, entries: Sequence[tuple[pywraplp.Constraint, float]]
    ) -> pywraplp.Variable:
        variable = self.solver.NumVar(0.0, self.solver.infinity(), "")
        self.objective.SetCoefficient(variable, cost)
        for row, value in entries:
            row.SetCoefficient(variable, value)
        return variable

    def add(self, pattern: Ints) -> None:
        """A rank may hold these items."""
        items = self.items
        tables, parts = items.table[pattern].tolist(), items.part[pattern].tolist()
        held = [(self.covers[table], part) for table, part in zip(tables, parts, strict=True)]
        added = self.added[pattern].sum(axis=0).tolist()
        variable = self._variable(1.0, [*held, *zip(self.rows, added, strict=True)])
        self.patterns.append((variable, pattern))

    def solve(self) -> float:
        """Patterns needed at least, as far as is known; 0 if the solver failed."""
        solved = solve_again(self.solver) == pywraplp.Solver.OPTIMAL
        return float(self.objective.Value()) if solved else 0.0

    def price(self, able: Ints) -> tuple[Array, float]:
        """What items are worth, ``[able]``, and what all tables are, less the room of rows."""
        tables = np.array([max(0.0, row.dual_value()) for row in self.covers])
        rents = np.array([max(0.0, -row.dual_value()) for row in self.rows])
        items = self.items
        self.values = items.part * tables[items.table] - self.added @ rents
        return self.values[able], float(tables.sum() - rents @ self.room)

    def worth(self, pattern: Ints) -> float:
        """Of a pattern at the last prices."""
        return float(self.values[pattern].sum())

    def peaks(self) -> Array:
        """The most that the patterns of the last solution take in every segment, ``[segments]``."""
        work = self.items.work
        found = [np.zeros(work.shape[1])]
        for variable, pattern in self.patterns:
            if variable.solution_value() > EPSILON:
                found.append(work[pattern].sum(axis=0))
        return np.asarray(np.max(found, axis=0))

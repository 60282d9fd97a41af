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

Why: docs/decisions/0027-bound-by-rank.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp
from ortools.sat.python import cp_model

from search.bound.choices import BoundChoice
from search.bound.program import new_solver, solve_again
from search.bound.rank_excess import ONE_A_RANK
from search.bound.relaxation import Cut
from search.reproducible import reproducible_solver, run

Array = NDArray[np.float64]
Ints = NDArray[np.intp]


@dataclass(frozen=True)
class RankItems:
    """Items that a rank can hold: some shards of one option of a table; and the cycle they slow.

    A cycle takes ``constant``, plus ``rest`` of all tables, plus what the slowest rank has in every
    segment. Where a rank holds several shards, the least of the option count.

    Args:
        table: of every item, ``[items]``, rising; tables are numbered from 0.
        part: share of its table, ``[items]``.
        memory: share of a rank's memory, ``[items, kinds]``.
        work: in every segment in ms, ``[items, segments]``.
        rest: what its part of the table adds to the cycle elsewhere in ms, ``[items]``.
        constant: of the cycle in ms.
        most: up to where the work of a segment counts, ``[segments]``.
        adds_up: segments in which a rank works; in the others it receives a message,
            ``[segments]``.
        least: what the slowest rank takes at least in every segment, ``[segments]``.
        least_rest: what all tables add elsewhere at least.
    """

    table: Ints
    part: Array
    memory: Array
    work: Array
    rest: Array
    constant: float
    most: Array
    adds_up: NDArray[np.bool_]
    least: Array
    least_rest: float

    @property
    def tables(self) -> int:
        """Number of tables."""
        return int(self.table[-1]) + 1


def rank_items(
    choices: Sequence[BoundChoice],
    shards_of: Callable[[BoundChoice], Array],
    group: Ints,
    loads: Array,
    cut: Cut,
    ceiling: Array,
    caps: Array,
) -> RankItems:
    """The items of a set of exchanges under a cut.

    Args:
        choices: table by table.
        shards_of: least loads of a choice's shards, ``[shards, COLUMNS]``.
        group: position of every choice's lookup group in the slopes of the cut, ``[choices]``.
        loads: mean of every choice over the ranks, ``[choices, COLUMNS]``.
        ceiling: up to where the slopes of messages hold, ``[groups, COLUMNS]``.
        caps: bytes of the roomiest rank, ``[kinds]``.
    """
    slopes = np.concatenate([cut.segments, cut.messages])
    adds_up = np.arange(len(slopes)) < len(cut.segments)
    means = np.einsum("nc,snc->ns", loads, slopes[:, group])
    other = cut.slope - cut.uneven.sum(axis=0)
    rest = np.einsum("nc,nc->n", loads, other[group]) - means.sum(axis=1)
    tables = np.unique([c.option.table for c in choices], return_inverse=True)[1]
    first = np.flatnonzero(np.diff([-1, *tables]))
    found: dict[tuple[float, ...], None] = {}
    longest = np.zeros((len(choices), len(slopes)))
    for i, choice in enumerate(choices):
        shards = shards_of(choice)
        work = np.maximum(0.0, np.einsum("hc,sc->hs", shards, slopes[:, group[i]]))
        memory = np.array([(m.hbm_bytes, m.ddr_bytes) for m in choice.option.memory])
        memory = memory / np.maximum(caps, 0.5)  # no byte fits where there are none
        longest[i] = work.max(axis=0)
        most = 1 if choice.option.sharding_type in ONE_A_RANK else len(shards)
        least = np.sort(np.hstack([memory, work]), axis=0).cumsum(axis=0)[:most]
        for j, row in enumerate(least, start=1):
            part = j / len(shards)
            found[float(tables[i]), part, part * float(rest[i]), *row.tolist()] = None
    rows = np.array(list(found))
    least_mean = np.minimum.reduceat(np.maximum(0.0, means), first).sum(axis=0)
    most_ms = np.full(len(slopes), np.inf)
    for s in np.flatnonzero(~adds_up):
        # a message of one exchange: the tangent holds up to the ceiling of each of its columns
        tops = (slopes[s].max(axis=0) * (ceiling * (slopes[s] > 0)).sum(axis=0))[
            slopes[s].any(axis=0)
        ]
        most_ms[s] = tops.min(initial=np.inf)
    return RankItems(
        table=rows[:, 0].astype(np.intp),
        part=rows[:, 1],
        memory=rows[:, 3 : 3 + len(caps)],
        work=rows[:, 3 + len(caps) :],
        rest=rows[:, 2],
        constant=cut.constant,
        most=most_ms,
        adds_up=adds_up,
        least=np.minimum(
            most_ms, np.maximum(least_mean, np.minimum.reduceat(longest, first).max(axis=0))
        ),
        least_rest=float(np.minimum.reduceat(rest, first).sum()),
    )


STEPS = 1 << 20
"""Sizes are whole steps of the limit, rounded down, and values rounded up: what is proven of the
rounded knapsack holds for the exact one."""
WORK = 0.5
"""Deterministic time of CP-SAT for one knapsack, about seconds on one core."""
GREEDY = 24
"""Orders in which a knapsack is filled greedily."""


@dataclass(frozen=True)
class Knapsack:
    """Items of which at most one a table is taken, within limits.

    Args:
        table: of every item, ``[items]``.
        sizes: as shares of the limits, ``[items, limits]``; each at most 1.
    """

    table: Ints
    sizes: Array

    def fill(self, values: Array) -> list[Ints]:
        """Good fillings, found greedily in several orders; best first, none twice."""
        useful = np.flatnonzero(values > 0)
        sizes, table = self.sizes[useful], self.table[useful]
        rng = np.random.default_rng(len(values))
        weights = rng.dirichlet(np.full(sizes.shape[1], 0.5), GREEDY)
        scores = values[useful] / (sizes @ weights.T + 1e-3).T
        orders = np.argsort(-scores, axis=1, kind="stable")
        left = np.ones((GREEDY, sizes.shape[1]))
        taken = np.zeros((GREEDY, int(self.table.max(initial=0)) + 1), dtype=bool)
        kept = np.zeros(orders.shape, dtype=bool)
        lanes = np.arange(GREEDY)
        for position in range(orders.shape[1]):
            item = orders[:, position]
            ok = (sizes[item] <= left).all(axis=1) & ~taken[lanes, table[item]]
            left -= sizes[item] * ok[:, None]
            taken[lanes, table[item]] |= ok
            kept[lanes, item] = ok
        found = np.unique(kept, axis=0)
        worth = found @ values[useful]
        return [useful[found[i]] for i in np.argsort(-worth, kind="stable")]

    def most(self, values: Array) -> tuple[float, Ints]:
        """A value that no filling exceeds, and the best one found."""
        useful = np.flatnonzero(values > 0)
        if not len(useful):
            return 0.0, useful
        model = cp_model.CpModel()
        taken = [model.new_bool_var("") for _ in useful]
        for one in np.unique(self.table[useful]):
            same = [x for x, t in zip(taken, self.table[useful], strict=True) if t == one]
            if len(same) > 1:
                model.add_at_most_one(same)
        for sizes in np.floor(self.sizes[useful].T * STEPS).astype(np.int64):
            if sizes.sum() > STEPS:
                model.add(cp_model.LinearExpr.weighted_sum(taken, sizes.tolist()) <= STEPS)
        unit = float(values.max()) / STEPS
        worth = np.ceil(values[useful] / unit).astype(np.int64)
        model.maximize(cp_model.LinearExpr.weighted_sum(taken, worth.tolist()))
        solver = reproducible_solver(WORK, 0, float("inf"))
        status = run(solver, model)
        kept = np.zeros(len(useful), dtype=bool)
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            kept[:] = [solver.boolean_value(x) for x in taken]
        return solver.best_objective_bound * unit, useful[kept]


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

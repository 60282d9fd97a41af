"""What the busiest rank adds to the mean rank, in the bound's programs.

A cut of `search.bound.relaxation` has every rank carry the mean load. But a segment of its cycle
that ends where all ranks meet takes as long as the rank that takes longest. Some rank holds the
longest shard of each table, beside its shards of the tables that every rank has a part of: the
segment takes at least that. And ranks without any launch have nothing to do, so those that launch
have at least the mean, and the floor of a launch.

Why: docs/decisions/0026-bound.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp

from predictor.cost.loads import Load
from predictor.model.plan import ShardingType
from search.bound.program import Program
from search.bound.relaxation import Cut

Array = NDArray[np.float64]
Ints = NDArray[np.intp]

MAX_CHOICES = 1000
"""With more choices, longest shards are ignored: programs stay small, and one shard of many is a
small part of what a rank has."""
WORTH = 1e-4
"""Rows that raise a segment by less than this share of the time are not added."""
ROWS = 4
"""Rows that a segment gets at a time."""
NOISE = 1e-12
"""Ms that are a difference of equal times; the solver would take them for entries."""
TIMES = [Load.FORWARD_MS, Load.BACKWARD_MS, Load.PREFETCH_MS]
WORK = [*TIMES, Load.OUTPUTS]
"""Columns that lookups take time for: outputs are copied for the exchange."""
ONE_A_RANK = (
    ShardingType.DATA_PARALLEL,
    ShardingType.ROW_WISE,
    ShardingType.TABLE_ROW_WISE,
)
"""No rank has two shards of such a table."""


def longest_shard(shards: Array) -> Array:
    """The work of the shard of an option whose lookups take longest, ``[WORK]``.

    Args:
        shards: ``[shards, COLUMNS]``; of cached ones with the fetches that they are certain of.
    """
    longest: Array = shards[np.argmax(shards[:, TIMES].sum(axis=1))][WORK]
    return longest


def everywhere(kind: ShardingType, shards: Array, ranks: int) -> Array:
    """The work of an option that every rank has at least, ``[WORK]``; 0 where some has none.

    Args:
        shards: as of `longest_shard`.
    """
    if kind not in ONE_A_RANK or len(shards) < ranks:
        return np.zeros(len(WORK))
    return np.asarray(shards[:, WORK].min(axis=0))


@dataclass(frozen=True)
class CycleSegment:
    """A segment of a cut's cycle, in ms.

    Args:
        peak: what the rank with the longest shard of a choice takes at least for it, ``[choices]``.
        even: what every rank takes at least for it, ``[choices]``.
        mean: what a choice adds to the cut that may differ between ranks, ``[choices]``.
        floor: of a launch on the ranks that have any of ``launched``, at least.
        launched: choices that only ranks with a launch take time for, ``[choices]``.
    """

    peak: Array
    even: Array
    mean: Array
    floor: float
    launched: NDArray[np.bool_]

    def excess(self, program: Program) -> Array:
        """How far the segment exceeds the mean at least at a program's optimum: by the longest
        shard of each table, and last by the floor of a launch, ``[tables + 1]``; of a table that
        mixes options, the mix of their shards."""
        shares, first = program.shares, program.first
        even = np.add.reduceat(self.even * shares, first)
        peaks = np.add.reduceat(self.peak * shares, first) - even
        beyond = peaks + even.sum() - self.mean @ shares
        return np.append(beyond, self.floor + self.taken(program, len(first)) @ shares)

    def taken(self, program: Program, row: int) -> Array:
        """What the shares raise the segment by beyond its mean, ``[choices]``, by a row of
        `excess`; beyond the floor for the last one."""
        beyond = self.even - self.mean
        beyond[np.abs(beyond) < NOISE] = 0.0
        if row == len(program.first):
            return np.where(self.launched, 0.0, beyond)
        mine = slice(program.first[row], program.first[row] + program.sizes[row])
        beyond[mine] = self.peak[mine] - self.mean[mine]
        return beyond

    def constant(self, program: Program, row: int) -> float:
        """What a row has beside the shares."""
        return self.floor if row == len(program.first) else 0.0

    def of(self, kept: Ints) -> CycleSegment:
        """The segment for some of the choices."""
        peak, even, mean = self.peak[kept], self.even[kept], self.mean[kept]
        return CycleSegment(peak, even, mean, self.floor, self.launched[kept])

    @property
    def most(self) -> float:
        """No plan's rows exceed it."""
        return float(self.peak.max() + self.floor + self.even.sum())


@dataclass(frozen=True)
class _SegmentRows:
    """The variable of a segment, its rows by number and what they take of every choice's share;
    which of the rows bind at the last optimum."""

    cut: int
    segment: CycleSegment
    variable: pywraplp.Variable
    rows: dict[int, tuple[pywraplp.Constraint, Array]]
    binding: set[int] = field(default_factory=set)


class RankExcess:
    """Variables and rows of a set's program: the excess of each segment of each cut.

    Args:
        group: position of every choice's lookup group in the slopes of cuts, ``[choices]``.
        exchange: what every group belongs to, ``[groups]``.
        used: exchanges that all plans of the set use.
        longest: work of its longest shard, ``[choices, WORK]``.
        even: work of it that every rank has, ``[choices, WORK]``.
    """

    def __init__(
        self,
        program: Program,
        group: Ints,
        exchange: Sequence[tuple[str, str]],
        used: frozenset[tuple[str, str]],
        longest: Array,
        even: Array,
    ) -> None:
        self.program = program
        self.group = group
        self.exchange = exchange
        self.used = used
        self.longest = longest
        self.even = even
        self.found: list[_SegmentRows] = []

    def segments(self, cut: Cut, loads: Array) -> list[CycleSegment]:
        """The segments of a cut of which some rank is sure to have something.

        Args:
            loads: mean of every choice over the ranks, ``[choices, COLUMNS]``.
        """
        found = []
        for each, floors, uneven in zip(cut.segments, cut.floors, cut.uneven, strict=True):
            slope = each[self.group]
            peak = np.einsum("nc,nc->n", self.longest, slope[:, WORK])
            floor = self._floor(floors)
            if peak.any() or floor:
                even = np.einsum("nc,nc->n", self.even, slope[:, WORK])
                # caches that tables lend each other can make a mean less than nothing
                mean = np.einsum("nc,nc->n", loads, slope + uneven[self.group])
                launched = floors[self.group] > 0
                # nothing else is known of ranks that launch nothing
                launched &= ~uneven[self.group].any(axis=1)
                peak = np.where(peak > 0, peak + floors[self.group], 0.0)
                found.append(CycleSegment(peak, even, np.maximum(0.0, mean), floor, launched))
        return found

    def _floor(self, floors: Array) -> float:
        """What the ranks that launch anything in a segment pay at least, if some rank is sure to:
        plans that use an exchange use one of its groups.

        Args:
            floors: of the groups there, ``[groups]``.
        """
        paid = floors > 0
        without = {e for e, one in zip(self.exchange, paid.tolist(), strict=True) if not one}
        return float(floors[paid].min()) if self.used - without else 0.0

    def excess_ms(self, segments: list[CycleSegment]) -> float:
        """What segments exceed the mean by at the program's last optimum in ms."""
        return sum(max(0.0, float(one.excess(self.program).max())) for one in segments)

    def add_cut(self, row: pywraplp.Constraint, segments: list[CycleSegment]) -> None:
        """Put the excess of a new cut's segments into its row."""
        solver, cut = self.program.solver, len(self.program.cuts) - 1
        for segment in segments:
            variable = solver.NumVar(0.0, segment.most, "")
            row.SetCoefficient(variable, -1.0)
            self.found.append(_SegmentRows(cut, segment, variable, {}))

    def binding(self, cut: int, kept: Ints) -> list[tuple[CycleSegment, list[int]]]:
        """The segments of a cut for some of the choices, and the numbers of the rows that bind."""
        return [(o.segment.of(kept), sorted(o.binding)) for o in self.found if o.cut == cut]

    def take_cut(
        self, row: pywraplp.Constraint, segments: list[tuple[CycleSegment, list[int]]]
    ) -> None:
        """As `add_cut`, with the rows that another set had for these segments."""
        before = len(self.found)
        self.add_cut(row, [segment for segment, _ in segments])
        for one, (_, numbers) in zip(self.found[before:], segments, strict=True):
            for number in numbers:
                self._add_row(one, number)

    def add_rows(self) -> bool:
        """Add the rows that exceed what the last optimum has the most; whether there are any."""
        # a program forgets its optimum when it changes
        now = [one.variable.solution_value() for one in self.found]
        return any([self._add_rows(one, ms) for one, ms in zip(self.found, now, strict=True)])

    def _add_rows(self, one: _SegmentRows, now: float) -> bool:
        program = self.program
        excess = one.segment.excess(program)
        enough = now + WORTH * program.optimum
        rows = [
            row
            for row in np.argsort(-excess, kind="stable")[:ROWS].tolist()
            if excess[row] > enough and row not in one.rows
        ]
        for number in rows:
            self._add_row(one, number)
        return bool(rows)

    def _add_row(self, one: _SegmentRows, number: int) -> None:
        program = self.program
        taken = one.segment.taken(program, number)
        least = one.segment.constant(program, number)
        row = program.row(least, program.solver.infinity(), -taken)
        row.SetCoefficient(one.variable, 1.0)
        one.rows[number] = row, taken

    def price(self, prices: Array, scale: float) -> tuple[Array, float]:
        """What the prices of the rows charge every choice ``[choices]``, and what the variables
        cost at least.

        Args:
            prices: of the cuts, which sum to one.
            scale: what the program's prices of the cuts sum to.
        """
        cost, least = np.zeros(len(self.program.shares)), 0.0
        for one in self.found:
            left = float(prices[one.cut])
            one.binding.clear()
            for number, (row, taken) in one.rows.items():
                price = max(0.0, row.dual_value()) / scale
                if price:
                    one.binding.add(number)
                cost += price * taken
                least += price * one.segment.constant(self.program, number)
                left -= price
            least += min(0.0, left) * one.segment.most
        return cost, least

"""What the busiest rank adds to the mean rank, in the bound's programs.

A cut of `search.bound.relaxation` has every rank carry the mean load. But a segment of its cycle
that ends where all ranks meet takes as long as the rank that takes longest. Some rank holds the
longest shard of each table, beside its shards of the tables that every rank has a part of: the
segment takes at least that. And ranks without any launch have nothing to do, so those that launch
have at least the mean, and the floor of a launch.

Why: docs/decisions/0026-bound.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp

from predictor.cost.loads import Load
from predictor.model.plan import ShardingType
from search.bound.program import Program
from search.bound.relaxation import Cut

Array = NDArray[np.float64]
Ints = NDArray[np.intp]

MAX_CHOICES = 10_000
"""With more choices, longest shards are ignored: programs stay small. Looking at the 4,253 of 500
tables on 64 ranks takes 1.5 s more."""
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
class CycleSegments:
    """The segments of a cut's cycle of which some rank is sure to have something, in ms.

    Args:
        peak: what the rank with the longest shard of a choice takes at least for it,
            ``[segments, choices]``.
        even: what every rank takes at least for it, likewise.
        mean: what a choice adds to the cut that may differ between ranks, likewise.
        floor: of a launch on the ranks that have any of ``launched``, at least, ``[segments]``.
        launched: choices that only ranks with a launch take time for, ``[segments, choices]``.
    """

    peak: Array
    even: Array
    mean: Array
    floor: Array
    launched: NDArray[np.bool_]

    @cached_property
    def beyond(self) -> Array:
        """What every rank has more of than the mean one, ``[segments, choices]``."""
        beyond = self.even - self.mean
        return np.where(np.abs(beyond) < NOISE, 0.0, beyond)

    def excess(self, program: Program) -> Array:
        """How far each segment exceeds the mean at least at a program's optimum,
        ``[segments, tables + 1]``: by the longest shard of each table, and last by the floor of a
        launch; of a table that mixes options, the mix of their shards."""
        shares, first = program.shares, program.first
        even = np.add.reduceat(self.even * shares, first, axis=1)
        peaks = np.add.reduceat(self.peak * shares, first, axis=1) - even
        peaks += (even.sum(axis=1) - self.mean @ shares)[:, None]
        floors = self.floor + np.where(self.launched, 0.0, self.beyond) @ shares
        return np.column_stack([peaks, floors])

    def row(self, program: Program, segment: int, row: int) -> tuple[float, Array]:
        """What a row of `excess` has at least, and what the shares add to it, ``[choices]``."""
        beyond = self.beyond[segment]
        if row == len(program.first):
            return float(self.floor[segment]), np.where(self.launched[segment], 0.0, beyond)
        taken = beyond.copy()
        mine = slice(program.first[row], program.first[row] + program.sizes[row])
        taken[mine] = self.peak[segment, mine] - self.mean[segment, mine]
        return 0.0, taken

    def of(self, kept: Ints) -> CycleSegments:
        """The segments for some of the choices."""
        peak, even, mean = (each[:, kept] for each in (self.peak, self.even, self.mean))
        return CycleSegments(peak, even, mean, self.floor, self.launched[:, kept])

    @property
    def most(self) -> Array:
        """No plan's rows exceed it, ``[segments]``."""
        return np.asarray(self.peak.max(axis=1) + self.floor + self.even.sum(axis=1))


Place = tuple[int, int]
"""A segment of a cut, and a row of it."""


@dataclass(frozen=True)
class _CutRows:
    """The variables of a cut's segments, their rows with what these have at least and what they
    take of every choice's share; which of the rows bind at the last optimum."""

    segments: CycleSegments
    variables: list[pywraplp.Variable]
    rows: dict[Place, tuple[pywraplp.Constraint, float, Array]] = field(default_factory=dict)
    binding: set[Place] = field(default_factory=set)


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
        self.cuts: list[_CutRows] = []

    def segments(self, cut: Cut, loads: Array) -> CycleSegments:
        """The segments of a cut of which some rank is sure to have something.

        Args:
            loads: mean of every choice over the ranks, ``[choices, COLUMNS]``.
        """
        slope, uneven = cut.segments[:, self.group], cut.uneven[:, self.group]
        floors = cut.floors[:, self.group]
        peak = np.einsum("nc,snc->sn", self.longest, slope[..., WORK])
        floor = np.array([self.floor(of_groups) for of_groups in cut.floors])
        even = np.einsum("nc,snc->sn", self.even, slope[..., WORK])
        # caches that tables lend each other can make a mean less than nothing
        mean = np.maximum(0.0, np.einsum("nc,snc->sn", loads, slope + uneven))
        # nothing else is known of ranks that launch nothing
        launched = (floors > 0) & ~uneven.any(axis=2)
        sure = peak.any(axis=1) | (floor > 0)
        peak = np.where(peak > 0, peak + floors, 0.0)
        return CycleSegments(peak[sure], even[sure], mean[sure], floor[sure], launched[sure])

    def floor(self, floors: Array) -> float:
        """What the ranks that launch anything in a segment pay at least, if some rank is sure to:
        plans that use an exchange use one of its groups.

        Args:
            floors: of the groups there, ``[groups]``.
        """
        paid = floors > 0
        without = {e for e, one in zip(self.exchange, paid.tolist(), strict=True) if not one}
        return float(floors[paid].min()) if self.used - without else 0.0

    def excess_ms(self, segments: CycleSegments) -> float:
        """What segments exceed the mean by at the program's last optimum in ms."""
        return float(np.maximum(0.0, segments.excess(self.program).max(axis=1)).sum())

    def add_cut(
        self, row: pywraplp.Constraint, segments: CycleSegments, known: Iterable[Place] = ()
    ) -> None:
        """Put the excess of a new cut's segments into its row.

        Args:
            known: rows that another set had for these segments.
        """
        solver = self.program.solver
        one = _CutRows(segments, [solver.NumVar(0.0, most, "") for most in segments.most.tolist()])
        for variable in one.variables:
            row.SetCoefficient(variable, -1.0)
        self.cuts.append(one)
        for place in known:
            self._add_row(one, place)

    def binding(self, cut: int, kept: Ints) -> tuple[CycleSegments, list[Place]]:
        """The segments of a cut for some of the choices, and the rows that bind."""
        one = self.cuts[cut]
        return one.segments.of(kept), sorted(one.binding)

    def add_rows(self) -> bool:
        """Add the rows that exceed what the last optimum has the most; whether there are any."""
        program, found = self.program, []
        for one in self.cuts:
            # a program forgets its optimum when it changes
            now = np.array([variable.solution_value() for variable in one.variables])
            excess = one.segments.excess(program)
            over = excess > (now + WORTH * program.optimum)[:, None]
            for segment in np.flatnonzero(over.any(axis=1)).tolist():
                most = np.argsort(-excess[segment], kind="stable")[:ROWS].tolist()
                found += [(one, (segment, row)) for row in most if over[segment, row]]
        new = [(one, place) for one, place in found if place not in one.rows]
        for one, place in new:
            self._add_row(one, place)
        return bool(new)

    def _add_row(self, one: _CutRows, place: Place) -> None:
        least, taken = one.segments.row(self.program, *place)
        row = self.program.row(least, self.program.solver.infinity(), -taken)
        row.SetCoefficient(one.variables[place[0]], 1.0)
        one.rows[place] = row, least, taken

    def price(self, prices: Array, scale: float) -> tuple[Array, float]:
        """What the prices of the rows charge every choice ``[choices]``, and what the variables
        cost at least.

        Args:
            prices: of the cuts, which sum to one.
            scale: what the program's prices of the cuts sum to.
        """
        cost, least = np.zeros(len(self.program.shares)), 0.0
        for one, of_cut in zip(self.cuts, prices.tolist(), strict=True):
            left = np.full(len(one.variables), of_cut)
            one.binding.clear()
            for place, (row, constant, taken) in one.rows.items():
                price = max(0.0, row.dual_value()) / scale
                if price:
                    one.binding.add(place)
                    cost += price * taken
                    least += price * constant
                    left[place[0]] -= price
            least += float(np.minimum(0.0, left) @ one.segments.most)
        return cost, least

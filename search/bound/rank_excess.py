"""What the busiest rank adds to the mean rank, in the bound's programs.

A cut of `search.bound.relaxation` has every rank carry the mean load. But a segment of its cycle
that ends where all ranks meet takes as long as the rank that takes longest, and some rank holds the
longest shard of each table. So it exceeds its mean by at least what that shard takes, less the
mean.

Why: docs/decisions/0030.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp

from predictor.cost.loads import Load
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
TIMES = [Load.FORWARD_MS, Load.BACKWARD_MS, Load.PREFETCH_MS]


def longest_shard(shards: Array) -> Array:
    """What the lookups of the longest shard of an option take at least, ``[TIMES]`` in ms.

    Args:
        shards: ``[shards, COLUMNS]``; of cached ones with the fetches that they are certain of.
    """
    times = shards[:, TIMES]
    longest: Array = times[np.argmax(times.sum(axis=1))]
    return longest


@dataclass(frozen=True)
class CycleSegment:
    """A segment of a cut's cycle, in ms.

    Args:
        peak: what the rank with the longest shard of a choice takes at least, ``[choices]``.
        mean: what a choice adds on average over the ranks, ``[choices]``.
    """

    peak: Array
    mean: Array

    def excess(self, program: Program) -> Array:
        """How far each table's longest shard exceeds the mean at a program's optimum, ``[tables]``;
        of a table that mixes options, the mix of their shards."""
        peaks = np.add.reduceat(self.peak * program.shares, program.first)
        return np.asarray(peaks - self.mean @ program.shares)


@dataclass(frozen=True)
class _SegmentRows:
    """The variable of a segment, its rows by table and what they take of every choice's share."""

    cut: int
    segment: CycleSegment
    variable: pywraplp.Variable
    rows: dict[int, tuple[pywraplp.Constraint, Array]]


class RankExcess:
    """Variables and rows of a set's program: the excess of each segment of each cut.

    Args:
        group: position of every choice's lookup group in the slopes of cuts, ``[choices]``.
        longest: what the lookups of its longest shard take at least, ``[choices, TIMES]`` in ms.
    """

    def __init__(self, program: Program, group: Ints, longest: Array) -> None:
        self.program = program
        self.group = group
        self.longest = longest
        self.found: list[_SegmentRows] = []

    def segments(self, cut: Cut, loads: Array) -> list[CycleSegment]:
        """The segments of a cut of which some shard is sure to have something.

        Args:
            loads: mean of every choice over the ranks, ``[choices, COLUMNS]``.
        """
        found = []
        for each in cut.segments:
            slope = each[self.group]
            peak = np.einsum("nc,nc->n", self.longest, slope[:, TIMES])
            if peak.any():
                # caches that tables lend each other can make a mean less than nothing
                mean = np.maximum(0.0, np.einsum("nc,nc->n", loads, slope))
                found.append(CycleSegment(peak, mean))
        return found

    def excess_ms(self, segments: list[CycleSegment]) -> float:
        """What segments exceed the mean by at the program's last optimum in ms."""
        return sum(max(0.0, float(one.excess(self.program).max())) for one in segments)

    def add_cut(self, row: pywraplp.Constraint, segments: list[CycleSegment]) -> None:
        """Put the excess of a new cut's segments into its row."""
        solver, cut = self.program.solver, len(self.program.cuts) - 1
        for segment in segments:
            variable = solver.NumVar(0.0, float(segment.peak.max()), "")
            row.SetCoefficient(variable, -1.0)
            self.found.append(_SegmentRows(cut, segment, variable, {}))

    def add_rows(self) -> bool:
        """Add rows of the tables whose longest shards exceed what the last optimum has the most;
        whether there are any."""
        # a program forgets its optimum when it changes
        now = [one.variable.solution_value() for one in self.found]
        return any([self._add_rows(one, ms) for one, ms in zip(self.found, now, strict=True)])

    def _add_rows(self, one: _SegmentRows, now: float) -> bool:
        program = self.program
        excess = one.segment.excess(program)
        enough = now + WORTH * program.optimum
        tables = [
            table
            for table in np.argsort(-excess, kind="stable")[:ROWS].tolist()
            if excess[table] > enough and table not in one.rows
        ]
        for table in tables:
            mine = slice(program.first[table], program.first[table] + program.sizes[table])
            least = -one.segment.mean
            least[mine] += one.segment.peak[mine]
            row = program.row(0.0, program.solver.infinity(), -least)
            row.SetCoefficient(one.variable, 1.0)
            one.rows[table] = row, least
        return bool(tables)

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
            for row, taken in one.rows.values():
                price = max(0.0, row.dual_value()) / scale
                cost += price * taken
                left -= price
            least += min(0.0, left) * float(one.segment.peak.max())
        return cost, least

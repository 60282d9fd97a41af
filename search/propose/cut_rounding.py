"""Rounds a set's program again, under the critical cycles of plans that were packed.

The program of the bound (`search.bound.exchange_set`) prices every option at no more than any plan
pays for it. A packed plan tells what options really cost: its critical cycle is a sum of maxima
over the ranks (`search.improve.cycle_cuts`), each at least the mean rank's load, and at least what
the rank with the longest shard of a table has. These rows join those of the bound, and what is
rounded is placed and packed in turn: choosing options and placing them take turns.

Why: docs/decisions/0075.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp

from search.bound.exchange_set import ExchangeSet
from search.bound.program import Program
from search.bound.rank_excess import ONE_A_RANK, CycleSegment, RankExcess
from search.improve.cycle_cuts import CycleCut
from search.space.option import Option
from search.surrogate import Surrogate

Array = NDArray[np.float64]

MOST_ROWS = 20
"""Times that the program is solved with more rows of longest shards."""
TOO_LONG = 1.02
"""Multiple of a segment's time from which a shard is too long for it."""
SPARE = 1e-2
"""Weight of the share of an option with such a shard."""


class CutRounding:
    """The program of a set under cuts of plans.

    Args:
        one: solved.
    """

    def __init__(self, surrogate: Surrogate, one: ExchangeSet) -> None:
        self.one = one
        self.world = surrogate.problem.topology.world_size
        self.loads = [surrogate.shard_loads(option) for option in one.options]
        self.everywhere = [
            option.sharding_type in ONE_A_RANK and option.num_shards >= self.world
            for option in one.options
        ]
        known, index = one.known, one.index
        # an option that shares dominate may have the shorter shards
        every = np.ones(len(index), dtype=bool)
        self.program = Program(one.first, every, one.memory, known.caps)
        for constant, weights in zip(one.constants, one.weights, strict=True):
            self.program.cut(constant, weights)
        self.rank_excess = RankExcess(
            self.program, one.group, (), one.used, known.longest[index], known.even[index]
        )
        self.segments: list[CycleSegment] = []

    def add(self, cut: CycleCut) -> None:
        """Add the cut of a plan of the set."""
        shape = len(cut.segments), len(self.loads)
        peak, mean, even = (np.zeros(shape) for _ in range(3))
        weights = np.zeros(shape[1])
        for i, (group, loads) in enumerate(self.loads):
            work = loads @ cut.segments[:, group].T
            total = loads.sum(axis=0) / self.world
            peak[:, i] = np.maximum(work.max(axis=0), 0.0)
            mean[:, i] = cut.segments[:, group] @ total
            weights[i] = cut.even[group] @ total
            if self.everywhere[i]:
                even[:, i] = work.min(axis=0)
        nobody = np.zeros(shape[1], dtype=bool)
        segments = [
            CycleSegment(*parts, 0.0, nobody) for parts in zip(peak, even, mean, strict=True)
        ]
        row = self.program.cut(cut.constant, weights + mean.sum(axis=0))
        self.rank_excess.add_cut(row, segments)
        self.segments += segments

    def rounded(self, stop: Callable[[], bool] = lambda: False) -> list[Option] | None:
        """The option with the largest share of every table, in the workload's order, but none with
        a shard too long for its segment where another has a share; None if nothing fits.

        Args:
            stop: asked before the program is solved with more rows.
        """
        for _ in range(MOST_ROWS):
            if self.program.solve() != pywraplp.Solver.OPTIMAL:
                return None
            times = [self._time_of(one) for one in self.segments]
            if not self.rank_excess.add_rows() or stop():
                break
        shares, first = self.program.shares, self.program.first
        long = np.zeros(len(shares), dtype=bool)
        for one, ms in zip(self.segments, times, strict=True):
            even = np.add.reduceat(one.even * shares, first)
            rest = np.repeat(even.sum() - even, self.program.sizes)
            long |= one.peak + rest > TOO_LONG * ms
        best = self.program.largest(np.where(long, SPARE, 1.0))
        return [self.one.choices[i].option for i in best.tolist()]

    def _time_of(self, one: CycleSegment) -> float:
        """Time of a segment at the program's optimum in ms."""
        beyond = max(0.0, float(one.excess(self.program).max()))
        return float(one.mean @ self.program.shares) + beyond

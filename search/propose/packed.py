"""The best plans of the rounding packed, and rounded again under the cuts of what was packed.

Three turns share the work: the first few plans are packed; of the best of those the options are
chosen again, placed and packed (`search.propose.packed`); the best of all are packed once
more. Where the bound is far, more plans take these turns, and longer.

Rounds a set's program again, under the critical cycles of plans that were packed.

The program of the bound (`search.bound.exchange_set`) prices every option at no more than any plan
pays for it. A packed plan tells what options really cost: its critical cycle is a sum of maxima
over the ranks (`search.improve.cycle_cuts`), each at least the mean rank's load, and at least what
the rank with the longest shard of a table has. These rows join those of the bound, and what is
rounded is placed and packed in turn: choosing options and placing them take turns.

Why: docs/decisions/0028-plans-from-the-bound.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp

from search.bound.exchange_set import ExchangeSet
from search.bound.lower_bound import LowerBound
from search.bound.program import Program
from search.bound.rank_excess import ONE_A_RANK, CycleSegment, RankExcess
from search.candidate import Candidate, rank_distinct
from search.improve.cycle_cuts import CycleCut, critical_cut
from search.improve.packing import Packer
from search.problem import Progress
from search.propose.rounding import LARGE, Rounding
from search.space.option import Option
from search.stop import Stop
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


PACKING_STEPS = 600
"""Steps at effort 1, sized so that 26 tables on 8 ranks take a few seconds."""
OF_LARGE = 2
"""Times that packing has more steps where local search has hardly any."""
PACKED, AGAIN, LAST = (3, 1 / 2), (2, 1 / 4), (2, 1 / 2)
"""Plans of the rounding that are packed, plans that are rounded again, and plans that are packed
last, with the part of the steps that they share."""
WIDE = 0.05
"""Gap above which these turns are taken once more, unless the problem is large."""
MORE_PLANS, MORE_STEPS = 2, 4
"""Times as many, then."""
ROUNDINGS = 2
"""Times that a plan's options are chosen again."""
PACKING_TIME = 0.7
"""Share of the time that is left when packing begins."""
FOUND_BY = "packing"

Late = Callable[..., bool]


class RoundingPacker:
    """Packs what a rounding proposes.

    Args:
        bound: solved; its sets are rounded again.
    """

    def __init__(self, rounding: Rounding, bound: LowerBound, stop: Stop) -> None:
        self.rounding, self.bound, self.stop = rounding, bound, stop
        self.objective, self.surrogate = rounding.objective, rounding.surrogate
        self.packer = Packer(self.objective, self.surrogate)
        size = len(self.objective.space.options) * self.objective.problem.topology.world_size
        self.is_large = size > LARGE
        self.steps = stop.work(PACKING_STEPS * (OF_LARGE if self.is_large else 1))

    def pack(self, found: Sequence[Candidate], progress: Progress) -> Iterator[Candidate]:
        """Packed plans, one by one."""
        packed: list[Candidate] = []
        late = self.stop.part(PACKING_TIME)
        for plans, steps in ((1, self.steps), (MORE_PLANS, MORE_STEPS * self.steps)):
            if packed and (self.is_large or not self._is_wide(packed)):
                return
            turns = (
                (self._pack, found, PACKED),
                (self._again, packed, AGAIN),
                (self._pack, packed, LAST),
            )
            for make, some, (most, part) in turns:
                if not some or self.stop.reached() or (packed and late()):
                    return
                best = rank_distinct(some)[: most * plans]
                best_ms = min(c.iteration_ms for c in [*packed, *found])
                progress("packing", 0.25, best_ms, self.bound.proven_ms)
                each = round(steps * part / len(best))
                for one in self.objective.side_by_side(
                    [partial(make, c, each, late) for c in best]
                ):
                    packed.append(one)
                    yield one

    def _is_wide(self, packed: Sequence[Candidate]) -> bool:
        """The gap is, of the best plan."""
        best_ms = min(c.iteration_ms for c in packed)
        return best_ms > self.bound.proven_ms * (1 + WIDE)

    def _pack(self, one: Candidate, steps: int, late: Late) -> Candidate:
        def stop(best_ms: float) -> bool:
            return self.stop.reached(best_ms, self.bound.proven_ms) or late()

        return Candidate(*self.packer.pack(one.assignment, steps, stop), FOUND_BY)

    def _again(self, one: Candidate, steps: int, late: Late) -> Candidate:
        """The best plan whose options were chosen again, and again under its cut; the plan itself
        where that is no better."""
        rounding = self._cut_rounding(one, late)
        best = now = one
        for _ in range(ROUNDINGS):
            cut = critical_cut(self.objective, now.assignment)
            if rounding is None or cut is None or late():
                break
            rounding.add(cut)
            plan = self.rounding.place(rounding.rounded(late))
            if plan is None:
                break
            now = self._pack(Candidate(plan, one.iteration_ms, FOUND_BY), steps // ROUNDINGS, late)
            best = min(best, now, key=lambda c: c.iteration_ms)
        return best

    def _cut_rounding(self, plan: Candidate, late: Late) -> CutRounding | None:
        """The program of the plan's set; without shards that cannot be balanced, if that leaves
        better plans. None if the set is refuted."""
        used = {(option.module, option.sharding_type) for option, _ in plan.assignment}
        sets = self.bound.promising(len(self.bound.sets))
        one = next((one for one in sets if one.exchanges == used), None)
        if one is None or not self.rounding.solve(one, late):
            return None
        divisible = self.rounding.divisible(one)
        return CutRounding(
            self.surrogate, divisible if divisible.proven < plan.iteration_ms else one
        )

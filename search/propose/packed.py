"""The best plans of the rounding packed, and rounded again under the cuts of what was packed.

Three turns share the work: the first few plans are packed; of the best of those the options are
chosen again, placed and packed (`search.propose.cut_rounding`); the best of all are packed once
more. Where the bound is far, more plans take these turns, and longer.

Why: docs/decisions/0075, docs/decisions/0078.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from search.bound.lower_bound import LowerBound
from search.candidate import Candidate, rank_distinct
from search.improve.cycle_cuts import critical_cut
from search.improve.packing import Packer
from search.problem import Progress
from search.propose.cut_rounding import CutRounding
from search.propose.rounding import LARGE, Rounding
from search.stop import Stop

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

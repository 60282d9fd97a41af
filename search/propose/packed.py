"""The best plans of the rounding packed, and the best of those once more.

Where the bound is far, more plans take these turns, and longer.

Why: docs/decisions/0028-plans-from-the-bound.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from search.bound.lower_bound import LowerBound
from search.candidate import Candidate, rank_distinct
from search.improve.packing import Packer
from search.objective import Objective
from search.problem import Progress
from search.propose.rounding import LARGE
from search.stop import Late, Stop
from search.surrogate import Surrogate

PACKING_STEPS = 600
"""Steps at effort 1, sized so that 26 tables on 8 ranks take a few seconds."""
OF_LARGE = 2
"""Times that packing has more steps where local search has hardly any."""
TURNS = (3, 2)
"""Plans that are packed, and how many of those are packed again; the turns share the steps."""
WIDE, WORTH = 0.05, 0.002
"""Gap above which these turns are taken once more, and the share by which they must have made the
best plan faster; unless the problem is large."""
MORE_PLANS, MORE_STEPS = 2, 4
"""Times as many, then."""
PACKING_TIME = 0.7
"""Share of the time that is left when packing begins."""
FOUND_BY = "packing"


def pack_plans(
    objective: Objective,
    surrogate: Surrogate,
    found: Sequence[Candidate],
    bound: LowerBound,
    stop: Stop,
    progress: Progress,
) -> Iterator[Candidate]:
    """Packed plans, one by one."""
    packer, late = Packer(objective, surrogate), stop.part(PACKING_TIME)
    large = len(objective.space.options) * objective.problem.topology.world_size > LARGE
    steps = stop.work(PACKING_STEPS * (OF_LARGE if large else 1))
    packed: list[Candidate] = []
    for plans, budget in ((1, steps), (MORE_PLANS, MORE_STEPS * steps)):
        if packed:
            known, best_ms = (min(c.iteration_ms for c in some) for some in (found, packed))
            wide = best_ms > bound.proven_ms * (1 + WIDE)
            if large or not wide or best_ms > known * (1 - WORTH):
                return
        for turn, most in enumerate(TURNS):
            some = packed if turn else found
            if not some or stop.reached() or (packed and late()):
                return
            best = rank_distinct(some)[: most * plans]
            shown = min(c.iteration_ms for c in [*packed, *found])
            progress("packing", 0.25, shown, bound.proven_ms)
            each = round(budget / len(TURNS) / len(best))
            pieces = [partial(_pack, packer, c, each, bound, stop, late) for c in best]
            for one in objective.side_by_side(pieces):
                packed.append(one)
                yield one


def _pack(
    packer: Packer, one: Candidate, steps: int, bound: LowerBound, stop: Stop, late: Late
) -> Candidate:
    def ended(best_ms: float) -> bool:
        return stop.reached(best_ms, bound.proven_ms) or late()

    return Candidate(*packer.pack(one.assignment, steps, ended), FOUND_BY)

"""Of the plans near one in use, those whose move pays for itself.

Over a horizon of ``N`` steps a plan costs ``iteration_ms + move_ms / N`` a step; the plan in use
has no move. Tables whose own move costs more than it gains go back where they were.

Why: docs/decisions/0059.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from search.candidate import Candidate, rank_distinct
from search.in_use.plan import PlanInUse, candidates_in_use
from search.in_use.price import MovePrice
from search.objective import Assignment, Objective, apply

ROUNDS = 32
"""Times that the tables of a plan are tried back, one by one."""
TRIED = 64
"""Tables that a round tries back, those with most bytes first."""


@dataclass(frozen=True)
class _Cost:
    """What a plan costs a step over the horizon."""

    objective: Objective
    price: MovePrice
    horizon: int

    def __call__(self, assignment: Assignment, iteration_ms: float) -> float:
        move = self.price.of(self.objective.sharding_plan(assignment))
        return iteration_ms + 1e3 * move.seconds / self.horizon


def prefer_worthwhile(
    objective: Objective, in_use: PlanInUse, ranked: Sequence[Candidate]
) -> list[Candidate]:
    """The plans and the one in use, with tables back that are not worth their move, cheapest first.

    Args:
        in_use: as `check_plan_in_use` returns it; its horizon counts.
        ranked: plans that fit; at least one.
    """
    assert in_use.horizon is not None
    cost = _Cost(objective, MovePrice(objective.problem, in_use.plan), in_use.horizon)
    plans = [_keep_back(objective, cost, candidate) for candidate in ranked]
    known = rank_distinct([*plans, *candidates_in_use(objective)], objective.space.in_use)
    return sorted(known, key=lambda c: cost(c.assignment, c.iteration_ms))


def _keep_back(objective: Objective, cost: _Cost, candidate: Candidate) -> Candidate:
    """The plan with tables put back as long as that makes it cheaper."""
    choices = objective.space.in_use
    assert choices is not None
    current, least = candidate, cost(candidate.assignment, candidate.iteration_ms)
    for _ in range(ROUNDS):
        moved = choices.moved(current.assignment)
        moved.sort(key=lambda table: -choices.arriving_bytes(table, current.assignment[table]))
        back = [{t: b} for t in moved[:TRIED] if (b := choices.choices[t]) is not None]
        plans = [apply(current.assignment, change) for change in back]
        times = objective.score_neighbours(current.assignment, back).tolist() if back else []
        tried = [
            (cost(plan, ms), i)
            for i, (plan, ms) in enumerate(zip(plans, times, strict=True))
            if objective.fits(plan)
        ]
        if not tried or min(tried)[0] >= least:
            break
        least, best = min(tried)
        current = replace(candidate, assignment=plans[best], iteration_ms=times[best])
    return current

"""Plans near the plan in use whose move pays for itself.

Over a horizon of ``N`` steps a plan costs ``iteration_ms + move_ms / N`` a step; the plan in use
has no move. Tables whose own move costs more than it gains go back where they were, and nothing
moves for a gain by which plans that tie may differ.

Why: docs/decisions/0031-plan-in-use.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from search.candidate import Candidate, rank_distinct
from search.in_use.plan import candidates_in_use
from search.in_use.price import MovePrice
from search.objective import Assignment, Objective, apply

TRIED = 64
"""Number of tables that are moved back one by one, those with most bytes first."""


def share_of_move(objective: Objective) -> Callable[[Assignment], float]:
    """Return a function from a plan to the ms its move adds to each step of the horizon.

    It returns 0 if there is no plan in use or no horizon.
    """
    in_use = objective.problem.in_use
    if in_use is None or in_use.horizon is None:
        return lambda assignment: 0.0
    price, horizon = MovePrice(objective.problem, in_use.plan, in_use.held), in_use.horizon
    return lambda assignment: 1e3 * price.of(objective.sharding_plan(assignment)).seconds / horizon


def prefer_worthwhile(
    objective: Objective, ranked: Sequence[Candidate], tolerance: float
) -> list[Candidate]:
    """Rank the plans and the one in use, cheapest first; tables not worth their move go back.

    Args:
        ranked: plans that fit; at least one.
        tolerance: share of the time that a move must gain at least.
    """
    share = share_of_move(objective)
    plans = [_keep_back(objective, share, candidate) for candidate in ranked]
    staying = [c for c in candidates_in_use(objective) if objective.fits(c.assignment)]
    candidates = rank_distinct([*plans, *staying], objective.space.in_use)
    stays = {c.assignment for c in staying}

    def cost(candidate: Candidate) -> float:
        ms = candidate.iteration_ms + share(candidate.assignment)
        return ms * (1 - tolerance) if candidate.assignment in stays else ms

    return sorted(candidates, key=cost)


def _keep_back(
    objective: Objective, share: Callable[[Assignment], float], candidate: Candidate
) -> Candidate:
    """Return the plan with tables moved back as long as that makes it cheaper."""
    choices = objective.space.in_use
    assert choices is not None
    current, least = candidate, candidate.iteration_ms + share(candidate.assignment)
    while True:
        moved = choices.moved(current.assignment)
        moved.sort(key=lambda table: -choices.arriving_bytes(table, current.assignment[table]))
        back = [{t: b} for t in moved[:TRIED] if (b := choices.choices[t]) is not None]
        plans = [apply(current.assignment, change) for change in back]
        times = objective.score_neighbours(current.assignment, back).tolist() if back else []
        tried = [
            (ms + share(plan), i)
            for i, (plan, ms) in enumerate(zip(plans, times, strict=True))
            if objective.fits(plan)
        ]
        if not tried or min(tried)[0] >= least:
            return current
        least, best = min(tried)
        current = replace(candidate, assignment=plans[best], iteration_ms=times[best])

"""How much the choice of a plan matters: sane plans compared, with what errors could hide.

Sane plans are those that a search returns and those of other methods, but for a random one. Where
none of them is worse than the best one by more than the known errors of the costs could hide,
time is better spent on something else than on sharding.

Why: docs/decisions/0054.
"""

from __future__ import annotations

from dataclasses import dataclass

from predictor.cost.errors import Z_90
from search.expected_gain import drawn_times
from search.problem import Problem, Result

INSANE = ("random",)
"""Baselines that nobody would run."""
NOTHING = 0.01
"""Share of the iteration below which a difference is none, however sure."""
LITTLE = 0.05
"""Share above which a difference is one, even if errors could hide it."""


@dataclass(frozen=True)
class Stakes:
    """What is at stake in the choice of a plan.

    Args:
        plans: sane ones that were compared, the best one among them.
        spread: by which share the slowest of them is predicted to be slower than the best one.
        matters: False where each is slower by nothing, or by little that errors could hide.
    """

    plans: int
    spread: float
    matters: bool


def stakes(problem: Problem, result: Result) -> Stakes | None:
    """Compares the sane plans of a search; None if there is only one."""
    best, *others = (ranked.plan for ranked in result.plans)
    slower = [ranked.iteration_ms for ranked in result.plans[1:]]
    for name, plan in result.baseline_plans.items():
        if name not in INSANE:
            others.append(plan)
            slower.append(result.baselines[name])
    if not others:
        return None
    spread = max(slower) / result.best.iteration_ms - 1
    if spread > 2 * LITTLE:
        return Stakes(1 + len(others), spread, matters=True)
    _, times = drawn_times(problem, [best, *others])
    gains = 1 - times[0] / times[1:]
    mean, width = gains.mean(axis=1), Z_90 * gains.std(axis=1, ddof=1)
    alike = (mean <= NOTHING) | ((mean <= LITTLE) & (mean <= width))
    return Stakes(1 + len(others), spread, matters=not bool(alike.all()))

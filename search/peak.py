"""Plans that a search returns fit at the peak of an iteration.

A search simulates the peak of plans whose shards take much of the memory, and trusts that others
fit (`search.objective`). What it returns is simulated in any case. Where its best plan does not fit
then, it runs again and simulates all.

Why: docs/decisions/0014-memory.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from predictor.errors import InfeasibleError
from search.problem import Problem, RankedPlan, Result
from search.stop import Stop


def search_within_peak(
    problem: Problem, stop: Stop, search: Callable[[Problem], Result], top_k: int
) -> Result:
    """The result of a search, without plans that do not fit at their peak.

    Args:
        search: of a problem.

    Raises:
        InfeasibleError: no plan was found that fits.
    """
    result = search(problem)
    plans = _fitting(problem, result, stop)
    if plans[:1] != [result.best]:
        stop.resume()
        evaluations = result.evaluations
        try:
            again = search(replace(problem, thorough=True))
        except InfeasibleError:
            if not plans:
                raise
        else:
            evaluations += again.evaluations
            result, plans = again, _fitting(problem, again, stop) or plans
        result = replace(result, evaluations=evaluations)
    if plans[:1] != [result.best]:
        result = replace(result, ties=None, scenarios=())  # those are of a plan that does not fit
    fastest = result.fastest
    if fastest is not None and not problem.fits(fastest.plan):
        fastest = None
    return replace(result, plans=tuple(plans[:top_k]), fastest=fastest)


def _fitting(problem: Problem, result: Result, stop: Stop) -> list[RankedPlan]:
    """The plans that fit at their peak; where time is up, the first one of them."""
    found: list[RankedPlan] = []
    for ranked in result.plans:
        if found and stop.remaining_s <= 0:
            break
        if problem.fits(ranked.plan):
            found.append(ranked)
    return found

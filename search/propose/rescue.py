"""Search for any plan that fits, after all other stages found none."""

from __future__ import annotations

from search.candidate import Candidate
from search.feasibility import Feasibility, find_feasible
from search.improve.annealing import Annealer, AnnealingTask
from search.state import Tools

FOUND_BY = "feasibility"


def rescue(tools: Tools) -> tuple[list[Candidate], Feasibility]:
    """Find any plan that fits; the search gets a second even when time is up.

    If the shards of a plan fit but its peak does not, it is annealed until it fits.
    """
    objective, params = tools.objective, tools.params
    seconds = max(1.0, tools.stop.remaining_s)
    nearest = find_feasible(objective, params.proof_work, tools.seed, seconds)
    start = nearest.assignment
    if start is None:
        return [], nearest
    if objective.fits(start):
        return [Candidate(start, float(objective.score([start])[0]), FOUND_BY)], nearest
    task = AnnealingTask(
        start, objective.space.options, params.least_moves, params.rounds, tools.seed
    )
    annealer = Annealer(objective, tools.surrogate, params)
    plans = annealer.improve(task, lambda best_ms: best_ms < float("inf"))
    return [Candidate(plan, ms, FOUND_BY) for plan, ms in plans], nearest

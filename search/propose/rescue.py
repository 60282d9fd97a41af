"""Any plan that fits, where nothing else has found one."""

from __future__ import annotations

from dataclasses import replace

from search.candidate import Candidate
from search.feasibility import Feasibility, find_feasible
from search.improve.annealing import Annealer, AnnealingTask
from search.objective import Assignment, Objective
from search.state import Tools

PLACINGS = 4
"""Plans whose shards fit that are tried until one also fits at its peak."""


def rescue(tools: Tools) -> tuple[list[Candidate], Feasibility]:
    """Find any plan that fits; the search for one has a second even when time is up.

    Where the bytes of a plan's shards fit, but its peak does not, it is placed again within less,
    and the plan that lacks least is annealed until it fits.
    """
    within, params, stop = tools.objective, tools.params, tools.stop
    tried: list[Assignment] = []
    nearest: Feasibility | None = None
    for _ in range(PLACINGS):
        seconds = max(1.0, stop.remaining_s)
        found = find_feasible(within, params.proof_work, tools.seed, seconds)
        nearest = nearest or found  # caps that were lowered prove nothing
        plan = found.assignment
        if plan is None:
            break
        if tools.objective.fits(plan):
            ms = float(tools.objective.score([plan])[0])
            return [Candidate(plan, ms, "feasibility")], nearest
        tried.append(plan)
        within = within.beside(plan)
    assert nearest is not None
    if not tried:
        return [], nearest
    start = min(tried, key=lambda plan: _lacking(tools.objective, plan))
    options = tools.objective.space.options
    task = AnnealingTask(start, options, params.least_moves, params.rounds, tools.seed)
    annealer = Annealer(tools.objective, tools.surrogate, params)
    found_plans = annealer.improve(task, lambda best_ms: best_ms < float("inf"))
    if not found_plans:
        return [], replace(nearest, assignment=start)
    return [Candidate(plan, ms, "feasibility") for plan, ms in found_plans], nearest


def _lacking(objective: Objective, plan: Assignment) -> int:
    """Bytes that all ranks lack at the peak of a plan."""
    return sum(map(sum, objective.missing(plan)))

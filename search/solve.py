"""The search, from a problem to ranked plans and a bound. Read `solve` from top to bottom.

space         the options of every table, with what was left out and why   (search.space)
one space     baselines, candidates, improvement, preference, bound        (search.one_space)
  baselines     what other methods would choose, as first candidates         (search.baselines)
  plan in use   a candidate too, and how far the search may move from it     (search.in_use)
  candidates    proposed by the bound's programs, packing, CP-SAT, Optuna    (search.propose)
  improvement   the best candidates, on the full timeline                    (search.improve)
  choice        by time or over scenarios; of plans that tie, the preferred  (search.choose)
  bound         no plan of the space is predicted to be faster               (search.bound)
host memory   only where device memory does not do                         (here)
peak          plans that fit by the sum of their parts, checked whole      (search.peak)
no plan       which demands exclude each other, and what would help        (search.infeasible)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from predictor.errors import InfeasibleError
from predictor.model.memory.ranks import UVM_KERNELS
from search.bound.lower_bound import LowerBound
from search.choose import NOMINAL, PlanGoal, check_aim
from search.in_use.plan import (
    PlanInUse,
    check_plan_in_use,
    space_near,
    space_of_bound,
)
from search.infeasible import explain_infeasible
from search.one_space import SearchSettings, SpaceSearcher
from search.peak import search_within_peak
from search.problem import Problem, Progress, Result, silent
from search.propose.rounding import LARGE
from search.propose.searchers import SEARCHERS
from search.scenarios.scenario import Scenario, draw_scenarios
from search.space.enumerate import whole_space
from search.space.filters import AMPLE, drop_uvm
from search.space.option import Space
from search.stop import Stop

ROOT_STEPS = 60
"""Refinements of the bound that says whether host memory could gain enough."""
HOST_TIME = 0.3
"""Share of the time that is left, for these."""


def solve(
    problem: Problem,
    stop: Stop,
    seed: int,
    *,
    top_k: int = 3,
    searchers: Sequence[str] = SEARCHERS,
    in_use: PlanInUse | None = None,
    tolerance: float | None = None,
    prove: bool = False,
    aim: str = NOMINAL,
    scenarios: Sequence[Scenario] | None = None,
    progress: Progress = silent,
) -> Result:
    """Search the sharding plans of a problem.

    Args:
        problem: model, ranks with the memory left for shards, costs.
        stop: work budget, time ceiling, gap.
        seed: of every random choice, >= 0.
        top_k: plans to return, >= 1.
        searchers: which of `SEARCHERS` propose candidates.
        in_use: a plan in use to start from, near which the search stays if it limits the moves. If
            it allows none, that plan is rated against the bound of all plans.
        tolerance: by which share the best plan may be slower than the fastest one found, if it is
            better by other rules (`search.prefer`), >= 0; never slower than a baseline. None for a
            fifth of the stated error. Without effect where a plan is in use, of which the best
            should move little.
        prove: refine the bound in full, not only while that is worth it.
        aim: what is minimised, one of `search.choose.AIMS`: the nominal time, the mean over the
            scenarios, or the largest regret in them.
        scenarios: what else could be true; None for sixteen draws of the errors that the profile
            states.
        progress: called with every stage of the search.

    Raises:
        InfeasibleError: no plan fits, or a table has no option left.
        InputError: the plan in use is of another model or world size; or there are fewer than two
            scenarios, and the aim is another than the nominal time.
        KeyboardInterrupt: before any plan was found, or twice, or `stop` is not interruptible.
    """
    in_use = in_use and check_plan_in_use(in_use, problem)
    check_aim(aim, scenarios)
    others = draw_scenarios(problem) if scenarios is None else scenarios
    wanted = PlanGoal(aim, others, tolerance)
    settings = SearchSettings(stop, seed, top_k, searchers, in_use, wanted, prove, progress)
    return search_within_peak(problem, stop, lambda p: _search(p, settings), top_k)


def _search(problem: Problem, settings: SearchSettings) -> Result:
    """One search, over plans whose parts add up to what there is."""
    spaces, host = _spaces(problem, settings.stop, settings.in_use), ""
    for space in spaces:
        one = SpaceSearcher(problem, space, settings)
        found = one.find()
        if found is not None:
            break
    else:
        raise one.explain()
    if space is not spaces[-1]:
        found, host = _compare_host_memory(found, problem, spaces[-1], settings)
    settings.progress("done", 1.0, found.best.iteration_ms, found.lower_bound_ms)
    notes = filter(None, (host, *found.bound_notes, _size_note(problem)))
    stop = settings.stop
    return replace(
        found,
        bound_notes=tuple(notes),
        stopped_by=stop.reason,
        search_seconds=stop.elapsed_s,
    )


def _spaces(problem: Problem, stop: Stop, in_use: PlanInUse | None) -> list[Space]:
    """The options without host memory if their bytes fit, and all options if those are more."""
    try:
        whole = whole_space(problem, stop.check_start)
    except InfeasibleError as error:
        raise explain_infeasible(problem, error, stop) from None
    reduced = drop_uvm(whole, problem.topology, 1.0)
    spaces = [reduced] if reduced.size == whole.size else [reduced, whole]
    return spaces if in_use is None else [space_near(s, problem, in_use) for s in spaces]


def _compare_host_memory(
    found: Result, problem: Problem, whole: Space, settings: SearchSettings
) -> tuple[Result, str]:
    """The plans with tables in host memory where they gain more than the stated error of lookups
    could hide, else those found without; and what there is to say of that.

    Where device memory is ample, or a search takes long, they are not looked at.
    """
    stop = settings.stop
    error = problem.hardware.embedding.rel_error
    best_ms = (found.fastest or found.best).iteration_ms
    enough_ms = best_ms / (1 + error)
    large = len(whole.options) * problem.topology.world_size > LARGE
    ample = drop_uvm(whole, problem.topology, AMPLE).size < whole.size
    if ample:
        return found, ""
    left_out = "Plans with tables in host memory (UVM kernels) are left out, of the bound too"
    if large or stop.remaining_s <= 0:
        return found, f"{left_out}: they were not looked at, as a plan fits without"
    late = stop.part(HOST_TIME)
    bound = LowerBound(problem, space_of_bound(whole), problem.scorer)
    least_ms = bound.solve(stop.work(ROOT_STEPS), best_ms, lambda ms: ms >= enough_ms or late())
    if least_ms >= enough_ms:
        return found, f"{left_out}: none is more than {error:.0%} faster, the error of lookups"
    other = SpaceSearcher(problem, whole, settings).find()
    if other is not None and other.best.iteration_ms < enough_ms:
        tables = sum(t.compute_kernel in UVM_KERNELS for t in other.best.plan.tables.values())
        return other, (
            f"{tables} tables are in host memory, whose kernels are not validated: that is "
            f"{best_ms / other.best.iteration_ms - 1:.0%} faster than the best plan without, more "
            f"than the {error:.0%} that lookups may be wrong by"
        )
    return found, f"{left_out}: none was found that is more than {error:.0%} faster"


def _size_note(problem: Problem) -> str:
    """That the problem is so large that the search does less of what it does for others."""
    tables, ranks = len(problem.workload.tables), problem.topology.world_size
    if tables * ranks <= LARGE:
        return ""
    return (
        f"With {tables} tables on {ranks} ranks (over {LARGE:,} tables times ranks) plans are "
        "packed more and searched locally less"
    )

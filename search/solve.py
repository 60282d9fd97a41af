"""The search, from a problem to ranked plans and a bound. Read `solve` from top to bottom.

space         the options of every table, with what was left out and why   (search.space)
baselines     what other methods would choose, as first incumbents         (search.baselines)
plan in use   another incumbent, with limits on the moves away from it     (search.in_use)
bound         proves that no plan of the space is predicted to be faster   (search.bound)
annealing     searches the exchange sets with the lowest bounds            (search.improve)
on request    CP-SAT, Optuna                                               (search.propose)
host memory   used only if device memory is too small, preferably behind a cache
choice        by time or over scenarios, then by the rules for ties        (search.choose)
peak          simulates the peak memory of plans whose shards fit          (search.peak)
no plan       which demands exclude each other, and what would help        (search.infeasible)

Every stage takes a state and returns another one (`search.stages`). Under a time limit each stage
gets a share of the time that remains when it begins, so a plan and a bound exist when time is up.

Why: docs/decisions/0029-time-of-a-search.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from predictor.model.plan import ShardingPlan
from search.bound.lower_bound import LowerBound
from search.choose import with_scenarios
from search.garbage import rare_collection
from search.in_use.plan import check_plan_in_use, space_of_bound
from search.objective import Objective
from search.params import DEFAULT, SearchParams
from search.peak import search_within_peak
from search.problem import Problem, Progress, Result, silent
from search.space.option import Space
from search.stages import (
    choose,
    first_with_plans,
    list_spaces,
    near_in_use,
    result_of,
    with_any_plan,
    with_baselines,
    with_bound,
    with_full_bound,
    with_host_memory,
    with_plan_in_use,
    with_proposals,
    with_starts,
)
from search.state import State, Tools
from search.stop import Stop
from search.surrogate import Surrogate

SEARCHERS = ("annealing",)
"""Default searchers; ``cpsat`` and ``optuna`` are available on request."""


def solve(
    problem: Problem,
    stop: Stop,
    seed: int,
    *,
    top_k: int = 3,
    searchers: Sequence[str] = SEARCHERS,
    starts: Sequence[ShardingPlan] = (),
    tolerance: float | None = None,
    prove: bool = False,
    params: SearchParams = DEFAULT,
    progress: Progress = silent,
) -> Result:
    """Search the sharding plans of a problem.

    Args:
        problem: model, ranks and their memory for shards, costs, plan in use, aim.
        stop: effort, time limit, and the gap at which the search ends.
        seed: seed of every random choice, >= 0.
        top_k: plans to return, >= 1.
        searchers: names of the searchers that propose plans.
        starts: further plans of the same tables to start from; those that do not fit are ignored.
        tolerance: fraction by which the best plan may be slower than the fastest plan, if the rules
            for ties prefer it (`search.prefer`), >= 0. It is never slower than a baseline. None
            for `SearchParams.tie`. Ignored with a plan in use, where few moves matter.
        prove: refine the bound to the end, even while it hardly rises.
        params: constants of the search, at effort 1.
        progress: called at every stage of the search.

    Raises:
        InfeasibleError: no plan fits, or a table has no option left.
        InputError: the plan in use belongs to another model or world size, or an aim other than
            the nominal time has fewer than two scenarios.
        KeyboardInterrupt: Ctrl-C came before any plan was found, or twice, or `stop` is not
            interruptible.
    """
    problem = with_scenarios(check_plan_in_use(problem))
    params = params.scaled(stop.effort)
    bound_params = params.proving() if prove else params

    def explore(subproblem: Problem, space: Space) -> State:
        """Search one space for fast plans."""
        objective = Objective(subproblem, space)
        bound = LowerBound(subproblem, space_of_bound(space), objective.scorer, bound_params)
        surrogate = Surrogate(objective)
        state = State(Tools(objective, surrogate, bound, stop, seed, params, progress))
        state = with_baselines(state)
        state = with_plan_in_use(state)
        state = with_starts(state, starts)
        state = with_bound(state)
        state = with_proposals(state, searchers)
        return with_any_plan(state)

    def search(subproblem: Problem) -> Result:
        """Search the plans whose shards fit the memory that the topology leaves for shards."""
        spaces = list_spaces(subproblem, stop)
        state = first_with_plans(explore(subproblem, space) for space in spaces)
        state = with_host_memory(state, spaces[-1], lambda space: explore(subproblem, space))
        chosen = choose(state, tolerance)
        chosen = near_in_use(state, chosen, top_k)
        state = with_full_bound(state)
        return result_of(state, chosen)

    with rare_collection():
        return search_within_peak(problem, stop, search, top_k)

"""Choice of the plan to return: by time, or over scenarios; among ties by `search.prefer`.

Why: docs/decisions/0030-choosing-among-plans.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from predictor.errors import InputError
from search.candidate import Candidate, rank_distinct
from search.in_use.align import rename_ranks
from search.in_use.plan import candidates_in_use
from search.in_use.worth import prefer_worthwhile, share_of_move
from search.objective import Assignment, Objective
from search.params import SearchParams
from search.prefer import prefer
from search.problem import AIMS, NOMINAL, Problem, ScenarioTimes, TieSummary
from search.scenarios.scenario import ScenarioScorer, draw_scenarios
from search.scenarios.scored import RatedPlans, scenario_times
from search.stop import Stop
from search.surrogate import Surrogate

FOUND_BY = "search over scenarios"


@dataclass(frozen=True)
class ChosenPlans:
    """Plans to return, and the reasons for the first one.

    Args:
        ranked: plans with predicted times, best first.
        ties: summary of the plans that tied with the best.
        scenarios: times of the best plan in each scenario.
        passed_over: see `search.problem.Result`.
    """

    ranked: list[Candidate]
    ties: TieSummary | None
    scenarios: tuple[ScenarioTimes, ...]
    passed_over: float | None = None


def choose_plan(
    nominal: Objective,
    surrogate: Surrogate,
    ranked: Sequence[Candidate],
    limit_ms: float,
    tolerance: float,
    params: SearchParams,
    stop: Stop,
) -> ChosenPlans:
    """Choose the best plan by the aim; of those that tie, the preferred one.

    With a plan in use, every time includes the cost of the move per step, so that staying competes
    with moving; ties are ignored.

    Args:
        ranked: plans, fastest first.
        limit_ms: time above which no plan ties with the fastest one.
        tolerance: fraction by which ties may be slower than the best.
        params: parameters scaled by the effort.
    """
    problem = nominal.problem
    scenarios = problem.scenarios or ()
    as_given: tuple[list[Candidate], TieSummary | None]
    if problem.in_use is None:
        time_is_up = stop.part(1.0)
        as_given = prefer(
            nominal,
            surrogate,
            nominal.score,
            ranked,
            limit_ms,
            tolerance,
            params,
            params.tie_moves,
            time_is_up,
        )
    else:
        ranked = [rename_ranks(nominal, c) for c in ranked[: params.pool]]
        pays = problem.in_use.horizon is not None
        best = (
            prefer_worthwhile(nominal, ranked[: params.finalists], params.tie) if pays else ranked
        )
        as_given = list(best), None
    if problem.aim != NOMINAL:
        return _over_scenarios(nominal, surrogate, ranked, as_given, tolerance, params, stop)
    chosen, ties = as_given
    if not scenarios:
        return ChosenPlans(chosen, ties, ())
    rated = RatedPlans(ScenarioScorer(nominal, scenarios), _pool([*chosen, *ranked], params))
    nothing = [0.0] * len(scenarios)
    return ChosenPlans(chosen, ties, scenario_times(rated, chosen[0].assignment, nothing))


def _pool(ranked: Sequence[Candidate], params: SearchParams) -> list[Assignment]:
    """Return the plans to compare under scenarios."""
    return [candidate.assignment for candidate in ranked][: params.pool]


def _over_scenarios(
    nominal: Objective,
    surrogate: Surrogate,
    ranked: Sequence[Candidate],
    as_given: tuple[list[Candidate], TieSummary | None],
    tolerance: float,
    params: SearchParams,
    stop: Stop,
) -> ChosenPlans:
    """Choose the best plan over the scenarios, or the nominal choice if the stated errors cannot
    tell the two apart."""
    problem = nominal.problem
    aim, in_use, seed = problem.aim, problem.in_use, 0
    scorer = ScenarioScorer(nominal, problem.scenarios or ())
    likely = [as_given[0][0], *candidates_in_use(nominal), *ranked]
    plans = _pool([c for c in likely if nominal.fits(c.assignment)], params)
    rated_plans = RatedPlans(scorer, plans, share_of_move(nominal))
    ended = stop.part(params.annealing_time)
    nominal.evaluations += rated_plans.improve(params, seed, ended)
    rated_plans.recombine(nominal, aim, ended)
    rate = rated_plans.measure(aim)
    measures = rate(rated_plans.times)
    names = {c.assignment: c.found_by for c in [*as_given[0], *ranked]}
    rated = [
        Candidate(plan, measure, names.get(plan, FOUND_BY))
        for plan, measure in zip(rated_plans.plans, measures.tolist(), strict=True)
    ]
    best_first, ties = rank_distinct(rated, nominal.space.in_use), None
    if tolerance and in_use is None:
        limit = best_first[0].iteration_ms * (1 + tolerance)
        best_first, ties = prefer(
            nominal,
            surrogate,
            lambda plans: rate(rated_plans.score(plans)),
            best_first,
            limit,
            tolerance,
            params,
        )
    best, usual = best_first[0], as_given[0][0].assignment
    rated_plans.add([best.assignment])
    passed_over = None
    if best.assignment != usual and not rated_plans.is_better(best.assignment, usual, aim):
        passed_over, ties = best.iteration_ms, as_given[1]
        best = next(c for c in rated if c.assignment == usual)
        best_first = [best, *(c for c in best_first if c.iteration_ms > best.iteration_ms)]
    bounds = rated_plans.bounds(best.assignment, params.scenario_steps, ended)
    times = scenario_times(rated_plans, best.assignment, bounds)
    return ChosenPlans(_timed(nominal, best_first[: params.pool]), ties, times, passed_over)


def _timed(nominal: Objective, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the same plans with their predicted times."""
    times = nominal.score([c.assignment for c in candidates]).tolist()
    return [replace(c, iteration_ms=ms) for c, ms in zip(candidates, times, strict=True)]


def with_scenarios(problem: Problem) -> Problem:
    """Return the problem with scenarios; draw them if it has none.

    Raises:
        InputError: the aim is unknown, or needs scenarios.
    """
    if problem.aim not in AIMS:
        raise InputError(
            f"the objective is '{problem.aim}'; it is one of {', '.join(AIMS)}",
            inputs=("objective",),
        )
    if problem.scenarios is None:
        return replace(problem, scenarios=tuple(draw_scenarios(problem)))
    if problem.aim != NOMINAL and len(problem.scenarios) < 2:
        raise InputError(
            f"the objective {problem.aim} compares scenarios, but there is "
            f"{'one' if problem.scenarios else 'none'}; give two or more, or leave the objective "
            "nominal",
            inputs=("objective", "scenarios"),
        )
    return problem

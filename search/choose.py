"""From the plans that a search knows to the one it returns: by time alone, or over scenarios; of
plans that tie the preferred one (`search.prefer`).

Why: docs/decisions/0030-choosing-among-plans.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from predictor.errors import InputError
from search.candidate import Candidate, rank_distinct
from search.improve.local_search import LocalSearch
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

TURNS = 2
"""Searches over scenarios: what one finds may be the best of a scenario, by which the next one
measures."""
FOUND_BY = "search over scenarios"


@dataclass(frozen=True)
class ChosenPlans:
    """The plans that are left to return, and why the first of them is.

    Args:
        ranked: with their predicted times, best first.
        ties: what tied with the best.
        scenarios: how the best does in each.
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

    Where a plan is in use, every plan has its share of the move in all scenarios, so that staying
    is compared with moving; ties are not looked at.

    Args:
        ranked: fastest first.
        limit_ms: no slower plan ties with the fastest one.
        tolerance: by which share plans that tie may be slower than the best.
        params: scaled.
    """
    problem = nominal.problem
    scenarios = problem.scenarios or ()
    as_given: tuple[list[Candidate], TieSummary | None]
    if problem.in_use is None:
        descent, late = _work(params.evaluations, nominal, params), stop.part(1.0)
        work = params, descent, late
        as_given = prefer(nominal, nominal, surrogate, ranked, limit_ms, tolerance, *work)
    else:
        ranked = [rename_ranks(nominal, c) for c in ranked[: params.pool]]
        pays = problem.in_use.horizon is not None
        best = (
            prefer_worthwhile(nominal, ranked[: params.finalists], params.least_tie)
            if pays
            else ranked
        )
        as_given = list(best), None
    if problem.aim != NOMINAL:
        return _over_scenarios(nominal, surrogate, ranked, as_given, tolerance, params, stop)
    chosen, ties = as_given
    if not scenarios:
        return ChosenPlans(chosen, ties, ())
    known = RatedPlans(ScenarioScorer(nominal, scenarios), _pool([*chosen, *ranked], params))
    nothing = [0.0] * len(scenarios)
    return ChosenPlans(chosen, ties, scenario_times(known, chosen[0].assignment, nothing))


def _pool(ranked: Sequence[Candidate], params: SearchParams) -> list[Assignment]:
    """The plans that are compared under scenarios."""
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
    """Choose the best plan over the scenarios; where the stated errors cannot tell it apart from
    the one that is preferred for the problem as given, that one."""
    problem = nominal.problem
    aim, in_use, seed = problem.aim, problem.in_use, 0
    scorer = ScenarioScorer(nominal, problem.scenarios or ())
    likely = [as_given[0][0], *candidates_in_use(nominal), *ranked]
    plans = _pool([c for c in likely if nominal.fits(c.assignment)], params)
    known = RatedPlans(scorer, plans, share_of_move(nominal))
    ended = stop.part(params.annealing_time)
    over_all = _work(params.evaluations, nominal, params)
    nominal.evaluations += known.improve(surrogate, over_all // TURNS, seed, ended)
    for _ in range(TURNS):
        objective = known.objective(nominal, aim)
        measures = known.measure(aim)(known.times)
        again = LocalSearch(objective, surrogate, seed)
        reached, _ = again.improve(known.plans[int(measures.argmin())], over_all // TURNS, ended)
        known.add([reached])
        nominal.evaluations += objective.evaluations
    measures = known.measure(aim)(known.times)
    names = {c.assignment: c.found_by for c in [*as_given[0], *ranked]}
    rated = [
        Candidate(plan, measure, names.get(plan, FOUND_BY))
        for plan, measure in zip(known.plans, measures.tolist(), strict=True)
    ]
    found, ties = rank_distinct(rated, nominal.space.in_use), None
    if tolerance and in_use is None and not ended():
        rating, limit = known.objective(nominal, aim), found[0].iteration_ms * (1 + tolerance)
        work = params, over_all // 4, ended
        found, ties = prefer(rating, nominal, surrogate, found, limit, tolerance, *work)
    best, usual = found[0], as_given[0][0].assignment
    known.add([best.assignment])
    passed_over = None
    if best.assignment != usual and not known.is_better(best.assignment, usual, aim):
        passed_over, ties = best.iteration_ms, as_given[1]
        best = next(c for c in rated if c.assignment == usual)
        found = [best, *(c for c in found if c.iteration_ms > best.iteration_ms)]
    bounds = known.bounds(best.assignment, params.scenario_steps, ended)
    times = scenario_times(known, best.assignment, bounds)
    return ChosenPlans(_timed(nominal, found[: params.pool]), ties, times, passed_over)


def _timed(nominal: Objective, found: Sequence[Candidate]) -> list[Candidate]:
    """The same plans with their predicted times."""
    times = nominal.score([c.assignment for c in found]).tolist()
    return [replace(c, iteration_ms=ms) for c, ms in zip(found, times, strict=True)]


def _work(evaluations: int, objective: Objective, params: SearchParams) -> int:
    """A budget of plans to score, smaller where a plan takes long to score."""
    size = len(objective.space.options) * objective.problem.topology.world_size
    return max(1, round(evaluations * min(1.0, params.large / size)))


def with_scenarios(problem: Problem) -> Problem:
    """The problem with what else could be true, where that is left open.

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

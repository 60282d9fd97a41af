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
from search.in_use.plan import PlanInUse, candidates_in_use
from search.in_use.worth import prefer_worthwhile, share_of_move
from search.objective import Assignment, Objective
from search.params import SearchParams
from search.prefer import DESCENT, TOLERANCE, prefer
from search.problem import ScenarioTimes, TieSummary
from search.scenarios.scenario import Scenario, ScenarioScorer
from search.scenarios.scored import MEAN, REGRET, RatedPlans, scenario_times
from search.stop import Stop

POOL = 96
"""Plans compared under scenarios, at most."""
NOMINAL = "nominal"
AIMS = (NOMINAL, MEAN, REGRET)

IN_EACH = 1500
"""Plans scored by a local search in one scenario, at effort 1."""
OVER_ALL = 3000
"""Plans scored in all scenarios by the search for a mean or a regret, at effort 1."""
IN_USE = 3
"""Plans near one in use of which tables go back that are not worth their move."""
TURNS = 2
"""Such searches: what one finds may be the best of a scenario, by which the next one measures."""
STEPS = 400
"""Refinements of the scenarios' bounds, at effort 1."""
SHARE = 0.5
"""Of the time that is left, for all of this; the bound of the problem as given has the rest."""
FOUND_BY = "search over scenarios"


@dataclass(frozen=True)
class PlanGoal:
    """What the plan is to be good at.

    Args:
        aim: one of `AIMS`.
        scenarios: what could be true; none for the problem as given alone.
        tolerance: by which share plans that tie may be slower than the best; None for what the
            stated errors cannot tell apart.
    """

    aim: str
    scenarios: Sequence[Scenario]
    tolerance: float | None = None


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
    search: LocalSearch,
    ranked: Sequence[Candidate],
    limit_ms: float,
    wanted: PlanGoal,
    stop: Stop,
    in_use: PlanInUse | None = None,
) -> ChosenPlans:
    """The best plan by the aim; of those that tie, the preferred one.

    Args:
        search: of the problem as given; has visited plans.
        ranked: fastest first.
        limit_ms: no slower plan ties with the fastest one.
        in_use: a plan that a move starts from. Over scenarios every plan has its share of the move
            in all of them, so that staying is compared with moving; ties are not looked at.
    """
    nominal = search.objective
    descent, late, share = _work(nominal, DESCENT, stop), stop.part(1.0), wanted.tolerance or 0.0
    if wanted.aim == NOMINAL:
        found, ties = prefer(search, nominal, ranked, limit_ms, share, descent, late)
        if not wanted.scenarios:
            return ChosenPlans(found, ties, ())
        scorer = ScenarioScorer(nominal, wanted.scenarios)
        pool = [c.assignment for c in [*found, *ranked]][:POOL]
        known = RatedPlans(scorer, [*pool, *_visited(search)[:POOL]])
        nothing = [0.0] * len(scorer.scenarios)
        return ChosenPlans(found, ties, scenario_times(known, found[0].assignment, nothing))
    as_given: tuple[list[Candidate], TieSummary | None]
    if in_use is None:
        as_given = prefer(search, nominal, ranked, limit_ms, share, descent, late)
    else:
        ranked = [rename_ranks(nominal, c) for c in ranked[:POOL]]
        pays = in_use.horizon is not None
        some = ranked[:IN_USE]
        best = prefer_worthwhile(nominal, in_use, some, TOLERANCE) if pays else ranked
        as_given = best, None
    return _over_scenarios(search, ranked, as_given, wanted, stop, in_use)


def _over_scenarios(
    search: LocalSearch,
    ranked: Sequence[Candidate],
    as_given: tuple[list[Candidate], TieSummary | None],
    wanted: PlanGoal,
    stop: Stop,
    in_use: PlanInUse | None,
) -> ChosenPlans:
    """The best plan over the scenarios; where the stated errors cannot tell it apart from the one
    that is preferred for the problem as given, that one."""
    nominal, seed = search.objective, 0
    scorer = ScenarioScorer(nominal, wanted.scenarios)
    likely = [as_given[0][0], *candidates_in_use(nominal), *ranked][:POOL]
    plans = [c.assignment for c in likely if nominal.fits(c.assignment)]
    known = RatedPlans(scorer, [*plans, *_visited(search)[:POOL]], share_of_move(nominal, in_use))
    ended = stop.part(SHARE)
    in_each, over_all, descent = (
        _work(nominal, default, stop) for default in (IN_EACH, OVER_ALL, DESCENT // 4)
    )
    nominal.evaluations += known.improve(search.surrogate, in_each, seed, ended)
    for _ in range(TURNS):
        objective = known.objective(nominal, wanted.aim)
        measures = known.measure(wanted.aim)(known.times)
        again = LocalSearch(objective, search.surrogate, seed)
        reached, _ = again.improve(known.plans[int(measures.argmin())], over_all // TURNS, ended)
        known.add([reached])
        nominal.evaluations += objective.evaluations
    measures = known.measure(wanted.aim)(known.times)
    names = {c.assignment: c.found_by for c in [*as_given[0], *ranked]}
    rated = [
        Candidate(plan, measure, names.get(plan, FOUND_BY))
        for plan, measure in zip(known.plans, measures.tolist(), strict=True)
    ]
    found, ties = rank_distinct(rated, nominal.space.in_use), None
    if wanted.tolerance and in_use is None and not ended():
        again = LocalSearch(known.objective(nominal, wanted.aim), search.surrogate, seed)
        again.visited = {c.assignment: c.iteration_ms for c in rated}
        limit = found[0].iteration_ms * (1 + wanted.tolerance)
        found, ties = prefer(again, nominal, found, limit, wanted.tolerance, descent, ended)
    best, usual = found[0], as_given[0][0].assignment
    known.add([best.assignment])
    passed_over = None
    if best.assignment != usual and not known.is_better(best.assignment, usual, wanted.aim):
        passed_over, ties = best.iteration_ms, as_given[1]
        best = next(c for c in rated if c.assignment == usual)
        found = [best, *(c for c in found if c.iteration_ms > best.iteration_ms)]
    bounds = known.bounds(best.assignment, stop.work(STEPS), ended)
    times = scenario_times(known, best.assignment, bounds)
    return ChosenPlans(_timed(nominal, found), ties, times, passed_over)


def _visited(search: LocalSearch) -> list[Assignment]:
    """The plans that a search went through, best first."""
    return [plan for plan, _ in sorted(search.visited.items(), key=lambda item: item[1])]


def _timed(nominal: Objective, found: Sequence[Candidate]) -> list[Candidate]:
    """The same plans with their predicted times."""
    some = found[:POOL]
    times = nominal.score([c.assignment for c in some]).tolist()
    return [replace(c, iteration_ms=ms) for c, ms in zip(some, times, strict=True)]


def _work(objective: Objective, default: int, stop: Stop) -> int:
    """A budget, smaller where a plan takes long to score."""
    size = len(objective.space.options) * objective.problem.topology.world_size
    return stop.work(round(default * min(1.0, SearchParams.large / size)))


def check_aim(aim: str, scenarios: Sequence[Scenario] | None) -> None:
    """Refuse what cannot be minimised.

    Raises:
        InputError: the aim is unknown, or needs scenarios.
    """
    if aim not in AIMS:
        raise InputError(
            f"the objective is '{aim}'; it is one of {', '.join(AIMS)}", inputs=("objective",)
        )
    if aim != NOMINAL and scenarios is not None and len(scenarios) < 2:
        raise InputError(
            f"the objective {aim} compares scenarios, but there is "
            f"{'one' if scenarios else 'none'}; give two or more, or leave the objective nominal",
            inputs=("objective", "scenarios"),
        )

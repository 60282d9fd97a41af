"""From the plans that a search knows to the one it returns: by time alone, or over scenarios.

Why: docs/decisions/0064.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from predictor.errors import InputError
from search.candidate import Candidate, rank_distinct
from search.improve.local_search import LocalSearch
from search.in_use.plan import PlanInUse
from search.objective import Assignment, Objective
from search.prefer import DESCENT, POOL, prefer
from search.problem import ScenarioTimes, TieSummary
from search.propose.rounding import LARGE
from search.scenarios.scenario import Scenario, ScenarioScorer
from search.scenarios.scored import MEAN, REGRET, RatedPlans, scenario_times
from search.stop import Stop

NOMINAL = "nominal"
AIMS = (NOMINAL, MEAN, REGRET)

IN_EACH = 1500
"""Plans scored by a local search in one scenario, at effort 1."""
OVER_ALL = 3000
"""Plans scored in all scenarios by the search for a mean or a regret, at effort 1."""
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
        tolerance: by which share plans that tie may be slower than the best.
    """

    aim: str
    scenarios: Sequence[Scenario]
    tolerance: float


@dataclass(frozen=True)
class ChosenPlans:
    """The ranked plans with their predicted times, best first; what tied; how the best does."""

    ranked: list[Candidate]
    ties: TieSummary | None
    scenarios: tuple[ScenarioTimes, ...]


def choose_plan(
    search: LocalSearch, ranked: Sequence[Candidate], limit_ms: float, wanted: PlanGoal, stop: Stop
) -> ChosenPlans:
    """The best plan by the aim; of those that tie, the preferred one.

    Args:
        search: of the problem as given; has visited plans.
        ranked: fastest first.
        limit_ms: no slower plan ties with the fastest one.
    """
    nominal = search.objective
    if wanted.aim != NOMINAL:
        return _over_scenarios(search, ranked, wanted, stop)
    scorer = ScenarioScorer(nominal, wanted.scenarios) if wanted.scenarios else None
    descent = _work(nominal, DESCENT, stop)
    found, ties = prefer(search, nominal, ranked, limit_ms, scorer, descent)
    if scorer is None:
        return ChosenPlans(found, ties, ())
    pool = [c.assignment for c in [*found, *ranked]][:POOL]
    known = RatedPlans(scorer, [*pool, *_visited(search)[:POOL]])
    nothing = [0.0] * len(scorer.scenarios)
    return ChosenPlans(found, ties, scenario_times(known, found[0].assignment, nothing))


def _over_scenarios(
    search: LocalSearch, ranked: Sequence[Candidate], wanted: PlanGoal, stop: Stop
) -> ChosenPlans:
    nominal, seed = search.objective, 0
    scorer = ScenarioScorer(nominal, wanted.scenarios)
    fast = [c.assignment for c in ranked][:POOL]
    known = RatedPlans(scorer, [*fast, *_visited(search)[:POOL]])
    ended = stop.part(SHARE)
    in_each, over_all, descent = (
        _work(nominal, default, stop) for default in (IN_EACH, OVER_ALL, DESCENT // 4)
    )
    nominal.evaluations += known.improve(search.surrogate, in_each, seed, ended)
    for _ in range(TURNS):
        objective = known.objective(nominal, wanted.aim)
        measures = known.measure(wanted.aim)(known.times)
        again = LocalSearch(objective, search.surrogate, seed)
        best, _ = again.improve(known.plans[int(measures.argmin())], over_all // TURNS, ended)
        known.add([best])
        nominal.evaluations += objective.evaluations
    measures = known.measure(wanted.aim)(known.times)
    names = {c.assignment: c.found_by for c in ranked}
    rated = [
        Candidate(plan, measure, names.get(plan, FOUND_BY))
        for plan, measure in zip(known.plans, measures.tolist(), strict=True)
    ]
    found, ties = rank_distinct(rated), None
    if wanted.tolerance and not ended():
        again = LocalSearch(known.objective(nominal, wanted.aim), search.surrogate, seed)
        again.visited = {c.assignment: c.iteration_ms for c in rated}
        limit = found[0].iteration_ms * (1 + wanted.tolerance)
        found, ties = prefer(again, nominal, found, limit, scorer, descent)
    known.add([found[0].assignment])
    best = found[0].assignment
    bounds = known.bounds(best, stop.work(STEPS), ended)
    return ChosenPlans(_timed(nominal, found), ties, scenario_times(known, best, bounds))


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
    return stop.work(round(default * min(1.0, LARGE / size)))


def check_aim(aim: str, scenarios: Sequence[Scenario] | None, in_use: PlanInUse | None) -> None:
    """Refuse what cannot be minimised.

    Raises:
        InputError: the aim is unknown, needs scenarios, or there is a plan in use.
    """
    if aim not in AIMS:
        raise InputError(
            f"the objective is '{aim}'; it is one of {', '.join(AIMS)}", inputs=("objective",)
        )
    if aim == NOMINAL:
        return
    if scenarios is not None and len(scenarios) < 2:
        raise InputError(
            f"the objective {aim} compares scenarios, but there is "
            f"{'one' if scenarios else 'none'}; give two or more, or leave the objective nominal",
            inputs=("objective", "scenarios"),
        )
    if in_use is not None:
        raise InputError(
            f"the objective is {aim}, but moves from a plan in use are weighed by the nominal "
            "time; leave the objective nominal, or search without the plan in use",
            inputs=("objective",),
        )

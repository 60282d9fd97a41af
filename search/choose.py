"""From the plans that a search knows to the one it returns: by time alone, or over scenarios.

Among plans that tie, the one that stays good if something is not as predicted.

Plans tie if they are predicted to be at most so much slower than the fastest one (`TOLERANCE`).
Their order is: less time on the devices alone, less regret over the scenarios, better balanced
memory, fewer shards. Each rule keeps the plans that are alike by it, and the next one chooses among
these.

The time on the devices alone is that of an iteration whose host takes no time: the work of the
slowest rank with what it waits for. Where the host sets the pace, thousands of plans tie, and the
search knows nothing of what their devices do. There a local search looks for the tied plan with the
least such time.

Why: docs/decisions/0030-choosing-among-plans.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from predictor.cost.errors import HOST, GivenErrors
from predictor.errors import InputError
from search.candidate import Candidate, rank_distinct, signature
from search.improve.local_search import LocalSearch
from search.in_use.align import rename_ranks
from search.in_use.plan import PlanInUse, candidates_in_use
from search.in_use.worth import prefer_worthwhile, share_of_move
from search.objective import Assignment, Objective, RatedObjective, apply
from search.problem import ScenarioTimes, TieSummary
from search.propose.rounding import LARGE
from search.scenarios.scenario import Scenario, ScenarioScorer, draw_scenarios
from search.scenarios.scored import MEAN, REGRET, RatedPlans, scenario_times
from search.stop import Stop

Array = NDArray[np.float64]

TOLERANCE = 0.005
"""How much slower than the fastest plan the chosen one may be predicted to be."""
ALIKE = 0.001
"""Share by which device times, or regrets, of plans that are alike may differ."""
UNEVEN = 0.01
"""Share of the mean rank's memory by which those of plans that are alike may differ."""
NO_TIME = 1e-6
"""What the host's times are multiplied by to see what the devices take alone."""
POOL = 96
"""Plans compared under scenarios, at most."""
MANY = 1_000_000
"""Plans x tables x ranks x scenarios compared at most, where a plan takes long to score."""
CHANGES = 8
"""Changes of a plan that are scored, for every plan of a pool."""
ROUNDS = 2
"""Times that the changes of the chosen plan are looked at again."""
DESCENT = 3000
"""Plans scored, at effort 1, to find the tied plan whose devices take least."""
FOUND_AMONG_TIES = "best of those that tie"
RULES = ("device time", "regret", "memory", "shards")


def prefer(
    search: LocalSearch,
    nominal: Objective,
    ranked: Sequence[Candidate],
    limit: float,
    scenarios: ScenarioScorer | None,
    descent: int = DESCENT,
    ended: Callable[..., bool] = lambda *_: False,
) -> tuple[list[Candidate], TieSummary]:
    """The preferred plan, then those of the others that are not better; and what tied.

    Args:
        search: has visited plans, and knows the neighbours of any.
        nominal: predicts the times of plans; the search may minimise another measure.
        ranked: best first by what the search minimises, which candidates have for their time.
        limit: no plan beyond it ties.
        scenarios: over which plans that are alike are compared; None for none.
        descent: plans to score where the host sets the pace.
        ended: whether the time for that is up.
    """
    preference = _Preference(search, nominal, ranked[0], limit, scenarios)
    chosen = preference.choose(descent, ended)
    name = signature(chosen.assignment)
    worse = [c for c in ranked if c.iteration_ms >= chosen.iteration_ms]
    others = [c for c in worse if signature(c.assignment) != name]
    return [chosen, *others], preference.ties(chosen)


class _Preference:
    """Chooses among the plans that a search knows of, and their neighbours."""

    def __init__(
        self,
        search: LocalSearch,
        nominal: Objective,
        fastest: Candidate,
        limit: float,
        scenarios: ScenarioScorer | None,
    ) -> None:
        self.search = search
        self.nominal = nominal
        self.fastest = fastest
        self.limit = limit
        self.scenarios = scenarios
        alone = GivenErrors({HOST: NO_TIME})
        self.alone = nominal.problem.perturbed(nominal.scorer, alone)
        self.tied: dict[Assignment, float] = {fastest.assignment: fastest.iteration_ms}
        self._add(search.visited)

    @property
    def _most(self) -> int:
        """Plans compared under scenarios."""
        count = 1 if self.scenarios is None else len(self.scenarios.scenarios)
        size = len(self.nominal.space.options) * self.search.topology.world_size * count
        return max(2, min(POOL, MANY // size))

    def _device_ms(self, plans: Sequence[Assignment]) -> Array:
        """What the devices of plans take alone, ``[plans]``."""
        numbers = np.array([self.nominal.numbers(plan) for plan in plans])
        return self.alone.score_numbered(numbers)[:, 0]

    def _add(self, found: Mapping[Assignment, float]) -> None:
        """Take in plans that tie, the best ones if they are many."""
        near = [(measure, plan) for plan, measure in found.items() if measure <= self.limit]
        near.sort(key=lambda item: item[0])
        for measure, plan in near[: CHANGES * self._most]:
            self.tied.setdefault(plan, measure)

    def _add_neighbours(self, base: Assignment) -> None:
        changes = list(islice(self.search.neighbours(base), CHANGES * self._most))
        measures = self.search.objective.score_neighbours(base, changes).tolist()
        plans = [apply(base, change) for change in changes]
        self._add(dict(zip(plans, measures, strict=True)))

    def choose(self, descent: int, ended: Callable[..., bool]) -> Candidate:
        """The preferred plan; the fastest one where no other ties."""
        chosen = self.fastest.assignment
        for turn in range(ROUNDS):
            self._add_neighbours(chosen)
            if turn == 0 and len(self.tied) > 1 and self._is_host_bound(chosen):
                self._descend(descent, ended)
            chosen, before = self._best(), chosen
            if chosen == before:
                break
        if chosen == self.fastest.assignment:
            return self.fastest
        return Candidate(chosen, self.tied[chosen], FOUND_AMONG_TIES)

    def _is_host_bound(self, plan: Assignment) -> bool:
        """Its devices alone would be done earlier, by more than plans that tie may differ."""
        nominal = float(self.nominal.score([plan])[0])
        return float(self._device_ms([plan])[0]) < nominal * (1 - TOLERANCE)

    def _descend(self, evaluations: int, ended: Callable[..., bool]) -> None:
        """Look for plans that tie and whose devices take less."""

        def rate(plans: Sequence[Assignment]) -> Array:
            ties = self.search.objective.score(plans) <= self.limit
            found = np.full(len(plans), np.inf)
            if ties.any():
                found[ties] = self._device_ms([p for p, t in zip(plans, ties, strict=True) if t])
            return found

        start = self._least_device(1)[0]
        search = LocalSearch(
            RatedObjective(self.nominal, rate), self.search.surrogate, seed=evaluations
        )
        search.improve(start, evaluations, ended)
        reached = [*search.visited]
        if reached:
            measures = self.search.objective.score(reached).tolist()
            self._add(dict(zip(reached, measures, strict=True)))

    def _least_device(self, count: int) -> list[Assignment]:
        """The tied plans whose devices take least."""
        plans = [*self.tied]
        order = np.argsort(self._device_ms(plans), kind="stable")[:count]
        return [plans[i] for i in order]

    def _pool(self) -> list[Assignment]:
        """Tied plans of the least device time, the fastest among them."""
        pool = {self.fastest.assignment: None, **dict.fromkeys(self._least_device(self._most))}
        alike = {signature(plan): plan for plan in reversed(pool)}
        return [*reversed(alike.values())]

    def _best(self) -> Assignment:
        """The preferred one of the tied plans."""
        plans = self._pool()
        values = self._values(plans)
        kept = np.arange(len(plans))
        apart = _apart(values)
        for rule in RULES:
            kept = kept[values[rule][kept] <= values[rule][kept].min() + apart[rule]]
        return plans[min(kept.tolist(), key=lambda i: (self.tied[plans[i]], i))]

    def _values(self, plans: Sequence[Assignment]) -> dict[str, Array]:
        """What the rules compare, ``[plans]`` each."""
        regret = np.zeros(len(plans))
        if self.scenarios is not None and len(plans) > 1:
            times = self.scenarios.score(plans)
            regret = (times / times.min(axis=0)).max(axis=1) - 1
        shards = [float(sum(option.num_shards for option, _ in plan)) for plan in plans]
        found = self._device_ms(plans), regret, unevenness(self.nominal, plans), np.array(shards)
        return dict(zip(RULES, found, strict=True))

    def ties(self, chosen: Candidate) -> TieSummary:
        """What tied, and which rule decided between the chosen plan and the fastest one."""
        two = [chosen.assignment, self.fastest.assignment]
        values = self._values(two)
        decided = None
        if two[0] != two[1]:
            apart = _apart(values)
            decided = next((r for r in RULES if values[r][0] < values[r][1] - apart[r]), None)
        device_ms = self._device_ms([*self.tied])
        return TieSummary(
            plans=len({signature(plan) for plan in self.tied}),
            tolerance=TOLERANCE,
            host_bound=self._is_host_bound(two[0]),
            device_ms=float(values[RULES[0]][0]),
            device_range_ms=(float(device_ms.min()), float(device_ms.max())),
            decided_by=decided,
        )


def _apart(values: Mapping[str, Array]) -> dict[str, float]:
    """By how much plans that are alike by a rule may differ."""
    alike = ALIKE * float(values[RULES[0]].min()), ALIKE, UNEVEN, 0.0
    return dict(zip(RULES, alike, strict=True))


def unevenness(objective: Objective, plans: Sequence[Assignment]) -> Array:
    """By which share the fullest rank has more of its memory in use than the mean one,
    ``[plans]``; of the memory of which the plans use the larger share."""
    caps = objective.caps
    shares = np.array([objective.memory(plan) for plan in plans]) / np.where(caps > 0, caps, np.inf)
    kind = int(shares.mean(axis=(0, 2)).argmax())
    most, mean = shares[:, kind].max(axis=1), shares[:, kind].mean(axis=1)
    return np.asarray(most / np.where(mean > 0, mean, 1.0) - 1)


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
        tolerance: by which share plans that tie may be slower than the best.
    """

    aim: str
    scenarios: Sequence[Scenario]
    tolerance: float


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
    descent, late = _work(nominal, DESCENT, stop), stop.part(1.0)
    if wanted.aim == NOMINAL:
        scorer = ScenarioScorer(nominal, wanted.scenarios) if wanted.scenarios else None
        found, ties = prefer(search, nominal, ranked, limit_ms, scorer, descent, late)
        if scorer is None:
            return ChosenPlans(found, ties, ())
        pool = [c.assignment for c in [*found, *ranked]][:POOL]
        known = RatedPlans(scorer, [*pool, *_visited(search)[:POOL]])
        nothing = [0.0] * len(scorer.scenarios)
        return ChosenPlans(found, ties, scenario_times(known, found[0].assignment, nothing))
    as_given: tuple[list[Candidate], TieSummary | None]
    if in_use is None:
        draws = ScenarioScorer(nominal, draw_scenarios(nominal.problem))
        as_given = prefer(search, nominal, ranked, limit_ms, draws, descent, late)
    else:
        ranked = [rename_ranks(nominal, c) for c in ranked[:POOL]]
        pays = in_use.horizon is not None
        best = prefer_worthwhile(nominal, in_use, ranked[:IN_USE]) if pays else ranked
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
        found, ties = prefer(again, nominal, found, limit, scorer, descent, ended)
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
    return stop.work(round(default * min(1.0, LARGE / size)))


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

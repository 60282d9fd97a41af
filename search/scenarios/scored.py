"""Scored plans with their times in all scenarios, and searches that add more.

A plan's regret in a scenario is how much slower it is than the best plan of that scenario (Savage
1951). That plan is not known, but every plan that is scored in all scenarios may be it: those of
the search as given, those annealed in the few scenarios that order plans most unlike the others,
and what is put together from the best of these. The scenario's lower bound limits how far the best
known plan is from the optimum.

Why: docs/decisions/0030-choosing-among-plans.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from predictor.cost.errors import Z_90
from search.bound.lower_bound import LowerBound
from search.bound.relaxation import KnownHulls
from search.improve.annealing import Annealer, AnnealingTask
from search.objective import Assignment, Objective, apply
from search.params import SearchParams
from search.problem import MEAN, ScenarioTimes
from search.scenarios.scenario import ScenarioScorer
from search.surrogate import Surrogate

Array = NDArray[np.float64]

FEW = 6
"""Number of scenarios that get their own search."""
FRESH, SURE = 64, 0.95
"""Number of draws that compare a plan for all scenarios with one that is faster in the problem as
given, and the share of draws in which it must be better."""
STEPS = 20
"""Refinements of the bound of every scenario, then repeatedly of the loosest one."""


class RatedPlans:
    """Plans with their times in all scenarios.

    Args:
        scorer: of the scenarios.
        plans: at least one.
        added_ms: what a plan costs a step beside its time, as its share of a move does.

    Attributes:
        times: of the plans, with what is added, ``[plans, scenarios]`` in ms.
        best_ms: the least known time of every scenario, ``[scenarios]``.
    """

    def __init__(
        self,
        scorer: ScenarioScorer,
        plans: Iterable[Assignment],
        added_ms: Callable[[Assignment], float] = lambda plan: 0.0,
    ) -> None:
        self.scorer = scorer
        self.added_ms = added_ms
        self.plans: list[Assignment] = []
        self.best_ms = np.full(len(scorer.scenarios), np.inf)
        self.times = np.zeros((0, len(scorer.scenarios)))
        self.add(plans)

    def add(self, plans: Iterable[Assignment]) -> None:
        """Score plans that are not scored yet."""
        scored = {*self.plans}
        more = [plan for plan in dict.fromkeys(plans) if plan not in scored]
        if more:
            self.times = np.concatenate((self.times, self.score(more)))
            self.plans += more

    def score(self, plans: Sequence[Assignment]) -> Array:
        """Return the times of plans in ms, ``[plans, scenarios]``; update each scenario's least."""
        times = self.scorer.score(plans) + self._added(plans)[:, None]
        self.best_ms = np.minimum(self.best_ms, times.min(axis=0))
        return times

    def _added(self, plans: Sequence[Assignment]) -> Array:
        return np.array([self.added_ms(plan) for plan in plans])

    def best_of(self, scenario: int) -> Assignment:
        """Return the best known plan of one scenario."""
        return self.plans[int(self.times[:, scenario].argmin())]

    def measure(self, aim: str) -> Callable[[Array], Array]:
        """Return the measure that an aim minimises, a function of times ``[plans, scenarios]``: the
        mean in ms, or one plus the largest regret against the plans known by now."""
        if aim == MEAN:
            weights = self.scorer.weights
            return lambda times: np.asarray(times @ weights)
        best = self.best_ms
        return lambda times: np.asarray((times / best).max(axis=1))

    def is_better(self, plan: Assignment, other: Assignment, aim: str) -> bool:
        """Return True if a plan is better by an aim than another beyond the stated errors.

        Plans are chosen by a few draws, or by costs as predicted, and look best under these. So
        both are compared under draws that neither was chosen by, where regret is against the
        better one of the two (docs/decisions/0030-choosing-among-plans.md). A mean is better where
        the mean difference is beyond its own standard error; a regret in nearly all draws.
        """
        plans = [plan, other]
        times = self.scorer.score_again(plans, FRESH) + self._added(plans)[:, None, None]
        if aim == MEAN:
            plan_means, other_means = np.einsum("psd,s->pd", times, self.scorer.weights)
            gains = other_means - plan_means
            return bool(gains.mean() > Z_90 * gains.std(ddof=1) / np.sqrt(FRESH))
        plan_regrets, other_regrets = (times / times.min(axis=0)).max(axis=1)
        return bool((plan_regrets < other_regrets).mean() >= SURE)

    def improve(self, params: SearchParams, seed: int, stop: Callable[..., bool]) -> int:
        """Anneal in each of the scenarios most unlike the others; return the plans scored.

        Each run starts from the best known plan of its scenario.

        Args:
            stop: called after every round.
        """
        spent, topology = 0, self.scorer.scenarios[0].problem.topology
        rounds = round(params.part_of(len(self.plans[0]), topology.world_size) * params.rounds)
        for index in self._most_unlike():
            if stop():
                break
            own, start = self.scorer.objective(index), self.best_of(index)
            options = own.space.options
            task = AnnealingTask(start, options, params.tie_moves, rounds, seed)
            plans = Annealer(own, Surrogate(own), params).improve(task, stop)
            spent += own.evaluations
            self.add(plan for plan, _ in plans[:1])
        return spent

    def recombine(self, objective: Objective, aim: str, stop: Callable[..., bool]) -> None:
        """Give tables of the best plan by an aim, one at a time, the choice that the best plan of
        a scenario has for them, as long as that makes it better; add the plans on the way.

        Args:
            objective: tells which plans fit.
        """
        for _ in objective.space.options:
            best = self.plans[int(self.measure(aim)(self.times).argmin())]
            leaders = dict.fromkeys(map(self.best_of, range(len(self.best_ms))))
            choices = [dict.fromkeys(plan[table] for plan in leaders) for table in range(len(best))]
            changed = [
                apply(best, {table: choice})
                for table, offered in enumerate(choices)
                for choice in offered
                if choice != best[table]
            ]
            if not changed or stop():
                return
            measure, times = self.measure(aim), self.score(changed)
            ranked = np.argsort(measure(times), kind="stable").tolist()
            best_value = float(measure(self.times).min())
            gaining = (i for i in ranked if measure(times[[i]])[0] < best_value)
            plan = next((changed[i] for i in gaining if objective.fits(changed[i])), None)
            if plan is None:
                return
            self.add([plan])

    def _most_unlike(self) -> list[int]:
        """Return the scenarios that compare the known plans most unlike the average."""
        shares = self.times / self.best_ms
        apart = np.abs(shares - shares.mean(axis=1, keepdims=True)).mean(axis=0)
        return [int(index) for index in np.argsort(-apart, kind="stable")[:FEW]]

    def bounds(self, chosen: Assignment, steps: int, stop: Callable[..., bool]) -> Array:
        """Return a lower bound of every scenario in ms, ``[scenarios]``; 0 if time was up.

        Args:
            chosen: the known plan that they are compared with.
            steps: refinements beyond the first ones, of those that prove least.
        """
        ours = self.times[self.plans.index(chosen)]
        bounds_ms = np.zeros(len(ours))
        hulls: dict[int, KnownHulls] = {}
        bounds = []
        for index in range(len(ours)):
            own = self.scorer.objective(index)
            bounds.append(LowerBound(own.problem, own.space, own.scorer))
            if stop():
                continue
            # hulls leave out the errors of the costs, so scenarios with the same data share them
            mine = hulls.setdefault(id(own.problem.workload), bounds[-1].choices.hulls)
            bounds[-1].choices.hulls = mine
            bounds_ms[index] = bounds[-1].solve(STEPS, self.best_ms[index])
        for _ in range(steps // STEPS):
            worst = int((ours / np.maximum(bounds_ms, 1e-9)).argmax())
            if stop():
                break
            before = bounds_ms[worst]
            bounds_ms[worst] = bounds[worst].solve(STEPS, self.best_ms[worst])
            if bounds_ms[worst] <= before:
                break
        return bounds_ms


def scenario_times(
    rated: RatedPlans, chosen: Assignment, bounds: Sequence[float] | Array
) -> tuple[ScenarioTimes, ...]:
    """Return the times of a known plan in every scenario."""
    ours = rated.times[rated.plans.index(chosen)].tolist()
    best, scenarios = rated.best_ms.tolist(), rated.scorer.scenarios
    return tuple(
        ScenarioTimes(scenario.name, scenario.weight, mine, least, float(bound))
        for scenario, mine, least, bound in zip(scenarios, ours, best, bounds, strict=True)
    )

"""Plans that are known, with their times in all scenarios; and searches that add more.

A plan's regret in a scenario is how much slower it is than the best plan of that scenario (Savage
1951). That plan is not known, but every plan that is scored in all scenarios may be it: so the
plans of the search as given are scored in all, and a short local search in each scenario starts
from the best of them. How far the best known is from the best there is, the scenario's lower bound
says.

Why: docs/decisions/0064.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from search.bound.lower_bound import LowerBound
from search.improve.local_search import LocalSearch
from search.objective import Assignment, Objective
from search.problem import ScenarioTimes
from search.scenarios.rated import RatedObjective
from search.scenarios.scenario import ScenarioScorer
from search.surrogate import Surrogate

Array = NDArray[np.float64]

MEAN, REGRET = "mean", "regret"


class KnownPlans:
    """Plans with their times in all scenarios.

    Args:
        scorer: of the scenarios.
        plans: at least one.
    """

    def __init__(self, scorer: ScenarioScorer, plans: Iterable[Assignment]) -> None:
        self.scorer = scorer
        self.plans: list[Assignment] = []
        self.times = np.zeros((0, len(scorer.scenarios)))
        self.add(plans)

    def add(self, plans: Iterable[Assignment]) -> None:
        """Score plans that are not known yet."""
        known = {*self.plans}
        more = [plan for plan in dict.fromkeys(plans) if plan not in known]
        if more:
            self.times = np.concatenate((self.times, self.scorer.score(more)))
            self.plans += more

    @property
    def best_ms(self) -> Array:
        """The least known time of every scenario, ``[scenarios]``."""
        return np.asarray(self.times.min(axis=0))

    def best_of(self, scenario: int) -> Assignment:
        """The best known plan of one scenario."""
        return self.plans[int(self.times[:, scenario].argmin())]

    def measure(self, aim: str) -> Callable[[Array], Array]:
        """What an aim minimises, of times ``[plans, scenarios]``: the mean in ms, or one plus the
        largest regret against the plans that are known by now."""
        if aim == MEAN:
            weights = self.scorer.weights
            return lambda times: np.asarray(times @ weights)
        best = self.best_ms
        return lambda times: np.asarray((times / best).max(axis=1))

    def objective(self, nominal: Objective, aim: str) -> RatedObjective:
        """What a search for an aim minimises."""
        measure = self.measure(aim)
        return RatedObjective(nominal, lambda plans: measure(self.scorer.score(plans)))

    def improve(
        self, surrogate: Surrogate, evaluations: int, seed: int, stop: Callable[[], bool]
    ) -> int:
        """A local search in every scenario from its best known plan; returns the plans scored.

        Args:
            surrogate: of the problem as given; it only says which changes are worth trying.
            evaluations: plans to score in each scenario.
            stop: asked often.
        """
        spent = 0
        for index in range(len(self.scorer.scenarios)):
            if stop():
                break
            own = self.scorer.objective(index)
            search = LocalSearch(own, surrogate, seed)
            plan, _ = search.improve(self.best_of(index), evaluations, lambda _: stop())
            spent += own.evaluations
            self.add([plan])
        return spent

    def bounds(self, steps: int, stop: Callable[[], bool]) -> Array:
        """A lower bound of every scenario in ms, ``[scenarios]``; 0 where time was up.

        Args:
            steps: refinements of each.
        """
        found = np.zeros(len(self.scorer.scenarios))
        for index, best_ms in enumerate(self.best_ms.tolist()):
            if stop():
                break
            own = self.scorer.objective(index)
            bound = LowerBound(own.problem, own.space, own.scorer)
            found[index] = bound.solve(steps, best_ms, lambda _: stop())
        return found


def scenario_times(
    known: KnownPlans, chosen: Assignment, bounds: Sequence[float] | Array
) -> tuple[ScenarioTimes, ...]:
    """How a known plan does in every scenario."""
    ours = known.times[known.plans.index(chosen)].tolist()
    best, scenarios = known.best_ms.tolist(), known.scorer.scenarios
    return tuple(
        ScenarioTimes(one.name, one.weight, mine, least, float(bound))
        for one, mine, least, bound in zip(scenarios, ours, best, bounds, strict=True)
    )

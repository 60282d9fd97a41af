"""Plans that are known, with their times in all scenarios; and searches that add more.

A plan's regret in a scenario is how much slower it is than the best plan of that scenario (Savage
1951). That plan is not known, but every plan that is scored in all scenarios may be it: those of
the search as given, those of the search over scenarios, and those of a short local search in the
few scenarios that order plans most unlike the others. How far the best known is from the best there
is, the scenario's lower bound says.

Why: docs/decisions/0030-choosing-among-plans.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from search.bound.lower_bound import LowerBound
from search.bound.relaxation import KnownHulls
from search.improve.local_search import LocalSearch
from search.objective import Assignment, Objective, RatedObjective
from search.problem import MEAN, ScenarioTimes
from search.scenarios.scenario import ScenarioScorer
from search.surrogate import Surrogate

Array = NDArray[np.float64]

FEW = 6
"""Scenarios that are searched by themselves."""
FRESH, SURE = 64, 0.95
"""Draws by which a plan for all scenarios is told apart from one that is faster as given, and the
share of them in which it must be the better one."""
STEPS = 20
"""Refinements of the bound of every scenario, and then of the one that proves least, again and
again."""


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
        """Score plans that are not known yet."""
        known = {*self.plans}
        more = [plan for plan in dict.fromkeys(plans) if plan not in known]
        if more:
            self.times = np.concatenate((self.times, self.score(more)))
            self.plans += more

    def score(self, plans: Sequence[Assignment]) -> Array:
        """The times of plans, ``[plans, scenarios]``; remembers the least of every scenario."""
        times = self.scorer.score(plans) + self._added(plans)[:, None]
        self.best_ms = np.minimum(self.best_ms, times.min(axis=0))
        return times

    def _added(self, plans: Sequence[Assignment]) -> Array:
        return np.array([self.added_ms(plan) for plan in plans])

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

    def is_better(self, plan: Assignment, other: Assignment, aim: str) -> bool:
        """Whether the stated errors can tell that a plan is better by an aim than another.

        Plans are chosen by a few draws, or by costs as predicted, and look best under these. So
        both are compared under draws that neither was chosen by, where regret is against the
        better one of the two (docs/decisions/0030-choosing-among-plans.md).
        """
        plans = [plan, other]
        times = self.scorer.score_again(plans, FRESH) + self._added(plans)[:, None, None]
        if aim == MEAN:
            mine, others = np.einsum("psd,s->pd", times, self.scorer.weights)
        else:
            mine, others = (times / times.min(axis=0)).max(axis=1)
        return bool((mine < others).mean() >= SURE)

    def objective(self, nominal: Objective, aim: str) -> RatedObjective:
        """What a search for an aim minimises."""
        measure = self.measure(aim)
        return RatedObjective(nominal, lambda plans: measure(self.score(plans)))

    def improve(
        self, surrogate: Surrogate, evaluations: int, seed: int, stop: Callable[..., bool]
    ) -> int:
        """A local search in each of the scenarios most unlike the others, from its best known plan;
        returns the plans scored.

        Args:
            surrogate: of the problem as given; it only says which changes are worth trying.
            evaluations: plans to score in each.
            stop: asked often.
        """
        spent = 0
        for index in self._most_unlike():
            if stop():
                break
            own = self.scorer.objective(index)
            search = LocalSearch(own, surrogate, seed)
            plan, _ = search.improve(self.best_of(index), evaluations, stop)
            spent += own.evaluations
            self.add([plan])
        return spent

    def _most_unlike(self) -> list[int]:
        """The scenarios in which the known plans compare least as they do on average."""
        shares = self.times / self.best_ms
        apart = np.abs(shares - shares.mean(axis=1, keepdims=True)).mean(axis=0)
        return [int(index) for index in np.argsort(-apart, kind="stable")[:FEW]]

    def bounds(self, chosen: Assignment, steps: int, stop: Callable[..., bool]) -> Array:
        """A lower bound of every scenario in ms, ``[scenarios]``; 0 where time was up.

        Args:
            chosen: the known plan that they are compared with.
            steps: refinements beyond the first ones, of those that prove least.
        """
        ours = self.times[self.plans.index(chosen)]
        found = np.zeros(len(ours))
        hulls: dict[int, KnownHulls] = {}
        bounds = []
        for index in range(len(ours)):
            own = self.scorer.objective(index)
            bounds.append(LowerBound(own.problem, own.space, own.scorer))
            if stop():
                continue
            # errors of the costs are put on top of what hulls are of
            mine = hulls.setdefault(id(own.problem.workload), bounds[-1].choices.hulls)
            bounds[-1].choices.hulls = mine
            found[index] = bounds[-1].solve(STEPS, self.best_ms[index])
        for _ in range(steps // STEPS):
            worst = int((ours / np.maximum(found, 1e-9)).argmax())
            if stop():
                break
            before = found[worst]
            found[worst] = bounds[worst].solve(STEPS, self.best_ms[worst])
            if found[worst] <= before:
                break
        return found


def scenario_times(
    known: RatedPlans, chosen: Assignment, bounds: Sequence[float] | Array
) -> tuple[ScenarioTimes, ...]:
    """How a known plan does in every scenario."""
    ours = known.times[known.plans.index(chosen)].tolist()
    best, scenarios = known.best_ms.tolist(), known.scorer.scenarios
    return tuple(
        ScenarioTimes(one.name, one.weight, mine, least, float(bound))
        for one, mine, least, bound in zip(scenarios, ours, best, bounds, strict=True)
    )

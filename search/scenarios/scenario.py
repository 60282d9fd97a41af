"""Scenarios: costs within their stated errors, the data of another window.

A scenario is an ordinary problem with a name and a weight. So the bound of a scenario is proved,
and its best plan is searched, by the code that does so for the problem as given.

Why: docs/decisions/0030-choosing-among-plans.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from predictor.cost.errors import (
    CostErrors,
    GivenErrors,
    JoinedErrors,
    PickedError,
    StratifiedErrors,
    no_errors,
)
from predictor.model.workload import Workload
from search.objective import Assignment, Objective, TimesOfPlans
from search.problem import Problem, Scenario

Array = NDArray[np.float64]

DRAWS = 16
"""Default number of draws of the costs' errors."""
MOST = 256
"""Largest number of scenarios."""
SEED = 4
"""Seed of the draws; expected gains use other seeds."""
AGAIN = 1000
"""Seed of the draws that choose no plan; every scenario has its own seed from here on."""


@dataclass(frozen=True)
class GivenFactors:
    """Scenario as a file gives it.

    Args:
        weight: > 0.
        factors: profile group -> factor on its times, > 0.
    """

    name: str
    weight: float
    factors: Mapping[str, float]


def draw_scenarios(problem: Problem, count: int = DRAWS, seed: int = SEED) -> list[Scenario]:
    """Draw scenarios of equal weight from the errors that the profile states.

    Costs of one group have one error in common; besides, every kernel, and every table's lookups,
    have their own (`predictor.cost.errors`).

    Args:
        count: at least 1; of odd numbers the last pair of signs is incomplete.
        seed: of all draws, >= 0.
    """
    errors = problem.draw_errors(count + count % 2, seed, StratifiedErrors)
    return [
        Scenario(f"draw {i + 1}", 1 / count, replace(problem, errors=PickedError(errors, i)))
        for i in range(count)
    ]


def window_scenarios(problem: Problem, windows: Mapping[str, Workload]) -> list[Scenario]:
    """Return a scenario of equal weight for the data of each window, with costs as predicted.

    Args:
        windows: name -> the workload with that window's data; same tables and features.
    """
    return [
        Scenario(name, 1 / len(windows), _in_window(problem, workload))
        for name, workload in windows.items()
    ]


def _in_window(problem: Problem, workload: Workload) -> Problem:
    return (
        problem if workload == problem.workload else replace(problem, workload=workload, loads=None)
    )


def given_scenarios(problem: Problem, scenarios: Sequence[GivenFactors]) -> list[Scenario]:
    """Return the scenarios of a file: the costs of each group times its factor."""
    return [
        Scenario(
            scenario.name, scenario.weight, replace(problem, errors=GivenErrors(scenario.factors))
        )
        for scenario in scenarios
    ]


def join_scenarios(*sets: Sequence[Scenario]) -> tuple[Scenario, ...]:
    """Join several sets; each set weighs as much as its share of the scenarios."""
    count = sum(map(len, sets))
    return tuple(
        replace(scenario, weight=scenario.weight * len(scenarios) / count)
        for scenarios in sets
        for scenario in scenarios
    )


class ScenarioScorer:
    """Scorer of plans under all scenarios, in one pass for each window of data.

    Args:
        objective: of the problem as given; numbers its plans.
    """

    def __init__(self, objective: Objective, scenarios: Iterable[Scenario]) -> None:
        self.scenarios = tuple(scenarios)
        by_data: dict[int, list[int]] = {}
        for i, scenario in enumerate(self.scenarios):
            by_data.setdefault(id(scenario.problem.workload), []).append(i)
        self._passes = [(mine, *self._pass(objective, mine)) for mine in by_data.values()]

    def _pass(self, objective: Objective, mine: Sequence[int]) -> tuple[Objective, TimesOfPlans]:
        """Return the objective for plans with the data of some scenarios, and their times."""
        problem = replace(self.scenarios[mine[0]].problem, errors=None)
        errors = JoinedErrors(self.scenarios[i].problem.errors or no_errors() for i in mine)
        if problem.workload != objective.problem.workload:
            objective = Objective(problem, objective.space)
        return objective, objective.under(errors)

    def objective(self, index: int) -> Objective:
        """Return the objective of one scenario; it shares the loads of shards with the others."""
        for mine, numbered, _ in self._passes:
            if index in mine:
                loads = numbered.scorer.shards.without_errors
                problem = replace(self.scenarios[index].problem, loads=loads)
                return Objective(problem, numbered.space)
        raise IndexError(index)

    @property
    def weights(self) -> Array:
        """Weights of the scenarios, ``[scenarios]``."""
        return np.array([scenario.weight for scenario in self.scenarios])

    def score(self, assignments: Sequence[Assignment]) -> Array:
        """Return the predicted iteration times in ms, ``[plans, scenarios]``."""
        times = np.zeros((len(assignments), len(self.scenarios)))
        for mine, _, times_of in self._passes:
            times[:, mine] = times_of(assignments)
        return times

    def score_again(self, assignments: Sequence[Assignment], count: int) -> Array:
        """Return times in ms under errors that chose no plan, ``[plans, scenarios, count]``.

        A scenario that is a draw becomes ``count`` other draws. Scenarios with costs as predicted
        differ only in their data, so they share ``count`` draws. Factors from a file stay.
        """
        times = np.zeros((len(assignments), len(self.scenarios), count))
        for mine, objective, _ in self._passes:
            problem = objective.problem
            errors = JoinedErrors(self._again(problem, index, count) for index in mine)
            times[:, mine] = objective.under(errors)(assignments).reshape(
                len(assignments), len(mine), count
            )
        return times

    def _again(self, problem: Problem, index: int, count: int) -> CostErrors:
        errors = self.scenarios[index].problem.errors
        if errors is None:
            return problem.draw_errors(count, AGAIN)
        if isinstance(errors, PickedError):
            return problem.draw_errors(count, AGAIN + 1 + index)
        return JoinedErrors([errors] * count)

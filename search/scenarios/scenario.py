"""What else could be true: the costs within their stated errors, the data of another window.

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
from predictor.iteration.perturbed import PerturbedScorer
from predictor.model.workload import Workload
from search.objective import Assignment, Objective
from search.problem import Problem, Scenario

Array = NDArray[np.float64]

DRAWS = 16
"""Draws of the costs' errors unless somebody says otherwise."""
MOST = 256
"""Scenarios, at most."""
SEED = 4
"""Of the draws; expected gains use others."""
AGAIN = 1000
"""Of draws that no plan was chosen by; every scenario has one of its own from here on."""


@dataclass(frozen=True)
class GivenFactors:
    """A scenario as a file gives it.

    Args:
        weight: > 0.
        factors: profile group -> what its times are multiplied by, > 0.
    """

    name: str
    weight: float
    factors: Mapping[str, float]


def draw_scenarios(problem: Problem, count: int = DRAWS, seed: int = SEED) -> list[Scenario]:
    """Draws of the errors that the profile states, of equal weight.

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
    """The data of some windows, with costs as predicted, of equal weight.

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


def given_scenarios(problem: Problem, given: Sequence[GivenFactors]) -> list[Scenario]:
    """Costs multiplied as given, group by group."""
    return [
        Scenario(one.name, one.weight, replace(problem, errors=GivenErrors(one.factors)))
        for one in given
    ]


def join_scenarios(*sets: Sequence[Scenario]) -> tuple[Scenario, ...]:
    """Several sets as one, each with the weight that its share of the scenarios has."""
    count = sum(map(len, sets))
    return tuple(
        replace(one, weight=one.weight * len(some) / count) for some in sets for one in some
    )


class ScenarioScorer:
    """Scores plans under all scenarios in one pass for each window of data.

    Args:
        objective: of the problem as given; numbers its plans.
    """

    def __init__(self, objective: Objective, scenarios: Iterable[Scenario]) -> None:
        self.scenarios = tuple(scenarios)
        by_data: dict[int, list[int]] = {}
        for i, one in enumerate(self.scenarios):
            by_data.setdefault(id(one.problem.workload), []).append(i)
        self._passes = [(mine, *self._pass(objective, mine)) for mine in by_data.values()]

    def _pass(self, objective: Objective, mine: Sequence[int]) -> tuple[Objective, PerturbedScorer]:
        """What numbers plans with the data of some scenarios, and what scores these."""
        problem = replace(self.scenarios[mine[0]].problem, errors=None)
        errors = JoinedErrors(self.scenarios[i].problem.errors or no_errors() for i in mine)
        if problem.workload != objective.problem.workload:
            objective = Objective(problem, objective.space)
        return objective, problem.perturbed(objective.scorer, errors)

    def objective(self, index: int) -> Objective:
        """What predicts plans in one scenario; it shares the loads of shards with the others."""
        for mine, numbered, _ in self._passes:
            if index in mine:
                loads = numbered.scorer.shards.without_errors
                problem = replace(self.scenarios[index].problem, loads=loads)
                return Objective(problem, numbered.space)
        raise IndexError(index)

    @property
    def weights(self) -> Array:
        """Of the scenarios, ``[scenarios]``."""
        return np.array([one.weight for one in self.scenarios])

    def score(self, assignments: Sequence[Assignment]) -> Array:
        """Predicted iteration time in ms, ``[plans, scenarios]``."""
        times = np.zeros((len(assignments), len(self.scenarios)))
        for mine, objective, scorer in self._passes:
            numbers = np.array([objective.numbers(a) for a in assignments])
            times[:, mine] = scorer.score_numbered(numbers)
        return times

    def score_again(self, assignments: Sequence[Assignment], count: int) -> Array:
        """The same under errors that no plan was chosen by, ``[plans, scenarios, count]``.

        A scenario that is a draw becomes other draws. One whose costs are as predicted gets so many
        draws, which all such scenarios share: these differ in their data alone. Given factors stay.
        """
        times = np.zeros((len(assignments), len(self.scenarios), count))
        for mine, objective, _ in self._passes:
            problem = objective.problem
            errors = JoinedErrors(self._again(problem, index, count) for index in mine)
            numbers = np.array([objective.numbers(a) for a in assignments])
            found = problem.perturbed(objective.scorer, errors).score_numbered(numbers)
            times[:, mine] = found.reshape(len(assignments), len(mine), count)
        return times

    def _again(self, problem: Problem, index: int, count: int) -> CostErrors:
        errors = self.scenarios[index].problem.errors
        if errors is None:
            return problem.draw_errors(count, AGAIN)
        if isinstance(errors, PickedError):
            return problem.draw_errors(count, AGAIN + 1 + index)
        return JoinedErrors([errors] * count)

"""Plans under draws of the costs' errors, held against profiles that have these errors."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.cost.errors import CostErrors, ErrorSize, PickedError, StratifiedErrors, known_errors
from predictor.iteration.perturbed import PerturbedScorer
from search.objective import Objective
from search.problem import Problem
from search.space.enumerate import reduced_space
from tests.quick import quick_first
from tests.search.problems import (
    CPU,
    H100,
    a_problem,
    a_table,
    a_workload,
    hosts,
    random_plan,
    random_problem,
)

NONE = ErrorSize(0.0, 0.0)


def some_plans(problem: Problem, seed: int, count: int = 5) -> tuple[Objective, np.ndarray]:
    objective, rng = Objective(problem, reduced_space(problem)), random.Random(seed)
    plans = [random_plan(objective, rng) for _ in range(count)]
    return objective, np.array([objective.numbers(plan) for plan in plans])


def no_errors(problem: Problem) -> dict[str, ErrorSize]:
    return dict.fromkeys(known_errors(problem.hardware, problem.topology), NONE)


@pytest.mark.parametrize("seed", range(4))
def test_without_errors_every_draw_is_the_prediction(seed: int) -> None:
    problem = random_problem(seed)
    objective, plans = some_plans(problem, seed)
    perturbed = PerturbedScorer(objective.scorer, CostErrors(no_errors(problem), 4, seed))
    expected = objective.scorer.score_numbered(plans)
    assert perturbed.score_numbered(plans) == pytest.approx(np.tile(expected, (4, 1)).T, rel=1e-9)


def test_one_error_for_everything_scales_the_iteration() -> None:
    """With the same factor on all costs, host and device, an iteration takes so much longer."""
    problem = a_problem(a_workload(*(a_table(f"t{i}") for i in range(4))), hosts(2))
    objective, plans = some_plans(problem, 0)

    class Same(CostErrors):
        def _normal(self, name: str) -> np.ndarray:
            return np.array([1.0, -1.0])

    sizes = dict.fromkeys(no_errors(problem), ErrorSize(0.3, 0.0))
    times = PerturbedScorer(objective.scorer, Same(sizes, 2, 0)).score_numbered(plans)
    nominal = objective.scorer.score_numbered(plans)
    assert times == pytest.approx(np.outer(nominal, np.exp([0.3, -0.3])), rel=1e-9)


class BoundedErrors(CostErrors):
    """Errors of at most one standard deviation."""

    def _normal(self, name: str) -> np.ndarray:
        return np.clip(super()._normal(name), -1.0, 1.0)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 3), st.integers(0, 10**6), st.floats(0, 0.4), st.floats(0, 0.2))
def test_an_iteration_changes_by_no_more_than_its_costs(
    problem_seed: int, seed: int, shared: float, own: float
) -> None:
    """Every cost within a factor: so is the iteration, as no cost ever shortens it."""
    problem = a_problem(
        a_workload(*(a_table(f"t{i}", dim=16 << i) for i in range(4))),
        hosts(2),
        CPU if problem_seed % 2 else H100,
    )
    objective, plans = some_plans(problem, problem_seed, count=2)
    sizes = dict.fromkeys(no_errors(problem), ErrorSize(shared, own))
    times = PerturbedScorer(objective.scorer, BoundedErrors(sizes, 4, seed)).score_numbered(plans)
    nominal = objective.scorer.score_numbered(plans)[:, None]
    most = np.exp(shared + np.sqrt(2) * own)
    assert (times <= nominal * most * (1 + 1e-6)).all()
    assert (times >= nominal / most * (1 - 1e-6)).all()


@pytest.mark.parametrize("seed", quick_first(1, range(4)))
def test_a_draw_is_a_problem_of_its_own(seed: int) -> None:
    """A problem with one draw's errors predicts what the pass over all draws does."""
    problem = random_problem(seed)
    objective, plans = some_plans(problem, seed)
    sizes = known_errors(problem.hardware, problem.topology)
    errors = StratifiedErrors(sizes, 4, seed)
    times = PerturbedScorer(objective.scorer, errors).score_numbered(plans)
    for draw in range(4):
        drawn = replace(problem, errors=PickedError(errors, draw))
        again, same = some_plans(drawn, seed)
        assert again.scorer.score_numbered(same) == pytest.approx(times[:, draw], rel=1e-9)

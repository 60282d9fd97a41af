"""Plans told apart: only what errors that nobody chose by agree with is better."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from search.objective import Objective
from search.problem import MEAN, REGRET, Problem
from search.scenarios.scenario import (
    GivenFactors,
    ScenarioScorer,
    draw_scenarios,
    given_scenarios,
    join_scenarios,
    window_scenarios,
)
from search.scenarios.scored import RatedPlans
from search.space.enumerate import whole_space
from tests.search.problems import random_plan, several_lookups

COUNT = 6


def other_week(problem: Problem) -> Problem:
    """The first table has ten times the ids, the others have half."""
    tables = []
    for at, table in enumerate(problem.workload.tables):
        (feature,) = table.features
        ids = feature.pooling_factor * (10 if at == 0 else 0.5)
        tables.append(replace(table, features=(replace(feature, pooling_factor=ids),)))
    return replace(problem, workload=replace(problem.workload, tables=tuple(tables)))


def test_what_is_as_predicted_shares_draws_and_draws_are_drawn_anew() -> None:
    problem = several_lookups(1, tables=4)
    objective = Objective(problem, whole_space(problem))
    plans = [random_plan(objective, random.Random(seed)) for seed in range(3)]
    scenarios = join_scenarios(
        window_scenarios(problem, {"a": problem.workload, "b": problem.workload}),
        draw_scenarios(problem, 2),
        given_scenarios(problem, [GivenFactors("slow host", 1.0, {"overheads": 3.0})]),
    )
    scorer = ScenarioScorer(objective, scenarios)
    before, again = scorer.score(plans), scorer.score_again(plans, COUNT)
    assert again.shape == (3, 5, COUNT)
    assert again[:, 0] == pytest.approx(again[:, 1])
    assert len(np.unique(again[0, 0])) == COUNT
    assert np.abs(again[:, 2:4] / before[:, 2:4, None] - 1).max(axis=(0, 2)).min() > 1e-3
    assert again[:, 4] == pytest.approx(np.repeat(before[:, 4:], COUNT, axis=1))


@pytest.mark.parametrize("aim", [MEAN, REGRET])
def test_a_plan_is_better_where_the_data_differ_more_than_costs_may(aim: str) -> None:
    problem = several_lookups(1, tables=4)
    week = other_week(problem)
    objective = Objective(problem, whole_space(problem))
    scenarios = window_scenarios(problem, {"mon": problem.workload, "tue": week.workload})
    known = RatedPlans(ScenarioScorer(objective, scenarios), [])
    known.add(random_plan(objective, random.Random(seed)) for seed in range(40))
    order = known.measure(aim)(known.times).argsort()
    best, second, worst = (known.plans[int(order[at])] for at in (0, 1, -1))
    assert known.is_better(best, worst, aim)
    assert not known.is_better(worst, best, aim)
    assert not known.is_better(best, best, aim)
    dear = RatedPlans(known.scorer, known.plans, lambda plan: 1e6 * (plan != worst))
    assert not dear.is_better(best, worst, aim), "its move costs more than it gains"
    assert not (known.is_better(best, second, aim) and known.is_better(second, best, aim))


@pytest.mark.parametrize("aim", [MEAN, REGRET])
def test_tables_take_what_the_best_plans_of_scenarios_have_for_them(aim: str) -> None:
    problem = several_lookups(1, tables=4)
    objective = Objective(problem, whole_space(problem))
    windows = {"mon": problem.workload, "tue": other_week(problem).workload}
    scorer = ScenarioScorer(objective, window_scenarios(problem, windows))
    gains = []
    for seed in range(60):
        rng = random.Random(seed)
        known = RatedPlans(scorer, [random_plan(objective, rng) for _ in range(2)])
        choices = [{plan[table] for plan in known.plans} for table in range(4)]
        known.recombine(objective, aim, lambda: False)
        values = known.measure(aim)(known.times)
        gains.append(values[:2].min() - values.min())
        for plan in known.plans[2:]:
            assert objective.fits(plan)
            assert all(choice in offered for choice, offered in zip(plan, choices, strict=True))
    assert max(gains) > 0

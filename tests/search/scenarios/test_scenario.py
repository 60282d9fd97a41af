"""Scenarios are ordinary problems, scored in one pass."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from predictor.cost.errors import no_errors
from predictor.model.distribution import Uniform
from search.bound.lower_bound import LowerBound
from search.objective import Objective
from search.problem import Problem
from search.scenarios.scenario import (
    GivenFactors,
    Scenario,
    ScenarioScorer,
    draw_scenarios,
    given_scenarios,
    join_scenarios,
    window_scenarios,
)
from search.space.enumerate import whole_space
from tests.quick import quick_only
from tests.search.problems import CPU, hosts, random_plan, random_problem


def other_window(problem: Problem) -> Problem:
    """The same tables with other data."""
    tables = [
        replace(
            table,
            features=tuple(
                replace(f, pooling_factor=20 * f.pooling_factor, distribution=Uniform())
                for f in table.features
            ),
        )
        for table in problem.workload.tables
    ]
    return replace(problem, workload=replace(problem.workload, tables=tuple(tables)))


def some_scenarios(problem: Problem) -> tuple[Scenario, ...]:
    windows = {"mon": problem.workload, "tue": other_window(problem).workload}
    slow = [GivenFactors("slow host", 0.4, {"overheads": 3.0}), GivenFactors("as is", 0.6, {})]
    return join_scenarios(
        window_scenarios(problem, windows),
        draw_scenarios(problem, 2),
        given_scenarios(problem, slow),
    )


@pytest.mark.parametrize("seed", quick_only((1,), range(6)))
def test_one_pass_scores_what_each_scenarios_own_problem_does(seed: int) -> None:
    problem = random_problem(seed, tables=4)
    objective, rng = Objective(problem, whole_space(problem)), random.Random(seed)
    plans = [random_plan(objective, rng) for _ in range(20)]
    scenarios = some_scenarios(problem)
    assert sum(scenario.weight for scenario in scenarios) == pytest.approx(1)
    times = ScenarioScorer(objective, scenarios).score(plans)
    for scenario, scores in zip(scenarios, times.T, strict=True):
        assert Objective(scenario.problem, objective.space).score(plans) == pytest.approx(scores)
    nominal = objective.score(plans)
    assert times[:, 0] == pytest.approx(nominal) == times[:, -1]
    assert (times[:, 1] >= times[:, 0] * (1 - 1e-9)).all()
    assert (times[:, -2] >= nominal * (1 - 1e-9)).all()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_no_plan_is_below_the_bound_of_its_scenario(seed: int) -> None:
    problem = random_problem(seed, tables=3)
    objective, rng = Objective(problem, whole_space(problem)), random.Random(seed)
    plans = [random_plan(objective, rng) for _ in range(100)]
    scenarios = some_scenarios(problem)
    times = ScenarioScorer(objective, scenarios).score(plans)
    for scenario, scores in zip(scenarios, times.T, strict=True):
        own = Objective(scenario.problem, objective.space)
        bound = LowerBound(scenario.problem, own.space, own.scorer).solve(60)
        assert 0 < bound <= scores.min() * (1 + 1e-9), scenario.name


def test_draws_cover_every_group_evenly() -> None:
    problem = Problem(random_problem(0).workload, hosts(2), CPU)
    drawn = [scenario.problem.errors for scenario in draw_scenarios(problem)]
    for group, size in (("gemm", CPU.gemm.rel_error), ("overheads", CPU.overheads.rel_error)):
        logs = np.sort([float(np.log(e.shared(group)[0])) for e in drawn if e is not None])
        assert len(logs) == 16
        assert logs == pytest.approx(-logs[::-1])
        assert logs.std() == pytest.approx(size, rel=0.1)
        assert len({round(x, 9) for x in logs.tolist()}) == 16


def test_a_factor_on_a_link_reaches_its_collectives_alone() -> None:
    problem = random_problem(0)
    names = ("collectives.intra", "collectives.inter", "collectives", "gemm")
    scenarios = given_scenarios(problem, [GivenFactors(n, 0.25, {n: 2.0}) for n in names])
    intra, inter, both, unscaled = (
        scenario.problem.errors or no_errors() for scenario in scenarios
    )
    for errors, link, factor in (
        (intra, "collectives.intra", 2.0),
        (intra, "collectives.inter", 1.0),
        (inter, "collectives.inter", 2.0),
        (both, "collectives.intra", 2.0),
        (unscaled, "collectives.inter", 1.0),
    ):
        assert errors.op("collectives", "x", link) == factor

"""The mean and the largest regret over scenarios are no worse than those of the fastest plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from predictor.errors import InputError
from search.in_use.moves import moved_tables
from search.problem import PlanInUse, Result
from search.scenarios.scenario import (
    GivenFactors,
    draw_scenarios,
    given_scenarios,
    window_scenarios,
)
from search.solve import solve
from search.stop import Stop
from tests.quick import quick_first
from tests.search.problems import large_tables, several_lookups, some_plan

QUICK = 0.002


def mean_ms(result: Result) -> float:
    return sum(one.weight * one.ours_ms for one in result.scenarios)


@pytest.mark.parametrize("aim", quick_first(1, ["regret", "mean"]))
def test_an_aim_is_reached_and_its_regret_is_proved(aim: str) -> None:
    problem = several_lookups(1, 6)
    others = [
        *draw_scenarios(problem, 2),
        *given_scenarios(problem, [GivenFactors("fast host", 0.5, {"overheads": 0.1})]),
    ]
    nominal = solve(replace(problem, scenarios=tuple(others)), Stop(effort=QUICK), 0)
    result = solve(replace(problem, aim=aim, scenarios=tuple(others)), Stop(effort=QUICK), 0)
    assert result.aim == aim
    assert [one.name for one in result.scenarios] == [one.name for one in others]
    assert all(0 < one.bound_ms <= one.best_ms * (1 + 1e-9) for one in result.scenarios)
    assert all(one.best_ms <= one.ours_ms * (1 + 1e-9) for one in result.scenarios)
    assert result.worst_regret is not None
    assert result.proved_regret is not None
    assert result.worst_regret <= result.proved_regret
    assert all(one.bound_ms == 0 for one in nominal.scenarios)
    if aim == "mean":
        assert mean_ms(result) <= mean_ms(nominal) * 1.02 * (1 + 1e-9)
    else:
        best = [one.best_ms for one in result.scenarios]
        before = max(one.ours_ms / ms - 1 for one, ms in zip(nominal.scenarios, best, strict=True))
        assert result.worst_regret <= (1 + before) * 1.02 - 1 + 1e-9


@pytest.mark.slow
def test_moving_must_pay_in_the_scenarios_too() -> None:
    """Over one step nothing pays for a move; where moves count nothing, tables go elsewhere."""
    problem = large_tables(0)
    windows = window_scenarios(problem, {"mon": problem.workload, "tue": problem.workload})
    plan = some_plan(problem, 0)
    short, free = (
        solve(
            replace(
                problem,
                aim="regret",
                scenarios=tuple(windows),
                in_use=PlanInUse(plan, horizon=horizon),
            ),
            Stop(effort=QUICK),
            0,
        )
        for horizon in (1, None)
    )
    assert moved_tables(plan, short.best.plan) == []
    assert moved_tables(plan, free.best.plan)
    assert short.worst_regret == 0
    assert short.in_use is not None
    assert short.best.iteration_ms == pytest.approx(short.in_use.iteration_ms)
    assert free.best.iteration_ms < short.best.iteration_ms


@pytest.mark.slow
def test_what_errors_cannot_tell_apart_stays_as_it_is() -> None:
    """Windows that hardly differ give no reason to leave the plan of the nominal time."""
    problem = several_lookups(1, 6)
    (first, *others) = problem.workload.tables
    (feature,) = first.features
    more = replace(feature, pooling_factor=1.02 * feature.pooling_factor)
    tables = replace(first, features=(more,)), *others
    later = replace(problem.workload, tables=tables)
    windows = window_scenarios(problem, {"mon": problem.workload, "tue": later})
    nominal = solve(problem, Stop(effort=QUICK), 0)
    result = solve(replace(problem, aim="regret", scenarios=tuple(windows)), Stop(effort=QUICK), 0)
    assert result.best.plan == nominal.best.plan
    assert result.passed_over is None or result.worst_regret is not None


def test_an_aim_needs_scenarios() -> None:
    problem = several_lookups(1, 6)
    with pytest.raises(InputError, match="there is none; give two or more"):
        solve(replace(problem, aim="regret", scenarios=()), Stop(effort=QUICK), 0)
    with pytest.raises(InputError, match="it is one of nominal, mean, regret"):
        solve(replace(problem, aim="best"), Stop(effort=QUICK), 0)

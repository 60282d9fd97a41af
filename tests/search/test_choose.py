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
    return sum(s.weight * s.ours_ms for s in result.scenarios)


@pytest.mark.parametrize("aim", quick_first(1, ["regret", "mean"]))
def test_an_aim_is_reached_and_its_regret_is_proved(aim: str) -> None:
    problem = several_lookups(1, 6)
    factors = [
        *draw_scenarios(problem, 2),
        *given_scenarios(problem, [GivenFactors("fast host", 0.5, {"overheads": 0.1})]),
    ]
    nominal = solve(replace(problem, scenarios=tuple(factors)), Stop(effort=QUICK), 0)
    result = solve(replace(problem, aim=aim, scenarios=tuple(factors)), Stop(effort=QUICK), 0)
    assert result.aim == aim
    assert [s.name for s in result.scenarios] == [s.name for s in factors]
    assert all(0 < s.bound_ms <= s.best_ms * (1 + 1e-9) for s in result.scenarios)
    assert all(s.best_ms <= s.ours_ms * (1 + 1e-9) for s in result.scenarios)
    assert result.worst_regret is not None
    assert result.proved_regret is not None
    assert result.worst_regret <= result.proved_regret
    assert all(s.bound_ms == 0 for s in nominal.scenarios)
    if aim == "mean":
        assert mean_ms(result) <= mean_ms(nominal) * 1.02 * (1 + 1e-9)
    else:
        best = [s.best_ms for s in result.scenarios]
        before = max(s.ours_ms / ms - 1 for s, ms in zip(nominal.scenarios, best, strict=True))
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
    (first, *rest) = problem.workload.tables
    (feature,) = first.features
    more = replace(feature, pooling_factor=1.02 * feature.pooling_factor)
    tables = replace(first, features=(more,)), *rest
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

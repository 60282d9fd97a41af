"""The mean and the largest regret over scenarios are no worse than those of the fastest plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from predictor.errors import InputError
from predictor.predict import predict
from search.candidate import Candidate
from search.choose import ALIKE, TOLERANCE, prefer, unevenness
from search.improve.local_search import LocalSearch
from search.in_use.moves import moved_tables
from search.in_use.plan import PlanInUse
from search.objective import Assignment, Objective
from search.problem import Problem, Result
from search.scenarios.scenario import (
    GivenFactors,
    ScenarioScorer,
    draw_scenarios,
    given_scenarios,
    window_scenarios,
)
from search.solve import solve
from search.stop import Stop
from tests.quick import quick_first, quick_only
from tests.search.problems import (
    CPU,
    H100,
    a_problem,
    a_table,
    a_workload,
    hosts,
    large_tables,
    objective_of,
    random_problem,
    several_lookups,
    some_plan,
)

QUICK = 0.01


def mean_ms(result: Result) -> float:
    return sum(one.weight * one.ours_ms for one in result.scenarios)


@pytest.mark.parametrize("aim", quick_first(1, ["regret", "mean"]))
def test_an_aim_is_reached_and_its_regret_is_proved(aim: str) -> None:
    problem = several_lookups(1, 6)
    others = [
        *draw_scenarios(problem, 2),
        *given_scenarios(problem, [GivenFactors("fast host", 0.5, {"overheads": 0.1})]),
    ]
    nominal = solve(problem, Stop(effort=QUICK), 0, scenarios=others)
    result = solve(problem, Stop(effort=QUICK), 0, aim=aim, scenarios=others)
    assert result.aim == aim
    assert [one.name for one in result.scenarios] == [one.name for one in others]
    assert all(0 < one.bound_ms <= one.best_ms * (1 + 1e-9) for one in result.scenarios)
    assert all(one.best_ms <= one.ours_ms * (1 + 1e-9) for one in result.scenarios)
    assert result.worst_regret is not None
    assert result.proved_regret is not None
    assert result.worst_regret <= result.proved_regret
    assert all(one.bound_ms == 0 for one in nominal.scenarios)
    if aim == "mean":
        assert mean_ms(result) <= mean_ms(nominal) * 1.005 * (1 + 1e-9)
    else:
        best = [one.best_ms for one in result.scenarios]
        before = max(one.ours_ms / ms - 1 for one, ms in zip(nominal.scenarios, best, strict=True))
        assert result.worst_regret <= (1 + before) * 1.005 - 1 + 1e-9


def test_moving_must_pay_in_the_scenarios_too() -> None:
    """Over one step nothing pays for a move; where moves count nothing, tables go elsewhere."""
    problem = large_tables(0)
    windows = window_scenarios(problem, {"mon": problem.workload, "tue": problem.workload})
    plan = some_plan(problem, 0)
    short, free = (
        solve(
            problem,
            Stop(effort=QUICK),
            0,
            aim="regret",
            scenarios=windows,
            in_use=PlanInUse(plan, horizon=horizon),
        )
        for horizon in (1, None)
    )
    assert moved_tables(plan, short.best.plan) == []
    assert moved_tables(plan, free.best.plan)
    assert short.worst_regret == 0
    assert short.in_use is not None
    assert short.best.iteration_ms == pytest.approx(short.in_use.iteration_ms)
    assert free.best.iteration_ms < short.best.iteration_ms


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
    result = solve(problem, Stop(effort=QUICK), 0, aim="regret", scenarios=windows)
    assert result.best.plan == nominal.best.plan
    assert result.passed_over is None or result.worst_regret is not None


def test_an_aim_needs_scenarios() -> None:
    problem = several_lookups(1, 6)
    with pytest.raises(InputError, match="there is none; give two or more"):
        solve(problem, Stop(effort=QUICK), 0, aim="regret", scenarios=[])
    with pytest.raises(InputError, match="it is one of nominal, mean, regret"):
        solve(problem, Stop(effort=QUICK), 0, aim="best")


QUICK_PREFER = 0.02


def slow_host(problem: Problem) -> Problem:
    """The same ranks with a host that sets the pace whatever the plan."""
    cost = problem.hardware.overheads
    slow = {n: 5 * v for n, v in cost if n.endswith("_us") and isinstance(v, float)}
    hardware = problem.hardware.model_copy(update={"overheads": cost.model_copy(update=slow)})
    return replace(problem, hardware=hardware)


@pytest.mark.parametrize("seed", quick_only((8,), range(10)))
def test_it_is_about_as_fast_and_no_baseline_is_faster(seed: int) -> None:
    problem = random_problem(seed, tables=4)
    fastest = solve(problem, Stop(effort=QUICK_PREFER), 0, tolerance=0.0)
    result = solve(problem, Stop(effort=QUICK_PREFER), 0)
    assert fastest.fastest is None
    assert fastest.ties is None
    assert result.ties is not None
    assert result.best.iteration_ms <= fastest.best.iteration_ms * (1 + TOLERANCE) * (1 + 1e-9)
    assert result.lower_bound_ms <= result.best.iteration_ms * (1 + 1e-9)
    assert result.best.iteration_ms <= min(result.baselines.values()) * (1 + 1e-9)
    times = [p.iteration_ms for p in result.plans]
    assert times[0] <= min(times) * (1 + 1e-6)
    if result.fastest is not None:
        assert result.fastest.iteration_ms == pytest.approx(fastest.best.iteration_ms)
        assert result.fastest.iteration_ms < result.best.iteration_ms
    again = predict(problem.workload, problem.topology, problem.hardware, result.best.plan)
    assert again.iteration_ms == pytest.approx(result.best.iteration_ms, rel=1e-9)


@pytest.mark.parametrize("ranks", quick_only((4,), (4, 16)))
def test_where_the_host_sets_the_pace_the_devices_have_least_to_do(ranks: int) -> None:
    """The chosen plan's devices take no more than those of a search for devices alone."""
    tables = [a_table(f"t{i}", 20_000_000, 64, 5.0 * (1 + i % 4)) for i in range(8)]
    problem = slow_host(a_problem(a_workload(*tables, batch_size=2048), hosts(ranks), H100))
    result = solve(problem, Stop(effort=0.04), 0)
    ties = result.ties
    assert ties is not None
    assert ties.host_bound
    assert ties.plans > 10
    assert ties.device_ms <= ties.device_range_ms[0] + ALIKE * result.best.iteration_ms
    assert ties.device_ms < 0.5 * result.best.iteration_ms
    free = problem.hardware.overheads
    none = {n: 1e-6 * v for n, v in free if n.endswith("_us") and isinstance(v, float)}
    quick = problem.hardware.model_copy(update={"overheads": free.model_copy(update=none)})
    alone = solve(replace(problem, hardware=quick), Stop(effort=0.04), 0, tolerance=0.0)
    assert ties.device_ms <= alone.best.iteration_ms * 1.02


@pytest.mark.slow
def test_the_same_seed_prefers_the_same_plan() -> None:
    problem = several_lookups(3)
    first, second = (solve(problem, Stop(effort=QUICK_PREFER), 5) for _ in range(2))
    assert [p.plan.tables for p in first.plans] == [p.plan.tables for p in second.plans]


def two_plans(problem: Problem) -> tuple[Objective, LocalSearch, list[Assignment]]:
    """All tables whole: alternately on both ranks, and all on the first."""
    objective, surrogate = objective_of(problem)
    whole = [
        next(o for o in options if o.sharding_type == "table_wise")
        for options in objective.space.options
    ]
    spread = tuple((option, (i % 2,)) for i, option in enumerate(whole))
    return (
        objective,
        LocalSearch(objective, surrogate, 0),
        [spread, tuple((option, (0,)) for option in whole)],
    )


def test_no_limit_no_choice() -> None:
    """Where only the fastest plan is within the limit, the ranking stays."""
    objective, search, (plan, _) = two_plans(a_problem(a_workload(a_table("a")), hosts(2), CPU))
    ms = float(objective.score([plan])[0])
    ranked = [Candidate(plan, ms, "x")]
    found, ties = prefer(search, objective, ranked, 0.0, None)
    assert found == ranked
    assert ties.plans == 1
    assert ties.decided_by is None


def test_of_tied_plans_the_devices_and_then_the_scenarios_decide() -> None:
    problem = slow_host(
        a_problem(a_workload(*(a_table(f"t{i}") for i in range(4))), hosts(2), H100)
    )
    objective, search, (spread, together) = two_plans(problem)
    ms = objective.score([together, spread])
    ranked = [Candidate(together, float(ms[0]), "x"), Candidate(spread, float(ms[1]), "y")]
    scenarios = ScenarioScorer(objective, draw_scenarios(problem, 4))
    found, ties = prefer(search, objective, ranked, float(ms.max()) * 1.01, scenarios, descent=50)
    assert found[0].assignment != together
    assert ties.host_bound
    assert ties.decided_by == "device time"
    least, most = ties.device_range_ms
    assert least <= ties.device_ms < most


def test_unevenness_is_of_the_fullest_rank() -> None:
    problem = a_problem(a_workload(a_table("a"), a_table("b")), hosts(2), CPU)
    objective, _, (spread, together) = two_plans(problem)
    assert unevenness(objective, [spread, together]) == pytest.approx(np.array([0.0, 1.0]))

"""Plans that tie: less device time, less regret, better balanced memory, fewer shards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from predictor.predict import predict
from search.candidate import Candidate
from search.improve.local_search import LocalSearch
from search.objective import Assignment, Objective
from search.prefer import ALIKE, TOLERANCE, prefer, unevenness
from search.problem import Problem
from search.scenarios.scenario import ScenarioScorer, draw_scenarios
from search.solve import solve
from search.stop import Stop
from tests.quick import quick_only
from tests.search.problems import (
    CPU,
    H100,
    a_problem,
    a_table,
    a_workload,
    hosts,
    objective_of,
    random_problem,
    several_lookups,
)

QUICK = 0.02


def slow_host(problem: Problem) -> Problem:
    """The same ranks with a host that sets the pace whatever the plan."""
    cost = problem.hardware.overheads
    slow = {n: 5 * v for n, v in cost if n.endswith("_us") and isinstance(v, float)}
    hardware = problem.hardware.model_copy(update={"overheads": cost.model_copy(update=slow)})
    return replace(problem, hardware=hardware)


@pytest.mark.parametrize("seed", quick_only((8,), range(10)))
def test_it_is_about_as_fast_and_no_baseline_is_faster(seed: int) -> None:
    problem = random_problem(seed, tables=4)
    fastest = solve(problem, Stop(effort=QUICK), 0, tolerance=0.0)
    result = solve(problem, Stop(effort=QUICK), 0)
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
    first, second = (solve(problem, Stop(effort=QUICK), 5) for _ in range(2))
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

"""The price of constraints: the plan without them, and what dropping each saves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from predictor.model.plan import ShardingPlan, ShardingType
from predictor.model.workload import Constraints
from predictor.predict import predict
from search.constraint_costs import ConstraintCosts, price_constraints
from search.problem import Problem
from search.solve import solve
from search.stop import Stop
from tests.search.problems import H100, a_table, a_workload, copying, hosts

ROW_WISE = Constraints((ShardingType.ROW_WISE,))


def problem_with(*constraints: Constraints) -> Problem:
    tables = [
        replace(a_table(f"t{i}", 2_000 * 10**i, 128, 50.0), constraints=constraint)
        for i, constraint in enumerate(constraints)
    ]
    return Problem(a_workload(*tables, batch_size=16_384), hosts(4, 2), copying(H100))


def priced(problem: Problem) -> tuple[ShardingPlan, float, ConstraintCosts | None]:
    best = solve(replace(problem, scenarios=()), Stop(0.01), 0, top_k=1).best
    costs = price_constraints(problem, best.plan, best.iteration_ms, Stop(0.01), 0)
    return best.plan, best.iteration_ms, costs


def test_constraints_that_bind_are_named_with_what_dropping_them_saves() -> None:
    problem = problem_with(ROW_WISE, Constraints(), Constraints())
    _, before_ms, costs = priced(problem)
    assert costs is not None
    free = predict(problem.workload, problem.topology, problem.hardware, costs.plan)
    assert costs.iteration_ms == pytest.approx(free.iteration_ms)
    assert costs.gain == pytest.approx(1 - free.iteration_ms / before_ms)
    assert costs.gain > 0.05
    assert costs.costs
    without_ms = before_ms
    for cost in costs.costs:
        assert cost.gain == pytest.approx((without_ms - cost.iteration_ms_without) / before_ms)
        assert cost.table is None or cost.constraint == "sharding_types: [row_wise]"
        assert cost.table in (None, "t0")
        without_ms = cost.iteration_ms_without
    assert without_ms == pytest.approx(costs.iteration_ms, rel=0.01)


def test_a_table_that_is_free_again_is_priced_in_the_constrained_plan() -> None:
    """Two tables on one rank each: the hot one is forced onto the rank of the other."""
    crowded = problem_with(Constraints(ranks=(0,)), Constraints(ranks=(0,)))
    plan, before_ms, costs = priced(crowded)
    assert costs is not None
    first = costs.costs[0]
    assert first.table is not None
    assert first.constraint == "ranks: [0]"
    times = []
    for rank in range(4):
        moved = costs.plan.tables[first.table]
        shards = tuple(replace(s, rank=(s.rank + rank) % 4) for s in moved.shards)
        changed = replace(plan, tables={**plan.tables, first.table: replace(moved, shards=shards)})
        setting = crowded.workload, crowded.topology, crowded.hardware
        times.append(predict(*setting, changed).iteration_ms)
    assert first.iteration_ms_without == pytest.approx(min(times))
    assert first.gain == pytest.approx(1 - min(times) / before_ms)


def test_constraints_that_the_best_plan_meets_anyway_cost_nothing() -> None:
    problem = problem_with(Constraints(), Constraints(), Constraints())
    plan, _, none = priced(problem)
    assert none is None
    of_the_plan = [Constraints((plan.tables[key].sharding_type,)) for key in problem.workload.keys]
    assert priced(problem_with(*of_the_plan))[2] is None

"""Sensitivity: what is faster does not slow down, and what is not there is not changed."""

from dataclasses import replace

import pytest

from predictor.model.distribution import Zipf
from predictor.model.workload import Feature
from predictor.predict import predict
from search.problem import Problem
from shardopt.explain.whatif import WhatIf, sensitivity
from tests.builders import a_table, hardware
from tests.shardopt.report.plans import a_problem, predicted, tables, whole


def found_for(problem: Problem) -> list[WhatIf]:
    count = len(problem.workload.tables)
    plan = whole(problem, [i % problem.topology.world_size for i in range(count)])
    return sensitivity(problem, plan, predicted(problem, plan).prediction)


def skewed(alpha: float = 1.0) -> Problem:
    ids = (Feature("ids", 20.0, distribution=Zipf(alpha)),)
    return a_problem([a_table("hot", 5_000_000, features=ids), *tables(1000, 1000, 1000)])


@pytest.mark.parametrize("world", [4, 16])
def test_more_of_anything_never_costs_time(world: int) -> None:
    for item in found_for(a_problem(tables(1000, 4_000_000, 70_000), world, 4)):
        if item.kind in ("bandwidth", "rate", "host"):
            assert item.change_ms <= 1e-9, item
    kinds = [item.change for item in found_for(a_problem(tables(1000), world, 4))]
    assert any("NIC" in change for change in kinds) == (world > 4)


def test_changes_are_those_of_a_prediction() -> None:
    problem = skewed()
    plan = whole(problem, [0, 1, 2, 3])
    before = predicted(problem, plan).prediction
    (batch,) = (i for i in sensitivity(problem, plan, before) if i.change.startswith("batch +"))
    larger = problem.workload.with_batch_size(round(1.1 * problem.workload.batch_size))
    after = predict(larger, problem.topology, problem.hardware, plan).iteration_ms
    assert batch.iteration_ms == pytest.approx(after)
    assert batch.change_ms == pytest.approx(after - before.iteration_ms)
    assert batch.change_ms > 0


def test_skew_moves_the_time_with_the_distinct_rows() -> None:
    by_change = {item.change: item.change_ms for item in found_for(skewed())}
    more = by_change["Zipf alpha of the ids +0.1 (1 of 4 features)"]
    less = by_change["Zipf alpha of the ids -0.1 (1 of 4 features)"]
    assert more < 0 < less < by_change["all ids equally likely"]


def test_uniform_ids_have_no_skew_to_change() -> None:
    assert "skew" not in {item.kind for item in found_for(a_problem(tables(1000, 1000)))}


def test_limits_are_no_slower() -> None:
    limits = [item for item in found_for(skewed()) if item.kind == "limit"]
    assert len(limits) == 2
    assert all(item.change_ms <= 1e-9 for item in limits)


def test_a_cpu_has_main_memory_and_no_nvlink() -> None:
    problem = replace(skewed(), hardware=hardware("cpu-gloo"))
    changes = " ".join(item.change for item in found_for(problem))
    assert "main memory bandwidth" in changes
    assert "bandwidth inside a host" in changes
    assert "NVLink" not in changes

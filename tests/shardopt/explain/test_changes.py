"""The changes that would help most: real, apart, verified, and none where none helps."""

from dataclasses import replace

import pytest

from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.topology import Topology
from predictor.model.workload import Constraints
from predictor.predict import predict
from predictor.units import MIB
from search.problem import Problem
from search.solve import solve
from search.stop import Stop
from shardopt.explain.changes import MAX_CHANGES, MIN_SAVING, Changes, best_changes
from tests.shardopt.report.plans import a_problem, predicted, tables, whole


def changes_of(problem: Problem, plan: ShardingPlan) -> Changes:
    return best_changes(problem, plan, predicted(problem, plan).prediction)


def lopsided() -> tuple[Problem, ShardingPlan]:
    problem = a_problem(tables(*(2_000_000 + i for i in range(6))))
    return problem, whole(problem, [0] * 6)


def test_the_best_changes_share_no_table_and_save_what_a_prediction_says() -> None:
    problem, plan = lopsided()
    before = predicted(problem, plan).prediction.iteration_ms
    result = changes_of(problem, plan)
    changes = result.helpful
    assert len(changes) == MAX_CHANGES
    for change in changes:
        changed = replace(plan, tables={**plan.tables, **change.tables})
        after = predict(problem.workload, problem.topology, problem.hardware, changed)
        assert change.iteration_ms == pytest.approx(after.iteration_ms)
        assert change.saving_ms == pytest.approx(before - after.iteration_ms)
        assert change.saving_ms > MIN_SAVING * before
    alone = [key for change in changes for key in change.tables if len(change.tables) <= 2]
    assert len(alone) == len(set(alone)) >= 2
    assert sum(len(change.tables) > 2 for change in changes) <= 1
    assert [c.saving_ms for c in changes] == sorted((c.saving_ms for c in changes), reverse=True)
    assert result == changes_of(problem, plan)


def test_nothing_helps_a_plan_that_is_alone() -> None:
    problem = a_problem(tables(1000), world=1)
    plan = solve(problem, Stop(effort=0.01), 0).best.plan
    changes = changes_of(problem, plan)
    assert changes.helpful == ()
    assert changes.none_words


def test_a_plan_the_search_would_not_make_can_be_changed() -> None:
    """Rows over two of four ranks, which TorchRec cannot run."""
    problem, plan = lopsided()
    rows = problem.workload.tables[0].num_embeddings
    shards = (Shard(1, (0, 0), (rows // 2, 64)), Shard(2, (rows // 2, 0), (rows - rows // 2, 64)))
    halves = TablePlan(ShardingType.ROW_WISE, ComputeKernel.FUSED, shards)
    plan = replace(plan, tables={**plan.tables, "t0": halves})
    changes = changes_of(problem, plan)
    assert changes.tried > 0
    assert changes.helpful


def test_a_cache_of_another_size_counts_as_given() -> None:
    problem, plan = lopsided()
    cached = replace(
        plan.tables["t0"],
        compute_kernel=ComputeKernel.FUSED_UVM_CACHING,
        parameters={"cache_params": {"load_factor": 0.01}},
    )
    plan = replace(plan, tables={**plan.tables, "t0": cached})
    assert "t0" in changes_of(problem, plan).helpful[0].tables


def test_where_nothing_fits_nothing_is_tried() -> None:
    problem, plan = lopsided()
    small = Topology.uniform(4, hbm_bytes=MIB, ddr_bytes=MIB)
    changes = changes_of(replace(problem, topology=small), plan)
    assert (changes.tried, changes.helpful) == (0, ())
    assert "memory" in changes.none_words


@pytest.mark.parametrize("room", [80 * 1024 * MIB, 400 * MIB])
def test_constraints_that_leave_one_sharding_are_the_reason_and_not_memory(room: int) -> None:
    rows = Constraints(
        sharding_types=(ShardingType.ROW_WISE,), compute_kernels=(ComputeKernel.FUSED,)
    )
    row_wise = [replace(t, constraints=rows) for t in tables(*(2_000 + i for i in range(6)))]
    problem = a_problem(row_wise)
    problem = replace(problem, topology=Topology.uniform(4, hbm_bytes=room, ddr_bytes=MIB))
    plan = solve(problem, Stop(effort=0.01), 0).best.plan
    changes = changes_of(problem, plan)
    assert (changes.tried, changes.helpful) == (0, ())
    assert "constraints" in changes.reason
    assert "memory" not in changes.reason


def test_tables_that_fit_nowhere_else_are_not_changed_for_memory() -> None:
    """Two tables of a rank each, which may be whole alone."""
    whole_only = Constraints(
        sharding_types=(ShardingType.TABLE_WISE,), compute_kernels=(ComputeKernel.FUSED,)
    )
    unsharded = [replace(t, constraints=whole_only) for t in tables(100_000, 200_000)]
    problem = a_problem(unsharded, world=2)
    sizes = [table.weight_bytes for table in unsharded]
    caps = tuple(int(1.5 * size) for size in sizes)
    topology = replace(Topology.uniform(2, hbm_bytes=0, ddr_bytes=MIB), hbm_cap_bytes=caps)
    problem = replace(problem, topology=topology)
    changes = changes_of(problem, whole(problem, [0, 1]))
    assert (changes.tried, changes.helpful) == (0, ())
    assert "memory" in changes.reason

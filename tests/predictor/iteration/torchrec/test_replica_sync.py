"""Copies of tables: what is averaged, when, and which ranks meet where."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from predictor.errors import InputError, PlanError
from predictor.hardware.loader import load_hardware
from predictor.model.memory.peak import leave_for_shards
from predictor.model.plan import ComputeKernel
from predictor.model.topology import FULLY_SHARDED, ReplicaGroups, Topology
from predictor.predict import Prediction, predict
from predictor.units import GIB
from search.bound.lower_bound import LowerBound
from search.problem import Problem
from tests.builders import in_turns
from tests.search.problems import a_table, a_workload, objective_of, random_plan

H100 = load_hardware("h100-sxm")
MODEL = a_workload(
    a_table("a", 100_000, 64),
    a_table("b", 50_000, 32, data_type="fp16"),
    a_table("c", 1000, 16, optimizer="exact_adagrad"),
    a_table("d", 1000, 16, optimizer="exact_sgd"),
)


def problem(size: int, interval: int = 1, world: int = 16, **groups: Any) -> Problem:
    workload = replace(MODEL, replica_groups=ReplicaGroups(size, interval, **groups))
    job = Topology.uniform(world, min(8, world), hbm_bytes=80 * GIB, ddr_bytes=100 * GIB)
    return Problem(workload, leave_for_shards(workload, job, 0.05), H100)


def predicted(case: Problem) -> Prediction:
    return predict(
        case.workload, case.topology, case.hardware, in_turns(case.workload, case.topology)
    )


def test_weights_and_the_states_of_adagrad_are_averaged() -> None:
    sync = predicted(problem(4)).replica_sync
    assert sync is not None
    assert sync.weight_bytes == (100_000 * 64 * 4, 50_000 * 32 * 2, 1000 * 16 * 4, 1000 * 16 * 4)
    # a value a row, a value an element, nothing
    assert sync.state_bytes == (100_000 * 4, 50_000 * 4, 1000 * 16 * 4, 0)


def test_a_step_has_its_share_of_the_averaging() -> None:
    each, tenth = predicted(problem(4)), predicted(problem(4, 10))
    assert each.replica_sync is not None
    assert tenth.replica_sync is not None
    assert each.replica_sync.sync_ms == pytest.approx(tenth.replica_sync.sync_ms)
    assert each.iteration_ms == pytest.approx(each.replica_sync.step_ms)
    assert tenth.replica_sync.step_ms == pytest.approx(each.iteration_ms)
    assert tenth.iteration_ms < each.iteration_ms
    costs = problem(4).scorer.costs.copies
    largest = costs.all_reduce(100_000 * 64 * 4) + costs.all_reduce(100_000 * 4)
    assert each.replica_sync.sync_ms == pytest.approx(float(largest))


def test_a_shard_serves_the_batches_of_its_group_alone() -> None:
    group, alone = predicted(problem(4)), predicted(problem(4, world=4))
    assert alone.replica_sync is None
    assert [m.hbm_bytes for m in group.memory] == [m.hbm_bytes for m in alone.memory]
    assert [r.busy_ms["embedding_forward"] for r in group.per_rank] == [
        r.busy_ms["embedding_forward"] for r in alone.per_rank
    ]


def test_kernels_that_torchrec_does_not_average_are_neither_offered_nor_predicted() -> None:
    case = problem(4)
    space = objective_of(case)[0].space
    kernels = {o.compute_kernel for options in space.options for o in options}
    assert kernels == {ComputeKernel.FUSED, ComputeKernel.DENSE}
    alone = problem(4, world=4)
    managed = in_turns(alone.workload, alone.topology, ComputeKernel.FUSED_UVM)
    with pytest.raises(PlanError, match="kernel fused_uvm, which replica groups do not average"):
        predict(case.workload, case.topology, case.hardware, managed)


def bound_below_random_plans(case: Problem) -> float:
    objective, _ = objective_of(case)
    rng = random.Random(2)
    times = objective.score([random_plan(objective, rng) for _ in range(100)])
    bound = LowerBound(case, objective.space, objective.scorer).solve(300)
    assert 0 < bound <= times.min() * (1 + 1e-9)
    return bound


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 8])
def test_no_plan_is_below_the_bound(size: int) -> None:
    case = problem(size, 3)
    bound = bound_below_random_plans(case)
    free = replace(case.workload, replica_groups=ReplicaGroups(size, 10**9))
    rare, _ = objective_of(replace(case, workload=free))
    less = LowerBound(rare.problem, rare.space, rare.scorer).solve(300)
    assert bound >= less, "the averaging takes nothing off"


def scattered(size: int = 4) -> Problem:
    return problem(size, sharding_strategy=FULLY_SHARDED)


def test_parts_of_weights_are_scattered_behind_the_lookup_and_gathered_before_its_update() -> None:
    case = scattered()
    prediction = predicted(case)
    assert prediction.replica_sync is not None
    assert prediction.replica_sync.weight_bytes == (25_600_000, 3_200_000, 64_000, 64_000)
    assert prediction.replica_sync.state_bytes == (0, 0, 0, 0), "sync() alone averages states"
    assert prediction.replica_sync.step_ms == pytest.approx(prediction.iteration_ms)
    copies = case.scorer.costs.copies
    largest = 100_000 * 64 * 4
    both = float(copies.reduce_scatter(largest) + copies.all_gather(largest))
    assert prediction.replica_sync.sync_ms == pytest.approx(both)
    ops = prediction.graph.ops
    for i, op in enumerate(ops):
        if op.name.endswith("gather copies"):
            assert ops[i + 1].phase == "embedding_backward"
            assert {ops[d.op].name for d in op.deps} >= {op.name.replace("gather", "scatter")}
            assert op.stream == ops[i + 1].stream
    assert sum(op.phase == "replica_sync" for op in ops) == 2 * sum(
        op.phase == "embedding_backward" for op in ops
    )


def test_no_plan_of_scattered_copies_is_below_the_bound() -> None:
    bound_below_random_plans(scattered(2))


def test_what_fully_sharded_copies_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="averages weights in every step; leave it out"):
        ReplicaGroups(4, 10, sharding_strategy=FULLY_SHARDED)
    with pytest.raises(InputError, match="'per_module'; allowed are default, fully_sharded"):
        ReplicaGroups(4, sharding_strategy="per_module")
    cpu = load_hardware("cpu-gloo")
    case = scattered()
    with pytest.raises(InputError, match="runs on CUDA streams"):
        predict(case.workload, case.topology, cpu, in_turns(case.workload, case.topology))


def test_dense_gradients_meet_over_all_ranks() -> None:
    def reduced(case: Problem) -> float:
        return sum(r.busy_ms["all_reduce"] for r in predicted(case).per_rank[:1])

    assert reduced(problem(4)) == pytest.approx(reduced(problem(16)))
    assert reduced(problem(1)) == pytest.approx(reduced(problem(16))), "also where one rank shards"

"""Scores equal the predictor's, memory adds up, and renamed plans are told to be the same."""

from __future__ import annotations

import random

import numpy as np
import pytest

from predictor.model.memory.ranks import plan_memory
from predictor.model.plan import ComputeKernel, ShardingType
from predictor.model.topology import STRATEGIES, ReplicaGroups
from predictor.model.workload import Constraints
from predictor.predict import predict
from search.candidate import signature
from search.objective import apply
from tests.search.problems import (
    H100,
    a_problem,
    a_table,
    a_workload,
    hosts,
    objective_of,
    random_plan,
    random_problem,
)


@pytest.mark.parametrize("seed", range(6))
def test_scores_are_those_of_predict_and_of_neighbours(seed: int) -> None:
    problem = random_problem(seed)
    objective, _ = objective_of(problem)
    rng = random.Random(seed)
    plans = [random_plan(objective, rng) for _ in range(12)]
    together = objective.score(plans)
    alone = np.array([objective.score([p])[0] for p in plans])
    assert together == pytest.approx(alone, rel=1e-9)
    first = objective.sharding_plan(plans[0])
    prediction = predict(problem.workload, problem.topology, problem.hardware, first)
    assert together[0] == pytest.approx(prediction.iteration_ms, rel=1e-9)

    changes = [{t: p[t] for t in range(len(p))} for p in plans[1:]]
    assert objective.score_neighbours(plans[0], changes) == pytest.approx(together[1:], rel=1e-9)
    assert objective.evaluations == 12 + 12 + 11


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_score_does_not_depend_on_the_plans_beside(strategy: str) -> None:
    """Copies of tables of some data types are averaged, by plans that have such tables sharded."""
    either = Constraints(sharding_types=(ShardingType.TABLE_WISE, ShardingType.DATA_PARALLEL))
    tables = [
        a_table(f"t{i}", 500 * (i + 1), 64, data_type=kind, constraints=either)
        for i, kind in enumerate(("fp32", "bf16", "fp16", "bf16"))
    ]
    workload = a_workload(*tables, replica_groups=ReplicaGroups(2, 1, True, strategy))
    problem = a_problem(workload, workload.sharding_group(hosts(4, 2)))
    objective, _ = objective_of(problem)
    rng = random.Random(0)
    plans = [random_plan(objective, rng) for _ in range(20)]
    together = objective.score(plans)
    for plan, ms in zip(plans, together, strict=True):
        alone = predict(workload, problem.topology, H100, objective.sharding_plan(plan))
        assert ms == pytest.approx(alone.iteration_ms, rel=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_memory_is_that_of_the_plan(seed: int) -> None:
    problem = random_problem(seed)
    objective, _ = objective_of(problem)
    plan = random_plan(objective, random.Random(seed))
    ranks = plan_memory(problem.workload, problem.topology, objective.sharding_plan(plan))
    expected = [[r.hbm_bytes for r in ranks], [r.ddr_bytes for r in ranks]]
    assert objective.memory(plan) == pytest.approx(np.array(expected))
    apart = not objective.space.co_located([ranks for _, ranks in plan])
    assert objective.fits(plan) == (all(r.fits for r in ranks) and not apart)


@pytest.mark.parametrize("pipeline", ["base", "prefetch_sparse_dist"])
def test_memory_has_the_rows_of_caches_as_wide_as_their_launch(pipeline: str) -> None:
    cached = Constraints(compute_kernels=(ComputeKernel.FUSED_UVM_CACHING,))
    tables = [a_table(f"t{i}", 10_000 + i, 16 << i % 4, constraints=cached) for i in range(6)]
    problem = a_problem(a_workload(*tables, train_pipeline=pipeline), hosts(2))
    objective, _ = objective_of(problem)
    rng = random.Random(0)
    base, *neighbours = [random_plan(objective, rng) for _ in range(6)]
    used, more = objective.memory(base), 0.0
    for neighbour in neighbours:
        change = {t: neighbour[t] for t in rng.sample(range(6), 3)}
        changed = apply(base, change)
        plan = objective.sharding_plan(changed)
        ranks = plan_memory(problem.workload, problem.topology, plan)
        memory = objective.memory(changed)
        assert memory[0].tolist() == [r.hbm_bytes for r in ranks]
        assert objective.memory_after(base, used, change).tolist() == memory.tolist()
        shards = sum(objective.footprint(*choice) for choice in changed)
        assert (shards <= memory).all()
        more = max(more, float((memory - shards).max()))
    assert (more > 1e6) == (pipeline == "base")


def test_co_location_is_part_of_fitting() -> None:
    pair = Constraints(co_locate="pair")
    workload = a_workload(a_table("a", constraints=pair), a_table("b", constraints=pair))
    objective, _ = objective_of(a_problem(workload, hosts(2)))
    a, b = (next(o for o in opts if o.label == "TW/fused") for opts in objective.space.options)
    assert objective.fits(((a, (0,)), (b, (0,))))
    assert not objective.fits(((a, (0,)), (b, (1,))))


def test_signature_sees_through_renamings() -> None:
    objective, _ = objective_of(
        a_problem(a_workload(*(a_table(n, dim=128) for n in "abc")), hosts(4, 2))
    )
    unsharded, split = (
        [next(o for o in opts if o.label == label) for opts in objective.space.options]
        for label in ("TW/fused", "CW64/fused")
    )
    base = ((unsharded[0], (0,)), (unsharded[1], (1,)), (split[2], (0, 1)))
    renamed = ((unsharded[0], (3,)), (unsharded[1], (2,)), (split[2], (3, 2)))
    across_hosts = ((unsharded[0], (0,)), (unsharded[1], (2,)), (split[2], (2, 0)))
    apart = ((unsharded[0], (0,)), (unsharded[1], (1,)), (split[2], (0, 2)))
    other_type = ((unsharded[0], (0,)), (unsharded[1], (1,)), (unsharded[2], (0,)))
    assert signature(base) == signature(renamed) == signature(across_hosts)
    assert len({signature(base), signature(apart), signature(other_type)}) == 3
    stacked = ((unsharded[0], (0,)), (unsharded[1], (1,)), (split[2], (0, 0)))
    assert signature(stacked) != signature(
        ((unsharded[0], (0,)), (unsharded[1], (1,)), (split[2], (0, 3)))
    )

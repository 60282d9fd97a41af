"""Planners after other papers: legal plans, and each does what its paper says."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.planners.greedy import Shards, place_greedily
from lab.planners.published import (
    Planner,
    PlannerInputs,
    TorchRecObjective,
    best_ms,
    dreamshard_greedy,
    hugectr,
    neuroshard,
    random_plans,
)
from lab.planners.reservation import reserve_topology
from predictor.errors import InfeasibleError
from predictor.model.plan import ComputeKernel, ShardingType
from predictor.model.workload import Constraints
from search.baselines.torchrec_memory import torchrec_memory
from search.objective import Assignment
from search.space.enumerate import enumerate_space
from search.space.option import place
from search.stop import Stop
from tests.search.problems import a_problem, a_table, a_workload, hosts, random_problem

PLANNERS = (neuroshard, dreamshard_greedy, hugectr, random_plans)


def proposed(
    planner: Planner, inputs: PlannerInputs, most: int = 40, limit_s: float = 5.0
) -> list[Assignment]:
    return list(itertools.islice(planner(inputs, 0, Stop(time_limit_s=limit_s)), most))


def counts(plan: Assignment) -> list[int]:
    """Shards of every table."""
    return [option.num_shards for option, _ in plan]


def costliest(inputs: PlannerInputs, plan: Assignment) -> float:
    """Return the largest sum of the phases over the ranks."""
    loads, _ = inputs.surrogate.standing(plan)
    return float(loads.sum(axis=1).max())


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10_000), planner=st.sampled_from(PLANNERS))
def test_plans_are_legal_and_whole(seed: int, planner: Planner) -> None:
    inputs = PlannerInputs(random_problem(seed))
    for plan in proposed(planner, inputs, 10):
        assert [option.table for option, _ in plan] == list(range(len(inputs.options)))
        for option, ranks in plan:
            assert option.is_legal(ranks, inputs.problem.topology) or option.ranks is not None


@pytest.mark.parametrize("planner", [neuroshard, dreamshard_greedy, hugectr])
def test_what_is_placed_greedily_fits(planner: Planner) -> None:
    tables = [a_table(f"t{i}", 100_000 * (1 + i % 4), 64) for i in range(12)]
    workload = a_workload(*tables, batch_size=64)
    need = sum(t.weight_bytes for t in workload.tables)
    inputs = PlannerInputs(a_problem(workload, hosts(4, hbm=int(need / 4 * 1.3), ddr=0)))
    plans = proposed(planner, inputs)
    assert plans
    assert all(inputs.objective.fits(plan) for plan in plans)


def test_neuroshard_splits_the_table_that_no_rank_should_hold_alone() -> None:
    small = [a_table(f"t{i}", 1000) for i in range(12)]
    tables = [a_table("hot", 1_000_000, 256, 60.0), *small]
    inputs = PlannerInputs(a_problem(a_workload(*tables), hosts(4)))
    plans = proposed(neuroshard, inputs)
    assert counts(plans[0]) == [1] * 13
    assert counts(plans[-1])[0] == 4
    costs = [costliest(inputs, plan) for plan in plans]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] < costs[0] / 2


def test_neuroshard_limits_columns_a_rank() -> None:
    """With equal computation, the narrow limit spreads the wide tables."""
    shards = Shards(np.array([5.0, 4.0, 3.0, 3.0]), np.zeros((4, 2)), np.array([8.0, 8, 1, 1]))
    limits = [9.0, 18.0]
    tries = place_greedily(shards, np.full((2, 2), 1e9), limits)
    for tried, limit in zip(tries, limits, strict=True):
        assert tried is not None
        dims = np.bincount(tried, shards.dims, 2)
        assert dims.max() <= limit


def test_greedy_placement_is_longest_first_where_there_is_room() -> None:
    shards = Shards(np.array([3.0, 7.0, 5.0]), np.array([[6.0, 0.0]] * 3), np.zeros(3))
    (ranks,) = place_greedily(shards, np.array([[12.0, 0.0]] * 2))
    assert ranks is not None
    assert ranks.tolist() == [1, 0, 1]
    assert place_greedily(shards, np.array([[6.0, 0.0]] * 2)) == [None]


def test_dreamshard_tries_all_mixtures_of_whole_tables() -> None:
    tables = [a_table(f"t{i}", 1000 * 7**i, (32, 64, 128)[i % 3], 1.0 + 5 * i) for i in range(6)]
    inputs = PlannerInputs(a_problem(a_workload(*tables), hosts(2)))
    plans = proposed(dreamshard_greedy, inputs, 100)
    assert len(plans) == 35
    assert {o.sharding_type for plan in plans for o, _ in plan} == {ShardingType.TABLE_WISE}
    assert len({tuple(ranks for _, ranks in plan) for plan in plans}) > 1


def test_hugectr_copies_small_tables_and_splits_the_hottest_first() -> None:
    sizes = {"tiny": (100, 64, 1.0), "cold": (2_000_000, 128, 1.0), "hot": (2_000_000, 128, 80.0)}
    tables = [a_table(name, *size) for name, size in sizes.items()]
    inputs = PlannerInputs(a_problem(a_workload(*tables), hosts(4)))
    plans = proposed(hugectr, inputs, 1000)
    tiny = {plan[0][0].sharding_type for plan in plans}
    assert tiny >= {ShardingType.TABLE_WISE, ShardingType.DATA_PARALLEL}
    assert [counts(plan)[2] for plan in plans[:3]] == [1, 2, 4]
    assert [counts(plan)[1] for plan in plans[:3]] == [1, 1, 1]
    rows = {plan[2][0].sharding_type for plan in plans}
    assert ShardingType.ROW_WISE in rows


def test_a_rival_without_options_proposes_nothing() -> None:
    only = Constraints(sharding_types=(ShardingType.ROW_WISE,))
    inputs = PlannerInputs(a_problem(a_workload(a_table("t", constraints=only)), hosts(2)))
    assert proposed(neuroshard, inputs) == []
    assert proposed(dreamshard_greedy, inputs) == []
    assert proposed(hugectr, inputs)


def test_random_plans_end_with_the_time_and_differ() -> None:
    inputs = PlannerInputs(random_problem(3, world=(4, 4), tables=8))
    plans = proposed(random_plans, inputs, 10_000, limit_s=0.3)
    assert len({tuple((o.label, r) for o, r in plan) for plan in plans}) > 5
    assert proposed(random_plans, inputs, 10, limit_s=1e-9) == []


def test_the_best_plan_that_fits_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [a_table(f"t{i}", 200_000, 64, 4.0) for i in range(4)]
    workload = a_workload(*tables, batch_size=64)
    hbm = int(workload.tables[0].weight_bytes * 3.5)
    inputs = PlannerInputs(a_problem(workload, hosts(2, hbm=hbm, ddr=0)))
    table_wise = [next(o for o in table if o.label == "TW/fused") for table in inputs.options]
    apart, three, all_on_one = (
        tuple((o, (rank,)) for o, rank in zip(table_wise, ranks, strict=True))
        for ranks in ((0, 1, 0, 1), (0, 0, 0, 1), (0, 0, 0, 0))
    )
    worth = {apart: 2.0, three: 3.0, all_on_one: 1.0}

    def score(plans: Sequence[Assignment]) -> list[float]:
        return [worth[plan] for plan in plans]

    def best(*plans: Assignment) -> float | None:
        return best_ms(lambda *_: iter(plans), inputs, 0, Stop())

    monkeypatch.setattr(inputs.objective, "score", score)
    assert best(three, apart, all_on_one) == 2.0
    assert best(three) == 3.0
    assert best(all_on_one) is None


def test_torchrecs_count_of_memory_decides_where_it_is_asked() -> None:
    """fp16 Adam: FBGEMM keeps fp32 states, TorchRec counts half of that."""
    table = a_table("t", 1_000_000, 64, optimizer="adam", data_type="fp16")
    problem = a_problem(a_workload(table, batch_size=64), hosts(2))
    torchrec = TorchRecObjective(problem.workload, problem.topology)
    plans = proposed(dreamshard_greedy, PlannerInputs(problem))
    table_bytes = plans[0][0][0].memory[0].hbm_bytes
    tight = a_problem(problem.workload, hosts(2, hbm=table_bytes - 1, ddr=0))
    assert proposed(dreamshard_greedy, PlannerInputs(tight)) == []
    assert proposed(dreamshard_greedy, PlannerInputs(tight, torchrec))


def test_a_rank_without_room_does_not_fit() -> None:
    """Both tables on one rank take twice the memory; one byte less is too little."""
    workload = a_workload(a_table("a"), a_table("b"), train_pipeline="prefetch_sparse_dist")
    ample = hosts(2)
    # TorchRec counts with its default pipeline type
    base = replace(workload, train_pipeline="base")
    kinds = ShardingType.TABLE_WISE, ComputeKernel.FUSED
    size = [(base.tables[0].num_embeddings, base.tables[0].embedding_dim)]
    need = torchrec_memory(base.tables[0], base, ample, *kinds, size)
    options = [
        next(o for o in table if o.label == "TW/fused")
        for table in enumerate_space(workload, ample).options
    ]
    plan = [place(o, (0,)) for o in options]
    for missing, fits in ((0, True), (1, False)):
        topology = hosts(2, hbm=2 * need[0].hbm_bytes - missing)
        assert TorchRecObjective(workload, topology).fits(plan) is fits


def test_what_the_reservation_leaves_nothing_of_is_refused() -> None:
    with pytest.raises(InfeasibleError, match="rank"):
        reserve_topology(a_workload(a_table("t")), hosts(2, hbm=1000))

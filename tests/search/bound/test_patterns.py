"""What single ranks can hold raises the bound, and never above the best plan."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from predictor.errors import InfeasibleError
from predictor.model.memory.ranks import shard_memory
from predictor.model.plan import ComputeKernel, ShardingType
from predictor.model.topology import Topology
from predictor.model.workload import Constraints
from predictor.units import MIB
from search.bound import exchange_set
from search.bound.lower_bound import LowerBound
from search.bound.patterns import Knapsack, RankItems, RankPatterns
from search.objective import Objective
from tests.quick import quick_first
from tests.search.problems import (
    H100,
    a_problem,
    a_table,
    a_workload,
    copying,
    every_plan,
    hosts,
    objective_of,
    random_problem,
)


def bounds_of(objective: Objective, upper_ms: float) -> tuple[float, float]:
    """Without and with what single ranks can hold."""
    bound = LowerBound(objective.problem, objective.space, objective.scorer)
    before = bound.solve(3000, upper_ms)
    return before, bound.tighten(3000, upper_ms, 10.0, lambda _: False)


def packed(seed: int, ranks: int, kinds: tuple[ShardingType, ...]) -> Objective:
    """Tables that few placements fit: memory is what the tables take and a little more."""
    rng = random.Random(seed)
    wants = Constraints(sharding_types=kinds, compute_kernels=("fused", "dense"))
    tables = [
        a_table(
            f"t{i}",
            rng.randint(200_000, 900_000),
            rng.choice([32, 64, 128]),
            rng.choice([2.0, 10.0, 60.0]),
            rng.choice([None, 1.1]),
            constraints=wants,
        )
        for i in range(2 * ranks + 1)
    ]
    pipeline = ("base", "sparse_dist")[seed % 2]
    workload = a_workload(*tables, batch_size=32768, train_pipeline=pipeline)
    local = 1 if seed % 3 == 2 else ranks
    needs = [
        shard_memory(
            *(table, workload, hosts(ranks, local), ShardingType.TABLE_WISE, ComputeKernel.FUSED),
            [(table.num_embeddings, table.embedding_dim)],
        )[0].hbm_bytes
        for table in tables
    ]
    hbm = int(1.15 * max(max(needs), sum(needs) / ranks)) + 256 * MIB
    topology = Topology(ranks, local, (hbm,) * (ranks - 1) + (int(1.1 * hbm),), (0,) * ranks)
    return objective_of(a_problem(workload, topology))[0]


WHOLE = (ShardingType.TABLE_WISE,)
DIVIDED = (ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE, ShardingType.ROW_WISE)


@pytest.mark.parametrize("seed", quick_first(4, range(12)))
@pytest.mark.parametrize("kinds", [WHOLE, DIVIDED], ids=["whole", "divided"])
def test_it_stays_below_the_best_of_all_plans(
    seed: int, kinds: tuple[ShardingType, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_set, "WHOLE", 0.0)
    objective = packed(seed, 3 if kinds == WHOLE else 2, kinds)
    plans = list(every_plan(objective))
    if not plans:
        pytest.skip("nothing fits")
    best = float(objective.score(plans).min())
    before, after = bounds_of(objective, 1.5 * best)
    assert before <= after <= best * (1 + 1e-9)


def test_tables_that_cannot_share_a_rank_raise_it() -> None:
    """The heavy tables are small, and fit only beside each other: pooled memory knows nothing."""
    wants = Constraints(sharding_types=WHOLE, compute_kernels=("fused",))
    big = [a_table(f"big{i}", 4_000_000, 128, 1.0, constraints=wants) for i in range(3)]
    hot = [a_table(f"hot{i}", 500_000, 128, 60.0, constraints=wants) for i in range(4)]
    workload = a_workload(*big, *hot, batch_size=8192)
    topology = Topology(4, 4, (int(2.2e9),) * 4, (0,) * 4)
    objective, _ = objective_of(a_problem(workload, topology, copying(H100)))
    best = float(objective.score(list(every_plan(objective))).min())
    before, after = bounds_of(objective, best)
    assert before < 0.8 * best
    assert after > 0.95 * best


@pytest.mark.parametrize("seed", quick_first(3, range(10)))
def test_random_problems(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules, pipelines, caches, constraints: three tables, so that every plan can be rated."""
    monkeypatch.setattr(exchange_set, "WHOLE", 0.0)
    problem = random_problem(seed, world=(2, 2), tables=3)
    workload = replace(problem.workload, batch_size=16384)
    try:
        objective, _ = objective_of(replace(problem, workload=workload))
    except InfeasibleError:
        pytest.skip("some table fits nowhere")
    plans = list(itertools.islice(every_plan(objective), 20_000))
    if plans:
        best = float(objective.score(plans).min())
        before, after = bounds_of(objective, 1.5 * best)
        assert before <= after <= best * (1 + 1e-9)


def test_no_filling_of_a_knapsack_is_worth_more_than_is_proven() -> None:
    for seed in range(5):
        rng = np.random.default_rng(seed)
        table = np.repeat(np.arange(5), 2)
        sizes, values = rng.uniform(0.1, 0.7, (10, 2)), rng.uniform(-0.2, 1.0, 10)
        knapsack = Knapsack(table, sizes)
        best = 0.0
        for kept in itertools.product((False, True), repeat=10):
            mine = np.flatnonzero(kept)
            fits = (sizes[mine].sum(axis=0) <= 1).all()
            if fits and len(np.unique(table[mine])) == len(mine):
                best = max(best, float(values[mine].sum()))
        most, filling = knapsack.most(values)
        assert best <= most <= best + 1e-4
        assert values[filling].sum() == pytest.approx(best, abs=1e-4)
        greedy = knapsack.fill(values)[0]
        assert values[greedy].sum() <= most
        assert (sizes[greedy].sum(axis=0) <= 1 + 1e-9).all()


def test_a_target_that_patterns_reach_is_not_refuted() -> None:
    """Four tables of half a rank each on two ranks: 3 ms where heavy and light lie together."""
    items = RankItems(
        table=np.arange(4),
        part=np.ones(4),
        memory=np.full((4, 1), 0.5),
        work=np.array([[2.0], [2.0], [1.0], [1.0]]),
        rest=np.zeros(4),
        constant=1.0,
        most=np.array([np.inf]),
        adds_up=np.array([True]),
        least=np.array([2.0]),
        least_rest=0.0,
    )
    assert RankPatterns(items, 2).refutes(3.9, 100)
    assert not RankPatterns(items, 2).refutes(4.0 + 1e-6, 100)
    spent = RankPatterns(items, 2)
    assert not spent.refutes(4.0 + 1e-6, 0)

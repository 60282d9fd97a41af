"""The bound never exceeds the fetches of tables through shared UVM caches."""

from __future__ import annotations

import random
from dataclasses import replace
from math import prod

import numpy as np
import pytest

from predictor.cost.lookup import shared_cache
from predictor.cost.lookup.shard import LookupShard
from predictor.model.distribution import Uniform, Zipf
from predictor.model.plan import ComputeKernel, ShardingType
from predictor.model.workload import Constraints, Workload
from predictor.units import GIB
from search.bound.choices import certain_fetches_ms
from search.bound.lower_bound import LowerBound
from search.objective import Objective
from search.space import enumerate as space
from search.space.enumerate import enumerate_space
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
    random_plan,
)

CACHED = ComputeKernel.FUSED_UVM_CACHING
FAST_HOST = copying(H100, 1.0)
"""Lookups and fetches set the time, not the host."""
LOAD_FACTORS = (None, 0.01, 0.05, 0.5, 1.0)


def cached_shards(rng: random.Random, count: int) -> list[np.ndarray]:
    shards = []
    for _ in range(count):
        rows, alpha = int(10 ** rng.uniform(2, 7)), rng.choice([0.0, 0.8, 1.2])
        bins = (Zipf(alpha) if alpha else Uniform()).bins(rows)
        draws, dim = 10 ** rng.uniform(2, 6.5), rng.choice([16, 64, 128])
        clf = rng.choice([0.01, 0.1, 0.2, 0.5, 1.0])
        shards.append(
            LookupShard(bins, draws, draws, rows, dim, kernel=CACHED, cache_load_factor=clf)
        )
    times = shared_cache.common_times(shards)
    return [shared_cache.tabulate(shard, H100, times) for shard in shards]


@pytest.mark.parametrize("seed", range(20))
def test_no_shard_fetches_less_than_it_is_certain_of(seed: int) -> None:
    """Two options of every table; a launch has one of each, of some tables."""
    rng = random.Random(seed)
    shards = cached_shards(rng, 12)
    tables = [i // 2 for i in range(12)]
    certain = certain_fetches_ms([[shard] for shard in shards], tables)
    for _ in range(200):
        picked = rng.sample(range(6), rng.randint(1, 6))
        joined = [2 * table + rng.randrange(2) for table in picked]
        at = shared_cache.position(np.sum([shards[i] for i in joined], axis=0))
        for i in joined:
            (fetched,) = shared_cache.between(shards[i][None, shared_cache.FETCH_MS], at[None])
            least = shards[i][shared_cache.OWN_MS] + certain[i][0]
            assert least <= fetched + 1e-9 * shards[i][shared_cache.FETCH_MS][0]


def test_a_shard_that_nobody_can_lend_to_fetches_as_if_alone() -> None:
    first, second = cached_shards(random.Random(2), 2)
    (alone,) = certain_fetches_ms([[first]], [0])
    assert alone[0] == pytest.approx(0.0, abs=1e-9 * first[shared_cache.OWN_MS])
    assert certain_fetches_ms([[first], [second]], [0, 1])[0][0] <= alone[0]


def bound_of(objective: Objective) -> float:
    return LowerBound(objective.problem, objective.space, objective.scorer).solve(3000)


def workload(seed: int, tables: int, kernels: tuple[str, ...], **wants: object) -> Workload:
    rng = random.Random(seed)
    drawn = []
    for i in range(tables):
        constraints = Constraints(
            compute_kernels=kernels,
            cache_load_factor=rng.choice(LOAD_FACTORS),
            **wants,  # type: ignore[arg-type]
        )
        rows, dim = int(10 ** rng.uniform(3, 6.5)), rng.choice([32, 64, 128])
        lookups, alpha = rng.choice([1.0, 5.0, 30.0]), rng.choice([None, 0.8, 1.2])
        order = rng.choice(["random", "frequency"])
        drawn.append(a_table(f"t{i}", rows, dim, lookups, alpha, order, constraints=constraints))
    pipeline = ["base", "sparse_dist", "prefetch_sparse_dist"][seed % 3]
    return a_workload(*drawn, batch_size=rng.choice([512, 65536]), train_pipeline=pipeline)


def objective(load: Workload, ranks: int) -> Objective:
    problem = a_problem(load, hosts(ranks, hbm=1000 * GIB), FAST_HOST)
    return objective_of(problem, enumerate_space(load, problem.topology))[0]


@pytest.mark.parametrize("seed", quick_first(1, range(6)))
def test_random_plans_with_caches(seed: int) -> None:
    kernels = ("fused_uvm_caching",) if seed % 2 else ("fused_uvm_caching", "fused", "fused_uvm")
    problem = objective(workload(seed, 5, kernels), (1, 2, 4)[seed % 3])
    rng = random.Random(seed)
    times = problem.score([random_plan(problem, rng) for _ in range(200)])
    assert 0 < bound_of(problem) <= times.min() * (1 + 1e-9)


@pytest.mark.parametrize("seed", quick_first(3, range(6)))
def test_every_plan_of_few_cached_tables(seed: int) -> None:
    kinds = (ShardingType.TABLE_WISE, ShardingType.ROW_WISE)
    load = workload(seed, 4, ("fused_uvm_caching", "fused"), sharding_types=kinds)
    problem = objective(load, 2)
    plans = list(every_plan(problem))
    # two ranks or all rows, as fused or cached; without a load factor, with each of the space's
    factors = [t.constraints.cache_load_factor for t in load.tables]
    shares = [len(space.LOAD_FACTORS) if f is None else 1 for f in factors]
    assert len(plans) == prod(3 * (1 + share) for share in shares)
    bound = bound_of(problem)
    assert 0 < bound <= problem.score(plans).min() * (1 + 1e-9)
    twins = replace(load, tables=tuple(replace(load.tables[0], name=n) for n in "abcd"))
    alike = objective(twins, 1)
    best = alike.score(list(every_plan(alike))).min()
    assert bound_of(alike) <= best * (1 + 1e-9)


def test_the_bound_of_one_plan_of_tables_alike_is_tight() -> None:
    wants = Constraints(
        sharding_types=(ShardingType.TABLE_WISE,),
        compute_kernels=("fused_uvm_caching",),
        cache_load_factor=0.2,
    )
    tables = [a_table(n, 3_000_000, 128, 20.0, 1.05, constraints=wants) for n in "abc"]
    problem = objective(a_workload(*tables, batch_size=65536), 1)
    (plan,) = every_plan(problem)
    assert bound_of(problem) == pytest.approx(problem.score([plan])[0], rel=0.01)

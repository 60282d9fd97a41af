"""Random plans: the same for a seed, all different, and such that TorchRec runs them."""

from __future__ import annotations

import pytest

from lab.tasks.models import draw_model
from lab.tasks.plans import SMALL_BYTES, column_wise, random_plans, signature
from predictor.model.plan import ShardingType
from predictor.model.plan_check import (
    RuntimeSetting,
    check_plan,
    find_runtime_problem,
    in_torchrec_order,
)
from tests.builders import a_table, a_topology, a_workload

MODELS = [("published", 0), ("published", 4), *(("shapes", seed) for seed in range(7))]


@pytest.mark.parametrize(("family", "seed"), MODELS)
@pytest.mark.parametrize("ranks", [(2, 2), (2, 1)])
def test_torchrec_runs_them(family: str, seed: int, ranks: tuple[int, int]) -> None:
    workload, topology = draw_model(family, seed), a_topology(*ranks)
    plans = random_plans(seed, workload, topology, 12)
    assert list(plans) == [f"random_{n}" for n in range(1, 13)]
    for name, plan in plans.items():
        check_plan(plan, workload, where=name)
        for key, table in zip(workload.keys, workload.tables, strict=True):
            shape = table.num_embeddings, table.embedding_dim
            setting = RuntimeSetting(shape, table.pooling, *ranks, "cpu")
            assert find_runtime_problem(in_torchrec_order(plan.tables[key]), setting) is None
            copied = plan.tables[key].sharding_type is ShardingType.DATA_PARALLEL
            assert not copied or table.weight_bytes <= SMALL_BYTES or len(workload.tables) < 8
    kinds = {signature(plan, workload) for plan in plans.values()}
    assert len(kinds) == 12
    # as TorchRec wants it of an EmbeddingCollection
    for plan in plans.values():
        widths = {
            shard.size[1]
            for key, table in zip(workload.keys, workload.tables, strict=True)
            for shard in plan.tables[key].shards
            if not table.is_pooled and plan.tables[key].sharding_type is ShardingType.COLUMN_WISE
        }
        assert len(widths) <= 1
    types = {t.sharding_type for p in plans.values() for t in p.tables.values()}
    assert len(types) >= 3


def test_more_plans_begin_with_those_of_fewer() -> None:
    workload, topology = draw_model("shapes", 2), a_topology()
    few, many = (random_plans(2, workload, topology, n) for n in (4, 200))
    assert len(many) == 200
    assert dict(list(many.items())[:4]) == few
    assert random_plans(3, workload, topology, 4) != few
    assert random_plans(2, workload, topology, 0) == {}


def test_no_plan_equals_the_given_ones() -> None:
    workload, topology = draw_model("shapes", 1), a_topology()
    first, *_ = random_plans(1, workload, topology, 5).values()
    random_ones = random_plans(1, workload, topology, 5, [first]).values()
    assert len(random_ones) == 5
    assert first not in random_ones


def test_where_there_are_few_plans_there_are_fewer() -> None:
    workload = a_workload(a_table("t", 100_000_000, 4))
    assert 1 <= len(random_plans(0, workload, a_topology(), 50)) < 10


def test_columns_are_cut_as_fbgemm_takes_them() -> None:
    assert [s.size for s in column_wise(a_table(rows=10, dim=16), 2).shards] == [(10, 8)] * 2
    assert len(column_wise(a_table(dim=4), 2).shards) == 1

"""Every table of sharding types has every type: one that is missing would be priced as nothing."""

from __future__ import annotations

from predictor.iteration.torchrec.sparse import TYPE_ORDER
from predictor.model.plan import ComputeKernel, ShardingPlan, ShardingType, TablePlan
from search.space.option import PARTITION
from shardopt.formatting import type_mix


def test_exchanges_have_an_order_among_all_types() -> None:
    assert sorted(TYPE_ORDER) == sorted(ShardingType)


def test_shards_of_every_type_are_bound_to_ranks_in_some_way() -> None:
    assert sorted(PARTITION) == sorted(ShardingType)


def test_reports_name_every_type() -> None:
    tables = {kind.value: TablePlan(kind, ComputeKernel.FUSED, ()) for kind in ShardingType}
    assert len(type_mix(ShardingPlan(tables, 1, 1)).split(", ")) == len(ShardingType)

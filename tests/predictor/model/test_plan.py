"""Shardings as values."""

from __future__ import annotations

from dataclasses import replace

from predictor.model.plan import ShardingType
from tests.builders import a_table, a_topology, a_workload, sharded, table_wise


def test_ranks_come_in_shard_order() -> None:
    workload, topology = a_workload(a_table(dim=256)), a_topology(4)
    assert sharded(workload, topology, ShardingType.ROW_WISE)[0].ranks == (0, 1, 2, 3)
    assert table_wise(a_table(), 2).ranks == (2,)


def test_a_plan_is_a_key_whatever_its_parameters() -> None:
    plan = table_wise(a_table())
    cached = replace(plan, parameters={"cache_params": {"load_factor": 0.5}})
    assert hash(plan) == hash(cached)
    assert plan != cached
    assert cached.cache_load_factor == 0.5
    for empty in ({}, {"cache_params": None}, {"cache_params": {"load_factor": None}}):
        assert replace(plan, parameters=empty).cache_load_factor is None


def test_every_type_has_its_abbreviation() -> None:
    assert {t.short for t in ShardingType} == {"DP", "TW", "CW", "RW", "TWRW", "TWCW", "GRID"}

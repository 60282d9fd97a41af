"""The cache of a launch: rows as wide as its widest cached table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from predictor.model.memory.ranks import plan_memory, resident_bytes
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.workload import Table, Workload
from tests.builders import a_table, a_topology, a_workload

ROWS = 10_000
NARROW = a_table("narrow", ROWS, 16)
WIDE = a_table("wide", ROWS, 256)
SLOT, INDEX = 16, 4


def cached(table: Table, rank: int = 0, **cache_params: Any) -> TablePlan:
    shard = Shard(rank, (0, 0), (table.num_embeddings, table.embedding_dim))
    params = {"cache_params": {"load_factor": 0.2} | cache_params}
    kernel = ComputeKernel.FUSED_UVM_CACHING
    return TablePlan(ShardingType.TABLE_WISE, kernel, (shard,), parameters=params)


def cache_bytes(workload: Workload, *tables: TablePlan) -> list[int]:
    """Per rank, what a plan has on the device beyond that with its tables in host memory alone."""
    topology = a_topology(2)

    def resident(plans: list[TablePlan]) -> list[int]:
        named = dict(zip(workload.keys, plans, strict=True))
        return resident_bytes(workload, topology, ShardingPlan(named, 2, 2))

    without = [replace(t, compute_kernel=ComputeKernel.FUSED_UVM, parameters={}) for t in tables]
    pairs = zip(resident([*tables]), resident(without), strict=True)
    return [with_cache - bare for with_cache, bare in pairs]


def of_launch(slots: int, width: int, rows: int) -> int:
    """Slots are whole sets of 32 rows (`_apply_cache_state`)."""
    return -(-slots // 32) * 32 * (width * 4 + SLOT) + rows * INDEX


def test_rows_of_a_launch_are_as_wide_as_its_widest_cached_table() -> None:
    workload = a_workload(NARROW, WIDE)
    together = cache_bytes(workload, cached(NARROW), cached(WIDE))
    assert together == [of_launch(4000, 256, 2 * ROWS), 0]
    apart = cache_bytes(workload, cached(NARROW, 0), cached(WIDE, 1))
    assert apart == [of_launch(2000, 16, ROWS), of_launch(2000, 256, ROWS)]


def test_a_wide_table_without_a_cache_widens_none() -> None:
    uncached = replace(cached(WIDE), compute_kernel=ComputeKernel.FUSED_UVM, parameters={})
    assert cache_bytes(a_workload(NARROW, WIDE), cached(NARROW), uncached) == [
        of_launch(2000, 16, ROWS),
        0,
    ]


@pytest.mark.parametrize(
    "fields",
    [{"reserved_memory": 1.0}, {"prefetch_pipeline": False}],
    ids=lambda fields: next(iter(fields)),
)
def test_tables_with_other_fused_parameters_have_a_cache_of_their_own(
    fields: dict[str, Any],
) -> None:
    """`_get_grouping_fused_params` leaves out the load factor alone."""
    workload = a_workload(NARROW, WIDE)
    expected = [of_launch(2000, 16, ROWS) + of_launch(2000, 256, ROWS), 0]
    assert cache_bytes(workload, cached(NARROW, **fields), cached(WIDE)) == expected
    pair = cached(NARROW, load_factor=0.4), cached(WIDE)
    assert cache_bytes(workload, *pair) == [of_launch(6000, 256, 2 * ROWS), 0]


def test_a_prefetch_pipeline_has_a_cache_for_every_width() -> None:
    """`EmbDimBucketer` under ``prefetch_pipeline``; rows that are fetched ahead have locks."""
    workload = a_workload(NARROW, WIDE, train_pipeline="prefetch_sparse_dist")
    locks = 2 * 2016 * 4
    expected = of_launch(2000, 16, ROWS) + of_launch(2000, 256, ROWS) + locks
    assert cache_bytes(workload, cached(NARROW), cached(WIDE)) == [expected, 0]


def test_what_is_added_up_is_what_is_needed() -> None:
    """Caches count in the sums of shards, and so in what is missing."""
    workload, topology = a_workload(NARROW, WIDE), a_topology(2)
    named = dict(zip(workload.keys, (cached(NARROW), cached(WIDE)), strict=True))
    (first, _) = plan_memory(workload, topology, ShardingPlan(named, 2, 2))
    apart = dict(zip(workload.keys, (cached(NARROW, 0), cached(WIDE, 1)), strict=True))
    ranks = plan_memory(workload, topology, ShardingPlan(apart, 2, 2))
    grown = 2000 * (256 - 16) * 4
    assert first.hbm_bytes == pytest.approx(sum(r.hbm_bytes for r in ranks) + grown, abs=50_000)

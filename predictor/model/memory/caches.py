"""Cache of UVM rows that the tables of one launch share on a device, in bytes.

FBGEMM allocates one for all ``fused_uvm_caching`` tables of a launch: of the rows that their load
factors bring in, every row as wide as the widest of these tables (`_apply_cache_state` and
``max_D_cache`` in split_table_batched_embeddings_ops_training.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from predictor.model.lookup_group import LookupGroup, group_of, is_prefetched
from predictor.model.plan import ComputeKernel, ShardingPlan, TablePlan
from predictor.model.workload import Table, Workload

DEFAULT_CACHE_LOAD_FACTOR = 0.2
"""TorchRec's `UVM_CACHING_RATIO`, and the default of FBGEMM's ``cache_load_factor``."""
SET_ROWS = 32
"""Rows of a set of the cache (``DEFAULT_ASSOC``)."""
SLOT_BYTES = 16
"""Index and time of use of a cached row (``lxu_cache_state`` and ``lxu_state``)."""
LOCK_BYTES = 4
"""Lock of a cached row that is fetched ahead (``lxu_cache_locking_counter``)."""
INDEX_BYTES = 4
"""Table of a row, cached or not (``cache_index_table_map``)."""


@dataclass(frozen=True)
class CachedShard:
    """Shard whose rows are cached on a rank.

    Args:
        launch: cache that it shares with other shards of the rank.
        slots: rows that it brings to the cache.
        row_bytes: of one row in the cache.
        prefetched: rows are fetched ahead of their lookup.
    """

    rank: int
    launch: LookupGroup | int
    slots: float
    row_bytes: int
    prefetched: bool


def cached_bytes(rows: int, row_bytes: int, clf: float) -> int:
    """Return the least cache bytes of one cached shard, whatever shares the cache.

    Args:
        row_bytes: of one row of the shard.
        clf: rows in the cache as a share of the shard's.
    """
    return _own_bytes(clf * rows, row_bytes) + rows * INDEX_BYTES


def _own_bytes(slots: float, row_bytes: int) -> int:
    return int(slots) * (row_bytes + SLOT_BYTES)


def cached_shards(table: Table, plan: TablePlan, train_pipeline: str) -> list[CachedShard]:
    """Return the shards of a table with rows in a cache; none for other kernels."""
    if plan.compute_kernel is not ComputeKernel.FUSED_UVM_CACHING:
        return []
    clf = plan.cache_load_factor or DEFAULT_CACHE_LOAD_FACTOR
    group, prefetched = group_of(table, plan, train_pipeline), is_prefetched(plan, train_pipeline)
    return [
        CachedShard(
            shard.rank,
            group,
            clf * shard.size[0],
            table.row_bytes(shard.size[1]),
            prefetched,
        )
        for shard in plan.shards
        if shard.size[0]
    ]


def sharing_bytes(shards: Iterable[CachedShard]) -> dict[int, int]:
    """Return rank -> bytes of caches beyond `cached_bytes` of their shards: rows are as wide as the
    widest of their launch, and sets are whole."""
    launches: dict[object, list[CachedShard]] = defaultdict(list)
    for shard in shards:
        launches[shard.rank, shard.launch].append(shard)
    bytes_of_rank: dict[int, int] = defaultdict(int)
    for sharing in launches.values():
        slots = max(1, -(-int(sum(shard.slots for shard in sharing)) // SET_ROWS)) * SET_ROWS
        first = sharing[0]
        widest = max(s.row_bytes for s in sharing) + SLOT_BYTES + LOCK_BYTES * first.prefetched
        own = sum(_own_bytes(shard.slots, shard.row_bytes) for shard in sharing)
        bytes_of_rank[first.rank] += slots * widest - own
    return bytes_of_rank


def plan_sharing_bytes(workload: Workload, plan: ShardingPlan) -> dict[int, int]:
    """Return `sharing_bytes` of a plan."""
    return sharing_bytes(
        shard
        for key, table in zip(workload.keys, workload.tables, strict=True)
        for shard in cached_shards(table, plan.tables[key], workload.train_pipeline)
    )

"""What each shard puts on its rank: kernel time, ids, outputs. Loads of one group add up.

TorchRec runs the tables of one module and sharding type that agree in data type, pooling and
optimizer as one fused lookup (`group_tables` in torchrec/distributed/embedding_sharding.py), so a
plan is summed to one vector per (group, rank) before anything is costed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from predictor.distribution import Bins
from predictor.hardware import HardwareProfile
from predictor.kernels.embedding import (
    LookupShard,
    backward_longest_ms,
    backward_ms,
    forward_longest_ms,
    forward_ms,
    prefetch_ms,
    sharing_ms,
    sort_passes,
)
from predictor.memory import DEFAULT_CACHE_LOAD_FACTOR
from predictor.plan import ComputeKernel, Shard, ShardingType, TablePlan
from predictor.topology import Topology
from predictor.workload import Feature, Table, Workload

Array = NDArray[np.float64]

SUMMED_FIRST = (
    ShardingType.ROW_WISE,
    ShardingType.TABLE_ROW_WISE,
    ShardingType.GRID_SHARD,
)
"""Means of row splits are sums that the module divides afterwards (TorchRec, embeddingbag.py)."""


class Load(IntEnum):
    """Columns of a load vector."""

    FORWARD_MS = 0
    BACKWARD_MS = 1
    PREFETCH_MS = 2
    SHARDS = 3
    IDS = 4
    """ids that arrive at the rank per iteration"""
    WEIGHTED_IDS = 5
    BAGS = 6
    """(sample, feature) lengths that arrive at the rank"""
    OUTPUTS = 7
    """output elements the rank's lookups produce per iteration"""
    GRADIENTS = 8
    """elements of dense gradient (data_parallel tables only)"""
    ROWS = 9
    """rows whose numbers the backward sorts"""
    SORTED = 10
    """ids times the passes that a sort of their own table's rows alone would take"""
    SHARED_2_MS = 11
    """what the forward adds when 2 tables share the L2; the next ones: when 4, 8, 16 do"""
    SHARED_4_MS = 12
    SHARED_8_MS = 13
    SHARED_16_MS = 14
    FORWARD_LONGEST_MS = 15
    """shortest forward of a launch with the shard; the longest counts, they do not add up"""
    BACKWARD_LONGEST_MS = 16


COLUMNS = len(Load)
SHARED = slice(Load.SHARED_2_MS, Load.SHARED_16_MS + 1)
LONGEST = slice(Load.FORWARD_LONGEST_MS, COLUMNS)
LAUNCH = (Load.SHARDS, *range(Load.ROWS, COLUMNS))
"""Columns that say of a launch what its shards alone do not; zero where shards are mixed."""


@dataclass(frozen=True)
class LookupGroup:
    """Tables that one fused lookup serves.

    ``cached_dim`` splits cached tables by dimension under a prefetch pipeline, as TorchRec's
    `EmbDimBucketer` does; it is 0 otherwise.
    """

    module: str
    sharding_type: ShardingType
    data_type: str
    pooling: str
    weighted: bool
    optimizer: str
    fused: bool
    cached_dim: int = 0


def group_of(table: Table, plan: TablePlan, train_pipeline: str) -> LookupGroup:
    """The lookup group that a table joins under a plan."""
    cached = plan.compute_kernel is ComputeKernel.FUSED_UVM_CACHING
    prefetched = cached and train_pipeline == "prefetch_sparse_dist"
    return LookupGroup(
        table.module,
        plan.sharding_type,
        table.data_type,
        table.pooling,
        table.weighted,
        table.optimizer,
        plan.compute_kernel is not ComputeKernel.DENSE,
        max(s.size[1] for s in plan.shards) if prefetched else 0,
    )


def add(total: Array, load: Array) -> None:
    """Put a load ``[..., COLUMNS]`` on top of others, in place."""
    longest = np.maximum(total[..., LONGEST], load[..., LONGEST])
    total += load
    total[..., LONGEST] = longest


class ShardLoads:
    """Computes and remembers the load of every shard it is asked for.

    Args:
        workload, topology, hardware: what is trained, on which ranks, with which costs.
    """

    def __init__(self, workload: Workload, topology: Topology, hardware: HardwareProfile) -> None:
        self.workload = workload
        self.topology = topology
        self.hardware = hardware
        self._cache: dict[tuple[object, ...], Array] = {}

    def of_table(self, index: int, plan: TablePlan) -> tuple[NDArray[np.intp], Array]:
        """Ranks ``[shards]`` and load vectors ``[shards, COLUMNS]`` of a table under a plan."""
        ranks = np.array(plan.ranks, dtype=np.intp)
        return ranks, np.stack([self.of_shard(index, plan, shard) for shard in plan.shards])

    def of_shard(self, index: int, plan: TablePlan, shard: Shard) -> Array:
        """Load vector ``[COLUMNS]`` of one shard; it does not depend on the shard's rank."""
        table = self.workload.tables[index]
        ordered = any(f.id_order == "frequency" for f in table.features)
        first_row = shard.offset[0] if ordered else 0
        clf = plan.cache_load_factor
        key = (index, plan.sharding_type, plan.compute_kernel, clf, first_row, shard.size)
        if key not in self._cache:
            self._cache[key] = self._compute(table, plan, shard)
        return self._cache[key]

    def _compute(self, table: Table, plan: TablePlan, shard: Shard) -> Array:
        total = np.zeros(COLUMNS)
        for feature in table.features:
            add(total, self._feature(table, feature, plan, shard))
        total[Load.SHARDS] = 1.0
        total[Load.ROWS] = shard.size[0]
        if plan.sharding_type is ShardingType.DATA_PARALLEL:
            total[Load.GRADIENTS] = float(shard.size[0] * shard.size[1])
        return total

    def _feature(self, table: Table, feature: Feature, plan: TablePlan, shard: Shard) -> Array:
        local = plan.sharding_type is ShardingType.DATA_PARALLEL
        samples = self.workload.batch_size * (1 if local else self.topology.world_size)
        draws = samples * feature.lookups_per_sample
        bins = shard_bins(table, feature, shard)
        ids = draws * bins.mass
        bags = samples * feature.num_poolings
        pooled = table.is_pooled
        lookup = LookupShard(
            bins=bins,
            draws=draws,
            bags=bags if pooled else ids,
            rows=shard.size[0],
            dim=shard.size[1],
            element_bytes=table.element_bytes,
            output_bytes=4,
            optimizer=table.optimizer,
            weighted=table.weighted,
            pooled=pooled,
            mean=table.pooling == "mean" and plan.sharding_type not in SUMMED_FIRST,
            kernel=plan.compute_kernel,
            cache_load_factor=plan.cache_load_factor or DEFAULT_CACHE_LOAD_FACTOR,
            lengths=bags,
        )
        load = np.zeros(COLUMNS)
        load[Load.IDS] = ids
        load[Load.WEIGHTED_IDS] = ids if table.weighted else 0.0
        load[Load.BAGS] = bags
        load[Load.OUTPUTS] = (bags if pooled else ids) * shard.size[1]
        if shard.size[0]:
            self._kernel_times(load, lookup)
        return load

    def _kernel_times(self, load: Array, lookup: LookupShard) -> None:
        prefetched = (
            lookup.kernel is ComputeKernel.FUSED_UVM_CACHING
            and self.workload.train_pipeline == "prefetch_sparse_dist"
        )
        if prefetched:
            load[Load.PREFETCH_MS] = prefetch_ms(lookup, self.hardware)
            lookup = replace(lookup, kernel=ComputeKernel.FUSED)  # every row is in the cache by now
        load[Load.FORWARD_MS] = forward_ms(lookup, self.hardware)
        load[Load.BACKWARD_MS] = backward_ms(lookup, self.hardware)
        load[Load.SORTED] = lookup.ids * sort_passes(lookup.rows, self.hardware)
        load[SHARED] = sharing_ms(lookup, self.hardware)
        load[Load.FORWARD_LONGEST_MS] = forward_longest_ms(lookup, self.hardware)
        load[Load.BACKWARD_LONGEST_MS] = backward_longest_ms(lookup, self.hardware)


def shard_bins(table: Table, feature: Feature, shard: Shard) -> Bins:
    """The rows of a shard with their draw probabilities over the whole table.

    With ``id_order: frequency`` low ids are hot, so a row range is a range of popularity ranks and
    the first row-wise shard is the hot one. Shuffled ids give every range an equal share.
    """
    bins = feature.distribution.bins(table.num_embeddings)
    first, rows = shard.offset[0], shard.size[0]
    if rows == table.num_embeddings:
        return bins
    if feature.id_order == "frequency":
        return bins.slice(first, first + rows)
    return bins.scaled(rows / table.num_embeddings)

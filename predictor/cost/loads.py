"""Loads of shards on their ranks: kernel time, ids, outputs. Loads of one group add up.

TorchRec runs the tables of one module and sharding type that agree in data type, pooling and
optimizer as one fused lookup (`group_tables` in torchrec/distributed/embedding_sharding.py), so a
plan is summed to one vector per (group, rank) before anything is costed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from predictor.cost.errors import CostErrors
from predictor.cost.lookup import shared_cache
from predictor.cost.lookup.embedding import lookup_model
from predictor.cost.lookup.shard import SHARERS, LookupShard, table_of
from predictor.cost.stragglers import FEWEST_IDS, common_share, relative_deviation
from predictor.hardware.learned import lookup_part
from predictor.hardware.schema import HardwareProfile
from predictor.model.distribution import Bins, EmpiricalByRange
from predictor.model.lookup_group import LookupGroup, is_stashed
from predictor.model.memory.caches import DEFAULT_CACHE_LOAD_FACTOR
from predictor.model.memory.ranks import cached_share, synced_bytes
from predictor.model.plan import ComputeKernel, Shard, ShardingType, TablePlan
from predictor.model.topology import Topology
from predictor.model.workload import Feature, Table, Workload
from predictor.units import gib

Array = NDArray[np.float64]
Kinds = NDArray[np.int32]
Size = tuple[int, int]

SUMMED_FIRST = (ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD)
"""Means of row splits are sums that the module divides afterwards (TorchRec, embeddingbag.py)."""


class Load(IntEnum):
    """Column of a load vector."""

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
    """elements of dense gradient, which the dense optimizer steps (the kernel ``dense``)"""
    EXPANDED = 9
    """output elements that repeated ids get back where only distinct ones are looked up"""
    SYNCED_WEIGHTS = 10
    """bytes of weights that replica groups average (fused tables, 2D sparse parallelism), or that
    are stashed"""
    SYNCED_STATES = 11
    """bytes of optimizer state that they average"""
    ROWS = 12
    """rows whose numbers the backward sorts"""
    SORTED = 13
    """ids times the passes that a sort of their own table's rows alone would take"""
    FORWARD_VARIANCE = 14
    """of the forward over batches, in ms^2"""
    BACKWARD_VARIANCE = 15
    SHARED_2_MS = 16
    """what the forward adds when 2 tables share the L2; the next ones: when 4, 8, 16 do"""
    SHARED_4_MS = 17
    SHARED_8_MS = 18
    SHARED_16_MS = 19
    FORWARD_COMMON = 20
    """deviation of the forward over batches, in ms, that all features of a sample have together"""
    BACKWARD_COMMON = 21
    FORWARD_LONGEST_MS = 22
    """shortest forward of a launch with the shard; the longest counts, they do not add up"""
    BACKWARD_LONGEST_MS = 23


COLUMNS = len(Load)
SHARED = slice(Load.SHARED_2_MS, Load.SHARED_16_MS + 1)
LONGEST = slice(Load.FORWARD_LONGEST_MS, COLUMNS)
KERNELS = (Load.FORWARD_MS, Load.BACKWARD_MS)
"""Columns that `lookup` of `predictor.cost.errors.CostErrors` is about, in its order."""
VARIANCES = (Load.FORWARD_VARIANCE, Load.BACKWARD_VARIANCE)
COMMON = (Load.FORWARD_COMMON, Load.BACKWARD_COMMON)
WAYS = (
    (
        "forward",
        [
            *(Load.FORWARD_MS, *range(SHARED.start, SHARED.stop)),
            *(Load.FORWARD_COMMON, Load.FORWARD_LONGEST_MS),
        ],
        Load.FORWARD_VARIANCE,
    ),
    (
        "backward",
        [Load.BACKWARD_MS, Load.BACKWARD_COMMON, Load.BACKWARD_LONGEST_MS],
        Load.BACKWARD_VARIANCE,
    ),
)
"""Direction of a lookup, the columns of its time, and of its variance."""
NO_IDS = 1e-9
"""Share of its ids at which a lookup counts as having none."""
LAUNCH = (Load.SHARDS, *range(Load.ROWS, COLUMNS))
"""Columns about a launch as a whole; zero where loads of several groups are mixed."""


def add(total: Array, load: Array) -> None:
    """Add a load ``[..., COLUMNS]`` to others, in place."""
    longest = np.maximum(total[..., LONGEST], load[..., LONGEST])
    total += load
    total[..., LONGEST] = longest


class ShardLoads:
    """Loads of shards, computed once and kept."""

    def __init__(self, workload: Workload, topology: Topology, hardware: HardwareProfile) -> None:
        self.workload = workload
        self.topology = topology
        self.hardware = hardware
        self.lookups = lookup_model(hardware)
        self.learned = hardware.learned and hardware.learned.for_model(workload.name)
        self._known: dict[tuple[object, ...], tuple[Array, Array | None]] = {}

    @property
    def without_errors(self) -> ShardLoads:
        """The loads as predicted."""
        return self

    def of_table(self, index: int, plan: TablePlan) -> tuple[NDArray[np.intp], Array]:
        """Return ranks ``[shards]`` and load vectors ``[shards, COLUMNS]`` of a table in a plan."""
        shards = plan.shards
        first, kinds = self.alike(index, [s.size for s in shards], [s.offset for s in shards])
        distinct = np.stack([self.of_shard(index, plan, shards[i]) for i in first])
        return np.array(plan.ranks, dtype=np.intp), distinct[kinds]

    def alike(
        self, index: int, sizes: Sequence[Size], offsets: Sequence[Size]
    ) -> tuple[list[int], Kinds]:
        """Group the shards of a table into kinds with equal loads: most of them are alike.

        Args:
            sizes, offsets: rows and columns of every shard, and the first ones of each.

        Returns:
            Position of the first shard of every kind, and the kind of every shard, ``[shards]``.
        """
        keys: Sequence[object] = sizes
        if any(map(_rows_differ, self.workload.tables[index].features)):
            keys = [(size, row) for size, (row, _) in zip(sizes, offsets, strict=True)]
        numbers: dict[object, int] = {}
        kinds = np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int32)
        return np.unique(kinds, return_index=True)[1].tolist(), kinds

    def of_shard(self, index: int, plan: TablePlan, shard: Shard) -> Array:
        """Return the load vector ``[COLUMNS]`` of one shard; it does not depend on its rank.

        For ``fused_uvm_caching`` it counts as if no other shard shared the cache; see
        `cache_of_shard`.
        """
        return self._of(index, plan, shard)[0]

    def cache_of_shard(self, index: int, plan: TablePlan, shard: Shard) -> Array | None:
        """Return the contribution of one shard to the cache of its launch.

        Returns:
            ``[shared_cache.COLUMNS]``; None if the shard uses no cache.
        """
        return self._of(index, plan, shard)[1]

    def _of(self, index: int, plan: TablePlan, shard: Shard) -> tuple[Array, Array | None]:
        table = self.workload.tables[index]
        first_row = shard.offset[0] if any(map(_rows_differ, table.features)) else 0
        clf = plan.cache_load_factor
        kinds = plan.sharding_type, plan.compute_kernel
        key = (index, *kinds, clf, plan.store_caches, first_row, shard.size)
        if key not in self._known:
            load, cache = self._compute(table, plan, shard)
            self._correct(load, index, plan, shard.size[1])
            self._known[key] = load, cache
        return self._known[key]

    def _correct(self, load: Array, index: int, plan: TablePlan, width: int) -> None:
        """Multiply, in place, by the learned factors of this table's lookups."""
        kind, kernel = plan.sharding_type.value, plan.compute_kernel.value
        key, pooled = self.workload.keys[index], self.workload.tables[index].is_pooled
        for way, columns, variance in WAYS if self.learned is not None else ():
            assert self.learned is not None
            part = lookup_part(way, kernel, kind, width, key, pooled=pooled)
            factor = self.learned.factor(part)
            load[columns] *= factor
            load[variance] *= factor**2

    @cached_property
    def _cache_times(self) -> Array:
        """Characteristic times at which every cached shard of the workload is tabulated."""
        plan = TablePlan(ShardingType.TABLE_WISE, ComputeKernel.FUSED_UVM_CACHING, ())
        return shared_cache.common_times(
            table_of(self._lookups(t, plan, Shard(0, (0, 0), (t.num_embeddings, t.embedding_dim))))
            for t in self.workload.tables
        )

    def _compute(self, table: Table, plan: TablePlan, shard: Shard) -> tuple[Array, Array | None]:
        total, cache = np.zeros(COLUMNS), None
        lookups = self._lookups(table, plan, shard)
        for feature, lookup in zip(table.features, lookups, strict=True):
            load = self._load(lookup)
            self._put_variances(load, feature, plan, lookup)
            if table.index_dedup:
                share = shard_bins(table, feature, shard).mass
                draws = self._samples(plan) * feature.lookups_per_sample
                load[Load.EXPANDED] = draws * share * shard.size[1]
            add(total, load)
        if plan.compute_kernel.is_cached and shard.size[0]:
            whole = table_of(lookups)
            total[filling_column(self.workload)] += self.lookups.prefetch_ms(whole)
            # tables under other kernels have a cache of their own
            if plan.compute_kernel is ComputeKernel.FUSED_UVM_CACHING and (
                self.lookups.fetch_ms(whole) > 0
            ):
                cache = shared_cache.tabulate(whole, self.hardware, self._cache_times)
        total[Load.SHARDS] = 1.0
        total[Load.ROWS] = shard.size[0]
        if plan.compute_kernel is ComputeKernel.DENSE:
            total[Load.GRADIENTS] = float(shard.size[0] * shard.size[1])
        elif self.topology.job is not None or is_stashed(table, plan.compute_kernel):
            weights, states = synced_bytes(table, shard.size)
            total[Load.SYNCED_WEIGHTS] = weights
            groups = self.workload.replica_groups
            if groups is not None and not groups.fully_sharded:
                total[Load.SYNCED_STATES] = states
        return total, cache

    def _lookups(self, table: Table, plan: TablePlan, shard: Shard) -> list[LookupShard]:
        return [self._lookup(table, feature, plan, shard) for feature in table.features]

    def _samples(self, plan: TablePlan) -> int:
        """Count the samples whose ids a shard serves: one rank's where every rank has the table."""
        local = plan.sharding_type is ShardingType.DATA_PARALLEL
        return self.workload.batch_size * (1 if local else self.topology.world_size)

    def _put_variances(
        self, load: Array, feature: Feature, plan: TablePlan, lookup: LookupShard
    ) -> None:
        """Enter the variances of the times over batches; the time without ids does not vary."""
        if self.workload.balance_batches and plan.sharding_type is ShardingType.DATA_PARALLEL:
            return
        share = min(1.0, lookup.bins.mass)
        deviation = relative_deviation(
            self._samples(plan) * feature.num_poolings,
            feature.pooling_factor,
            feature.pooling_factor_std,
            share,
        )
        if deviation and lookup.rows:
            empty = np.zeros(COLUMNS)
            self._kernel_times(empty, replace(lookup, draws=NO_IDS * lookup.draws))
            varying = np.maximum(load[[*KERNELS]] - empty[[*KERNELS]], 0.0)
            common = common_share(
                feature.pooling_factor,
                feature.pooling_factor_std,
                feature.length_correlation,
                share,
            )
            load[[*VARIANCES]] = (varying * deviation) ** 2 * (1 - common**2)
            load[[*COMMON]] = varying * deviation * common

    def _lookup(self, table: Table, feature: Feature, plan: TablePlan, shard: Shard) -> LookupShard:
        samples = self._samples(plan)
        draws = max(samples * feature.lookups_per_sample, FEWEST_IDS)
        bins, distinct = shard_bins(table, feature, shard), None
        bags = samples * feature.num_poolings
        if table.index_dedup:
            distinct = bins.unique(draws)
            whole = feature.distribution.bins(table.num_embeddings)
            each = draws * self.workload.batch_size / samples
            draws = samples / self.workload.batch_size * whole.unique(each)
            bins = bins.once(each, whole.unique(each))
        clf = plan.cache_load_factor or DEFAULT_CACHE_LOAD_FACTOR
        most_mib, host_gib = plan.store_caches
        return LookupShard(
            bins=bins,
            draws=draws,
            bags=bags if table.is_pooled else draws * bins.mass,
            rows=shard.size[0],
            dim=shard.size[1],
            element_bytes=table.row_bytes(shard.size[1]) / max(1, shard.size[1]),
            optimizer=table.optimizer,
            weighted=table.weighted,
            pooled=table.is_pooled,
            mean=table.pooling == "mean" and plan.sharding_type not in SUMMED_FIRST,
            kernel=plan.compute_kernel,
            cache_load_factor=cached_share(table, plan.compute_kernel, shard.size, clf, most_mib),
            host_bytes=gib(host_gib),
            lengths=bags,
            distinct=distinct,
            widest_dim=self._widest_dim(table, shard),
        )

    def _widest_dim(self, table: Table, shard: Shard) -> int:
        """Return the widest row of a launch with this shard.

        Whole tables share a launch with those of their module. Slices of columns share it with
        others that are taken to be as wide.
        """
        if shard.size[1] < table.embedding_dim:
            return shard.size[1]
        return self._widest[table.module]

    @cached_property
    def _widest(self) -> dict[str, int]:
        widest: dict[str, int] = {}
        for table in self.workload.tables:
            widest[table.module] = max(widest.get(table.module, 0), table.embedding_dim)
        return widest

    def _load(self, lookup: LookupShard) -> Array:
        """Return the load of one feature of a shard, without filling the cache."""
        load = np.zeros(COLUMNS)
        load[Load.IDS] = lookup.ids
        load[Load.WEIGHTED_IDS] = lookup.ids if lookup.weighted else 0.0
        load[Load.BAGS] = lookup.walks
        load[Load.OUTPUTS] = lookup.bags * lookup.dim
        if lookup.rows:
            self._kernel_times(load, lookup)
        return load

    def _kernel_times(self, load: Array, lookup: LookupShard) -> None:
        filled = read = lookup
        if lookup.kernel.is_cached:
            hashed = lookup.kernel.is_hashed
            there = ComputeKernel.DYNAMICEMB if hashed else ComputeKernel.FUSED
            filled = replace(lookup, kernel=there)  # every row is in the cache by now
            if filling_column(self.workload) is Load.PREFETCH_MS:
                read = filled
        load[Load.FORWARD_MS] = self.lookups.bounds_ms(lookup) + self.lookups.forward_ms(filled)
        # optimizer states stay in host memory, they are never cached
        load[Load.BACKWARD_MS] = self.lookups.backward_ms(lookup)
        load[Load.SORTED] = lookup.ids * self.lookups.sort_passes(lookup.rows)
        load[SHARED] = self.lookups.sharing_ms(filled)
        load[Load.FORWARD_LONGEST_MS] = self.lookups.forward_longest_ms(read)
        load[Load.BACKWARD_LONGEST_MS] = self.lookups.backward_longest_ms(lookup)


def filling_column(workload: Workload) -> Load:
    """Return the column of the time to fill caches: ahead of the lookup, or within it."""
    ahead = workload.train_pipeline == "prefetch_sparse_dist"
    return Load.PREFETCH_MS if ahead else Load.FORWARD_MS


def shard_bins(table: Table, feature: Feature, shard: Shard) -> Bins:
    """Return the rows of a shard with their draw probabilities over the whole table.

    A distribution that was measured by id range has the rows of a shard. In others with
    ``id_order: frequency`` low ids are hot: a row range is a range of popularity ranks, and the
    first row-wise shard is the hot one. With random ids every range gets an equal share.
    """
    bins = feature.distribution.bins(table.num_embeddings)
    first, rows = shard.offset[0], shard.size[0]
    if rows == table.num_embeddings:
        return bins
    if isinstance(feature.distribution, EmpiricalByRange):
        measured = feature.distribution.between(first, first + rows, table.num_embeddings)
        if measured is not None:
            return measured
    if feature.id_order == "frequency":
        return bins.slice(first, first + rows)
    return bins.scaled(rows / table.num_embeddings)


def _rows_differ(feature: Feature) -> bool:
    """Tell whether row ranges of the same size can differ in load."""
    measured = isinstance(feature.distribution, EmpiricalByRange)
    return measured or feature.id_order == "frequency"


def fused_forward_ms(load: Array) -> Array:
    """Return the forward of fused lookups of loads ``[..., COLUMNS]`` in ms, without their floor.

    Times of shards add up but for three things that only the launch as a whole decides: how many
    tables share the L2, how many bits of the row numbers are sorted, and whether the longest chain
    of latencies outlasts all the bytes. Each only adds to the sum of the shards.
    """
    time = load[..., Load.FORWARD_MS] + _sharing_ms(load)
    return np.maximum(time, load[..., Load.FORWARD_LONGEST_MS])


def fused_backward_ms(load: Array, group: LookupGroup, hardware: HardwareProfile) -> Array:
    """Return the backward of fused lookups, optimizer step included; see `fused_forward_ms`."""
    time = load[..., Load.BACKWARD_MS] + _sorting_ms(load, group, hardware)
    return np.maximum(time, load[..., Load.BACKWARD_LONGEST_MS])


def _sharing_ms(load: Array) -> Array:
    """Return the time that tables add by sharing the L2, in ms.

    It is linear in their number between 1, 2, 4, 8 and 16. A table's cost at each of these shares
    is tabulated once, so that the loads of tables still add up; the number of tables on the rank
    decides which columns count.
    """
    total: Array = np.zeros(())
    for column, tables in enumerate(SHARERS, start=SHARED.start):
        added = load[..., column]
        if added.any():
            half = tables / 2
            total = total + added * np.clip((load[..., Load.SHARDS] - half) / half, 0.0, 1.0)
    return total


def _sorting_ms(load: Array, group: LookupGroup, hardware: HardwareProfile) -> Array:
    """Price the sort passes beyond those that the tables would need one by one, in ms."""
    pass_ms = lookup_model(hardware).sort_pass_ms(
        weighted=group.weighted, pooled=group.pooling != "none"
    )
    passes = lookup_model(hardware).sort_passes(load[..., Load.ROWS])
    beyond = load[..., Load.IDS] * passes - load[..., Load.SORTED]
    return np.maximum(beyond, 0.0) * pass_ms


class DrawnLoads(ShardLoads):
    """Loads whose lookups have errors of their own, by table, direction and sharding type.

    Costs that lookups share, such as those of a cache or the longest latencies, stay as predicted.
    Errors that all lookups have in common are on the operations.

    Args:
        loads: as predicted; computed once for many draws.
        errors: one draw.
    """

    def __init__(self, loads: ShardLoads, errors: CostErrors) -> None:
        super().__init__(loads.workload, loads.topology, loads.hardware)
        self.loads = loads
        self.errors = errors

    @property
    def without_errors(self) -> ShardLoads:
        return self.loads

    def of_shard(self, index: int, plan: TablePlan, shard: Shard) -> Array:
        load = self.loads.of_shard(index, plan, shard).copy()
        load[[*KERNELS]] *= self.errors.lookup(index, plan)[:, 0]
        return load

    def cache_of_shard(self, index: int, plan: TablePlan, shard: Shard) -> Array | None:
        return self.loads.cache_of_shard(index, plan, shard)

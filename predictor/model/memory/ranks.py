"""Memory that a plan needs on every rank, and memory that every rank has, in bytes.

The rules of single shards are those of TorchRec's planner (`calculate_shard_storages` in
planner/shard_estimators.py), but where FBGEMM allocates something else
(split_table_batched_embeddings_ops_training.py, `SplitTableBatchedEmbeddingBagsCodegen`);
docs/model.md, chapter 14, lists the differences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from predictor.model.dense_settings import DENSE_STATES
from predictor.model.lookup_group import is_stashed
from predictor.model.memory.caches import (
    DEFAULT_CACHE_LOAD_FACTOR,
    cached_bytes,
    plan_sharing_bytes,
)
from predictor.model.plan import ROW_SPLITS, ComputeKernel, ShardingPlan, ShardingType
from predictor.model.topology import Topology
from predictor.model.workload import INDEX_BYTES, Optimizer, Table, Workload
from predictor.units import format_bytes, mib

Size = tuple[int, int]

STATE_BYTES = 4
"""FBGEMM keeps optimizer state in fp32."""
WEIGHT_BYTES = 4
"""Bytes of an id's weight."""
LENGTH_BYTES = 8
"""Bytes of the number of ids that a sample has for a feature."""
OUTPUT_BYTES = 4
"""FBGEMM's lookups give fp32 for tables of any type (``output_dtype``)."""
HASH_BYTES = 8 + 8 + 1 + 4 / 128
"""Key, score and digest of a row of a hash table, and its part of a bucket's header: on the device,
wherever the values are (scored_hashtable.py of dynamicemb)."""
VALUE_ALIGNMENT = 16
"""Bytes of a value, weights and states of a row together, are a multiple of this."""
SORT_COPIES = 6.5
"""Copies of a lookup's ids while a device's backward sorts them (`iteration.SORT_BYTES`)."""
PREFETCH_COPIES = 7
"""Further copies of a cached table's ids while it is filled (`calculate_pipeline_io_cost`)."""
OUTPUT_COPIES = 2
"""Copies of the outputs: one at the lookup, one on the wire."""
ROUNDING = 1e-9
"""Share by which sums of the same sizes in another order may differ, and more."""
UVM_KERNELS = (ComputeKernel.FUSED_UVM, ComputeKernel.FUSED_UVM_CACHING)
CACHE_SLOT_BYTES = 16
"""Index and time of use of a row in the cache of a key-value table (``lxu_cache_state`` and
``lru_state`` of FBGEMM's tbe/ssd/training.py)."""


STATES: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    Optimizer.SGD: ((0, 0), (0, 0)),
    Optimizer.EXACT_SGD: ((0, 0), (0, 0)),
    Optimizer.ROWWISE_ADAGRAD: ((0, 1), (0, 0)),
    Optimizer.ADAGRAD: ((1, 0), (0, 0)),
    Optimizer.LARS_SGD: ((1, 0), (0, 0)),
    Optimizer.ADAM: ((1, 0), (1, 0)),
    Optimizer.LAMB: ((1, 0), (1, 0)),
    Optimizer.PARTIAL_ROWWISE_ADAM: ((1, 0), (0, 1)),
}
"""Optimizer -> values per element and values per row, of the first and of the second moment."""


@dataclass(frozen=True)
class ShardMemory:
    """Least bytes that one shard adds to the peak of its rank, whatever else the rank holds.

    At any moment a process has its shards with their states and caches, and of every lookup the ids
    that it read last (`predictor.model.memory.iteration`). What else is in flight may be there at
    another moment than the peak, so it stands apart; what a plan takes in all is simulated
    (`predictor.model.memory.peak`).

    Args:
        hbm_bytes: device memory.
        ddr_bytes: host memory.
        optimizer_bytes: of these, fused optimizer state (device and host).
        io_bytes: of these, ids.
        flight_bytes: beside these, what is in flight for it for a part of an iteration.
        dense_bytes: of these, dense gradient and dense optimizer state, which TorchRec omits.
    """

    hbm_bytes: int
    ddr_bytes: int
    optimizer_bytes: int = 0
    io_bytes: int = 0
    dense_bytes: int = 0
    flight_bytes: int = 0


def shard_memory(
    table: Table,
    workload: Workload,
    topology: Topology,
    sharding_type: ShardingType,
    kernel: ComputeKernel,
    sizes: Sequence[Size],
    cache_load_factor: float | None = None,
    *,
    device: str = "cuda",
    enforce_hbm: bool = False,
    most_cache_mib: float | None = None,
) -> list[ShardMemory]:
    """Return the memory of every shard of a table.

    Args:
        sizes: ``[rows, columns]`` of every shard.
        cache_load_factor: rows in the UVM cache as a share of the shard's; TorchRec's 0.2 if None.
        device: ``cuda``, or ``cpu`` where everything is host memory.
        enforce_hbm: FBGEMM's flag for UVM tables.
        most_cache_mib: of a key-value table's cache on the device.
    """
    clf = cache_load_factor or DEFAULT_CACHE_LOAD_FACTOR
    copies = scattered_copies(workload, topology)

    def of_shard(size: Size) -> ShardMemory:
        rows, columns = size
        ids_bytes = _ids_bytes(table, workload, topology, sharding_type, size, len(sizes))
        weights = rows * table.row_bytes(columns)
        first = second = dense = 0
        if kernel is ComputeKernel.DENSE and workload.training:
            # dense gradient (DDP's bucket is a view of it) and dense optimizer state
            dense = weights * (1 + DENSE_STATES[workload.dense.optimizer])
        elif workload.training:
            first, second = (
                (element * columns + row) * rows * STATE_BYTES
                for element, row in STATES[table.optimizer]
            )
        state = first + second
        if device == "cpu":
            return ShardMemory(0, weights + state + dense + ids_bytes, state, ids_bytes, dense)
        hbm = ids_bytes + dense
        if kernel.is_hashed:
            return _hashed(table, kernel, size, ids_bytes, clf)
        if kernel.is_stored:
            return _stored(table, kernel, size, ids_bytes, clf, most_cache_mib)
        if kernel not in UVM_KERNELS:
            if kernel is ComputeKernel.FUSED and copies > 1:
                hbm += _scattered_bytes(table, workload, size, copies)
            pinned = weights * is_stashed(table, kernel)
            return ShardMemory(hbm + weights + state, pinned, state, ids_bytes, dense)
        if kernel is ComputeKernel.FUSED_UVM_CACHING:
            hbm += cached_bytes(rows, table.row_bytes(columns), clf)
        if enforce_hbm:
            return ShardMemory(hbm + weights + first, second, state, ids_bytes, dense)
        # one value a row stays on the device (`construct_split_state`)
        moments = zip((first, second), STATES[table.optimizer], strict=True)
        on_host = sum(size for size, (element, _) in moments if element)
        return ShardMemory(hbm + state - on_host, weights + on_host, state, ids_bytes, dense)

    def in_flight(size: Size) -> int:
        kind = table, workload, topology, sharding_type, size, len(sizes)
        return _flight_bytes(*kind, kernel, on_device=device != "cpu")

    memory_of = {
        size: replace(of_shard(size), flight_bytes=in_flight(size)) for size in dict.fromkeys(sizes)
    }
    return [memory_of[size] for size in sizes]


def value_bytes(optimizer: str, dim: int, element_bytes: float) -> int:
    """Return the bytes of a dynamicemb row: weights and states, all of the weights' type."""
    elements = dim + sum(element * dim + row for element, row in STATES[optimizer])
    return math.ceil(elements * element_bytes / VALUE_ALIGNMENT) * VALUE_ALIGNMENT


def _hashed(
    table: Table, kernel: ComputeKernel, size: Size, ids_bytes: int, clf: float
) -> ShardMemory:
    """Return a dynamicemb table's memory: values as its kernel places them, keys on the device.

    A cache is a second hash table (`DynamicEmbCache`).
    """
    rows, dim = size
    values = rows * value_bytes(table.optimizer, dim, table.element_bytes)
    share = clf if kernel.has_load_factor else 1.0
    on_device = math.ceil(share * values)
    keys = rows * (1.0 + share * kernel.is_cached) * HASH_BYTES
    on_host = values if kernel.is_cached else values - on_device
    states = values - rows * table.row_bytes(dim)
    return ShardMemory(ids_bytes + on_device + math.ceil(keys), on_host, states, ids_bytes)


def stored_bytes(kernel: ComputeKernel, optimizer: str, dim: int, element_bytes: float) -> int:
    """Return the bytes of a key-value table's row; a virtual table's includes its states."""
    if kernel.has_load_factor:
        return math.ceil(dim * element_bytes)
    return value_bytes(optimizer, dim, element_bytes)


def cached_share(
    table: Table, kernel: ComputeKernel, size: Size, clf: float, most_mib: float | None
) -> float:
    """Return the share of a shard's rows that its cache on the device holds.

    The cache of a key-value table has at most ``max_l1_cache_size``. That of a virtual table has
    exactly this size, as its rows are unknown, and is absent if no size is given. TorchRec counts
    it so (`calculate_shard_storages`).
    """
    if not kernel.is_stored:
        return clf
    if most_mib is None:
        return clf if kernel.has_load_factor else 0.0
    row = stored_bytes(kernel, table.optimizer, size[1], table.element_bytes)
    return min(clf if kernel.has_load_factor else 1.0, mib(most_mib) / max(1, size[0] * row))


def _stored(
    table: Table,
    kernel: ComputeKernel,
    size: Size,
    ids_bytes: int,
    clf: float,
    most_mib: float | None,
) -> ShardMemory:
    """Return a key-value table's cache on the device, and its states unless its rows hold them.

    The store's host memory is not counted, as in TorchRec.
    """
    rows, dim = size
    row = stored_bytes(kernel, table.optimizer, dim, table.element_bytes)
    cached = cached_share(table, kernel, size, clf, most_mib) * rows
    cache = math.ceil(cached * (row + CACHE_SLOT_BYTES))
    states = 0
    if kernel.has_load_factor:
        states = STATE_BYTES * rows * sum(e * dim + r for e, r in STATES[table.optimizer])
    return ShardMemory(ids_bytes + cache + states, 0, states, ids_bytes)


def _scattered_bytes(table: Table, workload: Workload, size: Size, copies: int) -> int:
    """Return the bytes that averaging adds under ``FULLY_SHARDED`` from forward to backward.

    A buffer for the rank's part, and where elements do not divide into parts all weights once more,
    padded (`_reduce_scatter_weights_async` in batched_embedding_kernel.py). The weights themselves
    go only when they are waited for, which is where they are gathered again.
    """
    part = -(-size[0] * size[1] // copies)
    uneven = any(t.embedding_dim % copies for t in workload.tables)
    padded = part * copies if uneven or size[1] % copies else 0
    return math.ceil((part + padded) * table.element_bytes)


def scattered_copies(workload: Workload, topology: Topology) -> int:
    """Return the number of copies that share weights between forward and backward; 1 if none."""
    groups, job = workload.replica_groups, topology.job
    if job is None or groups is None or not groups.fully_sharded or not workload.training:
        return 1
    return groups.count(job.world_size)


def is_averaged(sharding_type: ShardingType, kernel: ComputeKernel) -> bool:
    """Return true if the copies of a table stay equal: `DMPCollection.sync` averages the newest
    values of all its rows, or its gradients are all-reduced.

    ``sync`` finds fused kernels alone, and of a UVM table the rows in host memory, which are older
    than those in its cache (`split_embedding_weights` in fbgemm_gpu).
    """
    return kernel is ComputeKernel.FUSED or sharding_type is ShardingType.DATA_PARALLEL


def synced_bytes(table: Table, size: Size) -> tuple[int, int]:
    """Return the bytes of a shard's weights and states that `DMPCollection.sync` averages.

    The state is what FBGEMM's ``get_optimizer_state`` calls ``sum``, of Adagrad; SGD has none
    (`DMPCollection._cache_sync_tensors` in torchrec/distributed/model_parallel.py).
    """
    rows, columns = size
    element, row = STATES[table.optimizer][0]
    return rows * table.row_bytes(columns), (element * columns + row) * rows * STATE_BYTES


def row_parts(sharding_type: ShardingType, shards: int, topology: Topology) -> int:
    """Return the number of shards over which the ids of a sample spread."""
    if sharding_type is ShardingType.GRID_SHARD:
        return topology.intra_group_size
    return shards if sharding_type in ROW_SPLITS else 1


def _ids_bytes(
    table: Table,
    workload: Workload,
    topology: Topology,
    sharding_type: ShardingType,
    size: Size,
    shards: int,
) -> int:
    """Ids of a batch in order, with weights and lengths: they stay until those of the next one are
    looked up. Rounded down, as an exchange rounds the sum of its shards.

    A shard receives the ids of all ranks (``world_size`` times the local ids); a row shard receives
    its share of them. A replica sees its rank's batch.
    """
    batch, world = workload.batch_size, topology.world_size
    if sharding_type is ShardingType.DATA_PARALLEL:
        world = 1
    elif size[0] * size[1] == 0:
        return 0
    parts = row_parts(sharding_type, shards, topology)
    arriving = table.lookups_per_sample * batch / parts * world
    samples = sum(f.num_poolings for f in table.features) * batch * world
    travels = table.weighted and table.module not in workload.processed
    received = arriving * (INDEX_BYTES + WEIGHT_BYTES * travels) + samples * LENGTH_BYTES
    return int(received * (1 - ROUNDING))


def _flight_bytes(
    table: Table,
    workload: Workload,
    topology: Topology,
    sharding_type: ShardingType,
    size: Size,
    shards: int,
    kernel: ComputeKernel,
    *,
    on_device: bool,
) -> int:
    """Return bytes of outputs for all ranks' samples and copies, or gradients; and sorted ids.

    Of a data-parallel table the gradient, and the batch of one rank.
    """
    batch, world = workload.batch_size, topology.world_size
    copied = sharding_type is ShardingType.DATA_PARALLEL
    samples = sum(f.num_poolings for f in table.features) * batch * (1 if copied else world)
    ids = _ids_bytes(table, workload, topology, sharding_type, size, shards)
    rows = samples if table.is_pooled else ids / INDEX_BYTES
    outputs = rows * size[1] * OUTPUT_BYTES * bool(size[0])
    sorting = on_device * (SORT_COPIES * workload.training + PREFETCH_COPIES * kernel.is_cached)
    dense = kernel is ComputeKernel.DENSE and workload.training
    gradient = size[0] * table.row_bytes(size[1]) * dense
    return math.ceil((1 if copied else OUTPUT_COPIES) * outputs + sorting * ids) + gradient


@dataclass(frozen=True)
class RankMemory:
    """Memory of a plan on one rank, and capacity of the rank, in bytes.

    Args:
        hbm_bytes, ddr_bytes: of its shards, with what is in flight between them and the dense part.
        hbm_cap_bytes, ddr_cap_bytes: left for shards.
        peak: what the whole process takes, if it was worked out.
    """

    rank: int
    hbm_bytes: int
    hbm_cap_bytes: int
    ddr_bytes: int
    ddr_cap_bytes: int
    peak: RankPeak | None = None

    @property
    def missing_hbm_bytes(self) -> int:
        need, there = self.use("HBM")
        return max(0, need - there)

    @property
    def missing_ddr_bytes(self) -> int:
        need, there = self.use("DDR")
        return max(0, need - there)

    @property
    def fits(self) -> bool:
        return not self.missing_hbm_bytes and not self.missing_ddr_bytes

    def use(self, kind: str) -> tuple[int, int]:
        """Return the needed and available bytes of ``HBM`` or ``DDR``."""
        if self.peak is not None and self.peak.on_device == (kind == "HBM"):
            return self.peak.reserved_bytes, self.peak.limit_bytes
        if kind == "HBM":
            return self.hbm_bytes, self.hbm_cap_bytes
        return self.ddr_bytes, self.ddr_cap_bytes


@dataclass(frozen=True)
class RankPeak:
    """The most that one rank's process takes of its device, or of its host on CPUs, in bytes.

    Args:
        activations_bytes: most of the dense part beside what stays, lookups' outputs included.
        allocated_bytes: of tensors that are there at once.
        reserved_bytes: that the allocator takes for them.
        capacity_bytes: installed.
        limit_bytes: of these, what may be reserved.
        on_device: whether this is device memory.
    """

    activations_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    capacity_bytes: int
    limit_bytes: int
    on_device: bool = True

    @property
    def missing_bytes(self) -> int:
        return max(0, self.reserved_bytes - self.limit_bytes)


def plan_memory(
    workload: Workload, topology: Topology, plan: ShardingPlan, device: str = "cuda"
) -> list[RankMemory]:
    """Return the memory of a plan's shards on every rank, with the caps of ``topology``.

    The caps are what is left after the reservation for everything that is not sharded.
    """
    return shards_memory(workload, topology, plan, device)[0]


def resident_bytes(
    workload: Workload, topology: Topology, plan: ShardingPlan, device: str = "cuda"
) -> list[int]:
    """Return each rank's resident bytes of its shards, with states, caches and dense gradients: of
    device memory, or of host memory on CPUs."""
    return shards_memory(workload, topology, plan, device)[1]


def shards_memory(
    workload: Workload, topology: Topology, plan: ShardingPlan, device: str = "cuda"
) -> tuple[list[RankMemory], list[int]]:
    """Return `plan_memory` and `resident_bytes`, in one pass over the shards."""
    ranks: list[int] = []
    memories: list[ShardMemory] = []
    for key, table in zip(workload.keys, workload.tables, strict=True):
        sharded = plan.tables[key]
        ranks += [shard.rank for shard in sharded.shards]
        memories += shard_memory(
            table,
            workload,
            topology,
            sharded.sharding_type,
            sharded.compute_kernel,
            [shard.size for shard in sharded.shards],
            sharded.cache_load_factor,
            device=device,
            enforce_hbm=bool(sharded.parameters.get("enforce_hbm")),
            most_cache_mib=sharded.store_caches[0],
        )
    world = topology.world_size
    columns = (
        [memory.hbm_bytes for memory in memories],
        [memory.ddr_bytes for memory in memories],
        [memory.io_bytes for memory in memories],
    )
    # whole numbers below 2**53, whose sums are exact
    hbm, ddr, io = (np.bincount(ranks, column, world).astype(np.int64) for column in columns)
    for rank, more in _sharing_bytes(workload, plan, device).items():
        hbm[rank] += more
    resident = (ddr if device == "cpu" else hbm) - io
    caps = zip(topology.hbm_cap_bytes, topology.ddr_cap_bytes, strict=True)
    return [
        RankMemory(rank, device_bytes, hbm_cap, host_bytes, ddr_cap)
        for rank, (device_bytes, host_bytes, (hbm_cap, ddr_cap)) in enumerate(
            zip(hbm.tolist(), ddr.tolist(), caps, strict=True)
        )
    ], resident.tolist()


def _sharing_bytes(workload: Workload, plan: ShardingPlan, device: str) -> dict[int, int]:
    """Return rank -> bytes of caches beyond the shards that share them; empty on CPUs."""
    return {} if device == "cpu" else plan_sharing_bytes(workload, plan)


def fits(memory: Sequence[RankMemory]) -> bool:
    return all(rank.fits for rank in memory)


def missing(memory: Sequence[RankMemory]) -> str:
    """Describe the missing memory by rank, worst first; empty if everything fits."""
    lines = []
    worst = sorted(memory, key=lambda r: -(r.missing_hbm_bytes + r.missing_ddr_bytes))
    for rank in worst:
        for kind, short in (("HBM", rank.missing_hbm_bytes), ("DDR", rank.missing_ddr_bytes)):
            if short:
                need, cap = rank.use(kind)
                on_host = kind == "HBM" and rank.peak is not None and not rank.peak.on_device
                memory_kind = "memory" if on_host else kind
                lines.append(
                    f"rank {rank.rank} lacks {format_bytes(short, round_up=True)} of "
                    f"{memory_kind}: needs {format_bytes(need)}, has {format_bytes(cap)}"
                )
    return "; ".join(lines)

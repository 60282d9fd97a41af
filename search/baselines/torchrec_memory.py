"""What TorchRec's planner estimates that a shard needs: `EmbeddingStorageEstimator.estimate` and
`calculate_shard_storages` in planner/shard_estimators.py, re-derived and tested against them.

`predictor.model.memory.ranks` says where FBGEMM allocates something else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from predictor.model.memory.caches import DEFAULT_CACHE_LOAD_FACTOR
from predictor.model.memory.ranks import (
    UVM_KERNELS,
    ShardMemory,
    Size,
    row_parts,
)
from predictor.model.plan import ComputeKernel, ShardingType
from predictor.model.topology import Topology
from predictor.model.workload import INDEX_BYTES, Optimizer, Table, Workload
from predictor.units import mib


def torchrec_memory(
    table: Table,
    workload: Workload,
    topology: Topology,
    sharding_type: ShardingType,
    kernel: ComputeKernel,
    sizes: Sequence[Size],
    cache_load_factor: float | None = None,
    *,
    device: str = "cuda",
) -> list[ShardMemory]:
    """Memory of every shard of a table, as `predictor.model.memory.ranks.shard_memory`."""
    clf = cache_load_factor or DEFAULT_CACHE_LOAD_FACTOR
    cached = kernel is ComputeKernel.FUSED_UVM_CACHING or kernel.is_stored
    multiplier = _optimizer_multiplier(table) if workload.training else 0.0

    def of_shard(size: Size) -> ShardMemory:
        weights = size[0] * table.row_bytes(size[1])
        state = math.ceil(weights * multiplier)
        inputs, outputs = _io_bytes(table, workload, topology, sharding_type, size, len(sizes))
        if not workload.training:
            inputs = outputs = 0  # `calculate_pipeline_io_cost`
        if device == "cpu":
            io = inputs + outputs
            return ShardMemory(0, weights + state + io, state, io)
        io = _held_io_bytes(workload.train_pipeline, inputs, outputs, cached=cached)
        if kernel.is_stored:
            most = mib(table.constraints.max_l1_cache_size or 0)
            return ShardMemory(io + min(most, math.ceil(table.weight_bytes * clf)), 0, 0, io)
        if kernel not in UVM_KERNELS:
            return ShardMemory(io + weights + state, 0, state, io)
        cache = math.ceil(weights * clf) if cached else 0
        shadow = math.ceil(cache * multiplier)
        hbm = io + cache + shadow + (_cache_state_bytes(size[0], clf) if cached else 0)
        return ShardMemory(hbm, weights + state, state + shadow, io)

    known = {size: of_shard(size) for size in dict.fromkeys(sizes)}
    return [known[size] for size in sizes]


def _optimizer_multiplier(table: Table) -> float:
    """Optimizer bytes per weight byte in `_get_optimizer_multipler` of shard_estimators.py."""
    if table.optimizer in (Optimizer.SGD, Optimizer.EXACT_SGD):
        return 0.0
    if table.optimizer == Optimizer.ADAM:
        return 2.0
    if table.optimizer == Optimizer.ROWWISE_ADAGRAD:
        return 1.0 / table.embedding_dim
    return 1.0


def _held_io_bytes(train_pipeline: str, inputs: int, outputs: int, *, cached: bool) -> int:
    """`calculate_pipeline_io_cost`: the pipelines hold two or three batches of ids, the prefetch of
    a UVM cache seven more at its peak; the outputs are gone before the peak."""
    if train_pipeline in ("sparse_dist", "semi_sync"):
        return 2 * inputs
    if train_pipeline == "prefetch_sparse_dist":
        return (10 if cached else 3) * inputs
    return inputs + outputs


def _io_bytes(
    table: Table,
    workload: Workload,
    topology: Topology,
    sharding_type: ShardingType,
    size: Size,
    shards: int,
) -> tuple[int, int]:
    """Bytes of ids in and of embeddings out of one shard (`_calculate_shard_io_sizes`)."""
    batch = workload.batch_size
    ids = table.lookups_per_sample * batch
    world = topology.world_size
    if sharding_type is ShardingType.DATA_PARALLEL:
        world = 1
    elif size[0] * size[1] == 0:
        return 0, 0
    arriving = ids / row_parts(sharding_type, shards, topology) * world
    written = arriving
    if table.is_pooled:
        rows = sum(min(1.0, f.pooling_factor) * f.num_poolings for f in table.features)
        written = rows * batch * world
    return math.ceil(arriving * INDEX_BYTES), math.ceil(written * size[1] * table.element_bytes)


def _cache_state_bytes(rows: int, clf: float) -> int:
    """Index-to-table map of 4 bytes a row; index and timestamp of 8 bytes each a cached row
    (`_calculate_cache_aux_state_sizes`)."""
    return math.ceil(rows * (4 + clf * 16))

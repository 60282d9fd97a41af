"""Memory per rank in bytes: what a plan needs, what a rank has, and what is missing.

The rules are those of TorchRec's planner (`EmbeddingStorageEstimator.estimate` and
`calculate_shard_storages` in planner/shard_estimators.py, `HeuristicalStorageReservation` in
planner/storage_reservations.py), re-derived and tested against them. `MemoryRules.FBGEMM`, the
default, departs from them where FBGEMM allocates something else
(split_table_batched_embeddings_ops_training.py, `SplitTableBatchedEmbeddingBagsCodegen`):

* Optimizer state is known from the workload. TorchRec sees it only when it was attached with
  ``apply_optimizer_in_backward`` and counts zero when it is given through ``fused_params``.
* State is fp32 for weights of any dtype; TorchRec counts it in the dtype of the weights.
* Row-wise Adagrad holds one value a row *of the shard*; TorchRec divides by the table's dim, so a
  column shard's share is too small. Partial row-wise Adam and LAMB have second moments that
  TorchRec's multiplier of 1 leaves out.
* State of a UVM-cached table is not cached (``cacheable=False``): it lies in host memory alone.
  TorchRec counts a share of it in HBM too.
* ``enforce_hbm`` moves weights and first moment of a UVM table to HBM.
* A table with a dense kernel (every `data_parallel` one) has a dense gradient and is stepped by
  the dense optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from predictor.model.plan import ComputeKernel, ShardingPlan, ShardingType
from predictor.model.reservation import INDEX_BYTES as INDEX_BYTES
from predictor.model.reservation import dense_parameters as dense_parameters
from predictor.model.reservation import reserve_topology as reserve_topology
from predictor.model.reservation import reserved_bytes as reserved_bytes
from predictor.model.topology import Topology
from predictor.model.workload import Optimizer, Table, Workload
from predictor.units import format_bytes

Size = tuple[int, int]

DEFAULT_CACHE_LOAD_FACTOR = 0.2
"""TorchRec's `UVM_CACHING_RATIO`, and the default of FBGEMM's ``cache_load_factor``."""
STATE_BYTES = 4
"""FBGEMM keeps optimizer state in fp32."""
UVM_KERNELS = (ComputeKernel.FUSED_UVM, ComputeKernel.FUSED_UVM_CACHING)


class MemoryRules(StrEnum):
    """Which rules count: what FBGEMM allocates, or TorchRec's estimate."""

    FBGEMM = "fbgemm"
    TORCHREC = "torchrec"


# optimizer -> (values per element, values per row) of the first and of the second moment
_STATES: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    Optimizer.SGD: ((0, 0), (0, 0)),
    Optimizer.EXACT_SGD: ((0, 0), (0, 0)),
    Optimizer.ROWWISE_ADAGRAD: ((0, 1), (0, 0)),
    Optimizer.ADAGRAD: ((1, 0), (0, 0)),
    Optimizer.LARS_SGD: ((1, 0), (0, 0)),
    Optimizer.ADAM: ((1, 0), (1, 0)),
    Optimizer.LAMB: ((1, 0), (1, 0)),
    Optimizer.PARTIAL_ROWWISE_ADAM: ((1, 0), (0, 1)),
}
_DENSE_STATES = {"sgd": 0, "exact_sgd": 0, "adagrad": 1, "exact_adagrad": 1, "adam": 2, "adamw": 2}
"""Values of state per parameter of the dense optimizers, in the parameter's dtype."""


@dataclass(frozen=True)
class ShardMemory:
    """What one shard needs on its rank, in bytes.

    Args:
        hbm_bytes: device memory, everything included.
        ddr_bytes: host memory, everything included.
        optimizer_bytes: of these, fused optimizer state (device and host).
        io_bytes: of these, ids in and embeddings out as the train pipeline holds them.
        dense_bytes: of these, dense gradient and dense optimizer state, which TorchRec omits.
    """

    hbm_bytes: int
    ddr_bytes: int
    optimizer_bytes: int = 0
    io_bytes: int = 0
    dense_bytes: int = 0


@dataclass(frozen=True)
class RankMemory:
    """What a plan's shards need on one rank, and what the rank has, in bytes."""

    rank: int
    hbm_bytes: int
    hbm_cap_bytes: int
    ddr_bytes: int
    ddr_cap_bytes: int

    @property
    def missing_hbm_bytes(self) -> int:
        """Device memory that is missing; 0 when it fits."""
        return max(0, self.hbm_bytes - self.hbm_cap_bytes)

    @property
    def missing_ddr_bytes(self) -> int:
        """Host memory that is missing; 0 when it fits."""
        return max(0, self.ddr_bytes - self.ddr_cap_bytes)

    @property
    def fits(self) -> bool:
        """Nothing is missing."""
        return not self.missing_hbm_bytes and not self.missing_ddr_bytes


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
    rules: MemoryRules = MemoryRules.FBGEMM,
) -> list[ShardMemory]:
    """Memory of every shard of a table.

    Args:
        sizes: ``[rows, columns]`` of every shard.
        cache_load_factor: rows in the UVM cache as a share of the shard's; TorchRec's 0.2 if None.
        device: ``cuda``, or ``cpu`` where everything is host memory.
        enforce_hbm: FBGEMM's flag for UVM tables.
    """
    clf = cache_load_factor if cache_load_factor else DEFAULT_CACHE_LOAD_FACTOR
    known: dict[Size, ShardMemory] = {}
    count = _on_cpu if device == "cpu" else _on_cuda
    for size in sizes:
        if size not in known:
            io = _io_bytes(table, workload, topology, sharding_type, size, len(sizes))
            shard = _Shard(table, workload, kernel, size, clf, enforce_hbm)
            known[size] = count(shard, io, rules)
    return [known[size] for size in sizes]


@dataclass(frozen=True)
class _Shard:
    table: Table
    workload: Workload
    kernel: ComputeKernel
    size: Size
    clf: float
    enforce_hbm: bool

    @property
    def weight_bytes(self) -> int:
        return self.size[0] * self.size[1] * self.table.element_bytes

    @property
    def is_dense(self) -> bool:
        return self.kernel is ComputeKernel.DENSE

    def states(self, rules: MemoryRules) -> tuple[int, int]:
        """Bytes of the first and of the second moment of the fused optimizer."""
        if rules is MemoryRules.TORCHREC:
            return math.ceil(self.weight_bytes * _torchrec_multiplier(self.table)), 0
        if self.is_dense:
            return 0, 0
        rows, columns = self.size
        first, second = (
            (element * columns + row) * rows * STATE_BYTES
            for element, row in _STATES[self.table.optimizer]
        )
        return first, second

    def dense_bytes(self, rules: MemoryRules) -> int:
        """Dense gradient (DDP's bucket is a view of it) and dense optimizer state."""
        if not self.is_dense or rules is MemoryRules.TORCHREC:
            return 0
        return self.weight_bytes * (1 + _DENSE_STATES.get(self.workload.dense.optimizer, 2))


def _torchrec_multiplier(table: Table) -> float:
    """Optimizer bytes per weight byte in `_get_optimizer_multipler` of shard_estimators.py."""
    if table.optimizer in (Optimizer.SGD, Optimizer.EXACT_SGD):
        return 0.0
    if table.optimizer == Optimizer.ADAM:
        return 2.0
    if table.optimizer == Optimizer.ROWWISE_ADAGRAD:
        return 1.0 / table.embedding_dim
    return 1.0


def _on_cpu(shard: _Shard, io: tuple[int, int], rules: MemoryRules) -> ShardMemory:
    optimizer, dense = sum(shard.states(rules)), shard.dense_bytes(rules)
    total = shard.weight_bytes + optimizer + dense + sum(io)
    return ShardMemory(0, total, optimizer, sum(io), dense)


def _on_cuda(shard: _Shard, io: tuple[int, int], rules: MemoryRules) -> ShardMemory:
    first, second = shard.states(rules)
    dense = shard.dense_bytes(rules)
    cached = shard.kernel is ComputeKernel.FUSED_UVM_CACHING
    pipelined = _pipelined_io_bytes(*io, cached, shard.workload.train_pipeline)
    hbm, ddr, state = pipelined + dense, 0, first + second
    if shard.kernel not in UVM_KERNELS:
        return ShardMemory(hbm + shard.weight_bytes + state, ddr, state, pipelined, dense)
    if cached:
        cache = math.ceil(shard.weight_bytes * shard.clf)
        hbm += cache + _cache_state_bytes(shard.size[0], shard.clf)
        if rules is MemoryRules.TORCHREC:
            shadow = math.ceil(cache * _torchrec_multiplier(shard.table))
            hbm, state = hbm + shadow, state + shadow
    if shard.enforce_hbm and rules is MemoryRules.FBGEMM:
        hbm, ddr = hbm + shard.weight_bytes + first, second
    else:
        ddr = shard.weight_bytes + first + second
    return ShardMemory(hbm, ddr, state, pipelined, dense)


def _cache_state_bytes(rows: int, clf: float) -> int:
    """Index-to-table map of 4 bytes a row; index and timestamp of 8 bytes each a cached row.

    TorchRec's `_calculate_cache_aux_state_sizes`, after FBGEMM's `construct_cache_state`.
    """
    return math.ceil(rows * (4 + clf * 16))


def _pipelined_io_bytes(inputs: int, outputs: int, cached: bool, train_pipeline: str) -> int:
    """Copies of ids and embeddings that are alive at once.

    `calculate_pipeline_io_cost` in shard_estimators.py: the pipelines hold two or three batches of
    ids, the prefetch of a UVM cache seven more at its peak; the outputs are gone before the peak.
    """
    if train_pipeline == "sparse_dist":
        return 2 * inputs
    if train_pipeline == "prefetch_sparse_dist":
        return 3 * inputs + (7 * inputs if cached else 0)
    return inputs + outputs


def _io_bytes(
    table: Table,
    workload: Workload,
    topology: Topology,
    sharding_type: ShardingType,
    size: Size,
    shards: int,
) -> tuple[int, int]:
    """Bytes of ids in and of embeddings out of one shard (`_calculate_shard_io_sizes`).

    A shard receives the ids of all ranks (``world_size`` times the local ids); a row shard receives
    its share of them, but writes a partial sum for every sample. A replica sees its rank's batch.
    """
    batch, world = workload.batch_size, topology.world_size
    ids = sum(f.pooling_factor * f.num_poolings for f in table.features) * batch
    outputs = ids
    if table.is_pooled:
        outputs = sum(min(1.0, f.pooling_factor) * f.num_poolings for f in table.features) * batch
    rows, columns = size
    if sharding_type is ShardingType.DATA_PARALLEL:
        world, parts = 1, 1
    elif rows * columns == 0:
        return 0, 0
    elif sharding_type in (ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE):
        parts = shards
    elif sharding_type is ShardingType.GRID_SHARD:
        parts = topology.intra_group_size
    else:
        parts = 1
    arriving = ids / parts * world
    written = outputs * world if table.is_pooled else arriving
    return (
        math.ceil(arriving * INDEX_BYTES),
        math.ceil(written * columns * table.element_bytes),
    )


def plan_memory(
    workload: Workload, topology: Topology, plan: ShardingPlan, device: str = "cuda"
) -> list[RankMemory]:
    """What the shards of a plan need on every rank, with the caps of ``topology``.

    The caps are what is left after the reservation for everything that is not sharded.
    """
    hbm, ddr = [0] * topology.world_size, [0] * topology.world_size
    for key, table in zip(workload.keys, workload.tables, strict=True):
        sharded = plan.tables[key]
        memories = shard_memory(
            table,
            workload,
            topology,
            sharded.sharding_type,
            sharded.compute_kernel,
            [s.size for s in sharded.shards],
            sharded.cache_load_factor,
            device=device,
            enforce_hbm=bool(sharded.parameters.get("enforce_hbm")),
        )
        for shard, memory in zip(sharded.shards, memories, strict=True):
            hbm[shard.rank] += memory.hbm_bytes
            ddr[shard.rank] += memory.ddr_bytes
    return [
        RankMemory(r, hbm[r], topology.hbm_cap_bytes[r], ddr[r], topology.ddr_cap_bytes[r])
        for r in range(topology.world_size)
    ]


def fits(memory: Sequence[RankMemory]) -> bool:
    """Every rank has what it needs."""
    return all(rank.fits for rank in memory)


def missing(memory: Sequence[RankMemory]) -> str:
    """How many bytes are missing on which rank, worst first; empty when everything fits."""
    lines = []
    worst = sorted(memory, key=lambda r: -(r.missing_hbm_bytes + r.missing_ddr_bytes))
    for rank in worst:
        for kind, short, need, cap in (
            ("HBM", rank.missing_hbm_bytes, rank.hbm_bytes, rank.hbm_cap_bytes),
            ("DDR", rank.missing_ddr_bytes, rank.ddr_bytes, rank.ddr_cap_bytes),
        ):
            if short:
                lines.append(
                    f"rank {rank.rank} misses {short} bytes of {kind} ({format_bytes(short)}): "
                    f"needs {format_bytes(need)}, has {format_bytes(cap)}"
                )
    return "; ".join(lines)

"""TorchRec's own cost of a shard, for the baseline that searches as TorchRec does.

Re-derived from the evaluators in planner/estimator/estimator.py (`TableWiseEvaluator`,
`RowWiseEvaluator`, `TableRowWiseEvaluator`, `DataParallelEvaluator`) with the constants of
planner/constants.py. It is *not* shardopt's prediction; docs/model.md has that.

The order of multiplications is TorchRec's: its partitioner breaks ties on exact floats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from predictor.model.memory.ranks import DEFAULT_CACHE_LOAD_FACTOR
from predictor.model.plan import ComputeKernel, ShardingType
from predictor.model.topology import Topology
from predictor.model.workload import DATA_TYPE_BYTES, Table, Workload
from predictor.units import GIB
from search.space.option import Option

INDEX_BYTES = 8
MIN_LOOKUP_DIM = 32
FULL_BLOCK, HALF_BLOCK = 128, 64
HALF_PENALTY, QUARTER_PENALTY = 1.15, 1.75
BACKWARD = 2
WEIGHTED_KERNEL = 1.1
BATCHED_COPY = 2.455
DATA_PARALLEL_ELEMENTWISE = 9.22


def _gib_per_s(value: float) -> float:
    """TorchRec writes ``x * 1024 * 1024 * 1024 / 1000``: GiB/s as bytes/ms."""
    return value * GIB / 1000


@dataclass(frozen=True)
class Bandwidths:
    """Bytes/ms, with TorchRec's defaults (planner/constants.py): those of a V100 on any GPU."""

    hbm: float = _gib_per_s(897)
    ddr: float = _gib_per_s(51)
    hbm_to_ddr: float = _gib_per_s(32)
    intra_host: float = _gib_per_s(600)
    inter_host: float = _gib_per_s(12.5)


class Perf(NamedTuple):
    """Milliseconds of one shard, the parts of TorchRec's `Perf` that its total sums."""

    fwd_compute: float
    fwd_comms: float
    bwd_compute: float
    bwd_comms: float

    @property
    def total(self) -> float:
        """Their sum, in TorchRec's order."""
        return self.fwd_compute + self.bwd_compute + self.fwd_comms + self.bwd_comms


@dataclass(frozen=True)
class CostModel:
    """Costs of the options of a workload on a topology."""

    workload: Workload
    topology: Topology
    device: str = "cuda"
    bandwidths: Bandwidths = Bandwidths()

    def shard_perf(self, option: Option) -> Perf:
        """Cost of any one shard of the option: TorchRec's does not depend on the rows."""
        table = self.workload.tables[option.table]
        columns = option.column_width
        if option.sharding_type is ShardingType.DATA_PARALLEL:
            return self._data_parallel(table, option.compute_kernel)
        bw = self._kernel_bw(option.compute_kernel, option.cache_load_factor)
        if option.sharding_type is ShardingType.ROW_WISE:
            return self._row_wise(table, columns, bw)
        if option.sharding_type in (ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD):
            return self._table_row_wise(table, columns, bw)
        return self._table_wise(table, columns, bw)

    def _ids(self, table: Table) -> float:
        batch = self.workload.batch_size
        return sum(f.pooling_factor * f.num_poolings * batch for f in table.features)

    def _outputs(self, table: Table) -> float:
        if not table.is_pooled:
            return self._ids(table)
        batch = self.workload.batch_size
        return sum(min(1.0, f.pooling_factor) * f.num_poolings * batch for f in table.features)

    def _comm_bytes(self, table: Table, *, backward: bool) -> int:
        """Bytes of an element on the wire: the codec's, or the table's where there is none."""
        qcomm = self.workload.qcomm
        if qcomm.forward == qcomm.backward == "fp32":
            return table.element_bytes
        return DATA_TYPE_BYTES[qcomm.backward if backward else qcomm.forward]

    def _kernel_bw(self, kernel: ComputeKernel, clf: float | None) -> float:
        """`kernel_bw_lookup` in planner/constants.py."""
        memory = self.bandwidths.ddr if self.device == "cpu" else self.bandwidths.hbm
        if kernel is ComputeKernel.DENSE:
            return 0.5 * memory
        if kernel is ComputeKernel.FUSED:
            return 1 * memory
        if kernel is ComputeKernel.FUSED_UVM:
            return self.bandwidths.hbm_to_ddr / 10
        clf = DEFAULT_CACHE_LOAD_FACTOR if clf is None else clf
        return (clf * self.bandwidths.hbm + (1 - clf) * self.bandwidths.hbm_to_ddr) / 10

    def _wire_bw(self, world: int, local: int) -> float:
        """`BasicCommsBandwidths.get_bw` in planner/types.py, all but the all-reduce."""
        return self.bandwidths.intra_host if world <= local else self.bandwidths.inter_host

    def _compute(self, table: Table, size: float, bw: float) -> tuple[float, float]:
        """Forward and backward time; ``size`` in bytes."""
        forward = size / bw
        backward = forward * BACKWARD
        return forward, backward + (forward * WEIGHTED_KERNEL if table.weighted else 0.0)

    def _input_bytes(self, table: Table, ids: float) -> int:
        return math.ceil(ids * INDEX_BYTES) * (2 if table.weighted else 1)

    def _table_wise(self, table: Table, columns: int, bw: float) -> Perf:
        world, element = self.topology.world_size, table.element_bytes
        ids, outputs = self._ids(table), self._outputs(table)
        size = self._input_bytes(table, ids * world)
        size += ids * world * max(columns, MIN_LOOKUP_DIM) * element  # type: ignore[assignment]
        sent = outputs * world * columns * self._comm_bytes(table, backward=False)
        returned = outputs * world * columns * self._comm_bytes(table, backward=True)
        forward, backward = self._compute(table, (size + sent) * _penalty(columns), bw)
        wire = self._wire_bw(world, self.topology.local_world_size)
        return Perf(forward, sent / wire, backward, returned / wire)

    def _row_wise(self, table: Table, columns: int, bw: float) -> Perf:
        world = self.topology.world_size
        size, sent, returned = self._by_row(table, columns, world)
        forward, backward = self._compute(table, size + sent, bw)
        wire = self._wire_bw(world, self.topology.local_world_size)
        copied = returned * BATCHED_COPY / bw
        return Perf(forward, sent / wire, backward, returned / wire + copied)

    def _by_row(self, table: Table, columns: int, parts: int) -> tuple[float, float, float]:
        """Bytes read, sent forward and sent backward when ``parts`` ranks share the rows."""
        world = self.topology.world_size
        ids, outputs = self._ids(table), self._outputs(table)
        read = self._input_bytes(table, ids / parts * world)
        lookups = ids / parts * world * columns * table.element_bytes
        written = outputs * world if table.is_pooled else outputs / parts * world
        sent = written * columns * self._comm_bytes(table, backward=False)
        returned = written * columns * self._comm_bytes(table, backward=True)
        return read + lookups, sent, returned

    def _table_row_wise(self, table: Table, columns: int, bw: float) -> Perf:
        group, groups = self.topology.intra_group_size, self.topology.groups
        size, sent, returned = self._by_row(table, columns, group)
        forward, backward = self._compute(table, size + sent, bw)
        wire = self._wire_bw(group, min(group, self.topology.local_world_size))
        across, back = 0.0, 0.0
        if groups > 1:
            outputs = self._outputs(table) * groups * columns
            inter = self._wire_bw(groups, 1)
            across = outputs * self._comm_bytes(table, backward=False) / inter
            back = outputs * self._comm_bytes(table, backward=True) / inter
        copied = returned * BATCHED_COPY / bw
        return Perf(forward, sent / wire + across, backward, back + returned / wire + copied)

    def _data_parallel(self, table: Table, kernel: ComputeKernel) -> Perf:
        world, local = self.topology.world_size, self.topology.local_world_size
        bw = self._kernel_bw(kernel, None)
        ids, dim, element = self._ids(table), table.embedding_dim, table.element_bytes
        size = self._input_bytes(table, ids) + ids * dim * element
        forward, backward = self._compute(table, size + self._outputs(table) * dim * element, bw)
        weights = table.num_embeddings * dim * element
        nodes = min(world / local, 2)
        all_reduce = weights * (2 * nodes - 1) / nodes / (self.bandwidths.inter_host * local)
        if world > 2 * local:
            all_reduce *= 2
        return Perf(forward, 0.0, backward, all_reduce + weights * DATA_PARALLEL_ELEMENTWISE / bw)


def _penalty(columns: int) -> float:
    """`compute_block_usage_penalty`: narrow rows leave lanes of the kernel idle."""
    if columns >= FULL_BLOCK:
        return 1.0
    return HALF_PENALTY if columns >= HALF_BLOCK else QUARTER_PENALTY

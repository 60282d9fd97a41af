"""Kernel model of FBGEMM's TBE on one CPU thread (docs/model.md, chapter 7).

A distinct row costs a cache miss and, where the rows spread over more memory than the TLB reaches,
an address translation. The backward adds one pass of the radix sort per digit of the row number;
that of a dense gradient (data-parallel tables) is another kernel, which does not sort. Lookups
without pooling have two more kernels: the forward copies rows, the backward finds the ids of each
distinct row, adds their gradients and steps it, row by row.
"""

from __future__ import annotations

import math

from predictor import units
from predictor.cost.lookup.shard import GRADIENT_ELEMENT_BYTES, LookupModel, LookupShard
from predictor.hardware.schema import CpuEmbedding, HardwareProfile
from predictor.model.plan import ComputeKernel
from predictor.model.workload import Optimizer

STATELESS = (Optimizer.SGD, Optimizer.EXACT_SGD)


class CpuLookups(LookupModel):
    def __init__(self, hw: HardwareProfile, constants: CpuEmbedding) -> None:
        self.hw = hw
        self.constants = constants

    def forward_floor_ms(self) -> float:
        return units.us(self.constants.forward_us)

    def backward_floor_ms(self) -> float:
        return units.us(self.constants.backward_us)

    def forward_ms(self, shard: LookupShard, tables: float = 1.0) -> float:
        if shard.ids <= 0:
            return 0.0
        cost, ids, rows = self.constants, shard.ids, shard.distinct_rows
        if not shard.pooled and cost.backward_unpooled_ns_per_row > 0:
            of_id = cost.forward_unpooled_ns_per_lookup_dim * shard.dim
            of_row = cost.forward_unpooled_ns_per_row_dim * shard.dim
            nanoseconds = ids * (cost.forward_unpooled_ns_per_lookup + of_id)
            nanoseconds += rows * (cost.forward_unpooled_ns_per_row + of_row)
            return units.us(cost.forward_unpooled_table_us + nanoseconds * 1e-3)
        nanoseconds = (
            ids * (cost.forward_ns_per_lookup + cost.forward_ns_per_lookup_dim * shard.dim)
            + rows * (cost.forward_ns_per_row + cost.forward_ns_per_row_dim * shard.dim)
            + rows * cost.forward_ns_per_row_tlb * self._tlb(shard, rows)
            + shard.bags * shard.dim * cost.forward_ns_per_output
        )
        return units.us(cost.forward_table_us + nanoseconds * 1e-3)

    def backward_ms(self, shard: LookupShard) -> float:
        """Sort, accumulate, update each distinct row once."""
        if shard.ids <= 0 and shard.kernel is not ComputeKernel.DENSE:
            return 0.0
        if shard.kernel is ComputeKernel.DENSE and self.constants.backward_dense_ns_per_weight > 0:
            return self._dense_backward_ms(shard)
        cost, ids, rows = self.constants, shard.ids, shard.distinct_rows
        digits = math.ceil(math.log2(max(shard.rows, 2)) / cost.sort_digit_bits)
        nanoseconds = (
            ids * (cost.backward_ns_per_lookup + cost.backward_ns_per_lookup_dim * shard.dim)
            + ids * cost.backward_ns_per_lookup_pass * digits
            + rows * (cost.backward_ns_per_row + cost.backward_ns_per_row_dim * shard.dim)
            + rows * cost.backward_ns_per_row_tlb * self._tlb(shard, rows)
            + shard.bags * shard.dim * cost.backward_ns_per_output
        )
        time = units.us(cost.backward_table_us + nanoseconds * 1e-3)
        if not shard.pooled and cost.backward_unpooled_ns_per_row > 0:
            of_id = cost.backward_unpooled_ns_per_lookup_dim * shard.dim
            of_row = cost.backward_unpooled_ns_per_row_dim * shard.dim
            nanoseconds = ids * of_id + rows * (cost.backward_unpooled_ns_per_row + of_row)
            time = units.us(cost.backward_unpooled_table_us + nanoseconds * 1e-3)
        if shard.kernel is ComputeKernel.DENSE or shard.optimizer in STATELESS:
            time *= cost.backward_stateless
        if shard.weighted:
            time *= cost.backward_weighted
        if shard.kernel is ComputeKernel.DENSE:
            time += float(shard.rows) * shard.dim * GRADIENT_ELEMENT_BYTES / self.hw.memory.hbm
        return time

    def _dense_backward_ms(self, shard: LookupShard) -> float:
        """Zeros, then one addition an id; weights of the ids are multiplied in either way."""
        cost, dim = self.constants, shard.dim
        nanoseconds = (
            float(shard.rows) * dim * cost.backward_dense_ns_per_weight
            + shard.ids * cost.backward_dense_ns_per_lookup
            + shard.ids * dim * cost.backward_dense_ns_per_lookup_dim
            + shard.distinct_rows * dim * cost.backward_dense_ns_per_row_dim
        )
        return units.us(cost.backward_dense_table_us + nanoseconds * 1e-3)

    def _tlb(self, shard: LookupShard, distinct: float) -> float:
        """``ln(1 + working set / TLB reach)``; each distinct row touches ``page_kib`` of memory."""
        table = float(shard.rows) * shard.dim * shard.element_bytes
        touched = distinct * 1024 * self.constants.page_kib
        return math.log1p(min(table, touched) / units.mib(self.constants.tlb_mib))

"""FBGEMM's fused table-batched embedding (TBE) on a GPU: which bytes move where.

Sources: the kernels of FBGEMM (codegen/training/forward/embedding_forward_split_template.cu,
codegen/training/backward/embedding_backward_split_template.cu, transpose_embedding_input.cu,
lru_cache_populate.cu) for what is read and written; Lin et al. 2022, section on embedding lookups
(arXiv 2201.07821), for charging hits to L2 and misses to HBM with a cold cache. Where Lin et al.
assume uniform ids, distinct rows and hits come from the index distribution (Che et al. 2002).

The kernels walk bags table by table (``t = bag / B``), so tables use the L2 one after the other and
the cost of a shard does not depend on its neighbours in the launch.
"""

from __future__ import annotations

import math

from predictor import units
from predictor.kernels.lookup_shard import GRADIENT_ELEMENT_BYTES, LookupShard, state_row_bytes
from predictor.plan import ComputeKernel
from predictor.profile_groups import CudaEmbedding
from predictor.profile_schema import HardwareProfile

ID_WEIGHT_BYTES = 4


class CudaLookups:
    """Costs of TBE shards on a GPU; see the module's text."""

    def __init__(self, hw: HardwareProfile, law: CudaEmbedding) -> None:
        self.hw = hw
        self.law = law

    def forward_floor_ms(self) -> float:
        """Shortest forward of a fused launch."""
        return units.us(self.law.kernel_us * self.law.forward_kernels)

    def backward_floor_ms(self) -> float:
        """Shortest backward of a fused launch: the passes of the sort, then the update."""
        return units.us(self.law.kernel_us * self.law.backward_kernels)

    def prefetch_floor_ms(self) -> float:
        """Shortest prefetch of a fused launch."""
        return units.us(self.law.kernel_us * self.law.prefetch_kernels)

    def forward_ms(self, shard: LookupShard) -> float:
        """Ids and offsets stream in, rows are gathered, pooled outputs stream out.

        ``max(HBM bytes / (efficiency BW_hbm), gathered bytes / BW_l2)``; of the rows only the
        expected misses of the L2 go to HBM.
        """
        ids = shard.ids
        id_bytes = self.law.index_bytes + ID_WEIGHT_BYTES * shard.weighted
        streamed = ids * id_bytes + shard.bags * (
            self.law.bag_bytes + self._sectors(shard.dim * shard.output_bytes)
        )
        row = self._row_cost(shard.dim * shard.element_bytes)
        over_link = 0.0
        if shard.kernel is ComputeKernel.FUSED_UVM:
            over_link = self._link_ms(ids * self._row_bytes(shard))
            misses = 0.0
        else:
            misses = ids - self._l2_hits(shard)
        from_hbm = (streamed + misses * row) / (self.law.forward_efficiency * self.hw.memory.hbm)
        from_l2 = ids * row / self.hw.memory.l2
        time = max(from_hbm, from_l2, over_link)
        if shard.kernel is ComputeKernel.FUSED_UVM_CACHING:
            time += self.prefetch_ms(shard)
        return time

    def backward_ms(self, shard: LookupShard) -> float:
        """Sort the ids, then gather gradients row by row and update each distinct row once."""
        gradients, updates = self._gradient_bytes(shard), self._update_bytes(shard)
        bandwidth = self.law.backward_efficiency * self.hw.memory.hbm
        gathered = shard.ids * self._row_cost(shard.dim * GRADIENT_ELEMENT_BYTES)
        update = max(
            (gradients + updates) / bandwidth,
            gathered / self.hw.memory.l2,
            self._longest_segment_ms(shard),
        )
        # what lies in host memory crosses the full-duplex link once each way
        update = max(update, self._link_ms(shard.distinct_rows * self._managed_row_bytes(shard)))
        return self._sort_ms(shard) + update

    def prefetch_ms(self, shard: LookupShard) -> float:
        """Probing the UVM cache, then fetching misses while evicted rows go back.

        A row is fetched at most once an iteration; in the steady state the ids miss as an LRU cache
        of the same rows would (Che's approximation).
        """
        if shard.kernel is not ComputeKernel.FUSED_UVM_CACHING:
            return 0.0
        ids = shard.ids
        hit_rate = shard.bins.hit_rate(shard.cache_load_factor * shard.rows)
        fetched = min(shard.distinct_rows, ids * (1.0 - hit_rate))
        probe = units.us(self.law.prefetch_ns_per_lookup * 1e-3) * ids
        return probe + self._link_ms(fetched * self._row_bytes(shard))

    def _sectors(self, size: float) -> float:
        sector = self.hw.memory.sector_bytes
        return sector * math.ceil(size / sector)

    def _row_cost(self, size: float) -> float:
        """Bytes that gathering one row costs: narrow rows leave lanes of the warp idle.

        ``sqrt(row^2 + overhead^2)`` smooths the factors 1, 1.1, 1.55 that Lin et al. give for
        D > 64, 33-64, <= 32 into a curve that never falls with D.
        """
        return math.hypot(self._sectors(size), self.law.row_overhead_bytes)

    def _cache_rows(self, row_bytes: float) -> float:
        return self.law.l2_share * self.hw.memory.l2_bytes / row_bytes

    def _l2_hits(self, shard: LookupShard) -> float:
        """Expected L2 hits of a gather that starts with a cold cache."""
        distinct, ids = shard.distinct_rows, shard.ids
        rows = self._cache_rows(self._sectors(shard.dim * shard.element_bytes))
        if distinct <= rows:
            return max(0.0, ids - distinct)
        return shard.bins.batch_hits(shard.draws, rows)

    def _sort_ms(self, shard: LookupShard) -> float:
        """Linearise, radix-sort (id, bag) pairs digit by digit, find the runs."""
        digits = math.ceil(math.log2(max(shard.rows, 2)) / self.law.sort_digit_bits)
        per_id = self.law.prepare_bytes + 2 * digits * self.law.sort_item_bytes
        return shard.ids * per_id / (self.law.sort_efficiency * self.hw.memory.hbm)

    def _gradient_bytes(self, shard: LookupShard) -> float:
        """Gradient rows from HBM; sorted ids visit the bags in random order."""
        row = self._sectors(shard.dim * GRADIENT_ELEMENT_BYTES)
        if shard.bags <= 0:
            return 0.0
        ids = shard.ids
        first_touches = -shard.bags * math.expm1(-ids / shard.bags) if shard.pooled else ids
        uncached = max(0.0, 1.0 - self._cache_rows(row) / shard.bags)
        return max(first_touches, ids * uncached) * row

    def _update_bytes(self, shard: LookupShard) -> float:
        """Distinct rows and their optimizer state are read and written; a dense gradient is not
        read, but all of it is written first as zeros."""
        distinct = shard.distinct_rows
        if shard.kernel is ComputeKernel.DENSE:
            row = shard.dim * GRADIENT_ELEMENT_BYTES
            return float(shard.rows) * row + distinct * self._row_cost(row)
        if shard.kernel is ComputeKernel.FUSED_UVM:
            return 0.0
        in_hbm = self._row_cost(shard.dim * shard.element_bytes)
        if shard.kernel is ComputeKernel.FUSED:
            in_hbm += self._state_bytes(shard)
        return 2.0 * distinct * in_hbm

    def _longest_segment_ms(self, shard: LookupShard) -> float:
        """One thread block accumulates a stretch of the hottest row with one SM's share of L2."""
        longest = min(shard.hottest_row_ids, self.law.segment_rows)
        row = self._sectors(shard.dim * GRADIENT_ELEMENT_BYTES)
        return longest * row * self.hw.sms / self.hw.memory.l2

    def _row_bytes(self, shard: LookupShard) -> float:
        return self._sectors(shard.dim * shard.element_bytes)

    def _state_bytes(self, shard: LookupShard) -> float:
        """Optimizer state of one row, in sectors."""
        scalars, vectors = state_row_bytes(shard.optimizer, shard.dim)
        return self._sectors(scalars) + self._sectors(vectors)

    def _managed_row_bytes(self, shard: LookupShard) -> float:
        """Of a row's weights and state, what the backward finds in host memory.

        The UVM cache holds weights only; states stay managed (FBGEMM, apply_split_helper).
        """
        if shard.kernel is ComputeKernel.FUSED_UVM:
            return self._row_bytes(shard) + self._state_bytes(shard)
        cached = shard.kernel is ComputeKernel.FUSED_UVM_CACHING
        return self._state_bytes(shard) if cached else 0.0

    def _link_ms(self, size: float) -> float:
        """Bytes through unified memory over the host link, one direction."""
        return size / (self.law.uvm_efficiency * self.hw.memory.host_link)

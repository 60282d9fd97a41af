"""Kernel model of FBGEMM's fused table-batched embedding (TBE) on a GPU: which bytes move where.

docs/model.md, chapter 6, has the formulas and names the kernels of FBGEMM that they follow. As in
Lin et al. 2022 (arXiv 2201.07821), the L2 starts cold, hits cost L2 bandwidth and misses cost HBM
bandwidth. They assume uniform ids; here distinct rows and hits follow from the index distribution
(Che et al. 2002).

Bytes of shards add up inside a launch. Two things do not add up and have functions of their own:
the latency of the longest chain of dependent loads, which a launch pays once, and the share of the
L2 that a table keeps while warps of other tables run.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from predictor import units
from predictor.cost.lookup.shard import (
    GRADIENT_ELEMENT_BYTES,
    SHARERS,
    LookupModel,
    LookupShard,
    own_fetched_rows,
    state_row_bytes,
)
from predictor.hardware.schema import CudaEmbedding, HardwareProfile
from predictor.model.memory.ranks import OUTPUT_BYTES
from predictor.model.plan import ComputeKernel

Array = NDArray[np.float64]

ID_WEIGHT_BYTES = 4
WARP = 32
BLOCK_WARPS = 32
"""Warps of a thread block that sums the gradients of one row (`kMaxThreads` / warp)."""
WARP_RUN_IDS = 32
"""Most ids of one row that a single warp sums; a row with more takes a thread block
(`max_segment_length_per_warp`)."""
REQUEST_BYTES = 128
"""Largest read of a warp over the host link, in bytes."""
UNPOOLED_INFO_BYTES = 4
"""Extra bytes per sorted id without pooling: its position takes 8 bytes instead of 4."""


class CudaLookups(LookupModel):
    def __init__(self, hw: HardwareProfile, constants: CudaEmbedding) -> None:
        self.hw = hw
        self.constants = constants

    def forward_floor_ms(self) -> float:
        return units.us(self.constants.kernel_us * self.constants.forward_kernels)

    def backward_floor_ms(self) -> float:
        """Return the shortest backward of a fused launch: the passes of the sort and the update."""
        return units.us(self.constants.kernel_us * self.constants.backward_kernels)

    def prefetch_floor_ms(self) -> float:
        return units.us(self.constants.kernel_us * self.constants.prefetch_kernels)

    def hash_floor_ms(self) -> float:
        """Return the time in ms in which the host reads sizes back from the device."""
        return units.us(self.constants.hash_us)

    def forward_ms(self, shard: LookupShard, tables: float = 1.0) -> float:
        """Price gathering and pooling, and before them the fetch of rows that miss the cache.

        Args:
            tables: number of tables that share the L2, this one included, >= 1.
        """
        if shard.ids <= 0:
            return 0.0
        time = self._gather_ms(shard, tables) + self.prefetch_ms(shard)
        if not shard.kernel.is_hashed:
            return time
        time += self._hash_ms(shard)
        if shard.host_share:
            time = max(time, self.constants.hash_hybrid * self.forward_ms(_on_device(shard)))
        return time

    def bucketize_ms(self, longest: float) -> float:
        """Price the walk of one thread down the ids of a bag.

        Each id takes two loads: the id itself, and from the L2 its position in the bucket
        (`_block_bucketize_sparse_features_cuda_kernel2` of FBGEMM).
        """
        each = self.constants.row_latency_us * (1.0 + self.constants.l2_latency)
        return units.us(each) * longest

    def bounds_ms(self, shard: LookupShard) -> float:
        """Price the bounds check, with a warp for each bag (`bounds_check_indices_kernel`)."""
        if not self.constants.bounds_ns:
            return 0.0
        checked = self.constants.index_bytes * shard.ids / self.hw.streaming
        return units.us(1e-3 * self.constants.bounds_ns) * shard.walks + checked

    def _hash_ms(self, shard: LookupShard) -> float:
        """Find the distinct ids and their rows (`segmented_unique`, `_find_keys` of dynamicemb),
        and read those that stay on the host."""
        lookup = units.us(1e-3 * self.constants.hash_ns_per_lookup)
        row = units.us(1e-3 * self.constants.hash_ns_per_row)
        row += shard.host_share * self._link_ms(self._row_bytes(shard))
        return shard.ids * lookup + shard.distinct_rows * row

    def forward_longest_ms(self, shard: LookupShard) -> float:
        """Return the latency of one bag: a group of lanes adds its rows one by one.

        The loop over a bag's ids issues the next load after the sum of the last one
        (embedding_forward_split_kernel_template.cu); a launch with too few bags to fill the device
        lasts as long as its longest bag (Little's law with one row in flight per group). Rows in
        the L2 come back sooner, those on the host later; the first one always misses.
        """
        if shard.ids <= 0:
            return 0.0
        first = other = self.constants.row_latency_us
        if shard.kernel is ComputeKernel.FUSED_UVM:
            first = other = first + self.hw.memory.host_link_latency_us
        else:
            hits = self._l2_hits(shard, 1.0) / shard.ids
            other *= 1.0 - hits * (1.0 - self.constants.l2_latency)
        return units.us(first + (shard.ids_per_walk - 1.0) * other)

    def tables_in_flight(self, shard: LookupShard) -> float:
        """Tables that the device's resident warps serve at once: ``ceil(resident bags / B)``.

        Bags are mapped to groups of lanes table by table (``t = b_t / B``), so a large batch fills
        the device with bags of one table. Lin et al. 2022, embedding model: ``n = ceil(W / B)``.
        """
        resident = self.hw.sms * self.constants.warps_per_sm * WARP / _lanes(shard)
        return max(1.0, math.ceil(resident / shard.walks)) if shard.walks > 0 else 1.0

    def sharing_ms(self, shard: LookupShard) -> tuple[float, ...]:
        """Return `LookupModel.sharing_ms`; zero for more tables than the batch keeps in flight."""
        most = self.tables_in_flight(shard)
        if most == 1.0 or shard.ids <= 0:
            return super().sharing_ms(shard)
        times = [self.forward_ms(shard, min(n, most)) for n in (1, *SHARERS)]
        return tuple(more - less for less, more in pairwise(times))

    def backward_ms(self, shard: LookupShard) -> float:
        """Sort the ids, then gather gradients row by row and update each distinct row once."""
        if shard.ids <= 0 and shard.kernel is not ComputeKernel.DENSE:
            return 0.0
        time = self.sort_ms(shard) + self._reduce_ms(shard)
        if shard.mean:
            # gradients are divided by the lengths in a separate pass (`grad_mean`)
            moved = 2 * shard.bags * self._sectors(shard.dim * GRADIENT_ELEMENT_BYTES)
            time += moved / (self.constants.forward_efficiency * self.hw.memory.hbm)
        if shard.weighted and shard.pooled:
            # FBGEMM always computes gradients of the weights: it reads bags and rows as the
            # forward does, and sums their products across a warp
            time += self.constants.weight_gradient * self._gather_ms(shard, 1.0)
        if shard.host_share:
            time = max(time, self.constants.hash_hybrid * self.backward_ms(_on_device(shard)))
        return time

    def backward_longest_ms(self, shard: LookupShard) -> float:
        """Return the latency of one bag and of the hottest row in a backward.

        A warp numbers the ids of its bags one bag at a time. The ids of one row form segments of at
        most ``segment_rows``. One thread block sums a segment: each warp takes a part, and the
        block has one SM's share of the L2 bandwidth. If a row has several segments, their blocks
        add up their sums atomically.
        """
        if shard.ids <= 0:
            return 0.0
        constants = self.constants
        longest = min(shard.hottest_row_ids, constants.segment_rows)
        row = self._sectors(shard.dim * GRADIENT_ELEMENT_BYTES)
        waiting = units.us(constants.row_latency_us) * longest / BLOCK_WARPS
        moving = longest * row * self.hw.sms / self.hw.memory.l2
        numbering = constants.linearize_us * math.ceil(shard.ids_per_walk / WARP)
        return units.us(numbering + constants.segment_us) + max(waiting, moving)

    def prefetch_ms(self, shard: LookupShard, fetched_rows: float | None = None) -> float:
        """Probe the cache, then fetch the misses while evicted rows are written back."""
        if not shard.kernel.is_cached or shard.ids <= 0:
            return 0.0
        rows = own_fetched_rows(shard) if fetched_rows is None else fetched_rows
        if shard.kernel.is_hashed:
            # each row is found in the host's table and inserted into the cache's, while the row
            # that it evicts goes the other way
            fill = rows * max(units.us(1e-3 * self.constants.hash_miss_ns), self.fetch_ms(shard))
            there = _on_device(shard)
            lookup = self.forward_ms(there) + self.backward_ms(there)
            return max(fill, (self.constants.hash_caching - 1.0) * lookup)
        probe = units.us(self.constants.prefetch_ns_per_lookup * 1e-3) * shard.ids
        hits = max(0.0, shard.distinct_rows - rows)
        probe += units.us(self.constants.prefetch_ns_per_row * 1e-3) * hits
        return probe + rows * self.fetch_ms(shard)

    def fetch_ms(self, shard: LookupShard) -> float:
        """Return the time to fetch one row from the host while another one is written back.

        A row of a hash table comes with its optimizer states.
        """
        if shard.kernel.is_stored:
            return self._store_ms(shard)
        row = shard.value_bytes if shard.kernel.is_hashed else self._row_bytes(shard)
        return self._exchange_ms(row)

    def _store_ms(self, shard: LookupShard) -> float:
        """Return the time to fetch one row of a key-value table, in ms.

        The host's threads find it and read it from SSD if it is not in the host's memory. It is
        copied over the link, and the row that it evicts is copied back (`_prefetch` of FBGEMM's
        tbe/ssd/training.py). Writes to SSD are gathered, and nothing waits for them.
        """
        row = shard.stored_bytes
        finding = units.us(1e-3 * self.constants.store_ns_per_row)
        read = shard.ssd_share * row / units.gb_per_s(self.constants.store_ssd_gb_s)
        return finding + read + 2 * row / self.hw.memory.host_link

    def sort_passes(self, rows: ArrayLike) -> Array:
        """Count the passes of a radix sort of ids of tables with ``rows`` rows together, >= 1.

        The key is the row's number within the launch, of ``int(log2(rows) + 1)`` bits
        (`total_hash_size_bits` of split_table_batched_embeddings_ops_training.py).
        """
        bits = np.floor(np.log2(np.maximum(rows, 1.0))) + 1
        return np.asarray(np.ceil(bits / self.constants.sort_digit_bits))

    def sort_pass_ms(self, *, weighted: bool, pooled: bool) -> float:
        """Price a pass over one id: keys and values, then weights in a second sort."""
        item = self.constants.sort_item_bytes * (2 if weighted else 1)
        item += 0 if pooled else UNPOOLED_INFO_BYTES
        return 2 * item / self._sort_bandwidth

    @property
    def _sort_bandwidth(self) -> float:
        return self.constants.sort_efficiency * self.hw.memory.hbm

    def _gather_ms(self, shard: LookupShard, tables: float) -> float:
        """Price a gather: ids and offsets stream in, rows are read, pooled outputs stream out.

        The time is ``max(HBM bytes / (efficiency BW_hbm), gathered bytes / BW_l2, warps)``. Only
        the rows that are expected to miss the L2 are read from HBM. Each bag takes a warp, so a
        one-hot feature launches a warp for every row, and the rate at which warps start and
        retire sets the time. Managed memory stays on the host, mapped into the device
        (`new_managed_tensor` in memory_utils.cu: preferred location CPU, accessed by the GPU), so
        its rows cross the link at every read.
        """
        ids = shard.ids
        id_bytes = self.constants.index_bytes + ID_WEIGHT_BYTES * shard.weighted
        streamed = ids * id_bytes + shard.bags * (
            self.constants.bag_bytes + self._sectors(shard.dim * OUTPUT_BYTES)
        )
        row = self._row_cost(shard.dim * shard.element_bytes)
        managed = shard.kernel is ComputeKernel.FUSED_UVM
        over_link = (
            self._managed_reads(shard) * self._link_ms(self._row_bytes(shard)) if managed else 0.0
        )
        misses = 0.0 if managed else ids - self._l2_hits(shard, tables)
        from_hbm = (streamed + misses * row) / (
            self.constants.forward_efficiency * self.hw.memory.hbm
        )
        warps = self.constants.bag_ns * shard.walks + self.constants.id_ns * ids
        warps = units.us(1e-3 * warps) * _lanes(shard) / WARP
        return max(from_hbm, ids * row / self.hw.memory.l2, over_link, warps)

    def _managed_reads(self, shard: LookupShard) -> float:
        """Count the rows of managed memory that cross the link in a forward.

        The L2 does not cache them: 65,536 ids read as large a share over the link from a table of
        27 thousand rows, which would fit into the L2, as from one of a million. An SM's L1 does
        cache them, for the bags of that SM.
        """
        l1_rows = units.mib(self.constants.uvm_l1_kib / 1024) / self._row_bytes(shard)
        return self.hw.sms * shard.bins.batch_misses(shard.draws / self.hw.sms, l1_rows)

    def _sectors(self, size: float) -> float:
        sector = self.hw.memory.sector_bytes
        return sector * math.ceil(size / sector)

    def _row_cost(self, size: float) -> float:
        """Count the bytes that gathering one row costs: narrow rows leave lanes of the warp idle.

        ``sqrt(row^2 + overhead^2)`` smooths the factors 1, 1.1, 1.55 that Lin et al. give for
        D > 64, 33-64, <= 32 into a curve that never falls with D.
        """
        return math.hypot(self._sectors(size), self.constants.row_overhead_bytes)

    def _cache_rows(self, row_bytes: float) -> float:
        return self.constants.l2_share * self.hw.memory.l2_bytes / row_bytes

    def _l2_hits(self, shard: LookupShard, tables: float) -> float:
        """Return the expected L2 hits of a gather that starts with a cold cache."""
        distinct, ids = shard.distinct_rows, shard.ids
        rows = self._cache_rows(self._sectors(shard.dim * shard.element_bytes)) / tables
        if distinct <= rows:
            return max(0.0, ids - distinct)
        return shard.bins.batch_hits(shard.draws, rows)

    def sort_ms(self, shard: LookupShard) -> float:
        """Linearise, radix-sort (id, bag) pairs digit by digit, find the runs.

        The passes are those that the shard's own rows need; a launch needs those of all its rows
        (`predictor.cost.loads`). Positions in a UVM cache take a second sort.
        """
        pass_ms = self.sort_pass_ms(weighted=shard.weighted, pooled=shard.pooled)
        if shard.kernel is ComputeKernel.FUSED_UVM_CACHING:
            pass_ms += self.sort_pass_ms(weighted=False, pooled=True)
        prepare = self.constants.prepare_bytes / self._sort_bandwidth
        numbering = units.us(1e-3 * self.constants.linearize_ns) * shard.walks
        return numbering + shard.ids * (prepare + float(self.sort_passes(shard.rows)) * pass_ms)

    def _reduce_ms(self, shard: LookupShard) -> float:
        """Sum the gradients of each row and update the row.

        A row of up to `WARP_RUN_IDS` ids takes one warp, and so many warps run at once that
        bandwidth sets the time. A longer row takes a block of 1024 threads, of which registers
        leave an SM room for one: its chain of dependent loads sets the time, unless moving its
        bytes takes longer. The number of times that a row is drawn is Poisson, approximated by a
        logistic distribution of the same mean and variance.
        """
        gradients, updates = self._gradients_ms(shard), self._updates_ms(shard)
        mean, counts = shard.draws * shard.bins.probs, shard.bins.counts
        beyond = (mean - WARP_RUN_IDS - 0.5) / np.sqrt(np.maximum(mean, 1.0))
        long = counts / (1.0 + np.exp(-1.702 * beyond))
        if not self.constants.block_loads or shard.distinct_rows <= 0 or long.sum() < 0.5:
            return gradients + updates
        of_ids = float((long * mean).sum()) / shard.ids
        of_rows = min(1.0, float(long.sum()) / shard.distinct_rows)
        segments = np.maximum(1.0, mean / self.constants.segment_rows)
        rows_in_l2 = self.constants.l2_latency * mean / segments / BLOCK_WARPS
        loads = self.constants.block_loads + rows_in_l2
        waiting = float((long * segments * loads).sum()) / self.hw.sms
        moving = of_ids * gradients + of_rows * updates
        blocks = max(moving, units.us(self.constants.row_latency_us) * waiting)
        return (1.0 - of_ids) * gradients + (1.0 - of_rows) * updates + blocks

    def _gradients_ms(self, shard: LookupShard) -> float:
        """Price the gather of gradient rows: like that of weights, but sorted ids visit the bags in
        random order."""
        row = self._sectors(shard.dim * GRADIENT_ELEMENT_BYTES)
        if shard.bags <= 0:
            return 0.0
        ids = shard.ids
        first_touches = -shard.bags * math.expm1(-ids / shard.bags) if shard.pooled else ids
        uncached = max(0.0, 1.0 - self._cache_rows(row) / shard.bags)
        from_hbm = max(first_touches, ids * uncached) * row
        gathered = ids * self._row_cost(shard.dim * GRADIENT_ELEMENT_BYTES)
        efficiency = self.constants.forward_efficiency
        waiting = ids * units.us(self.constants.gradient_latency_us) / self._warps(shard)
        waiting *= _rounds(shard.dim)
        moving = from_hbm / (efficiency * self.hw.memory.hbm)
        return max(moving, gathered / self.hw.memory.l2, waiting)

    def _warps(self, shard: LookupShard) -> float:
        """Count the groups of lanes that the device holds at once."""
        return self.hw.sms * max(self.constants.warps_per_sm, 1.0) * WARP / _lanes(shard)

    def _updates_ms(self, shard: LookupShard) -> float:
        """Price reading and writing distinct rows and their optimizer states, in HBM or over the
        link.

        A dense gradient is not read, but all of it is first filled with zeros. Bytes in host memory
        cross the full-duplex link once in each direction. One group of lanes updates a row, after a
        chain of loads to find it.
        """
        distinct, on_host, vectors = shard.distinct_rows, 0.0, 0.0
        if shard.kernel is ComputeKernel.DENSE:
            row = shard.dim * GRADIENT_ELEMENT_BYTES
            moved = float(shard.rows) * row + distinct * self._row_cost(row)
        else:
            scalars, vectors = map(self._sectors, state_row_bytes(shard.optimizer, shard.dim))
            weights = self._row_cost(shard.dim * shard.element_bytes)
            # a UVM cache holds weights only; states per weight stay with the table, those per row
            # are always on the device (FBGEMM, construct_split_state)
            in_hbm = scalars
            if shard.kernel is not ComputeKernel.FUSED_UVM:
                in_hbm += weights
            on_device = shard.kernel is ComputeKernel.FUSED or shard.kernel.is_stored
            if on_device or shard.kernel.is_hashed:
                in_hbm += vectors
            else:
                on_host = vectors
            if shard.kernel is ComputeKernel.FUSED_UVM:
                on_host += self._row_bytes(shard)
            moved = 2.0 * distinct * in_hbm
        waiting = distinct * units.us(self.constants.update_latency_us) / self._warps(shard)
        if self.constants.gradient_latency_us:
            waiting *= _rounds(shard.dim * (1 + vectors / (GRADIENT_ELEMENT_BYTES * shard.dim)))
        bandwidth = self.constants.backward_efficiency * self.hw.memory.hbm
        moved *= 1.0 - shard.host_share
        over_link = distinct * self._exchange_ms(on_host)
        if shard.host_share:
            over_link += distinct * shard.host_share * self._exchange_ms(shard.value_bytes)
        return moved / bandwidth + waiting + over_link

    def _row_bytes(self, shard: LookupShard) -> float:
        return self._sectors(shard.dim * shard.element_bytes)

    def _link_ms(self, size: float) -> float:
        """Price the read of one row of ``size`` bytes over the host link through unified memory.

        A warp reads up to 128 bytes a request. The link carries a limited number of requests, so
        small ones fill it less (EMOGI, arXiv 2006.06890, on zero-copy reads over PCIe).
        """
        requests = math.ceil(size / REQUEST_BYTES)
        size = max(size, requests * self.constants.uvm_request_bytes)
        return size / (self.constants.uvm_efficiency * self.hw.memory.host_link)

    def _exchange_ms(self, size: float) -> float:
        """Price the read of one row over the link while as many bytes are written back."""
        return self._link_ms(size) / self.constants.uvm_both_ways


def _rounds(elements: float) -> float:
    """Count the passes that the lanes of a group take over this many elements."""
    return max(1.0, elements / (4 * WARP))


def _on_device(shard: LookupShard) -> LookupShard:
    """Return a shard of a hash table as if all of it were on the device."""
    return replace(shard, kernel=ComputeKernel.DYNAMICEMB)


def _lanes(shard: LookupShard) -> int:
    """Lanes that serve one bag, four elements each: 8, 16 or 32.

    Rows share a warp where the widest table of the launch is narrow (`FBGEMM_USE_SUBWARP_SHUFFLE`
    and ``max_D`` in embedding_common_code_generator.py and the dispatch of its kernels).
    """
    dim = shard.dim if shard.widest_dim is None else shard.widest_dim
    return 8 if dim <= 32 else 16 if dim <= 64 else WARP

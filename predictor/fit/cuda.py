"""Fits the constants of a GPU's profile to rows of `shardopt calibrate`.

The kernel models are those that predict (`predictor.cost.lookup`), called with a changed profile.
The tuples below say which of their constants are free, and within which bounds;
`predictor.fit.constants` finds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from predictor import units
from predictor.cost.elementwise import copy_h2d_ms, memory_ms
from predictor.cost.gemm import gemm_times
from predictor.cost.lookup.cuda import CudaLookups
from predictor.cost.lookup.shard import LookupShard, shared_fetched_rows
from predictor.errors import ProfileError
from predictor.fit.constants import FittedProfile, FreeConstant, fit_free
from predictor.fit.cpu import MemoryRows
from predictor.fit.gemm import GemmRows
from predictor.hardware.schema import CudaEmbedding, HardwareProfile
from predictor.model.distribution import Bins, Zipf
from predictor.model.plan import ComputeKernel

Array = NDArray[np.float64]

LOOKUPS = (
    FreeConstant("embedding", "forward_efficiency", 0.02, 1.0),
    FreeConstant("embedding", "backward_efficiency", 0.02, 1.0),
    FreeConstant("embedding", "sort_efficiency", 0.02, 1.0),
    FreeConstant("embedding", "row_overhead_bytes", 1.0, 2048.0),
    FreeConstant("embedding", "l2_share", 0.05, 1.0),
    FreeConstant("embedding", "kernel_us", 0.2, 50.0),
    FreeConstant("embedding", "row_latency_us", 0.01, 10.0),
    FreeConstant("embedding", "linearize_us", 0.05, 50.0),
    FreeConstant("embedding", "segment_us", 0.05, 50.0),
    FreeConstant("embedding", "update_latency_us", 0.01, 50.0),
    FreeConstant("memory", "l2_gb_s", 100.0, 100_000.0),
)
"""Constants of lookups from device memory."""
UVM = (
    FreeConstant("embedding", "uvm_efficiency", 0.005, 1.0),
    FreeConstant("embedding", "uvm_both_ways", 0.05, 1.0),
    FreeConstant("embedding", "uvm_l1_kib", 1.0, 256.0),
    FreeConstant("embedding", "prefetch_ns_per_lookup", 1e-3, 100.0),
)
"""Constants of lookups from host memory, fitted after those from device memory."""
MOVES = (
    FreeConstant("elementwise", "efficiency", 0.05, 1.0),
    FreeConstant("elementwise", "floor_us", 0.2, 50.0),
    FreeConstant("elementwise", "ramp_us", 0.01, 100.0),
    FreeConstant("elementwise", "ramp_half_mib", 0.01, 100.0),
)
COPIES = (
    FreeConstant("memory", "host_link_gb_s", 0.5, 2000.0),
    FreeConstant("memory", "host_link_latency_us", 0.05, 100.0),
)
GEMM = (
    FreeConstant("gemm", "prologue_k", 1.0, 2000.0),
    FreeConstant("gemm", "floor_us", 0.2, 50.0),
)
"""Constants of multiplications, besides a rate for every data type in the rows."""
TFLOPS = (0.1, 20_000.0)
HBM = FreeConstant("memory", "hbm_gb_s", 1.0, 1e6)
MOST_ALPHA = 4.0
"""Upper end of the bisection; beyond it practically one row is drawn."""
PARTS = ("forward", "backward", "prefetch")


@dataclass(frozen=True)
class LaunchRows:
    """Timings of passes of TBE launches: the tables of each, its pass of `PARTS`, and ms."""

    tables: Sequence[Sequence[LookupShard]]
    parts: Sequence[str]
    time_ms: Array

    def where(self, keep: NDArray[np.bool_]) -> LaunchRows:
        """The rows for which ``keep`` holds."""
        kept = [int(i) for i in np.flatnonzero(keep)]
        return LaunchRows(
            [self.tables[i] for i in kept], [self.parts[i] for i in kept], self.time_ms[kept]
        )

    def of_kernel(self, *kernels: ComputeKernel) -> LaunchRows:
        """The rows whose tables run these kernels."""
        return self.where(np.array([shards[0].kernel in kernels for shards in self.tables], bool))


def cache_bins(bins: Bins) -> Bins:
    """The same bins with cached results: a fit needs each cache size hundreds of times."""
    return _CachedBins(bins.counts, bins.probs)


def counted_bins(rows: float, ids: float, distinct: float) -> Bins:
    """The Zipf distribution by which a batch of ``ids`` ids is expected to touch ``distinct`` rows.

    For measured ids whose distribution the rows do not hold. Skew falls with distinct rows, so
    bisection finds it.
    """
    low, high = 0.0, MOST_ALPHA
    if Zipf(low).bins(int(rows)).unique(ids) <= distinct:
        return Zipf(low).bins(int(rows))
    for _ in range(30):
        middle = (low + high) / 2
        if Zipf(middle).bins(int(rows)).unique(ids) > distinct:
            low = middle
        else:
            high = middle
    return Zipf(round(high, 6)).bins(int(rows))


class _CachedBins(Bins):
    """See `cache_bins`."""

    def unique(self, draws: float) -> float:
        """As `Bins.unique`."""
        return _unique(self, draws)

    def hit_rate(self, cache_rows: float) -> float:
        """As `Bins.hit_rate`."""
        return _hit_rate(self, cache_rows)


@lru_cache(maxsize=100_000)
def _unique(bins: Bins, draws: float) -> float:
    return Bins.unique(bins, draws)


@lru_cache(maxsize=100_000)
def _hit_rate(bins: Bins, cache_rows: float) -> float:
    return Bins.hit_rate(bins, cache_rows)


def launch_ms(model: CudaLookups, shards: Sequence[LookupShard], part: str) -> float:
    """One pass of one launch, as `predictor.cost.loads` puts tables together.

    After a prefetch every row of a cached table is on the device, so its forward is that of
    ``fused``; its optimizer state is where it was.
    """
    if part == "prefetch":
        fetched = shared_fetched_rows(tuple(shards))
        return model.prefetch_floor_ms() + sum(map(model.prefetch_ms, shards, fetched))
    if part == "forward":
        return model.forward_floor_ms() + _forward_ms(model, [_on_device(s) for s in shards])
    return model.backward_floor_ms() + _backward_ms(model, shards)


def _forward_ms(model: CudaLookups, shards: Sequence[LookupShard]) -> float:
    """Tables share the L2, as many as the device's warps serve at once."""
    together = [min(float(len(shards)), model.tables_in_flight(s)) for s in shards]
    longest = max(map(model.forward_longest_ms, shards), default=0.0)
    return max(sum(map(model.forward_ms, shards, together)), longest)


def _backward_ms(model: CudaLookups, shards: Sequence[LookupShard]) -> float:
    """Ids are sorted by their rows' numbers within the launch, which need more digits."""
    passes = float(model.sort_passes(sum(s.rows for s in shards)))
    time = 0.0
    for shard in shards:
        beyond = max(0.0, passes - float(model.sort_passes(shard.rows)))
        once = model.sort_pass_ms(weighted=shard.weighted, pooled=shard.pooled)
        time += model.backward_ms(shard) + shard.ids * beyond * once
    return max(time, max(map(model.backward_longest_ms, shards), default=0.0))


def _on_device(shard: LookupShard) -> LookupShard:
    cached = shard.kernel is ComputeKernel.FUSED_UVM_CACHING
    return replace(shard, kernel=ComputeKernel.FUSED) if cached else shard


def predict_launches(hw: HardwareProfile, rows: LaunchRows) -> Array:
    """Times ``[rows]`` in ms; of a profile whose embedding model is that of GPUs."""
    if not isinstance(hw.embedding, CudaEmbedding):
        raise ProfileError(f"hardware {hw.name}: embedding.law is {hw.embedding.law}, not a GPU's")
    model = CudaLookups(hw, hw.embedding)
    passes = zip(rows.tables, rows.parts, strict=True)
    return np.array([launch_ms(model, shards, part) for shards, part in passes], dtype=np.float64)


def fit_launches(hw: HardwareProfile, rows: LaunchRows) -> FittedProfile:
    """Constants of the embedding group and of the L2, by `LOOKUPS`, then by `UVM`."""
    on_device = rows.of_kernel(ComputeKernel.FUSED)
    first = fit_free(hw, LOOKUPS, lambda at: predict_launches(at, on_device), on_device.time_ms)
    over_link = rows.of_kernel(ComputeKernel.FUSED_UVM, ComputeKernel.FUSED_UVM_CACHING)
    second = fit_free(first.hw, UVM, lambda at: predict_launches(at, over_link), over_link.time_ms)
    return FittedProfile(second.hw, first.fitted + second.fitted, first.kept + second.kept)


def predict_streaming(hw: HardwareProfile, rows: MemoryRows) -> Array:
    """Times ``[rows]`` in ms of kernels that only read, from memory much larger than the L2."""
    return rows.bytes_moved / hw.memory.hbm


def fit_streaming(hw: HardwareProfile, rows: MemoryRows) -> HardwareProfile:
    """The bandwidth that reading reaches; efficiencies of other kernels are shares of it."""
    rate = float(np.median(rows.bytes_moved / rows.time_ms)) / units.gb_per_s(1.0)
    return HBM.put(hw, rate)


def predict_moves(hw: HardwareProfile, rows: MemoryRows) -> Array:
    """Times ``[rows]`` in ms of memory-bound kernels."""
    return memory_ms(hw, rows.bytes_moved)


def fit_moves(hw: HardwareProfile, rows: MemoryRows) -> FittedProfile:
    """The share of the memory's bandwidth that reading and writing reaches, floor and ramp."""
    return fit_free(hw, MOVES, lambda at: predict_moves(at, rows), rows.time_ms)


def predict_copies(hw: HardwareProfile, rows: MemoryRows) -> Array:
    """Times ``[rows]`` in ms of copies to the device."""
    return copy_h2d_ms(hw, rows.bytes_moved)


def fit_copies(hw: HardwareProfile, rows: MemoryRows) -> FittedProfile:
    """Bandwidth and latency of the host link.

    Host memory must be at least as fast as the measured link, so its bandwidth is raised to it.
    """
    free_memory = FreeConstant("memory", "ddr_gb_s", 0.5, 1e6)
    known = free_memory.value(hw)
    unbound = free_memory.put(hw, COPIES[0].high)
    found = fit_free(unbound, COPIES, lambda at: predict_copies(at, rows), rows.time_ms)
    link = COPIES[0].value(found.hw) if COPIES[0] in found.fitted else known
    return replace(found, hw=free_memory.put(found.hw, max(known, link)))


def predict_gemms(hw: HardwareProfile, rows: Mapping[str, GemmRows]) -> Array:
    """Times ``[rows]`` in ms, data type after data type."""
    times = [
        gemm_times(hw.gemm, hw.sms, hw.memory.hbm, (of.m, of.n, of.k), dtype, hw.name)
        for dtype, of in rows.items()
    ]
    return np.concatenate(times) if times else np.zeros(0)


def gemm_ms(rows: Mapping[str, GemmRows]) -> Array:
    """Measured times, in the order of `predict_gemms`."""
    return np.concatenate([of.time_ms for of in rows.values()]) if rows else np.zeros(0)


def fit_gemms(hw: HardwareProfile, rows: Mapping[str, GemmRows]) -> FittedProfile:
    """A rate for each data type; prologue and floor for all of them."""
    rates = tuple(FreeConstant("gemm", f"tflops.{dtype}", *TFLOPS) for dtype in rows)
    for rate, of in zip(rates, rows.values(), strict=True):
        # at least the rate of the fastest row
        hw = rate.put(hw, float((2.0 * of.m * of.n * of.k / of.time_ms).max() * 1e-9))
    return fit_free(hw, (*rates, *GEMM), lambda at: predict_gemms(at, rows), gemm_ms(rows))

"""The embedding group of a GPU, from rows of `shardopt.calibrate.lookups`.

The kernel models are those that predict (`predictor.cost.lookup`), called with a changed profile.
`LOOKUPS` and `UVM` say which of their constants are free, and within which bounds.

Why: docs/decisions/0004-timeline.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from predictor.cost.lookup.cuda import CudaLookups
from predictor.cost.lookup.shard import LookupShard, shared_fetched_rows
from predictor.errors import ProfileError
from predictor.hardware.schema import CudaEmbedding, HardwareProfile
from predictor.model.distribution import Bins, Zipf
from predictor.model.memory.ranks import DEFAULT_CACHE_LOAD_FACTOR
from predictor.model.plan import ComputeKernel
from predictor.model.workload import DATA_TYPE_BYTES
from shardopt.calibrate.fitting import (
    FEWEST,
    Array,
    CalibratedProfile,
    FittedProfile,
    FreeConstant,
    HeldOut,
    fit_free,
    kept_text,
)
from shardopt.calibrate.lookups import DTYPE, OPTIMIZER, lookup_ranges
from shardopt.calibrate.moves import extend_memory
from shardopt.calibrate.rows import Measurement, times_ms

FAMILIES = ("lookup", "lookup_cached", "model_lookup")
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
MOST_ALPHA = 4.0
"""Upper end of the bisection; beyond it practically one row is drawn."""


def fit_gpu(made: CalibratedProfile) -> CalibratedProfile:
    """Constants of the TBE's kernel model, and the L2's bandwidth, seen in gathers alone."""
    rows = [row for family in FAMILIES for row in made.rows if row.point.family == family]
    fit, test = ([row for row in rows if row.point.test == held] for held in (False, True))
    if len(fit) < FEWEST:
        return made
    found = _fit_launches(made.profile, launch_rows(fit))
    made = replace(made, profile=found.hw)
    scores = []
    for label, keep in _labels().items():
        fitted, of = ([row for row in some if keep(row)] for some in (fit, test))
        if of:
            made = made.score(label, fitted, of, _predictor(launch_rows(of)))
            scores.append(made.errors[label])
    held_out = sum(scores[1:], start=scores[0]) if scores else HeldOut(np.zeros(0), len(fit))
    made = extend_memory(made, found, "l2_gb_s of lookups", fit, held_out)
    return made.measured("embedding", fit, held_out, lookup_ranges(rows), kept_text(found))


def _predictor(
    launches: LaunchRows,
) -> Callable[[HardwareProfile, Sequence[Measurement]], Array]:
    """Of rows whose launches are known already."""
    return lambda hw, _: predict_launches(hw, launches)


def _labels() -> dict[str, Callable[[Measurement], bool]]:
    """Families of lookups whose errors are reported, each row in one of them."""

    def of(family: str, part: str, uvm: bool = False) -> Callable[[Measurement], bool]:
        def keep(row: Measurement) -> bool:
            link = row.point.params.get("kernel", "fused") == "fused_uvm"
            return (row.point.family, row.part, link) == (family, part, uvm)

        return keep

    return {
        "lookup forward": of("lookup", "forward"),
        "lookup backward": of("lookup", "backward"),
        "lookup forward, fused_uvm": of("lookup", "forward", uvm=True),
        "lookup backward, fused_uvm": of("lookup", "backward", uvm=True),
        "cache prefetch": of("lookup_cached", "prefetch"),
        "lookup forward, cached": of("lookup_cached", "forward"),
        "lookup backward, cached": of("lookup_cached", "backward"),
        "model's lookup forward": of("model_lookup", "forward"),
        "model's lookup backward": of("model_lookup", "backward"),
    }


@dataclass(frozen=True)
class LaunchRows:
    """Timings of passes of TBE launches: the tables of each, its pass, and ms."""

    tables: Sequence[Sequence[LookupShard]]
    parts: Sequence[str]
    time_ms: Array

    def of_kernel(self, *kernels: ComputeKernel) -> LaunchRows:
        """The rows whose tables run these kernels."""
        kept = [i for i, shards in enumerate(self.tables) if shards[0].kernel in kernels]
        return LaunchRows(
            [self.tables[i] for i in kept], [self.parts[i] for i in kept], self.time_ms[kept]
        )


def launch_rows(rows: Sequence[Measurement]) -> LaunchRows:
    """Of points of several tables, with skews, and of tables of a model.

    The distribution of ids is the one that they were drawn from; where only the model has that, the
    Zipf distribution with as many distinct rows.
    """
    return LaunchRows([_shards(row) for row in rows], [row.part for row in rows], times_ms(rows))


def _shards(row: Measurement) -> list[LookupShard]:
    said = row.point.params | row.facts
    drawn = row.point.params.get("tables", [])
    pooled, shards = said.get("pooled", True), []
    for i, (rows, dim, bags, ids, distinct) in enumerate(row.facts["tables"]):
        known = Zipf(drawn[i]["alpha"]).bins(int(rows)) if drawn else None
        shard = LookupShard(
            cache_bins(known or counted_bins(rows, ids, distinct)),
            ids,
            bags if pooled else ids,
            int(rows),
            int(dim),
            DATA_TYPE_BYTES[said.get("dtype", DTYPE)],
            optimizer=said.get("optimizer", OPTIMIZER),
            weighted=said.get("weighted", False),
            pooled=pooled,
            mean=said.get("mean", False),
            lengths=bags,
            kernel=ComputeKernel(said.get("kernel", ComputeKernel.FUSED)),
            cache_load_factor=said.get("cache_load_factor", DEFAULT_CACHE_LOAD_FACTOR),
        )
        shards.append(shard)
    return shards


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


def _fit_launches(hw: HardwareProfile, rows: LaunchRows) -> FittedProfile:
    """Constants of the embedding group and of the L2, by `LOOKUPS`, then by `UVM`."""
    on_device = rows.of_kernel(ComputeKernel.FUSED)
    first = fit_free(hw, LOOKUPS, lambda at: predict_launches(at, on_device), on_device.time_ms)
    over_link = rows.of_kernel(ComputeKernel.FUSED_UVM, ComputeKernel.FUSED_UVM_CACHING)
    second = fit_free(first.hw, UVM, lambda at: predict_launches(at, over_link), over_link.time_ms)
    return FittedProfile(second.hw, first.fitted + second.fitted, first.kept + second.kept)

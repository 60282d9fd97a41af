"""The embedding group of a GPU, from rows of `shardopt.calibrate.lookups`.

The kernel models are those that predict (`predictor.cost.lookup`), called with a changed profile.
`LOOKUPS` and `UVM` say which of their constants are free, and within which bounds.

Why: docs/decisions/0022-calibration.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np

from predictor.cost.lookup.cuda import CudaLookups
from predictor.cost.lookup.shard import LookupShard, shared_fetched_rows
from predictor.errors import ProfileError
from predictor.hardware.schema import CudaEmbedding, HardwareProfile
from predictor.model.distribution import Bins, Zipf
from predictor.model.memory.caches import DEFAULT_CACHE_LOAD_FACTOR
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
    total,
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
NO_TIMES = np.zeros(0)
Launch = tuple[Sequence[LookupShard], str]
"""The tables of a TBE, and the pass that is timed."""


def fit_gpu(draft: CalibratedProfile) -> CalibratedProfile:
    """Fit the TBE's kernel model, and the L2's bandwidth, which only gathers show."""
    rows = [row for family in FAMILIES for row in draft.rows if row.point.family == family]
    fit, test = ([row for row in rows if row.point.test == is_test] for is_test in (False, True))
    if len(fit) < FEWEST:
        return draft
    launches, ms = launches_of(test), times_ms(test)
    result = fit_launches(draft.profile, launches_of(fit), times_ms(fit), launches, ms)
    draft = draft.take(result)
    mine, theirs = (predict_launches(hw, launches) / ms - 1.0 for hw in (result.hw, draft.base))
    labels, scores = np.array([_label(row) for row in test]), []
    for label in sorted(set(labels)):
        chosen, count = labels == label, sum(_label(row) == label for row in fit)
        scores.append(HeldOut(mine[chosen], count, ms[chosen]))
        draft = draft.error(str(label), scores[-1], theirs[chosen])
    held_out = total(scores) if scores else HeldOut(np.zeros(0), len(fit))
    if not result.fitted:
        return draft
    draft = extend_memory(draft, result, "l2_gb_s of lookups", fit, held_out)
    return draft.measured("embedding", fit, held_out, lookup_ranges(rows), result.kept_text)


def _label(row: Measurement) -> str:
    """Return the label of a row's error."""
    if row.part == "prefetch":
        return "cache prefetch"
    if row.point.family == "model_lookup":
        return f"model's lookup {row.part}"
    kernel = row.point.params.get("kernel", "fused")
    suffix = {"fused": "", "fused_uvm": ", fused_uvm", "fused_uvm_caching": ", cached"}[kernel]
    return f"lookup {row.part}{suffix}"


def launches_of(rows: Sequence[Measurement]) -> list[Launch]:
    """Return the launches of lookup points and of the tables of a model.

    Ids have the distribution that they were drawn from. For tables of a model it is the Zipf
    distribution with as many distinct rows.
    """
    launches: list[Launch] = []
    for row in rows:
        facts = row.point.params | row.facts
        drawn = row.point.params.get("tables", [])
        pooled, shards = facts.get("pooled", True), []
        for i, (count, dim, bags, ids, distinct) in enumerate(row.facts["tables"]):
            bins = Zipf(drawn[i]["alpha"]).bins(int(count)) if drawn else None
            shard = LookupShard(
                cache_bins(bins or counted_bins(count, ids, distinct)),
                ids,
                bags if pooled else ids,
                int(count),
                int(dim),
                DATA_TYPE_BYTES[facts.get("dtype", DTYPE)],
                optimizer=facts.get("optimizer", OPTIMIZER),
                weighted=facts.get("weighted", False),
                pooled=pooled,
                mean=facts.get("mean", False),
                lengths=bags,
                kernel=ComputeKernel(facts.get("kernel", ComputeKernel.FUSED)),
                cache_load_factor=facts.get("cache_load_factor", DEFAULT_CACHE_LOAD_FACTOR),
            )
            shards.append(shard)
        launches.append((shards, row.part))
    return launches


class _CachedBins(Bins):
    """Bins with cached results, see `cache_bins`; they live only during a calibration."""

    @lru_cache(maxsize=100_000)  # noqa: B019
    def unique(self, draws: float) -> float:
        return super().unique(draws)

    @lru_cache(maxsize=100_000)  # noqa: B019
    def hit_rate(self, cache_rows: float) -> float:
        return super().hit_rate(cache_rows)


def cache_bins(bins: Bins) -> Bins:
    """Return the bins with cached results: a fit needs each cache size hundreds of times."""
    return _CachedBins(bins.counts, bins.probs)


def counted_bins(rows: float, ids: float, distinct: float) -> Bins:
    """Return the Zipf distribution of which ``ids`` ids are expected to touch ``distinct`` rows.

    It stands for measured ids whose distribution is not in the rows. Skew falls with distinct rows,
    so bisection finds it.
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


def launch_ms(model: CudaLookups, shards: Sequence[LookupShard], part: str) -> float:
    """Predict one pass of one launch, joining tables as `predictor.cost.loads` does.

    After a prefetch every row of a cached table is on the device, so its forward is that of
    ``fused``; its optimizer state stays in host memory.
    """
    if part == "prefetch":
        fetched = shared_fetched_rows(tuple(shards))
        return model.prefetch_floor_ms() + sum(map(model.prefetch_ms, shards, fetched))
    if part == "forward":
        there = [
            replace(s, kernel=ComputeKernel.FUSED)
            if s.kernel is ComputeKernel.FUSED_UVM_CACHING
            else s
            for s in shards
        ]
        # tables share the L2, as many as the device's warps serve at once
        together = [min(float(len(there)), model.tables_in_flight(s)) for s in there]
        longest = max(map(model.forward_longest_ms, there), default=0.0)
        forward = sum(map(model.forward_ms, there, together))
        return model.forward_floor_ms() + max(forward, longest)
    # ids are sorted by their rows' numbers within the launch, which need more digits
    passes = float(model.sort_passes(sum(s.rows for s in shards)))
    backward = 0.0
    for shard in shards:
        beyond = max(0.0, passes - float(model.sort_passes(shard.rows)))
        once = model.sort_pass_ms(weighted=shard.weighted, pooled=shard.pooled)
        backward += model.backward_ms(shard) + shard.ids * beyond * once
    longest = max(map(model.backward_longest_ms, shards), default=0.0)
    return model.backward_floor_ms() + max(backward, longest)


def predict_launches(hw: HardwareProfile, launches: Sequence[Launch]) -> Array:
    """Predict times ``[launches]`` in ms by a profile with an embedding model of GPUs."""
    if not isinstance(hw.embedding, CudaEmbedding):
        raise ProfileError(f"hardware {hw.name}: embedding.law is {hw.embedding.law}, not a GPU's")
    model = CudaLookups(hw, hw.embedding)
    return np.array([launch_ms(model, *launch) for launch in launches], dtype=np.float64)


def fit_launches(
    hw: HardwareProfile,
    launches: Sequence[Launch],
    time_ms: Array,
    held_out: Sequence[Launch] = (),
    held_out_ms: Array = NO_TIMES,
) -> FittedProfile:
    """Fit the constants of the embedding group and of the L2: `LOOKUPS`, then `UVM`.

    Args:
        held_out: launches that no constant may make worse; their times are ``held_out_ms``.
    """
    result = FittedProfile(hw, (), ())
    for name, free in (("lookups", LOOKUPS), ("lookups from host memory", UVM)):
        fused = free is LOOKUPS
        chosen, ms = _of_memory(launches, time_ms, fused=fused)
        tests, tests_ms = _of_memory(held_out, held_out_ms, fused=fused)
        stage = fit_free(result.hw, free, partial(predict_launches, launches=chosen), ms)
        predict_tests = partial(predict_launches, launches=tests)
        result = result.then(stage.unless_worse(name, result.hw, predict_tests, tests_ms))
    return result


def _of_memory(
    launches: Sequence[Launch], time_ms: Array, *, fused: bool
) -> tuple[list[Launch], Array]:
    """Select launches from device memory, or all others, and their times."""
    chosen = [
        i
        for i, (shards, _) in enumerate(launches)
        if (shards[0].kernel is ComputeKernel.FUSED) == fused
    ]
    return [launches[i] for i in chosen], time_ms[chosen]

"""The lookups of one shard, as the embedding kernels see them, and its optimizer state.

FBGEMM makes one software cache per launch, which its ``fused_uvm_caching`` tables share, of
``cache_load_factor`` times the rows of all of them (docs/model.md, chapter 6). TorchRec averages
the load factors of a launch, weighted by rows (`_get_weighted_avg_cache_load_factor` in
embedding_sharding.py), so tables that set one each bring in their share. In Che's approximation all
rows of an LRU cache have one characteristic time, counted in iterations here, since tables draw at
other rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from predictor.model.distribution import Bins, join_tables, mix_features
from predictor.model.memory.ranks import STATES, stored_bytes, value_bytes
from predictor.model.plan import ComputeKernel
from predictor.model.workload import Optimizer

STATE_ELEMENT_BYTES = 4
GRADIENT_ELEMENT_BYTES = 4
"""FBGEMM accumulates gradients and keeps optimizer states in fp32 for weights of any type."""

SHARERS = (2, 4, 8, 16)
"""Numbers of tables that share the L2 for which a forward is tabulated; the last holds for more."""


@dataclass(frozen=True)
class LookupShard:
    """One feature's lookups in one shard, per iteration and rank.

    Args:
        bins: rows of the shard, with probabilities over the whole table.
        draws: ids drawn over the whole table that this rank may have to serve.
        bags: output rows; equal to the shard's ids where outputs are not pooled.
        lengths: (sample, feature) pairs, whose ids are walked one after the other; `bags` if None.
        distinct: rows that an iteration touches, where the ids are no independent draws.
        rows, dim: size of the shard.
        element_bytes: of one weight, its part of the row's scale, bias and padding included;
            outputs are fp32.
        optimizer: by FBGEMM's `EmbOptimType` value.
        mean: the lookup itself divides by the lengths.
        cache_load_factor: share of the rows in a cache, or on the device.
        host_bytes: memory of the host in front of the SSD of a key-value table.
        widest_dim: of the tables that share its launch; its own if None.
    """

    bins: Bins
    draws: float
    bags: float
    rows: int
    dim: int
    element_bytes: float = 4
    optimizer: str = Optimizer.ROWWISE_ADAGRAD
    weighted: bool = False
    pooled: bool = True
    mean: bool = False
    kernel: ComputeKernel = ComputeKernel.FUSED
    cache_load_factor: float = 0.2
    lengths: float | None = None
    distinct: float | None = None
    host_bytes: float = 0.0
    widest_dim: int | None = None

    @property
    def value_bytes(self) -> int:
        """Bytes of a row in a hash table."""
        return value_bytes(self.optimizer, self.dim, self.element_bytes)

    @property
    def stored_bytes(self) -> int:
        """Bytes of a row in a key-value store."""
        return stored_bytes(self.kernel, self.optimizer, self.dim, self.element_bytes)

    @property
    def host_share(self) -> float:
        """Share of the rows of a hash table that are on the host and never cached."""
        hybrid = self.kernel is ComputeKernel.DYNAMICEMB_HYBRID
        return 1.0 - self.cache_load_factor if hybrid else 0.0

    @property
    def ssd_share(self) -> float:
        """Share of the cache's misses that are read from SSD."""
        if not self.kernel.is_stored or self.kernel is ComputeKernel.DRAM_VIRTUAL_TABLE:
            return 0.0
        cached = cache_rows(self)
        missed = 1.0 - self.bins.hit_rate(cached)
        both = 1.0 - self.bins.hit_rate(cached + self.host_bytes / self.stored_bytes)
        return both / missed if missed > 0 else 0.0

    @property
    def walks(self) -> float:
        """Runs of ids that are walked one after the other."""
        return self.bags if self.lengths is None else self.lengths

    @property
    def ids(self) -> float:
        """Expected ids that fall on the shard's rows."""
        return self.draws * self.bins.mass

    @property
    def distinct_rows(self) -> float:
        """Expected distinct rows of the shard that an iteration touches."""
        return self.bins.unique(self.draws) if self.distinct is None else self.distinct

    @property
    def ids_per_walk(self) -> float:
        """Expected ids of a (sample, feature) pair on the shard; at least one if there are any."""
        return max(1.0, self.ids / self.walks) if self.ids > 0 and self.walks > 0 else 0.0

    @property
    def hottest_row_ids(self) -> float:
        probs = self.bins.probs
        return self.draws * float(probs.max()) if len(probs) else 0.0


class LookupModel:
    """Cost of embedding lookups on one kind of hardware; all times in ms.

    Times of shards are marginal inside one fused launch and add up; floors count once a launch, and
    so does the longest of the latencies (`predictor.cost.loads` puts them together). Work that a
    kind of hardware does not do takes no time.
    """

    def forward_floor_ms(self) -> float:
        """Return the shortest forward of a fused launch."""
        raise NotImplementedError

    def backward_floor_ms(self) -> float:
        """Return the shortest backward of a fused launch."""
        raise NotImplementedError

    def prefetch_floor_ms(self) -> float:
        """Return the shortest prefetch of a launch with cached tables."""
        return 0.0

    def hash_floor_ms(self) -> float:
        """Return the time of a launch over hash tables beyond the floor of its forward, in ms."""
        return 0.0

    def forward_ms(self, shard: LookupShard, tables: float = 1.0) -> float:
        """Gather and pool, after fetching rows that were not prefetched; 0 without ids.

        Args:
            tables: number of tables that share the L2, this one included, >= 1.
        """
        raise NotImplementedError

    def backward_ms(self, shard: LookupShard) -> float:
        """Sort, accumulate gradients, and step the optimizer where it is fused.

        Without ids only a dense gradient takes time: it is written for the whole shard.
        """
        raise NotImplementedError

    def prefetch_ms(self, shard: LookupShard, fetched_rows: float | None = None) -> float:
        """Bring the rows that a cache misses to the device; 0 for kernels without one.

        Args:
            fetched_rows: rows to fetch; None: as if no other table shared the cache.
        """
        return 0.0

    def bounds_ms(self, shard: LookupShard) -> float:
        """Check that the ids lie within their tables, as TorchRec's lookups do before a forward."""
        return 0.0

    def bucketize_ms(self, longest: float) -> float:
        """Return the shortest time to sort ids into the buckets of row blocks.

        Args:
            longest: most ids of a (sample, feature) pair.
        """
        return 0.0

    def fetch_ms(self, shard: LookupShard) -> float:
        """Return the time to fetch one row of a shard into the cache."""
        return 0.0

    def forward_longest_ms(self, shard: LookupShard) -> float:
        """Return the shortest forward of a launch with this shard, however few ids it has."""
        return 0.0

    def backward_longest_ms(self, shard: LookupShard) -> float:
        """Return the shortest backward of a launch with this shard."""
        return 0.0

    def sharing_ms(self, shard: LookupShard) -> tuple[float, ...]:
        """Return the added time of a forward when 2, 4, 8, 16 tables share the L2, step by step."""
        return (0.0,) * len(SHARERS)

    def sort_passes(self, rows: ArrayLike) -> Array:
        """Count the passes over the ids when a launch sorts ``rows`` rows together."""
        return np.zeros(np.shape(rows))

    def sort_pass_ms(self, *, weighted: bool, pooled: bool) -> float:
        """Return the time of one sort pass over one id."""
        return 0.0


def state_row_bytes(optimizer: str, dim: int) -> tuple[int, int]:
    """State of one row: bytes of its per-row scalars, bytes of its per-weight vectors."""
    per_weight, per_row = map(sum, zip(*STATES[optimizer], strict=True))
    return STATE_ELEMENT_BYTES * per_row, STATE_ELEMENT_BYTES * per_weight * dim


Array = NDArray[np.float64]


def table_of(features: Sequence[LookupShard]) -> LookupShard:
    """Join the features of a table's shard into one that draws as often as all together.

    Features of a table look up the same rows; they are assumed to agree on the k-th hottest row.
    """
    first, draws = features[0], [f.draws for f in features]
    if len(features) == 1 or not any(draws):
        return first
    bins = mix_features([f.bins for f in features], draws)
    return replace(
        first,
        bins=bins,
        draws=sum(draws),
        bags=sum(f.bags for f in features),
        lengths=sum(f.walks for f in features),
    )


def cache_rows(shard: LookupShard) -> float:
    """Return the rows that a shard adds to the cache of its launch."""
    return shard.cache_load_factor * shard.rows


def fetched_rows(shard: LookupShard, iterations: ArrayLike) -> Array:
    """Return the rows that a shard fetches per iteration at characteristic times > 0 of its cache.

    A row is fetched at most once an iteration.
    """
    misses = shard.draws * shard.bins.missed(shard.draws * np.asarray(iterations))
    return np.asarray(np.minimum(shard.distinct_rows, misses))


def own_fetched_rows(shard: LookupShard) -> float:
    """Return the rows that a shard fetches per iteration if no other table shares its cache."""
    return min(shard.distinct_rows, shard.ids * (1.0 - shard.bins.hit_rate(cache_rows(shard))))


@lru_cache(maxsize=100_000)
def shared_fetched_rows(shards: tuple[LookupShard, ...]) -> tuple[float, ...]:
    """Return the rows that every table of a launch fetches per iteration."""
    if len(shards) == 1:
        return (own_fetched_rows(shards[0]),)
    draws, rows = sum(s.draws for s in shards), sum(map(cache_rows, shards))
    if draws <= 0 or rows >= sum(s.bins.rows for s in shards):
        return (0.0,) * len(shards)
    bins = join_tables([s.bins for s in shards], [s.draws for s in shards])
    time = bins.characteristic_time(rows) / draws
    return tuple(float(fetched_rows(s, time)) for s in shards)

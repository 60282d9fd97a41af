"""The software cache of a fused launch, which all its ``fused_uvm_caching`` tables share.

FBGEMM makes one cache per launch: 32-way LRU sets, ``cache_load_factor`` times the rows of all
cached tables together, to which rows of every table hash (`_apply_cache_state` in
split_table_batched_embeddings_ops_training.py, lru_cache_populate.cu). TorchRec averages the load
factors of a launch, weighted by rows (`_get_weighted_avg_cache_load_factor` in
embedding_sharding.py), so tables that set one each bring in their share. In Che's approximation
(Che, Tung, Wang 2002) all rows of an LRU cache have one characteristic time, in which a row that is
not looked up again leaves. Time is counted in iterations here, since tables draw at other rates.

Why: docs/decisions/0021.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from predictor.cost.lookup.shard import LookupShard
from predictor.model.distribution import join_tables, mix_features

Array = NDArray[np.float64]


def table_of(features: Sequence[LookupShard]) -> LookupShard:
    """The shard of a table as one feature that draws as often as all its features together.

    Features of a table look up the same rows; the k-th hottest of one is taken for that of all.
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
    """Rows that a shard adds to the cache of its launch."""
    return shard.cache_load_factor * shard.rows


def fetched_rows(shard: LookupShard, iterations: ArrayLike) -> Array:
    """Rows that a shard fetches per iteration from a cache with these characteristic times, > 0.

    A row is fetched at most once an iteration.
    """
    misses = shard.draws * shard.bins.missed(shard.draws * np.asarray(iterations))
    return np.asarray(np.minimum(shard.distinct_rows, misses))


def own_fetched_rows(shard: LookupShard) -> float:
    """The same with a cache that no other table shares."""
    return min(shard.distinct_rows, shard.ids * (1.0 - shard.bins.hit_rate(cache_rows(shard))))


@lru_cache(maxsize=100_000)
def shared_fetched_rows(shards: tuple[LookupShard, ...]) -> tuple[float, ...]:
    """Rows that every table of a launch fetches per iteration."""
    if len(shards) == 1:
        return (own_fetched_rows(shards[0]),)
    draws, rows = sum(s.draws for s in shards), sum(map(cache_rows, shards))
    if draws <= 0 or rows >= sum(s.bins.rows for s in shards):
        return (0.0,) * len(shards)
    bins = join_tables([s.bins for s in shards], [s.draws for s in shards])
    time = bins.characteristic_time(rows) / draws
    return tuple(float(fetched_rows(s, time)) for s in shards)

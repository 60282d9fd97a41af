"""The UVM cache that the tables of one fused lookup share on a rank, tabulated.

Che's approximation gives all rows of a cache one characteristic time T. What a shard holds of the
cache at T, and what it fetches, does not depend on its neighbours, so both are tabulated once per
shard at times that all shards of a workload have in common. The tables of a launch add up; the T at
which they fill its cache, and their fetches there, are read off by interpolation.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from predictor.cost.lookup.embedding import lookup_model
from predictor.cost.lookup.shard import LookupShard, cache_rows, fetched_rows, own_fetched_rows
from predictor.hardware.schema import HardwareProfile

Array = NDArray[np.float64]

TIMES = 94
"""Number of characteristic times tabulated, besides zero and infinity."""
COLDEST, HOTTEST = 0.95, 0.01
"""Shares of a table that a cache holds at the longest and the shortest tabulated time."""
POINTS = TIMES + 2

SHARDS, ROWS, OWN_MS = range(3)
"""Cached shards; rows they bring to the cache; fetches if each had that cache to itself."""
RESIDENT = slice(3, 3 + POINTS)
"""Rows in the cache at each time; rises from 0 to the rows that are ever drawn."""
FETCH_MS = slice(3 + POINTS, 3 + 2 * POINTS)
"""Time to fetch the misses at each characteristic time; falls to 0."""
COLUMNS = 3 + 2 * POINTS


def common_times(tables: Iterable[LookupShard]) -> Array:
    """Return characteristic times in iterations, ``[TIMES]``, that span all tables' caches."""
    times = []
    for table in tables:
        drawn = float(table.bins.counts[table.bins.probs > 0].sum())
        if table.ids > 0:
            times += [
                table.bins.characteristic_time(share * drawn) / table.draws
                for share in (HOTTEST, COLDEST)
            ]
    return np.geomspace(min(times, default=1.0), max(times, default=2.0), TIMES)


def tabulate(shard: LookupShard, hw: HardwareProfile, times: Array) -> Array:
    """Tabulate the contribution of a shard to the cache of its launch, ``[COLUMNS]``."""
    row = np.zeros(COLUMNS)
    row[SHARDS], row[ROWS] = 1.0, cache_rows(shard)
    if shard.ids <= 0:
        return row
    probs, counts = shard.bins.probs, shard.bins.counts
    resident, fetch = row[RESIDENT], row[FETCH_MS]
    resident[1:-1] = shard.bins.resident(shard.draws * times)
    resident[-1] = counts[probs > 0].sum()
    row_ms = lookup_model(hw).fetch_ms(shard)
    fetch[:-1] = row_ms * fetched_rows(shard, np.concatenate(([0.0], times)))
    row[OWN_MS] = row_ms * own_fetched_rows(shard)
    tabulated = float(fetches_ms(row))
    if tabulated > 0:
        fetch *= row[OWN_MS] / tabulated  # makes interpolation exact for a shard that is alone
    return row


def position(caches: Array) -> Array:
    """Locate the tabulated time at which shards of launches ``[..., COLUMNS]`` fill their cache.

    Returns:
        Fractional indices ``[...]``; the last index where the shards never fill it.
    """
    resident, rows = caches[..., RESIDENT], caches[..., ROWS]
    below = (resident < rows[..., None]).sum(axis=-1)
    first = np.clip(below - 1, 0, POINTS - 2)
    low, high = _at(resident, first), _at(resident, first + 1)
    with np.errstate(over="ignore"):  # where nothing more comes in, infinite, and clipped
        part = (rows - low) / np.maximum(high - low, np.finfo(float).tiny)
    return np.asarray(first + np.clip(part, 0.0, 1.0))


def between(values: Array, where: Array) -> Array:
    """Interpolate tabulated ``values`` ``[..., POINTS]`` at positions ``[...]``."""
    first = np.minimum(where.astype(np.intp), POINTS - 2)
    low, high = _at(values, first), _at(values, first + 1)
    return np.asarray(low + (where - first) * (high - low))


def _at(values: Array, point: NDArray[np.intp]) -> Array:
    """Pick one entry of the last axis of ``values`` at each ``point``."""
    return np.take_along_axis(values, point[..., None], axis=-1)[..., 0]


def fetches_ms(caches: Array) -> Array:
    """Return the time of fetches per iteration of launches ``[..., COLUMNS]``, in ms."""
    return between(caches[..., FETCH_MS], position(caches))


def sharing_ms(caches: Array) -> Array:
    """Return the fetches in ms of launches beyond those of their shards with caches of their own.

    It can be negative: LRU gives a row its place regardless of the load factor of its table.
    """
    shared = caches[..., SHARDS] > 1.5
    if not shared.any():
        return np.zeros(caches.shape[:-1])
    return np.where(shared, fetches_ms(caches) - caches[..., OWN_MS], 0.0)

"""What ``fused_uvm_caching`` options fetch at least, whichever tables share their caches.

The tables of a launch share a cache, so what one of them fetches follows from the others. What all
of them fetch has a lower bound that is a sum over shards, which the program of
`search.bound.lower_bound` can add up. What a single shard is certain to fetch, however many rows
others lend it, counts in its rank's longest shard (`search.bound.rank_excess`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from predictor.cost.lookup.shared_cache import (
    FETCH_MS,
    OWN_MS,
    POINTS,
    RESIDENT,
    ROWS,
    between,
    position,
)

Array = NDArray[np.float64]

PRICES = 32
"""Prices of a cached row that are tried."""


def least_sharing_ms(caches: Sequence[Sequence[Array]]) -> Array:
    """What options that may meet in a launch fetch at least, beyond what they would with caches of
    their own, for several prices of a cached row, ``[options, 1 + PRICES]``.

    At every price, the sum over the options of a launch is never above what the launch fetches
    beyond that. An option that brings in more of the cache than it needs may count less than minus
    its own fetches.

    Args:
        caches: of each option's shards, ``[shared_cache.COLUMNS]`` each; at least one in all.
    """
    # shards alike are one array
    alike = {id(cache): cache for cache in chain.from_iterable(caches)}
    row = {key: i for i, key in enumerate(alike)}
    shards = np.stack([*alike.values()])
    beyond = _least_fetches_ms(shards) - shards[:, OWN_MS, None]
    return np.stack([beyond[[row[id(c)] for c in found]].sum(axis=0) for found in caches])


def _least_fetches_ms(shards: Array) -> Array:
    """Fetches ``[shards, 1 + PRICES]`` whose sum over those of a launch is never above what it
    fetches, at any of the prices.

    The characteristic time T of a launch lies between those that its shards would have alone: below
    the shortest, every shard holds less than it brings in, above the longest more. So it lies in
    the range ``R`` of all shards that may join. Resident rows ``r_s`` fill at most the rows ``c_s``
    that the shards bring in, so for every price ``p >= 0`` of a row, with fetches ``f_s``,

        sum f_s(T) >= sum f_s(T) + p (r_s(T) - c_s) >= sum min over t in R of f_s(t) + p (r_s - c_s)
    """
    alone = position(shards)
    shortest, longest = float(alone.min()), float(alone.max())
    # what is tabulated is linear between its points, so the least lies on one or at an end
    inside = np.arange(np.ceil(shortest), np.floor(longest) + 1)
    at = np.unique(np.concatenate(([shortest], inside, [longest])))
    everywhere = np.broadcast_to(at, (len(shards), len(at)))
    fetched = between(shards[:, None, FETCH_MS], everywhere)
    beyond = between(shards[:, None, RESIDENT], everywhere) - shards[:, None, ROWS]
    prices = _prices(fetched, beyond)
    return np.stack([(fetched + price * beyond).min(axis=1) for price in prices], axis=1)


def _prices(fetched: Array, beyond: Array) -> Array:
    """Prices ``[1 + PRICES]`` as different as what one more row of cache saves, and 0."""
    saved, more = -np.diff(fetched), np.diff(beyond)
    useful = (saved > 0) & (more > 0)
    if not useful.any():
        return np.zeros(1 + PRICES)
    rates = saved[useful] / more[useful]
    return np.concatenate(([0.0], np.geomspace(rates.min(), rates.max(), PRICES)))


def certain_fetches_ms(caches: Sequence[Sequence[Array]], tables: Sequence[int]) -> list[Array]:
    """What each shard fetches beyond what it would with a cache of its own, at least, whatever
    other tables of its launch lend it, ``[shards]`` of every option; never above 0.

    At the characteristic time T of a launch the resident rows fill at most what its shards bring
    in: ``sum r_s(T) <= sum c_s``. So a shard can hold only ``r_s(T) - c_s`` more rows than it
    brings in as others leave free. A table leaves at most ``max over its options`` of what their
    shards leave free at T, ``max(0, c - r(T))`` each, which falls with T while ``r_s`` rises. Where
    they cross, T ends, and fetches fall with T.

    Args:
        caches: of each option's shards, ``[shared_cache.COLUMNS]`` each; at least one in all.
        tables: of each option; a plan has one option of each.
    """
    free = [sum((_free_rows(one) for one in found), np.zeros(POINTS)) for found in caches]
    most: dict[int, Array] = {}
    for table, rows in zip(tables, free, strict=True):
        most[table] = np.maximum(rows, most.get(table, 0.0))
    every = sum(most.values(), np.zeros(POINTS))
    alike = {id(cache): cache for cache in chain.from_iterable(caches)}
    last = float(position(np.stack([*alike.values()])).max())
    result = []
    for table, mine, found in zip(tables, free, caches, strict=True):
        others = every - most[table] + mine
        least = {
            key: _least_ms(alike[key], others - _free_rows(alike[key]), last)
            for key in dict.fromkeys(map(id, found))
        }
        result.append(np.array([least[id(one)] for one in found]))
    return result


def _free_rows(cache: Array) -> Array:
    """Rows that a shard brings in and does not use at each tabulated time, ``[POINTS]``."""
    return np.asarray(np.maximum(0.0, cache[ROWS] - cache[RESIDENT]))


def _least_ms(cache: Array, lent: Array, last: float) -> float:
    """Fetches of a shard beyond its own at the longest time that rows lent allow.

    Args:
        lent: at most, at each tabulated time, ``[POINTS]``.
        last: position of the longest time of any shard alone, which no launch exceeds.
    """
    wanted = cache[RESIDENT] - cache[ROWS]
    over = np.flatnonzero(wanted > lent)
    at = last
    if len(over) and over[0] > 0:
        # up to the next tabulated time no more rows are free than at the one before
        before = int(over[0]) - 1
        step, left = wanted[before + 1] - wanted[before], lent[before] - wanted[before]
        at = min(last, before + (left / step if left < step else 1.0))
    least = between(cache[None, FETCH_MS], np.array([at]))[0]
    return min(0.0, float(least) - float(cache[OWN_MS]))

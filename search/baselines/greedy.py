"""Greedy placement of the baseline planners: the costliest shard first, to the cheapest rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Shards:
    """Shards that may lie on any rank.

    Args:
        cost: what is balanced, ``[shards]``.
        memory: bytes, ``[shards, hbm or ddr]``.
        dims: columns, ``[shards]``.
    """

    cost: Array
    memory: Array
    dims: Array


def place_greedily(
    shards: Shards, room: Array, most_dims: Array | None = None
) -> tuple[Ints, NDArray[np.bool_]]:
    """Ranks of all shards under several limits at once.

    Args:
        room: bytes left on every rank, ``[ranks, hbm or ddr]``.
        most_dims: columns that a rank may hold, one limit a try; a single try without limit if
            None.

    Returns:
        Ranks ``[tries, shards]``, and which tries found room for every shard, ``[tries]``.
    """
    limits = np.array([np.inf]) if most_dims is None else most_dims
    tries, worlds = np.arange(len(limits)), len(room)
    left = np.tile(room, (len(limits), 1, 1))
    loads, dims = np.zeros((len(limits), worlds)), np.zeros((len(limits), worlds))
    ranks = np.zeros((len(limits), len(shards.cost)), dtype=np.int64)
    fits = np.ones(len(limits), dtype=bool)
    for shard in np.argsort(-shards.cost, kind="stable"):
        free = (left >= shards.memory[shard]).all(axis=2)
        free &= dims + shards.dims[shard] <= limits[:, None]
        fits &= free.any(axis=1)
        chosen = np.where(free, loads, np.inf).argmin(axis=1)
        ranks[:, shard] = chosen
        loads[tries, chosen] += shards.cost[shard]
        dims[tries, chosen] += shards.dims[shard]
        left[tries, chosen] -= shards.memory[shard]
    return ranks, fits

"""Greedy placement of published planners: each shard goes to the cheapest rank with room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Shards:
    """Shards that may be placed on any rank.

    Args:
        cost: balanced over the ranks, ``[shards]``.
        memory: bytes, ``[shards, hbm or ddr]``.
        dims: columns, ``[shards]``.
    """

    cost: Array
    memory: Array
    dims: Array


def place_greedily(
    shards: Shards, room: Array, most_dims: Sequence[float] = (np.inf,)
) -> list[Ints | None]:
    """Place the costliest shard first; return each shard's rank, or None where they do not fit.

    Args:
        room: bytes left on every rank, ``[ranks, hbm or ddr]``.
        most_dims: limits on the columns of a rank; each gives one result.
    """
    return [_placed(shards, room, limit) for limit in most_dims]


def _placed(shards: Shards, room: Array, most_dims: float) -> Ints | None:
    free, loads, dims = room.astype(np.float64), np.zeros(len(room)), np.zeros(len(room))
    ranks = np.zeros(len(shards.cost), dtype=np.int64)
    for shard in np.argsort(-shards.cost, kind="stable").tolist():
        allowed = (shards.memory[shard] <= free).all(axis=1) & (
            dims + shards.dims[shard] <= most_dims
        )
        if not allowed.any():
            return None
        ranks[shard] = rank = int(np.where(allowed, loads, np.inf).argmin())
        loads[rank] += shards.cost[shard]
        free[rank] -= shards.memory[shard]
        dims[rank] += shards.dims[shard]
    return ranks

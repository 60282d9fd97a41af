"""Greedy placement as planners of papers do it: each shard to the cheapest rank that has room."""

from __future__ import annotations

from collections.abc import Sequence
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
    shards: Shards, room: Array, most_dims: Sequence[float] = (np.inf,)
) -> list[Ints | None]:
    """Ranks of all shards, the costliest placed first; None where they do not fit.

    Args:
        room: bytes left on every rank, ``[ranks, hbm or ddr]``.
        most_dims: columns that a rank may hold, one limit a try.
    """
    return [_placed(shards, room, limit) for limit in most_dims]


def _placed(shards: Shards, room: Array, most_dims: float) -> Ints | None:
    left, loads, dims = room.astype(np.float64), np.zeros(len(room)), np.zeros(len(room))
    ranks = np.zeros(len(shards.cost), dtype=np.int64)
    for shard in np.argsort(-shards.cost, kind="stable").tolist():
        able = (shards.memory[shard] <= left).all(axis=1) & (dims + shards.dims[shard] <= most_dims)
        if not able.any():
            return None
        ranks[shard] = rank = int(np.where(able, loads, np.inf).argmin())
        loads[rank] += shards.cost[shard]
        left[rank] -= shards.memory[shard]
        dims[rank] += shards.dims[shard]
    return ranks

"""Greedy placement as other planners do it: each shard to the cheapest rank that has room.

TorchRec's partitioner (`search.baselines.torchrec_planner`) and the planners of papers differ in
what a rank costs and when it is full, which is a `State`. `search.partitioner` is another matter:
it weighs several phases and keeps to the placements that constraints allow.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Key = tuple[float, int, int]
"""What ranks are ordered by: cost, what breaks ties, and the rank itself."""
Shard = TypeVar("Shard", contravariant=True)


class NoRoomError(Exception):
    """A shard fits on none of the ranks."""


class State(Protocol[Shard]):
    """Cost and room of every rank."""

    def fits(self, shard: Shard, rank: int) -> bool:
        """The shard has room on the rank."""
        ...

    def put(self, shard: Shard, rank: int) -> None:
        """Place a shard."""
        ...

    def key(self, rank: int) -> Key:
        """The rank with the least is the cheapest."""
        ...


def place_shards(shards: Iterable[Shard], state: State[Shard], heap: list[Key]) -> list[int]:
    """Place shards one by one, each on the cheapest rank that has room.

    Args:
        state: changes with every shard.
        heap: keys of the ranks that may be used; kept up to date.

    Raises:
        NoRoomError: a shard fits nowhere; those before it are placed.
    """
    placed = []
    for shard in shards:
        full = []
        while heap and not state.fits(shard, heap[0][2]):
            full.append(heapq.heappop(heap))
        if not heap:
            raise NoRoomError
        rank = heap[0][2]
        state.put(shard, rank)
        heapq.heapreplace(heap, state.key(rank))
        for key in full:
            heapq.heappush(heap, key)
        placed.append(rank)
    return placed


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


class _Sums:
    """Sums of costs, bytes and columns on every rank; shards are positions in ``shards``."""

    def __init__(self, shards: Shards, room: Array, most_dims: float) -> None:
        self.cost, self.dims = shards.cost.tolist(), shards.dims.tolist()
        self.hbm, self.ddr = shards.memory.T.tolist()
        self.hbm_left, self.ddr_left = room.T.tolist()
        self.dims_used, self.most_dims = [0.0] * len(room), most_dims
        self.loads = [0.0] * len(room)

    def fits(self, shard: int, rank: int) -> bool:
        return bool(
            self.hbm[shard] <= self.hbm_left[rank]
            and self.ddr[shard] <= self.ddr_left[rank]
            and self.dims_used[rank] + self.dims[shard] <= self.most_dims
        )

    def put(self, shard: int, rank: int) -> None:
        self.loads[rank] += self.cost[shard]
        self.hbm_left[rank] -= self.hbm[shard]
        self.ddr_left[rank] -= self.ddr[shard]
        self.dims_used[rank] += self.dims[shard]

    def key(self, rank: int) -> Key:
        return self.loads[rank], rank, rank


def place_greedily(
    shards: Shards, room: Array, most_dims: Sequence[float] = (np.inf,)
) -> list[Ints | None]:
    """Ranks of all shards, the costliest placed first; None where they do not fit.

    Args:
        room: bytes left on every rank, ``[ranks, hbm or ddr]``.
        most_dims: columns that a rank may hold, one limit a try.
    """
    order = np.argsort(-shards.cost, kind="stable")
    found: list[Ints | None] = []
    for limit in most_dims:
        try:
            heap = [(0.0, rank, rank) for rank in range(len(room))]
            placed = place_shards(order.tolist(), _Sums(shards, room, limit), heap)
        except NoRoomError:
            found.append(None)
            continue
        ranks = np.zeros(len(order), dtype=np.int64)
        ranks[order] = placed
        found.append(ranks)
    return found

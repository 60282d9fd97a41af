"""UVM caches of many plans: sums what the shards of each launch add to their shared cache."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from predictor.cost.load_sums import Selection
from predictor.cost.loads import ShardLoads
from predictor.cost.lookup import shared_cache
from predictor.model.plan import ComputeKernel, TablePlan

Array = NDArray[np.float64]
Ints = NDArray[np.intp]
Filled = dict[int, Array]
"""Lookup group -> contents of its caches, ``[ranks, shared_cache.COLUMNS]``."""


class CacheSums:
    """Stores what numbered shardings add to the caches of which ranks, and sums it."""

    def __init__(self, shards: ShardLoads) -> None:
        self.shards = shards
        self.world_size = shards.topology.world_size
        self._known: dict[int, tuple[int, Ints, Array]] = {}

    def append(self, number: int, index: int, plan: TablePlan, group: int) -> None:
        """Store a table's sharding if it uses a cache."""
        if plan.compute_kernel is not ComputeKernel.FUSED_UVM_CACHING:
            return
        per_rank: dict[int, Array] = {}
        for shard in plan.shards:
            cache = self.shards.cache_of_shard(index, plan, shard)
            if cache is not None:
                per_rank[shard.rank] = per_rank.get(shard.rank, 0.0) + cache
        if per_rank:
            ranks = np.array([*per_rank], dtype=np.intp)
            self._known[number] = group, ranks, np.stack([*per_rank.values()])

    def sum_contents(self, numbers: Ints) -> Filled:
        """Sum of what the shardings of one plan add."""
        found: Filled = {}
        for number in numbers.tolist() if self._known else ():
            self._put(found, number, 1.0)
        return found

    def _put(self, filled: Filled, number: int, sign: float) -> None:
        if number in self._known:
            group, ranks, brought = self._known[number]
            empty = np.zeros((self.world_size, shared_cache.COLUMNS))
            filled[group] = filled.get(group, empty).copy()
            filled[group][ranks] += sign * brought

    def add_sharing(self, times: Array, chosen: Selection, place: Ints, base: Filled) -> None:
        """Add, in place, the fetches that sharing a cache adds to lookups, less those of the base.

        Args:
            times: ``[groups, ranks, plans]`` in ms.
            chosen: shardings in which plans differ from the base.
            place: lookup group -> its position in ``times``; the number of groups if nowhere.
            base: contents of the base's caches.
        """
        if not self._known:
            return
        after: dict[int, Filled] = {}
        signs = np.ones(len(chosen.numbers)) if chosen.signs is None else chosen.signs
        for plan, number, sign in zip(
            chosen.owners.tolist(), chosen.numbers.tolist(), signs.tolist(), strict=True
        ):
            if number in self._known:
                self._put(after.setdefault(plan, dict(base)), number, sign)
        lookups = [
            (plan, group)
            for plan, filled in after.items()
            for group in filled
            if filled[group] is not base.get(group) and place[group] < len(times)
        ]
        if lookups:
            plans, groups = (np.array(side) for side in zip(*lookups, strict=True))
            ms = shared_cache.sharing_ms(np.stack([after[p][g] for p, g in lookups]))
            before = np.zeros((len(place), self.world_size))
            for group, filled in base.items():
                before[group] = shared_cache.sharing_ms(filled)
            times[place[groups], :, plans] += ms - before[groups]

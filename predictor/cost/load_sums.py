"""Sums the loads of many plans at once.

Every sharding of a table gets a number when it first occurs. The load that it puts on all ranks
alike is one row of an array, and what a rank has beyond that is another row. So a plan takes a few
rows per table on any number of ranks, and the loads of many plans are sums over selected rows.
`CacheSums` does the same for what shards add to the UVM cache of their launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from predictor.cost.loads import COLUMNS, LONGEST, ShardLoads, add
from predictor.cost.lookup import shared_cache
from predictor.model.plan import ComputeKernel, TablePlan

Array = NDArray[np.float64]
Ints = NDArray[np.intp]

LATENCIES = LONGEST.stop - LONGEST.start


class GrowingArray:
    """Array that grows along its last axis, at an amortised constant cost per value."""

    def __init__(self, *shape: int, dtype: type = float) -> None:
        self._held: NDArray[Any] = np.zeros((*shape, 64), dtype=dtype)
        self.size = 0

    @property
    def array(self) -> NDArray[Any]:
        """Values appended so far, ``[..., size]``."""
        return self._held[..., : self.size]

    def extend(self, more: NDArray[Any]) -> None:
        """Append values ``[..., count]``."""
        end = self.size + more.shape[-1]
        if end > self._held.shape[-1]:
            grown = np.zeros((*self._held.shape[:-1], 2 * end), dtype=self._held.dtype)
            grown[..., : self.size] = self.array
            self._held = grown
        self._held[..., self.size : end] = more
        self.size = end


class RankRows:
    """Numbered items, each with values ``[columns]`` on some of the ranks."""

    def __init__(self, columns: int) -> None:
        self._first, self._count = GrowingArray(dtype=int), GrowingArray(dtype=int)
        self._ranks, self._values = GrowingArray(dtype=int), GrowingArray(columns)
        self._new: list[tuple[Ints, Array]] = []
        self._used = np.zeros(columns, dtype=bool)

    def append(self, ranks: Ints, values: Array) -> None:
        """Add the next item, with values ``[ranks, columns]``."""
        self._new.append((ranks, values))

    def of(self, items: Ints) -> tuple[Ints, Ints, Ints]:
        """Return the rows of items: position in ``items``, rank and index in `column` of each."""
        self._take_in()
        count = self._count.array[items]
        owner = np.repeat(np.arange(len(items)), count)
        begin = self._first.array[items] - np.cumsum(count) + count
        rows = np.arange(len(owner)) + begin[owner]
        return owner, self._ranks.array[rows], rows

    def _take_in(self) -> None:
        """Append all new items at once, which costs little more than appending one."""
        if self._new:
            ranks, values = (np.concatenate(side) for side in zip(*self._new, strict=True))
            count = np.array([len(new) for new, _ in self._new])
            self._first.extend(self._ranks.size + np.cumsum(count) - count)
            self._count.extend(count)
            self._ranks.extend(ranks)
            self._values.extend(values.T)
            self._used |= values.any(axis=0)
            self._new.clear()

    @property
    def columns(self) -> list[int]:
        """Columns that are not zero everywhere."""
        return [int(column) for column in np.flatnonzero(self._used)]

    def column(self, column: int) -> Array:
        """Return one column of every row."""
        return np.asarray(self._values.array[column])


class LoadSums:
    """Load rows of numbered shardings, and their sums over plans."""

    def __init__(self, shards: ShardLoads) -> None:
        self.shards = shards
        self.world_size = shards.topology.world_size
        self._group = GrowingArray(dtype=int)
        self.alone, self.everywhere = RankRows(COLUMNS), RankRows(COLUMNS)
        self._longest = RankRows(LATENCIES)
        self._longest_everywhere = RankRows(LATENCIES)
        self._most: dict[int, Array] = {}

    def append(self, index: int, plan: TablePlan, group: int) -> None:
        ranks, per_rank = self.shards.of_table(index, plan)
        if len(set(plan.ranks)) < len(plan.ranks):
            ranks, per_rank = _per_rank(ranks, per_rank)
        longest = per_rank[:, LONGEST].copy()
        per_rank[:, LONGEST] = 0.0
        self._most[group] = np.maximum(self._most.get(group, 0.0), longest.max(axis=0))
        self._group.extend(np.array([group]))
        usual, least = np.zeros((0, COLUMNS)), np.zeros((0, LATENCIES))
        if len(ranks) == self.world_size:
            least = longest.min(axis=0, keepdims=True)
            ahead = (longest > least).any(axis=1)
            self._longest.append(ranks[ahead], longest[ahead])
            middle = per_rank[self.world_size // 2]
            if 2 * (per_rank == middle).all(axis=1).sum() > self.world_size:
                usual = middle[None].copy()
                other = (per_rank != middle).any(axis=1)
                ranks, per_rank = ranks[other], per_rank[other] - middle
        else:
            self._longest.append(ranks, longest)
        self._longest_everywhere.append(np.zeros(len(least), dtype=np.intp), least)
        self.everywhere.append(np.zeros(len(usual), dtype=np.intp), usual)
        self.alone.append(ranks, per_rank)

    def group(self, numbers: Ints) -> Ints:
        """Return the lookup group of each numbered sharding, in the shape of ``numbers``."""
        return np.asarray(self._group.array[numbers])

    def most(self, groups: Ints) -> Array:
        """Return the longest latencies of any shard of lookup groups so far, ``[2, groups]``."""
        return np.stack([self._most.get(g, np.zeros(LATENCIES)) for g in groups.tolist()], axis=-1)

    def totals(self, chosen: Selection, plans: int, place: Ints, groups: int) -> Array:
        """Sum loads, without the longest latencies, ``[COLUMNS, groups, ranks, plans]``.

        Args:
            place: lookup group -> its position on the second axis; ``groups`` for groups left out.
        """
        total = np.zeros((COLUMNS, groups, self.world_size, plans))
        both = self.alone, self.everywhere
        for rows, width, owner, indices, target in self._entries(both, chosen, place, plans):
            signs = None if chosen.signs is None else chosen.signs[owner]
            size = (groups + 1) * width * plans
            for column in rows.columns:
                values = rows.column(column)[indices]
                if signs is not None:
                    values *= signs
                sums = np.bincount(target, values, size).reshape(groups + 1, width, plans)
                total[column] += sums[:groups]
        return total

    def _entries(
        self, both: tuple[RankRows, RankRows], chosen: Selection, place: Ints, plans: int
    ) -> Iterator[tuple[RankRows, int, Ints, Ints, Ints]]:
        """Yield the rows by rank, then those that all ranks share.

        Yields:
            The rows; their number of distinct ranks; and for each entry its position in ``chosen``,
            its index in the rows and its place in ``[groups, ranks, plans]``.
        """
        at = place[self.group(chosen.numbers)]
        for rows, width in zip(both, (self.world_size, 1), strict=True):
            owner, ranks, indices = rows.of(chosen.numbers)
            if len(owner):
                target = (at[owner] * width + ranks) * plans + chosen.owners[owner]
                yield rows, width, owner, indices, target

    def added(
        self,
        columns: Sequence[int],
        chosen: Selection,
        place: Ints,
        shape: tuple[int, int],
        shares: Array,
        kinds: Ints,
    ) -> Array:
        """Sum shares of the shardings' columns, draw by draw.

        Args:
            place: lookup group -> its position; all groups of the shardings have one.
            shape: ``(groups, plans)``.
            shares: factor by column, draw and kind of sharding, ``[columns, draws, kinds]``.
            kinds: of each chosen sharding.

        Returns:
            ``[columns, groups, ranks, draws, plans]``.
        """
        groups, plans = shape
        draws = shares.shape[1]
        total = np.zeros((len(columns), groups, self.world_size, draws, plans))
        both = self.alone, self.everywhere
        for rows, width, owner, indices, target in self._entries(both, chosen, place, plans):
            kind = kinds[owner]
            for way, column in enumerate(columns):
                values = rows.column(column)[indices]
                for draw, share in enumerate(shares[way]):
                    sums = np.bincount(target, values * share[kind], groups * width * plans)
                    total[way, :, :, draw] += sums.reshape(groups, width, plans)
        return total

    def put_longest(self, total: Array, chosen: Selection, place: Ints) -> None:
        """Enter the longest latencies of shardings into ``[COLUMNS, groups, ranks, plans]``.

        Args:
            place: lookup group -> its position on the second axis.
        """
        _, groups, _, plans = total.shape
        both = self._longest, self._longest_everywhere
        for rows, width, _, indices, target in self._entries(both, chosen, place, plans):
            for column in range(LATENCIES):
                most = np.zeros(groups * width * plans)
                np.maximum.at(most, target, rows.column(column)[indices])
                latencies = total[LONGEST.start + column]
                np.maximum(latencies, most.reshape(groups, width, plans), out=latencies)


@dataclass(frozen=True)
class Selection:
    """Numbered shardings and the plans that they belong to.

    Args:
        numbers: of the shardings.
        owners: plan of each.
        signs: 1.0 for shardings to add, -1.0 for those to subtract; None: add all.
    """

    numbers: Ints
    owners: Ints
    signs: Array | None


def _per_rank(ranks: Ints, loads: Array) -> tuple[Ints, Array]:
    """Return the ranks without repetition, and the summed load of the shards on each."""
    once, where = np.unique(ranks, return_inverse=True)
    total = np.zeros((len(once), COLUMNS))
    for at, load in zip(where, loads, strict=True):
        add(total[at], load)
    return once, total


Filled = dict[int, Array]
"""Lookup group -> contents of its caches, ``[ranks, shared_cache.COLUMNS]``."""


class CacheSums:
    """Contributions of numbered shardings to the caches of their ranks, and their sums."""

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
        """Sum the contributions of the shardings of one plan."""
        contents: Filled = {}
        for number in numbers.tolist() if self._known else ():
            self._put(contents, number, 1.0)
        return contents

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

"""Moves and swaps of single shards between ranks, all scored at once.

What is minimised is a sum over the ranks of what their loads contribute. So a change costs no more
to score than the two ranks that it touches, and thousands are scored in one step.

Why the shards of two ranks are divided: docs/decisions/0028-plans-from-the-bound.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Change = TypeVar("Change")
Cost = Callable[[Array], Array]

AT_ONCE = 1 << 15
"""Numbers that swaps are scored with at once: what caches hold."""
SWAPPED = 16
"""Ranks that contribute least, whose shards others swap places with."""
DIVIDED = 12
"""Shards of two ranks that are divided between them in every way, at most: 4096 ways."""
PARTNERS = 8
"""Ranks that a rank shares its shards with, one after the other."""
WAYS = [(np.arange(2**n)[:, None] >> np.arange(n) & 1).astype(bool) for n in range(DIVIDED + 1)]
"""All ways to take some of so many shards, ``[ways, shards]``."""


@dataclass(frozen=True)
class Shards:
    """Shards that may lie on any of several ranks, one row each.

    Args:
        table: that a shard belongs to, ``[shards]``.
        position: among the shards of its table, ``[shards]``.
        ranks: where it lies, ``[shards]``.
        work: that it adds to the loads of its rank, ``[shards, columns]``.
        memory: bytes, ``[shards, hbm or ddr]``.
        allowed: ranks that it may lie on, ``[shards, ranks]``.
    """

    table: Ints
    position: Ints
    ranks: Ints
    work: Array
    memory: Array
    allowed: NDArray[np.bool_]


@dataclass(frozen=True)
class Occupancy:
    """What all shards together put on the ranks.

    Args:
        loads: ``[ranks, columns]``.
        used: bytes, ``[ranks, hbm or ddr]``.
        room: bytes that may be used, likewise.
    """

    loads: Array
    used: Array
    room: Array


class Neighbourhood:
    """The costs of all changes of some shards.

    Args:
        cost: loads ``[..., columns]`` to what ranks with them contribute, ``[...]``.
        mine: positions in ``shards`` of those to change.
    """

    def __init__(self, shards: Shards, now: Occupancy, cost: Cost, mine: Ints) -> None:
        self.shards, self.now, self.cost, self.mine = shards, now, cost, mine
        self.parts = cost(now.loads)
        self.sum = float(self.parts.sum())
        self.here = shards.ranks[mine]

    def moves(self) -> Array:
        """Cost after each move to a rank, ``[mine, ranks]``; infinite where it is not allowed."""
        shards, now, cost, here = self.shards, self.now, self.cost, self.here
        work = shards.work[self.mine]
        left = self.sum - self.parts[here] + cost(now.loads[here] - work)
        come = now.loads.T + work[..., None]
        found = left[:, None] - self.parts + cost(come.swapaxes(1, 2))
        found[np.arange(len(here)), here] = np.inf
        over = ~shards.allowed[self.mine]
        for kind in self.scarce:
            over |= now.used[:, kind] + shards.memory[self.mine, kind, None] > now.room[:, kind]
        found[over] = np.inf
        return found

    def swaps(self) -> Array:
        """Cost after each swap with a shard, ``[mine, shards]``; infinite where it is not allowed,
        and for shards of ranks that contribute more than so many others."""
        shards, now, cost, here = self.shards, self.now, self.cost, self.here
        found = np.full((len(here), len(shards.ranks)), np.inf)
        idle = np.zeros(len(self.parts), dtype=bool)
        idle[np.argsort(self.parts, kind="stable")[:SWAPPED]] = True
        others = np.flatnonzero(idle[shards.ranks])
        there = shards.ranks[others]
        # columns before shards: numpy is fast along what is long
        every = np.ascontiguousarray(shards.work[others].T)
        loads = np.ascontiguousarray(now.loads[there].T)
        rows = max(1, AT_ONCE // max(1, every.size))
        for some in (slice(at, at + rows) for at in range(0, len(here), rows)):
            mine, its = self.mine[some], here[some]
            change = every - shards.work[mine][..., None]
            after = cost((now.loads[its][..., None] + change).swapaxes(1, 2))
            np.subtract(loads, change, out=change)
            after += cost(change.swapaxes(1, 2))
            after += self.sum - self.parts[its][:, None] - self.parts[there]
            found[some, others] = after
        over = (here[:, None] == shards.ranks) | self.forbidden()
        for kind in self.scarce:
            memory, used, room = shards.memory[:, kind], now.used[:, kind], now.room[:, kind]
            moved = memory - memory[self.mine, None]
            over |= moved > (room - used)[here, None]
            over |= moved < (used - room)[shards.ranks]
        found[over] = np.inf
        return found

    @cached_property
    def scarce(self) -> list[int]:
        """Kinds of memory that a change of a shard could exceed somewhere."""
        shards, now = self.shards, self.now
        if not len(shards.memory):
            return []
        most = now.used.max(axis=0) + shards.memory.max(axis=0)
        return np.flatnonzero(most > now.room.min(axis=0)).tolist()

    def forbidden(self) -> NDArray[np.bool_]:
        """Exchanges of places that constraints on ranks rule out, ``[mine, shards]``."""
        shards = self.shards
        if shards.allowed.all():
            return np.zeros((len(self.mine), len(shards.ranks)), dtype=bool)
        return ~shards.allowed[self.mine][:, shards.ranks] | ~shards.allowed[:, self.here].T

    def divisions(self, here: int, random: np.random.Generator) -> tuple[float, dict[int, int]]:
        """Shards of a rank and of one that contributes little, divided between the two in every
        way: the least cost, and shard -> new rank.

        Where memory is nearly full, single shards can neither move nor swap; several at once can.

        Args:
            here: its shards are divided, not those of ``mine``.
            random: picks ranks that contribute alike, and shards, large ones rather, where there
                are more than `DIVIDED`.
        """
        every = random.permutation(len(self.parts))  # many may contribute nothing
        others = every[np.argsort(self.parts[every], kind="stable")][: PARTNERS + 1].tolist()
        found = [self._divided(here, there, random) for there in others if there != here]
        return min(found[:PARTNERS], key=lambda one: one[0], default=(np.inf, {}))

    def _divided(
        self, here: int, there: int, random: np.random.Generator
    ) -> tuple[float, dict[int, int]]:
        shards, now, cost = self.shards, self.now, self.cost
        some = (shards.ranks == here) | (shards.ranks == there)
        able = np.flatnonzero(some & shards.allowed[:, here] & shards.allowed[:, there])
        if len(able) > DIVIDED:
            keys = random.random(len(able)) ** (1 / self._sizes(able))
            able = able[np.argsort(-keys, kind="stable")[:DIVIDED]]
        ways, before = WAYS[len(able)], shards.ranks[able] == here
        work, memory = shards.work[able], shards.memory[able]
        more = ways @ memory - before @ memory
        fits = (now.used[here] + more <= now.room[here]).all(axis=1)
        fits &= (now.used[there] - more <= now.room[there]).all(axis=1)
        if not fits.any():
            return np.inf, {}
        ways = ways[fits]
        come = ways @ work - before @ work
        after = cost(now.loads[here] + come) + cost(now.loads[there] - come)
        values = after + (self.sum - self.parts[here] - self.parts[there])
        best = int(values.argmin())
        moved = np.flatnonzero(ways[best] != before)
        ranks = np.where(ways[best], here, there)[moved]
        return float(values[best]), dict(zip(able[moved].tolist(), ranks.tolist(), strict=True))

    def _sizes(self, some: Ints) -> Array:
        """The largest share of a rank's memory or load that shards have, ``[some]``."""
        shards, now = self.shards, self.now
        memory = shards.memory[some] / np.maximum(now.room.max(axis=0), 1.0)
        work = shards.work[some] / np.maximum(now.loads.max(axis=0), 1e-12)
        shares = np.concatenate([memory, work], axis=1).max(axis=1)
        return np.asarray(np.maximum(shares, 1e-9))

    def placements(self, one: int, target: int) -> dict[int, int]:
        """Shard -> new rank of a change, numbered as ``moves`` and then ``swaps`` count them.

        Args:
            one: position of the shard in ``shards``.
        """
        ranks, world = self.shards.ranks, len(self.now.loads)
        if target < world:
            return {one: target}
        two = target - world
        return {one: int(ranks[two]), two: int(ranks[one])}


def pick_apart(changes: Iterable[tuple[float, Change, set[int]]], below: float) -> list[Change]:
    """The changes that cost less than ``below`` and touch different ranks, so that all fit at once.

    Args:
        changes: cost, change and the ranks that it touches; best first.
    """
    picked: list[Change] = []
    touched: set[int] = set()
    for cost, change, ranks in changes:
        if cost >= below:
            break
        if touched.isdisjoint(ranks):
            touched |= ranks
            picked.append(change)
    return picked

"""A lower bound on the largest sum of shard costs on a rank, and the options that come with it.

Guess a target z. No option with a costlier shard can be part of a plan that reaches it. Of the
others let every table take the one of least total cost plus a price on its memory. The prices are
Lagrange multipliers of "all tables together fit into all ranks together": for any price, the sum
less what all memory would pay is a lower bound on the total cost of a plan that reaches z. If that
exceeds z on every rank, no plan does. The smallest z that is not refuted is the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

PRECISION = 1e-4
"""Relative width at which the search for z ends; the bound is its lower end."""
PRICE_STEPS = 24
ROUNDS = 2
"""Times that the prices of HBM and host memory are set one after the other."""
MAX_PRICE = 2.0**40


@dataclass(frozen=True)
class OptionArrays:
    """Options of all tables, one after another.

    Args:
        cost: of each shard of an option in ms, ``[options]``.
        total: of all of its shards.
        memory: of all of its shards over what all ranks have, ``[options, hbm or ddr]``.
        largest: the largest shard's bytes over what the largest rank has, of either kind.
        starts: first option of every table.
    """

    cost: Array
    total: Array
    memory: Array
    largest: Array
    starts: Ints


@dataclass(frozen=True)
class Selection:
    """One option a table.

    Args:
        options: index of the option of every table in `OptionArrays`.
        total_ms: lower bound on the total cost at this target.
    """

    options: Ints
    total_ms: float


class AdditiveBound:
    """Bounds and picks for one problem with ``world`` ranks."""

    def __init__(self, items: OptionArrays, world: int) -> None:
        self.items = items
        self.world = world

    def lower_bound_ms(self) -> float:
        """No plan has a smaller rating."""
        least = float(np.maximum.reduce(np.minimum.reduceat(self.items.cost, self.items.starts)))
        low, high = least, least
        while self._refuted(high):
            low, high = high, 2 * high
            if high > MAX_PRICE * least:
                return low  # the tables do not fit together: any value is a bound
        while high - low > PRECISION * high:
            middle = (low + high) / 2
            low, high = (middle, high) if self._refuted(middle) else (low, middle)
        return low

    def _refuted(self, target: float) -> bool:
        return self.pick(target).total_ms > self.world * target * (1 + 1e-12)

    def pick(self, target: float, pressure: float = 1.0, largest: float = 1.0) -> Selection:
        """Least total cost plus memory price among options whose shards cost at most ``target``.

        Args:
            target: at least every table's cheapest shard.
            pressure: share of all memory that may be taken is one over this; above 1 the picks
                leave room, and `total_ms` is no bound.
            largest: share of a rank's memory that a shard may take, where a table can do with it;
                below 1, `total_ms` is no bound.
        """
        allowed = np.where(self.items.cost <= target, 0.0, np.inf)
        small = np.where(self.items.largest <= largest, allowed, np.inf)
        best = np.minimum.reduceat(small, self.items.starts)
        sizes = np.diff(np.append(self.items.starts, len(small)))
        allowed = np.where(np.isfinite(np.repeat(best, sizes)), small, allowed)
        total, room = self.items.total + allowed, 1.0 / pressure
        prices = np.zeros(2)
        for _ in range(ROUNDS):
            for kind in range(2):
                prices[kind] = self._price(total, prices, kind, room)
        options, value = self._least(total, prices)
        return Selection(options, value - float(prices.sum()) * room)

    def _price(self, total: Array, prices: Array, kind: int, room: float) -> float:
        """The smallest price of one kind of memory at which the picks fit, the other's fixed."""
        low, high = 0.0, float(np.mean(self.items.total))
        trial = prices.copy()

        def fits(price: float) -> bool:
            trial[kind] = price
            options, _ = self._least(total, trial)
            return bool(self.items.memory[options, kind].sum() <= room)

        if fits(0.0):
            return 0.0
        while not fits(high):
            low, high = high, 4 * high
            if high > MAX_PRICE:
                return high
        for _ in range(PRICE_STEPS):
            middle = (low + high) / 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        return high

    def _least(self, total: Array, prices: Array) -> tuple[Ints, float]:
        """The cheapest option of every table at these prices, and the sum."""
        priced = total + self.items.memory @ prices
        least = np.minimum.reduceat(priced, self.items.starts)
        sizes = np.diff(np.append(self.items.starts, len(priced)))
        first = np.flatnonzero(priced == np.repeat(least, sizes))
        table = np.searchsorted(self.items.starts, first, side="right") - 1
        _, where = np.unique(table, return_index=True)
        return first[where], float(least.sum())


def stack_options(
    costs: Sequence[Sequence[float]], memory: Sequence[Sequence[Array]], caps: Array
) -> OptionArrays:
    """The options as arrays.

    Args:
        costs: of each shard of every option, a list a table.
        memory: bytes of every shard, ``[shards, hbm or ddr]``, likewise.
        caps: bytes ``[hbm or ddr, ranks]``.
    """
    everything = np.maximum(caps.sum(axis=1), 1.0)
    flat = [m for table in memory for m in table]
    cost = np.array([c for table in costs for c in table])
    counts = np.array([len(m) for m in flat])
    sums = np.array([m.sum(axis=0) for m in flat]) / everything
    widest = np.maximum(caps.max(axis=1), 1.0)
    largest = np.array([(m / widest).max() for m in flat])
    starts = np.cumsum([0, *map(len, costs)])[:-1]
    return OptionArrays(cost, cost * counts, sums, largest, starts.astype(np.int64))

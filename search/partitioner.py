"""Greedy placement of chosen options: largest work first, onto the freest ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from search.objective import Assignment, Objective, Ranks
from search.space.option import Choice, Option
from search.surrogate import PHASES

Array = NDArray[np.float64]


class Costs(Protocol):
    """Costs of shards on their ranks; `search.surrogate.Surrogate` implements it."""

    def phases(self, option: Option) -> Array:
        """Cost of every shard by phases, ``[shards, PHASES]``."""
        ...


class GreedyPartitioner:
    """Places tables one by one; a placement never exceeds a memory cap.

    Args:
        weights: how much each phase counts, ``[PHASES]``; all alike if None.
    """

    def __init__(self, objective: Objective, costs: Costs, weights: Array | None = None) -> None:
        self.objective = objective
        self.costs = costs
        self.weights = np.ones(PHASES) if weights is None else weights
        self.topology = objective.problem.topology
        self.units = lru_cache(maxsize=1 << 16)(self._units)
        self.alike = lru_cache(maxsize=1 << 16)(self._alike)

    def _units(self, option: Option) -> list[tuple[slice, NDArray[np.intp], Array]]:
        """Return, for every run of shards placed together, its slice, the alternatives
        ``[alternatives, shards]``, and its bytes ``[hbm or ddr, shards]``."""
        memory = np.array(self.objective.bytes_of(option))
        where: dict[int, NDArray[np.intp]] = {}
        units, start = [], 0
        for alternatives in self.objective.legal(option).units:
            shards = slice(start, start + len(alternatives[0]))
            # runs share their alternatives
            array = where.setdefault(id(alternatives), np.array(alternatives))
            units.append((shards, array, memory[:, shards]))
            start = shards.stop
        return units

    def _alike(self, option: Option) -> tuple[NDArray[np.intp], Array] | None:
        """The ranks that each shard may lie on, and bytes ``[hbm or ddr, 1]`` of each, if that is
        the same for all and a shard is placed alone; None if not."""
        units = self.units(option)
        _, where, memory = units[0]
        same = all(w is where and np.array_equal(m, memory) for _, w, m in units)
        return (where[:, 0], memory) if same and where.shape[1] == 1 else None

    def place_all(self, options: Sequence[Option]) -> Assignment | None:
        """Longest processing time first; by memory instead if that does not fit; then by memory
        onto the freest ranks; None if nothing fits.

        Args:
            options: one per table, in the workload's order.
        """
        work = [float(self.costs.phases(o).sum(axis=0) @ self.weights) for o in options]
        bytes_of = np.array([[*map(sum, self.objective.bytes_of(o))] for o in options], dtype=float)
        if (bytes_of.sum(axis=0) > self.objective.caps.sum(axis=1)).any():
            return None
        memory = bytes_of.sum(axis=1)
        free = [not self._is_forced(option) for option in options]  # the others come first
        by_work, by_memory = (
            sorted(range(len(options)), key=lambda t: (free[t], -keys[t], t))
            for keys in (work, memory)
        )
        for order, roomy in ((by_work, False), (by_memory, False), (by_memory, True)):
            placed = self.place_in_order(order, options, roomy=roomy)
            if placed is not None:
                return placed
        return None

    def place_in_order(
        self, order: Sequence[int], options: Sequence[Option], *, roomy: bool = False
    ) -> Assignment | None:
        """Every table in this order on the ranks that `best_ranks` finds; None if one fits nowhere.

        Args:
            options: one per table, in the workload's order.
        """
        loads = np.zeros((self.topology.world_size, PHASES))
        used = np.zeros_like(self.objective.caps)
        chosen: dict[int, Choice] = {}
        for table in order:
            option = options[table]
            together = self._partner(table, chosen)
            ranks = self.best_ranks(option, loads, used, together, roomy=roomy)
            if ranks is None:
                return None
            chosen[table] = (option, ranks)
            np.add.at(loads, list(ranks), self.costs.phases(option))
            used += self.objective.footprint(option, ranks)
        return tuple(chosen[t] for t in range(len(options)))

    def _is_forced(self, option: Option) -> bool:
        return all(len(run) == 1 for run in self.objective.legal(option).units)

    def _partner(self, table: int, chosen: dict[int, Choice]) -> frozenset[int] | None:
        for group in self.objective.space.co_locate:
            if table in group:
                for other in group:
                    if other in chosen:
                        return frozenset(chosen[other][1])
        return None

    def best_ranks(
        self,
        option: Option,
        loads: Array,
        used: Array,
        together: frozenset[int] | None = None,
        *,
        roomy: bool = False,
    ) -> Ranks | None:
        """Ranks for one option: each run of shards where the load is least; None if none fits.

        Args:
            loads: phase times so far, ``[ranks, PHASES]``.
            used: bytes so far, ``[hbm or ddr, ranks]``.
            together: the only ranks allowed, all of which must be used.
            roomy: where the most memory is free instead.
        """
        legal = self.objective.legal(option)
        if legal.is_empty or (legal.same_group and self._is_split(together)):
            return None
        pools: list[frozenset[int] | None] = [together]
        if legal.same_group and together is None:
            found = None if roomy else self._fill_group(option, loads, used)
            if found is not None:
                return found
            size = self.topology.intra_group_size
            pools = [
                frozenset(range(g * size, (g + 1) * size)) for g in range(self.topology.groups)
            ]
        best: tuple[float, Ranks] | None = None
        for pool in pools:
            ranks = self._fill(option, loads, used, pool, roomy)
            if ranks is None or together not in (None, frozenset(ranks)):
                continue
            if len(pools) == 1:
                return ranks
            after = loads.copy()
            np.add.at(after, list(ranks), self.costs.phases(option))
            value = float(after.max(axis=0) @ self.weights)
            if best is None or value < best[0]:
                best = value, ranks
        return None if best is None else best[1]

    def _fill_group(self, option: Option, loads: Array, used: Array) -> Ranks | None:
        """The group and ranks for shards that must lie in one group; None if they are not alike, or
        some group does not have a rank with room for each."""
        alike, phases = self.alike(option), self.costs.phases(option)
        count, size = len(phases), self.topology.intra_group_size
        if alike is None or count > size or not (phases == phases[0]).all():
            return None
        where, memory = alike
        keys = np.full(len(loads), np.inf)
        keys[where] = (loads[where] + phases[0]) @ self.weights
        keys[np.logical_or.reduce(used + memory > self.objective.caps, axis=0)] = np.inf
        ranks = keys.reshape(-1, size).argsort(axis=1, kind="stable")[:, :count]
        ranks += size * np.arange(len(ranks))[:, None]
        if keys[ranks[:, -1]].max() == np.inf:
            return None
        after = np.maximum((loads[ranks] + phases[0]).max(axis=1), loads.max(axis=0))
        return tuple(ranks[(after @ self.weights).argmin()].tolist())

    def _is_split(self, ranks: frozenset[int] | None) -> bool:
        return ranks is not None and len({self.topology.group_of(r) for r in ranks}) > 1

    def _fill(
        self,
        option: Option,
        loads: Array,
        used: Array,
        pool: frozenset[int] | None,
        roomy: bool,
    ) -> Ranks | None:
        """Ranks within a pool."""
        phases = self.costs.phases(option)
        loads, used = loads.copy(), used.copy()
        ranks: list[int] = []
        is_taken = np.zeros(len(loads), dtype=bool)
        inside = None if pool is None else np.isin(np.arange(len(loads)), list(pool))
        for shard, where, memory in self.units(option):
            if inside is not None:
                where = where[inside[where].all(axis=1)]
            after = used[:, where] + memory[:, None]
            where = where[(after <= self.objective.caps[:, where]).all(axis=(0, 2))]
            if not len(where):
                return None
            if roomy:
                filled = (used - self.objective.caps).sum(axis=0)[where]
            else:
                filled = (loads[where] + phases[shard]) @ self.weights
            key = filled.max(axis=1)
            # of equally free ranks the first
            if pool is None:
                best = where[key.argmin()]
            else:
                best = where[np.lexsort((key, is_taken[where].all(axis=1)))[0]]
            ranks += best.tolist()
            is_taken[best] = True
            loads[best] += phases[shard]
            used[:, best] += memory
        return tuple(ranks)

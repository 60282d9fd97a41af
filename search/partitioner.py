"""Greedy placement of chosen options: largest work first, onto the freest ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from search.objective import Assignment, Objective, Ranks
from search.space.option import Choice, Option
from search.surrogate import PHASES, Surrogate, Weights

Array = NDArray[np.float64]


class GreedyPartitioner:
    """Places tables one by one; a placement never exceeds a memory cap.

    Args:
        weights: what counts as work.
    """

    def __init__(
        self, objective: Objective, surrogate: Surrogate, weights: Weights | None = None
    ) -> None:
        self.objective = objective
        self.surrogate = surrogate
        self.weights = (weights or Weights()).array
        self.topology = objective.problem.topology
        self.units = lru_cache(maxsize=1 << 16)(self._units)

    def _units(self, option: Option) -> list[tuple[slice, NDArray[np.intp], Array]]:
        """Of every run of shards that is placed together: which they are, the alternatives
        ``[alternatives, shards]``, and their bytes ``[hbm or ddr, shards]``."""
        memory = np.array([[m.hbm_bytes, m.ddr_bytes] for m in option.memory]).T
        where: dict[int, NDArray[np.intp]] = {}
        found, start = [], 0
        for alternatives in self.objective.legal(option).units:
            shards = slice(start, start + len(alternatives[0]))
            # runs share their alternatives
            array = where.setdefault(id(alternatives), np.array(alternatives))
            found.append((shards, array, memory[:, shards]))
            start = shards.stop
        return found

    def place_all(self, options: Sequence[Option]) -> Assignment | None:
        """Longest processing time first; by memory instead if that does not fit; then by memory
        onto the freest ranks; None if nothing fits.

        Args:
            options: one per table, in the workload's order.
        """
        work = [float(self.surrogate.phases(o).sum(axis=0) @ self.weights) for o in options]
        memory = [sum(m.hbm_bytes + m.ddr_bytes for m in o.memory) for o in options]
        by_work, by_memory = (
            sorted(range(len(options)), key=lambda t: (-keys[t], t)) for keys in (work, memory)
        )
        for order, roomy in ((by_work, False), (by_memory, False), (by_memory, True)):
            found = self._place_in(order, options, roomy)
            if found is not None:
                return found
        return None

    def _place_in(
        self, order: Sequence[int], options: Sequence[Option], roomy: bool
    ) -> Assignment | None:
        loads = np.zeros((self.topology.world_size, PHASES))
        used = np.zeros_like(self.objective.caps)
        chosen: dict[int, Choice] = {}
        forced = [t for t in order if self._is_forced(options[t])]
        there = set(forced)
        for table in [*forced, *(t for t in order if t not in there)]:
            option = options[table]
            together = self._partner(table, chosen)
            ranks = self.best_ranks(option, loads, used, together, roomy=roomy)
            if ranks is None:
                return None
            chosen[table] = (option, ranks)
            np.add.at(loads, list(ranks), self.surrogate.phases(option))
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
        """Ranks for one option that raise the weighted phase maxima least, None if none fits.

        Args:
            loads: phase times so far, ``[ranks, PHASES]``.
            used: bytes so far, ``[hbm or ddr, ranks]``.
            together: the only ranks allowed, all of which must be used.
            roomy: raise what is used of the memory least instead.
        """
        legal = self.objective.legal(option)
        if legal.is_empty or (legal.same_group and self._is_split(together)):
            return None
        pools: list[frozenset[int] | None] = [together]
        if legal.same_group and together is None:
            size = self.topology.intra_group_size
            pools = [
                frozenset(range(g * size, (g + 1) * size)) for g in range(self.topology.groups)
            ]
        best: tuple[float, Ranks] | None = None
        for pool in pools:
            found = self._fill(option, loads.copy(), used.copy(), pool, roomy)
            if found and (together is None or frozenset(found[1]) == together):
                best = found if best is None or found[0] < best[0] else best
        return None if best is None else best[1]

    def _is_split(self, ranks: frozenset[int] | None) -> bool:
        return ranks is not None and len({self.topology.group_of(r) for r in ranks}) > 1

    def _fill(
        self,
        option: Option,
        loads: Array,
        used: Array,
        pool: frozenset[int] | None,
        roomy: bool,
    ) -> tuple[float, Ranks] | None:
        phases = self.surrogate.phases(option)
        ranks: list[int] = []
        taken: set[int] = set()
        for shard, where, memory in self.units(option):
            if pool is not None:
                where = where[np.isin(where, list(pool)).all(axis=1)]
            after = used[:, where] + memory[:, None]
            where = where[(after <= self.objective.caps[:, where]).all(axis=(0, 2))]
            if not len(where):
                return None
            if roomy:
                filled = (used - self.objective.caps).sum(axis=0)[where]
            else:
                filled = (loads[where] + phases[shard]) @ self.weights
            key = filled.max(axis=1)
            # of equally free ranks the first; where all of a pool must be used, a new one
            if pool is None:
                best = where[key.argmin()]
            else:
                again = np.isin(where, list(taken)).all(axis=1)
                best = where[np.lexsort((key, again))[0]]
            ranks += best.tolist()
            taken.update(best.tolist())
            loads[best] += phases[shard]
            used[:, best] += memory
        return float(loads.max(axis=0) @ self.weights), tuple(ranks)

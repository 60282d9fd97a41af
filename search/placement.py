"""Greedy placement of chosen options: largest work first, onto the freest ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from search.objective import Assignment, Choice, Objective, Ranks
from search.space import Option
from search.surrogate import PHASES, Surrogate, Weights

Array = NDArray[np.float64]


class Placer:
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

    def place_all(self, options: Sequence[Option]) -> Assignment | None:
        """Longest processing time first; by memory instead if that does not fit; None if neither.

        Args:
            options: one per table, in the workload's order.
        """
        work = [float(self.surrogate.phases(o).sum(axis=0) @ self.weights) for o in options]
        hbm = [sum(m.hbm_bytes + m.ddr_bytes for m in o.memory) for o in options]
        for keys in (work, hbm):
            order = sorted(range(len(options)), key=lambda t: (-keys[t], t))
            found = self._place_in(order, options)
            if found is not None:
                return found
        return None

    def _place_in(self, order: Sequence[int], options: Sequence[Option]) -> Assignment | None:
        loads = np.zeros((self.topology.world_size, PHASES))
        used = np.zeros_like(self.objective.caps)
        chosen: dict[int, Choice] = {}
        uniform = [t for t in order if len(options[t].legal_ranks(self.topology).units) == 1]
        forced = [t for t in uniform if len(options[t].legal_ranks(self.topology).units[0]) == 1]
        for table in [*forced, *(t for t in order if t not in forced)]:
            option = options[table]
            ranks = self.best_ranks(option, loads, used, self._partner(table, chosen))
            if ranks is None:
                return None
            chosen[table] = (option, ranks)
            np.add.at(loads, list(ranks), self.surrogate.phases(option))
            used += self.objective.footprint(option, ranks)
        return tuple(chosen[t] for t in range(len(options)))

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
    ) -> Ranks | None:
        """Ranks for one option that raise the weighted phase maxima least, None if none fits.

        Args:
            loads: phase times so far, ``[ranks, PHASES]``.
            used: bytes so far, ``[hbm or ddr, ranks]``.
            together: the only ranks allowed, all of which must be used.
        """
        legal = option.legal_ranks(self.topology)
        if legal.is_empty:
            return None
        pools: list[frozenset[int] | None] = [together]
        if legal.same_group and together is None:
            size = self.topology.intra_group_size
            pools = [
                frozenset(range(g * size, (g + 1) * size)) for g in range(self.topology.groups)
            ]
        best: tuple[float, Ranks] | None = None
        for pool in pools:
            found = self._fill(option, legal.units, loads.copy(), used.copy(), pool)
            if found and (together is None or frozenset(found[1]) == together):
                best = found if best is None or found[0] < best[0] else best
        return None if best is None else best[1]

    def _fill(
        self,
        option: Option,
        units: tuple[tuple[tuple[int, ...], ...], ...],
        loads: Array,
        used: Array,
        pool: frozenset[int] | None,
    ) -> tuple[float, Ranks] | None:
        phases = self.surrogate.phases(option)
        ranks: list[int] = []
        taken: set[int] = set()
        for alternatives in units:
            start = len(ranks)
            width = len(alternatives[0])
            shard = slice(start, start + width)
            memory = np.array(
                [
                    [m.hbm_bytes for m in option.memory[shard]],
                    [m.ddr_bytes for m in option.memory[shard]],
                ]
            )
            best = None
            for alternative in alternatives:
                where = list(alternative)
                if pool is not None and not pool.issuperset(where):
                    continue
                if (used[:, where] + memory > self.objective.caps[:, where]).any():
                    continue
                after = (loads[where] + phases[shard]) @ self.weights
                key = (pool is not None and taken.issuperset(where), float(after.max()), where)
                best = key if best is None or key < best else best
            if best is None:
                return None
            where = best[2]
            ranks += where
            taken.update(where)
            loads[where] += phases[shard]
            used[:, where] += memory
        return float(loads.max(axis=0) @ self.weights), tuple(ranks)

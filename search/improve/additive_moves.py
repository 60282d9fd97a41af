"""Better plans for additive costs: tables on the costliest ranks are taken out and put back.

A table may come back under another option; its shards go to the ranks of least cost that have room.
All ranks count at once, by the 16-norm of their costs, as in `search.improve.balance`, which moves
and swaps single shards.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from search.objective import Assignment, Objective, Ranks
from search.space.option import Choice, Option

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

NORM = 16
GAIN = 1e-9
"""A smaller relative gain is none."""


@dataclass(frozen=True)
class Placed:
    """Ranks for one option, and the cost and bytes of all ranks with it there."""

    ranks: Ranks
    loads: Array
    used: Array


class Mover:
    """Improves assignments of one problem.

    Args:
        costs: of each shard of every option in ms, a list a table, in the space's order.
    """

    def __init__(self, objective: Objective, costs: Sequence[Sequence[float]]) -> None:
        self.objective = objective
        self.topology = objective.problem.topology
        self.cost = {
            option: cost
            for options, table in zip(objective.space.options, costs, strict=True)
            for option, cost in zip(options, table, strict=True)
        }
        self.units = lru_cache(maxsize=1 << 16)(self._units)
        tied = {table for group in objective.space.co_locate for table in group}
        self.free = [t not in tied for t in range(len(costs))]
        self.ranked = [
            sorted(options, key=lambda o: (self.cost[o] * o.num_shards, self.cost[o]))
            for options in objective.space.options
        ]

    def loads(self, assignment: Assignment) -> Array:
        """Sum of shard costs on every rank in ms, ``[ranks]``."""
        loads = np.zeros(self.topology.world_size)
        for option, ranks in assignment:
            np.add.at(loads, list(ranks), self.cost[option])
        return loads

    def rating_ms(self, assignment: Assignment) -> float:
        """The costliest rank's sum."""
        return float(self.loads(assignment).max())

    def descend(self, assignment: Assignment, steps: int) -> tuple[Assignment, int]:
        """Put back tables of the costliest rank until none helps; also how many puts it took."""
        plan = list(assignment)
        loads, used = self.loads(assignment), self.objective.memory(assignment)
        tried = 0
        while tried < steps:
            scale = float(loads.max())
            best: tuple[float, int, Option, Placed] | None = None
            now = _norm(loads, scale)
            for table in self._on(int(np.argmax(loads)), plan):
                below, room = self._without(plan[table], loads, used)
                for option in self.ranked[table]:
                    if self.cost[option] >= scale:
                        continue
                    tried += 1
                    placed = self.put(option, below, room)
                    if placed is None:
                        continue
                    norm = _norm(placed.loads, scale)
                    if norm < now * (1 - GAIN) and (best is None or norm < best[0]):
                        best = (norm, table, option, placed)
            if best is None:
                break
            _, table, option, placed = best
            plan[table] = (option, placed.ranks)
            loads, used = placed.loads, placed.used
        return tuple(plan), tried

    def shake(self, assignment: Assignment, rng: random.Random, count: int) -> Assignment | None:
        """Some tables, of which one lies on the costliest rank, under other options or elsewhere;
        None if they do not fit back."""
        plan = list(assignment)
        loads, used = self.loads(assignment), self.objective.memory(assignment)
        here = self._on(int(np.argmax(loads)), plan)
        free = [t for t, is_free in enumerate(self.free) if is_free]
        if not here or not free:
            return None
        out = list(dict.fromkeys([rng.choice(here), *rng.choices(free, k=count - 1)]))
        for table in out:
            loads, used = self._without(plan[table], loads, used)
        rng.shuffle(out)
        for table in out:
            near = [o for o in self.ranked[table] if self.cost[o] < 1.5 * loads.max()]
            options = rng.choices(near[:4], k=2) if near else []
            found = (self.put(option, loads, used) for option in [*options, *self.ranked[table]])
            options = [*options, *self.ranked[table]]
            put = next(((o, p) for o, p in zip(options, found, strict=True) if p), None)
            if put is None:
                return None
            plan[table] = (put[0], put[1].ranks)
            loads, used = put[1].loads, put[1].used
        return tuple(plan)

    def _on(self, rank: int, plan: Sequence[Choice]) -> list[int]:
        """Tables with a shard on a rank that may be moved."""
        return [t for t, (_, ranks) in enumerate(plan) if self.free[t] and rank in ranks]

    def _without(self, choice: Choice, loads: Array, used: Array) -> tuple[Array, Array]:
        option, ranks = choice
        below = loads.copy()
        np.subtract.at(below, list(ranks), self.cost[option])
        return below, used - self.objective.footprint(option, ranks)

    def put(self, option: Option, loads: Array, used: Array) -> Placed | None:
        """The option on the ranks of least cost with room for it; None if there are none."""
        legal = self.objective.legal(option)
        if legal.is_empty:
            return None
        pools: Iterable[Bools] = (np.ones(len(loads), dtype=bool),)
        if legal.same_group:
            group = np.arange(len(loads)) // self.topology.intra_group_size
            pools = (group == g for g in range(self.topology.groups))
        found = [p for pool in pools if (p := self._put_in(option, loads, used, pool)) is not None]
        scale = max(float(loads.max()), self.cost[option])
        return min(found, key=lambda p: _norm(p.loads, scale), default=None)

    def _put_in(self, option: Option, loads: Array, used: Array, pool: Bools) -> Placed | None:
        """As `put`, with every shard inside a pool of ranks."""
        loads, used, cost = loads.copy(), used.copy(), self.cost[option]
        ranks: list[int] = []
        caps = self.objective.caps
        for where, need in self.units(option):
            fits = (used[:, where] + need[:, None] <= caps[:, where]).all(axis=(0, 2))
            fits &= pool[where].all(axis=1)
            if not fits.any():
                return None
            highest = np.where(fits, loads[where].max(axis=1), np.inf)
            chosen = where[int(np.argmin(highest))]
            ranks += chosen.tolist()
            loads[chosen] += cost
            used[:, chosen] += need
        return Placed(tuple(ranks), loads, used)

    def _units(self, option: Option) -> list[tuple[Ints, Array]]:
        """Of every run of shards: where it may lie ``[alternatives, shards]`` and its bytes
        ``[hbm or ddr, shards]``."""
        need = np.array([(m.hbm_bytes, m.ddr_bytes) for m in option.memory], dtype=np.float64).T
        found, start = [], 0
        for alternatives in self.objective.legal(option).units:
            where = np.array(alternatives)
            found.append((where, need[:, start : start + where.shape[1]]))
            start += where.shape[1]
        return found


def _norm(loads: Array, scale: float) -> float:
    return float(((loads / scale) ** NORM).sum())

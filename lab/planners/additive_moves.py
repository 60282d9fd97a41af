"""Better plans for additive costs: tables on the costliest ranks are taken out and put back.

A table may come back under another option; its shards go to the ranks of least cost that have room.
All ranks count at once, by the 16-norm of their costs, as in `search.improve.balance`, which moves
and swaps single shards.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from search.objective import Assignment, Objective, Ranks
from search.partitioner import GreedyPartitioner
from search.space.option import Choice, Option
from search.surrogate import FORWARD, PHASES

Array = NDArray[np.float64]

NORM = 16
GAIN = 1e-9
"""Relative gain below which a change does not count."""

Placed = tuple[Ranks, Array, Array]
"""Ranks for one option, and the cost and bytes of all ranks with it there."""


class TableMover:
    """Improves assignments of one problem.

    Args:
        costs: of each shard of every option in ms, a list a table, in the space's order.
    """

    def __init__(self, objective: Objective, costs: Sequence[Sequence[float]]) -> None:
        self.objective = objective
        self.world = objective.problem.topology.world_size
        self.cost = {
            option: cost
            for options, table in zip(objective.space.options, costs, strict=True)
            for option, cost in zip(options, table, strict=True)
        }
        self.partitioner = GreedyPartitioner(objective, self)
        self.phases = lru_cache(maxsize=1 << 16)(self._phases)
        tied = {table for group in objective.space.co_locate for table in group}
        self.free = [t not in tied for t in range(len(costs))]
        self.ranked = [
            sorted(options, key=lambda o: (self.cost[o] * o.num_shards, self.cost[o]))
            for options in objective.space.options
        ]

    def _phases(self, option: Option) -> Array:
        """Costs of an option's shards, as `GreedyPartitioner` takes them."""
        found = np.zeros((option.num_shards, PHASES))
        found[:, FORWARD] = self.cost[option]
        return found

    def loads(self, assignment: Assignment) -> Array:
        """Sum of shard costs on every rank in ms, ``[ranks]``."""
        loads = np.zeros(self.world)
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
                    norm = _norm(placed[1], scale)
                    if norm < now * (1 - GAIN) and (best is None or norm < best[0]):
                        best = (norm, table, option, placed)
            if best is None:
                break
            _, table, option, placed = best
            ranks, loads, used = placed
            plan[table] = (option, ranks)
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
            option, (ranks, loads, used) = put
            plan[table] = (option, ranks)
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
        phases = np.zeros((len(loads), PHASES))
        phases[:, FORWARD] = loads
        ranks = self.partitioner.best_ranks(option, phases, used)
        if ranks is None:
            return None
        after = loads.copy()
        np.add.at(after, list(ranks), self.cost[option])
        return ranks, after, used + self.objective.footprint(option, ranks)


def _norm(loads: Array, scale: float) -> float:
    return float(((loads / scale) ** NORM).sum())

"""Assignments of tables to options and ranks, their memory, and their predicted time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from predictor.batch import BatchPredictor
from predictor.plan import ShardingPlan, TablePlan
from search.result import Problem
from search.space import Legal, Option, Space, place

Array = NDArray[np.float64]
Ranks = tuple[int, ...]
Choice = tuple[Option, Ranks]
"""How one table is sharded and the rank of every shard."""
Assignment = tuple[Choice, ...]
"""One plan: a choice for every table, in the workload's order."""


class Objective:
    """Predicted iteration time and memory of assignments; counts what it evaluates."""

    def __init__(self, problem: Problem, space: Space) -> None:
        self.problem = problem
        self.space = space
        self.batch = BatchPredictor(problem.workload, problem.topology, problem.hardware)
        self.caps = np.array(
            [problem.topology.hbm_cap_bytes, problem.topology.ddr_cap_bytes], dtype=np.float64
        )
        self.evaluations = 0
        self.place = lru_cache(maxsize=1 << 16)(place)
        self.legal = lru_cache(maxsize=1 << 16)(self._legal)
        self.footprint = lru_cache(maxsize=1 << 16)(self._footprint)

    def table_plans(self, assignment: Assignment) -> tuple[TablePlan, ...]:
        """The assignment as the predictor takes it."""
        return tuple(self.place(option, ranks) for option, ranks in assignment)

    def sharding_plan(self, assignment: Assignment) -> ShardingPlan:
        """The assignment as a plan."""
        topology = self.problem.topology
        tables = dict(zip(self.space.keys, self.table_plans(assignment), strict=True))
        return ShardingPlan(tables, topology.world_size, topology.local_world_size)

    def score(self, assignments: Sequence[Assignment]) -> Array:
        """Predicted iteration time in ms of each."""
        self.evaluations += len(assignments)
        return self.batch.score([self.table_plans(a) for a in assignments])

    def score_neighbours(self, base: Assignment, changes: Sequence[Mapping[int, Choice]]) -> Array:
        """Predicted iteration time in ms of ``base`` with each of the changes."""
        self.evaluations += len(changes)
        return self.batch.score_neighbours(
            self.table_plans(base),
            [{t: self.place(*choice) for t, choice in change.items()} for change in changes],
        )

    def _legal(self, option: Option) -> Legal:
        """Where the shards of an option may lie."""
        return option.legal_ranks(self.problem.topology)

    def _footprint(self, option: Option, ranks: Ranks) -> Array:
        """Bytes ``[hbm or ddr, ranks]`` that one table takes."""
        used = np.zeros_like(self.caps)
        for rank, memory in zip(ranks, option.memory, strict=True):
            used[0, rank] += memory.hbm_bytes
            used[1, rank] += memory.ddr_bytes
        return used

    def memory(self, assignment: Assignment) -> Array:
        """Bytes ``[hbm or ddr, ranks]`` that a plan takes."""
        return np.asarray(np.sum([self.footprint(*choice) for choice in assignment], axis=0))

    def fits(self, assignment: Assignment) -> bool:
        """Within every cap, and co-located tables together."""
        together = self.space.co_located([ranks for _, ranks in assignment])
        return together and bool((self.memory(assignment) <= self.caps).all())


def signature(assignment: Assignment) -> frozenset[object]:
    """Equal for plans that differ only by a renaming of ranks or of like shards of a table."""
    on_rank: dict[int, list[object]] = {}
    for option, ranks in assignment:
        for rank, size in zip(ranks, option.sizes, strict=True):
            held = (option.table, option.sharding_type, option.compute_kernel, size)
            on_rank.setdefault(rank, []).append(held)
    counted = [frozenset(_count(held).items()) for held in on_rank.values()]
    return frozenset(_count(counted).items())


def _count(items: Sequence[object]) -> dict[object, int]:
    found: dict[object, int] = {}
    for item in items:
        found[item] = found.get(item, 0) + 1
    return found

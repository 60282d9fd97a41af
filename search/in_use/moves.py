"""Moves from a plan in use to a new plan, and ways to move less."""

from __future__ import annotations

from collections import Counter

from predictor.model.memory.ranks import ShardMemory, shard_memory
from predictor.model.plan import Shard, ShardingPlan, TablePlan
from predictor.model.workload import Table
from search.objective import Assignment
from search.problem import Problem
from search.space.option import Choice, ChoicesInUse, Partition


def keep_shards_in_place(in_use: ChoicesInUse | None, assignment: Assignment) -> Assignment:
    """Return the same plan with like shards of a table on the ranks that already hold them."""
    if in_use is None:
        return assignment
    return tuple(
        (now[0], _kept_in_place(now, before)) if before and now[0] is before[0] else now
        for now, before in zip(assignment, in_use.choices, strict=True)
    )


def _kept_in_place(now: Choice, before: Choice) -> tuple[int, ...]:
    """Return the ranks of a table's shards, each as before if that rank still holds one like it."""
    option, ranks = now
    if sorted(ranks) == sorted(before[1]):
        return before[1]
    if (
        option.num_shards == 1
        or len(set(option.sizes)) > 1
        or option.partition is not Partition.DEVICE
    ):
        return ranks
    free = Counter(ranks)
    stay = []
    for rank in before[1]:
        stay.append(rank if free[rank] else None)
        free[rank] -= 1 if free[rank] else 0
    leftover = iter(sorted(free.elements()))
    return tuple(next(leftover) if rank is None else rank for rank in stay)


def moved_tables(before: ShardingPlan, after: ShardingPlan) -> list[str]:
    """Return the keys of the tables whose sharding, kernel, sizes or ranks differ."""
    return [key for key, table in after.tables.items() if table != before.tables[key]]


def overlap(a: Shard, b: Shard) -> int:
    """Count the elements of a table that two of its shards share."""
    sides = (
        min(a.offset[d] + a.size[d], b.offset[d] + b.size[d]) - max(a.offset[d], b.offset[d])
        for d in (0, 1)
    )
    rows, columns = (max(0, side) for side in sides)
    return rows * columns


def table_memory(table: Table, problem: Problem, plan: TablePlan) -> list[ShardMemory]:
    """Return the bytes of every shard of a table plan."""
    return shard_memory(
        table,
        problem.workload,
        problem.topology,
        plan.sharding_type,
        plan.compute_kernel,
        [s.size for s in plan.shards],
        plan.cache_load_factor,
        device=problem.hardware.device,
        enforce_hbm=bool(plan.parameters.get("enforce_hbm")),
        most_cache_mib=plan.store_caches[0],
    )

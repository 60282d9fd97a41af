"""Tables that are already placed: which may stay, what a new plan moves, and how to move less.

Ranks are not interchangeable once tables lie on them. A table stays when its sharding, kernel,
sizes and ranks all stay; every other table counts as one move.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from predictor.errors import InputError
from predictor.model.memory import UVM_KERNELS, ShardMemory, missing, plan_memory, shard_memory
from predictor.model.plan import Shard, ShardingPlan, TablePlan
from predictor.model.plan_check import check_plan
from predictor.model.workload import Table
from search.objective import Assignment, Choice, Objective
from search.problem import Problem
from search.space.option import Given, Option, Partition, Space
from search.space.soundness import is_sound


@dataclass(frozen=True)
class Placed:
    """A plan that is in use.

    Args:
        plan: fits the problem's model and world size.
        max_moves: tables that may change, >= 0; None for all of them.
    """

    plan: ShardingPlan
    max_moves: int | None = None


def checked(placed: Placed, problem: Problem) -> Placed:
    """The plan under the workload's own table keys.

    Raises:
        PlanError: it names other tables, or does not tile them.
        InputError: it is for another world size, or ``max_moves`` is negative.
    """
    plan, world = placed.plan, problem.topology.world_size
    if plan.world_size != world:
        raise InputError(
            f"the given plan places its shards on {plan.world_size} ranks, the new one is for "
            f"{world}; tables can stay only where the ranks stay: plan without it"
        )
    if placed.max_moves is not None and placed.max_moves < 0:
        raise InputError(f"max_moves is {placed.max_moves}; it must be at least 0")
    return replace(placed, plan=check_plan(plan, problem.workload, where="given plan"))


def near(space: Space, problem: Problem, placed: Placed) -> Space:
    """The space with the given plan in it, and plans near it only if moves are limited.

    Args:
        placed: `checked`.
    """
    options = [list(table) for table in space.options]
    choices: list[Choice | None] = []
    for index, (key, table) in enumerate(zip(space.keys, problem.workload.tables, strict=True)):
        plan = placed.plan.tables[key]
        option = space.option_of(index, plan) or _as_given(index, plan, problem)
        if not option.is_legal(plan.ranks, problem.topology):
            option = replace(option, pinned=plan.ranks)
        if forbidden(table, plan) or not is_sound(option, problem.workload, _device(problem)):
            choices.append(None)
            continue
        choices.append((option, plan.ranks))
        if option not in options[index]:
            options[index].append(option)
    moves = len(choices) if placed.max_moves is None else placed.max_moves
    given = Given(tuple(choices), min(moves, len(choices)))
    return replace(space, options=tuple(map(tuple, options)), given=given)


def _device(problem: Problem) -> str:
    return problem.hardware.device


def _as_given(index: int, plan: TablePlan, problem: Problem) -> Option:
    """The option of a table that is split as no option of the space is."""
    table = problem.workload.tables[index]
    return Option(
        index,
        plan.sharding_type,
        plan.compute_kernel,
        tuple(s.size for s in plan.shards),
        tuple(s.offset for s in plan.shards),
        module=table.module,
        cache_load_factor=plan.cache_load_factor,
        enforce_hbm=plan.parameters.get("enforce_hbm"),
        pinned=plan.ranks,
        memory=tuple(_memory(table, problem, plan)),
        added_by_shardopt=True,
        reason="the given plan has it",
    )


def _memory(table: Table, problem: Problem, plan: TablePlan) -> list[ShardMemory]:
    return shard_memory(
        table,
        problem.workload,
        problem.topology,
        plan.sharding_type,
        plan.compute_kernel,
        [s.size for s in plan.shards],
        plan.cache_load_factor,
        device=_device(problem),
        enforce_hbm=bool(plan.parameters.get("enforce_hbm")),
    )


def forbidden(table: Table, plan: TablePlan) -> str:
    """Which constraint of a table its sharding breaks, or an empty string."""
    wants = table.constraints
    if wants.sharding_types and plan.sharding_type not in wants.sharding_types:
        return f"constraints.sharding_types allows {', '.join(wants.sharding_types)}"
    if wants.compute_kernels and plan.compute_kernel not in wants.compute_kernels:
        return f"constraints.compute_kernels allows {', '.join(wants.compute_kernels)}"
    if wants.ranks is not None and not set(plan.ranks) <= set(wants.ranks):
        return f"constraints.ranks allows {', '.join(map(str, wants.ranks))}"
    narrow = min(s.size[1] for s in plan.shards)
    if wants.min_partition and narrow < min(wants.min_partition, table.embedding_dim):
        return f"constraints.min_partition is {wants.min_partition}, a shard has {narrow} columns"
    in_host, enforced = plan.compute_kernel in UVM_KERNELS, bool(plan.parameters.get("enforce_hbm"))
    if in_host and wants.enforce_hbm not in (None, enforced):
        return f"constraints.enforce_hbm is {str(wants.enforce_hbm).lower()}"
    return ""


def misfits(space: Space, problem: Problem, placed: Placed) -> tuple[str, ...]:
    """Why the given plan cannot stay as it is: constraints it breaks, memory it lacks."""
    found = []
    tables, workload = placed.plan.tables, problem.workload
    assert space.given is not None
    for key, table, choice in zip(space.keys, workload.tables, space.given.choices, strict=True):
        if choice is None:
            why = forbidden(table, tables[key]) or "TorchRec would compute wrong results with it"
            found.append(f"table '{key}' cannot stay: {why}")
    if not space.co_located([tables[key].ranks for key in space.keys]):
        found.append("tables that constraints.co_locate ties lie on different ranks")
    short = missing(plan_memory(workload, problem.topology, placed.plan, _device(problem)))
    return (*found, short) if short else tuple(found)


def repaired(
    given: Given | None, base: Assignment, change: Mapping[int, Choice], rng: random.Random
) -> dict[int, Choice]:
    """The change, with random other tables put back where moves are at their limit."""
    if given is None or not given.is_limited:
        return dict(change)
    after = [change.get(table, choice) for table, choice in enumerate(base)]
    moved = given.moved(after)
    back = [t for t in moved if t not in change and given.choices[t] is not None]
    excess = min(max(0, len(moved) - given.max_moves), len(back))
    returned = {t: choice for t in rng.sample(back, excess) if (choice := given.choices[t])}
    return {**change, **returned}


def settled(given: Given | None, assignment: Assignment) -> Assignment:
    """The same plan with like shards of a table on the ranks that hold them already."""
    if given is None:
        return assignment
    return tuple(
        (now[0], _kept_in_place(now, before)) if before and now[0] is before[0] else now
        for now, before in zip(assignment, given.choices, strict=True)
    )


def _kept_in_place(now: Choice, before: Choice) -> tuple[int, ...]:
    """Ranks of a table's shards, each where it was if that rank still holds one like it."""
    option, ranks = now
    if sorted(ranks) == sorted(before[1]):
        return before[1]
    if (
        option.num_shards == 1
        or len(set(option.sizes)) > 1
        or option.partition is not Partition.DEVICE
    ):
        return ranks
    left = Counter(ranks)
    stay = []
    for rank in before[1]:
        stay.append(rank if left[rank] else None)
        left[rank] -= 1 if left[rank] else 0
    others = iter(sorted(left.elements()))
    return tuple(next(others) if rank is None else rank for rank in stay)


def final_plan(objective: Objective, placed: Placed | None, assignment: Assignment) -> ShardingPlan:
    """The assignment as a plan; tables that stay keep every field they had."""
    plan, given = objective.sharding_plan(assignment), objective.space.given
    if placed is None or given is None:
        return plan
    moved = set(given.moved(assignment))
    stay = {
        key: placed.plan.tables[key]
        for table, key in enumerate(objective.space.keys)
        if table not in moved
    }
    return replace(plan, tables={**plan.tables, **stay})


def moved_tables(before: ShardingPlan, after: ShardingPlan) -> list[str]:
    """Keys of the tables whose sharding, kernel, sizes or ranks differ."""
    return [key for key, table in after.tables.items() if table != before.tables[key]]


def moved_bytes(problem: Problem, before: ShardingPlan, after: ShardingPlan) -> int:
    """Weights and fused optimizer state that reach a rank which did not hold them, in bytes."""
    workload = problem.workload
    return sum(
        _arriving_bytes(table, problem, before.tables[key].shards, after.tables[key])
        for key, table in zip(workload.keys, workload.tables, strict=True)
    )


def _arriving_bytes(
    table: Table, problem: Problem, before: Sequence[Shard], after: TablePlan
) -> int:
    found = 0.0
    for shard, memory in zip(after.shards, _memory(table, problem, after), strict=True):
        elements = shard.size[0] * shard.size[1]
        held = sum(_overlap(shard, old) for old in before if old.rank == shard.rank)
        weights = elements * table.element_bytes
        if held < elements:
            found += (weights + memory.optimizer_bytes) * (elements - held) / elements
    return round(found)


def _overlap(a: Shard, b: Shard) -> int:
    """Elements of a table that two of its shards share."""
    sides = (
        min(a.offset[d] + a.size[d], b.offset[d] + b.size[d]) - max(a.offset[d], b.offset[d])
        for d in (0, 1)
    )
    rows, columns = (max(0, side) for side in sides)
    return rows * columns

"""Plan in use: its fit to this model, the plans near it, and the reasons why it cannot stay.

Ranks are not interchangeable once tables lie on them. A table stays when its sharding, kernel,
sizes and ranks all stay; every other table counts as one move.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from predictor.errors import InputError
from predictor.model.memory.ranks import UVM_KERNELS, missing
from predictor.model.plan import ShardingPlan, TablePlan
from predictor.model.plan_check import check_plan
from predictor.model.workload import Table
from search.candidate import Candidate
from search.in_use.moves import table_memory
from search.in_use.price import MovePrice
from search.objective import Assignment, Objective
from search.problem import PlanInUse, Problem, RatedPlanInUse
from search.space.filters import miscomputes
from search.space.option import Choice, ChoicesInUse, Option, Space, place

NAME = "given plan"


def check_plan_in_use(problem: Problem) -> Problem:
    """Return the problem with the plan in use under the workload's own table keys.

    Raises:
        PlanError: the plan names other tables, or does not tile them.
        InputError: it is for another world size, or ``max_moves`` is negative.
    """
    in_use, world = problem.in_use, problem.topology.world_size
    if in_use is None:
        return problem
    if in_use.plan.world_size != world:
        raise InputError(
            f"the given plan places its shards on {in_use.plan.world_size} ranks, the new one is "
            f"for {world}; tables can stay only where the ranks stay: plan without it"
        )
    if in_use.max_moves is not None and in_use.max_moves < 0:
        raise InputError(f"max_moves is {in_use.max_moves}; it must be at least 0")
    if in_use.max_bytes is not None and not in_use.max_bytes >= 0:
        raise InputError(f"max_bytes is {in_use.max_bytes}; it must be at least 0")
    if in_use.horizon is not None and in_use.horizon < 1:
        raise InputError(f"horizon is {in_use.horizon}; it must be at least 1 step")
    plan = check_plan(in_use.plan, problem.workload, where="given plan")
    return replace(problem, in_use=replace(in_use, plan=plan))


def space_near(space: Space, problem: Problem) -> Space:
    """Add the plan in use, if any, to the space; keep only plans near it if moves are limited.

    Args:
        problem: as `check_plan_in_use` returns it.
    """
    in_use = problem.in_use
    if in_use is None:
        return space
    options = [list(table) for table in space.options]
    choices: list[Choice | None] = []
    plans = [in_use.plan.tables[key] for key in space.keys]
    used = [
        space.option_of(index, plan) or option_in_use(index, plan, problem)
        for index, plan in enumerate(plans)
    ]
    mixed = {*space.wrong_means(used)}
    for index, (key, table) in enumerate(zip(space.keys, problem.workload.tables, strict=True)):
        plan, option = plans[index], used[index]
        fixed = in_use.allows is not None and not in_use.allows(key, plan)
        if fixed or not option.is_legal(plan.ranks, problem.topology):
            option = replace(option, pinned=plan.ranks)
        wrong = miscomputes(option, problem.workload, problem.hardware.device)
        wrong &= option not in space.options[index]  # unless the table has nothing else
        wrong |= index in mixed
        if find_broken_constraint(table, plan) or wrong:
            choices.append(None)
            continue
        choices.append((option, plan.ranks))
        options[index] = [] if fixed else [o for o in options[index] if _allows(in_use, key, o)]
        if option not in options[index]:
            options[index].append(option)
    moves = len(choices) if in_use.max_moves is None else in_use.max_moves
    price = MovePrice(problem, in_use.plan, in_use.held)

    @lru_cache(maxsize=1 << 16)
    def arriving_bytes(table: int, choice: Choice) -> float:
        return price.arriving_bytes(space.keys[table], place(*choice))

    choices_in_use = ChoicesInUse(
        tuple(choices),
        min(moves, len(choices)),
        arriving_bytes,
        in_use.max_bytes,
        frozenset(index for index, key in enumerate(space.keys) if key in in_use.new),
    )
    return replace(space, options=tuple(map(tuple, options)), in_use=choices_in_use)


def _allows(in_use: PlanInUse, key: str, option: Option) -> bool:
    if in_use.allows is None:
        return True
    return in_use.allows(key, place(option, tuple(range(option.num_shards))))


def option_in_use(index: int, plan: TablePlan, problem: Problem) -> Option:
    """Return an option for a table split unlike any option of the space; its shards stay."""
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
        key_value_params=plan.parameters.get("key_value_params"),
        pinned=plan.ranks,
        memory=tuple(table_memory(table, problem, plan)),
        added_by_shardopt=True,
    )


def find_broken_constraint(table: Table, plan: TablePlan) -> str:
    """Return the constraint of a table that its sharding breaks, or an empty string."""
    wants = table.constraints
    if wants.offered is None and plan.compute_kernel.is_hashed != (table.storage == "dynamicemb"):
        return f"storage is {table.storage}, which has no kernel {plan.compute_kernel}"
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


def find_misfits(objective: Objective) -> tuple[str, ...]:
    """List why the plan in use cannot stay as it is: broken constraints and missing memory."""
    misfits = []
    space, problem = objective.space, objective.problem
    in_use, workload = problem.in_use, problem.workload
    assert in_use is not None
    assert space.in_use is not None
    tables = in_use.plan.tables
    for key, table, choice in zip(space.keys, workload.tables, space.in_use.choices, strict=True):
        if choice is None and key not in in_use.new:
            why = (
                find_broken_constraint(table, tables[key])
                or "TorchRec would compute wrong results with it"
            )
            misfits.append(f"table '{key}' cannot stay: {why}")
    if not space.co_located([tables[key].ranks for key in space.keys]):
        misfits.append("tables that constraints.co_locate ties lie on different ranks")
    short = missing(problem.memory_of(in_use.plan))
    return (*misfits, short) if short else tuple(misfits)


def lift_move_limit(space: Space) -> Space:
    """Return the space with every table free to move."""
    if space.in_use is None:
        return space
    free = replace(space.in_use, max_moves=len(space.options), max_bytes=None)
    return replace(space, in_use=free)


def space_of_bound(space: Space) -> Space:
    """Return the space that the bound covers.

    If no table may move, it covers all plans: a plan that is only rated is compared with the best
    plan that moving could reach.
    """
    fixed = space.in_use is not None and not space.in_use.max_moves
    return lift_move_limit(space) if fixed else space


def candidates_in_use(objective: Objective) -> list[Candidate]:
    """Return the plan in use as a candidate, if constraints allow it."""
    in_use = objective.space.in_use
    choices = tuple(choice for choice in in_use.choices if choice) if in_use else ()
    if len(choices) < len(objective.space.options):
        return []
    return [Candidate(choices, float(objective.score([choices])[0]), NAME)]


def rate_plan_in_use(objective: Objective) -> RatedPlanInUse | None:
    """Rate the plan in use as it is: its time, and why it cannot stay; None without such a plan."""
    in_use, keys = objective.problem.in_use, objective.space.keys
    if in_use is None:
        return None
    ms = float(objective.scorer.score([tuple(in_use.plan.tables[key] for key in keys)])[0])
    limits = in_use.max_moves, in_use.max_bytes, in_use.horizon
    return RatedPlanInUse(in_use.plan, ms, find_misfits(objective), *limits, in_use.held)


def finish_plan(objective: Objective, assignment: Assignment) -> ShardingPlan:
    """Convert the assignment to a plan; tables that stay keep every field they had."""
    plan, choices = objective.sharding_plan(assignment), objective.space.in_use
    in_use = objective.problem.in_use
    if in_use is None or choices is None:
        return plan
    moved = {*choices.moved(assignment), *choices.new}
    stay = {
        key: in_use.plan.tables[key]
        for table, key in enumerate(objective.space.keys)
        if table not in moved
    }
    return replace(plan, tables={**plan.tables, **stay})

"""Checks that a plan fits a model: each table is planned once and tiled exactly by its shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from predictor.errors import PlanError, did_you_mean
from predictor.model.memory.shards import is_averaged
from predictor.model.plan import Shard, ShardingPlan, ShardingType, TablePlan, TablePlans
from predictor.model.topology import Topology
from predictor.model.workload import Workload

ROW_SPLITS = frozenset(
    {ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD}
)
"""Types that split rows; their last shards may be empty (blocks are of ceil(rows / ranks))."""


def check_plan(plan: ShardingPlan, workload: Workload, *, where: str = "plan") -> ShardingPlan:
    """The same plan under the workload's own table keys and module names, if it fits.

    Plans made from a module carry the module's path where the model file has a name, so tables are
    found by name, and by module only where two modules have tables of one name.

    Args:
        where: the plan's file, for messages.

    Raises:
        PlanError: a table is unknown, missing, planned twice, or not tiled by its shards.
    """
    homes = [(t.module, t.name) for t in workload.tables]
    planned: dict[int, TablePlan] = {}
    for key, index in assign_tables(plan, homes, where=where, what=workload.name).items():
        table = workload.tables[index]
        problem = table_problem(
            plan.tables[key], (table.num_embeddings, table.embedding_dim), plan.world_size
        )
        if problem:
            raise PlanError(f"{where}: table '{key}': {problem}")
        planned[index] = replace(plan.tables[key], module=table.module)
    tables = {key: planned[i] for i, key in enumerate(workload.keys)}
    return replace(plan, tables=tables)


def match_plan(workload: Workload, topology: Topology, plan: ShardingPlan) -> TablePlans:
    """The sharding of every table of the workload, in the workload's order.

    Args:
        plan: keyed as the workload's tables are; `check_plan` makes it so.

    Raises:
        PlanError: the plan is for other ranks, or its tables are not those of the workload.
    """
    if plan.world_size != topology.world_size:
        raise PlanError(
            f"the plan is for {plan.world_size} ranks, the topology has {topology.world_size}"
        )
    keys = dict.fromkeys(workload.keys)
    missing = [key for key in keys if key not in plan.tables]
    if missing:
        near = did_you_mean(missing[0], plan.tables)
        raise PlanError(f"the plan does not place table '{missing[0]}'{near}")
    unknown = [key for key in plan.tables if key not in keys]
    if unknown:
        near = did_you_mean(unknown[0], keys)
        raise PlanError(f"the plan places '{unknown[0]}', which the model does not have{near}")
    for key, table in plan.tables.items():
        outside = [r for r in table.ranks if not 0 <= r < topology.world_size]
        if outside:
            raise PlanError(
                f"table '{key}' has a shard on rank {outside[0]}; "
                f"ranks are 0 to {topology.world_size - 1}"
            )
        averaged = is_averaged(table.sharding_type, table.compute_kernel)
        if topology.job is not None and not averaged:
            raise PlanError(
                f"table '{key}' has the kernel {table.compute_kernel}, which replica groups do "
                "not average; use fused, or data_parallel"
            )
    return tuple(plan.tables[key] for key in keys)


def model_mismatch(plan: ShardingPlan, workload: Workload) -> str | None:
    """A warning if the plan was made for another model, or does not say for which one."""
    model = plan.meta.get("model")
    model = model if isinstance(model, Mapping) else {}
    name, digest = model.get("name") or "?", model.get("sha256") or ""
    if not digest:
        return f"the plan does not say which model file it was made for (checked: {workload.name})"
    if digest != workload.sha256:
        return (
            f"the plan was made for another version of the model: '{name}' {str(digest)[:12]}, "
            f"not '{workload.name}' {workload.sha256[:12] or '(built in code)'}; "
            "its times are for that version"
        )
    return None


def assign_tables(
    plan: ShardingPlan, homes: Sequence[tuple[str, str]], *, where: str, what: str
) -> dict[str, int]:
    """Plan key -> index of the table it means among `homes`, the (module, table) of a model.

    Args:
        where, what: the plan's file and the model's name, for messages.

    Raises:
        PlanError: a plan key means no table or several, or a table is planned twice or not at all.
    """
    result: dict[str, int] = {}
    taken: dict[int, str] = {}
    for key, table in plan.tables.items():
        index = _find(key, table.module, homes, where, what)
        if index in taken:
            raise PlanError(
                f"{where}: '{taken[index]}' and '{key}' both plan {_show(homes[index])} of {what}; "
                "remove one"
            )
        taken[index] = key
        result[key] = index
    missing = [home for i, home in enumerate(homes) if i not in taken]
    if missing:
        names = ", ".join(_show(home) for home in missing[:3])
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise PlanError(
            f"{where}: no shards for {names}{more} of {what}; a plan places every table of its "
            "model: add them, or plan again"
        )
    return result


def _find(key: str, module: str, homes: Sequence[tuple[str, str]], where: str, what: str) -> int:
    prefix, _, last = key.rpartition("/")
    for name in (key, last):
        found = [i for i, home in enumerate(homes) if home[1] == name]
        if found:
            break
    else:
        names = sorted({home[1] for home in homes})
        raise PlanError(
            f"{where}: table '{key}' is not in {what}{did_you_mean(last, names)}; "
            f"it has {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
        )
    for hint in (module, prefix):
        if len(found) > 1 and hint:
            found = _narrow(found, hint, homes)
    if len(found) > 1:
        raise PlanError(
            f"{where}: table '{key}' may mean {' or '.join(_show(homes[i]) for i in found)} of "
            f"{what}; write the key as 'module/{last}'"
        )
    return found[0]


def _narrow(found: list[int], hint: str, homes: Sequence[tuple[str, str]]) -> list[int]:
    exact = [i for i in found if homes[i][0] == hint]
    suffix = [
        i for i in found if homes[i][0].endswith(f".{hint}") or hint.endswith(f".{homes[i][0]}")
    ]
    return exact or suffix or found


def _show(home: tuple[str, str]) -> str:
    return f"'{home[0]}/{home[1]}'" if home[0] else f"'{home[1]}'"


def table_problem(table: TablePlan, shape: tuple[int, int], world_size: int) -> str | None:
    """What is wrong with the shards of a table of `shape` (rows, columns), or None."""
    for i, shard in enumerate(table.shards):
        if not 0 <= shard.rank < world_size:
            return f"shards[{i}] is on rank {shard.rank}; ranks are 0..{world_size - 1}"
    if table.sharding_type is ShardingType.DATA_PARALLEL:
        return _replica_problem(table.shards, shape, world_size)
    return (
        _empty_problem(table)
        or _shape_problem(table.sharding_type, table.shards, shape)
        or tiling_problem(table.shards, shape)
    )


def _replica_problem(
    shards: Sequence[Shard], shape: tuple[int, int], world_size: int
) -> str | None:
    for i, shard in enumerate(shards):
        if shard.offset != (0, 0) or shard.size != shape:
            return (
                f"shards[{i}] has offset {list(shard.offset)} and size {list(shard.size)}; "
                f"data_parallel keeps the whole table, offset [0, 0] and size {list(shape)}, "
                "on every rank"
            )
    if sorted(s.rank for s in shards) != list(range(world_size)):
        return (
            f"data_parallel needs one shard on each of the ranks 0..{world_size - 1}, "
            f"but the shards are on {_ranks(shards)}"
        )
    return None


def _ranks(shards: Sequence[Shard]) -> str:
    return str([s.rank for s in shards])


def _empty_problem(table: TablePlan) -> str | None:
    for i, shard in enumerate(table.shards):
        rows, columns = shard.size
        if columns == 0 or (rows == 0 and table.sharding_type not in ROW_SPLITS):
            return (
                f"shards[{i}] has size {list(shard.size)}: only the last shards of a row split "
                "may be empty, with 0 rows; remove it"
            )
    return None


def _shape_problem(
    kind: ShardingType, shards: Sequence[Shard], shape: tuple[int, int]
) -> str | None:
    if kind is ShardingType.TABLE_WISE and len(shards) != 1:
        return f"table_wise keeps the table whole on one rank, but there are {len(shards)} shards"
    for i, shard in enumerate(shards):
        if kind in (ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE):
            side, given, whole = "rows", shard.size[0], shape[0]
        elif kind in (ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE):
            side, given, whole = "columns", shard.size[1], shape[1]
        else:
            continue
        if given != whole:
            return f"shards[{i}] has {given} {side}, but a {kind} shard has all {whole}"
    return None


def tiling_problem(shards: Sequence[Shard], shape: tuple[int, int]) -> str | None:
    """Where the shards leave a gap, overlap or exceed a table of `shape`, or None."""
    for i, shard in enumerate(shards):
        ends = (shard.offset[0] + shard.size[0], shard.offset[1] + shard.size[1])
        if ends[0] > shape[0] or ends[1] > shape[1]:
            return (
                f"shards[{i}] ends at row {ends[0]}, column {ends[1]}, outside the table of "
                f"{shape[0]} rows and {shape[1]} columns; correct offset or size"
            )
    # Coverage is constant between neighbouring edges of shards, so one count per cell is enough
    filled = [s for s in shards if s.size[0] and s.size[1]]
    edges = [
        sorted({0, shape[d], *(e for s in filled for e in (s.offset[d], s.offset[d] + s.size[d]))})
        for d in (0, 1)
    ]
    at = [{edge: i for i, edge in enumerate(side)} for side in edges]
    count = np.zeros((len(edges[0]) - 1, len(edges[1]) - 1), dtype=np.int32)
    for s in filled:
        (r0, c0), (r1, c1) = s.offset, (s.offset[0] + s.size[0], s.offset[1] + s.size[1])
        count[at[0][r0] : at[0][r1], at[1][c0] : at[1][c1]] += 1
    if (count == 1).all():
        return None
    row, column = (int(i) for i in np.argwhere(count != 1)[0])
    times = int(count[row, column])
    return (
        f"rows {edges[0][row]}..{edges[0][row + 1] - 1}, columns {edges[1][column]}.."
        f"{edges[1][column + 1] - 1} lie in {f'{times} shards' if times else 'no shard'}; "
        "the shards of a table must cover each row and column exactly once"
    )

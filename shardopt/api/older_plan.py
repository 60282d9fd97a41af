"""An older plan for the model of today: tables that have grown, shrunk, come, gone or been renamed.

Rows that lie on a rank stay there as far as the plan keeps their block; what TorchRec's sharding
classes would cut anew is cut as they do, in blocks of ``ceil(rows / shards)`` rows
(`calculate_shard_sizes_and_offsets`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from predictor.errors import InputError, PlanError, did_you_mean
from predictor.model.plan import (
    ROW_SPLITS,
    ComputeKernel,
    Shard,
    ShardingPlan,
    ShardingType,
    TablePlan,
)
from predictor.model.plan_check import find_table, table_problem
from predictor.model.workload import Table, Workload

NAMED = 3
"""Tables that a note names; the others are counted."""


@dataclass(frozen=True)
class OlderPlan:
    """A plan in use, fitted to the model of today.

    Args:
        plan: covers every table; a table that is new lies on the emptiest rank.
        held: key -> shards as they lie now, in rows and columns of today's table; none of a new
            table.
        notes: what changed, a phrase for each kind.
    """

    plan: ShardingPlan
    held: Mapping[str, tuple[Shard, ...]]
    notes: tuple[str, ...] = ()


def read_renamed(text: str | None) -> dict[str, str]:
    """Old name -> new name, of ``OLD=NEW,OLD=NEW``.

    Raises:
        InputError: it has another form, or a name stands twice.
    """
    renamed: dict[str, str] = {}
    for word in [] if text is None else text.split(","):
        old, equals, new = (part.strip() for part in word.partition("="))
        if not (old and equals and new) or old in renamed or new in renamed.values():
            raise InputError(
                f"renamed is '{text}'; give each table once, as in OLD=NEW,OLD=NEW",
                inputs=("renamed",),
            )
        renamed[old] = new
    return renamed


def adapt_plan(
    plan: ShardingPlan, workload: Workload, renamed: Mapping[str, str], *, where: str
) -> OlderPlan:
    """The plan for the tables of the workload.

    Args:
        renamed: old name of a table -> its name in the workload.
        where: the plan's file, for messages.

    Raises:
        InputError: ``renamed`` names a table that the plan or the model does not have.
        PlanError: a table of the plan may mean several of the model, or its shards do not tile it.
    """
    tables = dict(zip(workload.keys, workload.tables, strict=True))
    old_plans = _known_tables(plan, workload, renamed, where)
    adapted: dict[str, TablePlan] = {}
    shards_now: dict[str, tuple[Shard, ...]] = {}
    changed: dict[str, list[str]] = defaultdict(list)
    for key, table in tables.items():
        old = old_plans.get(key)
        shape = table.num_embeddings, table.embedding_dim
        if old is None:
            changed["new"].append(key)
            continue
        was = _shape(old)
        problem = table_problem(old, was, plan.world_size)
        if problem:
            raise PlanError(f"{where}: table '{key}': {problem}")
        if was[1] != shape[1]:
            changed["of another width, so new"].append(key)
            continue
        old = replace(old, module=table.module)
        if was != shape:
            changed["grown" if shape[0] > was[0] else "shrunk"].append(key)
        adapted[key] = old if was == shape else _resized(old, shape[0])
        shards_now[key] = old.shards
    planned = {id(table) for table in old_plans.values()}
    dropped = [key for key, table in plan.tables.items() if id(table) not in planned]
    if dropped:
        changed["no longer in the model"] = dropped
    for key in [*changed["new"], *changed["of another width, so new"]]:
        adapted[key] = _on_emptiest_rank(tables, key, adapted, plan.world_size)
        shards_now[key] = ()
    if not any(shards_now.values()):
        names = ", ".join(list(tables)[:NAMED])
        raise PlanError(
            f"{where}: no table of it is in {workload.name}, which has {names}"
            f"{', ...' if len(tables) > NAMED else ''}; give the plan of this model"
        )
    notes = tuple(_note(words, keys) for words, keys in changed.items() if keys)
    ordered = {key: adapted[key] for key in tables}
    return OlderPlan(replace(plan, tables=ordered), shards_now, notes)


def _known_tables(
    plan: ShardingPlan, workload: Workload, renamed: Mapping[str, str], where: str
) -> dict[str, TablePlan]:
    """Key in the workload -> the table's plan, of the tables that both have."""
    homes = [(table.module, table.name) for table in workload.tables]
    names = {table.name for table in workload.tables}
    for old, new in renamed.items():
        planned = {key.rpartition("/")[2] for key in plan.tables} | {*plan.tables}
        if old not in planned or new not in names:
            holder, among = ("the plan", planned) if old not in planned else ("the model", names)
            name = old if old not in planned else new
            raise InputError(
                f"renamed says {old}={new}, but {holder} has no table "
                f"'{name}'{did_you_mean(name, among)}",
                inputs=("renamed",),
            )
    old_plans: dict[str, TablePlan] = {}
    for key, table in plan.tables.items():
        prefix, slash, last = key.rpartition("/")
        name = renamed.get(key, renamed.get(last, last))
        if name not in names:
            continue
        index = find_table(f"{prefix}{slash}{name}", table.module, homes, where, workload.name)
        if workload.keys[index] in old_plans:
            raise PlanError(f"{where}: two tables of it mean '{workload.keys[index]}'; remove one")
        old_plans[workload.keys[index]] = table
    return old_plans


def _shape(table: TablePlan) -> tuple[int, int]:
    """Rows and columns that the shards cover."""
    ends = [[s.offset[axis] + s.size[axis] for s in table.shards] for axis in (0, 1)]
    return max(ends[0], default=0), max(ends[1], default=0)


def _resized(table: TablePlan, rows: int) -> TablePlan:
    """The same sharding of a table with another number of rows, on the same ranks."""
    if table.sharding_type not in ROW_SPLITS:
        shards = tuple(replace(s, size=(rows, s.size[1])) for s in table.shards)
        return replace(table, shards=shards)
    by_column: dict[int, list[int]] = defaultdict(list)
    for place, shard in enumerate(table.shards):
        by_column[shard.offset[1]].append(place)
    resized = list(table.shards)
    for places in by_column.values():
        places.sort(key=lambda place: table.shards[place].offset[0])
        block = -(-rows // len(places))
        for number, place in enumerate(places):
            start = min(number * block, rows)
            shard = table.shards[place]
            resized[place] = replace(
                shard,
                offset=(start, shard.offset[1]),
                size=(min(block, rows - start), shard.size[1]),
            )
    return replace(table, shards=tuple(resized))


def _on_emptiest_rank(
    tables: Mapping[str, Table], key: str, placed: Mapping[str, TablePlan], world_size: int
) -> TablePlan:
    """A new table whole, on the rank that holds fewest bytes of weights."""
    weight_bytes = [0] * world_size
    for name, plan in placed.items():
        for shard in plan.shards:
            weight_bytes[shard.rank] += shard.size[0] * tables[name].row_bytes(shard.size[1])
    table = tables[key]
    allowed: Sequence[int] = table.constraints.ranks or range(world_size)
    rank = min(allowed, key=lambda r: (weight_bytes[r], r))
    shard = Shard(rank, (0, 0), (table.num_embeddings, table.embedding_dim))
    kernel = (table.constraints.compute_kernels or (ComputeKernel.FUSED,))[0]
    return TablePlan(ShardingType.TABLE_WISE, ComputeKernel(kernel), (shard,), table.module)


def _note(words: str, keys: Sequence[str]) -> str:
    more = f" and {len(keys) - NAMED} more" if len(keys) > NAMED else ""
    return f"since the plan was made, {', '.join(keys[:NAMED])}{more}: {words}"

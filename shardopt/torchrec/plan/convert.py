"""Between shardopt's plans and TorchRec's: every field of `ParameterSharding`, both ways."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from predictor.errors import PlanError, did_you_mean
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.plan_check import (
    RuntimeSetting,
    assign_tables,
    find_mean_problem,
    find_runtime_problem,
    in_torchrec_order,
)
from shardopt.extras import needs_torchrec
from shardopt.torchrec.plan.fields import read_fields, write_fields
from shardopt.torchrec.plan.module_tables import ModuleTable, find_tables

with needs_torchrec():
    import torch
    import torch.distributed as dist
    from torch import nn
    from torchrec.distributed import types as torchrec_types
    from torchrec.distributed.planner.utils import placement


def to_torchrec(
    plan: ShardingPlan,
    module: nn.Module,
    *,
    device: str | torch.device | None = None,
    intra_group_size: int | None = None,
) -> torchrec_types.ShardingPlan:
    """TorchRec's `ShardingPlan` for `module`, ready for `DistributedModelParallel`.

    Tables are found by name; where several embedding modules have tables of one name, the plan's
    module name decides, as a path or the end of one.

    Args:
        module: the model that `DistributedModelParallel` will wrap, unsharded.
        device: device type of the shards. By default the one that the plan is for; cuda where
            there is a GPU, else cpu, if the plan does not say.
        intra_group_size: ranks among which TWRW, TWCW and GRID split a table, where TorchRec runs
            with NVLink domains larger than a host (TORCHREC_RESOLVED_POD_SIZE); by default the
            host's.

    Raises:
        PlanError: the plan does not fit the module, or TorchRec cannot run it.
    """
    module_tables = list(find_tables(module))
    what = type(module).__name__
    kind = _device_type(plan, device)
    group = intra_group_size or int(plan.meta.get("intra_group_size") or plan.local_world_size)
    found = assign_tables(plan, [(h.path, h.table) for h in module_tables], where="plan", what=what)
    result: dict[str, torchrec_types.EmbeddingModuleShardingPlan] = {}
    for key, index in found.items():
        module_table, where = module_tables[index], f"plan: table '{key}'"
        table = in_torchrec_order(plan.tables[key])
        setting = RuntimeSetting(
            module_table.shape, module_table.pooling, plan.world_size, group, kind
        )
        problem = find_runtime_problem(table, setting)
        if problem:
            raise PlanError(f"{where}: {problem}")
        into = result.setdefault(module_table.path, torchrec_types.EmbeddingModuleShardingPlan())
        into[module_table.table] = torchrec_types.ParameterSharding(
            sharding_type=table.sharding_type.value,
            compute_kernel=table.compute_kernel.value,
            ranks=list(table.ranks),
            sharding_spec=sharding_spec(table, module_table.shape[0], kind, plan.local_world_size),
            **read_fields(table.parameters, where),
        )
    _check_means(module_tables, result)
    _check_unpooled_widths(module_tables, result)
    return torchrec_types.ShardingPlan(dict(result))


def sharding_spec(table: TablePlan, rows: int, device: str, local: int) -> Any:
    """Where TorchRec puts the shards of a table; None if it replicates them.

    Args:
        rows: of the table.
        device: type of the shards' devices.
        local: ranks of a host.
    """
    if table.sharding_type is ShardingType.DATA_PARALLEL:
        return None  # TorchRec replicates from the module itself
    return torchrec_types.EnumerableShardingSpec(
        [
            torchrec_types.ShardMetadata(
                shard_sizes=list(shard.size),
                shard_offsets=[shard.offset[0] if shard.size[0] else rows, shard.offset[1]],
                placement=placement(device, shard.rank, local),
            )
            for shard in table.shards
        ]
    )


def _check_means(
    module_tables: Sequence[ModuleTable],
    result: dict[str, torchrec_types.EmbeddingModuleShardingPlan],
) -> None:
    for path, module_plan in result.items():
        tables = {h.table: h.pooling for h in module_tables if h.path == path}
        problem = find_mean_problem(
            {
                name: (ShardingType(sharding.sharding_type), tables[name])
                for name, sharding in module_plan.items()
            }
        )
        if problem:
            raise PlanError(f"plan: module '{path}': {problem}")


def _check_unpooled_widths(
    module_tables: Sequence[ModuleTable],
    result: dict[str, torchrec_types.EmbeddingModuleShardingPlan],
) -> None:
    """An EmbeddingCollection reads the width of its column-wise shards off the first one."""
    for path in {
        module_table.path for module_table in module_tables if module_table.pooling == "none"
    }:
        widths = {
            name: sharding.sharding_spec.shards[0].shard_sizes[1]
            for name, sharding in result[path].items()
            if sharding.sharding_type == ShardingType.COLUMN_WISE
        }
        if len(set(widths.values())) > 1:
            raise PlanError(
                f"plan: the column_wise tables of the EmbeddingCollection '{path}' have shards of "
                f"{sorted(set(widths.values()))} columns; TorchRec needs one width for all of them"
            )


def _device_type(plan: ShardingPlan, device: str | torch.device | None) -> str:
    if device is not None:
        return torch.device(device).type
    noted = plan.meta.get("device")
    if isinstance(noted, str):
        return noted
    return "cuda" if torch.cuda.is_available() else "cpu"


def from_torchrec(
    plan: torchrec_types.ShardingPlan,
    module: nn.Module,
    *,
    world_size: int | None = None,
    local_world_size: int | None = None,
) -> ShardingPlan:
    """shardopt's plan for a TorchRec plan of `module`; the inverse of `to_torchrec`.

    Args:
        world_size: number of ranks. A TorchRec plan does not hold it: by default that of the
            process group, if there is one, else the fewest ranks that the plan can be for.
        local_world_size: ranks per host, by default read off the plan and the environment.

    Raises:
        PlanError: the plan names tables that the module lacks, or holds what shardopt cannot write.
    """
    module_tables = {
        (module_table.path, module_table.table): module_table
        for module_table in find_tables(module)
    }
    names = [table for _, table in module_tables]
    tables: dict[str, TablePlan] = {}
    device: str | None = None
    for path, module_plan in plan.plan.items():
        for name, sharding in module_plan.items():
            where = f"TorchRec plan: table '{name}' of module '{path}'"
            module_table = module_tables.get((path, name))
            if module_table is None:
                known = [f"'{p}/{t}'" for p, t in module_tables]
                near = did_you_mean(f"'{path}/{name}'", known)
                raise PlanError(f"{where} is not in {type(module).__name__}{near}")
            key = name if names.count(name) == 1 else f"{path}/{name}"
            tables[key] = _table_plan(sharding, module_table, where)
            device = device or _device_of(sharding)
    world = world_size or _world_size(tables)
    local = local_world_size or _local_world_size(plan, tables, world)
    if world % local:
        raise PlanError(
            f"TorchRec plan: {world} ranks do not fill hosts of {local}; "
            "give world_size= and local_world_size="
        )
    tables = {key: _replicate_on_all(table, world) for key, table in tables.items()}
    meta: dict[str, Any] = {"device": device} if device else {}
    if (_group_size(tables) or local) != local:
        meta["intra_group_size"] = _group_size(tables)
    return ShardingPlan(tables, world, local, meta)


def _table_plan(sharding: Any, module_table: ModuleTable, where: str) -> TablePlan:
    parameters = write_fields(sharding, where)
    kind = _known(ShardingType, sharding.sharding_type, f"{where}: sharding_type")
    return TablePlan(
        sharding_type=kind,
        compute_kernel=_known(ComputeKernel, sharding.compute_kernel, f"{where}: compute_kernel"),
        shards=_shards(sharding, kind, module_table, where),
        module=module_table.path or "ebc",
        parameters=parameters,
    )


def _known(kind: Any, value: str, where: str) -> Any:
    allowed = [member.value for member in kind]
    if value not in allowed:
        raise PlanError(f"{where} is {value!r}, which shardopt does not plan; it knows {allowed}")
    return kind(value)


def _shards(
    sharding: Any, kind: ShardingType, module_table: ModuleTable, where: str
) -> tuple[Shard, ...]:
    if kind is ShardingType.DATA_PARALLEL:
        return tuple(Shard(rank, (0, 0), module_table.shape) for rank in sharding.ranks or [0])
    shards = getattr(sharding.sharding_spec, "shards", None)
    if not shards:
        raise PlanError(
            f"{where} has no EnumerableShardingSpec, so where its shards are is unknown"
        )
    placed = [shard.placement.rank() for shard in shards]
    if sharding.ranks is not None and list(sharding.ranks) != placed:
        raise PlanError(f"{where}: ranks are {sharding.ranks}, but the shards are on {placed}")
    return tuple(
        Shard(rank, (s.shard_offsets[0], s.shard_offsets[1]), (s.shard_sizes[0], s.shard_sizes[1]))
        for rank, s in zip(placed, shards, strict=True)
    )


def _replicate_on_all(table: TablePlan, world_size: int) -> TablePlan:
    """A data-parallel table whose ranks TorchRec left out, on all of them."""
    if table.sharding_type is not ShardingType.DATA_PARALLEL or table.shards[1:]:
        return table
    shard = table.shards[0]
    return replace(table, shards=tuple(replace(shard, rank=r) for r in range(world_size)))


def _device_of(sharding: Any) -> str | None:
    shards = getattr(sharding.sharding_spec, "shards", None)
    return shards[0].placement.device().type if shards else None


def _world_size(tables: dict[str, TablePlan]) -> int:
    if dist.is_available() and dist.is_initialized():
        return int(dist.get_world_size())
    return 1 + max((shard.rank for t in tables.values() for shard in t.shards), default=0)


def _local_world_size(
    plan: torchrec_types.ShardingPlan, tables: dict[str, TablePlan], world: int
) -> int:
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    if dist.is_available() and dist.is_initialized() and given.isdigit():
        return int(given)
    return _hosts_by_device(plan) or _group_size(tables) or min(8, world)


def _group_size(tables: dict[str, TablePlan]) -> int | None:
    """Ranks that a table_row_wise table is split over: a host, or an NVLink domain of several."""
    row_split = (t for t in tables.values() if t.sharding_type is ShardingType.TABLE_ROW_WISE)
    return next((len(table.shards) for table in row_split), None)


def _hosts_by_device(plan: torchrec_types.ShardingPlan) -> int | None:
    """Ranks per host from `rank:9/cuda:1`, if some rank's device index tells."""
    sizes: set[int] = set()
    for module_plan in plan.plan.values():
        for sharding in module_plan.values():
            for shard in getattr(sharding.sharding_spec, "shards", None) or ():
                rank, index = shard.placement.rank(), shard.placement.device().index
                if index is not None and index < rank:
                    sizes.add(rank - index)
    # rank - index is a multiple of the host's size; the smallest seen is the best guess
    return min(sizes, default=None)

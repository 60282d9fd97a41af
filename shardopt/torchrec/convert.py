"""Between shardopt's plans and TorchRec's: every field of `ParameterSharding`, both ways.

The fields that a plan only carries are JSON values in it: enums by name, unset fields left out.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from enum import Enum
from inspect import signature
from typing import Any, get_args, get_origin, get_type_hints

from predictor.errors import PlanError, did_you_mean
from predictor.model.plan import (
    PARAMETER_FIELDS,
    ComputeKernel,
    Shard,
    ShardingPlan,
    ShardingType,
    TablePlan,
)
from predictor.model.plan_check import (
    RuntimeSetting,
    assign_tables,
    find_mean_problem,
    find_runtime_problem,
    in_torchrec_order,
)
from predictor.model.plan_json import PRINTED, TO_READ
from shardopt.extras import needs_torchrec
from shardopt.torchrec.tables import ModuleTable, find_tables

with needs_torchrec():
    import torch
    import torch.distributed as dist
    from fbgemm_gpu.tbe.monitoring import StdLogStatsReporterConfig, TBEStatsReporterConfig
    from torch import nn
    from torchrec.distributed import types as torchrec_types
    from torchrec.distributed.planner.shard_estimators import EmbeddingOffloadStats
    from torchrec.distributed.planner.utils import placement
    from torchrec.distributed.types import (
        CacheParams,
        CacheStatistics,
        KeyValueParams,
        KVZCHTBEConfig,
        MultiPassPrefetchConfig,
        ParameterSharding,
    )


KERNELS: dict[bool, dict[ComputeKernel, str]] = {
    False: {kernel: kernel.value for kernel in ComputeKernel},
    True: {
        ComputeKernel.FUSED: "quant",
        ComputeKernel.FUSED_UVM: "quant_uvm",
        ComputeKernel.FUSED_UVM_CACHING: "quant_uvm_caching",
    },
}
"""Module is quantised for inference -> TorchRec's name of each kernel there."""


def to_torchrec(
    plan: ShardingPlan,
    module: nn.Module,
    *,
    device: str | torch.device | None = None,
    intra_group_size: int | None = None,
) -> torchrec_types.ShardingPlan:
    """Convert a plan to TorchRec's `ShardingPlan` for `module`.

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
    model_name = type(module).__name__
    kind = _device_type(plan, device)
    group = intra_group_size or int(plan.meta.get("intra_group_size") or plan.local_world_size)
    assigned = assign_tables(
        plan, [(h.path, h.table) for h in module_tables], where="plan", what=model_name
    )
    result: dict[str, torchrec_types.EmbeddingModuleShardingPlan] = {}
    for key, index in assigned.items():
        module_table, where = module_tables[index], f"plan: table '{key}'"
        table = in_torchrec_order(plan.tables[key])
        kernels = KERNELS[module_table.quantized]
        setting = RuntimeSetting(
            module_table.shape,
            module_table.pooling,
            plan.world_size,
            group,
            kind,
            training=not module_table.quantized,
        )
        problem = find_runtime_problem(table, setting)
        if not problem and table.compute_kernel not in kernels:
            problem = (
                f"a module that is quantised for inference has no kernel {table.compute_kernel}; "
                f"use {', '.join(kernels)}"
            )
        if not problem and table.compute_kernel.is_hashed:
            problem = (
                f"the kernel {table.compute_kernel} has classes of its own, which shardopt does "
                "not import; plan in the script, with ShardoptPlanner and the enumerator of these "
                "tables"
            )
        if problem:
            raise PlanError(f"{where}: {problem}")
        into = result.setdefault(module_table.path, torchrec_types.EmbeddingModuleShardingPlan())
        into[module_table.table] = torchrec_types.ParameterSharding(
            sharding_type=table.sharding_type.value,
            compute_kernel=kernels[table.compute_kernel],
            ranks=list(table.ranks),
            sharding_spec=sharding_spec(table, module_table.shape[0], kind, plan.local_world_size),
            **read_fields(table.parameters, where),
        )
    for path, of_module in result.items():
        poolings = {t.table: t.pooling for t in module_tables if t.path == path}
        _check_module(path, poolings, of_module)
    return torchrec_types.ShardingPlan(dict(result))


def sharding_spec(table: TablePlan, rows: int, device: str, local: int) -> Any:
    """Return TorchRec's placement of the shards of a table; None if it replicates them.

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


def _check_module(
    path: str,
    poolings: dict[str, str],
    tables: torchrec_types.EmbeddingModuleShardingPlan,
) -> None:
    """Refuse tables that cannot be in one module as they are sharded.

    An EmbeddingCollection reads the width of its column-wise shards off the first one.
    """
    kinds = {n: (ShardingType(table.sharding_type), poolings[n]) for n, table in tables.items()}
    problem = find_mean_problem(kinds)
    if problem:
        raise PlanError(f"plan: module '{path}': {problem}")
    widths = {
        tables[name].sharding_spec.shards[0].shard_sizes[1]
        for name, kind in kinds.items()
        if kind == (ShardingType.COLUMN_WISE, "none")
    }
    if len(widths) > 1:
        raise PlanError(
            f"plan: the column_wise tables of the EmbeddingCollection '{path}' have shards of "
            f"{sorted(widths)} columns; TorchRec needs one width for all of them"
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
    """Convert a TorchRec plan of `module` to shardopt's; the inverse of `to_torchrec`.

    Args:
        world_size: number of ranks. A TorchRec plan does not hold it: by default that of the
            process group, if there is one, else the fewest ranks that the plan can be for.
        local_world_size: ranks per host, by default read off the plan and the environment.

    Raises:
        PlanError: the plan names tables that the module lacks, or holds what shardopt cannot write;
            or it is something else than a plan of TorchRec.
    """
    if not isinstance(getattr(plan, "plan", None), dict):
        printed = isinstance(plan, str) and PRINTED.search(plan)
        raise PlanError(
            f"from_torchrec takes the ShardingPlan that TorchRec's planner returns, not a "
            f"{type(plan).__name__}" + (f": {TO_READ}" if printed else "")
        )
    module_tables = {(entry.path, entry.table): entry for entry in find_tables(module)}
    names = [table for _, table in module_tables]
    tables: dict[str, TablePlan] = {}
    placements: list[Any] = []
    for path, module_plan in plan.plan.items():
        for name, sharding in module_plan.items():
            where = f"TorchRec plan: table '{name}' of module '{path}'"
            module_table = module_tables.get((path, name))
            if module_table is None:
                module_names = [f"'{p}/{t}'" for p, t in module_tables]
                near = did_you_mean(f"'{path}/{name}'", module_names)
                raise PlanError(f"{where} is not in {type(module).__name__}{near}")
            key = name if names.count(name) == 1 else f"{path}/{name}"
            parameters = write_fields(sharding, where)
            kind = _known(ShardingType, sharding.sharding_type, f"{where}: sharding_type")
            by_name = {name: k.value for k, name in KERNELS[module_table.quantized].items()}
            kernel_name = by_name.get(sharding.compute_kernel, sharding.compute_kernel)
            kernel = _known(ComputeKernel, kernel_name, f"{where}: compute_kernel")
            shards = _shards(sharding, kind, module_table, where)
            placements += [s.placement for s in getattr(sharding.sharding_spec, "shards", ())]
            tables[key] = TablePlan(kind, kernel, shards, path or "ebc", parameters)
    world, local = _ranks(placements, tables, world_size)
    local = local_world_size or local
    if world % local:
        raise PlanError(
            f"TorchRec plan: {world} ranks do not fill hosts of {local}; "
            "give world_size= and local_world_size="
        )
    tables = {key: _replicate_on_all(table, world) for key, table in tables.items()}
    meta: dict[str, Any] = {"device": placements[0].device().type} if placements else {}
    if (_group_size(tables) or local) != local:
        meta["intra_group_size"] = _group_size(tables)
    return ShardingPlan(tables, world, local, meta)


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
    widths = [s.shard_sizes[1] for s in shards]
    if module_table.quantized:
        # TorchRec plans the rows of a quantised table as bytes, with their scale and bias
        widths = [module_table.shape[1]] * len(shards)
        if any(s.shard_offsets[1] for s in shards):
            raise PlanError(
                f"{where} is quantised and {kind}, which TorchRec plans in bytes, not in columns; "
                "allow table_wise and row_wise"
            )
    return tuple(
        Shard(rank, (s.shard_offsets[0], s.shard_offsets[1]), (s.shard_sizes[0], width))
        for rank, s, width in zip(placed, shards, widths, strict=True)
    )


def _replicate_on_all(table: TablePlan, world_size: int) -> TablePlan:
    """A data-parallel table whose ranks TorchRec left out, on all of them."""
    if table.sharding_type is not ShardingType.DATA_PARALLEL or table.shards[1:]:
        return table
    shard = table.shards[0]
    return replace(table, shards=tuple(replace(shard, rank=r) for r in range(world_size)))


def _ranks(
    placements: Sequence[Any], tables: dict[str, TablePlan], world: int | None
) -> tuple[int, int]:
    """Ranks in all, and of a host, where they are not given.

    Args:
        placements: of all shards.
    """
    joined = dist.is_available() and dist.is_initialized()
    local_size = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not world:
        highest = max((rank for table in tables.values() for rank in table.ranks), default=0)
        world = int(dist.get_world_size()) if joined else 1 + highest
    if joined and local_size.isdigit():
        return world, int(local_size)
    # a rank minus the index of its device, as in `rank:9/cuda:1`, is a multiple of the host's size;
    # the smallest seen is the best guess
    where = [(placement.rank(), placement.device().index) for placement in placements]
    sizes = {rank - index for rank, index in where if index is not None and index < rank}
    return world, min(sizes, default=None) or _group_size(tables) or min(8, world)


def _group_size(tables: dict[str, TablePlan]) -> int | None:
    """Ranks that a table_row_wise table is split over: a host, or an NVLink domain of several."""
    row_split = (t for t in tables.values() if t.sharding_type is ShardingType.TABLE_ROW_WISE)
    return next((len(table.shards) for table in row_split), None)


_KNOWN = ("sharding_type", "compute_kernel", "ranks", "sharding_spec", *PARAMETER_FIELDS)
_REPORTERS = {c.__name__: c for c in (TBEStatsReporterConfig, StdLogStatsReporterConfig)}
_PARTS = (CacheParams, KeyValueParams, MultiPassPrefetchConfig, KVZCHTBEConfig)
"""TorchRec's classes of which a plan holds the fields."""


def write_fields(sharding: ParameterSharding, where: str) -> dict[str, Any]:
    """The set fields of `sharding` beyond type, kernel, ranks and shards, as JSON values.

    Raises:
        PlanError: a value that JSON cannot hold and nothing here knows, or a subclass.
    """
    if type(sharding) is not ParameterSharding:
        # no field tells what a subclass does: dynamicemb's bring lookups of their own
        raise PlanError(
            f"{where} has a {type(sharding).__name__}, which a shardopt plan would turn into a "
            "plain ParameterSharding; leave the table out of the plan and the module that you "
            "convert, and put its sharding back into TorchRec's plan: plan.plan[path][table]"
        )
    for field in fields(sharding):
        # a later TorchRec's field must not vanish unseen
        if field.name not in _KNOWN and getattr(sharding, field.name) != field.default:
            raise PlanError(
                f"{where}: ParameterSharding.{field.name} is set, which this version of shardopt "
                "does not know; leave it at its default, or use a newer shardopt"
            )
    values = {name: getattr(sharding, name) for name in PARAMETER_FIELDS}
    return {
        name: _write(value, f"{where}: {name}")
        for name, value in values.items()
        if value is not None
    }


def _write(value: Any, where: str) -> Any:
    if isinstance(value, Enum):  # first: some of TorchRec's enums are ints as well
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, EmbeddingOffloadStats):
        return {
            "cacheability": value.cacheability,
            "expected_lookups": value.expected_lookups,
            "mrc_hist_counts": value.hist.tolist(),
            "height": value.height,
        }
    if type(value) in _REPORTERS.values():
        return {"type": type(value).__name__, "interval": value.interval}
    if isinstance(value, _PARTS):
        default = type(value)()
        items = {name: getattr(value, name) for name in signature(type(value)).parameters}
        # None is left out, unless it is not the default
        return {
            name: _write(item, f"{where}.{name}")
            for name, item in items.items()
            if item is not None or getattr(default, name) is not None
        }
    if isinstance(value, set | frozenset):
        return [_write(item, where) for item in sorted(value)]
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return [_write(item, where) for item in value]
    raise PlanError(
        f"{where}: a {type(value).__name__} cannot be written to a plan file; leave it out of the "
        "plan and set it in the training script"
    )


def read_fields(parameters: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Keyword arguments of `ParameterSharding` for what `write_fields` wrote.

    Raises:
        PlanError: an unknown key or a value of the wrong kind; names what is allowed.
    """
    kinds = {name: get_type_hints(ParameterSharding)[name] for name in PARAMETER_FIELDS}
    _only(parameters, kinds, where)
    return {
        name: _read(kinds[name], value, f"{where}: {name}")
        for name, value in parameters.items()
        if value is not None
    }


def _read(annotation: Any, value: Any, where: str) -> Any:
    """Undo `_write` for a field with this annotation."""
    options = get_args(annotation)
    kind = options[0] if type(None) in options else annotation
    if value is None:
        return None
    if kind is bool and not isinstance(value, bool):
        raise PlanError(f"{where} is {value!r}; allowed are true, false and null")
    if get_origin(kind) in (tuple, frozenset):
        return get_origin(kind)(tuple(i) if isinstance(i, list) else i for i in value)
    if kind is torch.Tensor:
        return torch.tensor(value)
    if isinstance(kind, type) and issubclass(kind, Enum):
        if value not in kind.__members__:
            names = ", ".join(kind.__members__)
            near = did_you_mean(str(value), kind.__members__)
            raise PlanError(f"{where} is {value!r}{near}; allowed are {names}")
        return kind[value]
    if kind is TBEStatsReporterConfig:
        value = dict(value) if isinstance(value, Mapping) else {}
        name = value.pop("type", None)
        if name not in _REPORTERS:
            raise PlanError(f"{where}: type is {name!r}; allowed are {', '.join(_REPORTERS)}")
        return _build(_REPORTERS[name], value, where)
    kind = EmbeddingOffloadStats if kind is CacheStatistics else kind
    return _build(kind, value, where) if kind in (EmbeddingOffloadStats, *_PARTS) else value


def _build(kind: Any, value: Any, where: str) -> Any:
    """An object of one of TorchRec's classes, of its fields."""
    names = signature(kind).parameters
    if not isinstance(value, Mapping):
        raise PlanError(f"{where} is {value!r}; it must be an object with {', '.join(names)}")
    _only(value, names, where)
    hints = get_type_hints(kind) | get_type_hints(kind.__init__)
    try:
        return kind(**{k: _read(hints.get(k), item, f"{where}.{k}") for k, item in value.items()})
    except (TypeError, ValueError) as error:
        raise PlanError(f"{where} cannot be used: {error}") from None


def _only(values: Mapping[str, Any], allowed: Collection[str], where: str) -> None:
    for key in values:
        if key not in allowed:
            near = did_you_mean(key, allowed)
            raise PlanError(f"{where}: unknown key '{key}'{near}; allowed are {', '.join(allowed)}")

"""Between TorchRec's ShardingOptions and the plan of a table."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace

from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.runtime_rules import in_torchrec_order
from predictor.model.workload import Workload
from shardopt.extras import needs_torchrec

with needs_torchrec():
    from torchrec.distributed.planner.enumerators import get_partition_by_type
    from torchrec.distributed.planner.types import Shard as TorchRecShard
    from torchrec.distributed.planner.types import ShardingOption
    from torchrec.distributed.types import CacheParams

TableKey = tuple[str, str]
"""Path of the module that is sharded, and name of the table."""


def group_by_table(options: Iterable[ShardingOption]) -> dict[TableKey, list[ShardingOption]]:
    """The options of every table of a search space, in its order."""
    found: dict[TableKey, list[ShardingOption]] = {}
    for option in options:
        found.setdefault((option.path, option.name), []).append(option)
    return found


def to_options(
    plan: ShardingPlan, workload: Workload, space: Sequence[ShardingOption]
) -> list[ShardingOption]:
    """One option a table, with its shards on their ranks; without estimates.

    Args:
        workload: of the same tables, in the order of the space.
        space: TorchRec's; whatever an option carries for the runtime comes from it.
    """
    offered = group_by_table(space).values()
    return [
        _to_option(plan.tables[key], options)
        for key, options in zip(workload.keys, offered, strict=True)
    ]


def _to_option(table: TablePlan, offered: Sequence[ShardingOption]) -> ShardingOption:
    kind, kernel = table.sharding_type.value, table.compute_kernel.value
    alike = [o for o in offered if (o.sharding_type, o.compute_kernel) == (kind, kernel)]
    option = copy.deepcopy((alike or offered)[0])
    option.sharding_type, option.compute_kernel = kind, kernel
    option.partition_by = get_partition_by_type(kind)
    rows = int(option.tensor.shape[0])
    option.shards = [
        TorchRecShard(
            size=list(shard.size),
            # where an empty shard starts means nothing to us; TorchRec puts it behind the last row
            offset=[shard.offset[0] if shard.size[0] else rows, shard.offset[1]],
            rank=shard.rank,
        )
        for shard in in_torchrec_order(table).shards
    ]
    given = option.cache_params or CacheParams()
    if given.load_factor is None and table.cache_load_factor is not None:
        option.cache_params = replace(given, load_factor=table.cache_load_factor)
    return option


def to_plan(
    options: Sequence[ShardingOption], workload: Workload, world_size: int, local_world_size: int
) -> ShardingPlan:
    """The plan that placed options make.

    Args:
        workload: of the same tables, in the order of the options.
    """
    tables = {
        key: to_table_plan(option)
        for key, option in zip(workload.keys, _in_order(options, workload), strict=True)
    }
    return ShardingPlan(tables, world_size, local_world_size)


def _in_order(options: Sequence[ShardingOption], workload: Workload) -> list[ShardingOption]:
    by_place = {(option.path or "ebc", option.name): option for option in options}
    return [by_place[table.module, table.name] for table in workload.tables]


def to_table_plan(option: ShardingOption) -> TablePlan:
    """The plan of one table that an option makes; shards without a rank are put on rank 0."""
    shards = tuple(
        Shard(int(s.rank or 0), (s.offset[0], s.offset[1]), (s.size[0], s.size[1]))
        for s in option.shards
    )
    load_factor = option.cache_load_factor
    return TablePlan(
        ShardingType(option.sharding_type),
        ComputeKernel(option.compute_kernel),
        shards,
        option.path or "ebc",
        {} if load_factor is None else {"cache_params": {"load_factor": load_factor}},
    )

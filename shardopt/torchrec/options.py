"""Between TorchRec's ShardingOptions and the plan of a table.

Options of hash tables are read off attributes that TorchEasyRec's enumerator gives them, without
importing it or dynamicemb (tzrec/utils/plan_util.py, `_emit_dynamicemb_variants`): one of each mode
and of ten load factors, all with the kernel ``customized_kernel``. What its sharders take is made
of the chosen option, by its own `to_sharding_plan`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from predictor.model.memory.caches import DEFAULT_CACHE_LOAD_FACTOR
from predictor.model.plan import STORED, ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.plan_check import in_torchrec_order
from predictor.model.topology import Topology
from predictor.model.workload import Workload
from shardopt.extras import needs_torchrec

with needs_torchrec():
    from torchrec.distributed.planner.types import Shard as TorchRecShard
    from torchrec.distributed.planner.types import ShardingOption
    from torchrec.distributed.types import CacheParams

TableKey = tuple[str, str]
"""Path of the module that is sharded, and name of the table."""


CUSTOMIZED = "customized_kernel"
"""TorchRec's name for kernels of others."""


def kernel_of(option: ShardingOption) -> str:
    """The compute kernel of an option, one of dynamicemb by shardopt's name."""
    dynamicemb = getattr(option, "dynamicemb_options", None)
    if option.compute_kernel != CUSTOMIZED or dynamicemb is None:
        return str(option.compute_kernel)
    if option.cache_load_factor in (None, 1.0):
        return ComputeKernel.DYNAMICEMB
    caching = bool(getattr(dynamicemb, "caching", False))
    return ComputeKernel.DYNAMICEMB_CACHING if caching else ComputeKernel.DYNAMICEMB_HYBRID


def store_caches(option: ShardingOption) -> dict[str, int]:
    """Sizes of a key-value table's caches, as far as a constraint gives them."""
    names = ("max_l1_cache_size", "l2_cache_size")
    sizes = {name: getattr(option.key_value_params, name, None) for name in names}
    return {name: size for name, size in sizes.items() if size is not None}


def group_by_table(options: Iterable[ShardingOption]) -> dict[TableKey, list[ShardingOption]]:
    """The options of every table of a search space, in its order."""
    by_table: dict[TableKey, list[ShardingOption]] = {}
    for option in options:
        by_table.setdefault((option.path, option.name), []).append(option)
    return by_table


def to_options(
    plan: ShardingPlan, workload: Workload, space: Sequence[ShardingOption]
) -> list[ShardingOption]:
    """One option a table, with its shards on their ranks; without estimates.

    Args:
        workload: of the same tables, in the order of the space.
        space: TorchRec's; whatever an option carries for the runtime comes from it.
    """
    offered = group_by_table(space).values()
    names_factor = _named_factors(plan, workload)
    return [
        _to_option(
            plan.tables[key],
            options,
            name_factor=key in names_factor or plan.tables[key].compute_kernel.is_hashed,
        )
        for key, options in zip(workload.keys, offered, strict=True)
    ]


def _named_factors(plan: ShardingPlan, workload: Workload) -> set[str]:
    """Tables whose load factor the search chose and the plan must name.

    One that the user set stays where it was set. TorchRec gives a launch the mean of the factors
    that its tables name (`group_tables` in embedding_sharding.py), so the default is named as soon
    as another one is.
    """
    free = {
        key: factor
        for key, table in zip(workload.keys, workload.tables, strict=True)
        if table.constraints.cache_load_factor is None
        and (factor := plan.tables[key].cache_load_factor) is not None
    }
    return set(free) if set(free.values()) - {DEFAULT_CACHE_LOAD_FACTOR} else set()


def _to_option(
    table: TablePlan, offered: Sequence[ShardingOption], *, name_factor: bool
) -> ShardingOption:
    kind = table.sharding_type.value, table.compute_kernel.value
    same = (o for o in offered if (o.sharding_type, kernel_of(o)) == kind)
    option = copy.deepcopy(next(same))
    rows = int(option.tensor.shape[0])
    shards = in_torchrec_order(table).shards
    if table.compute_kernel in STORED[1:]:
        # virtual tables are cut where their buckets end
        for theirs, shard in zip(option.shards, shards, strict=True):
            theirs.rank = shard.rank
        return option
    option.shards = [
        TorchRecShard(
            size=list(shard.size),
            # where an empty shard starts means nothing to us; TorchRec puts it behind the last row
            offset=[shard.offset[0] if shard.size[0] else rows, shard.offset[1]],
            rank=shard.rank,
        )
        for shard in shards
    ]
    if name_factor and table.cache_load_factor is not None:
        params = option.cache_params or CacheParams()
        option.cache_params = replace(params, load_factor=table.cache_load_factor)
    return option


def to_plan(options: Sequence[ShardingOption], workload: Workload, ranks: Topology) -> ShardingPlan:
    """The plan that placed options make.

    Args:
        workload: of the same tables.
    """
    placed = {(option.path or "ebc", option.name): option for option in options}
    tables = {
        key: to_table_plan(placed[table.module, table.name], table.constraints.cache_load_factor)
        for key, table in zip(workload.keys, workload.tables, strict=True)
    }
    return ShardingPlan(tables, ranks.world_size, ranks.local_world_size)


def to_table_plan(option: ShardingOption, load_factor: float | None = None) -> TablePlan:
    """The plan of one table that an option makes; shards without a rank are put on rank 0.

    Args:
        load_factor: of its cache, where the option names none.
    """
    shards = tuple(
        Shard(int(s.rank or 0), (s.offset[0], s.offset[1]), (s.size[0], s.size[1]))
        for s in option.shards
    )
    named = option.cache_load_factor
    factor = load_factor if named is None else named
    parameters: dict[str, Any] = {}
    if factor is not None:
        parameters["cache_params"] = {"load_factor": factor}
    if option.enforce_hbm is not None:
        parameters["enforce_hbm"] = option.enforce_hbm
    if store_caches(option):
        parameters["key_value_params"] = store_caches(option)
    return TablePlan(
        ShardingType(option.sharding_type),
        ComputeKernel(kernel_of(option)),
        shards,
        option.path or "ebc",
        parameters,
    )

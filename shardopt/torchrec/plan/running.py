"""The plan that a `DistributedModelParallel` runs, and the memory that its rank has left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from predictor.model.plan import ShardingPlan, ShardingType
from predictor.model.plan_check import assign_tables
from shardopt.extras import needs_torchrec

with needs_torchrec():
    import torch
    import torch.distributed as dist
    from torchrec.distributed.types import ShardedModule

Home = tuple[str, str]
"""Path of an embedding module, and name of a table."""


def homes_of(dmp: Any, plan: ShardingPlan) -> dict[str, Home]:
    """Where the tables of a plan are in a running model, by the plan's keys.

    Raises:
        PlanError: the plan has other tables.
    """
    homes = [(path, name) for path, tables in dmp.plan.plan.items() for name in tables]
    found = assign_tables(plan, homes, where="plan", what="the running model")
    return {key: homes[index] for key, index in found.items()}


def find_mismatches(dmp: Any, plan: ShardingPlan) -> Iterator[str]:
    """Tables that run otherwise than a plan says, a phrase each."""
    for key, (path, name) in homes_of(dmp, plan).items():
        running, table = dmp.plan.plan[path][name], plan.tables[key]
        ranks = list(running.ranks or [])
        kind = running.sharding_type
        if (kind, running.compute_kernel) != (table.sharding_type, table.compute_kernel):
            yield (
                f"table '{key}' runs {kind} with kernel {running.compute_kernel}, the plan says "
                f"{table.sharding_type} with {table.compute_kernel}"
            )
        elif kind != ShardingType.DATA_PARALLEL and ranks != list(table.ranks):
            yield f"table '{key}' runs on ranks {ranks}, the plan says {list(table.ranks)}"
        elif running.sharding_spec is not None:
            sizes = [tuple(shard.shard_sizes) for shard in running.sharding_spec.shards]
            if sizes != [shard.size for shard in table.shards]:
                yield f"table '{key}' runs in shards of {sizes}, the plan cuts it otherwise"


def find_pipelined(dmp: Any) -> Iterator[str]:
    """Sharded modules whose forward a train pipeline has replaced, with batches in flight."""
    for path, module in dmp.module.named_modules():
        if isinstance(module, ShardedModule) and "forward" in vars(module):
            yield (
                f"module '{path}' belongs to a train pipeline with batches on their way under the "
                "old plan; call pipeline.detach() before, and make a new pipeline afterwards"
            )


def free_bytes(device: torch.device) -> int:
    """Memory that this rank can take for itself; of host memory its share among the host's
    ranks."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + unused)
    pages, size = os.sysconf("SC_AVPHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    return pages * size // local

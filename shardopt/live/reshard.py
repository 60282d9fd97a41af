"""The move of a running job to another plan, in place: everything is checked before anything moves.

Why: docs/decisions/0066.
"""

from __future__ import annotations

import copy
from typing import Any

from predictor.errors import PlanError
from predictor.units import format_bytes
from shardopt.api.cache import digest
from shardopt.extras import needs_torchrec
from shardopt.live.proposal import Proposal
from shardopt.live.transfers import sound_transfers
from shardopt.torchrec.convert import sharding_spec
from shardopt.torchrec.running import agree, find_mismatches, find_pipelined, free_bytes, homes_of

with needs_torchrec():
    import torch.distributed as dist
    from torchrec.distributed.types import EmbeddingModuleShardingPlan


def reshard(dmp: Any, proposal: Proposal) -> None:
    """Move a running model to a proposed plan, between two steps, on all ranks at once.

    Raises:
        PlanError: something forbids it, on whichever rank; names all of it. Nothing was moved.
    """
    agree(
        digest(proposal.before, proposal.plan),
        _problems(dmp, proposal),
        "the running job cannot take this proposal",
        "Nothing was moved. Where a checkpoint is all that helps, use save_for_plan and "
        "load_under_plan",
    )
    homes = homes_of(dmp, proposal.plan)
    changed: dict[str, EmbeddingModuleShardingPlan] = {}
    for key in proposal.move.tables:
        path, name = homes[key]
        table, sharding = proposal.plan.tables[key], copy.deepcopy(dmp.plan.plan[path][name])
        rows = table.shards[0].size[0]
        sharding.ranks = list(table.ranks)
        sharding.sharding_spec = sharding_spec(
            table, rows, dmp.device.type, proposal.plan.local_world_size
        )
        changed.setdefault(path, EmbeddingModuleShardingPlan())[name] = sharding
    with sound_transfers():
        for path, tables in changed.items():
            # set where the features come in the order of the tables, and never taken back: after a
            # move that changes this order, ids would be looked up in other tables, silently
            # (`_create_input_dist` and `update_shards` in torchrec/distributed/embeddingbag.py)
            dmp.module.get_submodule(path)._has_features_permute = True
            dmp.reshard({path: (0.0, tables)}, path or None)


def _problems(dmp: Any, proposal: Proposal) -> list[str]:
    """What forbids the move on this rank, cheapest first."""
    if not hasattr(dmp, "reshard"):
        return [f"{type(dmp).__name__} has no reshard; it takes torchrec 1.8 or newer"]
    if not proposal.move.tables:
        return ["it moves no table"]
    try:
        found = list(find_mismatches(dmp, proposal.before))
    except PlanError as error:
        return [str(error)]
    if found:
        return [f"it is for another plan than the one that runs: {'; '.join(found)}"]
    found = [*proposal.obstacles, *find_pipelined(dmp)]
    if not hasattr(dmp._dmp_wrapped_module, "module"):
        found.append("the dense part is not in DistributedDataParallel, which reshard expects")
    need, free = proposal.new_bytes[dist.get_rank()], free_bytes(dmp.device)
    if need > free:
        found.append(
            f"the old and the new modules are there at once: rank {dist.get_rank()} needs "
            f"{format_bytes(need)} more and has {format_bytes(free)}"
        )
    return found

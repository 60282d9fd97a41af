"""A running job whose plan is to change: what it runs, what its ranks agree on, its checkpoints.

What is refused here was seen to fail, or to go wrong silently, with torch.distributed.checkpoint
on two ranks (tests/distributed/test_checkpoint.py; torchrec 1.7 to 1.9).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from os import PathLike
from typing import Any

from predictor.errors import PlanError
from predictor.model.plan import ComputeKernel, ShardingPlan, ShardingType, TablePlan
from predictor.model.plan_check import assign_tables, check_plan
from predictor.model.workload import Optimizer, Table, Workload
from shardopt.api.cache import digest
from shardopt.extras import needs_torchrec

with needs_torchrec():
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torchrec.distributed.types import ShardedModule

Home = tuple[str, str]
"""Path of an embedding module, and name of a table."""


def homes_of(dmp: Any, plan: ShardingPlan) -> dict[str, Home]:
    """Return the place of every table of a plan in a running model, by the plan's keys.

    Raises:
        PlanError: the plan has other tables.
    """
    homes = [(path, name) for path, tables in dmp.plan.plan.items() for name in tables]
    assigned = assign_tables(plan, homes, where="plan", what="the running model")
    return {key: homes[index] for key, index in assigned.items()}


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


def agree(mine: str, problems: Sequence[str], action: str, remedy: str) -> None:
    """Check that all ranks mean the same and none has a problem with it; collective.

    Args:
        mine: digest of what this rank means.
        problems: why it cannot be done here, a phrase each.
        action: cannot be done, and remedy: what to do instead, for the message.

    Raises:
        PlanError: on every rank, with the problems of all.
    """
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (mine, list(problems)))
    digests = [answer for answer, _ in of_ranks]
    reasons = list(dict.fromkeys(problem for _, answer in of_ranks for problem in answer))
    if len(set(digests)) > 1:
        differing = [rank for rank, answer in enumerate(digests) if answer != digests[0]]
        reasons.insert(0, f"ranks {differing} have another proposal than rank 0")
    if reasons:
        raise PlanError(f"{action}: {'; '.join(reasons)}. {remedy}")


NOTHING_SAVED = "Nothing was saved, and the job can go on as it is"
ROW_STATE = (
    Optimizer.ROWWISE_ADAGRAD,
    Optimizer.PARTIAL_ROWWISE_ADAM,
)
"""Optimizers with a state per row and column shard."""


def training_state(model: Any) -> dict[str, Any]:
    """Return what `torch.distributed.checkpoint` saves of a `DistributedModelParallel` and loads.

    Optimizers without state are left out: TorchRec keeps an empty entry on the ranks that have the
    table, which torch.distributed.checkpoint saves from rank 0 only and then misses on others.

    Returns:
        ``model``: its state dict; ``optimizer``: states of the fused optimizers, by parameter,
        where there are any. The dense optimizer's are the training script's.
    """
    states = model.fused_optimizer.state_dict()["state"]
    with_state = {key: state for key, state in states.items() if state}
    return {"model": model.state_dict()} | ({"optimizer": with_state} if with_state else {})


def load_training_state(model: Any, state: dict[str, Any]) -> None:
    """Put a loaded `training_state` into the model it was taken from."""
    model.load_state_dict(state["model"])
    whole = model.fused_optimizer.state_dict()
    whole["state"].update(state.get("optimizer", {}))
    model.fused_optimizer.load_state_dict(whole)


def save_for_plan(
    model: Any,
    before: ShardingPlan,
    after: ShardingPlan,
    workload: Workload,
    folder: str | PathLike[str],
) -> None:
    """Save weights and states of the fused optimizers for a move that TorchRec cannot make in
    place, in a folder that all ranks share. Then drop the model, build it under the new plan, call
    `load_under_plan`, and hand the ``state_dict()`` of the old dense optimizer to the new one. Call
    it on all ranks at once, between two steps.

    Args:
        model: the running `DistributedModelParallel`.
        before, after: what it runs, and what it is to run.

    Raises:
        PlanError: the model runs another plan, the new one would lose an optimizer state, or ranks
            disagree; names all of it, on every rank. Nothing was saved.
    """
    problems = []
    try:
        differs = list(find_mismatches(model, before))
        if differs:
            problems.append(f"another plan than the given one runs: {'; '.join(differs)}")
        check_resume(before, after, workload)
    except PlanError as error:
        problems.append(str(error))
    agree(digest(before, after), problems, "the job cannot go on under this plan", NOTHING_SAVED)
    dcp.save(training_state(model), checkpoint_id=str(folder))


def load_under_plan(model: Any, folder: str | PathLike[str]) -> None:
    """Fill a model that was built under the new plan; on all ranks at once.

    Raises:
        PlanError: the folder has no such checkpoint, or one of another model.
    """
    state = training_state(model)
    try:
        dcp.load(state, checkpoint_id=str(folder))
    except (dcp.api.CheckpointException, OSError, RuntimeError) as error:
        raise PlanError(
            f"{folder}: cannot be loaded into this model: {error}; give the folder of save_for_plan"
        ) from error
    load_training_state(model, state)


def check_resume(before: ShardingPlan, after: ShardingPlan, workload: Workload) -> None:
    """Refuse a plan that cannot resume what was saved under another.

    Rows, columns and whole tables may move freely, to other ranks and to more or fewer of them,
    with the states of element-wise optimizers. What cannot be loaded:

    - a row-wise optimizer has one state per row *and column shard*: the columns must stay cut
      where they were (`get_optimizer_rowwise_shard_metadata_and_global_metadata` in
      torchrec/distributed/batched_embedding_kernel.py);
    - column shards of several widths: TorchRec reads the width of all off the first
      (`_pre_load_state_dict_hook` in torchrec/distributed/embeddingbag.py), weights included;
    - a table of the dense kernel has its state in the dense optimizer, under another name.

    Weights alone can be loaded under any plan but one of the second kind.

    Args:
        before, after: plans of the workload's tables.

    Raises:
        PlanError: names every table whose optimizer state is lost, and what to do.
    """
    old, new = (check_plan(plan, workload, where="plan").tables for plan in (before, after))
    problems = [
        f"table '{key}' {problem}"
        for key, table in zip(workload.keys, workload.tables, strict=True)
        if (problem := find_lost_state(table, old[key], new[key]))
    ]
    if problems:
        raise PlanError(
            "the checkpoint cannot be resumed under this plan: "
            + "; ".join(problems)
            + ". Keep those tables as they were (constraints on sharding_types and "
            "compute_kernels), or load the weights alone and start the optimizer anew"
        )


def find_lost_state(table: Table, before: TablePlan, after: TablePlan) -> str | None:
    """Why a table cannot be loaded under another sharding, or None; see `check_resume`."""
    dense = [plan.compute_kernel is ComputeKernel.DENSE for plan in (before, after)]
    if all(dense):
        return None
    if any(dense):
        was, now = (plan.sharding_type for plan in (before, after))
        return f"moves its state between a fused and the dense optimizer ({was} to {now})"
    widths = sorted({shard.size[1] for shard in after.shards})
    if len(widths) > 1:
        return f"has column shards of {widths} columns, of which TorchRec loads only equal ones"
    if table.optimizer in ROW_STATE and _cuts(before) != _cuts(after):
        return (
            f"has {table.optimizer}, with a state for each row and column shard, and its columns "
            f"are cut at {_cuts(before)} before and {_cuts(after)} after"
        )
    return None


def _cuts(plan: TablePlan) -> list[int]:
    """The first column of every column shard."""
    return sorted({shard.offset[1] for shard in plan.shards})

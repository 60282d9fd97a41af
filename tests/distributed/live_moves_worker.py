"""One rank that moves running models, in place and through a checkpoint: `live_moves_worker JOB`,
with `JOB/plans/CASE.before.json`, `JOB/plans/CASE.after.json` and `JOB/models/CASE.yaml`.

`JOB/moved.RANK.json` has, by case, the losses with and without the move, and what was refused.
"""

import json
import logging
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel

from predictor.hardware.loader import load_hardware
from predictor.model.plan import Shard, ShardingType
from predictor.model.topology import Topology
from predictor.model.workload import Workload
from predictor.units import GIB
from search.in_use.price import MovePrice, find_obstacles
from search.problem import Problem
from shardopt.config import load_model
from shardopt.live.reshard import Proposal, reshard
from shardopt.plan import LoadedPlan, load_plan
from shardopt.torchrec import load_under_plan, save_for_plan
from shardopt.training.batch import synthetic_batch
from tests.distributed.live_worker import said, sharded, train
from tests.distributed.ranks import join_group, leave_group

HALF = 4


def main(job: Path) -> None:
    """Every case: train, move, train on; and the same without the move."""
    logging.disable(logging.WARNING)
    rank = join_group(job)
    found: dict[str, Any] = {}
    for path in sorted(job.glob("models/*.yaml")):
        load = load_model(path)
        before, after = (load_plan(job / "plans" / f"{path.stem}.{w}.json") for w in WHEN)
        still = sharded(load, before)
        losses = {"still": steps(still, load, rank, 0) + steps(still, load, rank, HALF)}
        move = in_place if path.stem.startswith("in place") else through_checkpoint
        found[path.stem] = {**losses, **move(load, before, after, rank, job / path.stem)}
    (job / f"moved.{rank}.json").write_text(json.dumps(found))
    leave_group()


WHEN = ("before", "after")


def steps(model: DistributedModelParallel, load: Workload, rank: int, first: int) -> list[float]:
    batches = (synthetic_batch(load, rank=rank, index=first + i) for i in range(HALF))
    return [train(model, load, batch) for batch in batches]


def in_place(
    load: Workload, before: LoadedPlan, after: LoadedPlan, rank: int, folder: Path
) -> dict[str, Any]:
    """`reshard`, as `ReplanMonitor.apply` calls it."""
    ranks = Topology.uniform(2, 2, hbm_bytes=0, ddr_bytes=4 * GIB)
    price = MovePrice(Problem(load, ranks, load_hardware("cpu-gloo")), before)
    move = price.of(after)
    obstacles = find_obstacles(price.tables, before, after, move.tables)
    new_bytes = tuple(int(size) for size in price.rebuilt_bytes(after))
    proposal = Proposal(before, after, Mock(), move, tuple(obstacles), new_bytes, 1.0, "")
    model = sharded(load, before)
    losses = steps(model, load, rank, 0)
    reshard(model, proposal)
    return {"moved": losses + steps(model, load, rank, HALF), "tables": list(move.tables)}


def through_checkpoint(
    load: Workload, before: LoadedPlan, after: LoadedPlan, rank: int, folder: Path
) -> dict[str, Any]:
    """Save, build anew, load; and what must not be saved."""
    model = sharded(load, before)
    losses = steps(model, load, rank, 0)
    refused = refusals(model, load, before, after, folder)
    dist.barrier()
    saved_nothing = not folder.exists()
    dist.barrier()
    save_for_plan(model, before, after, load, folder)
    del model
    anew = sharded(load, after)
    refused["empty"] = said(lambda: load_under_plan(anew, folder.parent))
    load_under_plan(anew, folder)
    return {
        "moved": losses + steps(anew, load, rank, HALF),
        "refused": refused,
        "saved nothing": saved_nothing,
    }


def refusals(
    model: DistributedModelParallel,
    load: Workload,
    before: LoadedPlan,
    after: LoadedPlan,
    folder: Path,
) -> dict[str, str]:
    """What must not be saved, and what is said of it."""
    key = load.keys[0]
    shards = tuple(Shard(rank, (0, 16 * rank), (5000, 16)) for rank in range(2))
    columns = replace(after.tables[key], sharding_type=ShardingType.COLUMN_WISE, shards=shards)
    pairs = {
        "another": (after, before),
        "disagree": (before, after if dist.get_rank() else before),
        "lost": (before, replace(after, tables={**after.tables, key: columns})),
    }
    return {
        what: said(partial(save_for_plan, model, *pair, load, folder))
        for what, pair in pairs.items()
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))

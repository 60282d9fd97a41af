"""One rank that plans with the hook and trains under what it found: `hook_worker JOB`."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel

from shardopt.torchrec import ShardoptPlanner
from shardopt.training.batch import synthetic_batch
from shardopt.training.loop import apply_sparse_optimizers, dense_optimizer
from shardopt.training.model import build_model
from tests.distributed.ranks import join_group, leave_group
from tests.distributed.training_case import EFFORT, workload

# TorchRec takes constraints by table name alone: no two tables of one name
MODEL = replace(workload(), tables=workload().tables[:-1])


def main(job: Path) -> None:
    """Plan together, train two steps, say what was planned and lost."""
    rank = join_group(job)
    torch.manual_seed(0)
    model = build_model(MODEL, "meta")
    apply_sparse_optimizers(model, MODEL)
    sharders: Any = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    planner = ShardoptPlanner(model=MODEL, effort=EFFORT, debug=False)
    plan = planner.collective_plan(model, sharders)
    sharded = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan, sharders=sharders
    )
    optimizer = dense_optimizer(sharded, MODEL)
    losses = []
    for step in range(2):
        optimizer.zero_grad()
        loss, _ = sharded(synthetic_batch(MODEL, rank=rank, index=step))
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    found = {"plan": str(plan), "losses": losses, "searched": planner.found is not None}
    (job / f"found.{rank}.json").write_text(json.dumps(found))
    leave_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

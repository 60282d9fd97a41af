"""One rank that plans with the hook and trains under what it found: `hook_worker.py JOB`."""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel

from shardopt.torchrec import ShardoptPlanner
from shardopt.torchrec.training.batch import synthetic_batch
from shardopt.torchrec.training.module import build_model
from shardopt.torchrec.training.optimizers import apply_sparse_optimizers, dense_optimizer

sys.path.insert(0, str(Path(__file__).parent))
from training_case import EFFORT, workload

# TorchRec takes constraints by table name alone: no two tables of one name
MODEL = replace(workload(), tables=workload().tables[:-1])


def main(job: Path) -> None:
    """Plan together, train two steps, say what was planned and lost."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{job}/store", rank=rank, world_size=world_size
    )
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
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    # gloo's threads may abort the process while Python tears down; the results are on disk
    time.sleep(0.3)
    os._exit(0)

"""One rank that saves a checkpoint under each plan and resumes it under every one:
`checkpoint_worker JOB`, with the plans in `JOB/plans/*.json`.

`JOB/resumed.RANK.json` has, by `BEFORE/AFTER`, whether shardopt allows the change, and the losses
of the steps after it, or the errors that loading gave.
"""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel

from predictor.errors import PlanError
from predictor.model.plan import ComputeKernel
from shardopt.plan import LoadedPlan, load_plan
from shardopt.torchrec import check_resume, load_training_state, training_state
from shardopt.training.batch import synthetic_batch
from shardopt.training.loop import apply_sparse_optimizers, dense_optimizer
from shardopt.training.model import build_model
from tests.distributed.ranks import join_group, leave_group
from tests.distributed.training_case import EPS, LEARNING_RATE, workload

STEPS = 2


def main(job: Path) -> None:
    """Every plan saves; every plan resumes what every plan saved."""
    logging.disable(logging.WARNING)
    rank = join_group(job)
    plans = {path.stem: load_plan(path) for path in sorted(job.glob("plans/*.json"))}
    found = {}
    for before, plan in plans.items():
        model = sharded(plan)
        train(model, rank, 0)
        dcp.save(training_state(model), checkpoint_id=str(job / before))
        found[before] = {"went on": train(model, rank, STEPS)}
        for after, other in plans.items():
            found[before][after] = resumed(job / before, plan, other, rank)
    (job / f"resumed.{rank}.json").write_text(json.dumps(found))
    leave_group()


def sharded(plan: LoadedPlan) -> DistributedModelParallel:
    """The model under a plan, with the weights it starts with."""
    torch.manual_seed(1)
    model = build_model(workload(), "meta")
    unfused = [k for k, t in plan.tables.items() if t.compute_kernel is ComputeKernel.DENSE]
    apply_sparse_optimizers(
        model, workload(), learning_rate=LEARNING_RATE, unfused=unfused, eps=EPS
    )
    sharders: Any = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    return DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        plan=plan.to_torchrec(model, device="cpu"),
        sharders=sharders,
    )


def train(model: DistributedModelParallel, rank: int, first: int) -> list[float]:
    """Losses of the steps from the ``first`` on."""
    optimizer = dense_optimizer(model, workload(), learning_rate=LEARNING_RATE)
    losses = []
    for step in range(first, first + STEPS):
        optimizer.zero_grad()
        loss, _ = model(synthetic_batch(workload(), rank=rank, index=step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def resumed(checkpoint: Path, before: LoadedPlan, after: LoadedPlan, rank: int) -> dict[str, Any]:
    """What shardopt says of the change, and what becomes of it."""
    refused = None
    try:
        check_resume(before, after, workload())
    except PlanError as error:
        refused = str(error)
    model = sharded(after)
    state = training_state(model)
    try:
        dcp.load(state, checkpoint_id=str(checkpoint))
        load_training_state(model, state)
        failed = None
    except (dcp.api.CheckpointException, RuntimeError) as error:
        failed = str(error)
    failures: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failed)  # one rank alone may fail
    if any(failures):
        return {"refused": refused, "failures": failures}
    return {"refused": refused, "losses": train(model, rank, STEPS)}


if __name__ == "__main__":
    main(Path(sys.argv[1]))

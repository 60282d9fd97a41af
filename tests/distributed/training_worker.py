"""One rank of a real training run: trains a DLRM under each plan and saves what came out.

`training_worker JOB`: JOB is a directory with `plans/*.json`; the results go to `PLAN.RANK.npz` in
it.
"""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel

from predictor.model.plan import ComputeKernel
from shardopt.plan import LoadedPlan, load_plan
from shardopt.training.batch import synthetic_batch
from shardopt.training.loop import apply_sparse_optimizers, dense_optimizer
from shardopt.training.model import build_model
from tests.distributed.ranks import join_group, leave_group
from tests.distributed.training_case import EPS, LEARNING_RATE, STEPS, initial_weights, workload


def main(job: Path) -> None:
    """Train under every plan of the job in one process group: starting one is slow."""
    cores = sorted(os.sched_getaffinity(0))
    # before the process group, so that gloo's threads inherit it
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    rank = join_group(job)
    for path in sorted(job.glob("plans/*.json")):
        np.savez(job / f"{path.stem}.{rank}.npz", **train(load_plan(path), rank))
    leave_group()


def train(plan: LoadedPlan, rank: int) -> dict[str, np.ndarray]:
    """Losses of this rank, its shards and its copies of all replicated parameters."""
    model = build_model(workload(), "meta")
    unfused = [k for k, t in plan.tables.items() if t.compute_kernel is ComputeKernel.DENSE]
    apply_sparse_optimizers(
        model, workload(), learning_rate=LEARNING_RATE, unfused=unfused, eps=EPS
    )
    torchrec_plan = plan.to_torchrec(model, device="cpu")
    sharders: Any = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    sharded = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=torchrec_plan, sharders=sharders
    )
    load(sharded, initial_weights())
    optimizer = dense_optimizer(sharded, workload(), learning_rate=LEARNING_RATE)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss, _ = sharded(synthetic_batch(workload(), rank=rank, index=step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": np.array(losses), **saved(sharded)}


@torch.no_grad()
def load(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Give every parameter and shard its part of the unsharded model's initial weights."""
    for name, value in model.state_dict().items():
        for offset, part in parts(value):
            rows, columns = (*offset, 0)[:2] if offset else (0, 0)
            whole = weights[name]
            if part.dim() == 2:
                whole = whole[rows : rows + part.shape[0], columns : columns + part.shape[1]]
            part.copy_(whole)


def saved(model: nn.Module) -> dict[str, np.ndarray]:
    """`name|row|column` -> values, for this rank's shards; `name` alone where it has it whole."""
    result: dict[str, np.ndarray] = {}
    for name, value in model.state_dict().items():
        for offset, part in parts(value):
            key = "|".join([name, *map(str, offset)])
            result[key] = part.detach().numpy().copy()
    return result


def parts(value: Any) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """Offset and tensor of every local shard of a ShardedTensor; a plain tensor has no offset."""
    if not hasattr(value, "local_shards"):  # a ShardedTensor calls itself a torch.Tensor
        return [((), value)]
    return [(tuple(s.metadata.shard_offsets), s.tensor) for s in value.local_shards()]


if __name__ == "__main__":
    main(Path(sys.argv[1]))

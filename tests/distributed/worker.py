"""One rank of a real training run: trains a DLRM under each plan and saves what came out.

Run as a script, once per rank: `worker.py JOB`, with RANK, WORLD_SIZE and LOCAL_WORLD_SIZE set.
JOB is a directory with `plans/*.json` and `store` (made by the process group); the results go to
`PLAN.RANK.npz` beside them.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel

from predictor.model.plan import ComputeKernel
from shardopt.plan import LoadedPlan, load_plan
from shardopt.torchrec.training.batch import synthetic_batch
from shardopt.torchrec.training.module import build_model
from shardopt.torchrec.training.optimizers import apply_sparse_optimizers, dense_optimizer

sys.path.insert(0, str(Path(__file__).parent))
from training_case import EPS, LEARNING_RATE, STEPS, initial_weights, workload


def main(job: Path) -> None:
    """Train under every plan of the job in one process group: starting one is slow."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cores = sorted(os.sched_getaffinity(0))
    # before the process group, so that gloo's threads inherit both
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{job}/store", rank=rank, world_size=world_size
    )
    for path in sorted(job.glob("plans/*.json")):
        np.savez(job / f"{path.stem}.{rank}.npz", **train(load_plan(path), rank))
    dist.barrier()


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
    # gloo's threads may abort the process while Python tears down ("terminate called without an
    # active exception"); the results are on disk and the others are past the barrier
    time.sleep(0.3)
    sys.stdout.flush()
    os._exit(0)

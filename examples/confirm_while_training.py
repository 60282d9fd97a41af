"""Run the best plans on your own module and data for a moment, then train under the fastest.

    torchrun --nproc-per-node 2 examples/confirm_while_training.py [MINUTES]

On CPUs; with GPUs use the backend nccl and the rank's device. Module, data and random numbers are
afterwards as if nothing had run.
"""

import os
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torchrec.datasets.random import RandomRecDataset
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.train_pipeline import TrainPipelineBase
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.optimizers import in_backward_optimizer_filter

from shardopt.torchrec import Confirm, ShardoptPlanner

ROWS = {"item": 200_000, "user": 100_000, "country": 300}
IDS, BATCH, STEPS = 8, 256, 20


class Loader:
    """Batches of random ids; every iterator begins anew, as that of a DataLoader does."""

    def __iter__(self) -> Iterator[Batch]:
        given = {"hash_sizes": list(ROWS.values()), "num_dense": 13, "ids_per_feature": IDS}
        return iter(RandomRecDataset(list(ROWS), BATCH, **given))


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.01)


def main(minutes: float = 1.0) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tables = [
        EmbeddingBagConfig(name=f"t_{f}", embedding_dim=64, num_embeddings=n, feature_names=[f])
        for f, n in ROWS.items()
    ]
    model = DLRMTrain(DLRM(EmbeddingBagCollection(tables=tables), 13, [128, 64], [128, 1]))
    sharders = [EmbeddingBagCollectionSharder()]
    planner = ShardoptPlanner(
        topology=Topology(dist.get_world_size(), compute_device="cpu"),
        batch_size=BATCH,
        hardware="cpu-gloo",
        default_pooling_factor=float(IDS),
        confirm=Confirm(Loader(), optimizer=optimizer, minutes=minutes, plans=2),
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    if dist.get_rank() == 0 and planner.confirmed is not None:
        for one in planner.confirmed.plans:
            print(f"{one.name}: {one.median_ms} ms", one.why or "")
        print(f"trains under {planner.confirmed.best.name}")
    sharded = DistributedModelParallel(model, plan=plan, sharders=sharders)
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    pipeline = TrainPipelineBase(sharded, optimizer(list(dense.values())), torch.device("cpu"))
    batches = iter(Loader())
    for _ in range(STEPS):
        pipeline.progress(batches)
    if dist.get_rank() == 0:
        print(f"trained {STEPS} steps")
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that ends in order


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))

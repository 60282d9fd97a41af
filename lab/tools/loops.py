"""Models of TorchRec that none of its scripts trains on CPUs, each in the same small loop.

    torchrun --nproc_per_node 2 -m lab.tools.loops NAME

`python -m lab strangers` runs them beside the scripts. The model is TorchRec's, the loop ours.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed.embedding_tower_sharding import (
    EmbeddingTowerCollectionSharder,
    EmbeddingTowerSharder,
)
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.test_utils.test_model import (
    ModelInput,
    TestSparseNN,
    TestTowerCollectionSparseNN,
    TestTowerSparseNN,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter

from shardopt.training.cpu_collection import CpuCollection

CPU = torch.device("cpu")
BATCH, FRESH, STEPS, DENSE, RATE, SYNC_INTERVAL = 16, 4, 20, 10, 0.5, 5
"""Samples of a rank, distinct batches, steps, dense features, learning rate, steps between averages
of copies."""


def bags(name: str, count: int) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(
            num_embeddings=400 * (i + 1),
            embedding_dim=16,
            name=f"{name}{i}",
            feature_names=[name + str(i)],
        )
        for i in range(count)
    ]


BAGS, WEIGHTED = bags("bag", 4), bags("weighted", 2)
IDS = 4000
REMAPPED = [
    EmbeddingConfig(
        num_embeddings=400, embedding_dim=8, name=f"table_{i}", feature_names=[f"id{i}"]
    )
    for i in range(2)
]
"""Tables named as in TorchRec's example; there are more ids than rows."""


class Pooled(nn.Module):
    """TorchRec test model with its loss."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.model = kind(BAGS, DENSE, WEIGHTED, dense_device=CPU, sparse_device=CPU)

    def forward(self, seed: int) -> torch.Tensor:
        _, of_ranks = ModelInput.generate(
            BATCH, dist.get_world_size(), DENSE, BAGS, WEIGHTED, random_seed=seed % FRESH
        )
        loss: torch.Tensor = self.model(of_ranks[dist.get_rank()])[0]
        return loss


class Remapped(nn.Module):
    """Module of TorchRec's example of managed collisions, with a loss."""

    def __init__(self) -> None:
        from examples.zch.sparse_arch import SparseArch  # type: ignore[import-untyped]

        super().__init__()
        self.model = SparseArch(REMAPPED, CPU, input_hash_size=IDS, return_remapped=True)

    def forward(self, seed: int) -> torch.Tensor:
        torch.manual_seed(seed % FRESH * dist.get_world_size() + dist.get_rank())
        names = [table.feature_names[0] for table in REMAPPED]
        lengths = torch.randint(1, 4, (len(names) * BATCH,))
        values = torch.randint(IDS, (int(lengths.sum()),))
        embedded, _ = self.model(KeyedJaggedTensor.from_lengths_sync(names, values, lengths))
        return torch.stack(
            [(output.values() - 1).square().mean() for output in embedded.values()]
        ).sum()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tower": partial(Pooled, TestTowerSparseNN),
    "towers": partial(Pooled, TestTowerCollectionSparseNN),
    "collection": partial(Pooled, TestSparseNN),
    "collisions": Remapped,
}


def shard(model: nn.Module, *, copies: int) -> Any:
    """Shard the model by the planner's plan."""
    group, ranks = dist.GroupMember.WORLD, dist.get_world_size() // copies
    sharders = [*get_default_sharders(), EmbeddingTowerSharder(), EmbeddingTowerCollectionSharder()]
    fused = ParameterConstraints(compute_kernels=["fused"])  # other kernels need GPUs
    constraints = {table.name: fused for table in REMAPPED}
    planner = EmbeddingShardingPlanner(Topology(ranks, "cpu"), BATCH, constraints=constraints)
    plan = planner.collective_plan(model, sharders, group)
    arguments = {"device": CPU, "plan": plan, "sharders": sharders}
    if copies > 1:
        return CpuCollection(
            model,
            world_size=dist.get_world_size(),
            sharding_group_size=ranks,
            global_pg=group,
            **arguments,
        )
    return DistributedModelParallel(model, **arguments)


def train(name: str) -> None:
    """Train one of `MODELS`; "collection" as two copies of its tables."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = MODELS[name]()
    for module in model.modules():
        if isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
            apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": RATE})
    model = shard(model, copies=2 if name == "collection" else 1)
    dense = [p for _, p in in_backward_optimizer_filter(model.named_parameters())]
    optimizer = torch.optim.SGD(dense, lr=RATE) if dense else None
    for step in range(1, STEPS + 1):
        model.zero_grad()
        model(step).backward()
        if optimizer:
            optimizer.step()
        if name == "collection" and step % SYNC_INTERVAL == 0:
            model.sync()
    dist.barrier()


if __name__ == "__main__":
    train(sys.argv[1])

"""A managed-collision module trains under the plan that shardopt finds for it.

TorchRec's sharder offers such a module no sharding on CPU: it is planned for GPUs, and the plan,
whose sharding gloo runs as well, is moved to the CPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchrec
from torch import nn
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardopt import from_torchrec
from shardopt.torchrec import ShardoptPlanner
from shardopt.torchrec.convert import to_torchrec
from tests.distributed.ranks import on_ranks
from tests.shardopt.torchrec.hook_models import bag
from tests.shardopt.torchrec.left_modules import META, remapped

ROWS, RAW_IDS, BATCH, POOLING = 16, 1000, 4, 2
TABLES = [bag(name, ROWS, 8) for name in "ab"]


class Model(nn.Module):
    """Pooled embeddings of ids beyond the tables' rows."""

    def __init__(self, buckets: int) -> None:
        super().__init__()
        self.tables = ManagedCollisionEmbeddingBagCollection(
            torchrec.EmbeddingBagCollection(tables=TABLES, device=META),
            remapped(TABLES, ROWS, buckets),
        )

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        """Sum of squares of everything looked up."""
        pooled, _ = self.tables(ids)
        loss: torch.Tensor = (pooled.values() ** 2).sum()
        return loss


def plan_and_train() -> tuple[dict[str, str], bool, list[float]]:
    """Sharding types of a common plan, whether this rank searched for it, and the losses on one
    batch again and again."""
    world_size = dist.get_world_size()
    torch.manual_seed(dist.get_rank())
    model = Model(buckets=world_size)
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.05})
    sharders: Any = [ManagedCollisionEmbeddingBagCollectionSharder()]
    planner = ShardoptPlanner(
        Topology(world_size=world_size, compute_device="cuda"),
        BATCH,
        hardware="a100-80gb",
        constraints={t.name: ParameterConstraints(pooling_factors=[POOLING]) for t in TABLES},
        debug=False,
        effort=0.05,
    )
    ours = from_torchrec(planner.collective_plan(model, sharders), model)
    plan = to_torchrec(ours, model, device="cpu")
    sharded = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan, sharders=sharders
    )
    ids = KeyedJaggedTensor.from_lengths_sync(
        [f"{table.name}_f0" for table in TABLES],
        torch.randint(RAW_IDS, (len(TABLES) * BATCH * POOLING,)),
        torch.full((len(TABLES) * BATCH,), POOLING, dtype=torch.int32),
    )
    losses = []
    for _ in range(4):
        loss = sharded(ids)
        loss.backward()
        losses.append(float(loss.detach()))
    types = {name: str(table.sharding_type) for name, table in ours.tables.items()}
    return types, planner.found is not None, losses


@pytest.mark.distributed
def test_ids_are_remapped_and_rows_trained() -> None:
    for rank, (types, searched, losses) in enumerate(on_ranks(plan_and_train)):
        assert searched == (rank == 0)
        assert types == {"a": "row_wise", "b": "row_wise"}  # nothing else remaps
        assert losses[0] > losses[-1] > 0  # squares of what was looked up, stepped towards 0

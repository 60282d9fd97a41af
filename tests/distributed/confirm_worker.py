"""One rank of a training script that confirms its plans first: `confirm_worker JOB`.

Beside a good plan there are one under which rank 1 runs out of memory, after some steps, and one
that is slow. Then the planner does the same by itself. What was found goes to
`JOB/found.RANK.json`.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torchrec
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.train_pipeline import TrainPipelineBase
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.streamable import Pipelineable

from shardopt.torchrec import Confirm, ShardoptPlanner, confirm
from tests.distributed.ranks import join_group, leave_group

SHARDERS = [EmbeddingBagCollectionSharder()]


class Batch(Pipelineable):
    """Ids of two features, and a label."""

    def __init__(self, seed: int) -> None:
        made = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 100, (16,), generator=made)
        self.features = torchrec.KeyedJaggedTensor.from_lengths_sync(
            ["fa", "fb"], ids, torch.ones(16, dtype=torch.long)
        )

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        return self

    def record_stream(self, stream: Any) -> None:
        pass


class Loader:
    """As a data loader: each iterator draws from the global generator, as PyTorch's do."""

    def __iter__(self) -> Any:
        seed = int(torch.empty((), dtype=torch.int64).random_(1000))
        return map(Batch, range(seed, seed + 40))


class Model(nn.Module):
    """Two tables, a layer, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            torchrec.EmbeddingBagConfig(
                name=name, embedding_dim=8, num_embeddings=100, feature_names=[f"f{name}"]
            )
            for name in "ab"
        ]
        self.ebc = torchrec.EmbeddingBagCollection(tables=tables)
        self.over = nn.Linear(16, 1)
        self.register_buffer("offset", torch.full((1,), 3.0))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.over(self.ebc(batch.features).values()) + self.offset
        assert float(self.offset) == 3.0
        return out.pow(2).mean(), out


def pipeline_of(rank: int) -> Any:
    """Train pipelines by the order in which they are made: the second is slow, the third dies."""

    class Watched(TrainPipelineBase):
        def __init__(self, model: Any, optimizer: Any, device: Any) -> None:
            super().__init__(model, optimizer, device)
            table = model.plan.plan["ebc"]["a"]
            self.kind, self.steps = table.sharding_type, 0

        def progress(self, batches: Any) -> Any:
            self.steps += 1
            if self.kind == "column_wise":
                time.sleep(0.02)
            if self.kind == "data_parallel" and self.steps == 5 and rank == 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().progress(batches)

    return Watched


def plan_of(model: nn.Module, kind: str) -> Any:
    told = {name: ParameterConstraints(sharding_types=[kind], min_partition=4) for name in "ab"}
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=2, compute_device="cpu"), batch_size=8, constraints=told
    )
    return planner.plan(model, SHARDERS)


def main(job: Path) -> None:

    rank = join_group(job)
    model = Model()
    apply_optimizer_in_backward(torch.optim.SGD, model.ebc.parameters(), {"lr": 0.1})
    before = [weight.clone() for weight in model.parameters()]
    states = torch.get_rng_state()
    plans = {
        "torchrec": plan_of(model, "table_wise"),
        "slow": plan_of(model, "column_wise"),
        "large": plan_of(model, "data_parallel"),
    }
    how = Confirm(Loader(), pipeline=pipeline_of(rank), minutes=0.05, plans=2)
    found = confirm(model, plans, how, sharders=SHARDERS)
    planner = ShardoptPlanner(
        topology=Topology(world_size=2, compute_device="cpu"),
        batch_size=8,
        default_pooling_factor=1.0,
        effort=0.05,
        debug=False,
        confirm=Confirm(Loader(), minutes=0.05, plans=2),
    )
    chosen = planner.collective_plan(model, SHARDERS)
    assert planner.confirmed is not None
    same = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    (job / f"found.{rank}.json").write_text(
        json.dumps(
            {
                **found.as_object(),
                "notes": found.notes,
                "untouched": all(same) and torch.equal(states, torch.get_rng_state()),
                "planned": planner.confirmed.as_object(),
                "chosen": chosen is not None and str(chosen),
                "best": str(planner.confirmed.best.plan),
            }
        )
    )
    leave_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

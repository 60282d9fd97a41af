"""One rank of two sharding groups that plans, trains and averages: `replica_groups_worker JOB`.

With a further word the plan is not made by the planner but splits the rows of every table: on CPUs
TorchRec's sharders offer no row split of a pooled table.

To be run without assertions: see `CpuCollection`.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import Topology

from predictor.hardware.loader import load_hardware
from predictor.model.plan import ShardingType
from predictor.model.topology import ReplicaGroups
from predictor.model.workload import Constraints, Workload
from predictor.predict import Prediction, predict
from shardopt.torchrec import ShardoptPlanner
from shardopt.torchrec.convert import to_torchrec
from shardopt.torchrec.machine import Replicas, find_replicas
from shardopt.training.batch import synthetic_batch
from shardopt.training.cpu_collection import CpuCollection
from shardopt.training.loop import apply_sparse_optimizers, dense_optimizer
from shardopt.training.model import build_model
from tests.distributed.ranks import join_group, leave_group
from tests.distributed.training_case import EFFORT, uniform_plan, workload

TYPES = (
    ShardingType.TABLE_WISE,
    ShardingType.TABLE_WISE,
    ShardingType.COLUMN_WISE,
    ShardingType.TABLE_WISE,
)
STEPS, INTERVAL, GROUP = 4, 2, 2
SHARDERS: Any = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]


def model_of_groups() -> Workload:
    """Tables of several modules, optimizers and precisions, each with one way to be sharded."""
    whole = workload()
    # TorchRec takes constraints by table name alone: no two tables of one name
    tables = [
        replace(table, constraints=Constraints(sharding_types=(kind,)))
        for table, kind in zip(whole.tables[:-1], TYPES, strict=True)
    ]
    tables[2] = replace(tables[2], data_type="fp16", optimizer="exact_adagrad")
    return of_groups(replace(whole, tables=tuple(tables)))


def of_groups(given: Workload) -> Workload:
    """The model in sharding groups of two ranks."""
    return replace(given, replica_groups=ReplicaGroups(GROUP, INTERVAL))


class Noted(CpuCollection):
    """Notes what it averages, and whether that became the mean."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self.calls: list[tuple[str, int]] = []
        self.is_mean = True
        super().__init__(*given, custom_all_reduce=self.note, **named)

    def note(self, tensors: list[torch.Tensor]) -> None:
        """Average, and compare with what all copies had."""
        group = self.device_mesh.get_group("replicate")
        before = []
        for tensor in tensors:
            copies = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
            dist.all_gather(copies, tensor.contiguous(), group=group)
            before.append(torch.stack([copy.float() for copy in copies]).mean(dim=0))
        size = sum(t.numel() * t.element_size() for t in tensors)
        self.calls.append((str(tensors[0].dtype), size))
        self.average(tensors)
        for tensor, mean in zip(tensors, before, strict=True):
            self.is_mean &= torch.allclose(tensor.float(), mean, rtol=2e-3, atol=1e-4)


def planned(given: Workload, model: nn.Module) -> tuple[Any, Replicas, Prediction | None]:
    """The plan of all ranks together; foretold on rank 0, which planned."""
    world = dist.get_world_size()
    planner = ShardoptPlanner(
        Topology(world, "cpu", local_world_size=world), model=given, effort=EFFORT, debug=False
    )
    plan = planner.collective_plan(model, SHARDERS)
    assert planner.replicas is not None
    return plan, planner.replicas, planner.found and planner.found.prediction


def written(given: Workload, model: nn.Module) -> tuple[Any, Replicas, Prediction | None]:
    """A plan by hand with the rows of every table over the ranks of a group."""
    world = dist.get_world_size()
    found = find_replicas(
        given.replica_groups, Topology(world, "cpu", local_world_size=world), "cpu-gloo", None
    )
    assert found is not None
    plan = uniform_plan(ShardingType.ROW_WISE, GROUP, GROUP)
    foretold = predict(given, found.group, load_hardware("cpu-gloo"), plan)
    return to_torchrec(plan, model, device="cpu"), found, foretold


def main(job: Path, by_hand: bool) -> None:
    """Plan together, train, average; say what was foretold and what was done."""
    rank = join_group(job)
    given = of_groups(workload()) if by_hand else model_of_groups()
    torch.manual_seed(0)
    model = build_model(given, "meta")
    apply_sparse_optimizers(model, given)
    plan, replicas, foretold = written(given, model) if by_hand else planned(given, model)
    sharded = Noted(
        model,
        torch.device("cpu"),
        plan,
        global_pg=dist.GroupMember.WORLD,
        sharders=SHARDERS,
        **replicas.collection_arguments,
    )
    optimizer = dense_optimizer(sharded, given)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss, _ = sharded(synthetic_batch(given, rank=rank, index=step))
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
        if (step + 1) % INTERVAL == 0:
            sharded.sync()
    dense = sum(float(p.double().sum()) for p in _dense(sharded))
    found = {
        "losses": losses,
        "calls": sharded.calls,
        "is_mean": sharded.is_mean,
        "dense": dense,
        "mesh": sharded.device_mesh.mesh.tolist(),
    }
    if foretold is not None:
        sync = foretold.replica_sync
        assert sync is not None
        found["weight_bytes"], found["state_bytes"] = sync.weight_bytes, sync.state_bytes
    (job / f"found.{rank}.json").write_text(json.dumps(found))
    leave_group()


def _dense(sharded: Noted) -> list[torch.Tensor]:
    """Parameters that every rank has."""
    return [
        p for n, p in sharded.named_parameters() if "embedding" not in n and p.device.type == "cpu"
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]), by_hand=len(sys.argv) > 2)

"""One rank of two sharding groups whose copies are fully sharded: `scattered_copies_worker JOB`.

To be run without assertions (see `CpuCollection`). TorchRec's code runs on CPUs with stand-ins for
three things: CUDA streams and events, the reduce-scatter with a mean, which gloo does not have, and
the tensor that a lookup on a GPU reads its weights from.
"""

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed import batched_embedding_kernel as kernels
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import Topology

from predictor.hardware.loader import load_hardware
from predictor.model.plan import ShardingType
from predictor.model.topology import DEFAULT, FULLY_SHARDED, ReplicaGroups
from predictor.predict import Prediction, predict
from shardopt.torchrec.convert import to_torchrec
from shardopt.torchrec.machine import find_replicas
from shardopt.training.batch import synthetic_batch
from shardopt.training.cpu_collection import CpuCollection
from shardopt.training.loop import apply_sparse_optimizers, dense_optimizer
from shardopt.training.model import build_model
from tests.distributed.ranks import join_group, leave_group
from tests.distributed.training_case import make_plan, workload

STEPS, GROUP = 3, 2
KINDS = (
    ShardingType.ROW_WISE,
    ShardingType.TABLE_WISE,
    ShardingType.COLUMN_WISE,
    ShardingType.ROW_WISE,
    ShardingType.TABLE_WISE,
)
scattered: list[tuple[int, int]] = []
"""Bytes that a call averages, and of the part that it leaves."""
gathered: list[int] = []


class Done:
    """A stream, an event, or work that is done."""

    def __init__(self, *given: Any, **named: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return Done


def scatter(output: torch.Tensor, input: torch.Tensor, op: Any, group: Any, async_op: bool) -> Done:
    """The mean, of which every copy keeps its part."""
    assert op == dist.ReduceOp.AVG
    scattered.append((input.nbytes, output.nbytes))
    total = input.detach().clone()
    dist.all_reduce(total, group=group)
    copies = dist.get_world_size(group)
    output.copy_((total / copies).view(copies, -1)[dist.get_rank(group)])
    return Done()


def gather_and_note(**named: Any) -> Any:
    """`all_gather_into_tensor`."""
    gathered.append(named["output_tensor"].nbytes)
    return dist.all_gather_into_tensor(**named)


def on_cpu() -> None:
    """Put the stand-ins in place."""
    torch.cuda.Stream = torch.cuda.Event = Done
    torch.cuda.current_stream = Done
    torch.cuda.stream = lambda stream: nullcontext()
    noted = {"reduce_scatter_tensor": scatter, "all_gather_into_tensor": gather_and_note}
    kernels.dist = SimpleNamespace(**vars(dist) | noted)
    for kernel in (kernels.BatchedFusedEmbedding, kernels.BatchedFusedEmbeddingBag):
        kernel.__init__ = on_host(kernel.__init__)


def on_host(init: Any) -> Any:
    """A constructor behind which the weights of a GPU are those of the host."""

    def make(self: Any, *given: Any, **named: Any) -> None:
        init(self, *given, **named)
        lookup = self._emb_module
        del lookup.weights_dev
        lookup.register_buffer("weights_dev", lookup.weights_host.data)

    return make


def foretold(strategy: str, topology: Topology) -> tuple[Prediction, Any, Any]:
    """Of GPUs, on which alone this strategy is known."""
    groups = ReplicaGroups(GROUP, sharding_strategy=strategy)
    found = find_replicas(groups, topology, "cpu-gloo", None)
    plan = make_plan(KINDS, GROUP, GROUP)
    load = replace(workload(), replica_groups=groups)
    return predict(load, found.group, load_hardware("h100-sxm"), plan), plan, found


def main(job: Path) -> None:
    """Train, and say what moved."""
    rank = join_group(job)
    on_cpu()
    given, world = workload(), dist.get_world_size()
    topology = Topology(world, "cpu", local_world_size=world)
    said, plan, replicas = foretold(FULLY_SHARDED, topology)
    plain, *_ = foretold(DEFAULT, topology)
    torch.manual_seed(rank)  # copies begin apart
    model = build_model(given, "meta")
    apply_sparse_optimizers(model, given)
    sharded = CpuCollection(
        model,
        torch.device("cpu"),
        to_torchrec(plan, model, device="cpu"),
        global_pg=dist.GroupMember.WORLD,
        sharders=[EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()],
        **replicas.collection_arguments,
    )
    optimizer = dense_optimizer(sharded, given)
    steps = []
    for step in range(STEPS):
        scattered.clear()
        gathered.clear()
        optimizer.zero_grad()
        loss, _ = sharded(synthetic_batch(given, rank=rank, index=step))
        loss.backward()
        optimizer.step()
        whole, parts = (sum(sizes) for sizes in zip(*scattered, strict=True))
        steps.append({"loss": float(loss), "scattered": whole, "parts": parts})
        steps[-1]["gathered"] = sum(gathered)
    sync = said.replica_sync
    more = [a.hbm_bytes - b.hbm_bytes for a, b in zip(said.memory, plain.memory, strict=True)]
    found = {"steps": steps, "weight_bytes": sync.weight_bytes, "parts": more}
    (job / f"found.{rank}.json").write_text(json.dumps(found))
    leave_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

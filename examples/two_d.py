"""2D sparse parallelism: every group of ranks holds all tables, averaged every few steps.

    torchrun --nproc_per_node 8 examples/two_d.py --group-size 4

On CPUs, without TorchRec's assertion that there is a GPU:

    PYTHONOPTIMIZE=1 torchrun --nproc_per_node 4 examples/two_d.py --group-size 2 --backend gloo
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from shardopt.torchrec import ReplicaGroups, ShardoptPlanner
from shardopt.training.cpu_collection import CpuCollection

ROWS, DIM, BATCH = 1000, 16, 64
NAMES = [f"f{i}" for i in range(4)]
TABLES = [EmbeddingBagConfig(ROWS, DIM, name=f"t_{n}", feature_names=[n])
          for n in NAMES]  # fmt: skip


given = argparse.ArgumentParser(description=__doc__)
given.add_argument("--group-size", type=int, required=True)
given.add_argument("--sync-interval", type=int, default=5)
given.add_argument("--steps", type=int, default=10)
given.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
args = given.parse_args()

dist.init_process_group(args.backend)
local = int(os.environ["LOCAL_WORLD_SIZE"])
kind = "cuda" if args.backend == "nccl" else "cpu"
device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)

ebc = EmbeddingBagCollection(tables=TABLES, device=torch.device("meta"))
apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.5})
sharders = [EmbeddingBagCollectionSharder()]
planner = ShardoptPlanner(
    Topology(dist.get_world_size(), kind, local_world_size=local),
    BATCH,
    constraints={  # data-parallel tables would need an optimizer of their own
        t.name: ParameterConstraints(sharding_types=["table_wise"], pooling_factors=[2.0])
        for t in TABLES
    },
    replica_groups=ReplicaGroups(args.group_size, args.sync_interval),
)
plan = planner.collective_plan(ebc, sharders, dist.GroupMember.WORLD)
model = (DMPCollection if kind == "cuda" else CpuCollection)(
    ebc,
    device,
    plan,
    global_pg=dist.GroupMember.WORLD,
    sharders=sharders,
    **planner.replicas.collection_arguments,
)
for step in range(1, args.steps + 1):
    torch.manual_seed(step * dist.get_world_size() + dist.get_rank())
    ids = torch.randint(ROWS, (2 * BATCH * len(NAMES),), device=device)
    lengths = torch.full((BATCH * len(NAMES),), 2, device=device)
    loss = (model(KeyedJaggedTensor(NAMES, ids, lengths=lengths)).values() - 1).square().mean()
    loss.backward()
    if step % args.sync_interval == 0:
        model.sync()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
dist.barrier()
os._exit(0)  # gloo's threads may abort a process that Python tears down

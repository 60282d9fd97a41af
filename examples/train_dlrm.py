"""Trains TorchRec's DLRM on Criteo-format data under TorchRec's planner, shardopt's, or both.

    python examples/make_criteo_sample.py sample.tsv
    torchrun --nproc_per_node 2 examples/train_dlrm.py --data sample.tsv --planner both

With `both`, two models train in turns, a block of iterations each. On GPUs give `--backend nccl`.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torch.utils.data import DataLoader, IterableDataset
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM, DLRMTrain, OverArch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardopt.race import ratio_of
from shardopt.ranks.realtime import hasten_gloo, keep_freed_memory
from shardopt.torchrec import ShardoptPlanner

PLANNERS = {
    "torchrec": EmbeddingShardingPlanner,
    "shardopt": ShardoptPlanner,  # <- the one line that changes
}
PIPELINES = {"base": TrainPipelineBase, "sparse_dist": TrainPipelineSparseDist}
INTEGERS, CATEGORIES = 13, 26
OVER = [512, 256, 1]
ALIGNED = 8
"""Columns of 16 bytes in bf16, which cuBLAS needs for its fast kernels; 32 bytes in fp32."""
FEATURES = [f"cat_{i}" for i in range(CATEGORIES)]
ONE_ID = {f"t_{name}": ParameterConstraints(pooling_factors=[1.0]) for name in FEATURES}
"""Every feature of Criteo has one id a sample, which no module says."""


class CriteoBatches(IterableDataset):
    """This rank's share of a file's rows, in batches without end, in another order every epoch.

    A category is its hash modulo the rows of its table, 0 where it is missing; an integer x is
    log(1 + x), 0 where it is missing.
    """

    def __init__(self, path: Path, batch_size: int, tables: list[int]) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        fields = [line.split("\t") for line in path.read_text().splitlines()[rank::world]]
        if {len(row) for row in fields} - {1 + INTEGERS + CATEGORIES}:
            raise SystemExit(f"{path}: every line is a label, 13 integers and 26 categories")
        if len(fields) < batch_size:
            raise SystemExit(
                f"{path}: {len(fields)} rows a rank, but --batch-size is {batch_size}; write a "
                "larger sample, or choose smaller batches"
            )
        integers = [[max(0, int(x or 0)) for x in row[1 : 1 + INTEGERS]] for row in fields]
        hashes = [[int(x or "0", 16) for x in row[1 + INTEGERS :]] for row in fields]
        self.batch_size, self.seed = batch_size, rank
        self.labels = torch.tensor([float(row[0]) for row in fields])
        self.dense = torch.log1p(torch.tensor(integers, dtype=torch.float32))
        self.ids = torch.from_numpy(np.array(hashes) % np.array(tables))

    def __iter__(self) -> Iterator[Batch]:
        """A batch at a time; the last rows of an epoch that fill none are left out."""
        order = torch.Generator().manual_seed(self.seed)
        lengths = torch.ones(CATEGORIES * self.batch_size, dtype=torch.int32)
        while True:
            for rows in torch.randperm(len(self.labels), generator=order).split(self.batch_size):
                if len(rows) == self.batch_size:
                    ids = self.ids[rows].T.flatten()
                    sparse = KeyedJaggedTensor(FEATURES, ids, lengths=lengths)
                    yield Batch(self.dense[rows], sparse, self.labels[rows])


class Interaction(nn.Module):
    """Dense features beside all pairwise products, as TorchRec's `InteractionArch` gives them.

    Pairs are taken by `index_select`: the gradient of `z[:, i, j]`, which TorchRec has, takes a
    quarter of a step on an H100. Zeros fill up the columns to a multiple of `ALIGNED`.
    """

    def __init__(self, features: int, dim: int) -> None:
        super().__init__()
        i, j = torch.triu_indices(features + 1, features + 1, offset=1)
        self.register_buffer("pairs", i * (features + 1) + j, persistent=False)
        self.missing = -(dim + len(i)) % ALIGNED
        self.width = dim + len(i) + self.missing

    def forward(self, dense_features: torch.Tensor, sparse_features: torch.Tensor) -> torch.Tensor:
        """`[batch, width]` of `[batch, dim]` and `[batch, features, dim]`."""
        vectors = torch.cat((dense_features.unsqueeze(1), sparse_features), dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        joined = torch.cat((dense_features, products.index_select(1, self.pairs)), dim=1)
        return nn.functional.pad(joined, (0, self.missing))


def build_model(tables: list[int], dim: int) -> DLRMTrain:
    """TorchRec's DLRM but for its `Interaction`; tables take no memory before they are sharded."""
    configs = [
        EmbeddingBagConfig(
            name=f"t_{name}", num_embeddings=rows, embedding_dim=dim, feature_names=[name]
        )
        for name, rows in zip(FEATURES, tables, strict=True)
    ]
    sparse = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    apply_optimizer_in_backward(RowWiseAdagrad, sparse.parameters(), {"lr": 0.02})
    dlrm = DLRM(sparse, INTEGERS, [512, 256, dim], OVER)
    dlrm.inter_arch = Interaction(CATEGORIES, dim)
    dlrm.over_arch = OverArch(dlrm.inter_arch.width, OVER)
    return DLRMTrain(dlrm)


class Trainer:
    """A model sharded as a planner says, with its optimizers, pipeline and data."""

    def __init__(self, planner: str, given: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(0)
        model = build_model(given.num_embeddings, given.dim)
        sharders = [EmbeddingBagCollectionSharder()]
        self.plan = PLANNERS[planner](
            topology=topology(device),
            batch_size=given.batch_size,
            constraints=ONE_ID,
            debug=False,
        ).collective_plan(model, sharders, dist.GroupMember.WORLD)
        sharded = DistributedModelParallel(model, device=device, plan=self.plan, sharders=sharders)
        # steps the MLPs, and the tables that the plan replicates: where there are any, PyTorch does
        # not choose `foreach` by itself
        dense = KeyedOptimizerWrapper(
            dict(in_backward_optimizer_filter(sharded.named_parameters())),
            lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=True),
        )
        optimizer = CombinedOptimizer([sharded.fused_optimizer, dense])
        self.pipeline = PIPELINES[given.pipeline](sharded, optimizer, device)
        data = CriteoBatches(given.data, given.batch_size, given.num_embeddings)
        self.batches = iter(DataLoader(data, batch_size=None, pin_memory=device.type == "cuda"))
        self.losses: list[torch.Tensor] = []
        self.rounds_s: list[float] = []

    def train(self, steps: int, device: torch.device) -> float:
        """Seconds that some iterations take; one more goes before, so that all ranks are there."""
        dist.barrier()
        self.pipeline.progress(self.batches)
        start = _now(device)
        for _ in range(steps):
            loss, _, _ = self.pipeline.progress(self.batches)
            self.losses.append(loss)
        return _now(device) - start

    def types(self) -> str:
        """Return the count of tables per sharding type, e.g. ``20 table_wise, 6 data_parallel``."""
        tables = [table for module in self.plan.plan.values() for table in module.values()]
        kinds = Counter(table.sharding_type for table in tables)
        return ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())


def table_rows(text: str) -> list[int]:
    """One number for all tables, or one for each."""
    rows = [int(part) for part in text.split(",")]
    if len(rows) not in (1, CATEGORIES) or min(rows) < 1:
        raise argparse.ArgumentTypeError(f"give one positive number, or {CATEGORIES} with commas")
    return rows * (CATEGORIES // len(rows))


def topology(device: torch.device) -> Topology:
    """The ranks, with the memory that each has for itself."""
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    if device.type == "cuda":
        memory = {"hbm_cap": torch.cuda.mem_get_info(device)[1]}
    else:
        memory = {"ddr_cap": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // local}
    return Topology(dist.get_world_size(), device.type, local_world_size=local, **memory)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def start(backend: str) -> torch.device:
    """Join the process group; on CPUs with a core a rank, without which times are chance."""
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    else:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[local % len(cores)]})
        torch.set_num_threads(1)
        keep_freed_memory()
    dist.init_process_group(backend)
    return device


def report(trainers: dict[str, Trainer], given: argparse.Namespace) -> None:
    """Throughput of every planner, and whether the difference is more than noise."""
    if dist.get_rank() != 0:
        return
    samples = given.steps * given.batch_size * dist.get_world_size()
    print(f"\n{'planner':10} {'samples/s':>12} {'ms/iteration':>13} {'loss':>18}  sharding")
    for name, trainer in trainers.items():
        seconds = statistics.median(trainer.rounds_s)
        losses = torch.stack(trainer.losses)
        first, last = losses[: given.steps].mean(), losses[-given.steps :].mean()
        print(
            f"{name:10} {samples / seconds:12,.0f} {1e3 * seconds / given.steps:13.2f} "
            f"{first:8.4f} -> {last:.4f}  {trainer.types()}"
        )
    if len(trainers) == 2:
        theirs, ours = trainers.values()
        ratio = ratio_of(theirs.rounds_s, ours.rounds_s)
        verdict = "beyond noise" if ratio.significant else "within noise"
        span = "{:.3f} to {:.3f}".format(*ratio.interval) if ratio.interval else "needs 6 rounds"
        print(
            f"shardopt's plan trains {ratio.value:.3f} times as fast as TorchRec's "
            f"(95 % interval {span}): {verdict}"
        )


def main() -> None:
    """Plan, train in rounds, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--planner", choices=[*PLANNERS, "both"], default="both")
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    parser.add_argument("--pipeline", choices=list(PIPELINES), default="base")
    parser.add_argument("--batch-size", type=int, default=1024, help="samples per rank")
    parser.add_argument(
        "--num-embeddings",
        type=table_rows,
        default="100000",
        help="rows of every table, or of each of the 26, with commas between",
    )
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10, help="iterations of a round")
    given = parser.parse_args()
    names = list(PLANNERS) if given.planner == "both" else [given.planner]
    device = start(given.backend)
    trainers = {name: Trainer(name, given, device) for name in names}
    if given.backend == "gloo":
        hasten_gloo()
    order = random.Random(0)
    for at in range(given.rounds + 1):
        # in turns and in an order drawn anew, so that a machine that changes its speed is fair
        for name in order.sample(names, len(names)):
            seconds = trainers[name].train(given.steps, device)
            if at > 0:  # the first round is warm-up
                trainers[name].rounds_s.append(seconds)
    report(trainers, given)
    dist.barrier()
    if given.backend == "nccl":
        dist.destroy_process_group()
    else:
        time.sleep(0.3)  # gloo's threads abort a process that ends right after its last message


if __name__ == "__main__":
    main()

"""One rank whose training step of a sharded DLRM is captured: `scale_worker FOLDER BATCH`."""

import itertools
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.workload import DenseArch, Feature, Table, Workload
from shardopt.training.batch import batch_ring
from shardopt.training.loop import Training
from tests.distributed.ranks import join_group, leave_group
from tests.shardopt.replay.captured import capture

TABLES, WIDTH, ROWS, POOLING = 6, 16, 500, 4.0


def main(job: Path, batch: int) -> None:
    """Train tables that lie whole on ranks in turns, and capture a step."""
    rank = join_group(job)
    world_size = dist.get_world_size()
    tables = tuple(Table(f"t{i}", ROWS, WIDTH, (Feature(f"f{i}", POOLING),)) for i in range(TABLES))
    load = Workload("dlrm", batch, tables, DenseArch(13, (64, 32, WIDTH), (64, 32, 1)))
    placed = {
        key: TablePlan(
            ShardingType.TABLE_WISE,
            ComputeKernel.FUSED,
            (Shard(i % world_size, (0, 0), (ROWS, WIDTH)),),
            table.module,
        )
        for i, (key, table) in enumerate(zip(load.keys, tables, strict=True))
    }
    plan = ShardingPlan(placed, world_size, world_size)
    ring = list(itertools.islice(batch_ring(load, seed=0, rank=rank), 1))
    training = Training(load, plan, torch.device("cpu"), ring)
    capture(training.step, job / "traces", rank=rank)
    leave_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

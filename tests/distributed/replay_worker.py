"""One rank whose training step of a sharded DLRM is captured: `replay_worker FOLDER`."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from shardopt.training.batch import batch_ring
from shardopt.training.loop import Training
from tests.distributed.ranks import join_group, leave_group
from tests.distributed.training_case import MIXED, make_plan, workload
from tests.shardopt.replay.captured import capture


def main(job: Path) -> None:
    """Train under a plan of five sharding types and capture a step."""
    rank = join_group(job)
    world_size = dist.get_world_size()
    load = workload()
    plan = make_plan(MIXED, world_size, world_size)
    ring = batch_ring(load, seed=0, rank=rank)
    training = Training(load, plan, torch.device("cpu"), ring)
    capture(training.step, job / "traces", warm_up=3, rank=rank)
    leave_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""One rank whose training step of a sharded DLRM is captured: `replay_worker.py FOLDER`."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from shardopt.torchrec.training.batch import batch_ring
from shardopt.torchrec.training.loop import Training
from tests.shardopt.replay.captured import capture

sys.path.insert(0, str(Path(__file__).parent))
from training_case import MIXED, make_plan, workload


def main(job: Path) -> None:
    """Train under a plan of five sharding types and capture a step."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{job}/store", rank=rank, world_size=world_size
    )
    load = workload()
    plan = make_plan(MIXED, world_size, world_size)
    ring = batch_ring(load, seed=0, rank=rank)
    training = Training(load, plan, torch.device("cpu"), ring)
    capture(training.step, job / "traces", warm_up=3, rank=rank)
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    time.sleep(0.3)
    sys.stdout.flush()
    os._exit(0)

"""One rank whose training step is captured: `replay_tables_worker.py FOLDER MODULES PIPELINE`."""

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
from replay_tables_case import model_and_plan


def main(job: Path, modules: int, pipeline: str) -> None:
    """Train embedding modules that are alike, and capture a step."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{job}/store", rank=rank, world_size=world_size
    )
    load, plan = model_and_plan(modules, pipeline)
    ring = batch_ring(load, seed=0, rank=rank)
    training = Training(load, plan, torch.device("cpu"), ring)
    capture(training.step, job / "traces", warm_up=3, rank=rank)
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    time.sleep(0.3)
    sys.stdout.flush()
    os._exit(0)

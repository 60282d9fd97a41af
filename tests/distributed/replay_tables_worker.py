"""One rank whose training step is captured: `replay_tables_worker FOLDER MODULES PIPELINE`."""

import sys
from pathlib import Path

import torch

from shardopt.training.batch import batch_ring
from shardopt.training.loop import Training
from tests.distributed.ranks import join_group, leave_group
from tests.distributed.replay_tables_case import model_and_plan
from tests.shardopt.replay.captured import capture


def main(job: Path, modules: int, pipeline: str) -> None:
    """Train embedding modules that are alike, and capture a step."""
    rank = join_group(job)
    load, plan = model_and_plan(modules, pipeline)
    ring = batch_ring(load, seed=0, rank=rank)
    training = Training(load, plan, torch.device("cpu"), ring)
    capture(training.step, job / "traces", warm_up=3, rank=rank)
    leave_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])

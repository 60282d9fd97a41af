"""One rank that trains under TorchRec's profiler: `dense_trace_worker JOB`, with the model in
`JOB/model.yaml` and the plan in `JOB/plan.json`. Its trace is `JOB/traces/rankRANK.json`."""

import logging
import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from predictor.model.plan_json import load_plan
from shardopt.config import load_model
from shardopt.training.batch import batch_ring
from shardopt.training.loop import Training
from tests.distributed.ranks import join_group, leave_group

STEPS = 4


def main(job: Path) -> None:
    logging.disable(logging.WARNING)
    rank = join_group(job)
    workload = load_model(job / "model.yaml")
    ring = batch_ring(workload, rank=rank, size=2)
    training = Training(workload, load_plan(job / "plan.json"), torch.device("cpu"), ring)
    training.step()
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=STEPS, repeat=1),
        record_shapes=True,
        profile_memory=True,
    ) as profiler:
        for _ in range(1 + STEPS):
            training.step()
            profiler.step()
    profiler.export_chrome_trace(str(job / "traces" / f"rank{rank}.json"))
    leave_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""A training loop that moves its tables once its data have drifted, on two CPU ranks:

torchrun --standalone --nproc-per-node 2 examples/replan_while_training.py FOLDER
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel

from predictor.model.distribution import Zipf
from predictor.model.workload import DenseArch, Feature, Table, Workload
from shardopt import load_plan
from shardopt.api.request import Machine
from shardopt.cli.app import main as shardopt
from shardopt.config.write import write_model
from shardopt.live.monitor import ReplanMonitor
from shardopt.training.batch import synthetic_batch
from shardopt.training.loop import apply_sparse_optimizers, dense_optimizer
from shardopt.training.model import build_model

EVERY, STEPS, HARDWARE = 20, 80, "cpu-gloo"


def workload(hot_ids: float) -> Workload:
    """Four tables; the ids of two of them become many more."""
    tables = tuple(
        Table(f"t{i}", 20_000, 64, (Feature(f"f{i}", n, distribution=Zipf(1.05)),))
        for i, n in enumerate((hot_ids, hot_ids, 4.0, 4.0))
    )
    return Workload("drifting", 512, tables, DenseArch(13, (64,), (64, 1), "dot"))


def main(folder: Path) -> None:
    """Plan for yesterday's data, train on today's."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, model_file, plan_file = dist.get_rank(), folder / "model.yaml", folder / "plan.json"
    if rank == 0:
        write_model(model_file, workload(4.0))
        words = ["--gpus", "2", "--hardware", HARDWARE, "--ddr-gib", "2", "-o", str(plan_file)]
        shardopt(["plan", str(model_file), *words, "--effort", "0.1", "--quiet"])
    dist.barrier()
    plan, old = load_plan(plan_file), workload(4.0)
    model = build_model(old)
    apply_sparse_optimizers(model, old)
    dmp = DistributedModelParallel(
        model, plan=plan.to_torchrec(model), sharders=[EmbeddingBagCollectionSharder()]
    )
    monitor = ReplanMonitor(
        dmp,
        plan,
        EVERY,
        model=model_file,
        folder=folder,
        machine=Machine(hardware=HARDWARE, ddr_gib=2),
    )
    optimizer = dense_optimizer(dmp, old)
    ring = [synthetic_batch(workload(60.0), rank=rank, index=i) for i in range(4)]
    for step in range(STEPS):
        batch = ring[step % len(ring)]
        optimizer.zero_grad()
        dmp(batch)[0].backward()
        optimizer.step()
        if monitor.step(batch.sparse):
            proposal = monitor.propose()
            if rank == 0:
                found = f"gains {proposal.gain:.1%}" if proposal.recommended else "staying is best"
                print(f"step {step + 1}: {proposal.measured_ms:.1f} ms a step; {found}")
            if proposal.in_place:
                monitor.apply(dmp)
    dist.barrier()
    time.sleep(0.3)  # gloo's threads abort a process that ends right after its last message


main(Path(sys.argv[1]))

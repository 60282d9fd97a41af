"""One rank of a job whose data drift: `live_worker JOB`, with `JOB/plan.json` and `JOB/model.yaml`.

It is trained twice on the same batches, with and without moves. `JOB/found.RANK.json` has the
losses of both, the proposal, and what bad proposals ended in.
"""

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel

from predictor.errors import ShardoptError
from predictor.model.workload import Workload
from shardopt.api.request import Machine
from shardopt.config import load_model
from shardopt.live import reshard
from shardopt.live.monitor import ReplanMonitor
from shardopt.plan import LoadedPlan, load_plan
from shardopt.training.batch import Batch, synthetic_batch
from shardopt.training.loop import apply_sparse_optimizers, dense_optimizer
from shardopt.training.model import build_model
from tests.distributed.live_case import EVERY, STEPS, drifted
from tests.distributed.ranks import join_group, leave_group


def main(job: Path) -> None:
    """Train without a monitor, then with one."""
    logging.disable(logging.WARNING)
    rank = join_group(job)
    load = load_model(job / "model.yaml")
    batches = [
        synthetic_batch(load if step < EVERY else drifted(load), rank=rank, index=step)
        for step in range(STEPS)
    ]
    model = sharded(load, load_plan(job / "plan.json"))
    found: dict[str, Any] = {"still": [train(model, load, batch) for batch in batches]}
    found |= watched(load, job, batches)
    (job / f"found.{rank}.json").write_text(json.dumps(found))
    leave_group()


def sharded(load: Workload, plan: LoadedPlan) -> DistributedModelParallel:
    """The model under a plan, with the weights it starts with."""
    torch.manual_seed(1)
    model = build_model(load, "meta")
    apply_sparse_optimizers(model, load, learning_rate=0.1, eps=1e-8)
    return DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        plan=plan.to_torchrec(model, device="cpu"),
        sharders=[EmbeddingBagCollectionSharder()],
    )


def train(model: DistributedModelParallel, load: Workload, batch: Batch) -> float:
    """The loss of one step."""
    optimizer = dense_optimizer(model, load, learning_rate=0.1)
    optimizer.zero_grad()
    loss, _ = model(batch)
    loss.backward()
    optimizer.step()
    return float(loss.item())


def watched(load: Workload, job: Path, batches: list[Batch]) -> dict[str, Any]:
    """The same with a monitor, which moves when the second window of drifted data has closed."""
    model = sharded(load, load_plan(job / "plan.json"))
    found: dict[str, Any] = {"losses": [], "refused": {}}

    def monitor_of(plan: Any) -> ReplanMonitor:
        return ReplanMonitor(
            model,
            plan,
            EVERY,
            model=job / "model.yaml",
            folder=job / "windows",
            machine=Machine(hardware="cpu-gloo", ddr_gib=2.0),
            horizon=10**7,
            effort=0.05,
        )

    given = load_plan(job / "plan.json")
    monitor = monitor_of(given)
    found["refused"]["another"] = said(lambda: monitor_of(load_plan(job / "other.json")))
    found["refused"]["nothing proposed"] = said(lambda: monitor.apply(model))
    for step, batch in enumerate(batches):
        found["losses"].append(train(model, load, batch))
        if monitor.step(batch.sparse) and step + 1 == 2 * EVERY:
            proposal = monitor.propose()
            found["proposal"] = proposal.to_object()
            found["refused"] |= refusals(monitor, model)
            monitor.apply(model)
            found["moved"] = [str(table.ranks) for table in model.plan.plan["sparse.ebc"].values()]
            found["matches"] = list(reshard.find_mismatches(model, proposal.plan))
    found["windows"] = sorted(path.name for path in (job / "windows").iterdir())
    return found


def refusals(monitor: ReplanMonitor, model: DistributedModelParallel) -> dict[str, str]:
    """Proposals that must not be followed, and what is said of them."""
    good = monitor.proposal
    assert good is not None
    found = {}

    def try_it(name: str, proposal: Any) -> None:
        monitor.proposal = proposal
        found[name] = said(lambda: monitor.apply(model))
        monitor.proposal = good

    try_it("other plan", replace(good, before=good.plan))
    mine = replace(good, plan=good.before) if dist.get_rank() == 1 else good
    try_it("ranks disagree", mine)
    try_it("an obstacle", replace(good, obstacles=("table 't' has adam",)))
    enough = reshard.free_bytes
    if dist.get_rank() == 1:
        reshard.free_bytes = lambda device: 1000
    try_it("memory", good)
    reshard.free_bytes = enough
    ebc = model.module.sparse["ebc"]
    ebc.forward = ebc.forward
    try_it("pipeline", good)
    del ebc.forward
    return found


def said(what: Callable[[], object]) -> str:
    try:
        what()
    except ShardoptError as error:
        return str(error)
    return "nothing"


if __name__ == "__main__":
    main(Path(sys.argv[1]))

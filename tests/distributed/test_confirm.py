"""Plans confirmed on two gloo ranks: by the command, under torchrun, and in a training script."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchrec
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.train_pipeline import TrainPipelineBase
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.streamable import Pipelineable

from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import HardwareProfile
from predictor.model.plan_json import load_plan
from shardopt.api.document import MeasuredPlan, confirmation_keys
from shardopt.cli.app import main
from shardopt.race import Confirmation
from shardopt.torchrec import Confirm, ShardoptPlanner, confirm
from tests.distributed.ranks import on_ranks, torchrun

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

MODEL = """
schema: 1
name: small
batch_size: 64
tables:
  - {name: a, num_embeddings: 4000, embedding_dim: 32, features: [{name: fa, pooling_factor: 8}]}
  - {name: b, num_embeddings: 900, embedding_dim: 32, features: [{name: fb, pooling_factor: 2}]}
dense: {in_features: 4, bottom_mlp: [32], interaction: dot, top_mlp: [16, 1]}
"""


def words(folder: Path) -> list[str]:
    """Return the command line that confirms plans of the model."""
    (folder / "model.yaml").write_text(MODEL)
    command = ["plan", str(folder / "model.yaml"), "--gpus", "2", "--hardware", "cpu-gloo"]
    command += ["--effort", "0.1", "--no-cache", "--confirm", "1", "--minutes", "0.2"]
    return [*command, "-o", str(folder / "plan.json"), "--json"]


def check(document: dict[str, Any], folder: Path) -> HardwareProfile:
    """The fastest plan is written, and what was learned beside it."""
    measured = {row["plan"]: row["median_ms"] for row in document["confirmed"]}
    assert all(ms > 0 for ms in measured.values())
    assert document["measured_gain"]["value"] >= 0
    best = min(measured, key=lambda name: measured[name])
    by = next(row["found_by"] for row in document["confirmed"] if row["plan"] == best)
    assert document["plans"][0]["found_by"] == f"{by}, measured"
    assert load_plan(folder / "plan.json").world_size == 2
    return load_hardware(str(folder / "plan.learned.yaml"))


def test_plans_run_for_real_and_the_fastest_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(tmp_path)) == 0
    learned = check(json.loads(capsys.readouterr().out), tmp_path).learned
    assert learned is not None
    assert {"lookups", "exchanges", "dense", "host"} <= {f.group for f in learned.factors}


def test_on_the_ranks_of_torchrun(tmp_path: Path) -> None:
    done = torchrun(2, "-m", "shardopt", *words(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    learned = check(json.loads(done.stdout), tmp_path).learned  # one object, of one rank
    assert learned is not None
    assert any(e.what.endswith("rank 1") for e in learned.evidence)


SHARDERS = [EmbeddingBagCollectionSharder()]


class Batch(Pipelineable):
    """Ids of two features, and a label."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 100, (16,), generator=generator)
        self.features = torchrec.KeyedJaggedTensor.from_lengths_sync(
            ["fa", "fb"], ids, torch.ones(16, dtype=torch.long)
        )

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return self

    def record_stream(self, stream: Any) -> None:
        pass


class Loader:
    """Data loader whose iterators draw from the global generator, as PyTorch's do."""

    def __iter__(self) -> Any:
        seed = int(torch.empty((), dtype=torch.int64).random_(1000))
        return map(Batch, range(seed, seed + 40))


class Model(nn.Module):
    """Two tables, a layer, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            torchrec.EmbeddingBagConfig(
                name=name, embedding_dim=8, num_embeddings=100, feature_names=[f"f{name}"]
            )
            for name in "ab"
        ]
        self.ebc = torchrec.EmbeddingBagCollection(tables=tables)
        self.over = nn.Linear(16, 1)
        self.register_buffer("offset", torch.full((1,), 3.0))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.over(self.ebc(batch.features).values()) + self.offset
        assert float(self.offset) == 3.0
        return out.pow(2).mean(), out


class Watched(TrainPipelineBase):
    """Slow under column-wise tables; under replicated ones the second rank runs out of memory."""

    def __init__(self, model: Any, optimizer: Any, device: Any) -> None:
        super().__init__(model, optimizer, device)
        self.kind, self.steps = model.plan.plan["ebc"]["a"].sharding_type, 0

    def progress(self, batches: Any) -> Any:
        self.steps += 1
        if self.kind == "column_wise":
            time.sleep(0.02)
        if self.kind == "data_parallel" and self.steps == 5 and dist.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().progress(batches)


def plan_of(model: nn.Module, kind: str) -> Any:
    constraints = {
        name: ParameterConstraints(sharding_types=[kind], min_partition=4) for name in "ab"
    }
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=2, compute_device="cpu"), batch_size=8, constraints=constraints
    )
    return planner.plan(model, SHARDERS)


def shown(confirmation: Confirmation) -> dict[str, Any]:
    """What ``--json`` says of the measured plans."""
    keys = confirmation_keys(confirmation)
    plans = [MeasuredPlan.model_validate(plan).to_dict() for plan in keys["confirmed"]]
    return {"confirmed": plans, "measured_gain": keys["measured_gain"]}


def confirm_and_plan() -> dict[str, Any]:
    """A training script that confirms its plans first: beside a good one, one under which rank 1
    runs out of memory after some steps, and one that is slow. Then the planner does the same by
    itself."""
    model = Model()
    apply_optimizer_in_backward(torch.optim.SGD, model.ebc.parameters(), {"lr": 0.1})
    before = [weight.clone() for weight in model.parameters()]
    states = torch.get_rng_state()
    plans = {
        "torchrec": plan_of(model, "table_wise"),
        "slow": plan_of(model, "column_wise"),
        "large": plan_of(model, "data_parallel"),
    }
    how = Confirm(Loader(), pipeline=Watched, minutes=0.05, plans=2)
    confirmed = confirm(model, plans, how, sharders=SHARDERS)
    planner = ShardoptPlanner(
        topology=Topology(world_size=2, compute_device="cpu"),
        batch_size=8,
        default_pooling_factor=1.0,
        effort=0.05,
        debug=False,
        confirm=Confirm(Loader(), minutes=0.05, plans=2),
    )
    chosen = planner.collective_plan(model, SHARDERS)
    assert planner.confirmed is not None
    same = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    return {
        **shown(confirmed),
        "notes": confirmed.notes,
        "untouched": all(same) and torch.equal(states, torch.get_rng_state()),
        "planned": shown(planner.confirmed),
        "chosen": str(chosen),
        "best": str(planner.confirmed.best.plan),
    }


def test_in_a_training_script() -> None:
    """A plan under which a rank runs out of memory is out, and training begins as it would have."""
    confirmed, planned = on_ranks(confirm_and_plan)
    assert confirmed == planned
    measured = {row["plan"]: row["median_ms"] for row in confirmed["confirmed"]}
    assert measured["large"] is None
    assert 0 < measured["torchrec"] < measured["slow"]
    assert any("large is out: rank 1" in note for note in confirmed["notes"])
    assert confirmed["untouched"]
    assert confirmed["planned"]["measured_gain"]["value"] >= 0
    assert confirmed["chosen"] == confirmed["best"]

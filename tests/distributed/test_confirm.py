"""Plans confirmed on two gloo ranks: by the command, under torchrun, and in a training script."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from predictor.hardware.loader import load_hardware
from predictor.model.plan_json import load_plan
from shardopt.cli.app import main
from tests.distributed.ranks import REPOSITORY, run_ranks

MODEL = """
schema: 1
name: small
batch_size: 64
tables:
  - {name: a, num_embeddings: 4000, embedding_dim: 32, features: [{name: fa, pooling_factor: 8}]}
  - {name: b, num_embeddings: 900, embedding_dim: 32, features: [{name: fb, pooling_factor: 2}]}
dense: {in_features: 4, bottom_mlp: [32], interaction: dot, top_mlp: [16, 1]}
"""


@pytest.mark.slow
@pytest.mark.distributed
def test_plans_run_for_real_and_the_fastest_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torchrec")
    model, output = tmp_path / "model.yaml", tmp_path / "plan.json"
    model.write_text(MODEL)
    words = ["plan", str(model), "--gpus", "2", "--hardware", "cpu-gloo", "--effort", "0.1"]
    words += ["--no-cache", "--confirm", "1", "--minutes", "0.2", "-o", str(output), "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    measured = {one["plan"]: one["median_ms"] for one in found["confirmed"]}
    assert all(ms > 0 for ms in measured.values())
    assert found["measured_gain"]["value"] >= 0
    best = min(measured, key=lambda name: measured[name])
    by = next(one["found_by"] for one in found["confirmed"] if one["plan"] == best)
    assert found["plans"][0]["found_by"] == f"{by}, measured"
    assert load_plan(output).world_size == 2
    learned = load_hardware(str(tmp_path / "plan.learned.yaml")).learned
    assert learned is not None
    assert {"lookups", "exchanges", "dense", "host"} <= {f.group for f in learned.factors}


@pytest.mark.slow
@pytest.mark.distributed
def test_on_the_ranks_of_torchrun(tmp_path: Path) -> None:
    pytest.importorskip("torchrec")
    model, output = tmp_path / "model.yaml", tmp_path / "plan.json"
    model.write_text(MODEL)
    words = ["plan", str(model), "--gpus", "2", "--hardware", "cpu-gloo", "--effort", "0.1"]
    words += ["--no-cache", "--confirm", "1", "--minutes", "0.2", "-o", str(output), "--json"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, "-m", "shardopt", *words],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)  # of one rank alone
    assert all(one["median_ms"] > 0 for one in found["confirmed"])
    assert found["measured_gain"]["value"] >= 0
    assert load_plan(output).world_size == 2
    learned = load_hardware(str(tmp_path / "plan.learned.yaml")).learned
    assert learned is not None
    assert any(e.what.endswith("rank 1") for e in learned.evidence)


@pytest.mark.slow
@pytest.mark.distributed
def test_in_a_training_script(tmp_path: Path) -> None:
    """A plan under which a rank runs out of memory is out, and training begins as it would have."""
    pytest.importorskip("torchrec")
    run_ranks("confirm_worker", tmp_path)
    found = json.loads((tmp_path / "found.0.json").read_text())
    assert found == json.loads((tmp_path / "found.1.json").read_text())
    measured = {one["plan"]: one["median_ms"] for one in found["confirmed"]}
    assert measured["large"] is None
    assert 0 < measured["torchrec"] < measured["slow"]
    assert any("large is out: rank 1" in note for note in found["notes"])
    assert found["untouched"]
    assert found["planned"]["measured_gain"]["value"] >= 0
    assert found["chosen"] == found["best"]

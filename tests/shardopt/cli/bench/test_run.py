"""What `bench run` says of the profile that predicts its plans, before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardopt.bench import run as bench_run
from shardopt.calibrate import profile as profile_of
from shardopt.cli.app import main

MODEL = """
schema: 1
name: small
batch_size: 8
tables:
  - {name: t, num_embeddings: 1000, embedding_dim: 8, features: [{name: f, pooling_factor: 2}]}
dense: {in_features: 4, bottom_mlp: [8], top_mlp: [8, 1]}
"""


def test_a_profile_of_another_machine_and_runtime_is_told_in_a_line_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("fbgemm_gpu")
    model, plan = tmp_path / "model.yaml", tmp_path / "plan.json"
    profile = tmp_path / "mine.yaml"
    model.write_text(MODEL)
    profile.write_text(
        "base: cpu-gloo\nruntime: tuned\nverdict: {quality: usable, why: [it was loud]}\n"
    )
    words = [str(model), "--gpus", "2", "--hardware", str(profile)]
    assert main(["plan", *words, "-o", str(plan), "--effort", "0.01"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "hardware mine: its calibration is usable (it was loud)" in shown
    monkeypatch.setattr(bench_run, "run_bench", lambda *_, **__: None)
    monkeypatch.setattr(profile_of, "measured_on", lambda _: ("another machine",))
    assert main(["bench", "run", str(model), str(plan), *words[1:], "-o", str(tmp_path / "r")]) == 0
    lines = capsys.readouterr().err.splitlines()
    for said in ("was measured on", "measured in the tuned runtime", "its calibration is usable"):
        assert sum(said in line for line in lines) == 1, (said, lines)


def test_a_model_of_replica_groups_is_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("fbgemm_gpu")
    model, plan = tmp_path / "model.yaml", tmp_path / "plan.json"
    model.write_text(MODEL + "replica_groups: {size: 2, sync_interval: 10}\n")
    words = [str(model), "--gpus", "4", "--hardware", "cpu-gloo"]
    assert main(["plan", *words, "-o", str(plan), "--effort", "0.01"]) == 0
    assert main(["bench", "run", str(model), str(plan), "-o", str(tmp_path / "rows")]) == 2
    assert "has replica_groups" in " ".join(capsys.readouterr().err.split())

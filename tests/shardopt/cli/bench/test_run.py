"""Messages of `bench run` about its model and profile, before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardopt.bench import run as bench_run
from shardopt.calibrate import profile as profile_of

MODEL = """
schema: 1
name: small
batch_size: 8
tables:
  - {name: t, num_embeddings: 1000, embedding_dim: 8, features: [{name: f, pooling_factor: 2}]}
dense: {in_features: 4, bottom_mlp: [8], top_mlp: [8, 1]}
"""


def test_a_profile_of_another_machine_and_runtime_is_told_in_a_line_each(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fbgemm_gpu")
    (tmp_path / "model.yaml").write_text(MODEL)
    (tmp_path / "mine.yaml").write_text(
        "base: cpu-gloo\nruntime: tuned\nverdict: {quality: usable, why: [it was loud]}\n"
    )
    ranks = ("--gpus", 2, "--hardware", "mine.yaml")
    done = run("plan", "model.yaml", *ranks, "-o", "plan.json", "--effort", 0.01)
    assert done.code == 0, done.err
    assert "calibration is usable (it was loud)" in " ".join(done.out.split())
    monkeypatch.setattr(bench_run, "run_bench", lambda *_, **__: None)
    monkeypatch.setattr(profile_of, "measured_on", lambda _: ("another machine",))
    done = run("bench", "run", "model.yaml", "plan.json", *ranks, "-o", "rows")
    assert done.code == 0, done.err
    lines = done.err.splitlines()
    for words in ("was measured on", "tuned runtime", "calibration is usable"):
        assert sum(words in line for line in lines) == 1, (words, lines)


def test_a_model_of_replica_groups_is_not_run(run, refused, tmp_path: Path) -> None:
    pytest.importorskip("fbgemm_gpu")
    (tmp_path / "model.yaml").write_text(MODEL + "replica_groups: {size: 2, sync_interval: 10}\n")
    words = ("model.yaml", "--gpus", 4, "--hardware", "cpu-gloo", "--effort", 0.01)
    assert run("plan", *words, "-o", "plan.json").code == 0
    refused("bench", "run", "model.yaml", "plan.json", "-o", "rows", says="replica_groups")

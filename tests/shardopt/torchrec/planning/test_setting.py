"""The hook plans for windows of data that a model file names."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torchrec")

from torchrec.distributed.planner.types import PlannerError

from tests.shardopt.api.windows import write_window
from tests.shardopt.torchrec.hook_models import SHARDERS, Model, planner

FEATURE = "{{name: {0}_f0, pooling_factor: 2, index_distribution: {{files: [{1}]}}}}"
MODEL = """
schema: 1
batch_size: 512
tables:
  - {{name: a, num_embeddings: 100000, embedding_dim: 64, features: [{a}]}}
  - {{name: b, num_embeddings: 10000, embedding_dim: 64, features: [{b}]}}
dense: {{bottom_mlp: [64], top_mlp: [4, 1], interaction: concat, in_features: 4}}
"""


def write_model(folder: Path, *files: str) -> Path:
    lists = {name: FEATURE.format(name, ", ".join(files)) for name in ("a", "b")}
    path = folder / "m.yaml"
    path.write_text(MODEL.format(**lists))
    return path


def test_windows_of_a_model_file_are_scenarios(tmp_path: Path) -> None:
    for name, pooling in (("mon", 2.0), ("tue", 1e5)):
        write_window(tmp_path / f"{name}.npz", pooling, ("a_f0", "b_f0"), 10_000)
    model = write_model(tmp_path, "mon.npz", "tue.npz")
    made = planner(model=model, constraints=None, objective="regret", scenarios="none")
    made.plan(Model(), SHARDERS)
    assert made.found is not None
    assert made.found.result is not None
    mon, tue = made.found.result.scenarios
    assert (mon.name, tue.name) == ("mon", "tue")
    assert mon.ours_ms < tue.ours_ms
    assert made.found.result.aim == "regret"
    worst = made.found.result.worst_regret
    assert worst is not None
    assert 0 <= worst < 1


def test_one_window_is_none(tmp_path: Path) -> None:
    write_window(tmp_path / "mon.npz", 2.0, ("a_f0", "b_f0"), 10_000)
    with pytest.raises(PlannerError, match="two or more"):
        planner(model=write_model(tmp_path, "mon.npz"), constraints=None)

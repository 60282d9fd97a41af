"""A small model and a plan of it, and answers of searches that many tests look at."""

from pathlib import Path
from typing import Any

import pytest

MODEL = """\
schema: 1
name: small
batch_size: 32768
tables:
  - name: users
    num_embeddings: 200000
    embedding_dim: 64
    features:
      - {name: user, pooling_factor: 4, index_distribution: {zipf: {alpha: 1.05}}}
  - name: items
    num_embeddings: 50000
    embedding_dim: 64
    features:
      - {name: item, pooling_factor: 20, index_distribution: {zipf: {alpha: 1.05}}}
  - name: days
    num_embeddings: 7
    embedding_dim: 64
    features:
      - {name: day, pooling_factor: 1, index_distribution: uniform}
dense:
  in_features: 13
  bottom_mlp: [1024, 1024, 64]
  interaction: dot
  top_mlp: [2048, 2048, 1]
"""


def table(kind: str, kernel: str, *shards: tuple[int, list[int], list[int]]) -> dict[str, Any]:
    """A table of plan.json; of each shard rank, offset and size."""
    return {
        "sharding_type": kind,
        "compute_kernel": kernel,
        "shards": [{"rank": r, "offset": o, "size": s} for r, o, s in shards],
    }


def a_plan() -> dict[str, Any]:
    """A plan for the model on 2 ranks, as plan.json holds it."""
    halves = (0, [0, 0], [50000, 32]), (1, [0, 32], [50000, 32])
    return {
        "schema": "shardopt.plan/1",
        "hardware": "a100-80gb",
        "world_size": 2,
        "tables": {
            "users": table("table_wise", "fused", (0, [0, 0], [200000, 64])),
            "items": table("column_wise", "fused", *halves),
            "days": table("data_parallel", "dense", *((r, [0, 0], [7, 64]) for r in (0, 1))),
        },
    }


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of three tables, with enough work that the GPU and not the host sets the time."""
    path = tmp_path / "model.yaml"
    path.write_text(MODEL)
    return path


@pytest.fixture(scope="session")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an execution trace and a Kineto trace of a captured step, on one rank."""
    pytest.importorskip("torch")
    from tests.shardopt.replay.captured import capture, small_step

    return capture(small_step(), tmp_path_factory.mktemp("traces"))


@pytest.fixture
def kept_answers(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that tests share: what one searched is not searched again for others to look at."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "kept-answers"))

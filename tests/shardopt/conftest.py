"""A small model file, and answers of searches that many tests look at."""

from pathlib import Path

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


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of three tables, with enough work that the GPU and not the host sets the time."""
    path = tmp_path / "model.yaml"
    path.write_text(MODEL)
    return path


@pytest.fixture
def kept_answers(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that tests share: what one searched is not searched again for others to look at."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "kept-answers"))

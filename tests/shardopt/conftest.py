"""A small model file."""

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

"""A good model file, and helpers to break it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

GOOD = """\
schema: 1
name: small
batch_size: 8192
optimizer: exact_row_wise_adagrad
train_pipeline: base
qcomm: {forward: fp16, backward: fp32}
tables:
  - name: t_0
    num_embeddings: 40_000_000
    embedding_dim: 128
    features:
      - name: cat_0
        pooling_factor: 3.0
        index_distribution: {zipf: {alpha: 1.05, q: 2}}
        id_order: frequency
    constraints: {sharding_types: [table_wise, row_wise], compute_kernels: [fused], ranks: [0, 1],
                  min_partition: 32, cache_load_factor: 0.2, enforce_hbm: true, co_locate: a}
  - name: t_1
    module: seq
    num_embeddings: 4e5
    embedding_dim: 128
    data_type: fp16
    pooling: none
    optimizer: adam
    features:
      - {name: cat_1, pooling_factor: 2, num_poolings: 1, index_distribution: uniform}
      - name: cat_2
        pooling_factor: 1
        index_distribution: {reuse_histogram: {lookups: 100, fractions: [0.5, 0.5]}}
dense:
  in_features: 13
  bottom_mlp: [512, 128]
  interaction: dot
  top_mlp: [512, 1]
  data_type: tf32
  optimizer: adam
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Write text as model.yaml."""

    def _write(text: str, name: str = "model.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return _write


@pytest.fixture
def good() -> str:
    """Text of a model file without problems."""
    return GOOD

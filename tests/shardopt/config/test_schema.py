"""Keys of sequences: lengths that vary, and ids that are sent once."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from predictor.errors import InputError
from shardopt.config import load_model
from shardopt.config.write import model_text

MODEL = """schema: 1
batch_size: 64
tables:
  - name: history
    module: ec
    num_embeddings: 1000
    embedding_dim: 64
    pooling: none
    index_dedup: true
    features:
      - {name: f, pooling_factor: 50, pooling_factor_std: 75, index_distribution: uniform}
dense: {in_features: 13, bottom_mlp: [64], interaction: concat, top_mlp: [64, 1]}
"""


def test_they_are_read_and_written(write: Callable[[str], Path], tmp_path: Path) -> None:
    workload = load_model(write(MODEL))
    (table,) = workload.tables
    assert table.index_dedup
    assert table.features[0].pooling_factor_std == 75
    again = tmp_path / "again.yaml"
    again.write_text(model_text(workload))
    assert replace(load_model(again), sha256=workload.sha256) == workload


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("none", "sum", [":9", "index_dedup", "got True with pooling sum", "EmbeddingCollection"]),
        ("std: 75", "std: -1", [":11", "pooling_factor_std", "got -1", "at least 0"]),
        ("true", "maybe", [":9", "index_dedup", "got 'maybe'"]),
    ],
)
def test_problems_name_line_and_key(
    write: Callable[[str], Path], old: str, new: str, parts: list[str]
) -> None:
    with pytest.raises(InputError) as caught:
        load_model(write(MODEL.replace(old, new)))
    assert all(part in str(caught.value) for part in parts), str(caught.value)

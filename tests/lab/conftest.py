"""The commands of the laboratory, run in this process."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from lab.cli import main

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
  - name: goods
    num_embeddings: 50000
    embedding_dim: 64
    features:
      - {name: item, pooling_factor: 20, index_distribution: {zipf: {alpha: 1.05}}}
dense:
  in_features: 13
  bottom_mlp: [1024, 1024, 64]
  interaction: dot
  top_mlp: [2048, 2048, 1]
"""


class Done(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Done]:
    """Runs `python -m lab` with the given words in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def call(*words: object) -> Done:
        code = main([str(word) for word in words])
        return Done(code, *capsys.readouterr())

    return call


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model file of two tables."""
    path = tmp_path / "model.yaml"
    path.write_text(MODEL)
    return path

"""Models with generated benchmarks: transformers, convnets, DLRMs, MLPs (`models.yaml`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lab.transformers import TransformerShape


@dataclass(frozen=True)
class Convnet:
    """Residual blocks of two 3 x 3 convolutions, on square images."""

    channels: int
    blocks: int
    side: int
    images: int


@dataclass(frozen=True)
class Recommender:
    """DLRM under TorchRec; its tables are table-wise, dealt to the ranks in turn.

    Args:
        batch: samples of a rank.
        layers: widths of both MLPs, without the first and the last.
        rows: rows of the first table; each next one has 1,000 more.
        pooling: ids per sample and table.
    """

    batch: int
    tables: int
    width: int
    layers: tuple[int, ...]
    rows: int = 20_000
    pooling: float = 4.0
    ranks: int = 2


@dataclass(frozen=True)
class Perceptron:
    """Linear layers of one width, each with a ReLU after it."""

    width: int
    layers: int
    samples: int


Model = TransformerShape | Convnet | Recommender | Perceptron
KINDS: dict[str, Any] = {
    "transformer": TransformerShape,
    "convnet": Convnet,
    "recommender": Recommender,
    "perceptron": Perceptron,
}


def _read() -> dict[str, Model]:
    data = yaml.safe_load(Path(__file__).with_name("models.yaml").read_text(encoding="utf-8"))
    return {
        name: KINDS[kind](*(tuple(size) if isinstance(size, list) else size for size in sizes))
        for name, (kind, *sizes) in data.items()
    }


MODELS = _read()


def ranks_of(name: str) -> int:
    """Return the number of processes that train a model."""
    model = MODELS[name]
    return model.ranks if isinstance(model, Recommender) else 1


def needs_group(name: str) -> bool:
    """Return true if a model trains in a process group, of one rank or more."""
    return isinstance(MODELS[name], Recommender)

"""Models of which benchmarks are made: transformers, convnets, DLRMs, MLPs.

Steps of `NAMES` are held against their replays, and replays against predictions. Laws are fitted
on replays of `CALIBRATIONS`, which have other shapes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lab.transformers import TransformerShape
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.workload import DenseArch, Feature, Table, Workload
from shardopt.extras import needs_torchrec

with needs_torchrec():
    import torch
    from torch import nn

Step = Callable[[], None]


@dataclass(frozen=True)
class Convnet:
    """Residual blocks of two 3 x 3 convolutions, on square images."""

    channels: int
    blocks: int
    side: int
    images: int


@dataclass(frozen=True)
class Recommender:
    """A DLRM under TorchRec; its tables are table-wise, dealt out over the ranks.

    Args:
        batch: samples of a rank.
        layers: widths of both MLPs, without the first and the last.
        rows: of the first table; each next one has 1,000 more.
        pooling: ids of a sample and table.
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

ORIGINALS: dict[str, Model] = {
    "bert small": TransformerShape("bert", 2, 256, 4, 1024, 2000, 64, 4),
    "bert large": TransformerShape("bert", 6, 192, 6, 768, 3000, 64, 16),
    "gpt2 small": TransformerShape("gpt2", 2, 256, 4, 1024, 2000, 64, 4),
    "gpt2 large": TransformerShape("gpt2", 5, 256, 4, 1024, 3000, 96, 6),
    "xlnet small": TransformerShape("xlnet", 2, 256, 4, 512, 2000, 48, 4),
    "xlnet large": TransformerShape("xlnet", 4, 256, 8, 1024, 2000, 96, 4),
    "convnet small": Convnet(16, 2, 32, 8),
    "convnet wide": Convnet(64, 2, 32, 8),
    "convnet deep": Convnet(24, 6, 32, 8),
    "dlrm 2 ranks small": Recommender(512, 8, 32, (256, 128)),
    "dlrm 2 ranks wide": Recommender(1024, 8, 64, (512, 256)),
    "dlrm 2 ranks many tables": Recommender(1024, 20, 32, (256, 128)),
    "mlp": Perceptron(1024, 4, 256),
    "bert medium": TransformerShape("bert", 4, 384, 6, 1152, 1800, 48, 6),
    "gpt2 medium": TransformerShape("gpt2", 3, 384, 12, 1536, 2200, 56, 4),
    "convnet medium": Convnet(36, 4, 28, 10),
    "dlrm 1 rank": Recommender(640, 10, 32, (256, 128), 18_000, 3.0, ranks=1),
    "dlrm 2 ranks middle": Recommender(896, 12, 56, (384, 192), 16_000, 5.0),
    "mlp narrow": Perceptron(640, 5, 320),
}
CALIBRATIONS: dict[str, Model] = {
    "bert a": TransformerShape("bert", 1, 128, 2, 512, 1000, 32, 8),
    "bert b": TransformerShape("bert", 3, 320, 5, 960, 1600, 80, 5),
    "bert c": TransformerShape("bert", 2, 448, 7, 1344, 2500, 112, 2),
    "gpt2 a": TransformerShape("gpt2", 1, 192, 3, 768, 1200, 40, 6),
    "gpt2 b": TransformerShape("gpt2", 3, 320, 10, 1280, 2400, 72, 5),
    "gpt2 c": TransformerShape("gpt2", 2, 512, 8, 1536, 1500, 128, 2),
    "xlnet a": TransformerShape("xlnet", 1, 128, 4, 384, 900, 32, 6),
    "xlnet b": TransformerShape("xlnet", 3, 320, 5, 960, 2400, 80, 5),
    "xlnet c": TransformerShape("xlnet", 2, 384, 6, 1536, 1400, 64, 4),
    "convnet a": Convnet(8, 1, 24, 6),
    "convnet b": Convnet(12, 3, 20, 16),
    "convnet c": Convnet(20, 2, 40, 4),
    "convnet d": Convnet(32, 3, 16, 12),
    "convnet e": Convnet(48, 1, 28, 8),
    "convnet f": Convnet(80, 2, 20, 6),
    "convnet g": Convnet(32, 2, 48, 3),
    "convnet h": Convnet(96, 1, 16, 10),
    "convnet i": Convnet(16, 2, 24, 12),
    "convnet j": Convnet(28, 2, 36, 6),
    "convnet k": Convnet(40, 2, 24, 8),
    "convnet l": Convnet(56, 1, 32, 6),
    "mlp a": Perceptron(512, 3, 128),
    "mlp b": Perceptron(768, 6, 384),
    "mlp c": Perceptron(1536, 2, 192),
    "dlrm 1 rank a": Recommender(384, 6, 48, (192, 96), 15_000, 3.0, ranks=1),
    "dlrm 1 rank b": Recommender(1024, 12, 24, (512, 128), 30_000, 2.0, ranks=1),
    "dlrm 1 rank c": Recommender(1536, 8, 16, (384, 192), 10_000, 6.0, ranks=1),
    "dlrm 1 rank d": Recommender(512, 5, 96, (256, 64), 25_000, 4.0, ranks=1),
    "dlrm 2 ranks a": Recommender(384, 6, 48, (192, 96), 15_000, 3.0),
    "dlrm 2 ranks b": Recommender(768, 12, 80, (512, 128), 30_000, 2.0),
    "dlrm 2 ranks c": Recommender(1536, 10, 16, (384, 192), 8_000, 8.0),
    "dlrm 2 ranks d": Recommender(640, 16, 24, (256, 64), 25_000, 5.0),
    "dlrm 2 ranks e": Recommender(512, 4, 128, (320,), 40_000, 6.0),
    "dlrm 2 ranks f": Recommender(1280, 14, 40, (128, 64), 12_000, 4.0),
}
NAMES = tuple(ORIGINALS)
MODELS = ORIGINALS | CALIBRATIONS


def ranks_of(name: str) -> int:
    """Processes that a model is trained on."""
    model = MODELS[name]
    return model.ranks if isinstance(model, Recommender) else 1


def needs_group(name: str) -> bool:
    """Whether a model is trained in a process group, of one rank or more."""
    return isinstance(MODELS[name], Recommender)


def original(name: str, rank: int) -> Step:
    """One training step at a call."""
    model = MODELS[name]
    if isinstance(model, TransformerShape):
        from lab.replay.transformers import Training

        return Training(model).step
    if isinstance(model, Recommender):
        return _recommender(model, rank)
    torch.manual_seed(0)
    if isinstance(model, Convnet):
        images = torch.randn(model.images, 3, model.side, model.side)
        return _training_step(_convnet(model.channels, model.blocks), images)
    width = model.width
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(model.layers)]
    stack = nn.Sequential(*layers, nn.Linear(width, 10))
    return _training_step(stack, torch.randn(model.samples, width))


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Any) -> Any:
        return nn.functional.relu(x + self.inner(x))


def _convnet(channels: int, depth: int) -> nn.Module:
    blocks = [_Residual(channels) for _ in range(depth)]
    stem = [nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]
    head = [nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * channels, 10)]
    return nn.Sequential(*stem, *blocks, *head)


def _training_step(model: nn.Module, x: Any) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    labels = torch.randint(10, (len(x),))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()

    return step


def _recommender(model: Recommender, rank: int) -> Step:
    from shardopt.training.batch import batch_ring
    from shardopt.training.loop import Training

    tables = tuple(
        Table(f"t{i}", model.rows + 1000 * i, model.width, (Feature(f"f{i}", model.pooling),))
        for i in range(model.tables)
    )
    dense = DenseArch(13, (*model.layers, model.width), (*model.layers, 1))
    load = Workload("dlrm", model.batch, tables, dense)
    plan = ShardingPlan(
        {
            key: TablePlan(
                ShardingType.TABLE_WISE,
                ComputeKernel.FUSED,
                (Shard(i % model.ranks, (0, 0), (table.num_embeddings, model.width)),),
                table.module,
            )
            for i, (key, table) in enumerate(zip(load.keys, tables, strict=True))
        },
        model.ranks,
        model.ranks,
    )
    ring = list(itertools.islice(batch_ring(load, seed=0, rank=rank), 1))
    return Training(load, plan, torch.device("cpu"), ring).step

"""Models whose steps are held against their replays: transformers, convnets, DLRMs, an MLP."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from predictor.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.transformer import TransformerShape
from predictor.workload import DenseArch, Feature, Table, Workload
from shardopt.torchrec.install import needs_torchrec

with needs_torchrec():
    import torch
    from torch import nn

Step = Callable[[], None]

TRANSFORMERS = {
    "bert small": TransformerShape("bert", 2, 256, 4, 1024, 2000, 64, 4),
    "bert large": TransformerShape("bert", 6, 192, 6, 768, 3000, 64, 16),
    "gpt2 small": TransformerShape("gpt2", 2, 256, 4, 1024, 2000, 64, 4),
    "gpt2 large": TransformerShape("gpt2", 5, 256, 4, 1024, 3000, 96, 6),
    "xlnet small": TransformerShape("xlnet", 2, 256, 4, 512, 2000, 48, 4),
    "xlnet large": TransformerShape("xlnet", 4, 256, 8, 1024, 2000, 96, 4),
}
CONVNETS = {
    "convnet small": (16, 2, 32, 8),
    "convnet wide": (64, 2, 32, 8),
    "convnet deep": (24, 6, 32, 8),
}
"""Channels, blocks, side of an image, images."""
RECOMMENDERS = {
    "dlrm 2 ranks small": (512, 8, 32, (256, 128)),
    "dlrm 2 ranks wide": (1024, 8, 64, (512, 256)),
    "dlrm 2 ranks many tables": (1024, 20, 32, (256, 128)),
}
"""Samples of a rank, tables, width, layers of an MLP."""
MULTILAYER = {"mlp": (1024, 4, 256)}
"""Width, layers, samples."""
NAMES = (*TRANSFORMERS, *CONVNETS, *RECOMMENDERS, *MULTILAYER)


def ranks_of(name: str) -> int:
    """Processes that a model is trained on."""
    return 2 if name in RECOMMENDERS else 1


def original(name: str, rank: int) -> Step:
    """One training step at a call."""
    if name in TRANSFORMERS:
        from shardopt.bench.transformers_models import Training

        return Training(TRANSFORMERS[name]).step
    if name in RECOMMENDERS:
        return _recommender(name, rank)
    torch.manual_seed(0)
    if name in MULTILAYER:
        width, layers, samples = MULTILAYER[name]
        blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
        return _trained(nn.Sequential(*blocks, nn.Linear(width, 10)), torch.randn(samples, width))
    channels, depth, side, images = CONVNETS[name]
    return _trained(_convnet(channels, depth), torch.randn(images, 3, side, side))


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


def _trained(model: nn.Module, x: Any) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    labels = torch.randint(10, (len(x),))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()

    return step


def _recommender(name: str, rank: int) -> Step:
    from shardopt.torchrec.batch import batch_ring
    from shardopt.torchrec.training import Training

    batch, count, width, layers = RECOMMENDERS[name]
    tables = tuple(
        Table(f"t{i}", 20_000 + 1000 * i, width, (Feature(f"f{i}", 4.0),)) for i in range(count)
    )
    dense = DenseArch(13, (*layers, width), (*layers, 1))
    load = Workload("dlrm", batch, tables, dense)
    plan = ShardingPlan(
        {
            key: TablePlan(
                ShardingType.TABLE_WISE,
                ComputeKernel.FUSED,
                (Shard(i % 2, (0, 0), (table.num_embeddings, width)),),
                table.module,
            )
            for i, (key, table) in enumerate(zip(load.keys, tables, strict=True))
        },
        2,
        2,
    )
    ring = list(itertools.islice(batch_ring(load, seed=0, rank=rank), 1))
    return Training(load, plan, torch.device("cpu"), ring).step

"""Training steps of the models with generated benchmarks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from lab.replay import transformers
from lab.replay.models import MODELS, Convnet, Recommender
from lab.tasks.plans import table_wise
from lab.transformers import TransformerShape
from predictor.model.plan import ShardingPlan
from predictor.model.workload import DenseArch, Feature, Table, Workload
from shardopt.extras import needs_torchrec

with needs_torchrec():
    import torch
    from torch import nn

from shardopt.training.batch import batch_ring
from shardopt.training.loop import Training

Step = Callable[[], None]


def original(name: str, rank: int) -> Step:
    """Return a function that runs one training step."""
    model = MODELS[name]
    if isinstance(model, TransformerShape):
        return transformers.Training(model).step
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
    tables = tuple(
        Table(f"t{i}", model.rows + 1000 * i, model.width, (Feature(f"f{i}", model.pooling),))
        for i in range(model.tables)
    )
    dense = DenseArch(13, (*model.layers, model.width), (*model.layers, 1))
    load = Workload("dlrm", model.batch, tables, dense)
    dealt = [table_wise(table, i % model.ranks) for i, table in enumerate(tables)]
    plan = ShardingPlan(dict(zip(load.keys, dealt, strict=True)), model.ranks, model.ranks)
    ring = list(itertools.islice(batch_ring(load, seed=0, rank=rank), 1))
    return Training(load, plan, torch.device("cpu"), ring).step

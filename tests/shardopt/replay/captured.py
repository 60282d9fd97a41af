"""Captures a small model's training step as an execution trace, in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from predictor.trace.read import load_traces
from shardopt.replay.generate import program_of
from shardopt.replay.program.build import Annotations
from shardopt.replay.program.program import RankProgram
from shardopt.replay.runtime.capture import capture as capture_step

SECRETS = ("/srv/alice/models", "alice", "node17.corp.example", "secret_project_x", "4815162342")


class Small(nn.Module):
    """Convolution, normalisation, pooling, dropout and an embedding bag."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3, padding=1)
        self.norm, self.pool = nn.BatchNorm2d(4), nn.MaxPool2d(2)
        self.out, self.dropout = nn.Linear(4 * 16, 5), nn.Dropout(0.1)
        self.bag = nn.EmbeddingBag(50, 5, mode="sum")

    def forward(self, image: torch.Tensor, ids: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        x = self.pool(torch.relu(self.norm(self.convolution(image))))
        with record_function(SECRETS[3]):
            x = self.dropout(self.out(x.flatten(1)))
        return x + self.bag(ids, starts)


def small_step() -> Callable[[], None]:
    """Forward, backward and Adam."""
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.Adam(model.parameters())
    images, labels = torch.randn(2, 3, 8, 8), torch.tensor([3, 1])
    ids, starts = torch.tensor([7, 3, 44, 44, 2]), torch.tensor([0, 2])

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images, ids, starts), labels).backward()
        optimizer.step()

    return step


def transformer_step(family: str = "bert", batch: int = 2) -> Callable[[], None]:
    """Return a step of one layer of 32, on sequences of 8; all widths are multiples of 4."""
    from lab.replay.transformers import Training
    from lab.transformers import TransformerShape

    return Training(TransformerShape(family, 1, 32, 2, 64, 50, 8, batch)).step


def capture(step: Callable[[], None], folder: Path, warm_up: int = 2, rank: int = 0) -> Path:
    """The folder with a step's execution trace and Kineto trace."""
    for _ in range(warm_up):
        step()
    capture_step(step, folder, rank)
    return folder


def edited(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """An execution trace with something changed in its nodes, beside the first."""
    data = json.loads(path.read_text())
    for node in data["nodes"]:
        change(node)
    changed = path.parent / "edited" / "rank0.et.json"
    changed.parent.mkdir(exist_ok=True)
    changed.write_text(json.dumps(data))
    return changed


def attribute(node: dict[str, Any], name: str) -> dict[str, Any]:
    """The attribute of a node, to be changed."""
    attr: dict[str, Any] = next(a for a in node["attrs"] if a["name"] == name)
    return attr


def program(path: Path) -> RankProgram:
    """Return the program that a benchmark of one rank is generated from."""
    traces = load_traces([path])
    return program_of(traces.executions[0], traces, Annotations())


def step_of(batch: int, *, squared: bool = False) -> Callable[[], None]:
    """A step at a batch; 4 channels and sides of 8 are numbers of samples as well.

    Args:
        squared: the loss is a mean over all pairs of samples.
    """
    model = Small()
    optimizer = torch.optim.Adam(model.parameters())
    images, labels = torch.randn(batch, 3, 8, 8), torch.arange(batch) % 5
    ids, starts = torch.arange(3 * batch) % 50, torch.arange(0, 3 * batch, 3)

    def step() -> None:
        optimizer.zero_grad()
        out = model(images, ids, starts)
        pairs = out @ out.t()
        alike = pairs.mean() if squared else pairs.sum()
        (nn.functional.cross_entropy(out, labels) + alike).backward()
        optimizer.step()

    return step

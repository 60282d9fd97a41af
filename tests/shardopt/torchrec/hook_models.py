"""Small modules, constraints and planners that the tests of the hook share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn
from unittest.mock import patch

import pytest
import torch
import torchrec
from torch import nn
from torch.nn import functional
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.types import PlanLoader, ShardingOption
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from predictor.units import GIB
from search.problem import Problem
from shardopt.torchrec import ShardoptPlanner, planning

EFFORT = 0.005


def bag(name: str, rows: int = 10_000, dim: int = 64, features: int = 1) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name,
        num_embeddings=rows,
        embedding_dim=dim,
        feature_names=[f"{name}_f{i}" for i in range(features)],
    )


class Model(nn.Module):
    """Two tables and an over arch of two layers."""

    def __init__(self, *bags: EmbeddingBagConfig, **more: Any) -> None:
        super().__init__()
        tables = list(bags) or [bag("a", 100_000), bag("b")]
        self.ebc = torchrec.EmbeddingBagCollection(
            tables=tables, device=torch.device("meta"), **more
        )
        self.over = nn.Sequential(nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """Logits, of as many columns of the embeddings as the first layer takes."""
        pooled, width = self.ebc(sparse).values(), self.over[0].in_features
        pooled = functional.pad(pooled, (0, max(0, width - pooled.shape[1])))
        logits: torch.Tensor = self.over(pooled[:, :width])
        return logits


def sequences(*names: str) -> torchrec.EmbeddingCollection:
    """Tables without pooling."""
    tables = [
        EmbeddingConfig(
            name=name, num_embeddings=1000, embedding_dim=64, feature_names=[f"{name}_f0"]
        )
        for name in names
    ]
    return torchrec.EmbeddingCollection(tables=tables, device=torch.device("meta"))


def holding(module: nn.Module) -> nn.Module:
    """A module that has another one as ``x``."""
    return nn.ModuleDict({"x": module})


def factors(**values: float) -> dict[str, ParameterConstraints]:
    return {name: ParameterConstraints(pooling_factors=[value]) for name, value in values.items()}


def topology(world: int = 4, hbm: int = 16 * GIB, **more: Any) -> Topology:
    return Topology(world_size=world, compute_device="cuda", hbm_cap=hbm, **more)


def planner(**more: Any) -> ShardoptPlanner:
    arguments = {
        "topology": topology(),
        "batch_size": 512,
        "hardware": "a100-80gb",
        "constraints": factors(a=20.0, b=2.0),
        "effort": EFFORT,
        "debug": False,
    }
    return ShardoptPlanner(**{**arguments, **more})


SHARDERS = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]


class Offering(EmbeddingBagCollectionSharder):
    """Offers what it is told to, whatever the device."""

    def __init__(self, **kernels_of: list[str]) -> None:
        super().__init__()
        self.kernels_of = kernels_of

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return list(self.kernels_of)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return self.kernels_of[sharding_type]


class Kept(PlanLoader):
    """A plan of before, and the hash of what it was for."""

    def __init__(self, options: dict[int, ShardingOption] | None, key: str) -> None:
        self.options, self.key = options, key

    def load(self) -> dict[int, ShardingOption] | None:
        return self.options

    def plan_context_hash(self) -> str:
        return self.key

    def get_plan_id(self) -> str:
        return "kept"


class NotSearchedError(BaseException):
    """Ends a plan where its search would begin; no planner falls back on it."""


def problem_of(hook: ShardoptPlanner, model: nn.Module, sharders: Sequence[Any] = SHARDERS) -> Any:
    """Return the problem that a planner would search; reading a module needs no search."""
    problems: list[Problem] = []

    def ask(problem: Problem, *_: Any, **__: Any) -> NoReturn:
        problems.append(problem)
        raise NotSearchedError

    with patch.object(planning, "find_plans", ask), pytest.raises(NotSearchedError):
        hook.plan(model, list(sharders))
    (problem,) = problems
    return problem


def workload_of(module: nn.Module, sharders: Sequence[Any] = SHARDERS, /, **more: Any) -> Any:
    """Return the workload that a planner reads from a module."""
    return problem_of(planner(**more), module, sharders).workload

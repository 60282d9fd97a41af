"""Which options of TorchRec's a plan may hold: those that run, and train as its own plan does."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.embedding_tower_sharding import EmbeddingTowerCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

from shardopt.torchrec import ShardoptPlanner
from tests.quick import quick_first
from tests.shardopt.torchrec.hook_models import (
    EFFORT,
    SHARDERS,
    Model,
    bag,
    factors,
    holding,
    sequences,
)
from tests.shardopt.torchrec.left_modules import towers

META = torch.device("meta")


def small() -> nn.Module:
    return Model(bag("a", 1000), bag("b", 1000))


def with_towers() -> nn.Module:
    ebc = Model(bag("c", 1000), bag("d", 1000)).ebc
    return nn.ModuleDict({"ebc": ebc, "towers": towers()})


def fused() -> nn.Module:
    tables = [bag("a", 1000), bag("b", 1000)]
    return holding(FusedEmbeddingBagCollection(tables, torch.optim.SGD, {"lr": 0.1}, device=META))


def unpooled() -> nn.Module:
    return holding(sequences("a"))


def kernels(plan: Any) -> dict[str, str]:
    return {
        name: of_table.compute_kernel
        for of_module in plan.plan.values()
        for name, of_table in of_module.items()
    }


def plans_of(module: nn.Module, sharders: list[Any], batch: int, **more: Any) -> Any:
    """TorchRec's and ours."""
    arguments = {"topology": Topology(2, "cuda"), "batch_size": batch, "debug": False, **more}
    ours = ShardoptPlanner(**arguments, effort=EFFORT, default_pooling_factor=1.0)
    return EmbeddingShardingPlanner(**arguments).plan(module, sharders), ours.plan(module, sharders)


@pytest.mark.parametrize(
    ("make", "device"), quick_first(1, product([small, with_towers, unpooled], ["cuda", "cpu"]))
)
def test_no_table_leaves_the_optimizer_of_its_backward(make: Any, device: str) -> None:
    """The search would replicate all of them: that is fewer launches, and other training."""
    for sharders in (
        get_default_sharders(),
        [*get_default_sharders(), EmbeddingTowerCollectionSharder()],
    ):
        torchrec_plan, ours = plans_of(make(), sharders, 64, topology=Topology(2, device))
        assert kernels(ours) == kernels(torchrec_plan)
        assert "dense" not in kernels(ours).values()


def test_a_table_that_torchrec_replicates_stays_with_the_dense_optimizer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Model(bag("a", 10), bag("b", 100_000), bag("c", 100_000))
    torchrec_plan, ours = plans_of(model, SHARDERS, 8192)
    assert kernels(ours) == kernels(torchrec_plan) == {"a": "dense", "b": "fused", "c": "fused"}
    (message,) = [r.getMessage() for r in caplog.records if "dense optimizer" in r.getMessage()]
    assert "'ebc.a'" in message
    assert "'ebc.b'" not in message


@pytest.mark.parametrize(
    "fields", [{"sharding_types": ["data_parallel", "table_wise"]}, {"compute_kernels": ["dense"]}]
)
def test_a_constraint_may_ask_for_it(fields: dict[str, list[str]]) -> None:
    constraints = factors(a=1.0)
    for name, value in fields.items():
        setattr(constraints["a"], name, value)
    _, ours = plans_of(Model(bag("a", 1000)), SHARDERS, 64, constraints=constraints)
    assert kernels(ours) == {"a": "dense"}


def test_a_module_with_its_own_optimizer_keeps_it_replicated_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, ours = plans_of(fused(), get_default_sharders(), 64)
    assert set(kernels(ours).values()) == {"dense"}
    (message,) = [r.getMessage() for r in caplog.records if "dense kernel" in r.getMessage()]
    assert all(name in message for name in kernels(ours))
    assert "optimizer of their own" in message


@pytest.mark.parametrize("ranks", [{}, {"world_size": 12, "local_world_size": 8}])
def test_what_cannot_run_is_not_planned_either_where_torchrec_places_it(ranks: Any) -> None:
    """TorchRec cannot replicate a table of a fused module on CPUs; 12 ranks are left to it."""
    arguments = {"world_size": 2, "compute_device": "cpu", **ranks}
    _, ours = plans_of(fused(), get_default_sharders(), 100_000, topology=Topology(**arguments))
    assert set(kernels(ours).values()) == {"fused"}

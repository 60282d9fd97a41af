"""The baseline against TorchRec's real planner, and the reservation against its real one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

pytest.importorskip("torchrec")

import torch
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
    HeuristicalStorageReservation,
)
from torchrec.distributed.planner.types import PlannerError, ShardingOption

from lab.planners.reservation import reserve_topology
from predictor.model.topology import Topology
from predictor.model.workload import DcnV2, Workload
from predictor.units import GIB
from search.baselines.torchrec_planner import torchrec_plan
from tests.quick import quick_only
from tests.torchrec_parity import modules

# HBM in GiB that makes the planner move: all fits, or some tables have to go elsewhere
CASES = [
    (modules.dlrm_dcnv2, 8, 80),
    (modules.dlrm_dcnv2, 8, 24),
    (modules.dlrm_dcnv2, 16, 32),
    (modules.criteo_kaggle, 2, 16),
    (modules.criteo_kaggle, 8, 1),
    (modules.rm_like, 8, 4),
    (modules.rm_like, 16, 2),
    (modules.mixed, 2, 80),
    (modules.mixed, 16, 1),
    (modules.constrained, 8, 1),
    (modules.constrained, 16, 1),
    (modules.unpooled, 2, 40),
    (modules.unpooled, 8, 4),
    (modules.weighted, 8, 4),
    (modules.weighted, 16, 4),
]


def torchrec_answer(
    workload: Workload, topology: Topology
) -> tuple[dict[str, ShardingOption], float]:
    """The chosen options and the rating of the real planner."""
    theirs = modules.torchrec_topology(topology)
    planner = EmbeddingShardingPlanner(
        topology=theirs,
        batch_size=workload.batch_size,
        constraints=modules.constraints(workload),
        storage_reservation=FixedPercentageStorageReservation(0.0),
        stats=NoopEmbeddingStats(),
        debug=False,
    )
    planner.plan(modules.build(workload), modules.sharders())
    best = planner._best_plan
    assert best is not None
    return {o.name: o for o in best}, NoopPerfModel(theirs).rate(best)


@pytest.mark.parametrize(
    ("model", "world", "gib"),
    quick_only([(modules.mixed, 16, 1), (modules.constrained, 16, 1)], CASES),
    ids=[f"{m.__name__}-{w}-{g}" for m, w, g in CASES],
)
def test_same_plan_as_torchrecs_planner(
    model: Callable[[], Workload], world: int, gib: int
) -> None:
    workload, topology = model(), modules.topology(world, hbm=gib * GIB)
    theirs, rating = torchrec_answer(workload, topology)
    ours = torchrec_plan(workload, topology)
    assert ours is not None
    assert ours.rating_ms == pytest.approx(rating, rel=1e-9)
    for table, plan in zip(workload.tables, ours.tables, strict=True):
        real = theirs[table.name]
        assert (plan.sharding_type, plan.compute_kernel) == (
            real.sharding_type,
            real.compute_kernel,
        )
        assert plan.ranks == tuple(s.rank for s in real.shards)
        assert [s.size for s in plan.shards] == [tuple(s.size) for s in real.shards]


def test_no_plan_where_torchrec_finds_none() -> None:
    workload = modules.rm_like()
    only_fused = replace(
        workload,
        tables=tuple(
            replace(t, constraints=replace(t.constraints, compute_kernels=("fused",)))
            for t in workload.tables
        ),
    )
    topology = modules.topology(8, hbm=GIB)
    with pytest.raises(PlannerError):
        torchrec_answer(only_fused, topology)
    assert torchrec_plan(only_fused, topology) is None


class Dense(nn.Module):
    """The dense part of a workload with DCNv2, parameter by parameter."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        dense = workload.dense
        assert isinstance(dense.interaction, DcnV2)
        width = dense.bottom_mlp[-1] + sum(t.embedding_dim for t in workload.tables)
        rank = dense.interaction.low_rank_dim
        for dims in ((dense.in_features, *dense.bottom_mlp), (width, *dense.top_mlp)):
            for i, o in pairwise(dims):
                self.append(nn.Linear(i, o, device="meta"))
        for _ in range(dense.interaction.layers):
            self.append(nn.Linear(width, rank, bias=False, device="meta"))
            self.append(nn.Linear(rank, width, device="meta"))

    def append(self, module: nn.Module) -> None:
        self.add_module(f"m{len(list(self.children()))}", module)


@pytest.mark.parametrize("model", [modules.dlrm_dcnv2, modules.criteo_kaggle, modules.unpooled])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_same_reservation(model: Callable[[], Workload], device: str) -> None:
    workload, topology = model(), modules.topology(8)
    if workload.name == "unpooled":
        tables = tuple(replace(t, features=t.features[:1]) for t in workload.tables)
        workload = replace(workload, tables=tables)
    module = modules.build(workload)
    module.add_module("dense", Dense(workload))
    assert all(p.device == torch.device("meta") for p in module.parameters())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "HeuristicalStorageReservation is known", FutureWarning)
        left = HeuristicalStorageReservation(percentage=0.15).reserve(
            modules.torchrec_topology(topology, device),
            workload.batch_size,
            module,
            modules.sharders(),
            modules.constraints(workload),
        )
    ours = reserve_topology(workload, topology, 0.15, device)
    storage = left.devices[0].storage
    if device == "cuda":
        assert ours.hbm_cap_bytes[0] == storage.hbm
    assert ours.ddr_cap_bytes[0] == storage.ddr

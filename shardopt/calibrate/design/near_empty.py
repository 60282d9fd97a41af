"""Models with next to no data: what their iterations take is the host's work and its waiting.

Pure: a fit rebuilds model and plan from the params of a row.
"""

from __future__ import annotations

from typing import Any

from predictor.hardware.schema import HardwareProfile
from predictor.iteration.plan_scorer import PlanScorer
from predictor.model.plan import (
    ComputeKernel,
    Shard,
    ShardingPlan,
    ShardingType,
    TablePlan,
    TablePlans,
)
from predictor.model.plan_check import match_plan, row_blocks
from predictor.model.topology import Topology
from predictor.model.workload import DenseArch, Feature, Table, Workload
from shardopt.calibrate.design.points import Point

ROWS, NARROW, WIDE = 64, 4, 8
"""Column-wise tables are wide, and each half as narrow as FBGEMM's fused kernels allow."""
BATCH = 8
"""Samples a rank."""
DEEPER = 8
"""Layers more in the top MLP, to tell what a dense layer takes."""
PLANS = ("dp", "tw", "rw", "cw", "tw+rw", "tw+dp", "tw+rw+cw", "tw+rw+cw+dp")
MANY = ("tw", "rw")
PREFETCHED = ("tw", "tw+rw+dp")
TABLES, MANY_TABLES = 8, 24


def iteration_points(ranks: int, **among: Any) -> list[Point]:
    """Every sharding type alone and with others, more tables, more layers, another pipeline.

    Args:
        among: further params of every point.
    """

    def point(plan: str, tables: int = TABLES, layers: int = 0, pipeline: str = "base") -> Point:
        shape = {"plan": plan, "tables": tables, "layers": layers, "pipeline": pipeline}
        return Point("iteration", {**shape, "ranks": ranks, **among})

    return [
        *(point(plan) for plan in PLANS),
        *(point(plan, tables=MANY_TABLES) for plan in MANY),
        *(point(plan, layers=DEEPER) for plan in ("dp", "tw")),
        *(point(plan, pipeline="sparse_dist") for plan in PREFETCHED),
    ]


def batch_of(
    workload: Workload, plan: ShardingPlan, profile: HardwareProfile
) -> tuple[PlanScorer, TablePlans]:
    """What predicts an iteration of a model and plan on a device, and the plan as it takes it."""
    topology = Topology.uniform(
        plan.world_size,
        plan.local_world_size,
        hbm_bytes=profile.hbm_bytes,
        ddr_bytes=profile.ddr_bytes,
    )
    batch = PlanScorer(workload, topology, profile)
    return batch, match_plan(workload, topology, plan)


def near_empty(params: dict[str, Any]) -> tuple[Workload, ShardingPlan]:
    """Model and plan of an iteration point; the types of its plan take tables in turn."""
    types = params["plan"].split("+")
    kinds = [types[i % len(types)] for i in range(params["tables"])]
    ranks = params["ranks"]
    tables = tuple(
        Table(
            name=f"t{i}",
            num_embeddings=ROWS,
            embedding_dim=WIDE if kind == "cw" else NARROW,
            features=(Feature(f"f{i}", pooling_factor=1.0),),
        )
        for i, kind in enumerate(kinds)
    )
    dense = DenseArch(
        in_features=WIDE,
        bottom_mlp=(WIDE, NARROW),
        top_mlp=(*[WIDE] * params["layers"], WIDE, 1),
        interaction="concat",
    )
    workload = Workload("near empty", BATCH, tables, dense, train_pipeline=params["pipeline"])
    plans = {
        table.name: _table_plan(kind, i // len(types), ranks)
        for i, (kind, table) in enumerate(zip(kinds, tables, strict=True))
    }
    # ranks joined by a link are hosts of their own
    local = 1 if "link_gbit_s" in params else ranks // params.get("hosts", 1)
    return workload, ShardingPlan(plans, ranks, local)


def _table_plan(kind: str, index: int, ranks: int) -> TablePlan:
    """The plan of the table that is number ``index`` of its type."""
    fused, first = ComputeKernel.FUSED, index % ranks
    if kind == "tw":
        shard = Shard(first, (0, 0), (ROWS, NARROW))
        return TablePlan(ShardingType.TABLE_WISE, fused, (shard,))
    if kind == "cw":
        owners = (first, (first + 1) % ranks)
        halves = (Shard(r, (0, c * NARROW), (ROWS, NARROW)) for c, r in enumerate(owners))
        return TablePlan(ShardingType.COLUMN_WISE, fused, tuple(halves))
    if kind == "rw":
        blocks = enumerate(row_blocks(ROWS, ranks))
        rows = (Shard(r, (start, 0), (size, NARROW)) for r, (start, size) in blocks)
        return TablePlan(ShardingType.ROW_WISE, fused, tuple(rows))
    copies = (Shard(r, (0, 0), (ROWS, NARROW)) for r in range(ranks))
    return TablePlan(ShardingType.DATA_PARALLEL, ComputeKernel.DENSE, tuple(copies))

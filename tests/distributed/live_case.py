"""A job whose data drift: two tables of rank 0 become much hotter than those of rank 1."""

from dataclasses import replace

from predictor.model.distribution import Zipf
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.workload import DenseArch, Feature, Table, Workload

EVERY, STEPS = 6, 18
GROWTH = 12.0
RANKS = (0, 0, 1, 1)


def workload(*, rows: int = 5000, batch: int = 256) -> Workload:
    """Four tables alike."""
    tables = tuple(
        Table(f"t{i}", rows, 32, (Feature(f"f{i}", 3.0, distribution=Zipf(1.05)),))
        for i in range(len(RANKS))
    )
    return Workload("drifting", batch, tables, DenseArch(4, (32,), (16, 1), "dot"))


def drifted(load: Workload) -> Workload:
    """The same model, when the ids of the tables of rank 0 have become many more."""
    tables = [
        replace(table, features=(replace(table.features[0], pooling_factor=3.0 * GROWTH),))
        if rank == 0
        else table
        for table, rank in zip(load.tables, RANKS, strict=True)
    ]
    return replace(load, tables=tuple(tables))


def plan(load: Workload, ranks: tuple[int, ...] = RANKS) -> ShardingPlan:
    """Every table whole on a rank."""
    tables = {
        key: TablePlan(
            ShardingType.TABLE_WISE,
            ComputeKernel.FUSED,
            (Shard(rank, (0, 0), (table.num_embeddings, table.embedding_dim)),),
        )
        for key, table, rank in zip(load.keys, load.tables, ranks, strict=True)
    }
    return ShardingPlan(tables, 2, 2)

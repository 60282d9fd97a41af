"""Embedding modules that are alike, and their plan: what traces of one and of two are held up."""

from predictor.model.distribution import Zipf
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.workload import DenseArch, Feature, Table, Workload

WORLD_SIZE = 2
ROWS, WIDTH = (100, 110, 121, 130, 90), 16
KINDS = (
    ShardingType.TABLE_WISE,
    ShardingType.COLUMN_WISE,
    ShardingType.ROW_WISE,
    ShardingType.DATA_PARALLEL,
    ShardingType.TABLE_WISE,
)


def model_and_plan(modules: int, pipeline: str) -> tuple[Workload, ShardingPlan]:
    """Five tables a module, the first and the last on the first rank."""
    tables, plans = [], {}
    for module in range(modules):
        for at, (rows, kind) in enumerate(zip(ROWS, KINDS, strict=True)):
            name = f"m{module}_t{at}"
            feature = Feature(f"m{module}_f{at}", 2.0 + at, distribution=Zipf(1.1))
            tables.append(Table(name, rows, WIDTH, (feature,), module=f"m{module}"))
            replicated = kind is ShardingType.DATA_PARALLEL
            kernel = ComputeKernel.DENSE if replicated else ComputeKernel.FUSED
            plans[name] = TablePlan(kind, kernel, _shards(kind, rows), f"m{module}")
    dense = DenseArch(13, (32, WIDTH), (32, 1))
    load = Workload("alike", 32, tuple(tables), dense, train_pipeline=pipeline)
    return load, ShardingPlan(plans, WORLD_SIZE, WORLD_SIZE)


def _shards(kind: ShardingType, rows: int) -> tuple[Shard, ...]:
    half = -(-rows // 2)
    if kind is ShardingType.TABLE_WISE:
        return (Shard(0, (0, 0), (rows, WIDTH)),)
    if kind is ShardingType.COLUMN_WISE:
        columns = WIDTH // 2
        return tuple(Shard(rank, (0, rank * columns), (rows, columns)) for rank in (0, 1))
    if kind is ShardingType.ROW_WISE:
        return Shard(0, (0, 0), (half, WIDTH)), Shard(1, (half, 0), (rows - half, WIDTH))
    return tuple(Shard(rank, (0, 0), (rows, WIDTH)) for rank in (0, 1))

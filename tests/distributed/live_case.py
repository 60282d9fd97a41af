"""A job whose data drift: two tables of rank 0 become much hotter than those of rank 1."""

from dataclasses import replace

from predictor.model.distribution import Zipf
from predictor.model.plan import ShardingPlan
from predictor.model.workload import DenseArch, Feature, Table, Workload
from tests.builders import table_wise

EVERY, STEPS = 6, 18
GROWTH = 12.0
RANKS = (0, 0, 1, 1)


def workload(optimizer: str = "exact_row_wise_adagrad") -> Workload:
    """Four tables alike."""
    tables = tuple(
        Table(
            f"t{i}",
            5000,
            32,
            (Feature(f"f{i}", 3.0, distribution=Zipf(1.05)),),
            optimizer=optimizer,
        )
        for i in range(len(RANKS))
    )
    return Workload("drifting", 256, tables, DenseArch(4, (32,), (16, 1), "dot"))


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
    tables = map(table_wise, load.tables, ranks)
    return ShardingPlan(dict(zip(load.keys, tables, strict=True)), 2, 2)

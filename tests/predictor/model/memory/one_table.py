"""A model of one table on two ranks, whose bytes can be counted by hand."""

from __future__ import annotations

from typing import Any

from predictor.model.topology import Topology
from predictor.model.workload import DenseArch, Feature, Table, Workload
from predictor.units import GIB

ROWS, DIM, BATCH, WORLD = 1000, 64, 32, 2
WEIGHTS = ROWS * DIM * 4
IDS = 2 * BATCH * 8
LENGTHS = BATCH * 8
OUT = BATCH * DIM * 4


def kept(ids: int, samples: int) -> int:
    """Ids with their lengths, in order, rounded down."""
    return ids + samples - 1


TOPOLOGY = Topology.uniform(WORLD, hbm_bytes=GIB, ddr_bytes=GIB)


def a_workload(optimizer: str = "sgd", pipeline: str = "base", **more: Any) -> Workload:
    table = Table("t", ROWS, DIM, (Feature("f", 2.0),), optimizer=optimizer, **more)
    return Workload(
        "w", BATCH, (table,), DenseArch(4, (8,), (2, 1), "concat", optimizer="adam"), pipeline
    )

"""The order of a calibration: what one rank measures alone, then what all ranks do together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any

from predictor.model.workload import Workload
from shardopt.calibrate.design import cuda as design_cuda
from shardopt.calibrate.design.cuda import Device
from shardopt.calibrate.design.dense_parts import dense_part_points
from shardopt.calibrate.design.near_empty import iteration_points
from shardopt.calibrate.design.ops import op_points
from shardopt.calibrate.design.points import (
    QUICK,
    Point,
    Size,
    collective_points,
    kernel_points,
)

REFERENCE_KERNELS = ("lookup_forward", "lookup_backward", "gemm", "all_to_all")
TOGETHER = ("reference", "collective", "iteration")
"""Families that need all ranks."""
BRIEF = replace(QUICK, iteration_rounds=10)
"""Of the host alone: ten rounds of each near-empty iteration, well under a minute."""


class Group(StrEnum):
    """What can be calibrated by itself."""

    HOST = "host"
    EMBEDDING = "embedding"
    GEMM = "gemm"
    COLLECTIVES = "collectives"

    @property
    def families(self) -> frozenset[str]:
        """Families of the rows that its constants are fitted on."""
        return _FAMILIES[self]


_FAMILIES = {
    Group.HOST: frozenset({"host", "iteration"}),
    Group.EMBEDDING: frozenset({"lookup", "lookup_cached", "lookup_dense", "model_lookup"}),
    Group.GEMM: frozenset({"gemm"}),
    Group.COLLECTIVES: frozenset({"collective"}),
}


def of_group(points: Sequence[Point], group: Group | None) -> list[Point]:
    """Those of the points that a group needs; all where there is none."""
    return [point for point in points if group is None or point.family in group.families]


def alone(
    size: Size, model: Workload | None = None, ranks: int = 1, gpu: Device | None = None
) -> list[Point]:
    """Everything that one rank measures.

    Args:
        model: whose tables are looked up too, one by one; every other one is held out.
        ranks: whose samples a table of the model serves.
        gpu: that is measured; None: a core.
    """
    points = [*kernel_points(size), *op_points(size), *dense_part_points(size)]
    if gpu is not None:
        points = design_cuda.kernel_points(size, gpu)
    if model is None:
        return points
    shape = {"model_sha": model.sha256, "batch_size": model.batch_size, "ranks": ranks}
    return points + [
        Point("model_lookup", {**shape, "table": key}, test=i % 2 == 1)
        for i, key in enumerate(model.keys)
    ]


def together(
    size: Size, ranks: int, link_gbit_s: float | None = None, hosts: int = 1
) -> list[Point]:
    """What needs all ranks; the reference kernels lie around the collectives.

    Args:
        hosts: that the ranks lie on; collectives within a host are measured too.
    """
    among: dict[str, Any] = {} if link_gbit_s is None else {"link_gbit_s": link_gbit_s}
    collectives = collective_points(size, ranks, link_gbit_s)
    if hosts > 1:
        among = {"hosts": hosts}
        collectives = [Point(p.family, p.params | among, p.test) for p in collectives]
        if ranks > hosts:
            collectives += collective_points(size, ranks // hosts)
    middle = len(collectives) // 2

    def reference(at: str) -> list[Point]:
        points = (
            {"at": at, "kernel": kernel, "ranks": ranks, **among} for kernel in REFERENCE_KERNELS
        )
        return [Point("reference", params) for params in points]

    return [
        *reference("start"),
        *collectives[:middle],
        *reference("middle"),
        *collectives[middle:],
        *reference("end"),
        *iteration_points(ranks, **among),
    ]

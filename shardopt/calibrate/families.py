"""All families of points, and their order.

Points of one rank alone come before those of all ranks together. The tables of a given model come
first; on a GPU its clock and its host come before them, and the products of the model's dense part
after. Points of all other families alternate, so that a calibration whose time ends early has a
part of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from predictor.model.workload import Workload
from shardopt.calibrate import Group, collectives, host, lookups, moves, products
from shardopt.calibrate.points import Device, Family, Point, Size

ALONE: dict[str, Family] = {
    family.name: family for module in (host, lookups, products, moves) for family in module.FAMILIES
}
"""Families that one rank measures."""
GROUPS = {"iteration": Group.HOST, "collective": Group.COLLECTIVES}
"""Groups that need the families of all ranks."""
FIRST = ("clock", "host")
"""Families of a GPU that every prediction needs; they take seconds."""


def needs(group: Group | None, family: str) -> bool:
    """Return True if a group needs the rows of a family; all groups together, None, need all."""
    if group is None:
        return True
    return group in ALONE[family].groups if family in ALONE else GROUPS.get(family) is group


def alone(
    size: Size, model: Workload | None = None, ranks: int = 1, gpu: Device | None = None
) -> list[Point]:
    """Return all points that one rank measures; families alternate after the model's own tables.

    Args:
        model: its tables are looked up too.
        ranks: a table of the model serves the samples of so many ranks.
        gpu: the GPU to measure; None: a core.
    """
    points = [
        point
        for family in ALONE.values()
        for point in (family.cpu(size) if gpu is None else family.gpu(size, gpu))
    ]
    first = [] if gpu is None else [point for point in points if point.family in FIRST]
    own = [] if model is None else lookups.model_points(model, ranks)
    if model is not None and gpu is not None:
        own += products.model_points(model)
    return [*first, *own, *_alternated(points[len(first) :])]


def together(
    size: Size, ranks: int, link_gbit_s: float | None = None, hosts: int = 1
) -> list[Point]:
    """Return the points that need all ranks; reference kernels lie around the collectives.

    A single rank has near-empty iterations alone.

    Args:
        hosts: number of hosts; collectives within a host are measured too.
    """
    if ranks == 1:
        return host.iteration_points(ranks)
    among: dict[str, Any] = {} if link_gbit_s is None else {"link_gbit_s": link_gbit_s}
    if hosts > 1:
        among["hosts"] = hosts
    points = collectives.collective_points(size, ranks, **among)
    if 1 < hosts < ranks:
        points += collectives.collective_points(size, ranks // hosts)
    middle = len(points) // 2
    return [
        *collectives.reference_points(ranks, "start", **among),
        *points[:middle],
        *collectives.reference_points(ranks, "middle", **among),
        *points[middle:],
        *collectives.reference_points(ranks, "end", **among),
        *host.iteration_points(ranks, **among),
    ]


def _alternated(points: Sequence[Point]) -> list[Point]:
    """Order points by the share of their family, op and form before them, so that all alternate."""
    names = ("op", "form", "kernel", "layout", "optimizer")
    kinds = [(point.family, *map(point.params.get, names)) for point in points]
    place = [kinds[:i].count(kind) / kinds.count(kind) for i, kind in enumerate(kinds)]
    return [points[i] for i in sorted(range(len(points)), key=lambda i: place[i])]

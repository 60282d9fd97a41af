"""All families of points, their order, and the two loops that measure them.

Points of one rank alone come before those of all ranks together. The tables of a given model come
first; on a GPU its clock and its host come before them, and the products of the model's dense part
after. Points of all other families alternate, so that a calibration whose time ends early has a
part of each.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from predictor.model.workload import Workload
from shardopt.calibrate import Group, collectives, host, lookups, moves, products
from shardopt.calibrate.points import TOGETHER, CalibrationSettings, Device, Family, Point, Size
from shardopt.calibrate.rows import Measurement, row_of_failure
from shardopt.measure.sampling import timer_of
from shardopt.ranks.realtime import Runtime, hasten_gloo

ALONE: dict[str, Family] = {
    family.name: family for module in (host, lookups, products, moves) for family in module.FAMILIES
}
"""Families that one rank measures."""
GROUPS = {"iteration": Group.HOST, "collective": Group.COLLECTIVES}
"""Groups that need the families of all ranks."""
FIRST = ("clock", "host")
"""Families of a GPU that every prediction needs; they take seconds."""
SHORT = 0.25
"""Time of other points over that of a lookup, whose every sample is long."""
GPU_SECONDS = 0.4
"""Most seconds of a lookup on a GPU: a dozen samples agree there within 2 %."""
COLLECTIVES_SHARE = 0.7
"""Share of the time of all ranks together after which near-empty iterations begin."""
PLAIN_ROUNDS = 2
"""Factor on the rounds of collectives among plain ranks, whose times have modes: decision 0021."""


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


def measure_points(
    points: Sequence[Point],
    device: Any,
    settings: CalibrationSettings,
    lasts: Callable[[float], bool],
) -> Iterator[Measurement]:
    """Measure points of one rank, or collectively those of all ranks; every rank gets these rows.

    Args:
        lasts: tells if less than a share of the time is over; collective where the points are.
    """
    if not points:
        return
    measure = _measure_together if points[0].family in TOGETHER else _measure_alone
    yield from measure(points, device, settings, lasts)


def _measure_alone(
    points: Sequence[Point],
    device: Any,
    settings: CalibrationSettings,
    lasts: Callable[[float], bool],
) -> Iterator[Measurement]:
    """Measure kernels point by point; a point that fails yields the row of its failure."""
    size, own = settings.size, partial(lookups.measure_model_lookup, model=settings.model)
    timer = timer_of(device.type)
    # the first lookups of a process take twice as long as all later ones: none of them counts
    lookups.measure_lookup(lookups.lookup_points(1)[0], timer, size.seconds)
    for point in points:
        if not lasts(1.0):
            return
        longest = size.seconds if device.type == "cpu" else min(size.seconds, GPU_SECONDS)
        seconds = longest * (1.0 if "lookup" in point.family else SHORT)
        measure = own if point.family == "model_lookup" else ALONE[point.family].measure
        try:
            yield from measure(point, timer, seconds)
        except Exception as error:
            # raises on a device that an error has broken, where nothing more can be measured
            timer.synchronize()
            yield row_of_failure(point, error)
        if device.type == "cuda":
            # free the tables of the last point; a reference cycle may hold some of them
            import torch

            gc.collect()
            torch.cuda.empty_cache()


def _measure_together(
    points: Sequence[Point],
    device: Any,
    settings: CalibrationSettings,
    lasts: Callable[[float], bool],
) -> Iterator[Measurement]:
    """Measure the points that need all ranks; every rank gets the rows."""
    rounds, hosts = settings.size.rounds, settings.hosts
    # iterations may be left for later only where other points are missing too
    later = any(point.family == "collective" for point in points)
    if device.type == "cpu" and settings.runtime is Runtime.TUNED:
        hasten_gloo()
    elif device.type == "cpu":
        rounds *= PLAIN_ROUNDS
    references = collectives.References(device, settings.size)
    for family, run in groupby(points, key=lambda point: point.family):
        of_family = list(run)
        if family == "reference":
            yield from references.rows(of_family)
        elif family == "iteration":
            in_time = partial(lasts, 1.0)
            yield from host.measure_iterations(of_family, device, settings, in_time, later)
        else:
            more = partial(lasts, COLLECTIVES_SHARE)
            yield from collectives.measure_collectives(of_family, device, rounds, hosts, more)

"""Points to the code that measures them; imported by the ranks, as all below needs torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from predictor.workload import Workload
from shardopt.bench.realtime import hasten_gloo
from shardopt.calibrate.design import Point, Size, lookup_points
from shardopt.calibrate.measure_collectives import measure_blocks
from shardopt.calibrate.measure_dense import measure_elementwise, measure_gemm, measure_host
from shardopt.calibrate.measure_embedding import measure_lookup
from shardopt.calibrate.measure_iteration import measure_iterations
from shardopt.calibrate.measure_model import measure_model_lookup
from shardopt.calibrate.measure_ops import (
    measure_interaction,
    measure_jagged,
    measure_optimizer,
    measure_pooled,
)
from shardopt.calibrate.measure_reference import References
from shardopt.calibrate.rows import Measured
from shardopt.calibrate.sampling import BRIEF_FLUSH_BYTES, Timer

Measure = Callable[[Point, Timer, float], list[Measured]]
ALONE: dict[str, Measure] = {
    "host": measure_host,
    "lookup": measure_lookup,
    "gemm": measure_gemm,
    "elementwise": measure_elementwise,
    "jagged": measure_jagged,
    "pooled": measure_pooled,
    "interaction": measure_interaction,
    "optimizer": measure_optimizer,
    "lookup_variant": measure_lookup,
}
LONG = ("lookup", "lookup_variant", "model_lookup")
SHORT = 0.25
"""Of the seconds of a lookup, whose every sample is long."""


def measure_alone(
    points: Sequence[Point], device: Any, size: Size, model: Workload | None = None
) -> Iterator[Measured]:
    """Rows of kernels, point by point.

    Args:
        model: whose lookups some of the points are.
    """
    measures = ALONE
    if model is not None:
        measures = ALONE | {"model_lookup": partial(measure_model_lookup, model)}
    timer = Timer(device.type)
    # the first lookups of a process take twice as long as all later ones: none of them counts
    measure_lookup(lookup_points(1)[0], timer, size.seconds)
    for point in points:
        seconds = size.seconds * (1.0 if point.family in LONG else SHORT)
        yield from measures[point.family](point, timer, seconds)


def measure_together(points: Sequence[Point], device: Any, size: Size) -> Iterator[Measured]:
    """Rows of what needs all ranks, in the order of the points; every rank gets them."""
    if device.type == "cpu":
        hasten_gloo()
    references = References(device, size)
    for family, run in groupby(points, key=lambda point: point.family):
        of_family = list(run)
        if family == "reference":
            yield from references.rows(of_family)
        elif family == "iteration":
            yield from measure_iterations(of_family, device, size)
        else:
            rows = measure_blocks(of_family, Timer(device.type, BRIEF_FLUSH_BYTES), size.rounds)
            yield from (row for _, row in rows)

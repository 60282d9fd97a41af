"""Which code measures which points; imported by the ranks, as all of it needs torch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from predictor.model.workload import Workload
from shardopt.calibrate.design.points import Point, Size, lookup_points
from shardopt.calibrate.kernels.collectives import Ranks, measure_blocks
from shardopt.calibrate.kernels.dense import (
    measure_copy_h2d,
    measure_elementwise,
    measure_gemm,
    measure_streaming,
)
from shardopt.calibrate.kernels.dense_parts import (
    measure_attention,
    measure_concatenation,
    measure_function,
    measure_layers,
    measure_product,
)
from shardopt.calibrate.kernels.embedding import (
    measure_cached,
    measure_dense_lookup,
    measure_lookup,
    measure_unpooled_lookup,
)
from shardopt.calibrate.kernels.host import measure_host
from shardopt.calibrate.kernels.iteration import measure_iterations
from shardopt.calibrate.kernels.model import measure_model_lookup
from shardopt.calibrate.kernels.ops import (
    measure_interaction,
    measure_jagged,
    measure_optimizer,
    measure_pooled,
)
from shardopt.calibrate.rows import Measurement, row_of_samples
from shardopt.measure.sampling import BRIEF_FLUSH_BYTES, Timer, timer_of
from shardopt.measure.timing import Samples
from shardopt.ranks.realtime import Runtime, hasten_gloo

Measure = Callable[[Point, Timer, float], list[Measurement]]
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
    "lookup_dense": measure_dense_lookup,
    "lookup_cached": measure_cached,
    "lookup_unpooled": measure_unpooled_lookup,
    "product": measure_product,
    "function": measure_function,
    "attention": measure_attention,
    "concatenation": measure_concatenation,
    "layers": measure_layers,
    "copy_h2d": measure_copy_h2d,
    "streaming": measure_streaming,
}
LONG = (
    *("lookup", "lookup_variant", "lookup_dense", "lookup_cached", "lookup_unpooled"),
    "model_lookup",
)
PLAIN_ROUNDS = 2
"""Times the rounds of collectives among plain ranks: their times have modes (decision 36)."""
SHORT = 0.25
"""Of the seconds of a lookup, whose every sample is long."""


def measure_alone(
    points: Sequence[Point], device: Any, size: Size, model: Workload | None = None
) -> Iterator[Measurement]:
    """Rows of kernels, point by point.

    Args:
        model: whose lookups some of the points are.
    """
    measures = ALONE
    if model is not None:
        measures = ALONE | {"model_lookup": partial(measure_model_lookup, model)}
    timer = timer_of(device.type)
    # the first lookups of a process take twice as long as all later ones: none of them counts
    measure_lookup(lookup_points(1)[0], timer, size.seconds)
    for point in points:
        seconds = size.seconds * (1.0 if point.family in LONG else SHORT)
        yield from measures[point.family](point, timer, seconds)
        if device.type == "cuda":
            _free_memory()


def _free_memory() -> None:
    """Free the tables of the last point, some of which a reference cycle may hold."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def measure_together(
    points: Sequence[Point],
    device: Any,
    size: Size,
    runtime: Runtime = Runtime.PLAIN,
    hosts: int = 1,
) -> Iterator[Measurement]:
    """Rows of what needs all ranks; every rank gets them.

    Args:
        hosts: that the ranks lie on, evenly and one after the other.
    """
    rounds = size.rounds
    if device.type == "cpu" and runtime is Runtime.TUNED:
        hasten_gloo()
    elif device.type == "cpu":
        rounds *= PLAIN_ROUNDS
    references = _References(device, size)
    for family, run in groupby(points, key=lambda point: point.family):
        of_family = list(run)
        if family == "reference":
            yield from references.rows(of_family)
        elif family == "iteration":
            yield from measure_iterations(of_family, device, size, runtime)
        else:
            yield from _collectives(of_family, device, rounds, hosts)


def _collectives(
    points: Sequence[Point], device: Any, rounds: int, hosts: int
) -> Iterator[Measurement]:
    """Among all ranks, and among those of each host where there are several of both."""
    import torch.distributed as dist

    timer = timer_of(device.type, BRIEF_FLUSH_BYTES)
    between = [point for point in points if point.params.get("hosts", 1) == hosts]
    within = [point for point in points if point not in between]
    everyone = Ranks(timer, one_clock=device.type == "cpu" and hosts == 1)
    yield from (row for _, row in measure_blocks(between, everyone, rounds))
    if within:
        group, _ = dist.new_subgroups(dist.get_world_size() // hosts)
        neighbours = Ranks(timer, group, one_clock=device.type == "cpu")
        yield from (row for _, row in measure_blocks(within, neighbours, rounds))


class _References:
    """The kernels that every bench run times too, before, between and after the collectives.

    They are built when the first is measured, which is collective over all ranks.
    """

    def __init__(self, device: Any, size: Size) -> None:
        self.device, self.size = device, size
        self._reference: Any = None

    def rows(self, points: Sequence[Point]) -> Iterator[Measurement]:
        """A row for each kernel, of all repeats of all ranks."""
        for _, kernels in groupby(points, key=lambda point: point.params["at"]):
            spent = self._measure()
            for point in kernels:
                seconds = tuple(ms * 1e-3 for ms in spent[point.params["kernel"]])
                yield row_of_samples(point, Samples(seconds))

    def _measure(self) -> dict[str, list[float]]:
        """Milliseconds of every repeat by the kernel's name."""
        import torch.distributed as dist

        if self._reference is None:
            from shardopt.measure.reference import Reference

            self._reference = Reference(self.device, dist.get_rank())
            # the first lookups of a process are slower than all later ones
            self._reference.measure()
        mine = [self._reference.measure() for _ in range(self.size.reference_calls)]
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
        calls = [call for rank in ranks for call in rank]
        return {kernel: [ms for call in calls for ms in call[kernel]] for kernel in mine[0]}

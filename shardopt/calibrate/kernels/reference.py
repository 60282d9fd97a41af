"""The reference kernels that every bench run times too, before, amid and after the collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from shardopt.calibrate.design.points import Point, Size
from shardopt.calibrate.rows import Measurement, row_of_samples
from shardopt.measure.timing import Samples


class References:
    """Built with the first that is measured; collective over all ranks."""

    def __init__(self, device: Any, size: Size) -> None:
        self.device, self.size = device, size
        self._reference: Any = None

    def rows(self, points: Sequence[Point]) -> Iterator[Measurement]:
        """A row a kernel, of all repeats of all ranks."""
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

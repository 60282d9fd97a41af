"""A training step under data parallelism, as the calls of one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from predictor.cost.ops.cpu_ops import OpRow
from predictor.iteration.op_graph import CallGroup, CollectiveStart, CollectiveWait, RankCalls

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"


@dataclass(frozen=True)
class GradientSync:
    """Time to sum a bucket of gradients over the ranks, in ms: ``bucket + gradients g + bytes b``.

    DistributedDataParallel copies each gradient into its bucket and back, and gloo moves and adds
    bytes.
    """

    bucket_ms: float
    gradient_ms: float
    byte_ms: float

    def ms(self, gradients: int, size_bytes: int) -> float:
        """Of one bucket."""
        return self.bucket_ms + gradients * self.gradient_ms + size_bytes * self.byte_ms


def gradient_sum(gradients: int, size_bytes: int) -> CollectiveStart:
    """The all-reduce of a bucket of gradients."""
    return CollectiveStart("allreduce_", size_bytes, gradients=gradients)


def training_step(
    parts: Mapping[str, tuple[OpRow, ...]], buckets: Sequence[CollectiveStart]
) -> RankCalls:
    """A training step under data parallelism.

    Args:
        parts: forward, backward.0, backward.1, ..., optimizer -> rows of its ops. Each part of the
            backward ends with the sum of a bucket; the optimizer waits for all sums.
        buckets: one for each part of the backward.
    """
    segments = {FORWARD: 0, OPTIMIZER: 2 * len(buckets)}
    segments |= {f"{BACKWARD}.{at}": at for at in range(len(buckets))}
    calls = tuple(CallGroup(segments[part], part, rows, 1) for part, rows in parts.items())
    return RankCalls(calls, (*buckets, *map(CollectiveWait, range(len(buckets)))))

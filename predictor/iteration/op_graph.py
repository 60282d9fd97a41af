"""A training step on CPU ranks, from the rows of its ops to an iteration graph.

Forward, backward and optimizer run one after the other on the core that also moves the bytes of
collectives, so a step is a sum on each rank; with data parallelism the ranks meet in an all-reduce
a bucket of gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from predictor.cost.cpu_ops import OpLaws, OpRow
from predictor.iteration.graph import COMPUTE, Graph
from predictor.iteration.timeline import simulate

COMM = "comm"
FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"


@dataclass(frozen=True)
class Bucket:
    """Gradients that are summed over the ranks together."""

    gradients: int
    bytes: int


@dataclass(frozen=True)
class SyncLaw:
    """What summing a bucket takes, in ms: ``bucket + gradients g + bytes b``.

    A gradient is copied into its bucket and back (DDP's reducer), and gloo moves and adds bytes.
    """

    bucket_ms: float
    gradient_ms: float
    byte_ms: float

    def ms(self, bucket: Bucket) -> float:
        """Of one bucket."""
        return self.bucket_ms + bucket.gradients * self.gradient_ms + bucket.bytes * self.byte_ms


@dataclass(frozen=True)
class OpStep:
    """One step of one rank.

    Args:
        parts: forward, backward.0, backward.1, ..., optimizer -> rows of its ops; a part of the
            backward completes a bucket.
        buckets: of each part of the backward.
    """

    parts: Mapping[str, Sequence[OpRow]]
    buckets: Sequence[Bucket]


def step_graph(step: OpStep, laws: OpLaws, sync: SyncLaw | None = None, ranks: int = 1) -> Graph:
    """The iteration graph of ranks that all run this step.

    Args:
        sync: None for ranks that do not sum their gradients.
    """
    graph = Graph(ranks, ranks, inline_streams=frozenset({COMPUTE}))

    def compute(part: str, deps: Sequence[int] = ()) -> int:
        cost = np.full(ranks, laws.rows_ms(step.parts[part]))
        phase = part.split(".")[0]
        return graph.add(part, phase=phase, resource="ops", stream=COMPUTE, cost_ms=cost, deps=deps)

    compute(FORWARD)
    sums: list[int] = []
    for at, bucket in enumerate(step.buckets):
        ends = compute(f"{BACKWARD}.{at}")
        if sync is not None:
            sums.append(
                graph.add(
                    f"all-reduce bucket {at}",
                    phase="all_reduce",
                    resource="collectives",
                    stream=COMM,
                    cost_ms=np.full(ranks, sync.ms(bucket)),
                    deps=[ends],
                    scope="world",
                )
            )
    compute(OPTIMIZER, sums)
    return graph


def step_ms(step: OpStep, laws: OpLaws, sync: SyncLaw | None = None, ranks: int = 1) -> float:
    """Time of a step in the steady state; arguments as of `step_graph`."""
    return float(simulate(step_graph(step, laws, sync, ranks)).iteration_ms[0])

"""A training step of CPU ranks, priced by kernel models, as an iteration graph.

Each rank runs its ops one after the other on the core that also moves the bytes of its collectives,
and meets the other ranks in these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from predictor.cost.ops.cpu_ops import OpModels, OpRow
from predictor.iteration.graph import COMPUTE, Graph

COMM = "comm"


@dataclass(frozen=True)
class CollectiveStart:
    """A rank starts an all-reduce of gradients.

    Args:
        bytes: that this rank sends.
        gradients: summed in it by DistributedDataParallel.
    """

    bytes: int
    gradients: int


@dataclass(frozen=True)
class CollectiveWait:
    """A rank waits for the end of a collective, which is the rank's `start`-th, from 0."""

    start: int


Event = CollectiveStart | CollectiveWait


@dataclass(frozen=True)
class RankCalls:
    """The ops of a step that all ranks run.

    Args:
        segments: rows of ops before each event and after the last.
        events: in order.
    """

    segments: tuple[tuple[OpRow, ...], ...]
    events: tuple[Event, ...] = ()

    @property
    def rows(self) -> tuple[OpRow, ...]:
        """All ops in order."""
        return tuple(row for rows in self.segments for row in rows)

    @property
    def collectives(self) -> tuple[CollectiveStart, ...]:
        """Those that a rank starts, in order."""
        return tuple(event for event in self.events if isinstance(event, CollectiveStart))


def op_graph(
    step: RankCalls,
    models: OpModels,
    collective_ms: Callable[[CollectiveStart], float],
    ranks: int,
) -> Graph:
    """The iteration of ranks that run the same step."""
    graph = Graph(ranks, ranks, frozenset({COMPUTE}))
    started: list[int] = []
    deps: list[int] = []
    for at, rows in enumerate(step.segments):
        ms = models.rows_ms(rows)
        for rank in range(ranks):
            cost = np.zeros(ranks)
            cost[rank] = ms
            graph.add(
                f"ops {at}",
                phase="ops",
                resource="ops",
                stream=COMPUTE,
                cost_ms=cost,
                deps=deps,
                ranks=(rank,),
            )
        deps = []
        for event in step.events[at : at + 1]:
            if isinstance(event, CollectiveWait):
                deps = [started[event.start]]
                continue
            started.append(
                graph.add(
                    "all_reduce",
                    phase="collectives",
                    resource="collectives",
                    stream=COMM,
                    cost_ms=np.full(ranks, collective_ms(event)),
                    scope="world",
                )
            )
    return graph

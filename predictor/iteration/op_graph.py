"""Captured ops of CPU ranks, priced by kernel models, as an iteration graph.

The one way from a module's ops to a predicted time. What is captured may be a training step or the
program of a generated benchmark; both are `RankCalls`. Each rank runs its ops one after the other
on the core that also moves the bytes of its collectives, and meets the other ranks in these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from predictor.cost.ops.cpu_ops import VIEW, OpModels, OpRow
from predictor.errors import InputError
from predictor.iteration.graph import COMPUTE, Graph

COMM = "comm"


@dataclass(frozen=True)
class CallGroup:
    """Equal calls between two events.

    Args:
        segment: how many events of the rank come before.
        op: as the captured program calls it; of a training step one of its parts.
        rows: the ops that one such call runs, reuse and counts of all calls together; none for a
            call that cannot run on fake tensors.
        count: of calls.
        us: their recorded time in all; None where nothing was recorded.
        ms: their time in all in a replay on this machine, timed inside its iterations; None where
            none was made.
    """

    segment: int
    op: str
    rows: tuple[OpRow, ...]
    count: int
    us: float | None = None
    ms: float | None = None


@dataclass(frozen=True)
class CollectiveStart:
    """A rank starts a collective.

    Args:
        kind: c10d's name of it.
        bytes: that this rank sends.
        group: its ranks; none for all.
        gradients: summed in it by DistributedDataParallel; 0 for any other collective.
    """

    kind: str
    bytes: int
    group: tuple[int, ...] = ()
    gradients: int = 0


@dataclass(frozen=True)
class CollectiveWait:
    """A rank waits for the end of a collective, which is the rank's `start`-th, from 0."""

    start: int


Event = CollectiveStart | CollectiveWait


@dataclass(frozen=True)
class RankCalls:
    """The calls of one rank in an iteration.

    Args:
        events: in order.
        left_out: op and recorded us of what the captured program lacks.
    """

    calls: tuple[CallGroup, ...]
    events: tuple[Event, ...] = ()
    left_out: tuple[tuple[str, float | None], ...] = ()

    @property
    def collectives(self) -> tuple[CollectiveStart, ...]:
        """Those that it starts, in order."""
        return tuple(event for event in self.events if isinstance(event, CollectiveStart))


@dataclass(frozen=True)
class RankTimes:
    """What one rank computes.

    Args:
        segments_ms: computation before each event and after the last, calls without a kernel model
            included.
        recorded_ms: of `segments_ms`, recorded times of calls without a kernel model.
        without_model: op, count and recorded us of calls without a kernel model; None: not
            recorded, and counts nothing.
    """

    segments_ms: tuple[float, ...]
    recorded_ms: float
    without_model: tuple[tuple[str, int, float | None], ...]


CollectiveCost = Callable[[Sequence[CollectiveStart]], float | None]
"""A collective as each rank starts it -> its time in ms; None where nothing prices it."""


def rank_times(rank: RankCalls, models: OpModels) -> RankTimes:
    """Price the calls of a rank.

    A call is priced by the ops that it runs; where one of them has no kernel model, its recorded
    time stands for the call.
    """
    segments = [0.0] * (len(rank.events) + 1)
    without = [(op, 1, us) for op, us in rank.left_out]
    recorded = 0.0
    for call in rank.calls:
        missing = _op_without_model(call, models)
        if missing is None:
            segments[call.segment] += models.rows_ms(call.rows)
            continue
        ms = (call.us or 0.0) / 1e3
        segments[call.segment] += ms
        recorded += ms
        without.append((missing, call.count, call.us))
    return RankTimes(tuple(segments), recorded, tuple(without))


def _op_without_model(call: CallGroup, models: OpModels) -> str | None:
    """The first op of a call that no kernel model prices, if there is one."""
    if not call.rows:
        return call.op
    for row in call.rows:
        if not models.has(row.kind):
            words = row.kind.split()
            # a view's kind does not name its op
            name = call.op if words[0] == VIEW else words[0]
            return name if "::" in name else f"aten::{name}"
    return None


def op_graph(
    times: Sequence[RankTimes],
    ranks: Sequence[RankCalls],
    collective_ms: CollectiveCost,
    intra_group_size: int,
) -> tuple[Graph, Counter[str]]:
    """The ranks' iteration, and the collectives that nothing prices by their kind.

    All ranks start the same collectives in the same order; when they wait may differ.
    """
    graph = Graph(len(times), intra_group_size, frozenset({COMPUTE}))
    missing: Counter[str] = Counter()
    started: list[int] = []
    passed = [0] * len(times)
    for starts in [*_meetings(ranks), None]:
        for rank, of in enumerate(ranks):
            segments = times[rank].segments_ms
            passed[rank] = _add_computation(graph, rank, of, segments, passed[rank], started)
        if starts is None:
            break
        kind = starts[0].kind
        ms = collective_ms(starts)
        missing[kind] += ms is None
        started.append(
            graph.add(
                kind,
                phase="collectives",
                resource="collectives",
                stream=COMM,
                cost_ms=np.full(len(times), ms or 0.0),
                scope="world",
            )
        )
    return graph, +missing


def _add_computation(
    graph: Graph,
    rank: int,
    of: RankCalls,
    segments_ms: Sequence[float],
    at: int,
    started: Sequence[int],
) -> int:
    """Add a rank's computation and waits up to its next collective; the event after that one."""
    deps: list[int] = []
    while True:
        cost = np.zeros(graph.world_size)
        cost[rank] = segments_ms[at]
        graph.add(
            f"ops {at}",
            phase="ops",
            resource="ops",
            stream=COMPUTE,
            cost_ms=cost,
            deps=deps,
            ranks=(rank,),
        )
        if at == len(of.events):
            return at
        event = of.events[at]
        at += 1
        if isinstance(event, CollectiveStart):
            return at
        deps = [started[event.start]]


def _meetings(ranks: Sequence[RankCalls]) -> list[tuple[CollectiveStart, ...]]:
    """Each collective in order, as every rank starts it."""
    every = [of.collectives for of in ranks]
    kinds = [[start.kind for start in starts] for starts in every]
    if any(of != kinds[0] for of in kinds):
        raise InputError(
            "the ranks of the benchmark do not run the same collectives in the same order; only "
            "`shardopt bench replay` can time such a benchmark"
        )
    for start in (start for starts in every for start in starts):
        if start.group and len(start.group) < len(ranks):
            raise InputError(
                f"a collective joins only ranks {list(start.group)}; only collectives of all ranks "
                "are predicted"
            )
    return list(zip(*every, strict=True))

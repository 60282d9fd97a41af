"""The chain of work that sets the iteration time, found backwards from the end of an iteration.

Every stretch of a period is charged to one operation on one rank, or to the host that was late in
issuing it, so the parts add up to the iteration time exactly. The period is one in which the chain
has come back to where it was an iteration before: work that no later iteration waits for, such as
the last kernels where the host sets the pace, takes no part in it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from predictor.iteration.graph import Graph
from predictor.iteration.timeline import Timeline

TOLERANCE_MS = 1e-9
STEADY = 1e-6
"""Relative error up to which a time is a number of periods."""
HOST = "host"
HOST_NAME = "host issues work"


@dataclass(frozen=True)
class Segment:
    """Stretch of the critical path: ``name`` on ``rank`` from ``start_ms`` to ``end_ms``.

    For ``waiting_ms`` of it the rank waits for the one with the longest batch.
    """

    name: str
    phase: str
    resource: str
    rank: int
    start_ms: float
    end_ms: float
    waiting_ms: float = 0.0

    @property
    def duration_ms(self) -> float:
        return self.end_ms - self.start_ms


@dataclass(frozen=True)
class Visit:
    """Step of the walk: operation ``op`` of an iteration on a rank, or the host if None."""

    op: int | None
    iteration: int
    rank: int
    start_ms: float
    end_ms: float


def critical_path(graph: Graph, timeline: Timeline) -> list[Segment]:
    """Return a period of the chain that sets the pace, in order of time.

    The timeline must have been simulated for one plan with ``keep_steps=True``. A chain that does
    not come back within the kept steps is that of the last period.
    """
    period = float(timeline.iteration_ms[0])
    walker = _Walker(graph, timeline)
    end = walker.last(period)
    turn = _turn(walker.walk(*end), period)
    visits: Iterable[Visit] = turn  # a host that works through the whole period
    if not turn or turn[0].op is not None:
        # an iteration begins with its first operation, so the period ends with the last one
        ends = ((visit.op, visit.rank) for visit in turn if visit.op is not None)
        visits = walker.walk(*max(ends, key=itemgetter(0), default=end))
    segments: list[Segment] = []
    horizon = math.nan
    for visit in visits:
        horizon = horizon if segments else visit.end_ms - period
        segments.append(_segment(graph, visit, horizon))
        if visit.start_ms <= horizon + TOLERANCE_MS:
            break
    return [s for s in reversed(segments) if s.duration_ms > 0]


def _turn(visits: Iterable[Visit], period: float) -> list[Visit]:
    """Return the visits from the first one that comes again whole periods before to the one before
    it, or a host's that takes a period; empty if the chain does not come back."""
    walked: list[Visit] = []
    latest: dict[tuple[int, int], int] = {}
    for visit in visits:
        if visit.op is None:
            if visit.end_ms - visit.start_ms >= period - TOLERANCE_MS:
                return [visit]
        else:
            number = latest.get((visit.op, visit.rank))
            if number is not None:
                later = walked[number]
                expected = (later.iteration - visit.iteration) * period
                if abs(later.end_ms - visit.end_ms - expected) <= STEADY * expected:
                    return walked[number:]
            latest[visit.op, visit.rank] = len(walked)
        walked.append(visit)
    return []


def absent_ranks(graph: Graph) -> list[NDArray[np.bool_]]:
    """Return for every operation of the first plan the ranks it does not exist on, ``[ranks]``."""
    everywhere = np.zeros(graph.world_size, dtype=np.bool_)
    masks = (op.absent(graph.world_size) for op in graph.ops)
    return [everywhere if g is None else np.broadcast_to(g[0], everywhere.shape) for g in masks]


def _segment(graph: Graph, visit: Visit, horizon: float) -> Segment:
    start = max(visit.start_ms, horizon)
    if visit.op is None:
        return Segment(HOST_NAME, HOST, "overheads", visit.rank, start, visit.end_ms)
    op = graph.ops[visit.op]
    waiting = min(op.waiting_on(visit.rank), max(0.0, visit.end_ms - start))
    return Segment(op.name, op.phase, op.resource, visit.rank, start, visit.end_ms, waiting)


class _Walker:
    """Access to the times of the kept steps of one plan."""

    def __init__(self, graph: Graph, timeline: Timeline) -> None:
        self.graph = graph
        self.steps = timeline.steps
        self.absent = absent_ranks(graph)
        self.in_stream: dict[str, list[int]] = {}
        self.holding: dict[str, list[int]] = {}
        for index, op in enumerate(graph.ops):
            self.in_stream.setdefault(op.stream, []).append(index)
            if op.blocks_host or op.stream in graph.inline_streams:
                self.holding.setdefault(op.thread, []).append(index)

    def time(self, name: str, iteration: int, op: int, rank: int) -> float:
        return float(getattr(self.steps[iteration], name)[op, 0, rank])

    def last(self, period: float) -> tuple[int, int]:
        """Return the operation and rank with the latest end in the last iteration, of those that
        come a period later than in the one before: others do not set the pace."""
        ends = [step.end[:, 0] for step in self.steps[-2:]]
        late = ends[-1] - ends[0] >= period * (1 - STEADY)
        exists = ~np.array(self.absent)
        candidates = exists & late if (exists & late).any() else exists
        times = np.where(candidates, ends[-1], -np.inf)
        op, rank = np.unravel_index(int(np.argmax(times)), times.shape)
        return int(op), int(rank)

    def walk(self, op: int, rank: int) -> Iterator[Visit]:
        """Walk from the end of an operation of the last iteration back to each cause in turn.

        No operation ends before it is issued, so no host is still busy when all streams are empty.
        """
        iteration = len(self.steps) - 1
        while True:
            end = self.time("end", iteration, op, rank)
            cause = None
            if not self.ended_late(iteration, op, rank):
                start = self.time("start", iteration, op, rank)
                yield Visit(op, iteration, rank, start, end)
                end, rank = start, self.last_arrival(iteration, op, rank)
                cause = self.cause(iteration, op, rank)
            if cause is None:
                cause = self.host_release(iteration, op, rank, self.graph.ops[op].thread)
                released = 0.0 if cause is None else self.time("end", *cause, rank)
                yield Visit(None, iteration, rank, released, end)
            if cause is None:
                return
            iteration, op = cause

    def before(self, indices: list[int], op: int, rank: int) -> int | None:
        """Return the last of some operations that exists on a rank and comes before ``op``."""
        for position in range(bisect_left(indices, op) - 1, -1, -1):
            if not self.absent[indices[position]][rank]:
                return indices[position]
        return None

    def ended_late(self, iteration: int, op: int, rank: int) -> bool:
        """Tell whether a late last launch alone delayed the operation's end."""
        step = self.steps[iteration]
        cost = np.broadcast_to(self.graph.ops[op].cost_ms, step.end.shape[1:])[0, rank]
        elapsed = step.end[op, 0, rank] - step.start[op, 0, rank]
        return bool(elapsed > cost + TOLERANCE_MS)

    def last_arrival(self, iteration: int, op: int, rank: int) -> int:
        """Return the rank that a collective waited for."""
        scope = self.graph.ops[op].scope
        if scope is None:
            return rank
        ranks = self.graph.members(scope, rank)
        ranks = ranks[~self.absent[op][ranks]]
        return int(ranks[np.argmax(self.steps[iteration].ready[op, 0, ranks])])

    def cause(self, iteration: int, op: int, rank: int) -> tuple[int, int] | None:
        """Return the ``(iteration, op)`` whose end let it start, or None for the host's issue."""
        ready = self.time("ready", iteration, op, rank)
        candidates = list(self._waited_for(iteration, op, rank))
        stream = self.in_stream[self.graph.ops[op].stream]
        before = self.before(stream, op, rank)
        if before is not None:
            candidates.append((iteration, before))
        elif (last := self.before(stream, len(self.graph.ops), rank)) is not None:
            candidates.append((iteration - 1, last))
        for where in candidates:
            if where[0] >= 0 and abs(self.time("end", *where, rank) - ready) <= TOLERANCE_MS:
                return where
        return None

    def _waited_for(self, iteration: int, op: int, rank: int) -> Iterator[tuple[int, int]]:
        """Yield dependencies on a rank; an absent one is replaced by its own dependencies."""
        for dep in self.graph.ops[op].deps:
            where = (iteration - dep.lag, dep.op)
            if self.absent[dep.op][rank] and where[0] >= 0:
                yield from self._waited_for(*where, rank)
            else:
                yield where

    def host_release(
        self, iteration: int, op: int, rank: int, thread: str
    ) -> tuple[int, int] | None:
        """Return the operation that last held the host thread before it issued this one."""
        holding = self.holding.get(thread, [])
        while iteration >= 0:
            holder = self.before(holding, op, rank)
            if holder is not None:
                return iteration, holder
            iteration, op = iteration - 1, len(self.graph.ops)
        return None

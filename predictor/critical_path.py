"""Which chain of work sets the iteration time, walked backwards from the end of an iteration.

Every stretch of the last period is charged to one operation on one rank, or to the host that was
late in issuing it, so the parts add up to the iteration time exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from predictor.graph import Graph
from predictor.timeline import Timeline

TOLERANCE_MS = 1e-9
HOST = "host"
HOST_NAME = "host issues work"


@dataclass(frozen=True)
class Segment:
    """A stretch of the critical path: ``name`` on ``rank`` from ``start_ms`` to ``end_ms``."""

    name: str
    phase: str
    resource: str
    rank: int
    start_ms: float
    end_ms: float

    @property
    def duration_ms(self) -> float:
        """Length of the stretch."""
        return self.end_ms - self.start_ms


@dataclass(frozen=True)
class Visit:
    """One step of the walk: operation ``op`` of an iteration on a rank, or the host if None."""

    op: int | None
    iteration: int
    rank: int
    start_ms: float
    end_ms: float


def critical_path(graph: Graph, timeline: Timeline) -> list[Segment]:
    """The chain that fills the last iteration's period, in order of time.

    The timeline must have been simulated for one plan with ``keep_steps=True``.
    """
    finish = float(timeline.finish_ms[0])
    horizon = finish - float(timeline.iteration_ms[0])
    segments: list[Segment] = []
    for visit in _walk(graph, timeline):
        segments.append(_segment(graph, visit, horizon))
        if visit.start_ms <= horizon + TOLERANCE_MS:
            break
    else:
        if segments and segments[-1].start_ms > horizon:  # the walk ran out of kept iterations
            rest = Visit(None, 0, segments[-1].rank, horizon, segments[-1].start_ms)
            segments.append(_segment(graph, rest, horizon))
    return [s for s in reversed(segments) if s.duration_ms > 0]


def critical_cycle(graph: Graph, timeline: Timeline) -> tuple[list[int], float, int] | None:
    """A closed chain that sets the period: operations on it, its length in ms, its iterations.

    The length divided by the iterations bounds the period from below whatever the costs of the
    operations are (the cycle mean of a max-plus system); at these costs it is the period.
    """
    seen: dict[tuple[int, int], tuple[int, Visit]] = {}
    path: list[Visit] = []
    for visit in _walk(graph, timeline):
        if visit.op is not None:
            key = (visit.op, visit.rank)
            if key in seen:
                position, first = seen[key]
                ops = [v.op for v in path[position:] if v.op is not None]
                return ops, first.end_ms - visit.end_ms, first.iteration - visit.iteration
            seen[key] = (len(path), visit)
        path.append(visit)
    if path and path[-1].op is None:  # nothing ever holds the host: it runs free, issuing work
        present = [op for op in graph.ops if op.active is None or op.active[0]]
        return [], sum(op.host_ms for op in present), 1
    return None


def _segment(graph: Graph, visit: Visit, horizon: float) -> Segment:
    start = max(visit.start_ms, horizon)
    if visit.op is None:
        return Segment(HOST_NAME, HOST, "overheads", visit.rank, start, visit.end_ms)
    op = graph.ops[visit.op]
    return Segment(op.name, op.phase, op.resource, visit.rank, start, visit.end_ms)


def _walk(graph: Graph, timeline: Timeline) -> Iterator[Visit]:
    """From the last thing that ends, step by step, to what let it start."""
    walker = _Walker(graph, timeline)
    iteration = len(timeline.steps) - 1
    op, rank = walker.last_to_end(iteration)
    finish = float(timeline.finish_ms[0])
    end = walker.time("end", iteration, op, rank)
    if end < finish - TOLERANCE_MS:  # the host still issues when all streams are empty
        where = walker.host_release(iteration, len(graph.ops), rank)
        released = 0.0 if where is None else walker.time("end", *where, rank)
        yield Visit(None, iteration, rank, released, finish)
        if where is None:
            return
        iteration, op = where
    while True:
        end = walker.time("end", iteration, op, rank)
        cause = None
        if not walker.ended_late(iteration, op, rank):
            start = walker.time("start", iteration, op, rank)
            yield Visit(op, iteration, rank, start, end)
            end, rank = start, walker.last_arrival(iteration, op, rank)
            cause = walker.cause(iteration, op, rank)
        if cause is None:
            cause = walker.host_release(iteration, op, rank)
            released = 0.0 if cause is None else walker.time("end", *cause, rank)
            yield Visit(None, iteration, rank, released, end)
        if cause is None:
            return
        iteration, op = cause


class _Walker:
    """Looks up times of the kept steps of one plan."""

    def __init__(self, graph: Graph, timeline: Timeline) -> None:
        self.graph = graph
        self.steps = timeline.steps
        self.present = [op.active is None or bool(op.active[0]) for op in graph.ops]
        self.before: list[int] = []
        self.last: dict[str, int] = {}
        for index, op in enumerate(graph.ops):
            self.before.append(self.last.get(op.stream, -1))
            if self.present[index]:
                self.last[op.stream] = index

    def time(self, name: str, iteration: int, op: int, rank: int) -> float:
        return float(getattr(self.steps[iteration], name)[op, 0, rank])

    def last_to_end(self, iteration: int) -> tuple[int, int]:
        """Operation and rank that end last in an iteration."""
        ends: NDArray[np.float64] = self.steps[iteration].end[:, 0]
        ends = np.where(np.array(self.present)[:, None], ends, -np.inf)
        op, rank = np.unravel_index(int(np.argmax(ends)), ends.shape)
        return int(op), int(rank)

    def ended_late(self, iteration: int, op: int, rank: int) -> bool:
        """True if the operation ended only because its last launch was late."""
        step = self.steps[iteration]
        cost = np.broadcast_to(self.graph.ops[op].cost_ms, step.end.shape[1:])[0, rank]
        took = step.end[op, 0, rank] - step.start[op, 0, rank]
        return bool(took > cost + TOLERANCE_MS)

    def last_arrival(self, iteration: int, op: int, rank: int) -> int:
        """The rank that a collective waited for."""
        scope, width = self.graph.ops[op].scope, self.graph.intra_group_size
        if scope is None:
            return rank
        ranks = np.arange(self.graph.world_size)
        if scope == "intra":
            ranks = ranks[ranks // width == rank // width]
        elif scope == "cross":
            ranks = ranks[ranks % width == rank % width]
        return int(ranks[np.argmax(self.steps[iteration].ready[op, 0, ranks])])

    def cause(self, iteration: int, op: int, rank: int) -> tuple[int, int] | None:
        """``(iteration, op)`` whose end let the operation start, or None for the host's issue."""
        ready = self.time("ready", iteration, op, rank)
        candidates = [(iteration - dep.lag, dep.op) for dep in self.graph.ops[op].deps]
        stream = self.graph.ops[op].stream
        if self.before[op] >= 0:
            candidates.append((iteration, self.before[op]))
        else:
            candidates.append((iteration - 1, self.last[stream]))
        for where in candidates:
            if where[0] >= 0 and abs(self.time("end", *where, rank) - ready) <= TOLERANCE_MS:
                return where
        return None

    def host_release(self, iteration: int, op: int, rank: int) -> tuple[int, int] | None:
        """The operation that last held the host before it issued this one."""
        while iteration >= 0:
            for index in range(op - 1, -1, -1):
                other = self.graph.ops[index]
                holds = other.blocks_host or other.stream in self.graph.inline_streams
                if holds and self.present[index]:
                    return iteration, index
            iteration, op = iteration - 1, len(self.graph.ops)
        return None

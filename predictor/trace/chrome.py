"""A predicted iteration as a Chrome trace: one process per rank, one track per stream.

The format is Google's "Trace Event Format": complete events (``ph: X``) with start and duration in
microseconds, metadata events (``ph: M``) that name processes and threads. Perfetto and
chrome://tracing open it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from predictor.critical_path import Segment
from predictor.graph import Graph, Op
from predictor.predict import Prediction
from predictor.timeline import Step

US_PER_MS = 1e3
HOST_TRACK = "host"
WAIT = "wait"
TOLERANCE_MS = 1e-9

Event = dict[str, Any]


def chrome_trace(
    prediction: Prediction, *, iterations: int = 2, meta: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The trace of the last iterations before the steady state is reached.

    Args:
        prediction: of one plan.
        iterations: how many to show, >= 1; fewer if the simulation kept fewer. Two show how
            pipelined iterations overlap.
        meta: goes into ``otherData``, which Perfetto shows under "Info".

    Returns:
        The JSON object. Operations carry their ``phase`` in ``cat`` and ``args``; those on the
        critical path have ``args.critical``. A collective that waits for a late rank has an event
        of category ``wait`` before it. Times count from the start of the first iteration shown.
    """
    graph, steps = prediction.graph, prediction.timeline.steps
    first = max(0, len(steps) - max(1, iterations))
    shown = range(first, len(steps))
    origin = min((float(steps[i].issue.min()) for i in shown), default=0.0)
    # issuing the first operation takes time too, and no event may start before 0
    origin -= graph.ops[0].host_ms if graph.ops else 0.0
    tracks = _tracks(graph)
    events = list(_names(graph, tracks))
    for iteration in shown:
        writer = _Writer(graph, steps[iteration], iteration - first, origin, tracks)
        critical = _critical(prediction.critical_path, steps[iteration], graph)
        for rank in range(graph.world_size):
            for index in range(len(graph.ops)):
                events += writer.events(index, rank, (index, rank) in critical)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "iteration_ms": prediction.iteration_ms,
            "provenance": prediction.provenance,
            **(meta or {}),
        },
    }


def _tracks(graph: Graph) -> dict[str, int]:
    """Stream -> thread id, host first, then in the order of the program."""
    streams = dict.fromkeys((HOST_TRACK, *(op.stream for op in graph.ops)))
    return {stream: i for i, stream in enumerate(streams)}


def _names(graph: Graph, tracks: Mapping[str, int]) -> Iterator[Event]:
    for rank in range(graph.world_size):
        yield _meta("process_name", rank, 0, {"name": f"rank {rank}"})
        yield _meta("process_sort_index", rank, 0, {"sort_index": rank})
        for stream, track in tracks.items():
            yield _meta("thread_name", rank, track, {"name": stream})
            yield _meta("thread_sort_index", rank, track, {"sort_index": track})


def _meta(name: str, rank: int, track: int, args: Event) -> Event:
    return {"ph": "M", "name": name, "pid": rank, "tid": track, "args": args}


def _critical(path: tuple[Segment, ...], step: Step, graph: Graph) -> frozenset[tuple[int, int]]:
    """``(op, rank)`` of this step that a segment of the critical path lies in."""
    on_rank: dict[tuple[str, int], list[Segment]] = {}
    for segment in path:
        on_rank.setdefault((segment.name, segment.rank), []).append(segment)
    found = set()
    for index, op in enumerate(graph.ops):
        for rank in range(graph.world_size):
            start, end = float(step.start[index, 0, rank]), float(step.end[index, 0, rank])
            for segment in on_rank.get((op.name, rank), ()):
                overlap = min(end, segment.end_ms) - max(start, segment.start_ms)
                if overlap > TOLERANCE_MS:
                    found.add((index, rank))
    return frozenset(found)


class _Writer:
    """Events of one iteration."""

    def __init__(
        self, graph: Graph, step: Step, iteration: int, origin: float, tracks: Mapping[str, int]
    ) -> None:
        self.graph = graph
        self.step = step
        self.iteration = iteration
        self.origin = origin
        self.tracks = tracks

    def events(self, index: int, rank: int, critical: bool) -> Iterator[Event]:
        """Issue on the host, wait for other ranks, execution."""
        op = self.graph.ops[index]
        if op.active is not None and not bool(op.active[0]):
            return
        times = self.step
        issue, ready, start, end = (
            float(array[index, 0, rank])
            for array in (times.issue, times.ready, times.start, times.end)
        )
        if op.host_ms > 0:
            yield self._event(f"issue {op.name}", HOST_TRACK, rank, issue - op.host_ms, issue, op)
        if op.scope is not None and start - ready > TOLERANCE_MS:
            name = f"wait for ranks: {op.name}"
            yield self._event(name, op.stream, rank, ready, start, op, category=WAIT)
        if end - start > 0:
            yield self._event(op.name, op.stream, rank, start, end, op, critical=critical)

    def _event(
        self,
        name: str,
        stream: str,
        rank: int,
        start: float,
        end: float,
        op: Op,
        *,
        category: str = "",
        critical: bool = False,
    ) -> Event:
        args: Event = {"phase": op.phase, "costs": op.resource, "iteration": self.iteration}
        if op.scope is not None:
            args["ranks"] = op.scope
        if critical:
            args["critical"] = True
        return {
            "ph": "X",
            "name": name,
            "cat": category or op.phase,
            "pid": rank,
            "tid": self.tracks[stream],
            "ts": (start - self.origin) * US_PER_MS,
            "dur": (end - start) * US_PER_MS,
            "args": args,
        }

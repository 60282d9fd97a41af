"""A predicted iteration as a Chrome trace: one process per rank, one track per stream.

The format is Google's "Trace Event Format": complete events (``ph: X``) with start and duration in
microseconds, metadata events (``ph: M``) that name processes and threads. Perfetto and
chrome://tracing open it.
A traced job is shown rank by rank as measured and, below it, as predicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from predictor.iteration.critical_path import HOST_NAME, Segment, absent_ranks
from predictor.iteration.graph import MAIN, Graph, Op
from predictor.iteration.timeline import IterationTimes
from predictor.predict import Prediction
from predictor.trace.events import RankTrace
from predictor.trace.simulate.step import SimulatedTrace

US_PER_MS = 1e3
HOST_TRACK = "host"
WAIT = "wait"
TOLERANCE_MS = 1e-9
STREAMS = ("compute", "prefetch", "comm", "copy")
"""In the order of their tracks; others come behind."""

Event = dict[str, Any]


def chrome_trace(
    prediction: Prediction, *, iterations: int = 2, meta: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the trace of the last iterations before the steady state is reached.

    Args:
        prediction: of one plan.
        iterations: number to show, >= 1; fewer if the simulation kept fewer. Two show how
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
    ranks = range(graph.world_size)
    events = list(process_names(graph, ranks, [f"rank {rank}" for rank in ranks]))
    for iteration in shown:
        number = iteration - first
        events += step_events(
            graph, steps[iteration], prediction.critical_path, origin, ranks, iteration=number
        )
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "iteration_ms": prediction.iteration_ms,
            "provenance": prediction.provenance,
            **(meta or {}),
        },
    }


def process_names(graph: Graph, processes: Sequence[int], names: Sequence[str]) -> Iterator[Event]:
    """Yield the metadata that names the process of each rank and its tracks."""
    for process, name in zip(processes, names, strict=True):
        yield from named_process(process, name, _tracks(graph))


def named_process(process: int, name: str, tracks: Mapping[str, int]) -> Iterator[Event]:
    """Yield the metadata of one process: its name, and the names of its tracks by thread id."""
    yield _meta("process_name", process, 0, {"name": name})
    yield _meta("process_sort_index", process, 0, {"sort_index": process})
    for track_name, track in tracks.items():
        yield _meta("thread_name", process, track, {"name": track_name})
        yield _meta("thread_sort_index", process, track, {"sort_index": track})


def step_events(
    graph: Graph,
    step: IterationTimes,
    path: tuple[Segment, ...],
    origin_ms: float,
    processes: Sequence[int],
    *,
    iteration: int = 0,
) -> Iterator[Event]:
    """Yield the events of one simulated step: issue on the host, wait for ranks, execution.

    Args:
        path: the critical path. Its operations are marked; where it leads over the host, so are
            the issues of that time.
        origin_ms: time of the simulation that becomes 0.
        processes: of each rank of the graph.
        iteration: goes into the arguments of the events.
    """
    tracks = _tracks(graph)
    critical: dict[tuple[str, int], list[Segment]] = {}
    for segment in path:
        critical.setdefault((segment.name, segment.rank), []).append(segment)
    absent = absent_ranks(graph)
    for rank, (index, op) in product(range(graph.world_size), enumerate(graph.ops)):
        if absent[index][rank]:
            continue
        issue, ready, start, end = (
            float(times[index, 0, rank]) for times in (step.issue, step.ready, step.start, step.end)
        )
        args: Event = {"phase": op.phase, "costs": op.resource, "iteration": iteration}
        if op.scope is not None:
            args["ranks"] = op.scope
        waits = op.scope is not None and start - ready > TOLERANCE_MS
        # name, category, track, start, end, and its name on the critical path
        stretches = (
            (f"issue {op.name}", op.phase, _host_track(op), issue - op.host_ms, issue, HOST_NAME),
            (f"wait for ranks: {op.name}", WAIT, op.stream, ready, start if waits else ready, ""),
            (op.name, op.phase, op.stream, start, end, op.name),
        )
        for name, category, track, begun, over, on_path in stretches:
            if over <= begun:
                continue
            marked = any(
                min(over, s.end_ms) - max(begun, s.start_ms) > TOLERANCE_MS
                for s in critical.get((on_path, rank), ())
            )
            times_us = (begun - origin_ms) * US_PER_MS, (over - begun) * US_PER_MS
            event_args = {**args, "critical": True} if marked else args
            yield _event(name, category, processes[rank], tracks[track], times_us, event_args)


def _tracks(graph: Graph) -> dict[str, int]:
    """Map tracks to thread ids: host threads, then streams, in one order for all pipelines."""
    hosts = (_host_track(op) for op in graph.ops)
    streams = {op.stream for op in graph.ops}
    ordered = [stream for stream in STREAMS if stream in streams]
    names = dict.fromkeys((HOST_TRACK, *hosts, *ordered, *sorted(streams)))
    return {name: i for i, name in enumerate(names)}


def _host_track(op: Op) -> str:
    return HOST_TRACK if op.thread == MAIN else f"{HOST_TRACK} {op.thread}"


def _meta(name: str, rank: int, track: int, args: Event) -> Event:
    return {"ph": "M", "name": name, "pid": rank, "tid": track, "args": args}


def _event(
    name: str, category: str, process: int, track: int, times_us: tuple[float, float], args: Event
) -> Event:
    """Return a complete event with its start and duration."""
    start, duration = times_us
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": process,
        "tid": track,
        "ts": start,
        "dur": duration,
        "args": args,
    }


def comparison_trace(
    traces: Sequence[RankTrace],
    simulated: SimulatedTrace | None,
    *,
    meta: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the Chrome trace of measured ranks, each with its prediction below it.

    Args:
        traces: the simulated ones, in the order of the simulation.
        simulated: the prediction; None draws the measurement alone.

    Returns:
        The JSON object: processes "rank 0 measured", "rank 0 predicted", ... Times count from the
        start of the last step on the rank that began it first, in both; a prediction holds that
        step and the work left on the device before it.
    """
    origin = min((trace.steps[-1].start_us for trace in traces), default=0.0)
    events: list[Event] = []
    for position, trace in enumerate(traces):
        events += _measured_events(trace, 2 * position, origin)
    if simulated is not None:
        processes = [2 * position + 1 for position in range(len(traces))]
        names = [f"rank {trace.rank} predicted" for trace in traces]
        events += process_names(simulated.graph, processes, names)
        path = simulated.critical_path
        begin = path[0].start_ms if path else 0.0
        events += step_events(simulated.graph, simulated.timeline.steps[0], path, begin, processes)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(meta or {})}


def _measured_events(trace: RankTrace, process: int, origin_us: float) -> Iterator[Event]:
    threads = dict.fromkeys(f"host {e.thread}" for e in trace.host)
    streams = dict.fromkeys(f"stream {e.stream}" for e in trace.device)
    tracks = {name: i for i, name in enumerate((*threads, *streams))}
    yield from named_process(process, f"rank {trace.rank} measured", tracks)
    for host in trace.host:
        times_us = host.start_us - origin_us, host.end_us - host.start_us
        shapes = {"shapes": host.shapes} if host.shapes else {}
        track = tracks[f"host {host.thread}"]
        yield _event(host.name, host.kind, process, track, times_us, shapes)
    for device in trace.device:
        call = device.collective
        kind, size = (
            (device.kind, device.size_bytes) if call is None else (call.op, call.size_bytes)
        )
        times_us = device.start_us - origin_us, device.end_us - device.start_us
        sizes = {} if size is None else {"size_bytes": size}
        track = tracks[f"stream {device.stream}"]
        yield _event(device.name, kind, process, track, times_us, sizes)

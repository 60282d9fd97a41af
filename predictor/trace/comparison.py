"""A Chrome trace that shows each rank as measured and, below it, as predicted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from predictor.trace.chrome import Event, named_process, process_names, step_events
from predictor.trace.events import DeviceEvent, HostEvent, RankTrace
from predictor.trace.simulate.step import SimulatedTrace


def comparison_trace(
    traces: Sequence[RankTrace],
    simulated: SimulatedTrace | None,
    *,
    meta: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The Chrome trace.

    Args:
        traces: those that were simulated, in that order.
        simulated: the prediction; None draws only what was measured.
        meta: goes into ``otherData``, which Perfetto shows under "Info".

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
        yield _event(host, process, tracks[f"host {host.thread}"], origin_us, host.kind)
    for device in trace.device:
        kind = device.kind if device.collective is None else device.collective.op
        yield _event(device, process, tracks[f"stream {device.stream}"], origin_us, kind)


def _event(
    event: HostEvent | DeviceEvent, process: int, track: int, origin_us: float, category: str
) -> Event:
    return {
        "ph": "X",
        "name": event.name,
        "cat": category,
        "pid": process,
        "tid": track,
        "ts": event.start_us - origin_us,
        "dur": event.end_us - event.start_us,
        "args": _args(event),
    }


def _args(event: HostEvent | DeviceEvent) -> Event:
    if isinstance(event, HostEvent):
        return {"shapes": event.shapes} if event.shapes else {}
    call = event.collective
    size = event.size_bytes if call is None else call.size_bytes
    return {} if size is None else {"size_bytes": size}

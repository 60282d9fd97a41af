"""Callers of ops from the times of a Kineto trace, where an execution trace may have them wrong."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from predictor.trace.events import HostEvent, RankTrace
from predictor.trace.execution import ExecutionTrace

GLOO = "gloo:"


def renested(trace: ExecutionTrace, times: RankTrace | None) -> ExecutionTrace:
    """The trace with the callers that its Kineto trace shows, if gloo took part.

    gloo ends its records on threads of its own, after which the observer takes later ops for
    children of whatever was open. Spans on a thread nest, whoever ends a record.
    """
    gloo = any(node.name.startswith(GLOO) for node in trace.nodes)
    if times is None or not gloo:
        return trace
    threads: dict[int, list[HostEvent]] = defaultdict(list)
    for event in times.host:
        if event.node is not None and not event.name.startswith(GLOO):
            threads[event.thread].append(event)
    parents: dict[int, int] = {}
    for events in threads.values():
        events.sort(key=lambda event: (event.start_us, -event.end_us, event.node or 0))
        callers: list[HostEvent] = []
        for event in events:
            while callers and callers[-1].end_us < event.end_us:
                callers.pop()
            parents[event.node or 0] = (callers[-1].node or 0) if callers else 0
            callers.append(event)
    nodes = (
        replace(node, parent=parents[node.id]) if node.id in parents else node
        for node in trace.nodes
    )
    return replace(trace, nodes=tuple(nodes))

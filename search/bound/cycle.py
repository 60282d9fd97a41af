"""The critical cycle of one rank that meets no other, as fast as plain numbers allow.

The same timeline as `predictor.iteration.timeline`, of one plan on one rank, which the bound runs
thousands of times at other costs. What let every operation start is kept, so that the cycle is
found by going back from what ends last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from predictor.iteration.graph import Graph, Op
from predictor.iteration.timeline import MAX_ITERATIONS, PERIOD_TOLERANCE

Visit = tuple[int, int]
"""An operation in an iteration: the iteration, the operation's position."""


class Node(NamedTuple):
    """An operation as its host thread and its stream see it.

    Args:
        thread, stream: their numbers.
        host_ms: from when the thread is free until all of it is issued.
        first_ms: from when the thread is free until it may start.
        last_ms: from when all of it is issued until it can end; None where that says nothing.
        inline: it runs on the thread, not on the stream.
        holds: the thread waits for its end.
        deps: positions of what it waits for, and how many iterations ago.
    """

    thread: int
    stream: int
    host_ms: float
    first_ms: float
    last_ms: float | None
    inline: bool
    holds: bool
    deps: tuple[tuple[int, int], ...]


def make_nodes(graph: Graph, gone: Sequence[bool]) -> tuple[list[Node], list[int]]:
    """The operations of a graph, of which plans may do without those that are ``gone``; and which
    operation each node stands for.

    Without an operation its stream and its host go on as they were, and what depends on it waits
    for what it would have waited for (`predictor.iteration.timeline`). With it, either takes its
    time. So it becomes two, neither of which waits for what the other does: one on its stream, and
    one on its own, which has its dependencies and its dependants.
    """
    ops: list[Op] = []
    origin: list[int] = []
    place: list[int] = []
    for index, (op, without) in enumerate(zip(graph.ops, gone, strict=True)):
        if without:
            alone = f"{op.name} {index} alone"
            bare = replace(op, host_ms=0.0, kernels=1, blocks_host=False)
            ops += [replace(bare, deps=()), replace(bare, stream=alone, thread=alone)]
        else:
            ops.append(op)
        origin += [index] * (len(ops) - len(origin))
        place.append(len(ops) - 1)
    threads = {name: i for i, name in enumerate(dict.fromkeys(op.thread for op in ops))}
    streams = {name: i for i, name in enumerate(dict.fromkeys(op.stream for op in ops))}
    launch = graph.launch_latency_ms
    nodes = []
    for op in ops:
        inline = op.stream in graph.inline_streams
        nodes.append(
            Node(
                threads[op.thread],
                streams[op.stream],
                op.host_ms,
                op.host_ms if inline else op.host_ms / op.kernels + launch,
                launch if op.kernels > 1 and not inline else None,
                inline,
                inline or op.blocks_host,
                tuple((place[dep.op], dep.lag) for dep in op.deps),
            )
        )
    return nodes, origin


def critical_cycle(nodes: Sequence[Node], costs: Sequence[float]) -> tuple[list[int], float, int]:
    """A closed chain that sets the period: its operations, its length in ms, its iterations.

    Length divided by iterations bounds the period from below at any costs, and equals it at these.
    Where nothing ever blocks the host there are no operations, but what a thread takes to issue.
    """
    run = _Run(nodes, costs)
    visit = run.last
    seen: dict[int, tuple[int, int]] = {}
    path: list[int] = []
    while visit is not None:
        iteration, op = visit
        if not run.late[iteration][op]:
            if op in seen:
                position, first = seen[op]
                length = run.ends[first][op] - run.ends[iteration][op]
                return path[position:], length, first - iteration
            seen[op] = len(path), iteration
            path.append(op)
        visit = run.causes[iteration][op]
    issuing = [0.0] * (1 + max(node.thread for node in nodes))
    for node in nodes:
        issuing[node.thread] += node.host_ms
    return [], max(issuing), 1


class _Run:
    """Iterations until the period settles.

    Attributes:
        ends: of every operation in ms, by iteration.
        causes: what ended when it could start, or when it was issued; None for the beginning.
        late: it ended because its last launch was late, whatever it took.
        last: what ends last of all.
    """

    def __init__(self, nodes: Sequence[Node], costs: Sequence[float]) -> None:
        self.nodes, self.costs = nodes, costs
        self.ends: list[list[float]] = []
        self.causes: list[list[Visit | None]] = []
        self.late: list[list[bool]] = []
        # when each is free, and what it did until then
        begin: tuple[float, Visit | None] = (0.0, None)
        self.threads = [begin] * (1 + max(node.thread for node in nodes))
        self.streams = [begin] * (1 + max(node.stream for node in nodes))
        before = self._times()
        advance: list[float] = []
        for iteration in range(MAX_ITERATIONS):
            self._iterate(iteration)
            now = self._times()
            was, advance = advance, [b - a for a, b in zip(before, now, strict=True)]
            before = now
            if iteration > 1:
                off = max(abs(a - b) for a, b in zip(was, advance, strict=True))
                if off <= PERIOD_TOLERANCE * max(advance):
                    break
        ends = self.ends[-1]
        last = max(range(len(ends)), key=ends.__getitem__)
        free, held = max(self.threads, key=lambda thread: thread[0])
        # a host may still issue when all streams are empty
        self.last = (len(self.ends) - 1, last) if ends[last] >= free else held

    def _times(self) -> list[float]:
        return [time for time, _ in (*self.threads, *self.streams)]

    def _iterate(self, iteration: int) -> None:
        """One more iteration."""
        threads, streams = self.threads, self.streams
        ends: list[float] = []
        causes: list[Visit | None] = []
        late: list[bool] = []
        self.ends.append(ends)
        for index, (node, cost) in enumerate(zip(self.nodes, self.costs, strict=True)):
            thread, stream, host_ms, first_ms, last_ms, inline, holds, deps = node
            free, held = threads[thread]
            issued = free + host_ms
            ready, cause = free + first_ms, held
            if not inline:
                time, busy = streams[stream]
                if time >= ready and busy is not None:
                    ready, cause = time, busy
            for op, lag in deps:
                if lag <= iteration and (time := self.ends[iteration - lag][op]) >= ready:
                    ready, cause = time, (iteration - lag, op)
            end, behind = ready + cost, False
            if last_ms is not None and issued + last_ms > end:
                end, cause, behind = issued + last_ms, held, True
            ends.append(end)
            causes.append(cause)
            late.append(behind)
            here = iteration, index
            streams[stream] = end, here
            threads[thread] = (end, here) if holds else (issued, held)
        self.causes.append(causes)
        self.late.append(late)

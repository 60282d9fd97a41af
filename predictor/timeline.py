"""The synchronized timeline: when every operation starts and ends on every rank.

After Lin et al. 2024, Algorithm 1, with any number of streams and collectives in flight. One host
thread per rank issues the operations in program order; streams run theirs in order; a collective
starts when its last rank arrives. The iteration is repeated until its period no longer changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from predictor.graph import Graph, Op

Array = NDArray[np.float64]

MAX_ITERATIONS = 16
PERIOD_TOLERANCE = 1e-9


@dataclass(frozen=True, eq=False)
class Step:
    """When the operations of one iteration ran; each array is ``[ops, plans, ranks]`` in ms.

    ``issue`` is when the host had issued an operation, ``ready`` when its own rank could start it.
    """

    issue: Array
    ready: Array
    start: Array
    end: Array


@dataclass(frozen=True, eq=False)
class Timeline:
    """``iteration_ms[plans]`` in the steady state, and the iterations that led there, if kept."""

    iteration_ms: Array
    steps: tuple[Step, ...]
    finish_ms: Array
    """When the last iteration was over on all ranks, ``[plans]``."""


class _Clock:
    """Host thread and streams of every rank, ``[plans, ranks]`` each."""

    def __init__(self, graph: Graph, plans: int) -> None:
        self.graph = graph
        self.shape = (plans, graph.world_size)
        self.host = np.zeros(self.shape)
        self.streams = {op.stream: np.zeros(self.shape) for op in graph.ops}
        zero = np.zeros(self.shape)
        self.ends: list[list[Array]] = [[zero] * len(graph.ops)]

    def end_of(self, op: int, lag: int) -> Array:
        """End of an operation ``lag`` iterations ago; before the first iteration all is done."""
        if lag < len(self.ends):
            return self.ends[-1 - lag][op]
        return self.ends[0][op]

    def run(self, index: int, op: Op) -> tuple[Array, Array, Array, Array]:
        """Issue and execute one operation; returns (issue, ready, start, end)."""
        graph = self.graph
        inline = op.stream in graph.inline_streams
        issue = self.host + op.host_ms
        if inline:
            ready = issue
        else:
            first = self.host + op.host_ms / op.kernels + graph.launch_latency_ms
            ready = np.maximum(first, self.streams[op.stream])
        for dep in op.deps:
            ready = np.maximum(ready, self.end_of(dep.op, dep.lag))
        start = meet(ready, op.scope, graph)
        end = start + op.cost_ms
        if op.kernels > 1 and not inline:
            end = np.maximum(end, issue + graph.launch_latency_ms)
        if op.active is not None:
            gone = ~op.active[:, None]
            issue = np.where(gone, self.host, issue)
            # a dependant of an absent operation waits for what the absent one would have waited
            end = np.where(gone, _deps_end(self, op), end)
            self.streams[op.stream] = np.where(gone, self.streams[op.stream], end)
            self.host = np.where(gone, self.host, end if inline or op.blocks_host else issue)
        else:
            self.streams[op.stream] = end
            self.host = end if inline or op.blocks_host else issue
        self.ends[-1][index] = end
        return issue, ready, start, end

    def state(self) -> Array:
        """When the host and each stream of every rank are free, ``[host and streams, plans,
        ranks]``."""
        return np.stack([self.host, *self.streams.values()])


def _deps_end(clock: _Clock, op: Op) -> Array:
    end = np.zeros(clock.shape)
    for dep in op.deps:
        end = np.maximum(end, clock.end_of(dep.op, dep.lag))
    return end


def meet(arrival: Array, scope: str | None, graph: Graph) -> Array:
    """Arrival times ``[plans, ranks]`` to start times: the last arrival within each group."""
    if scope is None:
        return arrival
    if scope == "world":
        last = arrival.max(axis=-1, keepdims=True)
    else:
        grouped = arrival.reshape(len(arrival), -1, graph.intra_group_size)
        last = grouped.max(axis=-1 if scope == "intra" else -2, keepdims=True)
        return np.broadcast_to(last, grouped.shape).reshape(arrival.shape)
    return np.broadcast_to(last, arrival.shape)


def simulate(graph: Graph, *, plans: int = 1, keep_steps: bool = False) -> Timeline:
    """Repeat the iteration until its period settles.

    Args:
        graph: the iteration; costs are ``[ranks]`` or ``[plans, ranks]``.
        plans: size of the leading axis.
        keep_steps: also return when every operation ran, for breakdown and traces.
    """
    clock = _Clock(graph, plans)
    steps: list[Step] = []
    states = [clock.state()]
    settled = np.full(plans, np.nan)
    for iteration in range(MAX_ITERATIONS):
        clock.ends.append(list(clock.ends[-1]))
        del clock.ends[:-4]  # no dependency reaches back further than three iterations
        ran = [clock.run(index, op) for index, op in enumerate(graph.ops)]
        if keep_steps:
            steps.append(Step(*(np.stack(times) for times in zip(*ran, strict=True))))
        states.append(clock.state())
        if iteration > 1:
            settled = np.where(np.isnan(settled), _period(states), settled)
            if not np.isnan(settled).any():
                break
    # a schedule that alternates has no single period: take the mean of its second half
    half = len(states) // 2
    mean = (states[-1] - states[half]).max(axis=(0, 2)) / (len(states) - 1 - half)
    finish = states[-1].max(axis=(0, 2))
    return Timeline(np.where(np.isnan(settled), mean, settled), tuple(steps), finish)


def _period(states: list[Array]) -> Array:
    """The period if the last two iterations advanced every stream alike, else NaN; ``[plans]``.

    What finishes last need not set the pace: a stream that takes longer per iteration but started
    earlier overtakes it in the end. So the stream that advances most gives the period.
    """
    before, last = np.diff(states[-3:], axis=0)
    period = last.max(axis=(0, 2))
    off = np.abs(last - before).max(axis=(0, 2))
    return np.where(off <= PERIOD_TOLERANCE * period, period, np.nan)

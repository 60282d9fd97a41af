"""The synchronized timeline: when every operation starts and ends on every rank.

An iteration (`predictor.iteration.program`) is repeated until its period no longer changes; a
recorded trace runs once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from predictor.iteration.graph import Dep, Graph, Mask, Op, Scope
from predictor.iteration.program import ISSUE, LAUNCH, Program, thread_names

Array = NDArray[np.float64]

MAX_ITERATIONS = 16
PERIOD_TOLERANCE = 1e-9


@dataclass(frozen=True, eq=False)
class IterationTimes:
    """Times of the operations of one iteration; each array is ``[ops, plans, ranks]`` in ms.

    ``issue`` is when the host has issued an operation, ``ready`` when its own rank could start it.
    """

    issue: Array
    ready: Array
    start: Array
    end: Array


@dataclass(frozen=True, eq=False)
class Timeline:
    """``iteration_ms[plans]`` in the steady state, and the iterations that led there, if kept."""

    iteration_ms: Array
    steps: tuple[IterationTimes, ...]
    finish_ms: Array
    """Time at which the last simulated iteration ends on all ranks, ``[plans]``."""


class _Clock(Program[Array]):
    """Host threads and streams of every rank, ``[plans, ranks]`` each."""

    def __init__(self, graph: Graph, plans: int) -> None:
        super().__init__(graph)
        self.shape = (plans, graph.world_size)
        self.begin = np.zeros(self.shape)
        self.threads = {thread: self.begin for thread in thread_names(graph)}
        self.absent = [op.absent(graph.world_size) for op in graph.ops]
        self.streams = {op.stream: self.begin for op in graph.ops}
        self.crowded = any(op.fills for op in graph.ops)
        self.filling: dict[tuple[int, int], dict[str, tuple[list[float], list[float]]]] = {}
        self.ends: list[list[Array]] = [[self.begin] * len(graph.ops)]

    def iterate(self) -> list[tuple[Array, Array, Array, Array]]:
        """Run all operations once."""
        self.ends.append(list(self.ends[-1]))
        del self.ends[:-4]  # no dependency reaches back further than three iterations
        return [self.run(index, op) for index, op in enumerate(self.graph.ops)]

    def run(self, index: int, op: Op) -> tuple[Array, Array, Array, Array]:
        issue, ready, start, end = super().run(index, op)
        absent = self.absent[index]
        if absent is not None and op.ranks is not None:
            start = np.where(absent, end, start)
        self.ends[-1][index] = end
        if op.fills:
            self._fill(op, start, end, absent)
        return issue, ready, start, end

    def end_of(self, dep: Dep) -> Array:
        """Return the end of an operation; before the first iteration all have ended."""
        return self.ends[max(-1 - dep.lag, -len(self.ends))][dep.op]

    def exists_always(self, index: int, op: Op) -> bool:
        return self.absent[index] is None

    def later(self, time: Array, ms: float) -> Array:
        return time + ms

    def latest(self, *times: Array) -> Array:
        return reduce(np.maximum, times)

    def spend(self, time: Array, cost: str, index: int, op: Op) -> Array:
        absent = self.absent[index]
        after = time if cost == LAUNCH else time + (op.host_ms if cost == ISSUE else op.cost_ms)
        return (
            after if absent is None else np.where(absent, time if cost == ISSUE else -np.inf, after)
        )

    def meet(self, ready: Array, index: int, op: Op) -> Array:
        # plans without the collective do not wait; ranks without it delay no other rank
        arrival = ready if op.ranks is None else self.spend(ready, LAUNCH, index, op)
        return meet(arrival, op.scope, self.graph)

    def queue(self, ready: Array, index: int, op: Op) -> Array:
        if not self.crowded or op.fills is None:
            return ready
        return self._after_filling(op, ready, self.absent[index])

    def _places(self, mask: Mask | None) -> Iterator[tuple[int, int]]:
        """Yield the plans and ranks on which an operation exists."""
        absent = np.broadcast_to(False if mask is None else mask, self.shape)
        return ((int(plan), int(rank)) for plan, rank in np.argwhere(~absent))

    def _fill(self, op: Op, start: Array, end: Array, absent: Mask | None) -> None:
        for place in self._places(absent):
            starts, ends = self.filling.setdefault(place, {}).setdefault(op.stream, ([], []))
            starts.append(float(start[place]))
            ends.append(float(end[place]))

    def _after_filling(self, op: Op, ready: Array, absent: Mask | None) -> Array:
        """Return when a ready kernel gets the device: after the kernel that fills it at the time.

        The blocks of a kernel are scheduled after those of kernels that started earlier. By the
        time the last block of an earlier kernel is scheduled, that kernel has almost ended.
        """
        starting = np.array(np.broadcast_to(ready, self.shape))
        for place in self._places(absent):
            for stream, (starts, ends) in self.filling.get(place, {}).items():
                last = bisect_left(starts, starting[place]) - 1
                if stream != op.stream and last >= 0:
                    starting[place] = max(starting[place], ends[last])
        return starting

    def state(self) -> Array:
        """Return when threads and streams are free, ``[threads and streams, plans, ranks]``."""
        return np.stack([*self.threads.values(), *self.streams.values()])


def meet(arrival: Array, scope: Scope | None, graph: Graph) -> Array:
    """Turn arrival times ``[plans, ranks]`` into start times: the last arrival in each group."""
    if scope is None:
        return arrival
    if isinstance(scope, tuple):
        members, start = list(scope), arrival.copy()
        start[:, members] = arrival[:, members].max(axis=-1, keepdims=True)
        return start
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
        plans: number of plans that the costs hold.
        keep_steps: also return the times of every operation, for breakdown and traces.
    """
    clock = _Clock(graph, plans)
    steps: list[IterationTimes] = []
    states = [clock.state()]
    settled = np.full(plans, np.nan)
    for iteration in range(MAX_ITERATIONS):
        ran = clock.iterate()
        if keep_steps:
            steps.append(IterationTimes(*(np.stack(times) for times in zip(*ran, strict=True))))
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


def simulate_once(graph: Graph) -> Timeline:
    """Run a graph a single time from idle: ``iteration_ms`` is when its last operation ends.

    The times of the step are kept. Work left over from before a traced step must be part of the
    graph.
    """
    clock = _Clock(graph, 1)
    ran = clock.iterate()
    step = IterationTimes(*(np.stack(times) for times in zip(*ran, strict=True)))
    finish = clock.state().max(axis=(0, 2))
    return Timeline(finish, (step,), finish)


def _period(states: list[Array]) -> Array:
    """Return the period if the last two iterations advanced alike, else NaN; ``[plans]``.

    The last stream to finish need not set the pace: a stream that takes longer per iteration but
    started earlier overtakes it eventually. So the stream that advances most gives the period.
    """
    before, last = np.diff(states[-3:], axis=0)
    period = last.max(axis=(0, 2))
    off = np.abs(last - before).max(axis=(0, 2))
    return np.where(off <= PERIOD_TOLERANCE * period, period, np.nan)

"""One rank's operations as a compiled program whose critical cycles bound plans from below."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from operator import and_, or_

import numpy as np

from predictor.iteration.graph import Dep, Graph, Op
from predictor.iteration.steady_state import CompiledTimeline

Users = frozenset[int] | None
"""Lookup groups of which a plan uses at least one if it has an operation; None if all plans have
the operation."""
ITERATIONS = 5
"""Iterations in which the order of operations is followed."""
Steps = list[list[tuple[int, int]]]
"""For each operation, those that it is connected with, and how many iterations away."""


def compile_rank(
    graph: Graph, users: Sequence[Users], offered: Iterable[frozenset[int]] = ()
) -> tuple[CompiledTimeline, list[int]]:
    """Compile a graph some of whose operations are absent from some plans.

    An absent operation leaves its stream and its host as they were; its dependants wait for its
    dependencies instead (`predictor.iteration.program`). To bound both cases an optional operation
    is split in two that do not wait for each other: one on its stream, and one on a stream of its
    own with its dependencies and dependants. The one on the stream waits as well, and is waited
    for, where that puts operations in an order only that they have in every plan (`Waits`).

    Args:
        users: for each operation, which plans have it.
        offered: lookup groups that a table can be in, for some of the tables.

    Returns:
        The program, and for each of its operations the index of the one in the graph.
    """
    ops: list[Op] = []
    origin: list[int] = []
    place: list[int] = []
    for index, (op, groups) in enumerate(zip(graph.ops, users, strict=True)):
        if groups is not None:
            alone = f"{op.name} {index} alone"
            bare = replace(op, host_ms=0.0, kernels=1, blocks_host=False, cost_ms=np.zeros((1, 1)))
            ops += [replace(bare, deps=()), replace(bare, stream=alone, thread="alone")]
        else:
            ops.append(op)
        origin += [index] * (len(ops) - len(origin))
        place.append(len(ops) - 1)
    on_stream = [at - (groups is not None) for at, groups in zip(place, users, strict=True)]
    moved = [
        replace(op, deps=tuple(replace(dep, op=place[dep.op]) for dep in op.deps)) for op in ops
    ]
    graph_of_streams = replace(graph, ops=moved)
    waits = Waits(graph, users, offered) if any(groups is not None for groups in users) else ()
    for index, dep in waits:
        graph_of_streams.wait(on_stream[index], replace(dep, op=on_stream[dep.op]))
    return CompiledTimeline(graph_of_streams, whole=True), origin


class Waits:
    """Waits of a graph, for or of optional operations, that hold in every plan.

    Iterate over it for the index of a waiting operation and what it waits for. With some optional
    operations absent, a chain of operations still takes at least the time of those that are present
    if any two of them, one behind the other, are in that order wherever a plan has both. A wait
    holds if that is so for all chains through it. Operations that all plans have divide chains, so
    only optional ones are looked at in between. One thread issues all operations.

    Sets of operations are bits of a number: ``operation + iteration * operations``.
    """

    def __init__(
        self, graph: Graph, users: Sequence[Users], offered: Iterable[frozenset[int]]
    ) -> None:
        self.ops, self.users, self.count = graph.ops, users, len(graph.ops)
        self.groups = sorted({group for groups in users if groups for group in groups})
        self.offered = {groups for groups in offered if groups <= {*self.groups}}
        self.before = self._before()
        self.on_host = {i for i, op in enumerate(graph.ops) if op.stream in graph.inline_streams}
        self.behind: Steps = [[] for _ in graph.ops]
        self.ahead: Steps = [[] for _ in graph.ops]
        streams: dict[str, list[int]] = {}
        for index, op in enumerate(graph.ops):
            streams.setdefault(op.stream, []).append(index)
        for stream in streams.values():
            for earlier, later in zip([stream[-1], *stream], stream, strict=False):
                self._connect(earlier, later, int(earlier >= later))

    def _connect(self, earlier: int, later: int, lag: int) -> None:
        self.ahead[later].append((earlier, lag))
        self.behind[earlier].append((later, lag))

    def _before(self) -> list[int]:
        """Return for each operation in the last iteration those that end before it starts, in
        every plan that has both.

        They are what it waits for by itself, and what these start behind if a plan has them for
        sure: all plans do, or each of the groups of which the plan uses one brings one of them.
        """
        every: list[int | None] = [None, *self.groups]
        before: list[int] = []
        absent: list[int] = []  # waited for in place of an absent operation
        ended: list[dict[int | None, int]] = []  # before its end, if a plan uses a group
        streams: dict[str, tuple[int, dict[int | None, int]]] = {}
        for at in range(ITERATIONS * self.count):
            iteration, index = divmod(at, self.count)
            op, groups = self.ops[index], self.users[index]
            deps = [(iteration - dep.lag) * self.count + dep.op for dep in op.deps]
            deps = [dep for dep in deps if dep >= 0]
            earlier, behind = streams.get(op.stream, (0, dict.fromkeys(every, 0)))
            waited = reduce(or_, (1 << dep | absent[dep] for dep in deps), 0)
            of_deps = {g: reduce(or_, (ended[dep][g] for dep in deps), 0) for g in every}
            start = {g: of_deps[g] | behind[g] for g in every}
            one_of = [*self.offered, *([groups] if groups else [])]
            sure = [reduce(and_, (start[g] for g in alike)) for alike in one_of]
            before.append(reduce(or_, sure, waited | earlier | start[None]))
            absent.append(0 if groups is None else waited)
            end = before[at] | 1 << at
            has = {g: groups is None or g in groups for g in every}
            ended.append({g: end if has[g] else of_deps[g] for g in every})
            streams[op.stream] = (
                earlier | 1 << at,
                {g: behind[g] | (end if has[g] else 0) for g in every},
            )
        return before[-self.count :]

    def __iter__(self) -> Iterator[tuple[int, Dep]]:
        for index, op in enumerate(self.ops):
            for dep in op.deps:
                if self.users[index] is None and self.users[dep.op] is None:
                    continue
                self._connect(dep.op, index, dep.lag)
                if self._holds(dep.op, index, dep.lag):
                    yield index, dep
                else:
                    self.ahead[index].pop()
                    self.behind[dep.op].pop()

    def _holds(self, waited: int, index: int, lag: int) -> bool:
        """Tell whether the last operations of all chains through a wait start behind the first ones
        wherever a plan has both."""
        first, last = self._ends(waited, self.ahead), self._ends(index, self.behind)
        # what runs on a host waits for no launch, and an optional operation holds up its thread
        optional = {i for i in first if self.users[i] is not None}
        if self.on_host & (last.keys() | optional):
            return False
        if lag + max(first.values()) + max(last.values()) >= ITERATIONS:
            return False
        at_last = ITERATIONS - 1 - lag
        mask = sum(1 << i + (at_last - away) * self.count for i, away in first.items())
        return not any(mask >> away * self.count & ~self.before[i] for i, away in last.items())

    def _ends(self, start: int, steps: Steps) -> dict[int, int]:
        """Return the operations that steps lead to from one, up to the next that all plans have,
        with the iterations to the nearest: others of the same operation lie beyond it."""
        away, waiting = {start: 0}, [start]
        while waiting:
            index = waiting.pop()
            for other, lag in steps[index] if self.users[index] is not None else ():
                if away[index] + lag < away.get(other, math.inf):
                    away[other] = away[index] + lag
                    waiting.append(other)
        return away

"""Which rank waits for which on the critical path, and for whose tables; what hosts work on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from pydantic import computed_field

from predictor.cost.loads import Load, ShardLoads
from predictor.iteration.critical_path import Segment
from predictor.iteration.graph import COMPUTE, Graph, Op
from predictor.iteration.timeline import IterationTimes
from predictor.model.plan import ShardingPlan
from predictor.model.plan_check import match_plan
from predictor.predict import Prediction
from search.problem import Problem
from shardopt.formatting import ms, percent, phase_words

TOLERANCE_MS = 1e-9
MIN_SHARE = 1e-3
"""Waits below this share of the iteration are not worth a sentence."""
MAX_TABLES = 3
NAMED = 0.7
"""Tables are named, the largest first, until they make up this part of an operation."""

_OF_TABLES = {
    "embedding_forward": (Load.FORWARD_MS, "lookup of"),
    "embedding_backward": (Load.BACKWARD_MS, "backward of"),
    "prefetch": (Load.PREFETCH_MS, "prefetch of"),
    "input_dist": (Load.IDS, "ids of"),
}
"""Phase -> the column of a shard's load that lengthens its operations, and what they are called."""


@dataclass(frozen=True)
class Cause:
    """An operation that takes longer on the late rank than on the one that waits.

    Args:
        late_ms: on the late rank.
        excess_ms: by how much longer than on the rank that waits.
        tables: plan key and share of the operation, the largest first.
        more: tables that take part and are not named.
    """

    name: str
    phase: str
    late_ms: float
    excess_ms: float
    tables: Mapping[str, float] = field(default_factory=dict)
    more: int = 0


@dataclass(frozen=True)
class Wait:
    """A collective on the critical path that started when its last rank arrived.

    Args:
        rank: that waits longest.
        late_rank: that all others wait for.
        wait_ms: of ``rank``; ``median_ms`` of all that are not late.
        causes: why the late rank is late, the largest first; empty where nothing on the path says.
    """

    collective: str
    phase: str
    rank: int
    late_rank: int
    wait_ms: float
    median_ms: float
    waiting: int
    causes: tuple[Cause, ...]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def words(self) -> str:
        """``Rank 3 waits 1.20 ms for rank 0's lookup of t_cat_20 ...``."""
        awaited = f"rank {self.late_rank}"
        if self.causes:
            awaited += "'s " + " and ".join(_cause_words(cause) for cause in self.causes)
        median = f"; the median rank waits {ms(self.median_ms)}" if self.waiting > 1 else ""
        return (
            f"Rank {self.rank} waits {ms(self.wait_ms)} for {awaited} "
            f"before {self.collective} ({phase_words(self.phase)}) can start{median}."
        )


def _cause_words(cause: Cause) -> str:
    if not cause.tables:
        return cause.name
    work = _OF_TABLES[cause.phase][1]
    (first, share), *further = cause.tables.items()
    if not further and share > 0.995:
        return f"{work} {first}"
    named = [f"{first} ({percent(share)} of it)"]
    named += [f"{key} ({percent(part)})" for key, part in further]
    rest = f" and {cause.more} more" if sum(cause.tables.values()) < NAMED else ""
    return f"{work} {', '.join(named)}{rest}"


def find_waits(problem: Problem, plan: ShardingPlan, prediction: Prediction) -> list[Wait]:
    """List the waits of ranks on the critical path, the longest first.

    Waits hidden behind other work are left out: only collectives on the path count, and only the
    time in which a rank computes nothing.
    """
    least = MIN_SHARE * prediction.iteration_ms
    tables = _Tables(problem, plan)
    find = _host_arrivals if COMPUTE in prediction.graph.inline_streams else _arrivals
    waits = []
    for step, index, path in find(prediction):
        wait = _wait(prediction.graph, step, index, path, tables)
        if wait is not None and wait.wait_ms > least:
            waits.append(wait)
    return sorted(waits, key=lambda w: (-w.wait_ms, w.collective))


Arrival = tuple[IterationTimes, int, Sequence[Segment]]
"""A collective, the iteration it belongs to, and the path up to its last arrival."""


def _arrivals(prediction: Prediction) -> Iterator[Arrival]:
    """Collectives that started when a segment of the path ended and that the next one is."""
    graph, path = prediction.graph, prediction.critical_path
    for place, (before, after) in enumerate(pairwise(path), start=1):
        for step, index, op in _collectives(prediction):
            on_time = abs(step.start[index, 0, before.rank] - after.start_ms) <= TOLERANCE_MS
            if on_time and op.name == after.name and _is_last(graph, step, index, before.rank):
                yield step, index, path[:place]


def _host_arrivals(prediction: Prediction) -> Iterator[Arrival]:
    """Collectives that take no time, as the work is the host's: the path of the last rank to come
    passes all of them."""
    graph, path = prediction.graph, prediction.critical_path
    for step, index, _ in _collectives(prediction):
        for place, segment in enumerate(path, start=1):
            arrival = step.ready[index, 0, segment.rank]
            within = segment.start_ms < arrival <= segment.end_ms
            if within and _is_last(graph, step, index, segment.rank):
                yield step, index, path[:place]


def _collectives(prediction: Prediction) -> Iterator[tuple[IterationTimes, int, Op]]:
    for step in prediction.timeline.steps:
        for index, op in enumerate(prediction.graph.ops):
            if op.scope is not None:
                yield step, index, op


def _is_last(graph: Graph, step: IterationTimes, index: int, rank: int) -> bool:
    """Tell if a rank takes part in a collective and arrives last."""
    op = graph.ops[index]
    absent = op.absent(graph.world_size)
    if absent is not None and np.broadcast_to(absent[0], graph.world_size)[rank]:
        return False
    assert op.scope is not None
    ready = step.ready[index, 0]
    return bool(ready[rank] >= ready[graph.members(op.scope, rank)].max() - TOLERANCE_MS)


def _wait(
    graph: Graph, step: IterationTimes, index: int, path: Sequence[Segment], tables: _Tables
) -> Wait | None:
    op, late_rank = graph.ops[index], path[-1].rank
    assert op.scope is not None
    waiting = [r for r in graph.members(op.scope, late_rank).tolist() if r != late_rank]
    if not waiting:
        return None
    waited = [_idle_ms(graph, step, index, rank) for rank in waiting]
    longest = int(np.argmax(waited))
    rank, wait_ms = waiting[longest], waited[longest]
    causes = _causes(graph, path, rank, wait_ms, tables)
    return Wait(
        op.name, op.phase, rank, late_rank, wait_ms, float(np.median(waited)), len(waiting), causes
    )


def _idle_ms(graph: Graph, step: IterationTimes, index: int, rank: int) -> float:
    """Return the ms from a rank's arrival at a collective to its start, less those it computes."""
    first, last = step.ready[index, 0, rank], step.start[index, 0, rank]
    idle = float(last - first)
    for other, op in enumerate(graph.ops):
        if op.stream == COMPUTE or op.stream in graph.inline_streams:
            start, end = step.start[other, 0, rank], step.end[other, 0, rank]
            idle -= max(0.0, float(min(last, end) - max(first, start)))
    return max(0.0, idle)


def _causes(
    graph: Graph, path: Sequence[Segment], rank: int, wait_ms: float, tables: _Tables
) -> tuple[Cause, ...]:
    """Operations of the late rank, back from its arrival, until their excess explains the wait."""
    causes, explained, late_rank = [], 0.0, path[-1].rank
    for segment in reversed(path):
        if segment.rank != late_rank or explained >= wait_ms * (1 - 1e-6):
            break
        cost = _cost(graph, segment)
        excess = 0.0 if cost is None else float(cost[late_rank] - cost[rank])
        if cost is not None and excess > 0.2 * wait_ms:
            named, more = tables.of(segment.name, segment.phase, late_rank)
            late_ms = float(cost[late_rank])
            causes.append(Cause(segment.name, segment.phase, late_ms, excess, named, more))
        explained += max(0.0, excess)
    return tuple(sorted(causes, key=lambda cause: -cause.excess_ms))


def _cost(graph: Graph, segment: Segment) -> np.ndarray | None:
    """Cost ``[ranks]`` of the operation of a segment; of several of one name, the nearest."""
    costs = [
        np.broadcast_to(op.cost_ms, (1, graph.world_size))[0]
        for op in graph.ops
        if op.name == segment.name
    ]
    off = [abs(float(cost[segment.rank]) - segment.duration_ms) for cost in costs]
    return costs[int(np.argmin(off))] if costs else None


class _Tables:
    """Which tables' shards make the operations of an exchange long, rank by rank."""

    def __init__(self, problem: Problem, plan: ShardingPlan) -> None:
        self.workload = problem.workload
        self.loads = ShardLoads(problem.workload, problem.topology, problem.hardware)
        self.candidate = match_plan(problem.workload, problem.topology, plan)

    def of(self, name: str, phase: str, rank: int) -> tuple[dict[str, float], int]:
        """Tables of an operation with their shares of it, the largest first, and how many more."""
        if phase not in _OF_TABLES:
            return {}, 0
        column = _OF_TABLES[phase][0]
        times: dict[str, float] = {}
        tables = zip(self.workload.keys, self.workload.tables, self.candidate, strict=True)
        for index, (key, table, plan) in enumerate(tables):
            if name.startswith(f"{table.module}.{plan.sharding_type.short} "):
                ranks, loads = self.loads.of_table(index, plan)
                times[key] = float(loads[ranks == rank, column].sum())
        total = sum(times.values())
        shares = sorted(((-load / total, key) for key, load in times.items() if load > 0))
        named: dict[str, float] = {}
        for share, key in shares[:MAX_TABLES]:
            if sum(named.values()) >= NAMED:
                break
            named[key] = -share
        return named, len(shares) - len(named)


def host_work(graph: Graph) -> dict[str, float]:
    """ms per iteration that the host takes for each phase, the longest first.

    Of the rank whose host does most; the graph is of one plan.
    """
    by_phase: dict[str, np.ndarray] = {}
    for op in graph.ops:
        absent = op.absent(graph.world_size)
        there = 1.0 if absent is None else 1.0 - np.broadcast_to(absent[0], graph.world_size)
        spent = by_phase.setdefault(op.phase, np.zeros(graph.world_size))
        spent += op.host_ms * there
    if not by_phase:
        return {}
    rank = int(sum(by_phase.values(), np.zeros(graph.world_size)).argmax())
    totals = {phase: float(spent[rank]) for phase, spent in by_phase.items() if spent[rank] > 0}
    return dict(sorted(totals.items(), key=lambda item: -item[1]))

"""A traced step as a graph: the work of each rank by stream, and its dependencies.

Only structure and durations enter (docs/model.md, chapter 18). A trace lists
``cudaStreamWaitEvent`` without the event, so this module infers the work that a consumer waits for.
Lin et al. 2024, Algorithm 1, sync on the consumer of the last collective; here several may be in
flight. The graph of several ranks has the nodes of each in order, and shares its collectives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from predictor.errors import InputError
from predictor.iteration.graph import Dep, Graph, Op
from predictor.trace.events import DeviceEvent, RankTrace, TraceStep
from predictor.trace.simulate.host import JOINING, HostItem, Kind, Piece, Role, plain
from predictor.trace.simulate.overheads import TracedOverheads, call_piece, gap_piece
from predictor.units import us

COMMON = ("ProfilerStep", "autograd::", "torch::autograd::", "aten::", "## forward", *JOINING)
"""Prefixes of names that do not tell which collective a wait is for."""
FEWEST_ALIKE = 6
"""Least length of a common prefix of two names of events for their contexts to count as alike."""
HOST, COMPUTE, COLLECTIVE, COPY = "host", "compute", "collective", "copy"
RESOURCES = {HOST: "overheads", COMPUTE: "kernels", COLLECTIVE: "collectives", COPY: "memcpy"}
FILLING_WAVES = 2.0
"""Waves from which on a kernel fills the device for most of its time."""


class _Work(NamedTuple):
    """Launched work with the names of the events around its launch."""

    node: int
    event: DeviceEvent
    stack: tuple[str, ...]


@dataclass(frozen=True)
class ScheduledOp:
    """An operation of one rank before ranks are joined; its dependencies are positions among that
    rank's nodes.

    Args:
        event: of the device; None on the host.
        taken_us: duration of the event, without the gap before it.
    """

    op: Op
    event: DeviceEvent | None = None
    taken_us: float = 0.0


class RankSchedule:
    """The nodes of one rank's step, made of the host's items.

    Args:
        overheads: the host's times. They always count for calls that waited for the device. A pause
            in which the host waited for something that no trace shows, such as data, is taken from
            the step itself, like a kernel's time.
        own_host: take all other host times from the step itself.
        start_us: begin of the step, after that of the first rank.

    ``begin`` and ``end`` are the positions of the step's markers.
    """

    def __init__(
        self,
        trace: RankTrace,
        overheads: TracedOverheads,
        *,
        own_host: bool,
        start_us: float,
    ) -> None:
        self.trace, self.overheads, self.own_host = trace, overheads, own_host
        self.start_us = start_us
        self.nodes: list[ScheduledOp] = []
        self.begin = self.end = 0
        self.pending: dict[int, float] = {}
        self.threads: dict[int, str] = {}
        self.streams: dict[int, str] = {}
        self.comms = {d.stream for d in trace.device if d.collective is not None}
        self.last: dict[str, _Work] = {}
        self.current: dict[int, str] = {}
        self.collectives: list[_Work] = []
        self.latest: dict[str, _Work] = {}
        self.waits: list[tuple[tuple[str, ...], bool]] = []
        """Waits that no launch has followed: names of the events around, True for a collective."""

    def add_backlog(self, step: TraceStep, main: int) -> None:
        """Add the work that the device had not finished when a step began.

        Such work was launched earlier. It sets how long each stream is busy at the start of the
        step, pauses included.
        """
        free: dict[str, float] = {}
        for event in self.trace.device:
            call = self.trace.launches.get(event.correlation)
            if (call is None or call.start_us < step.start_us) and event.end_us > step.start_us:
                if call is None and event.start_us > step.start_us:
                    continue  # its launch is not in the trace, so its time is unknown
                since = max(event.start_us, step.start_us)
                stream = self._stream(event.stream)
                gap_us = max(0.0, since - free.get(stream, step.start_us))
                free[stream] = event.end_us
                self._on_device(main, event, event.end_us - since, gap_us)

    def add_step(self, items: Sequence[HostItem]) -> None:
        """Append the items of the step, of which the first and the last are its markers."""
        main = items[0].thread
        self.begin = self._on_host(main, "step begins", self.start_us)
        for item in items[1:]:
            if item.handoff is None:
                self._spend(item.thread, self._us(item.before))
            else:
                rested = self._on_host(item.handoff, "hands over")
                name, cost_us = f"{item.label} follows another thread", self._us(item.before)
                self._on_host(item.thread, name, cost_us, (rested,))
            if item.role is Role.LAUNCH:
                self._launch(item)
            elif item.role is Role.SYNC:
                self._sync(item)
            elif item.role is Role.WAIT:
                if not item.joins:  # not part of launching a collective
                    joined = any(name.startswith("record_param_comms") for name in item.stack)
                    self.waits.append((item.stack, joined or not item.stack))
                self._spend(item.thread, self._us(call_piece(item)))
        self.end = self._on_host(main, "step ends")

    def _us(self, piece: Piece) -> float:
        return piece.us if self.own_host or piece.idle else self.overheads.us(piece)

    def _spend(self, thread: int, time_us: float) -> None:
        self.pending[thread] = self.pending.get(thread, 0.0) + time_us

    def _on_host(
        self, thread: int, name: str, cost_us: float = 0.0, deps: tuple[int, ...] = ()
    ) -> int:
        """Append work of a thread, with the time that it has spent so far."""
        spent = self.pending.pop(thread, 0.0)
        own = self.threads.setdefault(thread, f"thread {len(self.threads)}")
        cost = np.array([us(cost_us)])
        waits = tuple(map(Dep, deps))
        op = Op(name, HOST, RESOURCES[HOST], f"{HOST} {own}", cost, us(spent), 1, waits, thread=own)
        self.nodes.append(ScheduledOp(op))
        return len(self.nodes) - 1

    def _on_device(
        self,
        thread: int,
        event: DeviceEvent,
        taken_us: float,
        gap_us: float,
        stack: tuple[str, ...] = (),
        host_us: float = 0.0,
        deps: Sequence[int] = (),
        waits: bool = False,
    ) -> None:
        """Append work of a stream."""
        phase = COPY if event.kind != "kernel" else COMPUTE
        phase = phase if event.collective is None else COLLECTIVE
        stream = self._stream(event.stream)
        op = Op(
            event.name,
            phase,
            RESOURCES[phase],
            stream,
            np.array([us(gap_us + taken_us)]),
            us(host_us),
            deps=tuple(map(Dep, deps)),
            blocks_host=waits,
            thread=self.threads.setdefault(thread, f"thread {len(self.threads)}"),
            fills=_fills(event),
        )
        self.nodes.append(ScheduledOp(op, event, taken_us))
        work = _Work(len(self.nodes) - 1, event, stack)
        self.last[stream] = work
        if event.collective is not None:
            self.collectives.append(work)
        else:
            self.latest[stream] = work

    def _launch(self, item: HostItem) -> None:
        waits = item.waits
        if waits:
            issue = self.overheads.us(Piece(Kind.ISSUE, (item.label,), 0.0))
            host_us = max(0.0, issue - latency_us(self.overheads))
        else:
            host_us = self._us(call_piece(item))
        host_us += self.pending.pop(item.thread, 0.0)
        for event in sorted(item.device, key=lambda d: d.start_us):
            stream, deps = self._stream(event.stream), list[int]()
            gap_us = 0.0
            if event.collective is not None:
                current = self.current.get(item.thread) or next(iter(self.current.values()), None)
                if current in self.last:
                    deps.append(self.last[current].node)
                # host time before a collective, which each rank spends separately
                self._spend(item.thread, host_us)
                deps.append(self._on_host(item.thread, f"issue {plain(item.label)}"))
                host_us = 0.0
            else:
                self.current[item.thread] = stream
                deps += self._release(stream, event)
                if stream in self.last:
                    gap_us = self.overheads.us(gap_piece(self.last[stream].event, event, 0.0))
            duration_us = event.end_us - event.start_us
            self._on_device(
                item.thread, event, duration_us, gap_us, item.stack, host_us, deps, waits
            )
            host_us = 0.0
        if waits:
            self._spend(item.thread, self.overheads.us(Piece(Kind.RETURN, (item.label,), 0.0)))

    def _release(self, stream: str, event: DeviceEvent) -> list[int]:
        """Return the nodes that the next work of ``stream`` has to wait for.

        Work that started later in the trace than ``event`` is not among them.
        """
        deps: list[int] = []
        before = [w for w in self.collectives if w.event.start_us <= event.start_us]
        concurrent = [
            work.node
            for name, work in self.latest.items()
            if name != stream and work.event.start_us <= event.start_us
        ]
        for stack, collective in self.waits:
            awaited = (work.node for work in _find_awaited(stack, before, event))
            deps += awaited if collective else concurrent
        self.waits.clear()
        return list(dict.fromkeys(deps))

    def _sync(self, item: HostItem) -> None:
        everything = "Device" in item.label
        streams = list(self.last) if everything else [self.current.get(item.thread, "")]
        deps = tuple(self.last[s].node for s in streams if s in self.last)
        cost = self.overheads.us(Piece(Kind.RETURN, (item.label,), 0.0))
        self._on_host(item.thread, item.label, cost, deps)

    def _stream(self, stream: int) -> str:
        """Name a stream; collective streams by first use, since ids may differ between ranks."""
        if stream not in self.comms:
            return f"stream {stream}"
        used = sum(name.startswith("comm") for name in self.streams.values())
        return self.streams.setdefault(stream, f"comm {used}")


def _find_awaited(
    stack: tuple[str, ...], before: list[_Work], event: DeviceEvent
) -> Iterator[_Work]:
    """Yield the collective launched in the most similar context, and the last that had ended.

    Collectives share a stream and end in order. If none was launched in a context like that of the
    wait, yield the last one.
    """
    scored = [(_alike(stack, work.stack), index) for index, work in enumerate(before)]
    likeness, best = max(scored, default=(0, -1))
    if likeness < FEWEST_ALIKE:
        yield from before[-1:]
        return
    yield before[best]
    yield from [work for work in before if work.event.end_us <= event.start_us][-1:]


def _alike(first: tuple[str, ...], second: tuple[str, ...]) -> int:
    """Return the length of the longest common prefix of two names, one of each stack."""

    def shared(a: str, b: str) -> int:
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))

    telling = [[name for name in stack if not name.startswith(COMMON)] for stack in (first, second)]
    return max((shared(a, b) for a in telling[0] for b in telling[1]), default=0)


def latency_us(overheads: TracedOverheads) -> float:
    """Return the time from the end of a launch to the start on an idle stream.

    The gap of a stream is subtracted, because every operation has it anyway.
    """
    launch = overheads.find(Kind.LATENCY, ("kernel",)).typical_us
    return max(0.0, launch - overheads.find(Kind.GAP, ("stream", "kernel kernel")).typical_us)


def _fills(event: DeviceEvent) -> bool | None:
    """Return True for a kernel that fills the device; None for copies, which have own engines."""
    if event.kind == "memcpy":
        return None
    return event.waves is not None and event.waves >= FILLING_WAVES


CollectiveKey = tuple[tuple[int, ...] | None, str, int]
"""Group, stream and position of a collective, the same on all of its ranks."""


def join_ranks(
    programs: Sequence[RankSchedule], latency_us: float
) -> tuple[Graph, list[list[int]]]:
    """Join several ranks at their collectives into one graph.

    A collective takes as long as on the rank that arrived last: the shortest of its kernels, since
    the others waited in theirs. Waiting for ranks that were not traced is part of that time.

    Returns:
        The graph, and for each rank the operation that each of its nodes became.
    """
    inline = {n.op.stream for p in programs for n in p.nodes if n.op.phase == HOST}
    graph = Graph(len(programs), len(programs), frozenset(inline), us(latency_us))
    place: list[list[int]] = [[] for _ in programs]
    members = _members(programs)
    while unfinished := [
        r for r, operations in enumerate(place) if len(operations) < len(programs[r].nodes)
    ]:
        before = len(graph.ops)
        waiting: dict[CollectiveKey | None, list[int]] = {}
        for rank in unfinished:
            for node in programs[rank].nodes[len(place[rank]) :]:
                key = _key(node)
                if key in members:
                    waiting.setdefault(key, []).append(rank)
                    break
                place[rank].append(_add(graph, place, {rank: node}))
        for key, arrived in waiting.items():
            if arrived == members[key]:
                nodes = {rank: programs[rank].nodes[len(place[rank])] for rank in arrived}
                index = _add(graph, place, nodes)
                for rank in arrived:
                    place[rank].append(index)
        if len(graph.ops) == before:
            raise InputError(_mismatch(programs, place))
    return graph, place


def _key(node: ScheduledOp) -> CollectiveKey | None:
    call = node.event.collective if node.event is not None else None
    return None if call is None else (call.group, node.op.stream, call.order)


def _members(programs: Sequence[RankSchedule]) -> dict[CollectiveKey | None, list[int]]:
    """Return the ranks of each collective that was traced on more than one of them."""
    members: dict[CollectiveKey | None, list[int]] = {}
    for rank, program in enumerate(programs):
        for key in dict.fromkeys(map(_key, program.nodes)):
            members.setdefault(key, []).append(rank)
    return {key: ranks for key, ranks in members.items() if key is not None and len(ranks) > 1}


def _add(graph: Graph, place: list[list[int]], nodes: Mapping[int, ScheduledOp]) -> int:
    """Append a node of one rank, or a collective with its nodes on all of its ranks."""
    first = next(iter(nodes.values())).op
    deps = tuple(Dep(place[rank][d.op]) for rank, node in nodes.items() for d in node.op.deps)
    op = replace(first, deps=deps, ranks=tuple(nodes))
    if len(nodes) > 1:
        shortest = np.array([us(min(node.taken_us for node in nodes.values()))])
        op = replace(op, cost_ms=shortest, host_ms=0.0, blocks_host=False, scope=tuple(nodes))
    graph.ops.append(op)
    return len(graph.ops) - 1


def _mismatch(programs: Sequence[RankSchedule], places: list[list[int]]) -> str:
    stuck = []
    for program, place in zip(programs, places, strict=True):
        if len(place) < len(program.nodes):
            node, rank = program.nodes[len(place)], program.trace.rank
            call = node.event.collective if node.event is not None else None
            order = call.order if call else "?"
            stuck.append(f"rank {rank} ({program.trace.source}): {node.op.name} #{order}")
    return f"collectives of the ranks do not match; each waits at another: {'; '.join(stuck)}"

"""A traced step as a graph: what each rank issued, on which stream, and what it waited for.

Only structure and durations enter: the order in which threads issued work, the streams, the
durations of kernels and copies. When anything started or ended comes from the simulation.

A trace lists ``cudaStreamWaitEvent`` without the event. Two uses make up nearly all of them: a
collective waits for what its thread's current stream was given before, and a consumer waits for a
collective or for another stream. The second is resolved here (Lin et al. 2024, Algorithm 1, syncs
on the consumer of the last collective; here several may be in flight).
The graph of several ranks has the nodes of each in order, and its collectives are shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from predictor.errors import InputError
from predictor.iteration.graph import Dep, Graph
from predictor.trace.events import CollectiveCall, DeviceEvent, RankTrace, TraceStep
from predictor.trace.simulate.host import JOINING, HostItem, Kind, Launches, Piece, Role, plain
from predictor.trace.simulate.overheads import OverheadTable, call_piece, gap_piece
from predictor.units import us

COMMON = ("ProfilerStep", "autograd::", "torch::autograd::", "aten::", "## forward", *JOINING)
"""Prefixes of names that do not help to find what is waited for."""
FEWEST_ALIKE = 6


@dataclass(frozen=True)
class _Work:
    node: int
    event: DeviceEvent
    stack: tuple[str, ...]


@dataclass(frozen=True)
class _Wait:
    stack: tuple[str, ...]
    collective: bool


@dataclass
class OutstandingWork:
    """Work launched on each stream, and waits that no launch has followed yet."""

    collectives: list[_Work] = field(default_factory=list)
    latest: dict[str, _Work] = field(default_factory=dict)
    waits: list[_Wait] = field(default_factory=list)

    def record_issue(
        self, stream: str, node: int, event: DeviceEvent, stack: tuple[str, ...]
    ) -> None:
        """Record launched work."""
        work = _Work(node, event, stack)
        if event.collective is not None:
            self.collectives.append(work)
        else:
            self.latest[stream] = work

    def wait(self, item: HostItem) -> None:
        """Record a wait that is not part of launching a collective."""
        if not item.joins:
            collective = any(name.startswith("record_param_comms") for name in item.stack)
            self.waits.append(_Wait(item.stack, collective or not item.stack))

    def release(self, stream: str, event: DeviceEvent) -> list[int]:
        """What the next work of ``stream`` has to wait for.

        Work that started later in the trace is left out.
        """
        found: list[int] = []
        before = [w for w in self.collectives if w.event.start_us <= event.start_us]
        for wait in self.waits:
            if wait.collective:
                found += (work.node for work in _find_awaited(wait, before, event))
            else:
                found += (
                    work.node
                    for name, work in self.latest.items()
                    if name != stream and work.event.start_us <= event.start_us
                )
        self.waits.clear()
        return list(dict.fromkeys(found))


def _find_awaited(wait: _Wait, before: list[_Work], event: DeviceEvent) -> Iterator[_Work]:
    """The collective launched in the most similar context, and all that had ended by then.

    Collectives share a stream and end in order. If none was launched in a context like that of the
    wait, it is the last.
    """
    scored = [(_alike(wait.stack, work.stack), index) for index, work in enumerate(before)]
    likeness, best = max(scored, default=(0, -1))
    if likeness < FEWEST_ALIKE:
        yield from before[-1:]
        return
    yield before[best]
    yield from [work for work in before if work.event.end_us <= event.start_us][-1:]


def _alike(first: tuple[str, ...], second: tuple[str, ...]) -> int:
    """Length of the longest common prefix of a name of each, without common words."""
    telling = [[name for name in stack if not name.startswith(COMMON)] for stack in (first, second)]
    return max((_shared(a, b) for a in telling[0] for b in telling[1]), default=0)


def _shared(a: str, b: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


Factor = Callable[[RankTrace, DeviceEvent], float]
"""Predicted over traced duration of a kernel or copy of a rank."""
HOST = "host"
COMPUTE = "compute"
COLLECTIVE = "collective"
COPY = "copy"


@dataclass(frozen=True)
class HostTimes:
    """Where host times come from: the table, or, if ``own``, the rank's measured times.

    Times of calls that waited for the device always come from the table. A pause in which the host
    waited for something that no trace shows, such as data, is the step's own, like a kernel's time.
    """

    table: OverheadTable
    own: bool = False

    def us(self, piece: Piece) -> float:
        """Time of a piece."""
        return piece.us if self.own or piece.idle else self.table.us(piece)


@dataclass(frozen=True)
class RankOp:
    """An operation of one rank before ranks are joined; ``deps`` are positions in its list."""

    name: str
    phase: str
    stream: str
    thread: str
    cost_us: float
    host_us: float = 0.0
    deps: tuple[int, ...] = ()
    blocks_host: bool = False
    collective: CollectiveCall | None = None
    event: DeviceEvent | None = None
    gap_us: float = 0.0


@dataclass
class RankGraph:
    """The nodes of one rank's step; ``begin`` and ``end`` are the positions of its markers."""

    trace: RankTrace
    nodes: list[RankOp] = field(default_factory=list)
    begin: int = 0
    end: int = 0


class RankBuilder:
    """Turns the host's items of a step into nodes; the step begins ``start_us`` after the first
    rank's."""

    def __init__(self, trace: RankTrace, host: HostTimes, start_us: float) -> None:
        self.host = host
        self.program = RankGraph(trace)
        self.nodes = self.program.nodes
        self.pending: dict[int, float] = {}
        self.threads: dict[int, str] = {}
        self.streams: dict[int, str] = {}
        self.comms = {d.stream for d in trace.device if d.collective is not None}
        self.last: dict[str, tuple[int, DeviceEvent]] = {}
        self.current: dict[int, str] = {}
        self.outstanding = OutstandingWork()
        self.start_us = start_us

    def scale(self, factor: Factor) -> None:
        """Multiply the durations of kernels and copies by a factor."""
        trace = self.program.trace
        for index, node in enumerate(self.nodes):
            if node.event is not None:
                times = factor(trace, node.event)
                self.nodes[index] = replace(node, cost_us=times * node.cost_us)

    def add_backlog(self, step: TraceStep, launches: Launches, main: int) -> None:
        """Add the work that the device had not finished when a step began.

        Such work was launched earlier. It sets how long each stream is busy at the start of the
        step, pauses included.
        """
        free: dict[str, float] = {}
        for event in self.program.trace.device:
            call = launches.call_of.get(event.correlation)
            if (call is None or call.start_us < step.start_us) and event.end_us > step.start_us:
                if call is None and event.start_us > step.start_us:
                    continue  # its launch is not in the trace, so its time is unknown
                since = max(event.start_us, step.start_us)
                stream = self._stream(event.stream)
                gap_us = max(0.0, since - free.get(stream, step.start_us))
                free[stream] = event.end_us
                cost_us = event.end_us - since
                index = self._on_device(stream, main, event, cost_us, gap_us=gap_us)
                self.outstanding.record_issue(stream, index, event, ())

    def add_step(self, items: Sequence[HostItem]) -> None:
        """Append the items of the step, of which the first and the last are its markers."""
        main = items[0].thread
        self.program.begin = self._on_host(main, "step begins", self.start_us)
        for item in items[1:]:
            self._before(item)
            if item.role is Role.LAUNCH:
                self._launch(item)
            elif item.role is Role.SYNC:
                self._sync(item)
            elif item.role is Role.WAIT:
                self.outstanding.wait(item)
                self._spend(item.thread, self.host.us(call_piece(item)))
        self.program.end = self._on_host(main, "step ends")

    def _spend(self, thread: int, time_us: float) -> None:
        self.pending[thread] = self.pending.get(thread, 0.0) + time_us

    def _before(self, item: HostItem) -> None:
        if item.handoff is None:
            self._spend(item.thread, self.host.us(item.before))
            return
        rested = self._on_host(item.handoff, "hands over")
        name, cost_us = f"{item.label} follows another thread", self.host.us(item.before)
        self._on_host(item.thread, name, cost_us, (rested,))

    def _on_host(
        self, thread: int, name: str, cost_us: float = 0.0, deps: tuple[int, ...] = ()
    ) -> int:
        """Work of a thread, with the time that it has spent so far."""
        stream, spent = self._host_stream(thread), self.pending.pop(thread, 0.0)
        op = RankOp(name, HOST, stream, self._thread(thread), cost_us, spent, deps)
        self.nodes.append(op)
        return len(self.nodes) - 1

    def _on_device(
        self,
        stream: str,
        thread: int,
        event: DeviceEvent,
        cost_us: float,
        host_us: float = 0.0,
        deps: tuple[int, ...] = (),
        *,
        waits: bool = False,
        gap_us: float,
    ) -> int:
        """Work of a stream."""
        phase, call = _phase(event), event.collective
        op = RankOp(
            event.name,
            phase,
            stream,
            self._thread(thread),
            cost_us,
            host_us,
            deps,
            waits,
            call,
            event,
            gap_us,
        )
        self.nodes.append(op)
        self.last[stream] = (len(self.nodes) - 1, event)
        return len(self.nodes) - 1

    def _launch(self, item: HostItem) -> None:
        waits = item.waits
        if waits:
            issue = self.host.table.us(Piece(Kind.ISSUE, (item.label,), 0.0))
            host_us = max(0.0, issue - self.latency_us)
        else:
            host_us = self.host.us(call_piece(item))
        host_us += self.pending.pop(item.thread, 0.0)
        for event in sorted(item.device, key=lambda d: d.start_us):
            self._device(item, event, host_us, waits)
            host_us = 0.0
        if waits:
            self._spend(item.thread, self.host.table.us(Piece(Kind.RETURN, (item.label,), 0.0)))

    @property
    def latency_us(self) -> float:
        """Time from the end of a launch to the start on an idle stream, without its gap."""
        return latency_us(self.host.table)

    def _device(self, item: HostItem, event: DeviceEvent, host_us: float, waits: bool) -> None:
        stream = self._stream(event.stream)
        deps: list[int] = []
        collective = event.collective
        if collective is not None:
            current = self.current.get(item.thread) or next(iter(self.current.values()), None)
            if current in self.last:
                deps.append(self.last[current][0])
        else:
            self.current[item.thread] = stream
            deps += self.outstanding.release(stream, event)
        gap_us = self._gap(stream, event)
        if collective is not None:
            host_us, deps = 0.0, [*deps, self._issue(item, host_us)]
        taken = event.end_us - event.start_us
        index = self._on_device(
            stream, item.thread, event, taken, host_us, tuple(deps), waits=waits, gap_us=gap_us
        )
        self.outstanding.record_issue(stream, index, event, item.stack)

    def _gap(self, stream: str, event: DeviceEvent) -> float:
        """Time between two pieces of work of a stream."""
        if stream not in self.last or event.collective is not None:
            return 0.0
        before = self.last[stream][1]
        same = before.correlation == event.correlation
        return self.host.table.us(gap_piece(before, event, 0.0, same=same))

    def _issue(self, item: HostItem, host_us: float) -> int:
        """Host time before a collective, which each rank spends separately."""
        self._spend(item.thread, host_us)
        return self._on_host(item.thread, f"issue {plain(item.label)}")

    def _sync(self, item: HostItem) -> None:
        everything = "Device" in item.label
        streams = list(self.last) if everything else [self.current.get(item.thread, "")]
        deps = tuple(self.last[s][0] for s in streams if s in self.last)
        cost = self.host.table.us(Piece(Kind.RETURN, (item.label,), 0.0))
        self._on_host(item.thread, item.label, cost, deps)

    def _thread(self, thread: int) -> str:
        return self.threads.setdefault(thread, f"thread {len(self.threads)}")

    def _host_stream(self, thread: int) -> str:
        return f"{HOST} {self._thread(thread)}"

    def _stream(self, stream: int) -> str:
        """Streams of collectives are numbered by first use: ids may differ between ranks."""
        if stream not in self.comms:
            return f"stream {stream}"
        used = sum(name.startswith("comm") for name in self.streams.values())
        return self.streams.setdefault(stream, f"comm {used}")


def latency_us(table: OverheadTable) -> float:
    """Time from the end of a launch to the start on an idle stream, less the gap of a stream, which
    every operation has anyway."""
    launch = table.find(Kind.LATENCY, ("kernel",)).typical_us
    return max(0.0, launch - table.find(Kind.GAP, ("stream", "kernel kernel")).typical_us)


def _phase(event: DeviceEvent) -> str:
    if event.collective is not None:
        return COLLECTIVE
    return COMPUTE if event.kind == "kernel" else COPY


FILLING_WAVES = 2.0
"""Waves from which on a kernel fills the device for most of its time."""
RESOURCES = {HOST: "overheads", COMPUTE: "kernels", COLLECTIVE: "collectives", COPY: "memcpy"}


@dataclass(frozen=True)
class JobGraph:
    """The graph of all ranks; ``place[rank][node]`` is the operation that a node became."""

    graph: Graph
    place: list[list[int]]


def join_ranks(programs: Sequence[RankGraph], latency_us: float) -> JobGraph:
    """One graph of several ranks whose collectives meet.

    A collective takes as long as on the rank that arrived last: the shortest of its kernels, since
    the others waited in theirs. Waiting for ranks that were not traced is part of that time.

    Raises:
        InputError: the ranks' collectives do not follow each other in one order.
    """
    inline = frozenset(n.stream for p in programs for n in p.nodes if n.stream.startswith(HOST))
    world = len(programs)
    job = JobGraph(Graph(world, world, inline, us(latency_us)), [[] for _ in programs])
    members = _members(programs)
    waiting: dict[tuple[object, ...], set[int]] = {}
    while any(len(place) < len(p.nodes) for place, p in zip(job.place, programs, strict=True)):
        moved = False
        for rank, program in enumerate(programs):
            for node in _ready(job.place[rank], program, members, waiting, rank):
                job.place[rank].append(_emit(job, rank, node))
                moved = True
        for key, ranks in list(waiting.items()):
            if ranks == members[key]:
                _meet(job, programs, waiting.pop(key))
                moved = True
        if not moved:
            raise InputError(_mismatch(programs, job.place))
    return job


def _key(node: RankOp) -> tuple[object, ...] | None:
    if node.collective is None:
        return None
    return node.collective.group, node.stream, node.collective.order


def _members(programs: Sequence[RankGraph]) -> dict[tuple[object, ...], set[int]]:
    """Ranks of each collective that was traced on more than one of them."""
    found: dict[tuple[object, ...], set[int]] = {}
    for rank, program in enumerate(programs):
        for node in program.nodes:
            if (key := _key(node)) is not None:
                found.setdefault(key, set()).add(rank)
    return {key: ranks for key, ranks in found.items() if len(ranks) > 1}


def _ready(
    place: list[int],
    program: RankGraph,
    members: Mapping[tuple[object, ...], set[int]],
    waiting: dict[tuple[object, ...], set[int]],
    rank: int,
) -> Iterator[RankOp]:
    """Nodes up to the next collective that other ranks take part in."""
    while len(place) < len(program.nodes):
        node = program.nodes[len(place)]
        key = _key(node)
        if key is not None and key in members:
            waiting.setdefault(key, set()).add(rank)
            return
        yield node


def _emit(job: JobGraph, rank: int, node: RankOp) -> int:
    return job.graph.add(
        node.name,
        phase=node.phase,
        resource=RESOURCES[node.phase],
        stream=node.stream,
        cost_ms=us(node.gap_us + node.cost_us),
        host_ms=us(node.host_us),
        deps=[Dep(job.place[rank][d]) for d in node.deps],
        blocks_host=node.blocks_host,
        thread=node.thread,
        ranks=(rank,),
        fills=_fills(node.event),
    )


def _fills(event: DeviceEvent | None) -> bool | None:
    """Copies have engines of their own; kernels compete for the multiprocessors."""
    if event is None or event.kind == "memcpy":
        return None
    return event.waves is not None and event.waves >= FILLING_WAVES


def _meet(job: JobGraph, programs: Sequence[RankGraph], ranks: set[int]) -> None:
    nodes = {rank: programs[rank].nodes[len(job.place[rank])] for rank in sorted(ranks)}
    first = next(iter(nodes.values()))
    deps = [job.place[rank][d] for rank, node in nodes.items() for d in node.deps]
    index = job.graph.add(
        first.name,
        phase=first.phase,
        resource=RESOURCES[first.phase],
        stream=first.stream,
        cost_ms=us(min(node.cost_us for node in nodes.values())),
        deps=deps,
        scope=tuple(nodes),
        thread=first.thread,
        ranks=tuple(nodes),
        fills=_fills(first.event),
    )
    for rank in nodes:
        job.place[rank].append(index)


def _mismatch(programs: Sequence[RankGraph], places: list[list[int]]) -> str:
    stuck = []
    for program, place in zip(programs, places, strict=True):
        if len(place) < len(program.nodes):
            node = program.nodes[len(place)]
            order = node.collective.order if node.collective else "?"
            stuck.append(
                f"rank {program.trace.rank} ({program.trace.source}): {node.name} #{order}"
            )
    return (
        "collectives of the ranks do not match; each rank waits at a different one: "
        + "; ".join(stuck)
    )

"""A traced step as a graph: what each rank issued, on which stream, and what it waited for.

Only structure and durations enter: the order in which threads issued work, the streams, the
durations of kernels and copies. When anything started or ended comes from the simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from predictor.trace.events import CollectiveCall, DeviceEvent, RankTrace, TraceStep
from predictor.trace.simulate.host import HostItem, Kind, Launches, Piece, Role, plain
from predictor.trace.simulate.overheads import OverheadTable, call_piece, gap_piece
from predictor.trace.simulate.waits import OutstandingWork

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
                index = self._add(
                    RankOp(
                        event.name,
                        _phase(event),
                        stream,
                        self._thread(main),
                        event.end_us - since,
                        event=event,
                        gap_us=gap_us,
                    )
                )
                self.last[stream] = (index, event)
                self.outstanding.record_issue(stream, index, event, ())

    def add_step(self, items: Sequence[HostItem]) -> None:
        """Append the items of the step, of which the first and the last are its markers."""
        main = items[0].thread
        self.program.begin = self._flush(main, "step begins", self.start_us)
        for item in items[1:]:
            self._before(item)
            if item.role is Role.LAUNCH:
                self._launch(item)
            elif item.role is Role.SYNC:
                self._sync(item)
            elif item.role is Role.WAIT:
                self.outstanding.wait(item)
                self._spend(item.thread, self.host.us(call_piece(item)))
        self.program.end = self._flush(main, "step ends")

    def _spend(self, thread: int, time_us: float) -> None:
        self.pending[thread] = self.pending.get(thread, 0.0) + time_us

    def _before(self, item: HostItem) -> None:
        if item.handoff is None:
            self._spend(item.thread, self.host.us(item.before))
            return
        rested = self._flush(item.handoff, "hands over")
        self._add(
            RankOp(
                f"{item.label} follows another thread",
                HOST,
                self._host_stream(item.thread),
                self._thread(item.thread),
                self.host.us(item.before),
                self.pending.pop(item.thread, 0.0),
                (rested,),
            )
        )

    def _flush(self, thread: int, name: str, cost_us: float = 0.0) -> int:
        """The time that a thread has spent so far, as a node."""
        return self._add(
            RankOp(
                name,
                HOST,
                self._host_stream(thread),
                self._thread(thread),
                cost_us,
                self.pending.pop(thread, 0.0),
            )
        )

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
        index = self._add(
            RankOp(
                event.name,
                _phase(event),
                stream,
                self._thread(item.thread),
                event.end_us - event.start_us,
                host_us,
                tuple(deps),
                waits,
                collective,
                event,
                gap_us,
            )
        )
        self.last[stream] = (index, event)
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
        return self._flush(item.thread, f"issue {plain(item.label)}")

    def _sync(self, item: HostItem) -> None:
        everything = "Device" in item.label
        streams = list(self.last) if everything else [self.current.get(item.thread, "")]
        deps = tuple(self.last[s][0] for s in streams if s in self.last)
        cost = self.host.table.us(Piece(Kind.RETURN, (item.label,), 0.0))
        thread = self._thread(item.thread)
        pending = self.pending.pop(item.thread, 0.0)
        stream = self._host_stream(item.thread)
        self._add(RankOp(item.label, HOST, stream, thread, cost, pending, deps))

    def _add(self, node: RankOp) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

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

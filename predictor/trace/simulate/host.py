"""The host side of a step: the calls of each thread in order, and the times between them.

A thread's time is cut at the starts and ends of its outermost operators and at the calls that
matter to the device: launches, copies, waits. The pieces are the five overheads of Lin et al. 2022:

T1  between two operators, or between an operator and an annotation's begin or end
T2  from an operator's start to its first launch
T3  from an operator's last launch to its end
T4  a call itself
T5  between two launches of an operator; the whole of an operator without launches
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from predictor.trace.events import DeviceEvent, HostEvent, RankTrace, TraceStep


class Kind(StrEnum):
    """Kinds of overhead; the last four are the device's side of a call."""

    T1 = "T1"
    T2 = "T2"
    T3 = "T3"
    T4 = "T4"
    T5 = "T5"
    LATENCY = "launch latency"
    GAP = "stream gap"
    ISSUE = "blocking issue"
    RETURN = "blocking return"


@dataclass(frozen=True, slots=True)
class Piece:
    """Host time of one kind.

    Args:
        names: keys of its overhead, from the general to the particular.
        us: as measured with the profiler on.
        idle: nothing ran on the thread for so long that it waited, as for the next batch.
    """

    kind: Kind
    names: tuple[str, ...]
    us: float
    idle: bool = False


class Role(StrEnum):
    """Role of an item of a host thread."""

    MARK = "mark"
    LAUNCH = "launch"
    SYNC = "sync"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class HostItem:
    """A point of a thread's program, after ``before`` of host time.

    Args:
        label: of a mark: the operator or annotation.
        call: of a launch, a sync or a wait: the runtime call.
        device: work that the call launched.
        stack: names of the events around it, outermost first.
        joins: the call belongs to an operator that launches a collective.
        handoff: the thread that was active before and woke this one.
    """

    role: Role
    thread: int
    start_us: float
    end_us: float
    label: str
    before: Piece
    call: HostEvent | None = None
    device: tuple[DeviceEvent, ...] = ()
    stack: tuple[str, ...] = ()
    joins: bool = False
    handoff: int | None = None

    @property
    def waits(self) -> bool:
        """True if the host waits in the call until work of the device is done."""
        if self.role is Role.LAUNCH and self.call is not None:
            return blocks(self.call, self.device)
        return self.role is Role.SYNC


SYNCS = re.compile(r"(cuda|hip)(Stream|Device)Synchronize$|(cuda|hip)Memcpy$")
WAITS = re.compile(r"(cuda|hip|cu)StreamWaitEvent$")
DIGITS = re.compile(r"\d+")
JOINING = ("record_param_comms", "c10d::", "nccl:")
"""Operators that torch.distributed puts around the launch of a collective."""


WAITING_US = 5000.0
"""Least pause of a thread that counts as waiting. Framework code between operators takes tens of
microseconds, and up to 3 ms where Python collects garbage (public traces of docs/data.md)."""
LOADS = re.compile(r"DataLoader|data_?load", re.IGNORECASE)
"""Operators in which the host waits for the next batch, such as ``enumerate(DataLoader)``."""


STAGED_AT_ONCE_BYTES = 64 * 1024
"""Largest copy from pageable memory that returns before it is done (source in `blocks`)."""


def blocks(call: HostEvent, device: Iterable[DeviceEvent]) -> bool:
    """Return True if the host waits in a launching call until its work is done.

    Such calls copy to pageable memory, or more than `STAGED_AT_ONCE_BYTES` from it (CUDA Runtime
    API, "API synchronization behavior").
    """
    return call.name.endswith("Memcpy") or any(_synchronous(event) for event in device)


def _synchronous(event: DeviceEvent) -> bool:
    if event.kind != "memcpy" or "Pageable" not in event.name:
        return False
    return "DtoH" in event.name or (event.size_bytes or 0) > STAGED_AT_ONCE_BYTES


def plain(name: str) -> str:
    """Strip the numbers that count steps, parameters and versions from a name."""
    return DIGITS.sub("", name)


def main_thread(trace: RankTrace) -> int:
    """Return the thread that runs the program.

    It is the thread with the most operators among those on which few are autograd's.
    """
    total: dict[int, int] = {}
    autograd: dict[int, int] = {}
    for event in trace.host:
        if event.kind != "runtime":
            total[event.thread] = total.get(event.thread, 0) + 1
            own = event.name.startswith("autograd::engine")
            autograd[event.thread] = autograd.get(event.thread, 0) + own
    return min(total, key=lambda t: (autograd[t] / total[t] > 0.05, -total[t]), default=0)


def walk_host(trace: RankTrace, step: TraceStep, main: int) -> list[HostItem]:
    """Return the items that the threads of a rank issued in a step, in order of time.

    Threads that neither launch anything nor are the main one are left out.

    Args:
        main: `main_thread`.
    """
    threads: dict[int, list[HostEvent]] = {}
    for event in trace.host:
        if step.start_us <= event.start_us < step.end_us:
            threads.setdefault(event.thread, []).append(event)
    items: list[HostItem] = []
    for thread, events in threads.items():
        thread_items = list(_Walk(thread, events, trace).items())
        if thread == main or any(i.role is Role.LAUNCH for i in thread_items):
            items += thread_items
    items.sort(key=lambda item: item.start_us)
    return [*_handed_over(items, step, main)]


def _handed_over(items: list[HostItem], step: TraceStep, main: int) -> Iterator[HostItem]:
    """Resolve the time before each item: own work, or a wait for another thread's.

    A thread that begins an operator after another thread was active was woken by it: autograd's
    thread in `backward()`, the main thread after it, or in between for gradients on the host.
    """
    begin = HostItem(
        Role.MARK, main, step.start_us, step.start_us, "step", Piece(Kind.T1, ("step",), 0.0)
    )
    last, own = begin, {main: begin}
    inside: set[int] = set()
    yield begin
    end = HostItem(
        Role.MARK, main, step.end_us, step.end_us, "step]", Piece(Kind.T1, ("step]",), 0.0)
    )
    for item in [*(i for i in items if i.start_us < step.end_us), end]:
        thread, entering = item.thread, item.thread not in inside
        if entering:
            woken = last.thread != thread and not (last.waits and last.end_us > item.start_us)
            before = last if woken else own.get(thread, own[main])
            handed_over = before.thread != thread
            us = max(0.0, item.start_us - before.end_us)
            names = (item.label, before.label)
            gap = Piece(Kind.T1, names, us, idle=us >= WAITING_US)
            item = replace(item, before=gap, handoff=before.thread if handed_over else None)
        if item.label.startswith("<"):
            inside.add(thread)
        elif item.label.startswith(">"):
            inside.discard(thread)
        last = own[thread] = item
        yield item


class _Walk:
    """Converter of one thread's nested events to items; operators' labels start with < and >."""

    def __init__(self, thread: int, events: list[HostEvent], trace: RankTrace) -> None:
        self.thread = thread
        self.events = sorted(events, key=lambda e: (e.start_us, -e.end_us))
        self.trace = trace
        self.stack: list[HostEvent] = []
        self.top: HostEvent | None = None
        self.position = 0.0
        self.stops = 0
        self.collected: list[tuple[HostItem, HostEvent | None]] = []
        self.joining: set[int] = set()

    def items(self) -> Iterator[HostItem]:
        for event in self.events:
            while self.stack and self.stack[-1].end_us <= event.start_us:
                self._close(self.stack.pop())
            self._open(event)
            self.stack.append(event)
        while self.stack:
            self._close(self.stack.pop())
        for item, inner in self.collected:
            joins = inner is not None and id(inner) in self.joining
            yield replace(item, joins=True) if joins else item

    def _role(self, event: HostEvent) -> Role | None:
        """Return the role of a runtime call; None if it only takes time."""
        if event.kind != "runtime":
            return None
        if event.correlation in self.trace.launched:
            return Role.LAUNCH
        if SYNCS.match(event.name):
            return Role.SYNC
        return Role.WAIT if WAITS.match(event.name) else None

    def _open(self, event: HostEvent) -> None:
        role = self._role(event)
        if role is not None:
            self._stop(event, role)
        elif self.top is None and event.kind == "annotation":
            self._mark(event.start_us, f"[{plain(event.name)}", Kind.T1)
        elif self.top is None and event.kind == "op":
            self._mark(event.start_us, f"<{plain(event.name)}", Kind.T1)
            self.top, self.stops = event, 0

    def _close(self, event: HostEvent) -> None:
        if event is self.top:
            kind = Kind.T3 if self.stops else Kind.T5
            self._mark(event.end_us, f">{plain(event.name)}", kind)
            self.top = None
        elif self.top is None and event.kind == "annotation":
            self._mark(event.end_us, f"{plain(event.name)}]", Kind.T1)

    def _piece(self, at_us: float, kind: Kind) -> Piece:
        """Return the time since the last item; T1 stays unnamed, as another thread may precede."""
        us = max(0.0, at_us - self.position)
        if self.top is None:
            return Piece(kind, (), us)
        idle = us >= WAITING_US and LOADS.search(self.top.name) is not None
        return Piece(kind, (plain(self.top.name), str(self.stops)), us, idle=idle)

    def _mark(self, at_us: float, label: str, kind: Kind) -> None:
        piece = self._piece(at_us, kind)
        self._add(HostItem(Role.MARK, self.thread, at_us, at_us, label, piece), None)

    def _stop(self, event: HostEvent, role: Role) -> None:
        kind = Kind.T1 if self.top is None else Kind.T5 if self.stops else Kind.T2
        device = tuple(self.trace.launched.get(event.correlation, ()))
        around = [e for e in self.stack if e.kind != "runtime"]
        inner = next((e for e in reversed(around) if e.kind == "op"), None)
        if any(d.collective is not None for d in device):
            self._join(around)
        stack = tuple(e.name for e in around)
        piece = self._piece(event.start_us, kind)
        item = HostItem(
            role, self.thread, event.start_us, event.end_us, event.name, piece, event, device, stack
        )
        self._add(item, inner)
        self.stops += 1

    def _join(self, around: list[HostEvent]) -> None:
        for event in reversed([e for e in around if e.kind == "op"]):
            if not event.name.startswith(JOINING):
                break
            self.joining.add(id(event))

    def _add(self, item: HostItem, inner: HostEvent | None) -> None:
        self.collected.append((item, inner))
        self.position = item.end_us

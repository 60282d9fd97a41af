"""One iteration of a Kineto trace as a tree: events of a thread that nest by their times."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from predictor.trace.events import DeviceEvent, HostEvent, RankTrace, TraceStep

GLOO = "gloo:"
OP = re.compile(r"\w+::\w+$")
"""A name that the dispatcher knows; functions of autograd and Python have others."""
COLLECTIVE = re.compile(r"(c10d::\w+|record_param_comms|nccl:.*)$")
WHOLE = 0.9
"""Share of the most ops of an iteration below which one counts as cut off."""
ROUNDING_US = (1.0, 0.002)
"""How much later than its caller an event may end: clocks of whole microseconds, and finer ones."""
MAX_DEPTH = 100


@dataclass
class Span:
    """An event and what lies in it.

    Args:
        section: annotations around it, the outermost first.
        launched: device work that it launched, without that of its children.
    """

    event: HostEvent
    section: tuple[str, ...] = ()
    children: list[Span] = field(default_factory=list)
    launched: list[DeviceEvent] = field(default_factory=list)

    @property
    def is_op(self) -> bool:
        """It passed through PyTorch's dispatcher."""
        return self.event.kind == "op" and OP.match(self.event.name) is not None

    @property
    def is_collective(self) -> bool:
        """It exchanges data between ranks, or says what does."""
        return COLLECTIVE.match(self.event.name) is not None

    @property
    def us(self) -> float:
        """Its recorded time on the host."""
        return self.event.end_us - self.event.start_us

    def below(self) -> Iterator[Span]:
        """All that lies in it, in order."""
        stack = [*reversed(self.children)]
        while stack:
            child = stack.pop()
            yield child
            stack.extend(reversed(child.children))

    def work(self) -> list[DeviceEvent]:
        """All device work that was launched in it."""
        return [event for span in (self, *self.below()) for event in span.launched]


def last_step(trace: RankTrace) -> TraceStep:
    """The last iteration that is whole: has about as many ops as the others."""
    ops = sorted(event.start_us for event in trace.host if event.kind == "op")
    counts: Counter[int] = Counter()
    at = 0
    for number, step in enumerate(trace.steps):
        while at < len(ops) and ops[at] < step.end_us:
            counts[number] += ops[at] >= step.start_us
            at += 1
    enough = WHOLE * max(counts.values(), default=0)
    return next(
        (s for n, s in reversed([*enumerate(trace.steps)]) if counts[n] >= enough), trace.steps[-1]
    )


def spans(trace: RankTrace, step: TraceStep) -> list[Span]:
    """The outermost events of an iteration in the order of their starts, without gloo's own."""
    threads: dict[int, list[HostEvent]] = defaultdict(list)
    for event in trace.host:
        if step.start_us <= event.start_us < step.end_us:
            threads[event.thread].append(event)
    slack = ROUNDING_US[any(e.start_us % 1 for e in trace.host)]
    work = {e.correlation: e for e in trace.device if e.correlation is not None}
    found: list[Span] = []
    for events in threads.values():
        if not any(event.name.startswith(GLOO) for event in events):
            found += _nest(events, slack, work)
    return sorted(found, key=lambda span: span.event.start_us)


def gloo_ends(trace: RankTrace, step: TraceStep) -> list[float]:
    """When gloo was done with each of an iteration's collectives, in the order it took them up."""
    events = [
        e
        for e in trace.host
        if e.name.startswith(GLOO) and step.start_us <= e.start_us < step.end_us
    ]
    return [e.end_us for e in sorted(events, key=lambda e: e.start_us)]


def _nest(
    events: Iterable[HostEvent], slack: float, work: dict[int, DeviceEvent]
) -> Sequence[Span]:
    # clocks of whole microseconds give many events one start; the profiler's own number does not
    ordered = sorted(events, key=lambda e: (e.start_us, -e.end_us, e.external or 0))
    roots: list[Span] = []
    stack: list[Span] = []
    for event in ordered:
        while stack and not _inside(event, stack[-1].event, slack):
            stack.pop()
        if event.kind == "runtime":
            launched = work.get(event.correlation or -1)
            if stack and launched is not None:
                stack[-1].launched.append(launched)
            continue
        above = stack[-1] if stack else None
        section = above.section if above else ()
        if above and above.event.kind == "annotation":
            section = (*section, above.event.name)
        span = Span(event, section)
        (above.children if above else roots).append(span)
        if len(stack) < MAX_DEPTH:
            stack.append(span)
    return roots


def _inside(event: HostEvent, outer: HostEvent, slack: float) -> bool:
    if event.end_us > outer.end_us + slack:
        return False
    return event.start_us < outer.end_us or event.start_us == outer.start_us

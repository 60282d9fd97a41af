"""Finds which work a stream waits for, where the trace says only that it waits.

A trace lists ``cudaStreamWaitEvent`` without the event. Two uses make up nearly all of them: a
collective waits for what its thread's current stream was given before, and a consumer waits for a
collective or for another stream. The second is resolved here (Lin et al. 2024, Algorithm 1, syncs
on the consumer of the last collective; here several may be in flight).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from predictor.trace.events import DeviceEvent
from predictor.trace.simulate.host import JOINING, HostItem

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

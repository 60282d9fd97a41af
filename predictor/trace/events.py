"""Events that a profiler recorded on one rank, for any file format.

Times are microseconds on the clock of the trace, as PyTorch's profiler writes them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Literal, TypeVar

HostKind = Literal["op", "annotation", "runtime"]
DeviceKind = Literal["kernel", "memcpy", "memset"]


@dataclass(frozen=True, slots=True)
class HostEvent:
    """An op, an annotation or a call of the CUDA runtime on one thread.

    Args:
        correlation: of a runtime call: shared with the device work that it launched.
        shapes, dtypes: of the inputs, where the trace carries them; one entry an input.
        sequence: autograd's number that a forward op and its backward share.
        node: of the execution trace, where one was given (`rf_id`, "Record function id").
        external: the profiler's own number of an op ("External id"); counts up on a thread.
        record: PyTorch's number of an op ("Record function id"), which execution traces share.
    """

    name: str
    kind: HostKind
    thread: int
    start_us: float
    end_us: float
    correlation: int | None = None
    shapes: tuple[tuple[int, ...], ...] | None = None
    dtypes: tuple[str, ...] | None = None
    sequence: int | None = None
    node: int | None = None
    external: int | None = None
    record: int | None = None


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """Kind, sizes and group of a collective, or the part of them that one source gives.

    Args:
        op: ``all_to_all``, ``all_reduce``, ``reduce_scatter``, ``all_gather``, ``broadcast``,
            ``reduce``, ``send_recv`` or ``other``; empty where a source does not say.
        size_bytes: input bytes of this rank; None: unknown.
        group: ranks that join; None: all, or unknown.
        order: position among the collectives of its group, the same on every rank; negative
            for collectives launched before the trace began, the last of them -1.
        output_bytes: of this rank; None: unknown.
        send_bytes, receive_bytes: of an all-to-all with uneven splits: one entry a rank of the
            group; None: even, or unknown.
        group_name: of the process group, the same on every rank; None: unknown.
    """

    op: str = ""
    size_bytes: int | None = None
    group: tuple[int, ...] | None = None
    order: int = 0
    output_bytes: int | None = None
    send_bytes: tuple[int, ...] | None = None
    receive_bytes: tuple[int, ...] | None = None
    group_name: str | None = None

    def or_else(self, other: CollectiveCall) -> CollectiveCall:
        """Return the call with its missing fields taken from another source."""
        missing = {
            f.name: getattr(other, f.name)
            for f in fields(self)
            if getattr(self, f.name) in (None, "")
        }
        # splits of another iteration say nothing about this one
        for splits, size in (("send_bytes", self.size_bytes), ("receive_bytes", self.output_bytes)):
            if size is not None and missing.get(splits) and sum(missing[splits]) != size:
                missing[splits] = None
        return replace(self, **missing)


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """A kernel or copy on one stream of the device.

    Args:
        waves: of a kernel: how many times its blocks fill the device; above 1 they do not all fit
            at once. None where the trace does not say.
    """

    name: str
    kind: DeviceKind
    stream: int
    start_us: float
    end_us: float
    correlation: int | None = None
    size_bytes: int | None = None
    collective: CollectiveCall | None = None
    waves: float | None = None


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """Memory that was allocated, or freed, as `profile_memory` records it.

    Args:
        thread: thread of the op that allocated or freed.
        time_us: time of the event.
        size_bytes: negative where memory was freed.
        address: the same for the allocation and its release.
    """

    thread: int
    time_us: float
    size_bytes: int
    address: int


@dataclass(frozen=True, slots=True)
class TraceStep:
    """One training step: from its marker to the next, or to the marker's end."""

    name: str
    start_us: float
    end_us: float


@dataclass(frozen=True)
class RankTrace:
    """One rank's trace.

    Args:
        host: by start; events of one thread nest.
        device: by start.
        steps: in order; the whole trace where it has no markers.
        device_name: as the profiler calls the device; None where it does not say.
        notes: missing data and what replaced them, for the user.
        memory: of the device, or of the host where there is none; in order of time.
        untraced_step_ms: time of a step without the profiler, where the recording says it.
    """

    source: str
    rank: int
    world_size: int | None
    device_name: str | None
    host: tuple[HostEvent, ...]
    device: tuple[DeviceEvent, ...]
    steps: tuple[TraceStep, ...]
    notes: tuple[str, ...] = field(default=())
    memory: tuple[MemoryEvent, ...] = field(default=())
    untraced_step_ms: float | None = None

    @cached_property
    def launches(self) -> Mapping[int | None, HostEvent]:
        """Runtime calls that launched device work, by correlation."""
        return {e.correlation: e for e in self.host if e.correlation is not None}

    @cached_property
    def launched(self) -> Mapping[int | None, list[DeviceEvent]]:
        """Device work of each launch in order of start, by correlation."""
        by_launch: dict[int | None, list[DeviceEvent]] = {}
        for event in self.device:
            if event.correlation is not None:
                by_launch.setdefault(event.correlation, []).append(event)
        return by_launch


Value = TypeVar("Value")


def values_around(
    host: Iterable[HostEvent], values: Mapping[int, Value]
) -> dict[int | None, list[Value]]:
    """Map the correlation of a launch to the values of the host events around it, innermost first.

    Args:
        host: by start; events of a thread nest.
        values: by the `id` of a host event.
    """
    around: dict[int, list[tuple[float, Value]]] = defaultdict(list)
    by_launch: dict[int | None, list[Value]] = {}
    for event in host:
        stack = around[event.thread]
        while stack and stack[-1][0] < event.start_us:
            stack.pop()
        if event.correlation is not None and stack:
            by_launch[event.correlation] = [value for _, value in reversed(stack)]
        elif id(event) in values:
            stack.append((event.end_us, values[id(event)]))
    return by_launch

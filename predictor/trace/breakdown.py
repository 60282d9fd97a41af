"""Breakdown of a measured step on one rank into compute, communication, copies and waiting."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from math import inf
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from predictor.trace.events import DeviceEvent, HostEvent, RankTrace
from predictor.units import us

Times = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Intervals:
    """Half-open intervals in order that neither overlap nor touch.

    Args:
        starts, ends: of each, in one unit; ``starts[i] < ends[i] < starts[i + 1]``.
    """

    starts: Times
    ends: Times

    @staticmethod
    def merged(pairs: Iterable[tuple[float, float]]) -> Intervals:
        """Return the union of ``(start, end)`` pairs in any order; empty ones vanish."""
        intervals = np.array([p for p in pairs if p[1] > p[0]], dtype=np.float64).reshape(-1, 2)
        intervals = intervals[np.argsort(intervals[:, 0], kind="stable")]
        if not len(intervals):
            return Intervals(intervals[:, 0], intervals[:, 1])
        reached = np.maximum.accumulate(intervals[:, 1])
        first = np.concatenate(([True], intervals[1:, 0] > reached[:-1]))
        last = np.concatenate((first[1:], [True]))
        return Intervals(intervals[first, 0], reached[last])

    def covers(self, points: Times) -> NDArray[np.bool_]:
        if not len(self.starts):
            return np.zeros(len(points), dtype=bool)
        index = np.searchsorted(self.starts, points, side="right") - 1
        inside: NDArray[np.bool_] = (index >= 0) & (points < self.ends[index])
        return inside

    def __or__(self, other: Intervals) -> Intervals:
        return self._where(other, np.logical_or)

    def __and__(self, other: Intervals) -> Intervals:
        return self._where(other, np.logical_and)

    def __sub__(self, other: Intervals) -> Intervals:
        return self._where(other, np.greater)

    @property
    def length(self) -> float:
        return float((self.ends - self.starts).sum())

    def within(self, start: float, end: float) -> float:
        """Return the length of the intervals between two times."""
        low = int(np.searchsorted(self.ends, start, side="right"))
        high = int(np.searchsorted(self.starts, end, side="left"))
        starts = np.maximum(self.starts[low:high], start)
        return float(np.sum(np.minimum(self.ends[low:high], end) - starts))

    def _where(
        self, other: Intervals, belongs: Callable[[NDArray[np.bool_], NDArray[np.bool_]], Any]
    ) -> Intervals:
        """Return the moments for which ``belongs(in self, in other)`` is true."""
        points = np.unique(np.concatenate((self.starts, self.ends, other.starts, other.ends)))
        inside = belongs(self.covers(points), other.covers(points))
        change = np.diff(np.concatenate(([False], inside)).astype(np.int8))
        return Intervals(points[change == 1], points[change == -1])


PARTS = ("compute", "exposed_communication", "memcpy", "host_bound", "idle")
"""Parts that add up to the step, in the order in which a stack of bars shows them. Each moment
counts in the first part that fits:

compute: a kernel other than a collective runs.
exposed_communication: a collective runs.
memcpy: a copy or a memset runs.
host_bound: nothing runs, and the host has not launched the next kernel: it is slow, or it waits for
    a result of the device.
idle: nothing runs, although the next kernel has been launched.
"""

EXCHANGES = re.compile(r"(gloo|mpi|ucc):")
"""Annotations of the threads that run the collectives of a host backend."""
ENQUEUES = re.compile(r"c10d::|record_param_comms$")
"""Ops that hand a collective to such a thread."""


@dataclass(frozen=True)
class StepBreakdown:
    """One step on one rank.

    Args:
        measured_ms: from the step's marker to the next.
        parts: `PARTS` in ms; they sum to ``measured_ms``.
        hidden_communication_ms: a collective runs during compute; part of ``compute``.
    """

    rank: int
    step: str
    measured_ms: float
    parts: dict[str, float]
    hidden_communication_ms: float


@dataclass(frozen=True)
class KernelTotal:
    """All runs of a kernel in the steps of some traces."""

    name: str
    count: int
    total_ms: float
    collective: bool


def breakdown(trace: RankTrace) -> tuple[StepBreakdown, ...]:
    """Break down every step of a trace.

    Work that runs past the end of its step counts to the step it runs in. Where no device was
    traced, the ops of the host count as compute and the work of its communication threads as
    communication; the rest is host-bound.
    """
    if trace.device:
        compute = _running(e for e in trace.device if e.kind == "kernel" and e.collective is None)
        exchange = _running(e for e in trace.device if e.collective is not None)
    else:
        compute = _running(e for e in trace.host if e.kind == "op" and not ENQUEUES.match(e.name))
        exchange = _running(e for e in trace.host if EXCHANGES.match(e.name))
    copies = _running(e for e in trace.device if e.kind != "kernel")
    running = compute | exchange
    parts = {
        "compute": compute,
        "exposed_communication": exchange - compute,
        "memcpy": copies - running,
        "host_bound": Intervals.merged(_unlaunched(trace)) - running,
    }
    hidden = exchange & compute
    breakdowns = []
    for step in trace.steps:
        start, end = step.start_us, step.end_us
        times = {part: us(intervals.within(start, end)) for part, intervals in parts.items()}
        measured = us(end - start)
        # differences of large times may leave a rounding error below zero
        times["idle"] = max(0.0, measured - sum(times.values()))
        hidden_ms = us(hidden.within(start, end))
        breakdowns.append(StepBreakdown(trace.rank, step.name, measured, times, hidden_ms))
    return tuple(breakdowns)


def mean_parts(steps: Iterable[StepBreakdown]) -> dict[str, float]:
    """Return `PARTS` in ms, each the mean over steps and ranks; they sum to the mean step."""
    rows = [step.parts for step in steps]
    return {part: fmean(step[part] for step in rows) if rows else 0.0 for part in PARTS}


def top_kernels(traces: Iterable[RankTrace], count: int) -> list[KernelTotal]:
    """Return the kernels and copies with the longest total time in the steps of all ranks."""
    runs: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for trace in traces:
        first, last = trace.steps[0].start_us, trace.steps[-1].end_us
        for event in trace.device:
            if first <= event.start_us < last:
                key = (short_name(event.name), event.collective is not None)
                runs[key].append(event.end_us - event.start_us)
    totals = [KernelTotal(n, len(r), us(sum(r)), c) for (n, c), r in runs.items()]
    return sorted(totals, key=lambda k: (-k.total_ms, k.name))[:count]


_ANY_KERNEL = re.compile(r"::(?:Kernel\d?|device_kernel)$")
"""Names that all kernels of CUTLASS share; their first template argument tells them apart."""
_FIRST_LENGTH = re.compile(r"(?:_Z|I)N?(?:S\w?_|St)?(\d{1,4})")
_LENGTH = re.compile(r"(\d{1,4})")
"""Lengths of identifiers in a name or its first template argument, as compilers mangle them
(Itanium C++ ABI)."""


@cache
def short_name(name: str) -> str:
    """Return a kernel's name without return type, template arguments and parameters.

    A kernel of CUTLASS goes by the name of its first template argument.
    """
    if name.startswith(("Memcpy", "Memset")):
        return name
    if name.startswith("_Z"):
        return _short_mangled(name)
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    letters, depth = [], 0
    for character in plain:
        depth += character in "<("
        if depth == 0:
            letters.append(character)
        depth -= depth > 0 and character in ">)"
    short = "".join(letters) or name
    if _ANY_KERNEL.search(short) and plain.startswith(f"{short}<"):
        which = re.match(r"[\w:]+", plain[len(short) + 1 :])
        return which[0] if which else short
    return short


def _short_mangled(name: str) -> str:
    """Return `short_name` of a mangled name; the name itself if it begins with no identifier."""
    parts, at = _identifiers(name, 0)
    short = "::".join(parts)
    if _ANY_KERNEL.search(short):
        return "::".join(_identifiers(name, at)[0]) or short
    return short or name


def _identifiers(name: str, at: int) -> tuple[list[str], int]:
    """Return the parts of a qualified name in a mangled one, and the position of their end."""
    parts: list[str] = []
    length = _FIRST_LENGTH.match(name, at)
    while length is not None and length.end() + int(length[1]) <= len(name):
        at = length.end() + int(length[1])
        parts.append(name[length.end() : at])
        length = _LENGTH.match(name, at)
    return [part for part in parts if not part.startswith("_GLOBAL__N")], at


def _running(events: Iterable[DeviceEvent | HostEvent]) -> Intervals:
    return Intervals.merged((e.start_us, e.end_us) for e in events)


def _unlaunched(trace: RankTrace) -> Iterator[tuple[float, float]]:
    """Yield the part of each gap before the host returned from the launch that ends the gap.

    A gap that no launch ends is host-bound: the host has nothing in flight.
    """
    first = min((s.start_us for s in trace.steps), default=0.0)
    last = max((s.end_us for s in trace.steps), default=0.0)
    busy = _running(trace.device)
    # start of device work -> end of the earliest launch among the work that starts then
    next_launch: dict[float, float] = {}
    for event in trace.device:
        if (call := trace.launches.get(event.correlation)) is not None:
            earliest = next_launch.get(event.start_us, call.end_us)
            next_launch[event.start_us] = min(call.end_us, earliest)
    for start, end in zip([-inf, *busy.ends], [*busy.starts, inf], strict=True):
        launch = next_launch.get(end, start if end < inf else last)
        yield max(start, first), min(end, launch, last)

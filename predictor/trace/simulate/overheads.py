"""Host overheads from traces, by operator and call.

They are the five kinds of Lin et al. 2022 (section on overheads; code owensgroup/ml_perf_model),
and the device's side of calls (docs/model.md, chapter 17).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import fmean, quantiles

from predictor.trace.events import DeviceEvent, RankTrace, TraceStep
from predictor.trace.simulate.host import HostItem, Kind, Piece, Role, blocks, plain

OUTLIER_IQR = 1.5
"""Tukey's fence: times further than this many interquartile ranges beyond a quartile are cut."""
FEWEST_TO_CUT = 4
QUEUED_US = 15.0
"""A pause after work that was launched this long before it is a gap of the device itself."""

HOST_KINDS = frozenset({Kind.T1, Kind.T2, Kind.T3, Kind.T4, Kind.T5})

Key = tuple[str, ...]
"""A kind, then names from general to specific; the kind alone is the entry of all."""


@dataclass(frozen=True)
class Overhead:
    """Time of ``count`` pieces of one key, with the profiler on.

    Args:
        us: mean of all pieces, for use in sums.
        typical_us: mean without outliers.
    """

    us: float
    typical_us: float
    count: int


class TracedOverheads:
    """Pieces of host time of some steps, by key.

    Args:
        several: overheads to pool.
    """

    def __init__(self, several: Iterable[TracedOverheads] = ()) -> None:
        self.times: dict[Key, list[float]] = {}
        self._means: dict[Key, Overhead] = {}
        for other in several:
            for key, times in other.times.items():
                self.times.setdefault(key, []).extend(times)

    def add(self, piece: Piece) -> None:
        """Add a piece under each of its names."""
        self._means.clear()
        for end in range(len(piece.names) + 1):
            self.times.setdefault((piece.kind.value, *piece.names[:end]), []).append(piece.us)

    def find(self, kind: Kind, names: Key = ()) -> Overhead:
        """Return the overhead of the most specific key present; zero for an absent kind."""
        for end in range(len(names), -1, -1):
            key = (kind.value, *names[:end])
            if key in self.times:
                if key not in self._means:
                    self._means[key] = _mean(self.times[key])
                return self._means[key]
        return Overhead(0.0, 0.0, 0)

    def us(self, piece: Piece) -> float:
        """Return the expected time of a piece, with the profiler on.

        Outliers count on the host, where any longer stretch contains some. On the device they are
        waits, which the trace cannot separate from latencies and gaps.
        """
        overhead = self.find(piece.kind, piece.names)
        return overhead.us if piece.kind in HOST_KINDS else overhead.typical_us


def _mean(times: list[float]) -> Overhead:
    typical = times
    if len(times) >= FEWEST_TO_CUT:
        low, _, high = quantiles(times, n=4, method="inclusive")
        reach = OUTLIER_IQR * (high - low)
        typical = [time for time in times if low - reach <= time <= high + reach]
    return Overhead(fmean(times), fmean(typical), len(times))


def overheads_of(items: Iterable[HostItem], trace: RankTrace, step: TraceStep) -> TracedOverheads:
    """Collect the overheads of one step of a rank, from its host items and its device work."""
    samples = TracedOverheads()
    latest: dict[int, DeviceEvent] = {}
    for item in items:
        if not item.before.idle:
            samples.add(item.before)
        for piece in _of_call(item, latest.get(item.thread)):
            samples.add(piece)
        if item.device and item.device[-1].collective is None:
            latest[item.thread] = item.device[-1]
    for piece in _of_device(trace, step):
        samples.add(piece)
    return samples


def call_piece(item: HostItem) -> Piece:
    """Return the call of an item as a piece of T4, named by the call and its caller."""
    names = (item.label, *(plain(name) for name in item.stack[-1:]))
    return Piece(Kind.T4, names, item.end_us - item.start_us)


def _of_call(item: HostItem, latest: DeviceEvent | None) -> Iterator[Piece]:
    if item.role is Role.SYNC:
        over = item.start_us if latest is None else max(item.start_us, latest.end_us)
        if over <= item.end_us:
            yield Piece(Kind.RETURN, (item.label,), item.end_us - over)
    elif item.waits:
        yield Piece(Kind.RETURN, (item.label,), max(0.0, item.end_us - item.device[-1].end_us))
    elif item.call is not None:
        yield call_piece(item)


def _of_device(trace: RankTrace, step: TraceStep) -> Iterator[Piece]:
    """Yield gaps between queued work of a stream, and latencies from a call to an idle device."""
    streams: dict[int, DeviceEvent] = {}
    busy_until = 0.0
    for event in trace.device:
        call = trace.launches.get(event.correlation)
        if call is not None and step.start_us <= call.start_us < step.end_us:
            before = streams.get(event.stream)
            if before is not None and before.end_us > call.end_us + QUEUED_US:
                if event.collective is None:
                    yield gap_piece(before, event, max(0.0, event.start_us - before.end_us))
            elif busy_until < call.start_us:
                waits = blocks(call, [event])
                kind, name = (Kind.ISSUE, call.name) if waits else (Kind.LATENCY, event.kind)
                issued = call.start_us if waits else call.end_us
                yield Piece(kind, (name,), max(0.0, event.start_us - issued))
        streams[event.stream] = event
        busy_until = max(busy_until, event.end_us)


def gap_piece(before: DeviceEvent, after: DeviceEvent, us: float) -> Piece:
    """Return the gap between two events of a stream, of one launch as in a graph, or of two."""
    scope = "graph" if before.correlation == after.correlation else "stream"
    return Piece(Kind.GAP, (scope, f"{before.kind} {after.kind}"), us)

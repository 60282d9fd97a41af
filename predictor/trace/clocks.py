"""Puts the traces of several ranks on one clock, by when their collectives end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import TypeVar

from predictor.trace.events import DeviceEvent, HostEvent, RankTrace, TraceStep
from predictor.units import us

TOGETHER = frozenset({"all_to_all", "all_reduce", "reduce_scatter", "all_gather"})
"""Collectives that no rank leaves before all have arrived; the root of a broadcast does leave."""
SAME_CLOCK_US = 500.0
"""Ranks of one host end within a few tens of microseconds of each other; those of hosts with
clocks that a time service keeps within some hundreds."""

Key = tuple[object, int]
Timed = TypeVar("Timed", HostEvent, DeviceEvent, TraceStep)


def clock_offsets(traces: Sequence[RankTrace]) -> dict[int, float]:
    """Rank -> microseconds that its clock is ahead of the lowest rank's.

    The median over the collectives that both took part in of the difference of their ends. Ranks
    that share no collective with the lowest are left out.
    """
    if not traces:
        return {}
    reference, *others = sorted(traces, key=lambda t: t.rank)
    ends = _ends(reference)
    offsets = {reference.rank: 0.0}
    for trace in others:
        shared = [
            event.end_us - ends[key].end_us
            for key, event in _ends(trace).items()
            if key in ends and _op(event) == _op(ends[key])
        ]
        if shared:
            offsets[trace.rank] = median(shared)
    return offsets


def on_one_clock(traces: Sequence[RankTrace]) -> tuple[tuple[RankTrace, ...], tuple[str, ...]]:
    """The traces, shifted onto the clock of the lowest rank where theirs differs, and notes.

    Ranks that are off by less than `SAME_CLOCK_US` are not shifted: collectives do not end at
    exactly the same time even on one clock.
    """
    offsets = clock_offsets(traces)
    far = {rank: ahead for rank, ahead in offsets.items() if abs(ahead) > SAME_CLOCK_US}
    if not far:
        return tuple(traces), ()
    listed = ", ".join(f"rank {rank} by {us(ahead):+,.3f} ms" for rank, ahead in far.items())
    note = (
        f"the ranks' clocks differ: {listed} against rank {min(offsets)}; their times are shifted "
        "so that collectives end together"
    )
    shifted = (_shift(t, far[t.rank]) if t.rank in far else t for t in traces)
    return tuple(shifted), (note,)


def _shift(trace: RankTrace, ahead_us: float) -> RankTrace:
    return replace(
        trace,
        host=tuple(_earlier(event, ahead_us) for event in trace.host),
        device=tuple(_earlier(event, ahead_us) for event in trace.device),
        steps=tuple(_earlier(step, ahead_us) for step in trace.steps),
    )


def _earlier(event: Timed, ahead_us: float) -> Timed:
    return replace(event, start_us=event.start_us - ahead_us, end_us=event.end_us - ahead_us)


def program_notes(traces: Iterable[RankTrace]) -> tuple[str, ...]:
    """A note for the first position where the ranks run different collectives, if there is one."""
    seen: dict[Key, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for trace in traces:
        for event in trace.device:
            call = event.collective
            if call is not None and call.order >= 0:
                seen[(call.group_name or call.group, call.order)][call.op].append(trace.rank)
    broken = [key for key, ops in seen.items() if len(ops) > 1]
    if not broken:
        return ()
    key = min(broken, key=lambda k: k[1])
    choices = ", ".join(f"{op} on rank {ranks[0]}" for op, ranks in seen[key].items())
    return (
        f"the ranks do not run the same collectives: the one at position {key[1]} is {choices}; "
        "were the traces recorded in the same steps of one job?",
    )


def _ends(trace: RankTrace) -> dict[Key, DeviceEvent]:
    """Collectives launched in the trace, by group and position."""
    return {
        (event.collective.group_name or event.collective.group, event.collective.order): event
        for event in trace.device
        if event.collective is not None
        and event.collective.order >= 0
        and event.collective.op in TOGETHER
    }


def _op(event: DeviceEvent) -> str:
    return "" if event.collective is None else event.collective.op

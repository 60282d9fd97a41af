"""Steps that begin before the trace does: part of what they waited for is not in it.

Why: docs/decisions/0045.
"""

from __future__ import annotations

from collections.abc import Sequence

from predictor.trace.events import RankTrace
from predictor.trace.simulate.host import HostItem, Launches, Role

OUTSIDE_SHARE = 0.02
"""Share of its time from which on a step is said to begin outside."""


def begins_outside(
    trace: RankTrace, step: int, items: Sequence[HostItem], launches: Launches
) -> bool:
    """Whether a step waited for work that was launched before the trace began.

    Only the first step of a trace can. It shows in device work whose launch the trace lacks, and in
    synchronisations before any work that it has.
    """
    if step > 0:
        return False
    first = trace.steps[0]
    lost = _orphans_us(trace, launches) + _unexplained_us(trace, items)
    return lost > OUTSIDE_SHARE * (first.end_us - first.start_us)


def _orphans_us(trace: RankTrace, launches: Launches) -> float:
    """Device work of the first step that was launched before the trace."""
    first = trace.steps[0]
    return sum(
        min(event.end_us, first.end_us) - max(event.start_us, first.start_us)
        for event in trace.device
        if event.start_us < first.end_us
        and event.end_us > first.start_us
        and event.correlation not in launches.call_of
    )


def _unexplained_us(trace: RankTrace, items: Sequence[HostItem]) -> float:
    """Time in synchronisations before any work of the trace had run: work of before the trace."""
    begun = min((event.start_us for event in trace.device), default=float("inf"))
    return sum(
        min(item.end_us, begun) - item.start_us
        for item in items
        if item.role is Role.SYNC and item.start_us < begun
    )

"""Plans as measured."""

from __future__ import annotations

from search.expected_gain import ExpectedGain
from shardopt.formatting import interval, number, plural, points
from shardopt.race import Confirmation
from shardopt.report.blocks import Block, Grid, Heading


def measured(found: Confirmation, expected: ExpectedGain | None) -> list[Block]:
    """The measured plans, the fastest first, then `gained`."""
    plans = sorted(found.plans, key=lambda p: (p.median_ms is None, p.median_ms or 0.0))
    rows = [
        (
            one.name,
            "" if one.median_ms is None else number(one.median_ms),
            "" if one.interval_ms is None else interval(one.interval_ms),
            one.found_by,
            "" if one.dropped_after is None else f"out after {plural(one.dropped_after, 'round')}",
        )
        for one in plans
    ]
    return [
        Heading("Measured plans"),
        Grid(["<plan", ">ms", ">95 % interval", "~found by", "<"], rows),
        *(f"{note}." for note in found.notes),
        gained(found, expected),
    ]


def gained(found: Confirmation, expected: ExpectedGain | None) -> str:
    """The fastest plan, and the measured gain beside the expected one."""
    if found.gain is None:
        return f"{found.best.name} is the fastest measured plan; TorchRec's was not timed."
    value, low, high = found.gain
    between = ""
    if low is not None and high is not None:
        between = f" (95 % interval {points(low)} to {points(high)})"
    before = "" if expected is None else f"; {points(expected.mean)} % was expected"
    return (
        f"{found.best.name} is the fastest measured plan: it gains {points(value)} % over "
        f"TorchRec's{between}{before}."
    )

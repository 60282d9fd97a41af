"""Plans as measured, for the console."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardopt.formatting import interval, number, plural, points
from shardopt.report.console import heading, line, show, table

if TYPE_CHECKING:
    from rich.console import Console

    from search.expected_gain import ExpectedGain
    from shardopt.race import Confirmation


def show_confirmed(
    console: Console, found: Confirmation, expected: ExpectedGain | None, *, quiet: bool
) -> None:
    """The measured plans, the fastest first, and the measured gain beside the expected one."""
    if not quiet:
        heading(console, "Measured plans")
        made = table("<plan", ">ms", ">95 % interval", "~found by", "<")
        for one in sorted(found.plans, key=lambda p: (p.median_ms is None, p.median_ms or 0.0)):
            made.add_row(
                one.name,
                "" if one.median_ms is None else number(one.median_ms),
                "" if one.interval_ms is None else interval(one.interval_ms),
                one.found_by,
                ""
                if one.dropped_after is None
                else f"out after {plural(one.dropped_after, 'round')}",
            )
        show(console, made)
        for note in found.notes:
            line(console, f"{note}.")
    if found.gain is None:
        line(console, f"{found.best.name} is the fastest measured plan; TorchRec's was not timed.")
        return
    value, low, high = found.gain
    between = ""
    if low is not None and high is not None:
        between = f" (95 % interval {points(low)} to {points(high)})"
    before = "" if expected is None else f"; {points(expected.mean)} % was expected"
    line(
        console,
        f"{found.best.name} is the fastest measured plan: it gains {points(value)} % over "
        f"TorchRec's{between}{before}.",
    )

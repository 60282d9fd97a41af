"""Plans as measured, for the console."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from shardopt.formatting import ms

if TYPE_CHECKING:
    from rich.console import Console

    from search.expected_gain import ExpectedGain
    from shardopt.race import Confirmation


def show_confirmed(
    console: Console, found: Confirmation, expected: ExpectedGain | None, *, quiet: bool
) -> None:
    """The measured plans, the fastest first, and the measured gain beside the expected one."""
    if not quiet:
        table = Table("measured", "ms", "95 % interval", "found by", "", box=None)
        for one in sorted(found.plans, key=lambda p: (p.median_ms is None, p.median_ms or 0.0)):
            interval = "" if one.interval_ms is None else " – ".join(map(ms, one.interval_ms))
            out = "" if one.dropped_after is None else f"out after {one.dropped_after} rounds"
            time = "" if one.median_ms is None else ms(one.median_ms)
            table.add_row(one.name, time, interval, one.found_by, out)
        console.print(table)
        for note in found.notes:
            console.print(note)
    if found.gain is None:
        console.print(f"{found.best.name} is the fastest measured plan; TorchRec's was not timed.")
        return
    value, low, high = found.gain
    between = "" if low is None or high is None else f", 95 % interval {low:+.1%} to {high:+.1%}"
    before = "" if expected is None else f"; expected {expected.mean:+.1%}"
    console.print(
        f"{found.best.name} is the fastest measured plan: gain over TorchRec's {value:+.1%}"
        f"{between}{before}."
    )

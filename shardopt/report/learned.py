"""What was learned, for the console."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from shardopt.formatting import ms

if TYPE_CHECKING:
    from rich.console import Console

    from shardopt.bench.learn import Lesson

MOST_ROWS = 20


def show_lesson(console: Console, lesson: Lesson, path: str, *, quiet: bool) -> None:
    """The factors that have most evidence, what had no match, and what the profile says now."""
    if not quiet:
        table = Table("costs", "table", "factor", "error left", "evidence", box=None)
        most = sorted(lesson.learned.factors, key=lambda f: -f.evidence_ms)[:MOST_ROWS]
        for one in most:
            values = (f"x{one.factor:.2f}", f"{one.error:.0%}", ms(one.evidence_ms))
            table.add_row(one.group, one.table or "", *values)
        console.print(table)
        for left in lesson.unmatched:
            share = f" ({left.ms / lesson.measured_ms:.1%} of a step)" if lesson.measured_ms else ""
            console.print(f"not matched: {left.name}, {ms(left.ms)}{share}")
    console.print(
        f"{ms(lesson.measured_ms)} measured; {ms(lesson.before_ms)} predicted before, "
        f"{ms(lesson.after_ms)} now. Wrote {path}."
    )

"""What was learned."""

from __future__ import annotations

from shardopt.bench.learn import Lesson
from shardopt.formatting import ms
from shardopt.report.blocks import Grid, View

MOST_ROWS = 20


def lesson_view(lesson: Lesson, path: str) -> View:
    """The factors that have most evidence, what had no match, and what the profile says now."""
    most = sorted(lesson.learned.factors, key=lambda f: -f.evidence_ms)[:MOST_ROWS]
    rows = [
        (f.group, f.table or "", f"x{f.factor:.2f}", f"{f.error:.0%}", ms(f.evidence_ms))
        for f in most
    ]
    whole = lesson.measured_ms
    unmatched = [
        f"not matched: {left.name}, {ms(left.ms)}"
        + (f" ({left.ms / whole:.1%} of a step)" if whole else "")
        for left in lesson.unmatched
    ]
    end = (
        f"{ms(whole)} measured; {ms(lesson.before_ms)} predicted before, {ms(lesson.after_ms)} "
        f"now. Wrote {path}."
    )
    grid = Grid(["<costs", "~table", ">factor", ">error left", ">evidence"], rows)
    return View(
        {"output": path, **lesson.as_object()}, [grid, *unmatched, end], [end], lesson.notes
    )

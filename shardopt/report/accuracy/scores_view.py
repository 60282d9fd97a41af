"""Tables of figures beside a suite's rows: on the console, in docs/accuracy.md and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from shardopt.report.console import heading, line, show, table
from shardopt.report.words import number, percent
from shardopt.validate.report import Cell, Scores


def scores_object(scores: Scores) -> dict[str, Any]:
    """Column title -> value for each row, fractions as they are; null where there is none."""
    titles = [title for title, _ in scores.columns]
    rows = [dict(zip(titles, map(_plain, row), strict=True)) for row in scores.rows]
    return {"about": scores.about, "rows": rows}


def _plain(cell: Cell) -> Any:
    if isinstance(cell, tuple):
        return list(cell)
    return None if isinstance(cell, float) and math.isnan(cell) else cell


def show_scores(console: Console, scores: Scores) -> None:
    """One table with its title; wide ones are turned on their side."""
    heading(console, scores.name)
    if scores.about:
        line(console, f"  {scores.about}", style="dim")
    titles = [title for title, _ in scores.columns]
    lines = [[*map(str, row)] for row in _shown(scores)]
    if len(titles) > MOST_COLUMNS and len(lines) < len(titles):
        first, *rest = [list(column) for column in zip(titles, *lines, strict=True)]
        titles, lines = first, rest
    made = table([(titles[0], "fold"), *((title, "fold") for title in titles[1:])])
    for row in lines:
        made.add_row(*row)
    show(console, made)


MOST_COLUMNS = 9
"""What a console holds side by side."""


def scores_markdown(scores: Scores) -> Iterator[str]:
    """Lines of the page."""
    yield f"\n### {scores.name}\n"
    if scores.about:
        yield f"{scores.about}\n"
    yield "| " + " | ".join(title for title, _ in scores.columns) + " |"
    yield "|" + "---|" * len(scores.columns)
    yield from ("| " + " | ".join(row) + " |" for row in _shown(scores))


def _shown(scores: Scores) -> Iterator[list[str]]:
    kinds = [kind for _, kind in scores.columns]
    for row in scores.rows:
        yield [cell_text(cell, kind) for cell, kind in zip(row, kinds, strict=True)]


def cell_text(cell: Cell, kind: str) -> str:
    """A cell as people read it; ``-`` where there is no figure."""
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return "-"
    if isinstance(cell, tuple):
        share, low, high = (f"{100 * value:.0f}" for value in cell)
        return f"{share} % ({low}-{high})"
    if isinstance(cell, str) or kind == "count":
        return str(cell)
    if kind == "signed":
        return f"{100 * cell:+.1f} %"
    shown = {"share": percent, "ms": number, "figure": "{:.3f}".format}
    return shown[kind](cell)

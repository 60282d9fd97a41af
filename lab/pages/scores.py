"""Results of `python -m lab validate`, as tables and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console

from lab.suites import Cell, ComparedRow, Report, Scores, Summary
from shardopt.formatting import number, percent, plural
from shardopt.report.console import heading, line, show, table

MOST_SKIPPED = 12
"""Left-out rows that the console lists; the JSON output has all."""
FEW_ROWS = 100
"""At most so many rows are shown one by one."""


def report_object(report: Report) -> dict[str, Any]:
    """Return one suite for ``--json``.

    Keys:
        rows: comparisons that nothing was fitted on: their names, ``measured_ms``,
            ``predicted_ms``, ``interval_ms`` (90 %, low and high; null where there is none),
            ``error`` (predicted / measured - 1), ``part``, ``family`` and ``source``.
        n: their number; ``mape`` and ``geomean`` of the part ``headline``, fractions;
            ``covered``: the share of them that lies in its interval.
        other_rows: the same for rows that constants were fitted on, or outside the headline.
        parts, families: the same by part, and by part and family.
        noise: the same of repeated measurements, each against the median of the others.
        skipped: ``count`` and ``rows``, a line of text each.
        scores: further tables, if the suite has any: name -> ``about`` and ``rows``.
    """
    listed = {id(row) for row in report.listed}
    answer = {
        "suite": report.suite,
        **_summary(report.summary),
        "n": len(listed),
        "headline": report.headline,
        "parts": {name: _summary(summary) for name, summary in report.by_part().items()},
        "families": [
            {"part": part, "family": family, **_summary(summary)}
            for (part, family), summary in report.by_family().items()
        ],
        "noise": {name: _summary(summary) for name, summary in report.noise.items()},
        "rows": [_row(row) for row in report.listed],
        "other_rows": [_row(row) for row in report.rows if id(row) not in listed],
        "skipped": {"count": len(report.skipped), "rows": list(report.skipped)},
        "notes": list(report.notes),
    }
    if report.scores:
        answer["scores"] = {s.name: scores_object(s) for s in report.scores}
    return answer


def _row(row: ComparedRow) -> dict[str, Any]:
    return {
        **row.name,
        "measured_ms": row.measured_ms,
        "predicted_ms": row.predicted_ms,
        "interval_ms": row.interval_ms and list(row.interval_ms),
        "error": row.error,
        "part": row.part,
        "family": row.family,
        "source": row.source,
    }


def _summary(summary: Summary) -> dict[str, float | int | None]:
    """Return a summary for JSON, which has no NaN: the error of no rows is null."""
    figures = zip(("mape", "geomean", "worst", "covered"), summary.figures, strict=True)
    return {"n": summary.n, **{key: None if math.isnan(v) else v for key, v in figures}}


def show_report(console: Console, report: Report, *, quiet: bool = False) -> None:
    """Print errors by part and family, and the rows themselves where they are few."""
    heading(console, f"validate {report.suite}", "predicted against measured")
    parts = {
        name + (" *" if name == report.headline else ""): summary
        for name, summary in report.by_part().items()
    }
    noise = {f"noise: {name}": summary for name, summary in report.noise.items()}
    _show(console, ("~rows", *ERRORS), ((k, *_errors(s)) for k, s in (parts | noise).items()))
    line(console, "  * the headline: rows not used for fitting; covered: in their 90 % interval")
    if quiet:
        return
    console.print()
    families = ((*key, *_errors(summary)) for key, summary in report.by_family().items())
    _show(console, ("<part", "~platform", *ERRORS), families)
    for scores in report.scores:
        show_scores(console, scores)
    if len(report.rows) <= FEW_ROWS and not report.scores:
        keys = dict.fromkeys(key for row in report.rows for key in row.name if key in _SHOWN)
        console.print()
        titles = ("<part", *(f"~{key}" for key in keys), ">measured ms", ">predicted ms", ">error")
        cells = (
            (
                *(row.part, *(str(row.name.get(key, "-")) for key in keys)),
                *(number(row.measured_ms), number(row.predicted_ms), f"{100 * row.error:+.1f} %"),
            )
            for row in report.rows
        )
        _show(console, titles, cells)
    for note in report.notes:
        line(console, f"  {note}")
    if report.skipped:
        line(console, f"\n  {plural(len(report.skipped), 'row')} left out:")
        for text in report.skipped[:MOST_SKIPPED]:
            line(console, f"    {text}")
        more = len(report.skipped) - MOST_SKIPPED
        if more > 0:
            line(console, f"    ... and {more} more; the JSON output has all")


ERRORS = (">n", ">MAPE", ">geomean", ">worst", ">covered")
"""Columns of a summary."""
_SHOWN = ("system", "profile", "accels", "round", "interaction", "gpus", "local_batch")


def _errors(summary: Summary) -> list[str]:
    shown = ("-" if math.isnan(value) else percent(value) for value in summary.figures)
    return [str(summary.n), *shown]


def _show(console: Console, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    rendered = table(*columns)
    for row in rows:
        rendered.add_row(*row)
    show(console, rendered)


def scores_object(scores: Scores) -> dict[str, Any]:
    """Return each row as column -> value, fractions as they are; null where there is none."""
    keys = [title for title, _ in scores.columns]
    rows = [dict(zip(keys, map(_plain, row), strict=True)) for row in scores.rows]
    return {"about": scores.about, "rows": rows}


def _plain(cell: Cell) -> Any:
    if isinstance(cell, tuple):
        return list(cell)
    return None if isinstance(cell, float) and math.isnan(cell) else cell


MOST_COLUMNS = 9
"""Most columns that fit side by side on a console."""


def show_scores(console: Console, scores: Scores) -> None:
    """Print one table with its title; wide ones are transposed."""
    heading(console, scores.name)
    if scores.about:
        line(console, f"  {scores.about}", style="dim")
    titles = [title for title, _ in scores.columns]
    kinds = [kind for _, kind in scores.columns]
    lines = [[cell_text(*cell) for cell in zip(row, kinds, strict=True)] for row in scores.rows]
    if len(titles) > MOST_COLUMNS and len(lines) < len(titles):
        titles, *lines = [list(column) for column in zip(titles, *lines, strict=True)]
    _show(console, [f"~{title}" for title in titles], lines)


def cell_text(cell: Cell, kind: str) -> str:
    """Return a cell as people read it; ``-`` where there is no figure."""
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

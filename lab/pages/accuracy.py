"""docs/accuracy.md, a short page, and docs/accuracy/, its rows as CSV.

accuracy.md beside this file is the head of the page.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from lab.first_scores import read_scores
from lab.pages.tables import percent, read_csv, scores_file, table_head
from lab.statistics import grouped
from lab.suites import SUITES, Cell, Report, Suite, Summary
from shardopt.files import atomic_write_text

MOST_PARTS = 4
"""Most parts of a suite on the page; summary.csv has all."""
MOST_ROWS = 250
FEW_SCORES = 20
"""Most first scores that the page shows in full; lab/first_scores.csv has every one."""
SUMMARY = "summary.csv"
COLUMNS = ("suite", "part", "headline", "n", "mean", "geomean", "worst", "covered")
"""Columns of summary.csv; errors and coverage are fractions, empty where there is none."""
EVERY_ROW, LEFT_OUT = "every row", "left out"
"""Parts of summary.csv that only count."""


def write_accuracy(page: Path, reports: Sequence[Report]) -> None:
    """Write CSV files of the suites that were run, and the page from all CSV files beside it."""
    folder = page.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    summary = folder / SUMMARY
    lines_of: dict[str, list[Sequence[object]]] = {}
    for row in read_csv(summary) if summary.is_file() else ():
        lines_of.setdefault(row["suite"], []).append([row[column] for column in COLUMNS])
    for report in reports:
        lines_of[report.suite] = _write_suite(folder, report)
    order = [*SUITES, *(name for name in lines_of if name not in SUITES)]
    _write_csv(summary, COLUMNS, (row for name in order for row in lines_of.get(name, ())))
    atomic_write_text(page, accuracy_text(folder))


def _write_suite(folder: Path, report: Report) -> list[Sequence[object]]:
    """Write the CSV files of one suite, remove its stale ones, and return its summary lines."""
    suite = report.suite
    stale = set(suite_files(folder, suite))
    _write_rows(folder / f"{suite}.csv", report)
    written = {f"{suite}.csv"}
    for scores in report.scores:
        written.add(scores_file(suite, scores.name))
        _write_csv(
            folder / scores_file(suite, scores.name),
            [title for title, _ in scores.columns],
            (map(_plain, row) for row in scores.rows),
        )
    for name in stale - written:
        (folder / name).unlink()
    counts = {EVERY_ROW: len(report.rows), LEFT_OUT: len(report.skipped)}
    return [
        *(
            (suite, name, int(name == report.headline), *_figures(summary))
            for name, summary in all_parts(report)
        ),
        *((suite, name, 0, n, "", "", "", "") for name, n in counts.items()),
    ]


def suite_files(folder: Path, suite: str) -> list[str]:
    """Return the names of a suite's CSV files, that of its rows first."""

    def home(name: str) -> str:
        begins = [s for s in SUITES if name == f"{s}.csv" or name.startswith(f"{s}-")]
        return max(begins, key=len, default="")

    names = sorted(path.name for path in folder.glob(f"{suite}*.csv"))
    return sorted((n for n in names if home(n) == suite), key=lambda n: n != f"{suite}.csv")


def accuracy_text(folder: Path) -> str:
    """Return the page, from the CSV files of a folder.

    Raises:
        InputError: the summary cannot be read.
    """
    head = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
    by_suite = grouped(read_csv(folder / SUMMARY), lambda row: row["suite"])
    lines = (
        line for name in SUITES if name in by_suite for line in _section(folder, by_suite[name])
    )
    return "\n".join([head, *lines]).rstrip() + "\n"


def all_parts(report: Report) -> Iterator[tuple[str, Summary]]:
    """Yield every part of a report, then the noise of repeated measurements."""
    yield from report.by_part().items()
    yield from ((f"noise: {name}", summary) for name, summary in report.noise.items())


def _section(folder: Path, rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield the lines of one suite, from its rows of the summary."""
    suite = SUITES[rows[0]["suite"]]
    by_part = {row["part"]: row for row in rows}
    counts = [by_part.pop(name, {"n": "0"})["n"] for name in (EVERY_ROW, LEFT_OUT)]
    headline = next((name for name, row in by_part.items() if row["headline"] == "1"), "")
    leads = [headline, *(part for shown in suite.readme for part in shown["parts"])]
    named = dict.fromkeys([*leads, *suite.held_out, *by_part])
    shown = [part for part in named if part in by_part and by_part[part]["n"] != "0"][:MOST_PARTS]
    yield f"## {suite.name}\n"
    yield suite.text
    yield from table_head("rows", "n", "mean", "geomean", "worst", "covered")
    for part in shown:
        mark = " *" if part == headline else ""
        errors = " | ".join(percent(by_part[part][column]) for column in COLUMNS[4:])
        yield f"| {part}{mark} | {by_part[part]['n']} | {errors} |"
    yield from _first_scores(suite)
    files = ", ".join(
        f"[{Path(name).stem.removeprefix(suite.name).strip('-') or 'rows'}](accuracy/{name})"
        for name in suite_files(folder, suite.name)
    )
    yield f"\n{counts[0]} rows ({counts[1]} left out): {files}"
    yield ""


def _first_scores(suite: Suite) -> Iterator[str]:
    """Yield the suite's first scores: all where they are few, else those that pages quote."""
    quoted = {name for shown in (*suite.lead, *suite.readme) for name in shown["first"]}
    rows = [row for row in read_scores() if row["suite"] == suite.name]
    rows = rows if len(rows) <= FEW_SCORES else [row for row in rows if row["what"] in quoted]
    if not rows:
        return
    yield ""
    yield from table_head("first scores", "n", "mean", "geomean", "covered", "made", "note")
    for row in rows:
        right = f"{row['pairs_right']} of {row['n']} pairs in the right order; "
        note = (right if row["pairs_right"] else "") + row["note"]
        errors = " | ".join(percent(row[column]) for column in ("mean", "geomean", "covered"))
        origin = f"{row['date']}, {row['commit']}"
        yield f"| {row['what']} | {row['n']} | {errors} | {origin} | {note.rstrip('; ')} |"


def _write_rows(path: Path, report: Report) -> None:
    """Write the rows of a suite; for a large public table, which is not ours, errors by family."""
    if len(report.rows) > MOST_ROWS and not SUITES[report.suite].committed:
        families = report.by_family().items()
        columns = ("part", "family", *COLUMNS[3:])
        _write_csv(path, columns, ((*key, *_figures(summary)) for key, summary in families))
        return
    keys = list(dict.fromkeys(key for row in report.rows for key in row.name))
    times = ("measured_ms", "predicted_ms", "low_ms", "high_ms", "error", "source")
    _write_csv(
        path,
        ("part", *keys, *times),
        (
            (
                row.part,
                *(_plain(row.name.get(key, "")) for key in keys),
                *map(_plain, (row.measured_ms, row.predicted_ms)),
                *map(_plain, row.interval_ms or ("", "")),
                round(row.error, 4),
                row.source,
            )
            for row in report.rows
        ),
    )


def _write_csv(path: Path, columns: Sequence[str], rows: Iterable[Iterable[object]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    atomic_write_text(path, text.getvalue(), update=True)


def _figures(summary: Summary) -> list[object]:
    shown = ("" if math.isnan(error) else round(error, 4) for error in summary.figures)
    return [summary.n, *shown]


def _plain(cell: Cell) -> str | int | float:
    """Round to four significant digits, more than a timer has."""
    if isinstance(cell, tuple):
        return " ".join(f"{value:.4g}" for value in cell)
    if isinstance(cell, float):
        return "" if math.isnan(cell) else float(f"{cell:.4g}")
    return "" if cell is None else cell

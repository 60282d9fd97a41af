"""docs/accuracy.md, a short page, docs/accuracy/, its rows as CSV, and the tables of the README.

accuracy.md beside this file is the head of the page.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from lab.statistics import mean_interval
from lab.suites import SUITES, Cell, Report, Summary
from predictor.errors import InputError
from shardopt.files import atomic_write_text, decode, read_bytes

MOST_PARTS = 4
"""Parts of a suite on the page; summary.csv has all."""
MOST_ROWS = 250
SUMMARY = "summary.csv"
COLUMNS = ("suite", "part", "headline", "n", "mean", "geomean", "worst", "covered")
"""Of summary.csv; errors and coverage are fractions, empty where there is none."""


def write_accuracy(page: Path, reports: Sequence[Report]) -> None:
    """Write the page, and its CSV files into the folder of its name beside it."""
    folder = page.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    parts = ((report, *part) for report in reports for part in all_parts(report))
    _write_csv(
        folder / SUMMARY,
        COLUMNS,
        ((r.suite, name, int(name == r.headline), *_figures(s)) for r, name, s in parts),
    )
    for report in reports:
        _write_rows(folder / f"{report.suite}.csv", report)
        for scores in report.scores:
            _write_csv(
                folder / scores_file(report.suite, scores.name),
                [title for title, _ in scores.columns],
                (map(_plain, row) for row in scores.rows),
            )
    head = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
    text = "\n".join([head, *(line for report in reports for line in _section(report))])
    atomic_write_text(page, text.rstrip() + "\n")


def scores_file(suite: str, name: str) -> str:
    """Name of the CSV file with a further table of a suite."""
    return f"{suite}-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.csv"


def all_parts(report: Report) -> Iterator[tuple[str, Summary]]:
    """Every part of a report, and the noise of repeated measurements."""
    yield from report.by_part().items()
    yield from ((f"noise: {name}", summary) for name, summary in report.noise.items())


def _section(report: Report) -> Iterator[str]:
    suite = SUITES[report.suite]
    found = dict(all_parts(report))
    named = [report.headline, *(row["part"] for row in suite.readme), *report.held_out, *found]
    shown = [part for part in dict.fromkeys(named) if part in found and found[part].n][:MOST_PARTS]
    yield f"## {report.suite}\n"
    yield suite.text
    yield "| rows | n | mean | geomean | worst | covered |"
    yield "|---|---|---|---|---|---|"
    for part in shown:
        mark = " *" if part == report.headline else ""
        n, *errors = _figures(found[part])
        yield f"| {part}{mark} | {n} | {' | '.join(map(_percent, errors))} |"
    files = [f"{report.suite}.csv", *(scores_file(report.suite, s.name) for s in report.scores)]
    yield f"\n{len(report.rows)} rows ({len(report.skipped)} left out): " + ", ".join(
        f"[{file}](accuracy/{file})" for file in files
    )
    yield ""


def _write_rows(path: Path, report: Report) -> None:
    """The rows of a suite; of a large public table, which is its publisher's, errors by family."""
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
                *(row.name.get(key, "") for key in keys),
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
    made = csv.writer(text, lineterminator="\n")
    made.writerow(columns)
    made.writerows(rows)
    atomic_write_text(path, text.getvalue())


def _figures(summary: Summary) -> list[object]:
    shown = ("" if math.isnan(error) else round(error, 4) for error in summary.figures)
    return [summary.n, *shown]


def _percent(share: object, sign: str = "") -> str:
    return "-" if share == "" else f"{100 * float(str(share)):{sign}.1f} %"


def _plain(cell: Cell) -> str | int | float:
    """Four significant digits are more than a timer has."""
    if isinstance(cell, tuple):
        return " ".join(f"{value:.4g}" for value in cell)
    if isinstance(cell, float):
        return "" if math.isnan(cell) else float(f"{cell:.4g}")
    return "" if cell is None else cell


START, END = "<!-- generated: {} -->", "<!-- end of {} -->"
GAIN, EXPECTED = "against TorchRec's planner", "expected gains"
OURS = "shardopt, machine calibrated"
CONFIRMED = Path(__file__).parents[2] / "configs" / "bench" / "confirmed"
"""Rows of `python -m lab confirm`."""
INDEPENDENT = (
    "| another harness, eight models of another generator | 8 | -1.6 % (-8.1 to +3.4) | +3.8 % "
    "| TorchRec's plan differs from itself by 3.0 % |"
)
"""Made with another harness, so its rows are not in this repository."""


def updated(readme: str, folder: Path, where: str = "README.md") -> str:
    """The README with the figures of the CSV files in a folder.

    Raises:
        InputError: a file or part is missing in the folder, or a marker in the README.
    """
    for name, lines in (("accuracy", _errors(folder)), ("gain", _gain(folder))):
        start, end = START.format(name), END.format(name)
        before, found, rest = readme.partition(start)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise InputError(f"{where}: lacks '{start}' and '{end}', between which a table goes")
        readme = "\n".join((before + start, "", *lines, "", end + after))
    return readme


def _errors(folder: Path) -> Iterator[str]:
    found = {(row["suite"], row["part"]): row for row in _read(folder / SUMMARY)}
    yield "| suite | what is predicted | n | mean | geometric mean | covered | first score |"
    yield "|---|---|---|---|---|---|---|"
    for suite in SUITES.values():
        for shown in suite.readme:
            row = found.get((suite.name, shown["part"]))
            if row is None:
                raise InputError(f"{folder / SUMMARY}: no part '{shown['part']}' of {suite.name}")
            errors = " | ".join(map(_percent, (row["mean"], row["geomean"], row["covered"])))
            yield f"| `{suite.name}` | {shown['what']} | {row['n']} | {errors} | {shown['first']} |"


def _gain(folder: Path) -> Iterator[str]:
    measured, expected = (
        {
            (row["runtime"], row["models"], row["task set"]): row
            for row in _read(folder / scores_file("against-torchrec", name))
            if row["plans of"] == OURS
        }
        for name in (GAIN, EXPECTED)
    )
    yield "| measured by | models | mean gain | expected | |"
    yield "|---|---|---|---|---|"
    for key, row in measured.items():
        runtime, models, task_set = key
        if task_set != "all":
            continue
        gain, low, high = (_percent(row[column], "+") for column in ("mean gain", "from", "to"))
        of_plan = _percent(expected[key]["mean expected"], "+")
        yield (
            f"| `python -m lab batch --against`: {runtime} runtime, {models} models "
            f"| {row['tasks']} | {gain} ({low} to {high}) | {of_plan} "
            f"| {row['faster']} faster, {row['equal']} equal, {row['slower']} slower |"
        )
    yield from _confirmed()
    yield INDEPENDENT


def _confirmed() -> Iterator[str]:
    """Gains of plans from what one trace taught, and of those that were confirmed."""
    tasks = [json.loads(path.read_text()) for path in sorted(CONFIRMED.glob("task_*.json"))]
    tasks = [task for task in tasks if "left_out" not in task]
    kinds = (
        ("learned", "learned from one trace of TorchRec's plan", lambda t: t["expected"]["value"]),
        ("confirmed", "with `--confirm`", lambda t: t["confirmed_gain"][0]),
    )
    for name, what, expected in kinds:
        gains = [task["gain"][name] for task in tasks]
        found = mean_interval([gain["value"] for gain in gains])
        mean, low, high = (_percent(share, "+") for share in found)
        of_plan = _percent(statistics.fmean(map(expected, tasks)), "+")
        faster = sum((gain["low"] or 0) > 0 for gain in gains)
        slower = sum((gain["high"] or 0) < 0 for gain in gains)
        yield (
            f"| `python -m lab confirm`: {what} | {len(gains)} | {mean} ({low} to {high}) "
            f"| {of_plan} "
            f"| {faster} faster, {len(gains) - faster - slower} equal, {slower} slower |"
        )


def _read(path: Path) -> list[Mapping[str, str]]:
    return [*csv.DictReader(decode(read_bytes(path, "CSV file"), path).splitlines())]


def write_readme(readme: Path, folder: Path) -> None:
    """Write the figures of a folder's files into the README.

    Raises:
        InputError: a file cannot be read, or as `updated`.
    """
    text = decode(read_bytes(readme, "README"), readme)
    atomic_write_text(readme, updated(text, folder, str(readme)), update=True)

"""Helpers for tests of suites: tables of measurements to write, scores of reports to read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.pages.scores import scores_object
from lab.suites import COLUMNS, Report
from shardopt.bench.rows import read_rows, write_rows


def write_table(folder: Path, file: str, base: Mapping[str, str], *changes: dict[str, str]) -> None:
    """A public table whose rows are ``base`` with some cells changed; a comment goes before."""
    columns = COLUMNS[file]
    rows = ({**dict.fromkeys(columns, ""), **base, **change} for change in changes)
    lines = ["# made up", ",".join(columns)]
    lines += [",".join(row[column] for column in columns) for row in rows]
    (folder / file).write_text("\n".join([*lines, ""]))


def table(report: Report, name: str) -> list[dict[str, Any]]:
    """Lines of one table of scores, by column."""
    matching = next(scores for scores in report.scores if scores.name == name)
    rows: list[dict[str, Any]] = scores_object(matching)["rows"]
    return rows


def a_round(
    number: int, ranks_ms: Mapping[str, list[list[float]]], **more: object
) -> dict[str, Any]:
    """A round of a rows file in which each plan took these ms, by rank and iteration."""
    return {
        "round": number,
        "session": 0,
        "at": "2026-01-01T00:45:00+00:00",
        "load": 0.0,
        "other_cores": None,
        "order": [*ranks_ms],
        "lead_ms": {name: [1.0] * len(ranks) for name, ranks in ranks_ms.items()},
        "ranks_ms": ranks_ms,
        "reference_ms": {},
        **more,
    }


def set_rounds(
    lab: Any, file: str, plans: Mapping[str, str], rounds: list[dict[str, float]]
) -> None:
    """Let rounds of a made-up batch take these ms, and name its plans anew.

    Args:
        file: of rows; ``task-001.part-2.rows.json`` starts as ``task-001.rows.json`` is.
        plans: new name -> plan of the batch that stands for it.
    """
    rows = read_rows(lab.folder / f"{file[:8]}.rows.json")
    entries = {entry["name"]: entry["plan"] for entry in rows.plans}
    rows.plans = [{"name": name, "plan": entries[source]} for name, source in plans.items()]
    reference_ms = rows.rounds[0]["reference_ms"]
    rows.rounds = [
        a_round(at, {name: [[ms] * 2] * 2 for name, ms in times.items()}, reference_ms=reference_ms)
        for at, times in enumerate(rounds)
    ]
    write_rows(lab.folder / file, rows)

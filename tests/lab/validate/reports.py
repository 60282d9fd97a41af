"""What tests of suites write and read: tables of measurements, and the scores of reports."""

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
    found = next(scores for scores in report.scores if scores.name == name)
    rows: list[dict[str, Any]] = scores_object(found)["rows"]
    return rows


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
    rows.rounds = [
        {
            **rows.rounds[0],
            "round": at,
            "order": list(plans),
            "lead_ms": {name: [1.0, 1.0] for name in plans},
            "ranks_ms": {name: [[ms] * 2] * 2 for name, ms in times.items()},
        }
        for at, times in enumerate(rounds)
    ]
    write_rows(lab.folder / file, rows)

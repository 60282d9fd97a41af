"""First scores: errors on new tables before any change with them in view.

first_scores.csv has them as rows: suite, part, errors, date and commit, the file or folder of the
measurements, and a note. Rows of tables that are not public are as reported. The pages quote these
rows and no other figures.

``python -m lab first-scores --data DIR`` predicts each of `TABLES` whose file has no score yet, and
appends one row for each part. Only first scores are called blind. A part keeps its first score;
today's score on the same rows is printed beside it and is held out at best.
"""

from __future__ import annotations

import csv
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from math import prod
from pathlib import Path

from lab.statistics import grouped
from lab.suites import ComparedRow, Summary
from lab.validate.collectives import compare_link
from lab.validate.gemm import BF16_FILE, bf16_row
from lab.validate.links import MULTIHOST_FILE, NCCL_TESTS_FILE, link_of
from lab.validate.primus_step import FILE as STEP_FILE
from lab.validate.primus_step import step_row
from lab.validate.tables import compare_tables, profile_of_row
from predictor.csv_rows import Row
from predictor.units import mib

FILE = Path(__file__).with_suffix(".csv")
COLUMNS = (
    *("suite", "what", "n", "mean", "geomean", "bias", "worst", "covered", "pairs_right"),
    *("date", "commit", "source", "note"),
)
"""Columns of the file: errors and coverage are fractions, empty where they are not known;
``pairs_right`` counts the pairs of plans, of ``n``, whose order was predicted; ``source`` is a file
or folder of measurements."""


def _message(row: ComparedRow) -> str:
    size = int(row.name["size_bytes"])
    kind = "all-to-all" if row.name["collective"] == "all_to_all" else "other collectives"
    band = "below 1 MiB" if size < mib(1) else "1 to 16 MiB" if size < mib(16) else "from 16 MiB"
    return f"{kind}, {band}"


def _between_hosts(row: ComparedRow) -> str:
    size = int(row.name["size_bytes"])
    kind = "all-to-all" if row.name["collective"] == "all_to_all" else "other collectives"
    small, large = 2**16, mib(8)
    band = "from 8 MiB" if size >= large else "64 KiB to 8 MiB" if size >= small else "below 64 KiB"
    return f"{kind} across hosts, {band}"


def _product(row: ComparedRow) -> str:
    gflop = 2e-9 * prod(int(row.name[side]) for side in "mnk")
    band = "below 2 GFLOP" if gflop < 2 else "2 to 50 GFLOP" if gflop < 50 else "from 50 GFLOP"
    return f"bf16 products, {band}"


def _nccl_row(file: str, row: Row) -> ComparedRow:
    return compare_link(link_of(file, row))


def _product_row(row: Row) -> ComparedRow:
    if row["kind"] != "product":
        raise ValueError(f"kind is '{row['kind']}', which needs the whole model")
    return step_row(row)


def _classed(
    build: Callable[[Row], ComparedRow], part: Callable[[ComparedRow], str], row: Row
) -> ComparedRow:
    compared = build(row)
    family = compared.name.get("profile") or profile_of_row(row).name
    return replace(compared, family=str(family), part=part(compared))


TABLES = {
    NCCL_TESTS_FILE: (
        "collectives",
        partial(_classed, partial(_nccl_row, NCCL_TESTS_FILE), _message),
    ),
    MULTIHOST_FILE: (
        "collectives",
        partial(_classed, partial(_nccl_row, MULTIHOST_FILE), _between_hosts),
    ),
    BF16_FILE: ("gemm", partial(_classed, bf16_row, _product)),
    STEP_FILE: ("primus-step", partial(_classed, _product_row, _product)),
}
"""File -> its suite and the function that predicts a row; other rows are left out."""


def scores(path: Path) -> Iterator[tuple[str, Summary]]:
    """Yield part and errors of a table, over all GPUs and for each.

    Raises:
        InputError: the file cannot be read.
    """
    rows, _ = compare_tables(path.parent, {path.name: TABLES[path.name][1]})
    for part, part_rows in grouped(rows, lambda row: row.part).items():
        yield part, Summary.of(part_rows)
        for family, family_rows in sorted(grouped(part_rows, lambda row: row.family).items()):
            yield f"{part}, {family}", Summary.of(family_rows)


def read_scores() -> list[dict[str, str]]:
    """Read every row of first_scores.csv."""
    with FILE.open(newline="", encoding="utf-8") as file:
        return [*csv.DictReader(file)]


def score_tables(folder: Path) -> list[str]:
    """Score tables without a score; return lines with first scores and today's."""
    lines: list[str] = []
    first_scores = {(row["source"], row["what"]): row for row in read_scores()}
    words = ["git", "rev-parse", "--short=8", "HEAD"]
    git = subprocess.run(words, cwd=FILE.parent, capture_output=True, text=True, check=False)
    origin = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "commit": git.stdout.strip()}
    new: list[dict[str, object]] = []
    for name, (suite, _) in TABLES.items():
        if not (folder / name).is_file():
            lines.append(f"{name}: not in {folder}")
            continue
        fresh = all(source != name for source, _ in first_scores)
        for part, summary in scores(folder / name):
            errors = ("mean", "geomean", "worst", "covered")
            figures = {k: f"{v:.4f}" for k, v in zip(errors, summary.figures, strict=True)}
            if fresh:
                about = {"suite": suite, "what": part, "n": summary.n, "source": name}
                new.append({**about, **figures, **origin})
            first = first_scores.get((name, part))
            before = f"first {first['mean']} {first['geomean']}" if first else "no first score"
            lines.append(
                f"{name} {part}: n {summary.n}, mean {figures['mean']}, geomean "
                f"{figures['geomean']} ({before})"
            )
    with FILE.open("a", newline="", encoding="utf-8") as file:
        csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n").writerows(new)
    return lines

"""First scores: what new tables scored before anything was changed with them in view.

``python -m lab first-scores --data DIR`` predicts each of `TABLES` whose file has no score in
first_scores.csv yet, and appends one row a part: commit, date, errors and coverage. Only these
scores are called blind. A part that has its score keeps it: what the code of today scores on the
same rows is printed beside it and is held out at best.
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
from lab.validate.links import NCCL_TESTS_FILE, link_of
from lab.validate.primus_step import FILE as STEP_FILE
from lab.validate.primus_step import step_row
from lab.validate.tables import compare_tables, profile_of_row
from predictor.csv_rows import Row
from predictor.units import mib

FILE = Path(__file__).with_suffix(".csv")
COLUMNS = ("file", "part", "n", "mean", "geomean", "worst", "covered", "commit", "date")


def _message(row: ComparedRow) -> str:
    size = int(row.name["size_bytes"])
    kind = "all-to-all" if row.name["collective"] == "all_to_all" else "other collectives"
    band = "below 1 MiB" if size < mib(1) else "1 to 16 MiB" if size < mib(16) else "from 16 MiB"
    return f"{kind}, {band}"


def _product(row: ComparedRow) -> str:
    gflop = 2e-9 * prod(int(row.name[side]) for side in "mnk")
    band = "below 2 GFLOP" if gflop < 2 else "2 to 50 GFLOP" if gflop < 50 else "from 50 GFLOP"
    return f"bf16 products, {band}"


def _nccl_row(row: Row) -> ComparedRow:
    return compare_link(link_of(NCCL_TESTS_FILE, row))


def _product_row(row: Row) -> ComparedRow:
    if row["kind"] != "product":
        raise ValueError(f"kind is '{row['kind']}', which needs the whole model")
    return step_row(row)


def _classed(
    build: Callable[[Row], ComparedRow], part: Callable[[ComparedRow], str], row: Row
) -> ComparedRow:
    found = build(row)
    return replace(found, family=profile_of_row(row).name, part=part(found))


TABLES = {
    NCCL_TESTS_FILE: partial(_classed, _nccl_row, _message),
    BF16_FILE: partial(_classed, bf16_row, _product),
    STEP_FILE: partial(_classed, _product_row, _product),
}
"""Rows are predicted as the suites do. Those that cannot be are left out."""


def scores(path: Path) -> Iterator[tuple[str, Summary]]:
    """Part -> errors of a table, over all GPUs and of each.

    Raises:
        InputError: the file cannot be read.
    """
    rows, _ = compare_tables(path.parent, {path.name: TABLES[path.name]})
    for part, of in grouped(rows, lambda row: row.part).items():
        yield part, Summary.of(of)
        for family, some in sorted(grouped(of, lambda row: row.family).items()):
            yield f"{part}, {family}", Summary.of(some)


def read_scores() -> list[dict[str, str]]:
    with FILE.open(newline="", encoding="utf-8") as file:
        return [*csv.DictReader(file)]


def score_tables(folder: Path) -> list[str]:
    """Score what has no score yet; lines with first scores and today's."""
    lines: list[str] = []
    known = {(row["file"], row["part"]): row for row in read_scores()}
    words = ["git", "rev-parse", "--short=8", "HEAD"]
    said = subprocess.run(words, cwd=FILE.parent, capture_output=True, text=True, check=False)
    where = said.stdout.strip(), f"{datetime.now(UTC):%Y-%m-%d}"
    new = []
    for name in TABLES:
        if not (folder / name).is_file():
            lines.append(f"{name}: not in {folder}")
            continue
        fresh = all(file != name for file, _ in known)
        for part, summary in scores(folder / name):
            mean, geomean, *_ = figures = [f"{error:.4f}" for error in summary.figures]
            if fresh:
                new.append([name, part, summary.n, *figures, *where])
            first = known.get((name, part))
            before = f"first {first['mean']} {first['geomean']}" if first else "no first score"
            lines.append(f"{name} {part}: n {summary.n}, mean {mean}, geomean {geomean} ({before})")
    with FILE.open("a", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(new)
    return lines

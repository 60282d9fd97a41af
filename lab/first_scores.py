"""First scores: what new tables scored before anything was changed with them in view.

``python -m lab first-scores --data DIR`` predicts each of `TABLES` whose file has no score in
first_scores.csv yet, and appends one row a part: commit, date, errors and coverage. Only these
scores are called blind. A part that has its score keeps it: what the code of today scores on the
same rows is printed beside it and is held out at best.
"""

from __future__ import annotations

import csv
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from lab.statistics import grouped
from lab.suites import ComparedRow, Summary
from lab.validate.gemm import BF16_FILE, bf16_row, compare_bf16
from lab.validate.links import NAMES, NCCL_TESTS_FILE
from lab.validate.primus_step import FILE as STEP_FILE
from lab.validate.tables import compare_tables, kernel_interval, profile_of_row
from predictor.cost.collectives import Collectives
from predictor.cost.errors import resource_groups
from predictor.csv_rows import Row, count, number
from predictor.hardware.loader import load_hardware
from predictor.model.topology import Topology
from predictor.units import mib, us

FILE = Path(__file__).with_suffix(".csv")
COLUMNS = ("file", "part", "n", "mean", "geomean", "worst", "covered", "commit", "date")


def _nccl_tests(row: Row) -> ComparedRow:
    hw = profile_of_row(row)
    ranks, size = count(row, "ranks", 2**20), number(row, "size_bytes")
    op = NAMES.get(row["collective"], row["collective"])
    engine = _collectives(hw.name, ranks)
    time = float(getattr(engine, op)(size))
    groups = resource_groups("collectives", engine.topology)
    kind = "all-to-all" if op == "all_to_all" else "other collectives"
    band = "below 1 MiB" if size < mib(1) else "1 to 16 MiB" if size < mib(16) else "from 16 MiB"
    return ComparedRow(
        {"gpu": row["gpu"], "ranks": ranks, "collective": op, "size_bytes": int(size)},
        us(number(row, "time_us")),
        time,
        family=hw.name,
        part=f"{kind}, {band}",
        interval_ms=kernel_interval(hw, groups, time, size),
    )


def _primus_product(row: Row) -> ComparedRow:
    if row["kind"] != "product":
        raise ValueError(f"kind is '{row['kind']}', which needs the whole model")
    m, n, k = (count(row, column, 2**40) for column in "mnk")
    return compare_bf16(profile_of_row(row), (m, n, k), number(row, "ms"))


@cache
def _collectives(profile: str, ranks: int) -> Collectives:
    hw = load_hardware(profile)
    topology = Topology.uniform(
        ranks, ranks, hbm_bytes=0, ddr_bytes=0, nvlink_domain=min(ranks, hw.nvlink_domain)
    )
    return Collectives(hw, topology)


TABLES = {NCCL_TESTS_FILE: _nccl_tests, BF16_FILE: bf16_row, STEP_FILE: _primus_product}
"""Rows that cannot be predicted are left out."""


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
    """The rows of first_scores.csv."""
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

"""Contract of every suite on public tables.

Each row is predicted without its measurement, and the figures are those of docs/accuracy.
"""

from __future__ import annotations

import csv
import json
import math
from functools import cache
from pathlib import Path

import pytest

from lab.pages.accuracy import _plain
from lab.pages.scores import report_object
from lab.suites import SUITES, ComparedRow, Report
from predictor.errors import InputError
from tests.public_data import EXCERPTS, FULL, ROOT, needs_public_data

ACCURACY = ROOT / "docs" / "accuracy"
TIMES = {
    "gemm": ("latency_ms", "time_us"),
    "mlperf-dlrm": ("iter_ms_median",),
    "dlrm-published": ("iter_ms",),
    "torchrec-p4d": ("iter_ms_derived",),
    "transformers": ("iteration_ms", "iteration time (ms)"),
}
"""Suites that the excerpts hold -> the columns with measurements."""
BARS = {
    "collectives": ("within a domain, from 16 MiB", 0.10),
    "gemm": ("devices of the train split", 0.10),
    "mlperf-dlrm": ("fit", 0.06),
    "dlrm-published": ("fp32 and TF32, CUDA graphs and fused MLPs", 0.12),
    "torchrec-p4d": ("published throughput", 0.25),
    "transformers": ("other sums of fitted timings", 0.05),
}
"""Suite -> a part and the largest mean error that it may have on the excerpts."""
ON_THE_PAGE = ("mlperf-dlrm", "dlrm-published", "torchrec-p4d")
"""Suites whose rows are in docs/accuracy one by one."""
PUBLIC = [name for name, suite in SUITES.items() if not suite.committed]


@cache
def report_of(name: str, folder: Path = EXCERPTS) -> Report:
    return SUITES[name].run(folder)


def check(report: Report) -> None:
    """Check the rows and scores that every report must have."""
    assert report.counted, "the headline has no rows"
    for row in report.rows:
        assert 0 < row.measured_ms < math.inf
        assert 0 < row.predicted_ms < math.inf
        if row.interval_ms is not None:
            low, high = row.interval_ms
            assert 0 < low <= row.predicted_ms <= high < math.inf
    document = report_object(report)
    json.dumps(document, allow_nan=False)
    assert document["n"] == len(document["rows"]) == len(report.listed)
    assert document["mape"] == pytest.approx(
        sum(abs(r.error) for r in report.counted) / report.summary.n
    )
    assert {row["part"] for row in document["rows"]} <= {report.headline, *report.held_out}


@pytest.mark.parametrize("name", BARS)
def test_every_row_is_a_prediction(name: str) -> None:
    report = report_of(name)
    check(report)
    part, most = BARS[name]
    assert report.by_part()[part].mape < most


@needs_public_data
@pytest.mark.parametrize("name", PUBLIC)
def test_the_full_tables_too(name: str) -> None:
    check(report_of(name, FULL))


@pytest.mark.parametrize("name", TIMES)
def test_predictions_do_not_see_the_measurements(name: str, tmp_path: Path) -> None:
    for path in EXCERPTS.iterdir():
        _copy(path, tmp_path / path.name, TIMES[name])
    before, after = report_of(name), report_of(name, tmp_path)
    assert [row.predicted_ms for row in after.rows] == [row.predicted_ms for row in before.rows]
    assert [row.interval_ms for row in after.rows] == [row.interval_ms for row in before.rows]
    assert {round(b.measured_ms / a.measured_ms, 6) for a, b in _pairs(before, after)} == {2.0}


def _pairs(before: Report, after: Report) -> list[tuple[ComparedRow, ComparedRow]]:
    return list(zip(before.rows, after.rows, strict=True))


def _copy(source: Path, to: Path, columns: tuple[str, ...]) -> None:
    """A table whose measurements are twice as long."""
    lines = source.read_text().splitlines(keepends=True)
    header = next((line for line in lines if not line.startswith("#")), "")
    if not set(columns) & set(next(csv.reader([header]), [])):
        to.write_bytes(source.read_bytes())
        return
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    with to.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows.fieldnames or ())
        writer.writeheader()
        writer.writerows(
            {
                key: str(2 * float(text)) if key in columns and text else text
                for key, text in row.items()
            }
            for row in rows
        )


@pytest.mark.parametrize("name", ON_THE_PAGE)
def test_the_page_has_these_figures(name: str) -> None:
    with (ACCURACY / f"{name}.csv").open(newline="") as file:
        written = {_key(row, row["measured_ms"]): row for row in csv.DictReader(file)}
    for row in report_of(name).rows:
        line = written[_key(row.name, str(_plain(row.measured_ms)))]
        low, high = row.interval_ms or (math.nan, math.nan)
        figures = {"predicted_ms": row.predicted_ms, "low_ms": low, "high_ms": high}
        for column, figure in figures.items():
            assert float(line[column]) == pytest.approx(figure, rel=6e-4), (column, row.name)
        assert line["part"] == row.part


def _key(named: object, measured: str) -> tuple[object, ...]:
    """Return a row's key: its names, and its time, as a configuration may be timed again."""
    cells = dict(named)  # type: ignore[call-overload]
    keys = ("system", "org", "round", "date", "model", "gpu", "gpus", "model_size", "global_batch")
    keys += ("precision", "local_batch", "settings", "ids")
    return float(measured), *(str(cells.get(key, "")) for key in keys)


@pytest.mark.parametrize("name", PUBLIC)
def test_missing_data_says_where_to_get_it(name: str, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(InputError, match=r"docs/data\.md"):
            SUITES[name].run(folder)

"""The suite of FBGEMM's lookups: made-up files, and claims on the public ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.suites import GAVE
from lab.validate.tbe import (
    EVAL,
    FLOOR,
    LOOKUPS,
    MEASURED_FILE,
    PR_FILE,
    SHAPE,
    validate_tbe,
)
from tests.lab.validate.reports import write_table
from tests.public_data import FULL, needs_public_data

MEASURED = {
    "gpu": "NVIDIA H100 80GB HBM3",
    "num_tables": "2",
    "batch_per_table": "1000",
    "ids_total": "2000",
    "rows_per_table": "100000",
    "dim": "64",
    "weights_dtype": "fp32",
    "pooling": "none",
    "optimizer": "sgd",
    "location": "hbm",
    "alpha": "1.05",
    "forward_ms": "0.1",
    "backward_ms": "0.2",
    "eval_ms": "0.1",
}
PR = {
    "B": "1024",
    "E": "100000",
    "T": "2",
    "D": "64",
    "L": "10",
    "weights_dtype": "fp32",
    "optimizer": "exact_adagrad",
    "weighted": "0",
    "location": "hbm",
    "alpha": "uniform",
    "kernel": "fwd",
    "time_us": "100",
    "usable_for": "shape in D",
}


def test_every_pass_is_a_row_and_every_location_a_part(tmp_path: Path) -> None:
    rows = [
        {"location": location, "cache_ratio": ratio, "optimizer": optimizer}
        for location, ratio in (("hbm", ""), ("uvm", ""), ("uvm_caching", "0.5"))
        for optimizer in ("sgd", "adam", "rowwise_adagrad")
    ]
    write_table(tmp_path, MEASURED_FILE, MEASURED, *rows)
    report = validate_tbe(tmp_path)
    assert report.skipped == ()
    assert report.headline == LOOKUPS
    parts = report.by_part()
    assert {name: summary.n for name, summary in parts.items()} == {
        LOOKUPS: 18,
        EVAL: 9,
        "hbm": 6,
        "uvm": 6,
        "uvm_caching": 6,
    }
    for row in report.rows:
        assert row.interval_ms is not None
        assert 0 < row.interval_ms[0] < row.predicted_ms < row.interval_ms[1]
        assert row.name["profile"] == "h100-sxm"


def test_recorded_distinct_ids_count_more_than_the_power_law(tmp_path: Path) -> None:
    law = {"location": "uvm", "ids_total": "200000", "alpha": "0.5"}
    few = law | {"ids_distinct": "200"}
    write_table(tmp_path, MEASURED_FILE, MEASURED, law, few)
    rows = [r for r in validate_tbe(tmp_path).rows if r.name["pass"] == "backward"]
    assert rows[1].predicted_ms < 0.5 * rows[0].predicted_ms


def test_a_smaller_cache_misses_more(tmp_path: Path) -> None:
    cached = {"location": "uvm_caching", "ids_total": "200000"}
    rows = [cached | {"cache_ratio": ratio} for ratio in ("1.0", "0.5", "0.1")]
    write_table(tmp_path, MEASURED_FILE, MEASURED, *rows)
    times = [r.predicted_ms for r in validate_tbe(tmp_path).rows if r.name["pass"] == "forward"]
    assert times == sorted(times)
    assert times[0] < times[-1]


def test_bad_rows_are_named_and_the_others_count(tmp_path: Path) -> None:
    bad = [
        {"gpu": "Abacus"},
        {"dim": "wide"},
        {"optimizer": "adma"},
        {"location": "tape"},
        {"forward_ms": "", "backward_ms": "", "eval_ms": ""},
        {"eval_ms": ""},
    ]
    write_table(tmp_path, MEASURED_FILE, MEASURED, *bad)
    report = validate_tbe(tmp_path)
    assert len(report.rows) == 2
    skipped = "\n".join(report.skipped)
    for line, text in enumerate(("nearest is", "dim is", "adam", "location is", "empty"), start=3):
        assert f"{MEASURED_FILE}:{line}" in skipped
        assert text in skipped


def test_where_no_gpu_is_stated_only_the_shape_counts(tmp_path: Path) -> None:
    sweep = [{"D": dim, "time_us": time} for dim, time in (("64", "100"), ("256", "300"))]
    slower = [row | {"time_us": str(7 * float(row["time_us"]))} for row in sweep]
    errors = []
    for rows in (sweep, slower):
        write_table(tmp_path, PR_FILE, PR, *rows)
        report = validate_tbe(tmp_path)
        assert {row.part for row in report.rows} == {SHAPE}
        errors.append([row.error for row in report.rows])
    assert errors[0] == pytest.approx(errors[1])


def test_rows_of_pull_requests_that_cannot_be_predicted_are_named(tmp_path: Path) -> None:
    rows = [
        {"gpu": "B200", "kernel": "bwd", "E": "1000;2000", "D": "64;128"},
        {"kernel": "fwd VBE"},
        {"kernel": "fwd nobag", "usable_for": "host launch floor"},
        {"kernel": "scan"},
        {"E": "1;2;3"},
        {},
    ]
    write_table(tmp_path, PR_FILE, PR, *rows)
    report = validate_tbe(tmp_path)
    assert [row.part for row in report.rows] == [FLOOR]
    skipped = "\n".join(report.skipped)
    for text in ("another kernel", "the host's time", "starts with none", "T is 2", "no shape"):
        assert text in skipped


@needs_public_data
def test_targets_on_the_public_rows() -> None:
    """Device memory within 6 %, host memory and caches within 12 %, without rows that gave
    constants."""
    parts = validate_tbe(FULL).by_part()
    assert parts["hbm"].mape < 0.06
    assert parts["uvm"].mape < 0.12
    assert parts["uvm_caching"].mape < 0.12
    assert parts[GAVE].n == 5

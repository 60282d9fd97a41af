"""The suite of real traces, where they lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.suites import Report
from lab.validate.traces import (
    GEMM,
    NAIVE,
    OTHER_RANKS,
    OTHER_STEPS,
    OTHER_TRACES,
    OUTSIDE,
    OWN_HOST,
    RANKS,
    STEPS,
    validate_traces,
)
from tests.public_data import FULL, needs_public_data


@pytest.fixture(scope="module")
def report() -> Report:
    return validate_traces(FULL)


@needs_public_data
def test_steps_are_predicted_better_than_by_the_others(report: Report) -> None:
    parts = report.by_part()
    assert report.headline == OTHER_STEPS
    assert parts[OTHER_STEPS].mape < 0.05
    assert parts[OTHER_STEPS].geomean < 0.03
    assert parts[OTHER_STEPS].mape < parts[NAIVE].mape / 2
    assert parts[OUTSIDE].n == 1


@needs_public_data
def test_eight_ranks_within_two_per_cent_and_fifty_microseconds(report: Report) -> None:
    parts = report.by_part()
    assert parts[OWN_HOST].n == parts[OTHER_RANKS].n == 8
    assert parts[OWN_HOST].worst < 0.02
    (ends, _) = report.scores
    own = [row for row in ends.rows if row[0] == OWN_HOST]
    assert len(own) == 8
    assert all(isinstance(row[4], float) and row[4] < 50 for row in own)


@needs_public_data
def test_every_part_has_rows_and_every_step_its_line(report: Report) -> None:
    parts = report.by_part()
    assert {OTHER_TRACES, GEMM} <= set(parts)
    assert parts[OTHER_TRACES].n == parts[OTHER_STEPS].n == parts[NAIVE].n
    (_, steps) = report.scores
    assert len(steps.rows) == parts[OTHER_STEPS].n + parts[OUTSIDE].n + parts[OWN_HOST].n


@needs_public_data
def test_one_trace_is_enough(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    (tmp_path / STEPS[0]).symlink_to(FULL / STEPS[0])
    report = validate_traces(tmp_path)
    assert {row.part for row in report.rows} == {OTHER_STEPS, NAIVE}
    assert f"{RANKS}: not there" in report.skipped


@needs_public_data
def test_traces_that_someone_put_there_are_predicted_or_named(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    (tmp_path / STEPS[1]).symlink_to(FULL / STEPS[1])
    (tmp_path / "traces/mine.json.gz").symlink_to(FULL / STEPS[0])
    (tmp_path / "traces/broken.json").write_text("{")
    report = validate_traces(tmp_path)
    assert {row.name["trace"] for row in report.rows} >= {"mine"}
    assert any("broken.json" in text for text in report.skipped)

"""Reports of suites, and the folder that they read."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from lab.validate.report import ComparedRow, Report, Summary, data_folder, noise_of
from predictor.errors import InputError


def compared(measured: float, predicted: float, part: str = "test") -> ComparedRow:
    return ComparedRow({"name": "x"}, measured, predicted, family="f", part=part)


def test_a_summary_of_nothing_has_no_figures() -> None:
    assert math.isnan(Summary.of([]).mape)


def test_intervals_are_counted_where_there_are_any() -> None:
    inside, outside = ((0.9, 1.1), (1.1, 1.2))
    rows = [
        ComparedRow({}, 1.0, 1.0, "f", interval_ms=interval)
        for interval in (inside, inside, outside, None)
    ]
    assert Summary.of(rows).covered == pytest.approx(2 / 3)
    assert math.isnan(Summary.of(rows[3:]).covered)


def test_noise_is_that_of_repeats_alone() -> None:
    """Each repeat against the median of the others."""
    noise = noise_of([("a", 1.0), ("a", 1.25), ("b", 7.0), ("c", 3.0), ("c", 3.0), ("c", 6.0)])
    assert noise.n == 5
    errors = [1.25 / 1.0 - 1, 1.0 / 1.25 - 1, 4.5 / 3 - 1, 4.5 / 3 - 1, 3 / 6 - 1]
    assert noise.mape == pytest.approx(sum(map(abs, errors)) / 5)


def test_the_headline_counts_its_own_part_only() -> None:
    report = Report("s", (compared(1, 2), compared(1, 1.1, "fit")), "test")
    assert (report.summary.n, report.summary.mape) == (1, 1.0)
    assert set(report.by_part()) == {"test", "fit"}
    assert report.by_family()["fit", "f"].n == 1
    assert [row.part for row in report.listed] == ["test"]


def test_missing_data_says_where_to_look(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no such directory.*docs/data\.md"):
        data_folder(tmp_path / "none", ["a.csv"])
    with pytest.raises(InputError, match=r"holds no a\.csv"):
        data_folder(tmp_path, ["a.csv"])
    (tmp_path / "a.csv").touch()
    assert data_folder(tmp_path, ["a.csv", "b.csv"]) == tmp_path
    with pytest.raises(InputError, match=r"b\.csv"):
        data_folder(tmp_path, ["a.csv", "b.csv"], every=True)

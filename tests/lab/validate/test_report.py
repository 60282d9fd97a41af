"""Reports of suites, and the folder that they read."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from lab.validate.report import (
    ComparedRow,
    Report,
    Summary,
    coverage,
    data_folder,
    faster_half,
    geomean,
    noise_of,
    picks,
    ranks,
    regrets,
    relative_errors,
    shape_errors,
    spearman,
    wilson,
)
from predictor.errors import InputError
from shardopt.calibrate.fitting import gmae, mape


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


def test_shape_leaves_out_one_common_factor() -> None:
    assert shape_errors([1.0, 2.0, 4.0], [3.0, 6.0, 12.0]) == pytest.approx([0.0, 0.0, 0.0])
    # ratios 2, 2, 3: the median is the factor
    assert shape_errors([1.0, 2.0, 4.0], [2.0, 4.0, 12.0]) == pytest.approx([0.0, 0.0, 0.5])


def test_ranks_of_ties_are_shared() -> None:
    assert list(ranks([5.0, 1.0, 5.0, 3.0])) == [3.5, 1.0, 3.5, 2.0]


def test_spearman_by_hand() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1.0)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    # 1 - 6 sum d^2 / (n (n^2 - 1)) with d = 1, -1, 0, 0
    assert spearman([1, 2, 3, 4], [2, 1, 3, 4]) == pytest.approx(1 - 6 * 2 / (4 * 15))
    assert math.isnan(spearman([1, 2], [1, 1]))
    assert math.isnan(spearman([1], [1]))
    assert math.isnan(spearman([], []))


def test_the_faster_half_holds_the_middle_plan() -> None:
    assert list(faster_half([5.0, 1.0, 3.0])) == [1, 2]
    assert list(faster_half([5.0, 1.0])) == [1]


def test_regret_and_picks() -> None:
    assert regrets([2.0, 3.0, 2.5]) == pytest.approx([0.0, 0.5, 0.25])
    assert list(picks([2.0, 1.0, 3.0])) == [0.0, 1.0, 0.0]
    assert list(picks([1.0, 1.0, 3.0])) == [0.5, 0.5, 0.0]


def test_wilson_by_hand() -> None:
    # (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n) for 8 of 10, z = 1.96
    assert wilson(0.8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(0.0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(1.0, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert wilson(0.0, 0) == (0.0, 1.0)


def test_coverage_counts_bounds() -> None:
    assert coverage([1.0, 2.0, 3.0, 4.0], [1.0] * 4, [3.0] * 4) == 0.75
    assert math.isnan(coverage([], [], []))


def test_errors_by_hand() -> None:
    errors = relative_errors([10.0, 10.0], [11.0, 6.0])
    assert errors == pytest.approx([0.1, -0.4])
    assert mape(errors) == pytest.approx(0.25)
    assert geomean(errors) == pytest.approx(0.2)
    assert gmae(errors) == pytest.approx(math.sqrt(0.1001 * 0.4001))


def test_an_exact_hit_does_not_make_the_geometric_mean_zero() -> None:
    assert geomean(np.array([0.0, 0.1])) > 0


def test_errors_of_nothing_are_no_number() -> None:
    assert all(math.isnan(of([])) for of in (mape, geomean, gmae))

"""Errors, ranks and shares, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lab.statistics import (
    coverage,
    faster_half,
    geomean,
    grouped,
    picks,
    regrets,
    relative_errors,
    shape_errors,
    spearman,
    wilson,
    within_noise,
)
from shardopt.calibrate.fitting import gmae, mape


def test_groups_keep_the_order_of_their_items() -> None:
    assert grouped([3, 1, 5, 2], lambda n: n % 2) == {1: [3, 1, 5], 0: [2]}


def test_errors_by_hand() -> None:
    errors = relative_errors([10.0, 10.0], [11.0, 6.0])
    assert errors == pytest.approx([0.1, -0.4])
    assert mape(errors) == pytest.approx(0.25)
    assert geomean(errors) == pytest.approx(0.2)
    assert gmae(errors) == pytest.approx(math.sqrt(0.1001 * 0.4001))
    assert geomean(np.array([0.0, 0.1])) > 0, "an exact hit does not make it zero"
    assert all(math.isnan(statistic([])) for statistic in (mape, geomean, gmae))


def test_shape_leaves_out_one_common_factor() -> None:
    assert shape_errors([1.0, 2.0, 4.0], [3.0, 6.0, 12.0]) == pytest.approx([0.0, 0.0, 0.0])
    # ratios 2, 2, 3: the median is the factor
    assert shape_errors([1.0, 2.0, 4.0], [2.0, 4.0, 12.0]) == pytest.approx([0.0, 0.0, 0.5])


def test_ranks_and_their_correlation() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1.0)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    # equal values share the mean of their ranks, 3.5
    assert spearman([5, 1, 5, 3], [3.5, 1, 3.5, 2]) == pytest.approx(1.0)
    # 1 - 6 sum d^2 / (n (n^2 - 1)) with d = 1, -1, 0, 0
    assert spearman([1, 2, 3, 4], [2, 1, 3, 4]) == pytest.approx(1 - 6 * 2 / (4 * 15))
    assert all(math.isnan(spearman(a, b)) for a, b in (([1, 2], [1, 1]), ([1], [1]), ([], [])))


def test_halves_regret_and_picks() -> None:
    assert list(faster_half([5.0, 1.0, 3.0])) == [1, 2]
    assert list(faster_half([5.0, 1.0])) == [1]
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


def test_noise_of_two_figures_adds_in_quadrature() -> None:
    for measured, within in ((0.14, True), (0.16, False)):
        assert (
            within_noise(0.10, measured, (0.07, 0.13), (measured - 0.04, measured + 0.04)) is within
        )
    assert within_noise(0.1, 0.9, (0.0, 0.2), (None, None))  # too few rounds to tell

"""Medians and ratios of a bench run, with exact intervals."""

import pytest

from shardopt.bench.summary import median_interval, ratio_of
from shardopt.measure.sampling import quantile


def test_the_interval_of_a_median() -> None:
    assert median_interval([1.0] * 5) is None
    assert median_interval([1, 2, 3, 4, 5, 6]) == (1, 6)
    assert median_interval(list(range(10))) == (1, 8)
    assert median_interval(list(range(20))) == (5, 14)


def test_a_ratio_is_significant_where_nearly_all_rounds_agree() -> None:
    first = [10.0, 11.0, 12.0, 13.0, 12.0, 11.0, 10.0, 10.0]
    slower = [1.1 * value for value in first]
    assert ratio_of(slower, first).significant
    assert ratio_of(slower, first).value == pytest.approx(1.1)
    either = [value * (1.1 if i % 2 else 0.9) for i, value in enumerate(first)]
    assert not ratio_of(either, first).significant
    assert not ratio_of(slower[:5], first[:5]).significant


def test_quantile_is_linear() -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert quantile([1.0], 0.9) == 1.0

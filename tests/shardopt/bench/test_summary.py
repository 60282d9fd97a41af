"""Warm-up and significance are judged by exact statistics."""

import itertools
import random

import pytest

from shardopt.bench.summary import median_interval, quantile, ratio_of
from shardopt.measure.warmup import fall_probability, fell, warmed_up


@pytest.mark.parametrize(("m", "n"), [(3, 3), (2, 4), (5, 4)])
def test_the_probability_of_a_fall_is_that_of_counting(m: int, n: int) -> None:
    values = [*range(m + n)]
    splits = [set(s) for s in itertools.combinations(values, m)]

    def u(before: set[int]) -> int:
        return sum(b > a for b in before for a in values if a not in before)

    for before in splits:
        after = [v for v in values if v not in before]
        counted = sum(u(other) >= u(before) for other in splits) / len(splits)
        assert fall_probability([*before], after) == pytest.approx(counted)


def test_warm_once_no_plan_falls_any_more() -> None:
    cold, warm = [9.0, 8.5, 8.0, 7.9, 7.8, 7.7], [5.0, 5.2, 5.1, 4.9, 5.3, 5.05]
    assert fell(cold, warm)
    assert not fell(warm, cold)
    assert not warmed_up({"a": [cold]})
    assert not warmed_up({"a": [cold, warm]})
    assert not warmed_up({"a": [cold, warm, warm], "b": [cold, cold, warm]})
    assert warmed_up({"a": [cold, warm, warm], "b": [cold, warm, list(reversed(warm))]})


def test_steady_samples_seldom_seem_to_fall() -> None:
    rng = random.Random(0)
    blocks = [[rng.gauss(80, 5) for _ in range(6)] for _ in range(1001)]
    falls = sum(fell(a, b) for a, b in itertools.pairwise(blocks))
    assert falls <= 20


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

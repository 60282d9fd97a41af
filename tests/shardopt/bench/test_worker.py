"""Warming up ends once no plan becomes significantly faster, by exact statistics."""

import itertools
import random

import pytest

from shardopt.bench.worker import fall_probability, is_warm


@pytest.mark.parametrize(("m", "n"), [(3, 3), (2, 4), (5, 4)])
def test_the_probability_of_a_fall_is_that_of_counting(m: int, n: int) -> None:
    values = [*range(m + n)]
    splits = [set(s) for s in itertools.combinations(values, m)]

    def u(before: set[int]) -> int:
        return sum(b > a for b in before for a in values if a not in before)

    for before in splits:
        after = [v for v in values if v not in before]
        counted = sum(u(split) >= u(before) for split in splits) / len(splits)
        assert fall_probability([*before], after) == pytest.approx(counted)


def test_warm_once_no_plan_falls_any_more() -> None:
    cold, warm = [9.0, 8.5, 8.0, 7.9, 7.8, 7.7], [5.0, 5.2, 5.1, 4.9, 5.3, 5.05]
    assert not is_warm({"a": [cold]})
    assert not is_warm({"a": [cold, warm]})
    assert not is_warm({"a": [cold, warm, warm], "b": [cold, cold, warm]})
    assert is_warm({"a": [cold, warm, warm], "b": [cold, warm, list(reversed(warm))]})


def test_steady_samples_seldom_seem_to_fall() -> None:
    rng = random.Random(0)
    blocks = [[rng.gauss(80, 5) for _ in range(6)] for _ in range(1001)]
    falls = sum(not is_warm({"a": pair}) for pair in itertools.pairwise(blocks))
    assert falls <= 20

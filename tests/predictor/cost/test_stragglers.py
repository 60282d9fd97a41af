"""The slowest of ranks whose ids vary: against random draws, and exactly where that is known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.cost.stragglers import FEWEST_IDS, LEAST, expected_excess, relative_deviation


@pytest.mark.parametrize("ranks", [2, 4, 8, 32])
@pytest.mark.parametrize("apart", [0.0, 1.0, 4.0])
@pytest.mark.parametrize("unlike", [0.0, 0.8])
def test_the_excess_is_that_of_random_draws(ranks: int, apart: float, unlike: float) -> None:
    rng = np.random.default_rng([ranks, int(apart), int(10 * unlike)])
    mean = 10 + apart * rng.random(ranks)
    deviation = 1 + unlike * (rng.random(ranks) - 0.5)
    drawn = (mean + deviation * rng.standard_normal((40_000, ranks))).max(axis=1).mean()
    excess = expected_excess(mean[None], deviation[None])
    assert excess.shape == (1, 1)
    assert excess[0, 0] == pytest.approx(drawn - mean.max(), abs=0.25)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 10)), min_size=1, max_size=6))
@settings(max_examples=100, deadline=None)
def test_it_is_never_negative_and_zero_for_one_rank(ranks: list[tuple[float, float]]) -> None:
    mean, deviation = np.array(ranks).T[:, None]
    excess = expected_excess(mean, deviation)[0, 0]
    assert excess >= 0
    assert excess <= deviation.max() * 1.3
    if len(ranks) == 1:
        assert excess == 0


@pytest.mark.parametrize(("lengths", "deviation"), [(5.0, 8.0), (2.5, None), (20.0, 0.0)])
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_the_variance_is_that_of_drawn_ids(
    lengths: float, deviation: float | None, share: float
) -> None:
    rng = np.random.default_rng(1)
    samples, repeats = 50, 20_000
    drawn = np.full((repeats, samples), lengths)
    if deviation:
        drawn = rng.gamma((lengths / deviation) ** 2, deviation**2 / lengths, drawn.shape)
    low = np.floor(drawn)
    ids = rng.binomial((low + (rng.random(drawn.shape) < drawn - low)).astype(int), share)
    total = ids.sum(axis=1)
    predicted = relative_deviation(samples, lengths, deviation, share)
    drawn_deviation = total.std() / total.mean()
    if predicted:
        assert predicted == pytest.approx(drawn_deviation, rel=0.1)
    else:
        assert drawn_deviation < 1.05 * LEAST


@given(st.floats(1e-300, 1e6), st.floats(1, 1e4), st.floats(0, 1))
@settings(max_examples=200, deadline=None)
def test_fewer_ids_never_take_longer(lengths: float, fewer: float, share: float) -> None:
    """With the deviation of a time that is proportional to the ids, on many ranks."""

    def slowest(mean_length: float) -> float:
        ids = 8192 * mean_length * share
        return ids * (1 + 4 * relative_deviation(8192, mean_length, mean_length, share))

    assert slowest(lengths / fewer) <= slowest(lengths) * (1 + 1e-9)


def test_a_shard_that_few_batches_read_does_not_vary() -> None:
    assert relative_deviation(1, FEWEST_IDS / 2, None, 1.0) == 0
    assert relative_deviation(1, 2 * FEWEST_IDS, None, 1.0) > 1
    assert relative_deviation(1e5, 1e-200, None, 1.0) == 0

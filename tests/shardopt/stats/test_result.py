"""Statistics of a feature in a model file, and of streams whose heads move."""

from __future__ import annotations

import numpy as np
import pytest

from shardopt.stats.collect import ReadOptions
from shardopt.stats.counts import Bags, FeatureCounts
from shardopt.stats.result import measure_drift, model_values, relative_change, summarise


@pytest.mark.parametrize(
    ("lengths", "deviation"), [([0, 8, 0, 8], 4.0), ([4, 4, 4], None), ([2, 3, 3, 2], None)]
)
def test_a_deviation_is_given_where_ids_vary_beyond_their_mean(
    lengths: list[int], deviation: float | None
) -> None:
    counts = FeatureCounts(1000)
    for length in lengths:
        counts.add(Bags(np.arange(length), np.array([length])))
    (feature,) = summarise({"f": counts}, ReadOptions(), 0)
    assert feature.pooling_factor_std == pytest.approx(np.std(lengths))
    assert model_values(feature, "s.npz").get("pooling_factor_std") == deviation


@pytest.mark.parametrize("loadings", [(0.0, 0.0, 0.0), (0.9, 0.9, 0.9), (0.9, 0.5, 0.0, 0.7)])
def test_correlations_are_those_that_lengths_were_drawn_with(loadings: tuple[float, ...]) -> None:
    """Lengths of unlike deviation that share a part of the sample, in chunks."""
    rng = np.random.default_rng(5)
    counts = {f"f{i}": FeatureCounts(1000) for i in range(len(loadings))}
    for _ in range(20):
        own = rng.standard_normal(2000)
        lengths = [
            np.rint(100 + 5 * (i + 1) * (r * own + np.sqrt(1 - r * r) * rng.standard_normal(2000)))
            for i, r in enumerate(loadings)
        ]
        together = np.sum(lengths, axis=0).astype(np.int64)
        for feature, each in zip(counts.values(), lengths, strict=True):
            integers = each.astype(np.int64)
            feature.add(Bags(np.zeros(integers.sum(), dtype=np.int64), integers), together)
    correlations = [feature.length_correlation for feature in summarise(counts, ReadOptions(), 0)]
    assert correlations == pytest.approx(loadings, abs=0.08)
    first = FeatureCounts.of_state(counts["f0"].state())
    assert (first.products, first.longest) == (counts["f0"].products, counts["f0"].longest)


def test_two_features_of_one_history_go_together_wholly() -> None:
    lengths = np.array([0, 3, 9, 4, 40])
    counts = {name: FeatureCounts(1000) for name in ("item", "action")}
    for feature_counts in counts.values():
        feature_counts.add(Bags(np.arange(lengths.sum()), lengths), 2 * lengths)
    for feature in summarise(counts, ReadOptions(), 0):
        assert feature.length_correlation == pytest.approx(1.0)
        values = model_values(feature, "s.npz")
        assert (values["pooling_factor_max"], values["length_correlation"]) == (40, 1.0)


IDS = 20_000


def counts(ids: np.ndarray, samples: int = IDS) -> FeatureCounts:
    feature = FeatureCounts(2**20)
    lengths = np.full(samples, len(ids) // samples)
    feature.add(Bags(ids, lengths))
    return feature


def stream(replaced: float, windows: int = 4) -> dict[int, dict[str, FeatureCounts]]:
    """Half of the ids fall on ten hot rows, of which a share is replaced from window to window."""
    rng = np.random.default_rng(0)
    hot, new, by_window = np.arange(10), 10, {}
    for window in range(windows):
        cold = rng.integers(1000, 2000, IDS // 2)
        by_window[window] = {"f": counts(np.concatenate((rng.choice(hot, IDS // 2), cold)))}
        for place in range(round(10 * replaced)):
            hot[place], new = new, new + 1
    return by_window


@pytest.mark.parametrize("replaced", [0.0, 0.3, 1.0])
def test_hot_rows_are_lost_at_the_rate_at_which_they_are_replaced(replaced: float) -> None:
    (drift,) = measure_drift(stream(replaced))
    assert drift.windows == 4
    assert drift.hot_lost == pytest.approx(replaced, abs=0.03)
    assert relative_change(drift.pooling_factors) == 0
    assert relative_change(drift.distinct_rows) < 0.05


def test_more_ids_a_sample_and_more_rows_are_changes() -> None:
    few = counts(np.arange(100).repeat(2), samples=100)
    many = counts(np.arange(1000), samples=250)
    (drift,) = measure_drift({7: {"f": many}, 0: {"f": few}})
    assert drift.pooling_factors == (2, 4)
    assert drift.distinct_rows[0] == pytest.approx(100)
    assert 150 < drift.distinct_rows[1] <= 200, "of 200 ids, as the first window has"


def test_a_feature_in_one_window_alone_does_not_move() -> None:
    none = FeatureCounts(10)
    none.add(Bags(np.zeros(0, dtype=np.int64), np.zeros(5, dtype=np.int64)))
    assert measure_drift({0: {"f": counts(np.arange(IDS))}, 1: {"f": none}}) == []
    assert measure_drift({}) == []

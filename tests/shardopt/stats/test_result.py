"""What statistics say of a feature in a model file."""

import numpy as np
import pytest

from shardopt.stats.collect import ReadOptions
from shardopt.stats.counts import Bags, FeatureCounts
from shardopt.stats.result import model_values, summarise


@pytest.mark.parametrize(
    ("lengths", "deviation"), [([0, 8, 0, 8], 4.0), ([4, 4, 4], None), ([2, 3, 3, 2], None)]
)
def test_a_deviation_is_given_where_ids_vary_beyond_their_mean(
    lengths: list[int], deviation: float | None
) -> None:
    counts = FeatureCounts(1000)
    for length in lengths:
        counts.add(Bags(np.arange(length), np.array([length])))
    (found,) = summarise({"f": counts}, ReadOptions(), 0)
    assert found.pooling_factor_std == pytest.approx(np.std(lengths))
    assert model_values(found, "s.npz").get("pooling_factor_std") == deviation

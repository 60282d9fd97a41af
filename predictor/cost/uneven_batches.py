"""Excess of the dense part of the longest batch over that of the mean batch.

Every rank draws samples of its own. Where their lengths differ (histories of users), so does the
work of batches that grows with the ids of a sample, or with their square, as attention does. All
ranks meet in every iteration and wait for the longest. A rank's work is a sum over its samples,
normal but for its skewness (docs/model.md, chapter 2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from predictor.cost.stragglers import FEWEST_IDS, expected_maximum
from predictor.model.workload import Feature, Workload

MOST_SKEW = 1.0
"""Largest skewness of a batch; a sum of fewer samples is not nearly normal."""


@dataclass(frozen=True)
class SampleLengths:
    """Distribution of the ids of a sample: gamma, or beta if histories are cut at a largest number.

    Args:
        mean, variance: above 0.
        most: largest number, above the mean; None: there is none.
    """

    mean: float
    variance: float
    most: float | None = None

    def moment(self, order: int) -> float:
        """Return the mean of a power of the ids, over that power of their mean."""
        if self.most is None:
            spread = self.variance / self.mean**2
            return math.prod(1 + k * spread for k in range(order))
        share = self.mean / self.most
        # the two parameters of the beta distribution together; all weight at both ends is the most
        # that lengths can vary
        both = max(share * (1 - share) * self.most**2 / self.variance - 1, 1e-9)
        return math.prod((share * both + k) / (both + k) / share for k in range(order))

    def excess(self, linear: float, square: float, samples: int, ranks: int) -> float:
        """Return the expected work of the longest batch beyond the mean, as a share of dense work.

        Args:
            linear, square: shares of that work that grow with the ids, and with their square.
            samples: of a batch.
        """
        x = [self.moment(order) for order in range(7)]
        square /= x[2]
        mean = linear + square * x[2]
        two = linear**2 * x[2] + 2 * linear * square * x[3] + square**2 * x[4]
        three = linear**3 * x[3] + 3 * linear**2 * square * x[4]
        three += 3 * linear * square**2 * x[5] + square**3 * x[6]
        variance = two - mean**2
        if variance <= 0:
            return 0.0
        skew = (three - 3 * two * mean + 2 * mean**3) / variance**1.5
        longest = expected_maximum(ranks, min(skew / math.sqrt(samples), MOST_SKEW))
        excess = longest * math.sqrt(variance / samples)
        # no batch has more than the work of all
        return min(excess, (ranks - 1) * mean)


def sample_lengths(workload: Workload) -> SampleLengths | None:
    """Return the joint length distribution of a sample's sequences.

    Returns:
        None where all samples count as alike.
    """
    features = sequences(workload)
    if workload.balance_batches or not any(f.pooling_factor_std for f in features):
        return None
    alone = together = most = 0.0
    for feature in features:
        deviation = math.sqrt(feature.num_poolings) * (feature.pooling_factor_std or 0.0)
        alone += deviation**2 * (1 - feature.length_correlation**2)
        together += deviation * feature.length_correlation
        fixed = None if feature.pooling_factor_std else feature.pooling_factor
        most += feature.num_poolings * (feature.pooling_factor_max or fixed or math.inf)
    mean = sum(feature.lookups_per_sample for feature in features)
    if mean < FEWEST_IDS:
        return None
    cut = most if mean < most < math.inf else None
    return SampleLengths(mean, alone + together**2, cut)


def sequences(workload: Workload) -> list[Feature]:
    """Return the features without pooling, each once; all features where there are none."""
    by_pooling: dict[bool, dict[tuple[str, str], Feature]] = {True: {}, False: {}}
    for table in workload.tables:
        by_pooling[table.is_pooled] |= {(table.module, f.name): f for f in table.features}
    return [*(by_pooling[False] or by_pooling[True]).values()]

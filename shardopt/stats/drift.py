"""How fast a feature moves from one window of time to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from shardopt.stats.counts import FeatureCounts

HOT_SHARE = 0.01
"""Of the distinct rows of a window: those are its hot rows."""
FEWEST_HOT = 10


@dataclass(frozen=True)
class Drift:
    """One feature over windows in order of time.

    Args:
        windows: how many have ids of it; at least two.
        pooling_factors: mean ids per sample, by window.
        distinct_rows: among as many ids in every window as the smallest has, by window.
        hot_kept: of each window but the first, what share of its ids the hot rows of the window
            before take, over what its own hot rows take; 1 where the same rows stay hot.
    """

    feature: str
    windows: int
    pooling_factors: tuple[float, ...]
    distinct_rows: tuple[float, ...]
    hot_kept: tuple[float, ...]

    @property
    def hot_lost(self) -> float:
        """Mean share of the hot rows' ids that a window takes away."""
        return 1 - float(np.mean(self.hot_kept))


def relative_change(values: Sequence[float]) -> float:
    """Mean relative change from one window to the next, whatever its sign."""
    return float(np.mean([abs(after / before - 1) for before, after in pairwise(values)]))


def measure_drift(windows: Mapping[int, Mapping[str, FeatureCounts]]) -> list[Drift]:
    """The drift of every feature that two windows or more have ids of.

    Args:
        windows: start -> counts by feature.
    """
    ordered = [windows[start] for start in sorted(windows)]
    found = []
    for name in ordered[0] if ordered else ():
        counts = [features[name] for features in ordered if features[name].ids]
        if len(counts) > 1:
            found.append(_of_feature(name, counts))
    return found


def _of_feature(name: str, counts: Sequence[FeatureCounts]) -> Drift:
    curves = [of.spectrum(of.largest + 1).curve() for of in counts]
    fewest = min(of.ids for of in counts)
    return Drift(
        name,
        len(counts),
        tuple(of.ids / of.samples for of in counts),
        tuple(float(np.interp(fewest, draws, distinct)) for draws, distinct in curves),
        tuple(_kept(before, after) for before, after in pairwise(counts)),
    )


def _kept(before: FeatureCounts, after: FeatureCounts) -> float:
    own, last = _hot_rows(after), _hot_rows(before)
    return after.hits(last) / max(1.0, after.hits(own))


def _hot_rows(counts: FeatureCounts) -> np.ndarray:
    distinct = counts.spectrum(counts.largest + 1).curve()[1][-1]
    return counts.hottest(max(FEWEST_HOT, round(HOT_SHARE * float(distinct))))[0]

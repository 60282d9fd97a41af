"""What a sample says of each feature, the file that model.yaml names, and how windows differ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from predictor.model.distribution import Bins
from shardopt.files import atomic_open
from shardopt.stats.collect import ReadOptions
from shardopt.stats.counts import FeatureCounts
from shardopt.stats.mixture import Mixture, estimate
from shardopt.stats.spectrum import ZipfFit, fit_zipf

Array = NDArray[np.float64]

LENGTHS = ("pooling_factor_std", "pooling_factor_max", "length_correlation")
"""What is said of how the ids of a sample vary."""
LEAST_CORRELATION = 0.05
VARIANCE_NOISE = 1e-3
"""Of the ids per sample, that a sample's sums may leave."""


@dataclass(frozen=True)
class HotRow:
    """One of the hottest rows.

    Args:
        share: of all ids, in (0, 1].
        uncertain: by how much the share may be off; 0 where ids were counted exactly.
    """

    id: int
    share: float
    uncertain: float


@dataclass(frozen=True, eq=False)
class IdStatistics:
    """What the ids of a feature say.

    Args:
        exact: all distinct ids were counted; else their number and frequencies are estimated.
        draws, distinct: distinct rows expected in so many of the sample's ids, ``[points]``.
        frequencies, frequency_rows: rows that occur so often in the sample, ``[frequencies]``.
        fit: Zipf distribution; None where there are too few ids.
        mixture: of the whole table.
        curve_error: largest relative error of the mixture's distinct rows over the curve.
        hottest: hottest first.
        range_width: rows of an id range of the mixture.
    """

    exact: bool
    draws: Array
    distinct: Array
    frequencies: NDArray[np.int64]
    frequency_rows: Array
    fit: ZipfFit | None
    mixture: Mixture
    curve_error: float
    hottest: tuple[HotRow, ...]
    range_width: int

    @property
    def reuse_fractions(self) -> tuple[float, ...]:
        """Shares of the distinct rows that occur (0, 1], (1, 2], (2, 4], ... times: the
        ``reuse_histogram`` of model.yaml."""
        power = np.ceil(np.log2(self.frequencies)).astype(np.int64)
        rows = np.bincount(power, weights=self.frequency_rows)
        return tuple(float(share) for share in rows / rows.sum())


@dataclass(frozen=True, eq=False)
class FeatureStats:
    """One feature.

    Args:
        rows: of its table; the largest id plus one unless ``rows_given``.
        samples, ids: in the data.
        empty_share: share of the samples without an id, in [0, 1].
        pooling_factor_std: standard deviation of the ids per sample.
        pooling_factor_max: most ids of a sample.
        length_correlation: how far they go together with those of the other features, in [0, 1]:
            two features correlate by the product of theirs.
        seen: None if there are no ids.
    """

    name: str
    rows: int
    rows_given: bool
    samples: int
    ids: int
    empty_share: float
    pooling_factor_std: float
    pooling_factor_max: int
    length_correlation: float
    seen: IdStatistics | None

    @property
    def pooling_factor(self) -> float:
        return self.ids / self.samples

    @property
    def varies(self) -> bool:
        """The ids of a sample are not just the floor or the ceiling of their mean."""
        part = self.pooling_factor % 1.0
        return self.pooling_factor_std**2 > part * (1.0 - part) + VARIANCE_NOISE


def summarise(
    counts: Mapping[str, FeatureCounts], reading: ReadOptions, hot: int
) -> Iterator[FeatureStats]:
    """The features one by one, in order.

    Args:
        hot: how many of the hottest rows to list, >= 0.
    """
    correlations = length_correlations(counts)
    for name, found in counts.items():
        given = reading.rows_of(name)
        rows = found.largest + 1 if given is None else given
        yield FeatureStats(
            name,
            rows,
            given is not None,
            found.samples,
            found.ids,
            found.empty / found.samples,
            math.sqrt(_variance(found)),
            found.longest,
            correlations[name],
            _seen(found, rows, hot) if found.ids else None,
        )


def _variance(found: FeatureCounts) -> float:
    """Of the ids of a sample."""
    return max(0.0, found.squares / found.samples - (found.ids / found.samples) ** 2)


ROUNDS = 100
"""Of solving for correlations; three features settle within ten."""


def length_correlations(counts: Mapping[str, FeatureCounts]) -> dict[str, float]:
    """How far the lengths of each feature go together with the others', of one set of samples.

    With one thing that all features of a sample share (a user who is active), lengths of deviation
    ``s_f`` share ``u_f = s_f r_f``, so a feature's covariance with all of them together is
    ``s_f^2 + u_f (U - u_f)``, ``U`` the sum of all ``u``; solved round by round.
    """
    found = [*counts.values()]
    samples = max(1, *(of.samples for of in found)) if len(found) > 1 else 1
    together = sum(of.ids for of in found) / samples
    variance = np.array([_variance(of) for of in found])
    shared = np.array([of.products / samples - of.ids / samples * together for of in found])
    shared = np.maximum(shared - variance, 0.0)
    deviation = np.sqrt(variance)
    total = math.sqrt(float(shared.sum()))
    if len(found) < 2 or total == 0:
        return dict.fromkeys(counts, 0.0)
    of_each = shared / total
    for _ in range(ROUNDS):
        of_each = np.minimum((shared + of_each**2) / of_each.sum(), deviation)
    ratio = np.divide(of_each, deviation, out=np.zeros_like(deviation), where=deviation > 0)
    return dict(zip(counts, ratio.tolist(), strict=True))


def _seen(found: FeatureCounts, rows: int, hot: int) -> IdStatistics:
    spectrum = found.spectrum(rows)
    fit = fit_zipf(spectrum)
    mixture = estimate(spectrum, fit)
    draws, distinct = spectrum.curve()
    bins = Bins(mixture.counts, mixture.probs)
    errors = np.array([bins.unique(n) for n in draws]) / distinct - 1
    hottest = zip(*found.hottest(hot), strict=True)
    return IdStatistics(
        spectrum.exact,
        draws,
        distinct,
        *spectrum.frequencies(),
        fit,
        mixture,
        float(np.abs(errors).max()),
        tuple(HotRow(int(i), int(n) / found.ids, int(off) / found.ids) for i, n, off in hottest),
        spectrum.range_width,
    )


def write_stats(path: Path, features: Iterable[FeatureStats]) -> None:
    """Write the .npz file that ``index_distribution: {file, feature}`` reads.

    Arrays of each feature: ``counts`` and ``weights`` (rows of each bin, and draws per row, hottest
    first), ``range_rows [bins, ranges]``, ``range_width`` and ``rows`` (where they lie), which the
    predictor reads, as it does ``pooling_factor``, ``pooling_factor_std``, ``pooling_factor_max``
    and ``length_correlation``; and for closer looks ``samples``, ``ids``, ``empty_share``,
    ``draws`` and ``distinct`` (the curve), ``frequencies`` and ``frequency_rows``, ``zipf``
    (alpha, q), ``hot_ids`` and ``hot_shares``.

    Raises:
        InputError: it cannot be written; an existing file is left as it was.
    """
    arrays: dict[str, Any] = {}
    for feature in features:
        seen = feature.seen
        if seen is None:
            continue
        numbers = ("rows", "samples", "ids", "empty_share", "pooling_factor", *LENGTHS)
        found: dict[str, Any] = {
            "counts": seen.mixture.counts,
            "weights": seen.mixture.probs * feature.ids,
            "range_rows": seen.mixture.range_rows.astype(np.float32),
            "range_width": np.array(seen.range_width),
            **{name: np.array(getattr(feature, name)) for name in numbers},
            "draws": seen.draws,
            "distinct": seen.distinct,
            "frequencies": seen.frequencies,
            "frequency_rows": seen.frequency_rows,
            "hot_ids": np.array([row.id for row in seen.hottest], dtype=np.int64),
            "hot_shares": np.array([row.share for row in seen.hottest]),
        }
        if seen.fit is not None:
            found["zipf"] = np.array([seen.fit.alpha, seen.fit.q])
        arrays |= {f"{feature.name}.{name}": value for name, value in found.items()}
    with atomic_open(path) as stream:
        np.savez_compressed(stream, allow_pickle=False, **arrays)


def model_values(feature: FeatureStats, file: str) -> dict[str, Any]:
    """What model.yaml says of the feature.

    Args:
        file: that holds the statistics, as the model file names it.
    """
    pooling = float(f"{feature.pooling_factor:.6g}")
    found: dict[str, Any] = {"pooling_factor": int(pooling) if pooling.is_integer() else pooling}
    if feature.varies:
        found["pooling_factor_std"] = float(f"{feature.pooling_factor_std:.4g}")
        found["pooling_factor_max"] = feature.pooling_factor_max
        if feature.length_correlation >= LEAST_CORRELATION:
            found["length_correlation"] = round(feature.length_correlation, 2)
    return found | {"index_distribution": {"file": file, "feature": feature.name}}


def yaml_line(feature: FeatureStats, file: Path) -> str:
    """The feature as model.yaml takes it."""
    data = {"name": feature.name, **model_values(feature, str(file))}
    text = yaml.safe_dump(data, sort_keys=False, default_flow_style=True, width=10**6)
    return text.strip()


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
        if len(counts) < 2:
            continue
        curves = [of.spectrum(of.largest + 1).curve() for of in counts]
        fewest = min(of.ids for of in counts)
        hot = [
            of.hottest(max(FEWEST_HOT, round(HOT_SHARE * float(distinct[-1]))))[0]
            for of, (_, distinct) in zip(counts, curves, strict=True)
        ]
        drift = Drift(
            name,
            len(counts),
            tuple(of.ids / of.samples for of in counts),
            tuple(float(np.interp(fewest, draws, distinct)) for draws, distinct in curves),
            tuple(
                of.hits(last) / max(1.0, of.hits(own))
                for of, (last, own) in zip(counts[1:], pairwise(hot), strict=True)
            ),
        )
        found.append(drift)
    return found

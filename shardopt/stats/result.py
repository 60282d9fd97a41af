"""Statistics of features from their counts, the file that model.yaml names, and drift."""

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
"""Fields on the variation of the ids per sample."""
LEAST_CORRELATION = 0.05
"""Least length correlation that is written to model.yaml."""
VARIANCE_NOISE = 1e-3
"""Variance of the ids per sample that may be rounding."""


@dataclass(frozen=True)
class HotRow:
    """One of the hottest rows.

    Args:
        share: of all ids, in (0, 1].
        uncertain: error bound of the share; 0 where ids were counted exactly.
    """

    id: int
    share: float
    uncertain: float


@dataclass(frozen=True, eq=False)
class IdStatistics:
    """Distribution of the ids of a feature.

    Args:
        exact: all distinct ids were counted; else their number and frequencies are estimated.
        draws, distinct: numbers of ids, and the distinct rows expected in them, ``[points]``.
        frequencies, frequency_rows: occurrences, and the rows with so many, ``[frequencies]``.
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
        """Shares of the distinct rows that occur (0, 1], (1, 2], (2, 4], ... times.

        They are the ``reuse_histogram`` of model.yaml.
        """
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
        length_correlation: of the ids per sample with those of the other features, in [0, 1]; two
            features correlate by the product of theirs.
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
        """True if samples have other numbers of ids than the floor and ceiling of the mean."""
        part = self.pooling_factor % 1.0
        return self.pooling_factor_std**2 > part * (1.0 - part) + VARIANCE_NOISE


def summarise(
    counts: Mapping[str, FeatureCounts], reading: ReadOptions, hot: int
) -> Iterator[FeatureStats]:
    """Yield the statistics of the features, in order.

    Args:
        hot: number of hottest rows to list, >= 0.
    """
    correlations = length_correlations(counts)
    for name, feature in counts.items():
        given_rows = reading.rows_of(name)
        rows = feature.largest + 1 if given_rows is None else given_rows
        yield FeatureStats(
            name,
            rows,
            given_rows is not None,
            feature.samples,
            feature.ids,
            feature.empty / feature.samples,
            math.sqrt(_variance(feature)),
            feature.longest,
            correlations[name],
            _seen(feature, rows, hot) if feature.ids else None,
        )


def _variance(feature: FeatureCounts) -> float:
    """Return the variance of the ids per sample."""
    return max(0.0, feature.squares / feature.samples - (feature.ids / feature.samples) ** 2)


ROUNDS = 100
"""Rounds of solving for correlations; three features settle within ten."""


def length_correlations(counts: Mapping[str, FeatureCounts]) -> dict[str, float]:
    """Estimate the correlation of each feature's lengths with a factor that all features share.

    The factor may be the activity of a sample's user. Lengths of deviation ``s_f`` share
    ``u_f = s_f r_f``, so a feature's covariance with the sum of all features is
    ``s_f^2 + u_f (U - u_f)``, with ``U`` the sum of all ``u``; solved round by round.
    """
    features = [*counts.values()]
    samples = max(1, *(feature.samples for feature in features)) if len(features) > 1 else 1
    together = sum(feature.ids for feature in features) / samples
    variance = np.array([_variance(feature) for feature in features])
    shared = np.array([f.products / samples - f.ids / samples * together for f in features])
    shared = np.maximum(shared - variance, 0.0)
    deviation = np.sqrt(variance)
    total = math.sqrt(float(shared.sum()))
    if len(features) < 2 or total == 0:
        return dict.fromkeys(counts, 0.0)
    of_each = shared / total
    for _ in range(ROUNDS):
        of_each = np.minimum((shared + of_each**2) / of_each.sum(), deviation)
    ratio = np.divide(of_each, deviation, out=np.zeros_like(deviation), where=deviation > 0)
    return dict(zip(counts, ratio.tolist(), strict=True))


def _seen(feature: FeatureCounts, rows: int, hot: int) -> IdStatistics:
    spectrum = feature.spectrum(rows)
    fit = fit_zipf(spectrum)
    mixture = estimate(spectrum, fit)
    draws, distinct = spectrum.curve()
    bins = Bins(mixture.counts, mixture.probs)
    errors = np.array([bins.unique(n) for n in draws]) / distinct - 1
    hottest = zip(*feature.hottest(hot), strict=True)
    return IdStatistics(
        spectrum.exact,
        draws,
        distinct,
        *spectrum.frequencies(),
        fit,
        mixture,
        float(np.abs(errors).max()),
        tuple(
            HotRow(int(i), int(n) / feature.ids, int(off) / feature.ids) for i, n, off in hottest
        ),
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
        statistics = feature.seen
        if statistics is None:
            continue
        numbers = ("rows", "samples", "ids", "empty_share", "pooling_factor", *LENGTHS)
        entries: dict[str, Any] = {
            "counts": statistics.mixture.counts,
            "weights": statistics.mixture.probs * feature.ids,
            "range_rows": statistics.mixture.range_rows.astype(np.float32),
            "range_width": np.array(statistics.range_width),
            **{name: np.array(getattr(feature, name)) for name in numbers},
            "draws": statistics.draws,
            "distinct": statistics.distinct,
            "frequencies": statistics.frequencies,
            "frequency_rows": statistics.frequency_rows,
            "hot_ids": np.array([row.id for row in statistics.hottest], dtype=np.int64),
            "hot_shares": np.array([row.share for row in statistics.hottest]),
        }
        if statistics.fit is not None:
            entries["zipf"] = np.array([statistics.fit.alpha, statistics.fit.q])
        arrays |= {f"{feature.name}.{name}": value for name, value in entries.items()}
    with atomic_open(path) as stream:
        np.savez_compressed(stream, allow_pickle=False, **arrays)


def model_values(feature: FeatureStats, file: str) -> dict[str, Any]:
    """Return the entries of the feature in model.yaml.

    Args:
        file: name of the statistics file as the model file has it.
    """
    pooling = float(f"{feature.pooling_factor:.6g}")
    values: dict[str, Any] = {"pooling_factor": int(pooling) if pooling.is_integer() else pooling}
    if feature.varies:
        values["pooling_factor_std"] = float(f"{feature.pooling_factor_std:.4g}")
        values["pooling_factor_max"] = feature.pooling_factor_max
        if feature.length_correlation >= LEAST_CORRELATION:
            values["length_correlation"] = round(feature.length_correlation, 2)
    return values | {"index_distribution": {"file": file, "feature": feature.name}}


def yaml_line(feature: FeatureStats, file: Path) -> str:
    """Write the feature as a line of model.yaml."""
    data = {"name": feature.name, **model_values(feature, str(file))}
    text = yaml.safe_dump(data, sort_keys=False, default_flow_style=True, width=10**6)
    return text.strip()


HOT_SHARE = 0.01
"""Share of the distinct rows of a window that are its hot rows."""
FEWEST_HOT = 10


@dataclass(frozen=True)
class Drift:
    """Change of one feature over windows in order of time.

    Args:
        windows: number of windows with ids of the feature; at least two.
        pooling_factors: mean ids per sample, by window.
        distinct_rows: expected in as many ids as the smallest window has, by window.
        hot_kept: ids of each window but the first on the hot rows of the window before, over its
            ids on its own hot rows; 1 where the same rows stay hot.
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
    """Return the mean absolute relative change from one window to the next."""
    return float(np.mean([abs(after / before - 1) for before, after in pairwise(values)]))


def measure_drift(windows: Mapping[int, Mapping[str, FeatureCounts]]) -> list[Drift]:
    """Measure the drift of every feature with ids in two windows or more.

    Args:
        windows: start -> counts by feature.
    """
    ordered = [windows[start] for start in sorted(windows)]
    drifts = []
    for name in ordered[0] if ordered else ():
        counts = [features[name] for features in ordered if features[name].ids]
        if len(counts) < 2:
            continue
        curves = [window.spectrum(window.largest + 1).curve() for window in counts]
        fewest = min(window.ids for window in counts)
        hot = [
            window.hottest(max(FEWEST_HOT, round(HOT_SHARE * float(distinct[-1]))))[0]
            for window, (_, distinct) in zip(counts, curves, strict=True)
        ]
        drift = Drift(
            name,
            len(counts),
            tuple(window.ids / window.samples for window in counts),
            tuple(float(np.interp(fewest, draws, distinct)) for draws, distinct in curves),
            tuple(
                window.hits(last) / max(1.0, window.hits(own))
                for window, (last, own) in zip(counts[1:], pairwise(hot), strict=True)
            ),
        )
        drifts.append(drift)
    return drifts

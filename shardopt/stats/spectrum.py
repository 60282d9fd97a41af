"""Frequency spectrum of the rows in a sample, and the Zipf distribution nearest to it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from predictor.model.distribution import Zipf

Array = NDArray[np.float64]
Ids = NDArray[np.int64]

RANGES = 1024
"""Most id ranges of a table."""


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Frequencies of the rows of one feature in a sample.

    Args:
        rows: of the table, those that never occurred included.
        draws: ids in the sample.
        counts, weights: occurrences of each known row, and the rows of the table that it stands
            for, ``[known]``; weights are 1 unless only a sample of the rows is known.
        ranges: id range of each known row, ``[known]``.
        range_draws: ids in each range, ``[ranges]``; all ranges have ``range_width`` rows but the
            last, which ends with the table.
        range_width: rows.
    """

    rows: int
    draws: int
    counts: Ids
    weights: Array
    ranges: Ids
    range_draws: Array
    range_width: int

    @property
    def distinct(self) -> float:
        """Rows of the table that occur in the sample; estimated if not all are known."""
        return min(float(self.weights.sum()), float(self.rows), float(self.draws))

    @property
    def exact(self) -> bool:
        """Every row that occurred is known."""
        return bool((self.weights == 1).all())

    @property
    def range_rows(self) -> Array:
        """Rows of the table in each id range, ``[ranges]``."""
        first = np.arange(len(self.range_draws), dtype=np.float64) * self.range_width
        return np.clip(self.rows - first, 0.0, self.range_width)

    def frequencies(self) -> tuple[Ids, Array]:
        """Return the frequencies of rows, ascending, and the rows of the table with each."""
        values, inverse = np.unique(self.counts, return_inverse=True)
        rows: Array = np.bincount(inverse, weights=self.weights).astype(np.float64)
        return values, rows

    def curve(self) -> tuple[Array, Array]:
        """Return draws, powers of two up to the sample's, and the distinct rows in each number.

        The distinct rows are expected among n ids picked from the sample without replacement
        (rarefaction, Hurlbert 1971). A row that occurs k times is missed with probability
        ``C(N - k, n) / C(N, n)``, a product of ``min(k, n)`` factors; the middle one stands for
        all.
        """
        total = float(self.draws)
        draws: Array = np.exp2(np.arange(int(np.log2(total)) + 1, dtype=np.float64))
        if draws[-1] < total:
            draws = np.append(draws, total)
        often, rows = self.frequencies()
        few = np.minimum(draws[:, None], often)
        many = np.maximum(draws[:, None], often)
        part = np.minimum(many / (total - (few - 1) / 2), 1.0)
        with np.errstate(divide="ignore"):
            occurs = np.where(many + few > total, 1.0, -np.expm1(few * np.log1p(-part)))
        distinct: Array = np.minimum(occurs @ rows, draws)
        return draws, distinct


MAX_ALPHA = 8.0
FLATTENINGS = (0.0, *(float(q) for q in np.geomspace(0.5, 1e5, 12)))
"""Candidates for q; the best one is refined."""
FEW_DRAWS = 32
"""Least draws for a fit of the skew; two rows must occur too."""
NEAR, NEGLIGIBLE = 1.2, 1e-6
"""Fits are equally good within this factor of the least sum of squares, plus this much per point of
the curve (an error of 0.1 %)."""
PRECISION = 1e-4
GOLDEN = 0.6180339887


@dataclass(frozen=True)
class ZipfFit:
    """``p_k`` proportional to ``(k + q)^-alpha``, fitted on the distinct rows of a sample.

    Args:
        distinct_error: largest relative error of the fit's distinct rows over the curve.
        ks: largest distance between the fit's and the sample's share of draws on the hottest k
            rows, any k (Kolmogorov and Smirnov's statistic over ranks). The sample's share is
            biased upwards where rows occur only a few times.
    """

    alpha: float
    q: float
    distinct_error: float
    ks: float

    @property
    def distribution(self) -> Zipf:
        return Zipf(self.alpha, self.q)


def fit_zipf(spectrum: Spectrum) -> ZipfFit | None:
    """Fit a Zipf distribution to the distinct rows; None where the sample is too small.

    It minimises the squared logarithms of the distinct rows at the draws of `Spectrum.curve`.
    """
    if spectrum.draws < FEW_DRAWS or spectrum.distinct < 2 or spectrum.rows < 2:
        return None
    curve = spectrum.curve()
    tried = [_best_alpha(q, spectrum.rows, curve) for q in FLATTENINGS]
    _, _, nearest = min(tried)
    at = FLATTENINGS.index(nearest)
    low, high = FLATTENINGS[max(at - 1, 0)], FLATTENINGS[min(at + 1, len(FLATTENINGS) - 1)]
    between = np.linspace(low, high, 7)[1:-1]
    tried += [_best_alpha(float(q), spectrum.rows, curve) for q in between]
    least = min(tried)[0]
    # alpha and q are interchangeable where ids are nearly uniform: the smallest q that fits wins
    near = [fit for fit in tried if fit[0] <= NEAR * least + NEGLIGIBLE * len(curve[0])]
    _, alpha, q = min(near, key=lambda fit: fit[2])
    fitted = Zipf(alpha, q)
    error = float(np.abs(np.expm1(_deviations(fitted, spectrum.rows, curve))).max())
    return ZipfFit(alpha, q, error, _rank_distance(fitted, spectrum))


def _best_alpha(q: float, rows: int, curve: tuple[Array, Array]) -> tuple[float, float, float]:
    """Search the best skew for a flattening q by golden sections.

    Returns:
        Sum of squares, skew, q.
    """

    def squares(alpha: float) -> float:
        return float((_deviations(Zipf(alpha, q), rows, curve) ** 2).sum())

    low, high = 0.0, MAX_ALPHA
    while high - low > PRECISION:
        first, second = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        if squares(first) <= squares(second):
            high = second
        else:
            low = first
    alpha = 0.0 if low == 0.0 else round((low + high) / 2, 5)
    return squares(alpha), alpha, q


def _deviations(fitted: Zipf, rows: int, curve: tuple[Array, Array]) -> Array:
    """Return the logarithm of the fit's distinct rows over the curve's, ``[points]``."""
    bins = fitted.bins(rows)
    draws, distinct = curve
    with np.errstate(divide="ignore"):
        occurs = -np.expm1(draws[:, None] * np.log1p(-np.minimum(bins.probs, 1.0)))
    deviations: Array = np.log(occurs @ bins.counts / distinct)
    return deviations


def _rank_distance(fitted: Zipf, spectrum: Spectrum) -> float:
    often, rows = spectrum.frequencies()
    ranks = np.cumsum(rows[::-1])
    shares = np.cumsum((often * rows)[::-1])
    bins = fitted.bins(spectrum.rows)
    edges = np.concatenate(([0.0], np.cumsum(bins.counts)))
    mass = np.concatenate(([0.0], np.cumsum(bins.counts * bins.probs)))
    return float(np.abs(shares / shares[-1] - np.interp(ranks, edges, mass)).max())

"""Probabilities of all rows of a table from a sample, unseen rows included.

A row that is drawn with probability p occurs Poisson(N p) times in N draws, so the frequencies of
a sample are a mixture of Poisson distributions. The mixture is estimated by expectation
maximisation from the fitted Zipf distribution. It follows the sample where there are many draws,
and keeps the shape of the fit for rows much rarer than one in N. The unseen mass of Good (1953) and
Turing's rule follows from the fit to the rows that occur once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from predictor.model.distribution import Distribution, Uniform
from shardopt.stats.spectrum import Spectrum, ZipfFit

Array = NDArray[np.float64]

OFTEN = 32
"""Least occurrences of rows that keep their measured share, which is right to about a fifth."""
STEPS = 400
"""Most steps of expectation maximisation."""


def poisson(at: Array) -> Array:
    """Return the probability of k occurrences given k < `OFTEN`, ``[grid, OFTEN]``."""
    often = np.arange(OFTEN, dtype=np.float64)
    log_factorial = np.concatenate(([0.0], np.cumsum(np.log(often[1:]))))
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = often[None, :] * np.log(at)[:, None] - at[:, None] - log_factorial[None, :]
    chance = np.exp(np.where(np.isnan(logs), 0.0, logs))
    return chance / chance.sum(axis=1, keepdims=True)


def mean_occurrences(likely: Array) -> Array:
    """Return the mean occurrences at each grid point of rows that occur less than `OFTEN` times.

    With these, and the measured ones of the other rows, the draws add up to those of the sample.
    """
    return likely @ np.arange(OFTEN, dtype=np.float64)


def fit_mixture(rows: Array, observed: Array, likely: Array) -> Array:
    """Fit the mixing distribution by expectation maximisation (Laird 1978).

    More steps would fit the noise of the sample: each range stops once its deviance is no larger
    than chance makes it (the discrepancy principle, Morozov 1966), or after `STEPS`.

    Args:
        rows: initial rows, ``[ranges, grid]``.
        observed: rows that occur k times, ``[ranges, OFTEN]``.
        likely: ``[grid, OFTEN]``.
    """
    rows = rows.copy()
    open_ = np.ones(len(rows), dtype=np.bool_)
    for _ in range(STEPS):
        expected = np.maximum(rows[open_] @ likely, 1e-300)
        off = ~within_chance(observed[open_], expected)
        open_[open_] = off
        if not off.any():
            break
        rows[open_] = em_step(rows[open_], observed[open_], likely)
    return rows


def em_step(rows: Array, observed: Array, likely: Array) -> Array:
    """Return the rows after one step of expectation maximisation."""
    moved: Array = rows * ((observed / np.maximum(rows @ likely, 1e-300)) @ likely.T)
    return moved


def within_chance(observed: Array, expected: Array) -> NDArray[np.bool_]:
    """Return True for ranges whose Poisson deviance is at most two deviations above its mean."""
    logs = np.log(np.maximum(observed, 1e-300) / expected)
    deviance = 2 * (observed * logs - observed + expected).sum(axis=1)
    chance = np.interp(np.log(expected), *_deviance_by_chance()).sum(axis=1)
    inside: NDArray[np.bool_] = deviance <= chance + 2 * np.sqrt(2 * chance)
    return inside


@lru_cache(maxsize=1)
def _deviance_by_chance() -> tuple[Array, Array]:
    """Tabulate the mean deviance of a Poisson count by the logarithm of its mean."""
    mean = np.geomspace(1e-8, 30.0, 120)
    count = np.arange(120, dtype=np.float64)
    log_factorial = np.concatenate(([0.0], np.cumsum(np.log(count[1:]))))
    chance = np.exp(count * np.log(mean)[:, None] - mean[:, None] - log_factorial)
    logs = np.log(np.maximum(count, 1.0) / mean[:, None])
    deviance = 2 * (count * logs - count + mean[:, None])
    return np.log(mean), (chance * deviance).sum(axis=1)


GRID_PER_DECADE = 8
RARE = 1e-4
"""Smallest expected occurrences of the grid, unless the fitted distribution has rarer rows."""
RAREST = 1e-9
MOST_SCALED = 10.0
"""Largest factor by which the draws of a range correct the estimate from a sample of its rows."""
HOT_SINGLE = 64
"""Number of hottest rows with a bin each."""
CLASSES_PER_DECADE = 24
LOOSE = 2e-3
"""Share of rows and draws that starts anywhere on the grid, so that a sample can move any row."""
SHAPE_STEPS = 40
TELLING = 20.0
"""Ids from which a range has full weight in the shape; ranges that are never drawn have none."""
USUAL = 0.98
"""Share of the ranges that lie within two deviations by chance alone."""
HALVINGS = 20
RANGE_DRAWS = 200
"""Mean ids of rare rows that a range needs to be distinguished from its neighbours."""


@dataclass(frozen=True, eq=False)
class Mixture:
    """Bins of rows with one probability, hottest first, and the id ranges of their rows.

    Args:
        counts: rows of each bin, ``[bins]``.
        probs: probability of one draw to hit one row of the bin; masses sum to one.
        range_rows: rows of each bin in each id range, ``[bins, ranges]``. Ranges are estimated
            separately, so they sum to ``counts`` up to the errors of both.
    """

    counts: Array
    probs: Array
    range_rows: Array


def estimate(spectrum: Spectrum, fit: ZipfFit | None) -> Mixture:
    """Estimate the rows of the whole table by probability.

    Args:
        spectrum: of the sample, at least one draw.
        fit: of a Zipf distribution; uniform if None.
    """
    fitted: Distribution = fit.distribution if fit else Uniform()
    often = spectrum.counts >= OFTEN
    sampled = often & (spectrum.weights != 1)
    exact_at, exact = _classes(spectrum, often & ~sampled, HOT_SINGLE)
    sampled_at, partial = _classes(spectrum, sampled, 0)
    measured = exact.sum(axis=0) + partial.sum(axis=0)
    rare_at, whole, rare = _rare(spectrum, often, fitted, measured)
    # the draws of a range are known, which bounds the estimate from a sample of its hot rows
    remaining = spectrum.range_draws - exact_at @ exact - rare_at @ rare
    scale = remaining / np.maximum(sampled_at @ partial, 1e-300)
    partial = partial * np.clip(scale, 0.0, MOST_SCALED)
    total = max(float((sampled_at @ partial).sum()), 1e-300)
    partial = partial * max(0.0, float(remaining.sum())) / total
    at = np.concatenate((exact_at, sampled_at, rare_at))
    rows = np.concatenate((exact, partial, rare))
    counts = np.concatenate((exact.sum(axis=1), partial.sum(axis=1), whole))
    order = np.argsort(-at, kind="stable")
    order = order[counts[order] > 0]
    return Mixture(counts[order], at[order] / float(counts @ at), rows[order])


def _classes(spectrum: Spectrum, which: NDArray[np.bool_], single: int) -> tuple[Array, Array]:
    """Group rows into classes that occur about equally often; the ``single`` hottest rows get one.

    Returns:
        Mean occurrences of each class ``[classes]``, and its rows by range ``[classes, ranges]``.
    """
    counts, weights = spectrum.counts[which], spectrum.weights[which]
    ranges = len(spectrum.range_draws)
    classes = np.floor(np.log10(counts) * CLASSES_PER_DECADE).astype(np.int64)
    hottest = np.argsort(-counts, kind="stable")[:single]
    classes[hottest] = -1 - np.arange(len(hottest))
    names, index = np.unique(classes, return_inverse=True)
    size = len(names)
    rows: Array = np.zeros((size, ranges))
    np.add.at(rows, (index, spectrum.ranges[which]), weights)
    total = np.bincount(index, weights=weights * counts, minlength=size)
    return total / rows.sum(axis=1), rows


def _rare(
    spectrum: Spectrum, often: NDArray[np.bool_], fitted: Distribution, counted: Array
) -> tuple[Array, Array, Array]:
    """Estimate the rows that occur less than `OFTEN` times.

    Returns:
        Expected occurrences of the grid ``[grid]``, its rows in the table ``[grid]`` and by range
        ``[grid, ranges]``.
    """
    ranges = len(spectrum.range_draws)
    rows = np.maximum(spectrum.range_rows - counted, 0.0)
    observed = np.zeros((ranges, OFTEN))
    few = ~often
    np.add.at(observed, (spectrum.ranges[few], spectrum.counts[few]), spectrum.weights[few])
    # a sample of rows may stand for more of them than a range has
    observed *= np.minimum(1.0, rows / np.maximum(observed.sum(axis=1), 1.0))[:, None]
    observed[:, 0] = np.maximum(rows - observed.sum(axis=1), 0.0)
    at, start = _start(spectrum, fitted)
    likely = poisson(at)
    # the noise is that of the counted rows, not of the rows that they stand for
    each = float(spectrum.weights.max())
    observed = observed / each
    begin = start[None, :] * rows.sum() / each
    whole = fit_mixture(begin, observed.sum(axis=0)[None, :], likely)[0]
    merged = _merge(ranges, float((observed @ np.arange(OFTEN)).sum()))
    merged_rows = _ranges(whole, _sum_groups(observed, merged), at, likely)
    share = rows / np.maximum(np.repeat(_sum_groups(rows, merged), merged)[:ranges], 1e-300)
    alike = np.repeat(merged_rows, merged, axis=0)[:ranges] * share[:, None]
    # within merged ranges, rows that occurred stay in their own range
    return mean_occurrences(likely), each * whole, each * em_step(alike, observed, likely).T


def _ranges(whole: Array, observed: Array, at: Array, likely: Array) -> Array:
    """Estimate the rows of the grid ``[ranges, grid]`` in ranges with frequencies ``observed``.

    All ranges start from one shape, times a factor of the range. The shape starts as the table's.
    It stays so where ids are shuffled, and narrows where hot and cold rows lie in different ranges.
    From there each range is fitted to its own rows.
    """
    rows = observed.sum(axis=1)
    draws = observed @ np.arange(OFTEN, dtype=np.float64)
    if rows.sum() <= 0:
        return np.zeros((len(rows), len(at)))
    ids, expected = mean_occurrences(likely), _shrink_to_mean(draws, rows)
    alike = rows[:, None] * (whole / whole.sum())[None, :]
    # whole grid points only: a fraction would smear the shape in every step
    points = np.rint(_factors(alike, ids, expected))
    shape, say = whole, np.minimum(draws / TELLING, 1.0)[:, None]
    for _ in range(SHAPE_STEPS if say.any() else 0):
        start = _shift(rows[:, None] * (shape / shape.sum())[None, :], points)
        if within_chance(observed, np.maximum(start @ likely, 1e-300)).mean() >= USUAL:
            break
        shape = _shift(em_step(start, observed, likely) * say, -points).sum(axis=0)
    alike = rows[:, None] * (shape / shape.sum())[None, :]
    start = _shift(alike, _factors(alike, ids, expected))
    return fit_mixture(start, observed, likely)


def _shrink_to_mean(draws: Array, rows: Array) -> Array:
    """Shrink the draws of ranges to their mean by the share of their variance that is chance.

    It is James and Stein's estimator with the variance between ranges from the method of moments
    (Efron and Morris 1973). The variance by chance is that of a Poisson count.
    """
    if len(draws) < 3:
        return draws
    mean = rows * draws.sum() / rows.sum()
    spread = float(((draws - mean) ** 2).sum() / (len(draws) - 1))
    keep = max(0.0, 1.0 - float(mean.mean()) / spread) if spread > 0 else 0.0
    return mean + keep * (draws - mean)


def _start(spectrum: Spectrum, fitted: Distribution) -> tuple[Array, Array]:
    """Return the grid of expected occurrences, ascending from 0, and the shares of rows on it."""
    bins = fitted.bins(spectrum.rows)
    expected = np.maximum(bins.probs * spectrum.draws, RAREST)
    low = np.log10(max(min(RARE, float(expected.min()) / 2), RAREST))
    high = np.log10(1.5 * OFTEN)
    points = np.linspace(low, high, int((high - low) * GRID_PER_DECADE) + 2)
    # the rows of a bin go to both neighbours on the grid, so that their mean stays
    place = np.clip((np.log10(expected) - low) / (points[1] - points[0]), 0, len(points) - 1.001)
    lower = place.astype(np.int64)
    rare = expected < OFTEN
    share = np.zeros(len(points))
    np.add.at(share, lower[rare], (bins.counts * (lower + 1 - place))[rare])
    np.add.at(share, lower[rare] + 1, (bins.counts * (place - lower))[rare])
    at = np.concatenate(([0.0], 10.0**points))
    even = spectrum.draws / spectrum.rows / np.maximum(at, RAREST)
    loose = np.minimum(even, 1.0) * LOOSE / len(at)
    start = np.concatenate(([0.0], share / max(float(share.sum()), 1e-300))) + loose
    return at, start / start.sum()


def _factors(rows: Array, at: Array, draws: Array) -> Array:
    """Return the grid points by which rows ``[ranges, grid]`` must move to give ``draws [ranges]``.

    Args:
        at: ids that a row of each grid point brings, rising with the grid.
    """
    low, high = np.full(len(rows), 2.0 - len(at)), np.full(len(rows), len(at) - 2.0)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        less = _shift(rows, middle) @ at < draws
        low, high = np.where(less, middle, low), np.where(less, high, middle)
    return (low + high) / 2


def _shift(rows: Array, points: Array) -> Array:
    """Move rows up by grid points; a fraction is split between two, and zero stays zero."""
    last = rows.shape[1] - 1
    whole = np.floor(points).astype(np.int64)
    place = np.arange(1, last + 1)[None, :] + whole[:, None]
    part = (points - whole)[:, None]
    moved = np.zeros_like(rows)
    moved[:, 0] = rows[:, 0]
    range_at = np.arange(len(rows))[:, None]
    for up, share in ((0, 1 - part), (1, part)):
        np.add.at(moved, (range_at, np.clip(place + up, 1, last)), rows[:, 1:] * share)
    return moved


def _merge(ranges: int, draws: float) -> int:
    """Return the number of neighbouring ranges to merge, a power of two."""
    merged = 1
    while merged < ranges and draws / (ranges / merged) < RANGE_DRAWS:
        merged *= 2
    return merged


def _sum_groups(values: Array, size: int) -> Array:
    """Sum ``size`` neighbours along the first axis."""
    return np.add.reduceat(values, np.arange(0, len(values), size), axis=0)

"""Statistics of errors, ranks and shares, with intervals for few measurements."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardopt.calibrate.fitting import Array

Z_95 = 1.959964
"""Half-width of a 95 % normal interval in standard deviations."""
TIE = 1e-12
"""Relative difference below which two scores are the same."""
EXACT_HIT = 1e-6
"""Smallest error inside a logarithm: one exact hit must not make a geometric mean zero."""

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Group items by key; keys and items stay in order."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _array(values: ArrayLike) -> Array:
    return np.asarray(values, dtype=np.float64)


def relative_errors(measured: ArrayLike, predicted: ArrayLike) -> Array:
    """Return ``predicted / measured - 1`` in the shape of both."""
    return _array(predicted) / _array(measured) - 1.0


def shape_errors(measured: ArrayLike, predicted: ArrayLike) -> Array:
    """Return the relative errors after division by the median ratio."""
    ratios = np.log(_array(predicted) / _array(measured))
    return np.asarray(np.expm1(ratios - np.median(ratios)))


def geomean(errors: ArrayLike) -> float:
    """Return ``exp(mean(ln |error|))``; NaN without errors."""
    size = np.abs(_array(errors))
    return float(np.exp(np.log(np.maximum(size, EXACT_HIT)).mean())) if size.size else math.nan


def mean_interval(values: ArrayLike) -> tuple[float, float, float]:
    """Return the mean and its 95 % interval by Student's t; NaN for too few values."""
    sample = _array(values)
    if sample.size < 2:
        return (float(sample.mean()) if sample.size else math.nan), math.nan, math.nan
    from scipy.stats import t

    half = t.ppf(0.975, sample.size - 1) * sample.std(ddof=1) / math.sqrt(sample.size)
    mean = float(sample.mean())
    return mean, mean - float(half), mean + float(half)


def spearman(measured: ArrayLike, predicted: ArrayLike) -> float:
    """Return Spearman's rank correlation; NaN for constants and fewer than two values."""
    from scipy.stats import rankdata

    a, b = (rankdata(_array(times)) for times in (measured, predicted))
    if not a.size or min(np.ptp(a), np.ptp(b)) == 0:
        return math.nan
    return float(np.corrcoef(a, b)[0, 1])


def faster_half(measured: ArrayLike) -> NDArray[np.intp]:
    """Return the indices of the faster half by measurement, with the middle, fastest first."""
    times = _array(measured)
    return np.argsort(times, kind="stable")[: (len(times) + 1) // 2]


def regrets(measured: ArrayLike) -> Array:
    """Return every plan's regret, ``measured / min - 1``."""
    times = _array(measured)
    return np.asarray(times / times.min() - 1.0)


def picks(scores: ArrayLike) -> Array:
    """Return each plan's probability to be picked by the smallest score; ties share it."""
    values = _array(scores)
    low = values.min()
    chosen = values <= low + TIE * abs(low)
    return np.asarray(chosen / chosen.sum())


def wilson(share: float, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of ``n`` trials (Wilson 1927); (0, 1) for n = 0.

    Args:
        share: share of successes, in [0, 1]; a mean probability where picks are random.
    """
    if n == 0:
        return 0.0, 1.0
    square = Z_95**2 / n
    middle = (share + square / 2) / (1 + square)
    half = Z_95 * math.sqrt(share * (1 - share) / n + square / (4 * n)) / (1 + square)
    return max(0.0, middle - half), min(1.0, middle + half)


def within_noise(
    expected: float, measured: float, *intervals: tuple[float | None, float | None]
) -> bool:
    """Return true if two figures differ by at most their intervals, in quadrature.

    An unknown interval also gives true.
    """
    halves = []
    for low, high in intervals:
        if low is None or high is None or math.isnan(high - low):
            return True
        halves.append((high - low) / 2)
    return abs(expected - measured) <= math.hypot(*halves)


def coverage(measured: ArrayLike, low: ArrayLike, high: ArrayLike) -> float:
    """Return the share of measurements in their intervals, bounds included; NaN for none."""
    times = _array(measured)
    inside = (_array(low) <= times) & (times <= _array(high))
    return float(inside.mean()) if inside.size else math.nan

"""Errors of predictions, ranks and shares, and how far a few measurements can be trusted."""

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
    """Key -> its items, both in the order in which they come."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def _array(values: ArrayLike) -> Array:
    return np.asarray(values, dtype=np.float64)


def relative_errors(measured: ArrayLike, predicted: ArrayLike) -> Array:
    """``predicted / measured - 1`` in the shape of both."""
    return _array(predicted) / _array(measured) - 1.0


def shape_errors(measured: ArrayLike, predicted: ArrayLike) -> Array:
    """Relative errors once one common factor, the median ratio, is divided out."""
    ratios = np.log(_array(predicted) / _array(measured))
    return np.asarray(np.expm1(ratios - np.median(ratios)))


def geomean(errors: ArrayLike) -> float:
    """``exp(mean(ln |error|))``; NaN if there are no errors."""
    size = np.abs(_array(errors))
    return float(np.exp(np.log(np.maximum(size, EXACT_HIT)).mean())) if size.size else math.nan


def mean_interval(values: ArrayLike) -> tuple[float, float, float]:
    """Mean, and the 95 % interval of it by Student's t; NaN where there are too few values."""
    found = _array(values)
    if found.size < 2:
        return (float(found.mean()) if found.size else math.nan), math.nan, math.nan
    from scipy.stats import t

    half = t.ppf(0.975, found.size - 1) * found.std(ddof=1) / math.sqrt(found.size)
    mean = float(found.mean())
    return mean, mean - float(half), mean + float(half)


def spearman(measured: ArrayLike, predicted: ArrayLike) -> float:
    """Spearman's rank correlation; NaN where either is constant or has fewer than two values."""
    from scipy.stats import rankdata

    a, b = (rankdata(_array(times)) for times in (measured, predicted))
    if not a.size or min(np.ptp(a), np.ptp(b)) == 0:
        return math.nan
    return float(np.corrcoef(a, b)[0, 1])


def faster_half(measured: ArrayLike) -> NDArray[np.intp]:
    """Indices of the faster half by measurement, the middle one included, fastest first."""
    times = _array(measured)
    return np.argsort(times, kind="stable")[: (len(times) + 1) // 2]


def regrets(measured: ArrayLike) -> Array:
    """How much slower every plan is than the fastest: ``measured / min - 1``."""
    times = _array(measured)
    return np.asarray(times / times.min() - 1.0)


def picks(scores: ArrayLike) -> Array:
    """Chance of each plan to be picked: the smallest score is; ties share it evenly."""
    given = _array(scores)
    low = given.min()
    chosen = given <= low + TIE * abs(low)
    return np.asarray(chosen / chosen.sum())


def wilson(share: float, n: int) -> tuple[float, float]:
    """95 % interval of a share of ``n`` independent trials (Wilson 1927); (0, 1) if there are none.

    Args:
        share: of successes, in [0, 1]; a mean chance where picks are random.
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
    """Whether two figures differ by no more than their intervals, in quadrature; True where one of
    these is not known."""
    halves = []
    for low, high in intervals:
        if low is None or high is None or math.isnan(high - low):
            return True
        halves.append((high - low) / 2)
    return abs(expected - measured) <= math.hypot(*halves)


def coverage(measured: ArrayLike, low: ArrayLike, high: ArrayLike) -> float:
    """Share of measurements inside their intervals, bounds included; NaN if there are none."""
    times = _array(measured)
    inside = (_array(low) <= times) & (times <= _array(high))
    return float(inside.mean()) if inside.size else math.nan

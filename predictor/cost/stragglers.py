"""Expected excess of the slowest rank over the rank that is slowest in the mean.

The ids of a rank are a random sum: their number varies from batch to batch, and with it the time
of its lookups. All ranks meet at the next collective, so that an iteration pays the expected
maximum, which is above the maximum of the means. Times are taken to be normal and independent.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LEAST = 0.05
"""Relative deviation of a shard's ids below which it counts as none: with thousands of ids, as
usual, nothing then has to be computed. It counts in full from twice that on."""
FEWEST_IDS = 1e-3
"""Least ids of a feature in a batch of all ranks; a feature with fewer is priced with these."""
RANKS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024, 4096, 16384)
OTHERS = 1.5
"""Exponent of the weight of ranks behind the second; random draws agree best between 1 and 2."""
BEHIND = np.linspace(0.0, 5.0, 51)
"""Distances of a rank behind the slowest one, in deviations, at which its part is tabulated."""


def relative_deviation(
    samples: float, lengths: float, deviation: float | None, share: float
) -> float:
    """Return the relative standard deviation of the ids that fall on a shard; 0 where it is small.

    The ids are a sum of ``samples`` independent lengths, and each is on the shard with probability
    ``share``: ``S (mu m (1 - m) + m^2 sigma^2) / (S mu m)^2`` is the square (law of total
    variance). Between one and two times `LEAST` it rises from 0, so that fewer ids never take
    longer.

    Args:
        samples: lengths that are added up.
        lengths: their mean, > 0.
        deviation: their standard deviation; None: they are the floor or the ceiling of the mean,
            as in synthetic batches.
        share: of the ids that fall on the shard, in [0, 1].
    """
    ids = samples * lengths * share
    if ids < FEWEST_IDS:
        return 0.0
    part = lengths - math.floor(lengths)
    variance = part * (1 - part) if deviation is None else deviation**2
    relative = math.sqrt(samples * (lengths * share * (1 - share) + share**2 * variance)) / ids
    return min(relative, 2 * (relative - LEAST)) if relative > LEAST else 0.0


def common_share(
    lengths: float, deviation: float | None, correlation: float, share: float
) -> float:
    """Return the part of `relative_deviation` that varies with the other features of a sample.

    Args:
        correlation: two features of a sample correlate by the product of their correlations.
    """
    if not deviation or not correlation:
        return 0.0
    of_lengths = (share * deviation) ** 2
    return correlation * math.sqrt(of_lengths / (lengths * share * (1 - share) + of_lengths))


def expected_maximum(ranks: int, skew: float = 0.0) -> float:
    """Return the expected maximum of ``ranks`` slightly skewed standard normal variables.

    It is that of ``z + skew / 6 (z^2 - 1)`` (Cornish and Fisher 1938).
    """
    first = float(np.interp(ranks, RANKS, _expected_maxima()))
    second = float(np.interp(ranks, RANKS, _expected_squares()))
    return first + skew / 6 * (second - 1)


def expected_excess(mean: Array, deviation: Array) -> Array:
    """Return the expected maximum over ranks less the maximum of the means, ``[..., plans, 1]``.

    It is at least 0, and exact for two ranks with equal deviations: the second one counts as the
    part of a rank that makes the excess right. With more ranks, the others count as that part to
    the power of `OTHERS`; against random draws the result is then off by at most a quarter of a
    deviation.

    Args:
        mean: of every rank, ``[..., plans, ranks]``.
        deviation: the same, or ``[plans, ranks]`` where the means differ from draw to draw.
    """
    if mean.shape[-1] == 1:
        return np.zeros((*mean.shape[:-1], 1))
    deviation = np.broadcast_to(deviation, mean.shape)
    most = mean.max(axis=-1, keepdims=True)
    slowest = np.take_along_axis(deviation, mean.argmax(axis=-1)[..., None], axis=-1)
    both = np.sqrt((deviation**2 + slowest**2) / 2)
    behind = (most - mean) / np.where(both > 0, both, 1.0)
    part = np.where(both > 0, np.interp(behind, BEHIND, _parts()), 0.0)
    second = np.partition(part, -2, axis=-1)[..., -2:-1]
    weight = part**OTHERS
    total = weight.sum(axis=-1, keepdims=True)
    spread = np.sqrt((weight * deviation**2).sum(axis=-1, keepdims=True) / np.maximum(total, 1.0))
    count = total - second**OTHERS + second
    return np.asarray(spread * np.interp(count, RANKS, _expected_maxima()))


@cache
def _parts() -> Array:
    """Tabulate the excess of two ranks over that of two equal ones, at `BEHIND`.

    ``E max(X, Y) - E X = sqrt(2) phi(d / sqrt(2)) - d (1 - Phi(d / sqrt(2)))`` for deviations of
    1 and means that are d apart (Clark 1961, eq. 2).
    """
    at = BEHIND / math.sqrt(2)
    density = np.exp(-(at**2) / 2) / math.sqrt(2 * math.pi)
    excess = math.sqrt(2) * density - BEHIND * (1 - _normal(at))
    return np.asarray(excess / excess[0])


@cache
def _expected_maxima() -> Array:
    """Tabulate the expected maximum of n standard normals, at `RANKS`.

    It is the ``integral of 1 - Phi^n - (1 - Phi)^n over x > 0``.
    """
    x = np.linspace(0.0, 8.0, 801)
    below = _normal(x)
    return np.array([np.trapezoid(1 - below**n - (1 - below) ** n, x) for n in RANKS])


@cache
def _expected_squares() -> Array:
    """Tabulate the expected square of the largest of n standard normals, at `RANKS`."""
    x = np.linspace(0.0, 8.0, 801)
    below = _normal(x)
    return np.array([np.trapezoid(2 * x * (1 - below**n + (1 - below) ** n), x) for n in RANKS])


def _normal(x: Array) -> Array:
    return np.array([(1 + math.erf(value / math.sqrt(2))) / 2 for value in x.tolist()])

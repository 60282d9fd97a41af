"""Tables as public descriptions of production models have them, drawn from a seed.

Rows lognormal over five decades, most tables small and a few that no single GPU holds; mixed dims;
pooling factors lognormal; Zipf ids of a skew of their own. Nothing is drawn with numpy or through
`random`'s distributions, whose streams may change between versions: uniform numbers of the Mersenne
Twister and the inverse normal distribution give the same tables everywhere.
"""

from __future__ import annotations

import math
import random
from statistics import NormalDist
from typing import NamedTuple

ROWS = (1_000, 100_000_000)
DIMS = (16, 32, 64, 128, 256)
POOLING = (1.0, 100.0)
ALPHA = (0.6, 1.3)

MEDIAN_ROWS, SIGMA_ROWS = 1_000_000, 2.3
MEDIAN_POOLING, SIGMA_POOLING = 10.0, 1.2


class Drawn(NamedTuple):
    """One table: rows, columns, mean ids a sample, and the exponent of their Zipf law."""

    rows: int
    dim: int
    pooling_factor: float
    alpha: float


def draw_table(rng: random.Random) -> Drawn:
    """The next table of a stream."""
    rows = three_digits(lognormal(rng, MEDIAN_ROWS, SIGMA_ROWS, ROWS))
    dim = DIMS[int(rng.random() * len(DIMS))]
    pooling = round(lognormal(rng, MEDIAN_POOLING, SIGMA_POOLING, POOLING), 1)
    alpha = round(ALPHA[0] + rng.random() * (ALPHA[1] - ALPHA[0]), 2)
    return Drawn(rows, dim, pooling, alpha)


def lognormal(
    rng: random.Random, median: float, sigma: float, bounds: tuple[float, float]
) -> float:
    """A lognormal draw, clipped to ``bounds``."""
    z = NormalDist().inv_cdf(min(max(rng.random(), 1e-12), 1 - 1e-12))
    return min(max(median * math.exp(sigma * z), bounds[0]), bounds[1])


def three_digits(value: float) -> int:
    """Rounded to three significant digits, for files that people read."""
    scale = 10 ** (len(str(int(value))) - 3)
    return round(value / scale) * scale if scale > 1 else round(value)

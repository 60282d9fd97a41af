"""Numbers drawn at random that are the same under every version of Python.

Only uniform numbers of the Mersenne Twister are taken from `random`: the streams of its
distributions may change between versions.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import NormalDist
from typing import TypeVar

T = TypeVar("T")


def whole(rng: random.Random, low: int, high: int) -> int:
    """An integer from `low` to `high`, both included."""
    return low + int(rng.random() * (high - low + 1))


def pick(rng: random.Random, options: Sequence[T]) -> T:
    """One of the options."""
    return options[whole(rng, 0, len(options) - 1)]


def uniform(rng: random.Random, low: float, high: float) -> float:
    """A number between two bounds."""
    return low + rng.random() * (high - low)


def log_uniform(rng: random.Random, low: float, high: float) -> float:
    """A number between two bounds above 0, every octave as likely as every other."""
    return math.exp(uniform(rng, math.log(low), math.log(high)))


def lognormal(rng: random.Random, median: float, sigma: float) -> float:
    """A number whose logarithm is normal."""
    # random() may be 0, of which the normal distribution has no inverse
    return median * math.exp(sigma * NormalDist().inv_cdf(max(rng.random(), 1e-12)))

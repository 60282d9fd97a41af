"""Mixtures of Poisson distributions: how often rows occur that differ in their probability."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

OFTEN = 32
"""Rows that occur at least so often keep their share as measured, right to about a fifth."""
STEPS = 400


def poisson(at: Array) -> Array:
    """Chance of k occurrences given that there are fewer than `OFTEN`, ``[grid, OFTEN]``."""
    often = np.arange(OFTEN, dtype=np.float64)
    log_factorial = np.concatenate(([0.0], np.cumsum(np.log(often[1:]))))
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = often[None, :] * np.log(at)[:, None] - at[:, None] - log_factorial[None, :]
    chance = np.exp(np.where(np.isnan(logs), 0.0, logs))
    return chance / chance.sum(axis=1, keepdims=True)


def mean_occurrences(likely: Array) -> Array:
    """Mean occurrences, for each point of the grid, of rows that occurred less than `OFTEN` times.

    With these, and the others' own, the draws of all rows add up to those of the sample.
    """
    return likely @ np.arange(OFTEN, dtype=np.float64)


def fit_mixture(rows: Array, seen: Array, likely: Array) -> Array:
    """Expectation maximisation of the mixing distribution (Laird 1978), to a fit within chance.

    More steps would fit the noise of the sample: each range stops where its deviance is no larger
    than chance makes it (the discrepancy principle, Morozov 1966), or after `STEPS`.

    Args:
        rows: start, ``[ranges, grid]``.
        seen: rows that occur k times, ``[ranges, OFTEN]``.
        likely: ``[grid, OFTEN]``.
    """
    rows = rows.copy()
    open_ = np.ones(len(rows), dtype=np.bool_)
    for _ in range(STEPS):
        expected = np.maximum(rows[open_] @ likely, 1e-300)
        off = ~within_chance(seen[open_], expected)
        open_[open_] = off
        if not off.any():
            break
        rows[open_] = em_step(rows[open_], seen[open_], likely)
    return rows


def em_step(rows: Array, seen: Array, likely: Array) -> Array:
    """One step of the expectation maximisation."""
    moved: Array = rows * ((seen / np.maximum(rows @ likely, 1e-300)) @ likely.T)
    return moved


def within_chance(seen: Array, expected: Array) -> NDArray[np.bool_]:
    """Ranges where the deviance of Poisson counts is below two deviations above its mean."""
    logs = np.log(np.maximum(seen, 1e-300) / expected)
    deviance = 2 * (seen * logs - seen + expected).sum(axis=1)
    chance = np.interp(np.log(expected), *_deviance_by_chance()).sum(axis=1)
    found: NDArray[np.bool_] = deviance <= chance + 2 * np.sqrt(2 * chance)
    return found


@lru_cache(maxsize=1)
def _deviance_by_chance() -> tuple[Array, Array]:
    """Mean deviance of a Poisson count, by the logarithm of its mean; 1 for large means."""
    mean = np.geomspace(1e-8, 30.0, 120)
    count = np.arange(120, dtype=np.float64)
    log_factorial = np.concatenate(([0.0], np.cumsum(np.log(count[1:]))))
    chance = np.exp(count * np.log(mean)[:, None] - mean[:, None] - log_factorial)
    logs = np.log(np.maximum(count, 1.0) / mean[:, None])
    deviance = 2 * (count * logs - count + mean[:, None])
    return np.log(mean), (chance * deviance).sum(axis=1)

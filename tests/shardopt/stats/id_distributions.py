"""Ids of known distributions, and what `shardopt stats` makes of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from predictor.model.distribution import (
    Bins,
    Distribution,
    Empirical,
    EmpiricalByRange,
    Uniform,
    Zipf,
)
from shardopt.stats.counts import Bags, FeatureCounts
from shardopt.stats.mixture import estimate
from shardopt.stats.spectrum import fit_zipf

Ids = NDArray[np.int64]
Mixed = tuple[tuple[float, Distribution], ...]

DISTRIBUTIONS: dict[str, Mixed] = {
    "zipf 0.8": ((1.0, Zipf(0.8)),),
    "zipf 1.05": ((1.0, Zipf(1.05)),),
    "zipf 1.2": ((1.0, Zipf(1.2)),),
    "flat head": ((1.0, Zipf(1.1, 50)),),
    "uniform": ((1.0, Uniform()),),
    "mixture": ((0.5, Zipf(1.2)), (0.5, Uniform())),
}


def draw(distribution: Mixed, rows: int, count: int, seed: int, *, shuffled: bool) -> Ids:
    """``count`` ids of a mixture of distributions, hot ones first or anywhere."""
    rng = np.random.default_rng(seed)
    parts = rng.multinomial(count, [share for share, _ in distribution])
    ranks = [
        _ranks(each, rows, int(n), rng) for n, (_, each) in zip(parts, distribution, strict=True)
    ]
    ids = rng.permutation(np.concatenate(ranks))
    return rng.permutation(rows)[ids] if shuffled else ids


def _ranks(distribution: Distribution, rows: int, count: int, rng: np.random.Generator) -> Ids:
    if isinstance(distribution, Zipf):
        weights = (np.arange(1, rows + 1) + distribution.q) ** -distribution.alpha
    else:
        weights = np.ones(rows)
    edges = np.cumsum(weights)
    return np.searchsorted(edges, rng.random(count) * edges[-1]).astype(np.int64)


def counted(ids: Ids, limit: int = 2**20, chunks: int = 1) -> FeatureCounts:
    """Counts of ids, one a sample."""
    counts = FeatureCounts(limit)
    for part in np.array_split(ids, chunks):
        counts.add(Bags(part))
    return counts


def measured(counts: FeatureCounts, rows: int) -> EmpiricalByRange:
    """Return the distribution that model.yaml gets from the counts."""
    spectrum = counts.spectrum(rows)
    mixture = estimate(spectrum, fit_zipf(spectrum))
    overall = Empirical(tuple(mixture.counts.tolist()), tuple(mixture.probs.tolist()))
    return EmpiricalByRange(overall, mixture.range_rows, spectrum.range_width, rows)


def distinct(ids: Ids, draws: int, seed: int = 0) -> float:
    """Distinct ids among so many of them, mean of some tries."""
    rng = np.random.default_rng(seed)
    tries = max(3, min(100, 50_000 // draws))
    tried = (rng.choice(ids, draws, replace=False, shuffle=False) for _ in range(tries))
    return float(np.mean([len(np.unique(part)) for part in tried]))


def bins_of(counts: FeatureCounts, rows: int) -> Bins:
    """The whole table."""
    return measured(counts, rows).bins(rows)

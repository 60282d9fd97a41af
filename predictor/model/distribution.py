"""Distributions of a feature's ids over the rows of its table.

Every distribution is reduced to `Bins`: groups of rows with the same draw probability, hottest
first. Distinct rows and cache hits of a batch follow from the bins in closed form, so no ids are
sampled. Draws are independent (the independent reference model).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator

from predictor.errors import InputError
from predictor.section import NOT_EMPTY, Section, form, real, refuse

Array = NDArray[np.float64]

EXACT_RANKS = 256
"""Number of hottest rows with a bin each, as a skewed distribution bends most there."""
BINS_PER_DECADE = 12
RANGE_TOLERANCE = 0.05
"""Relative difference allowed between the rows of the id ranges and those of the table."""


@dataclass(frozen=True, eq=False)
class Bins:
    """Bins of rows: ``counts[i]`` rows are drawn with probability ``probs[i]`` each, hottest first.

    The probabilities of a whole table sum to one; those of a row range to its share of the draws.
    """

    counts: Array
    probs: Array

    @property
    def rows(self) -> float:
        return float(self.counts.sum())

    @property
    def mass(self) -> float:
        """Share of all draws that fall on these rows, in [0, 1]."""
        return float(self.counts @ self.probs)

    def unique(self, draws: float) -> float:
        """Return the expected distinct rows among ``draws`` draws over the whole table.

        ``E[U] = sum_i 1 - (1 - p_i)^n``; exact for independent draws.
        """
        return float(self.counts @ self._seen(draws)) if draws > 0 else 0.0

    def _seen(self, draws: float) -> Array:
        """Return the probability of each row to be among ``draws`` draws."""
        with np.errstate(divide="ignore"):
            return np.asarray(-np.expm1(draws * np.log1p(-np.minimum(self.probs, 1.0))))

    def once(self, draws: float, distinct: float) -> Bins:
        """Return the rows with their probabilities among the distinct ids of many samples.

        Args:
            draws: of each sample, over the whole table.
            distinct: rows of the whole table that they are expected to touch, > 0.
        """
        return Bins(self.counts, self._seen(draws) / distinct)

    def hit_rate(self, cache_rows: float) -> float:
        """Return the steady-state hit rate of an LRU cache of ``cache_rows`` rows, in [0, 1].

        Che's approximation (Che, Tung, Wang 2002): the characteristic time T solves
        ``sum_i 1 - exp(-p_i T) = C``; row i then hits with probability ``1 - exp(-p_i T)``.
        """
        if cache_rows <= 0 or self.mass == 0:
            return 0.0
        if cache_rows >= self.rows:
            return 1.0
        resident = -np.expm1(-self.probs * self.characteristic_time(cache_rows))
        return float((self.counts * self.probs) @ resident) / self.mass

    def characteristic_time(
        self, cache_rows: float, most: float = 1e300, tolerance: float = 1e-12
    ) -> float:
        """Return the draws after which an LRU cache evicts a row not drawn again, at most ``most``.

        Draws count over the whole table (Che, Tung, Wang 2002); the cache holds ``cache_rows``
        rows, fewer than the table has. Newton's method from below never overshoots, as the rows in
        the cache are a concave function of time.
        """
        time = cache_rows / self.mass if self.mass > 0 else most
        while time < most:
            missing = cache_rows + float(self.counts @ np.expm1(-self.probs * time))
            slope = float((self.counts * self.probs) @ np.exp(-self.probs * time))
            if missing <= tolerance * cache_rows:
                return time
            if slope <= 0:  # the rows that are ever drawn do not fill it
                return most
            time += missing / slope
        return most

    def resident(self, time: Array) -> Array:
        """Return the rows in an LRU cache for each characteristic time, in draws."""
        return np.asarray(-np.expm1(-np.multiply.outer(time, self.probs)) @ self.counts)

    def missed(self, time: Array) -> Array:
        """Return the share of all draws that miss such a cache on these rows, for each time."""
        absent = np.exp(-np.multiply.outer(time, self.probs))
        return np.asarray(absent @ (self.counts * self.probs))

    def batch_hits(self, draws: float, cache_rows: float) -> float:
        """Return the expected hits of ``draws`` draws over the table in an empty cache.

        The first touch of a distinct row always misses; repeats hit at the steady-state rate.
        """
        local = draws * self.mass
        return max(0.0, min(local - self.unique(draws), local * self.hit_rate(cache_rows)))

    def batch_misses(self, draws: float, cache_rows: float) -> float:
        """Return the expected misses of ``draws`` draws over the table in an empty cache.

        The cache is LRU. Every new row misses until it is full; then misses are those of the
        steady state (Che's approximation, as `hit_rate`).
        """
        if cache_rows >= self.rows:
            return self.unique(draws)
        full = self.characteristic_time(cache_rows, draws, 1e-9)
        time = np.array(full)
        misses = float(self.resident(time)) + (draws - full) * float(self.missed(time))
        return max(self.unique(draws), min(draws * self.mass, misses))

    def slice(self, first: float, last: float) -> Bins:
        """Return rows ``first..last`` by popularity rank, 0 the hottest; cut bins at the ends."""
        edges = np.concatenate(([0.0], np.cumsum(self.counts)))
        counts = np.clip(edges[1:], first, last) - np.clip(edges[:-1], first, last)
        keep = counts > 0
        return Bins(counts[keep], self.probs[keep])

    def scaled(self, share: float) -> Bins:
        """Return a random ``share`` of the rows, in [0, 1], as a range of shuffled ids holds."""
        return Bins(self.counts * share, self.probs)


def mix_features(parts: Sequence[Bins], draws: Sequence[float]) -> Bins:
    """Mix the bins of features that read one table; all have the same k-th hottest row.

    Args:
        parts: bins of the features, over equal numbers of rows.
        draws: of each feature, >= 0, not all 0.
    """
    ends = [np.cumsum(part.counts) for part in parts]
    edges = np.unique(np.concatenate(ends))
    share = np.asarray(draws, dtype=np.float64) / sum(draws)
    middle = edges - 0.5 * np.diff(edges, prepend=0.0)
    probs = np.zeros(len(edges))
    for part, end, weight in zip(parts, ends, share, strict=True):
        # rounding may put an edge past the last row
        probs += weight * part.probs[np.minimum(np.searchsorted(end, middle), len(end) - 1)]
    return Bins(np.diff(edges, prepend=0.0), probs)


def join_tables(parts: Sequence[Bins], draws: Sequence[float]) -> Bins:
    """Join the rows of several tables, unsorted; each table gets its share of the draws.

    Args:
        parts: bins of the tables, at least one.
        draws: of each table, >= 0, not all 0.
    """
    share = np.asarray(draws, dtype=np.float64) / sum(draws)
    return Bins(
        np.concatenate([part.counts for part in parts]),
        np.concatenate([w * part.probs for w, part in zip(share, parts, strict=True)]),
    )


class Distribution(Protocol):
    """An index distribution, before the number of rows is known."""

    def bins(self, num_embeddings: int) -> Bins: ...


@dataclass(frozen=True)
class Uniform(Section):
    """Uniform distribution: every row is equally likely."""

    tag = "uniform"

    def bins(self, num_embeddings: int) -> Bins:
        return Bins(np.array([float(num_embeddings)]), np.array([1.0 / num_embeddings]))


@dataclass(frozen=True)
class Zipf(Section):
    """The k-th most frequent id has a probability proportional to (k + q)^-alpha."""

    tag = "zipf"

    alpha: Annotated[float, real(0, 20)]
    """The skew; 0 is uniform."""
    q: Annotated[float, real(-1, 1e9, above=True)] = 0.0
    """Flatness of the hottest ids."""

    def __post_init__(self) -> None:
        if not self.alpha >= 0 or not self.q > -1:
            raise InputError(
                f"zipf needs alpha >= 0 and q > -1, got alpha {self.alpha}, q {self.q}"
            )

    def bins(self, num_embeddings: int) -> Bins:
        """Return exact bins for the hottest rows, logarithmic ones for the tail."""
        return _zipf_bins(self.alpha, self.q, num_embeddings)


@lru_cache(maxsize=4096)
def _zipf_bins(alpha: float, q: float, num_embeddings: int) -> Bins:
    head = min(EXACT_RANKS, num_embeddings)
    edges = np.arange(head + 1, dtype=np.float64)
    if num_embeddings > head:
        decades = np.log10(num_embeddings / head)
        steps = max(2, int(np.ceil(decades * BINS_PER_DECADE)) + 1)
        tail = np.unique(np.round(np.geomspace(head, num_embeddings, steps)))
        edges = np.concatenate((edges, tail[1:]))
    counts = np.diff(edges)
    weights = np.concatenate(
        (
            (edges[1 : head + 1] + q) ** -alpha,
            _power_integral(alpha, edges[head:] + 0.5 + q) / counts[head:],
        )
    )
    return Bins(counts, weights / (counts @ weights))


def _power_integral(alpha: float, edges: Array) -> Array:
    """Integral of ``x^-alpha`` over consecutive edges: the midpoint rule read backwards."""
    if abs(alpha - 1) < 1e-12:
        return np.diff(np.log(edges))
    return np.diff(edges ** (1 - alpha)) / (1 - alpha)


def _not_all_zero(fractions: tuple[float, ...]) -> tuple[float, ...]:
    """one above 0"""
    if not sum(fractions) > 0:
        raise refuse(list(fractions), "all are 0; give at least one above 0")
    return fractions


@dataclass(frozen=True)
class ReuseHistogram(Section):
    """Histogram of how often the distinct ids of a sample repeat (the reuse factors of Lin et al.
    2024: 17 bins, or any prefix of them; they need not be normalised)."""

    tag = "reuse_histogram"

    lookups: Annotated[float, real(0, 1e15, above=True)]
    """The number of ids in the sample."""
    fractions: Annotated[
        tuple[Annotated[float, real(0, 1e15)], ...], NOT_EMPTY, AfterValidator(_not_all_zero)
    ]
    """The shares of distinct ids that occur (0, 1], (1, 2], (2, 4], ... times."""

    def bins(self, num_embeddings: int) -> Bins:
        """Return a bin per repeat class; the mass of ids seen once spreads over the unseen rows.

        That ids seen once estimate the unseen mass is Good and Turing's rule (Good 1953).
        """
        fractions = np.asarray(self.fractions, dtype=np.float64)
        fractions = fractions / fractions.sum()
        # geometric middle of (2^(i-1), 2^i]; the first bin holds ids seen exactly once
        repeats = np.concatenate(([1.0], 2.0 ** (np.arange(1, len(fractions)) - 0.5)))
        distinct = min(self.lookups / float(fractions @ repeats), float(num_embeddings))
        counts = (fractions * distinct)[::-1]
        probs = repeats[::-1].copy()
        unseen = num_embeddings - distinct
        if unseen > 0 and fractions[0] > 0:
            # half of the singletons' mass stays with them, half goes to rows not yet seen
            singles = counts[-1]
            probs[-1] = 0.5
            counts = np.append(counts, unseen)
            probs = np.append(probs, min(0.5 * singles / unseen, 0.5))
        keep = counts > 0
        counts, probs = counts[keep], probs[keep]
        return Bins(counts, probs / (counts @ probs))


@dataclass(frozen=True)
class Empirical:
    """Bins measured from data, rescaled to the table's rows.

    Args:
        counts: rows per bin, hottest first, > 0.
        weights: draws per row of the bin, >= 0; any scale.
    """

    counts: tuple[float, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.counts) != len(self.weights) or not self.counts:
            raise InputError("an empirical distribution needs as many counts as weights, >= 1")
        if min(self.counts) <= 0 or min(self.weights) < 0 or max(self.weights) <= 0:
            raise InputError("an empirical distribution needs counts > 0 and weights >= 0")

    def bins(self, num_embeddings: int) -> Bins:
        """Return the measured bins; add unseen rows at the cold end, or cut rows there."""
        order = np.argsort(-np.asarray(self.weights), kind="stable")
        counts = np.asarray(self.counts, dtype=np.float64)[order]
        weights = np.asarray(self.weights, dtype=np.float64)[order]
        missing = num_embeddings - float(counts.sum())
        if missing > 0:
            counts, weights = np.append(counts, missing), np.append(weights, 0.0)
        bins = Bins(counts, weights).slice(0, num_embeddings)
        return Bins(bins.counts, bins.probs / (bins.counts @ bins.probs))


@dataclass(frozen=True, eq=False)
class EmpiricalByRange:
    """Bins measured from data together with the id ranges in which their rows lie.

    Args:
        whole: the bins of the table.
        range_rows: rows of each bin in each id range, ``[bins, ranges]``, in the order of
            ``whole.counts``. Both are estimates: they agree in the rows of the table, and in those
            of single bins only approximately.
        range_width: rows of an id range; the last one ends with the table.
        table_rows: rows of the table that was measured.
    """

    whole: Empirical
    range_rows: Array
    range_width: int
    table_rows: int

    def __post_init__(self) -> None:
        ranges = -(-self.table_rows // self.range_width) if self.range_width > 0 else 0
        if self.range_rows.shape != (len(self.whole.counts), ranges) or ranges < 1:
            raise InputError(
                f"id ranges of shape {self.range_rows.shape} do not fit {len(self.whole.counts)} "
                f"bins over {self.table_rows} rows in ranges of {self.range_width}"
            )
        if self.range_rows.min() < 0 or not np.isclose(
            self.range_rows.sum(), self.table_rows, rtol=RANGE_TOLERANCE
        ):
            raise InputError(
                f"rows by id range must be >= 0 and sum to the {self.table_rows} rows of the table"
                f", not {self.range_rows.sum():.6g}"
            )

    def bins(self, num_embeddings: int) -> Bins:
        return self.whole.bins(num_embeddings)

    def between(self, first: int, last: int, num_embeddings: int) -> Bins | None:
        """Return the rows with ids ``first`` to ``last`` (exclusive) of a table.

        Within an id range the rows of a bin spread evenly. None if the table has fewer rows than
        the measured one, because its ids differ.
        """
        if num_embeddings < self.table_rows:
            return None
        rows = self._below(last) - self._below(first)
        weights = np.asarray(self.whole.weights, dtype=np.float64)
        probs = weights / float(self._edges[:, -1] @ weights)
        # rows that the measured table does not have are never drawn
        rows = np.append(rows, max(0.0, float(last - max(first, self.table_rows))))
        probs = np.append(probs, 0.0)
        order = np.argsort(-probs, kind="stable")
        order = order[rows[order] > 0]
        return Bins(rows[order], probs[order])

    @cached_property
    def _edges(self) -> Array:
        """Return the rows of each bin below the start of each id range, ``[bins, ranges + 1]``."""
        start = np.zeros((len(self.range_rows), 1))
        return np.concatenate((start, np.cumsum(self.range_rows, axis=1)), axis=1)

    def _below(self, row: int) -> Array:
        """Return the rows of each bin whose id is smaller than ``row``."""
        row = min(row, self.table_rows)
        at = min(row // self.range_width, self.range_rows.shape[1] - 1)
        first = at * self.range_width
        part = (row - first) / (min(first + self.range_width, self.table_rows) - first)
        below: Array = self._edges[:, at] + part * self.range_rows[:, at]
        return below


IndexDistribution = Annotated[
    Distribution,
    form(
        "uniform, {zipf: {alpha: 1.05}}, {reuse_histogram: {lookups, fractions}}, {file, feature}, "
        "{files: [mon.npz, tue.npz]}",
        {Uniform.tag: Uniform()},
        [Zipf, ReuseHistogram],
        loaded=(Uniform, Empirical, EmpiricalByRange),
    ),
]
"""Distribution of a feature in a model file; a loader puts in what a stats file holds."""

"""Counts of one feature from a stream of data, in bounded memory.

Ids come in any order and in chunks of any size. The counts are exact ones of a sample of the rows,
independent of order and chunks, and those of the hottest rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardopt.stats.spectrum import RANGES, Spectrum

Ids = NDArray[np.int64]

HOT_CAPACITY = 65536
"""Most rows that `HotRows` follows."""


class IdSample:
    """Exact counts of all rows, or, beyond ``limit`` rows, of a random sample of them.

    A row belongs to the sample of level l if its hash starts with l zero bits, so levels are nested
    and a row in the last one has been counted from its first occurrence on: adaptive sampling
    (Wegman; Flajolet 1990), which Gibbons 2001 calls distinct sampling. A row of the sample stands
    for ``2^level`` rows; the estimate of their number has a relative standard error of about
    ``1.2 / sqrt(limit)`` (Flajolet 1990).

    Args:
        limit: most rows to keep, >= 1.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.level = 0
        self.ids: Ids = np.empty(0, dtype=np.int64)
        self.counts: Ids = np.empty(0, dtype=np.int64)

    @property
    def full(self) -> bool:
        """True with more rows than the limit; `thin` is due."""
        return len(self.ids) > self.limit

    def add(self, ids: Ids, counts: Ids) -> None:
        """Count ids.

        Args:
            ids, counts: distinct ids, ascending, and their occurrences, ``[n]``.
        """
        keep = _sampled(ids, self.level)
        self.ids, (self.counts,) = _merge(self.ids, (self.counts,), ids[keep], (counts[keep],))

    def thin(self) -> None:
        """Raise the level until the limit holds."""
        while self.full:
            self.level += 1
            keep = _sampled(self.ids, self.level)
            self.ids, self.counts = self.ids[keep], self.counts[keep]


class HotRows:
    """The hottest rows of a stream.

    The algorithm is that of Misra and Gries 1982, merged by chunks as in Agarwal et al. 2012,
    "Mergeable summaries". ``counts <= true <= counts + slack`` for every followed row. Any other
    row occurs at most ``floor`` times, and ``floor <= ids / (capacity + 1)``. A row that was
    followed from its first occurrence on has no slack.
    """

    def __init__(self, capacity: int = HOT_CAPACITY) -> None:
        self.capacity = capacity
        self.floor = 0
        self.ids: Ids = np.empty(0, dtype=np.int64)
        self.counts: Ids = np.empty(0, dtype=np.int64)
        self.slack: Ids = np.empty(0, dtype=np.int64)

    def add(self, ids: Ids, counts: Ids) -> None:
        """Count distinct ids, ascending, ``[n]``."""
        missed = np.full(len(ids), self.floor, dtype=np.int64)
        # slack bounds the occurrences missed before a row is followed, so it never grows
        missed[np.isin(ids, self.ids, assume_unique=True)] = 0
        self.ids, (self.counts, self.slack) = _merge(
            self.ids, (self.counts, self.slack), ids, (counts, missed)
        )
        if len(self.ids) > self.capacity:
            most = self.counts + self.slack
            self.floor = int(np.partition(most, -self.capacity - 1)[-self.capacity - 1])
            keep = most > self.floor
            self.ids, self.counts, self.slack = self.ids[keep], self.counts[keep], self.slack[keep]


def _merge(
    ids: Ids, values: tuple[Ids, ...], new: Ids, added: tuple[Ids, ...]
) -> tuple[Ids, tuple[Ids, ...]]:
    """Return the values of the union of two ascending id lists, summed for ids in both."""
    at = np.searchsorted(ids, new)
    present = np.zeros(len(new), dtype=np.bool_)
    inside = at < len(ids)
    present[inside] = ids[at[inside]] == new[inside]
    sums = []
    for old, more in zip(values, added, strict=True):
        total = old.copy()
        total[at[present]] += more[present]
        sums.append(np.insert(total, at[~present], more[~present]))
    return np.insert(ids, at[~present], new[~present]), tuple(sums)


def _sampled(ids: Ids, level: int) -> NDArray[np.bool_]:
    """Return True for ids whose hash starts with ``level`` zero bits.

    The hash is the mixer of splitmix64 (Steele et al. 2014).
    """
    if level == 0:
        return np.ones(len(ids), dtype=np.bool_)
    x = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    sampled: NDArray[np.bool_] = (x >> np.uint64(64 - level)) == 0
    return sampled


SURE = 0.1
"""Largest uncertain share of a hot row's count for the count to be used."""
HOT_KNOWN = 4096
"""Most hot rows whose own counts replace those of the sample."""


@dataclass(frozen=True, eq=False)
class Bags:
    """The ids of one feature in some consecutive samples.

    Args:
        ids: of all samples, one after the other, ``[n]``.
        lengths: ids of each sample, ``[samples]``; None if every sample has one.
    """

    ids: Ids
    lengths: Ids | None = None

    @property
    def samples(self) -> int:
        return len(self.ids) if self.lengths is None else len(self.lengths)

    @property
    def counts(self) -> Ids:
        """Ids of each sample, ``[samples]``."""
        return np.ones(self.samples, dtype=np.int64) if self.lengths is None else self.lengths


def sample_of(at: int, lengths: Ids | None) -> int:
    """Return the sample of the ``at``-th id, by `Bags.lengths`."""
    return at if lengths is None else int(np.searchsorted(np.cumsum(lengths), at, side="right"))


@dataclass
class FeatureCounts:
    """Counts of one feature.

    Args:
        limit: distinct ids that are counted exactly, >= 1.
        samples, empty, ids: samples, samples without an id, and ids so far.
        squares: sum over samples of the squared number of ids.
        products: sum over samples of the number of ids times that of all features.
        longest: most ids of a sample.
        shift: an id range has ``2^shift`` rows.
    """

    limit: int
    samples: int = 0
    empty: int = 0
    ids: int = 0
    squares: float = 0.0
    largest: int = -1
    shift: int = 0
    products: float = 0.0
    longest: int = 0
    range_draws: Ids = field(default_factory=lambda: np.zeros(RANGES, dtype=np.int64))
    sample: IdSample = field(init=False)
    hot: HotRows | None = None

    def __post_init__(self) -> None:
        self.sample = IdSample(self.limit)

    def add(self, bags: Bags, together: Ids | None = None) -> None:
        """Count some samples; their ids are >= 0.

        Args:
            together: ids of each sample over all features; None: of this feature alone.
        """
        lengths = bags.counts
        self.samples += bags.samples
        self.empty += int((lengths == 0).sum())
        self.squares += float(np.square(lengths, dtype=np.float64).sum())
        whole = lengths if together is None else together
        self.products += float(lengths.astype(np.float64) @ whole)
        self.longest = max(self.longest, int(lengths.max(initial=0)))
        if not len(bags.ids):
            return
        self.ids += len(bags.ids)
        ids, counts = np.unique(bags.ids, return_counts=True)
        self.largest = max(self.largest, int(ids[-1]))
        self._add_ranges(ids, counts)
        self.sample.add(ids, counts)
        if self.hot is not None:
            self.hot.add(ids, counts)
        elif self.sample.full:
            self.hot = HotRows()
            self.hot.add(self.sample.ids, self.sample.counts)
        self.sample.thin()

    def _add_ranges(self, ids: Ids, counts: Ids) -> None:
        while self.largest >> self.shift >= RANGES:
            pairs = self.range_draws.reshape(-1, 2).sum(axis=1)
            self.range_draws = np.concatenate((pairs, np.zeros_like(pairs)))
            self.shift += 1
        self.range_draws += np.bincount(ids >> self.shift, weights=counts, minlength=RANGES).astype(
            np.int64
        )

    def spectrum(self, rows: int) -> Spectrum:
        """Return the spectrum of the sample for the estimators.

        Args:
            rows: of the table, > the largest id.
        """
        shift, draws = self.shift, self.range_draws
        while rows > RANGES << shift:
            draws = np.concatenate((draws.reshape(-1, 2).sum(axis=1), np.zeros(RANGES // 2)))
            shift += 1
        ids, counts, _, weights = self._rows()
        return Spectrum(
            rows,
            self.ids,
            counts,
            weights,
            ids >> shift,
            draws[: -(-rows // (1 << shift))].astype(np.float64),
            1 << shift,
        )

    def hottest(self, count: int) -> tuple[Ids, Ids, Ids]:
        """Return ids, their occurrences, and the error bounds of these, hottest first."""
        ids, counts, slack, weights = self._rows()
        sure = np.flatnonzero(weights == 1) if self.hot is not None else np.arange(len(ids))
        best = sure[np.argsort(-counts[sure], kind="stable")][:count]
        return ids[best], counts[best], slack[best]

    def hits(self, ids: Ids) -> float:
        """Return the number of ids on these rows; an estimate for rows not counted exactly."""
        rows, counts, _, weights = self._rows()
        return float((counts * weights)[np.isin(rows, ids)].sum())

    def _rows(self) -> tuple[Ids, Ids, Ids, NDArray[np.float64]]:
        """Return ids, counts, error bounds of the counts, and the rows that each id stands for."""
        sampled, counts = self.sample.ids, self.sample.counts
        zero = np.zeros(len(sampled), dtype=np.int64)
        if self.hot is None:
            return sampled, counts, zero, np.ones(len(sampled))
        most = self.hot.counts + self.hot.slack
        sure = np.flatnonzero(self.hot.slack <= SURE * most)
        sure = sure[np.argsort(-most[sure], kind="stable")][:HOT_KNOWN]
        hot, half = self.hot.ids[sure], self.hot.slack[sure] // 2
        other = ~np.isin(sampled, hot)
        return (
            np.concatenate((hot, sampled[other])),
            np.concatenate((self.hot.counts[sure] + half, counts[other])),
            np.concatenate((self.hot.slack[sure] - half, zero[other])),
            np.concatenate((np.ones(len(hot)), np.full(int(other.sum()), 2.0**self.sample.level))),
        )

    def state(self) -> dict[str, Any]:
        """Return everything counted so far, as arrays."""
        numbers = [self.limit, self.samples, self.empty, self.ids, self.largest, self.shift]
        arrays: dict[str, Any] = {
            "numbers": np.array([*numbers, self.sample.level], dtype=np.int64),
            "squares": np.array([self.squares, self.products, self.longest]),
            "range_draws": self.range_draws,
            "sample": np.stack((self.sample.ids, self.sample.counts)),
        }
        if self.hot is not None:
            arrays["hot"] = np.stack((self.hot.ids, self.hot.counts, self.hot.slack))
            arrays["hot_floor"] = np.array([self.hot.capacity, self.hot.floor], dtype=np.int64)
        return arrays

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> FeatureCounts:
        limit, samples, empty, ids, largest, shift, level = map(int, state["numbers"])
        draws = state["range_draws"].astype(np.int64)
        squares, products, longest = map(float, state["squares"])
        feature = cls(
            *(limit, samples, empty, ids, squares, largest, shift, products, int(longest), draws)
        )
        feature.sample.level = level
        feature.sample.ids, feature.sample.counts = state["sample"].astype(np.int64)
        if "hot" in state:
            feature.hot = HotRows(int(state["hot_floor"][0]))
            feature.hot.floor = int(state["hot_floor"][1])
            feature.hot.ids, feature.hot.counts, feature.hot.slack = state["hot"].astype(np.int64)
        return feature

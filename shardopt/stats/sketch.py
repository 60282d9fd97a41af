"""Counts of ids in bounded memory: exact ones of a sample of the rows, and the hottest rows.

Both take ids in any order and in chunks of any size. The sample of rows does not depend on either.
"""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

HOT_CAPACITY = 65536
"""Rows that `HotRows` follows."""


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
    def weight(self) -> float:
        """How many rows of the data each row of the sample stands for."""
        return 2.0**self.level

    @property
    def full(self) -> bool:
        """More rows than the limit; `thin` is due."""
        return len(self.ids) > self.limit

    def add(self, ids: Ids, counts: Ids) -> None:
        """Count ids.

        Args:
            ids, counts: distinct ids, ascending, and how often each occurs, ``[n]``.
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
    """The hottest rows of a stream (Misra and Gries 1982; merged by chunks as in Agarwal et al.
    2012, "Mergeable summaries").

    ``counts <= true <= counts + slack`` for every row that is followed; a row that is not occurs at
    most ``floor`` times, and ``floor <= ids / (capacity + 1)``. A row that was followed from its
    first occurrence on has no slack.
    """

    def __init__(self, capacity: int = HOT_CAPACITY) -> None:
        self.capacity = capacity
        self.floor = 0
        self.ids: Ids = np.empty(0, dtype=np.int64)
        self.counts: Ids = np.empty(0, dtype=np.int64)
        self.slack: Ids = np.empty(0, dtype=np.int64)

    @classmethod
    def of(cls, ids: Ids, counts: Ids, capacity: int = HOT_CAPACITY) -> Self:
        """Those of exact counts; ``ids`` are distinct and ascending."""
        made = cls(capacity)
        made.add(ids, counts)
        return made

    def add(self, ids: Ids, counts: Ids) -> None:
        """Count distinct ids, ascending, ``[n]``."""
        missed = np.full(len(ids), self.floor, dtype=np.int64)
        # slack is what a row may have been missed before it is followed: it never grows
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
    """Values of the union of two ascending id lists, summed where both have the id."""
    at = np.searchsorted(ids, new)
    known = np.zeros(len(new), dtype=np.bool_)
    inside = at < len(ids)
    known[inside] = ids[at[inside]] == new[inside]
    sums = []
    for old, more in zip(values, added, strict=True):
        total = old.copy()
        total[at[known]] += more[known]
        sums.append(np.insert(total, at[~known], more[~known]))
    return np.insert(ids, at[~known], new[~known]), tuple(sums)


def _sampled(ids: Ids, level: int) -> NDArray[np.bool_]:
    """Whether the hash of an id starts with ``level`` zero bits (mixer of splitmix64, Steele et al.
    2014)."""
    if level == 0:
        return np.ones(len(ids), dtype=np.bool_)
    x = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    kept: NDArray[np.bool_] = (x >> np.uint64(64 - level)) == 0
    return kept

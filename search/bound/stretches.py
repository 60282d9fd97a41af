"""Times of options under a cut, in the stretches between two collectives of all ranks.

The rank with the longest shard of a table takes at least as long as that shard, plus its shards of
the tables that every rank has a part of. Ranks that launch anything take at least the mean plus
the launch floor. Docs: docs/model.md, chapter 15.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from search.bound.choices import BoundChoices
from search.bound.relaxation import Cut

Array = NDArray[np.float64]
Ints = NDArray[np.intp]
Mask = NDArray[np.bool_]

NOISE = 1e-12
"""Rounding error of a difference of equal times in ms; a solver would take it for a coefficient."""


class Sparse(NamedTuple):
    """Array stored by its values that are not zero, a fifth of a cut's."""

    shape: tuple[int, ...]
    at: NDArray[np.int32]
    values: Array

    @classmethod
    def of(cls, array: Array) -> Sparse:
        """Store an array."""
        at = np.flatnonzero(array).astype(np.int32)
        return cls(array.shape, at, array.ravel()[at])

    def dense(self) -> Array:
        """Return the array."""
        array = np.zeros(self.shape)
        array.ravel()[self.at] = self.values
        return array


@dataclass(frozen=True)
class CutTimes:
    """Times of options under a cut in ms.

    A plan takes at least ``constant + sum(weights)`` of its options, plus the excess of the slowest
    rank over the mean rank in every stretch. That excess is at least ``peak + sum(beyond)`` for the
    peak of any option, and at least ``floor + sum(idle)``.

    Args:
        constant: constant time of the cycle.
        weights: time on the mean rank in the whole cycle, ``[choices]``.
        all_beyond: see `beyond`.
        all_peaks: see `peak`.
        floor: least launch floor of the ranks that launch anything, ``[stretches]``; 0 where no
            rank is sure to.
        idles: mask of options that ranks without a launch may have, ``[stretches, choices]``.
    """

    constant: float
    weights: Array
    all_beyond: Sparse
    all_peaks: Sparse
    floor: Array
    idles: Mask

    @property
    def beyond(self) -> Array:
        """Return the least time on every rank less that on the mean rank, <= 0, ``[stretches,
        choices]``."""
        return self.all_beyond.dense()

    @property
    def peak(self) -> Array:
        """Return the time above the least one on the rank with the longest shard, its launch floor
        included, ``[stretches, choices]``."""
        return self.all_peaks.dense()

    @property
    def idle(self) -> Array:
        """Return ``beyond`` of options that ranks without a launch may have, 0 for all others,
        ``[stretches, choices]``."""
        return np.where(self.idles, self.beyond, 0.0)

    def of(self, columns: Ints) -> CutTimes:
        """Return the times of some of the choices."""
        return replace(
            self,
            weights=self.weights[columns],
            all_beyond=Sparse.of(self.beyond[:, columns]),
            all_peaks=Sparse.of(self.peak[:, columns]),
            idles=self.idles[:, columns],
        )

    def peaks(self, shares: Array, first: Ints) -> Array:
        """Return the peak of every table that mixes its options, ``[stretches, tables]``.

        Args:
            shares: shares of the choices, table by table.
            first: position of every table's first choice.
        """
        return np.asarray(np.add.reduceat(self.peak * shares, first, axis=1))

    def at(self, shares: Array, first: Ints, least: Array | None = None) -> float:
        """Return the least time in ms of a plan that mixes options by these shares.

        Args:
            least: certain peaks, ``[stretches]``.
        """
        peaks = self.peaks(shares, first).max(axis=1)
        beyond = self.beyond
        longest = (peaks if least is None else np.maximum(peaks, least)) + beyond @ shares
        idle = np.where(self.idles, beyond, 0.0)
        excess = np.maximum(np.maximum(longest, self.floor + idle @ shares), 0.0)
        return self.constant + float(self.weights @ shares) + float(excess.sum())


class OptionTimes:
    """Times of the options of an exchange set under any cut.

    Args:
        choices: choices of the whole space.
        index: positions in `BoundChoices.all`, table by table.
        group: position of every choice's lookup group in the slopes of cuts, ``[choices]``.
        floor_of: returns the least of some floors ``[groups]`` that some rank is sure to pay, or 0.
    """

    def __init__(
        self,
        choices: BoundChoices,
        index: Ints,
        group: Ints,
        floor_of: Callable[[Array], float],
    ) -> None:
        self.choices, self.index, self.group, self.floor_of = choices, index, group, floor_of
        self.everywhere = choices.everywhere[index]
        self.ranks = choices.problem.topology.world_size
        sizes = choices.sizes[index]
        self.first = np.cumsum([0, *sizes[:-1]])
        # loads stay where they are: many sets share them
        self.rows = np.arange(sizes.sum()) + np.repeat(choices.first[index] - self.first, sizes)
        self.groups = np.repeat(group, sizes)

    def _of_shards(self, slopes: Array) -> Array:
        """Return the times of all shards, ``[stretches, shards]``; a shared cache can make a time
        negative, which counts as 0."""
        times = np.empty((len(slopes), len(self.rows)))
        for group in np.unique(self.group).tolist():
            mine = self.groups == group
            times[:, mine] = slopes[:, group] @ self.choices.shards[self.rows[mine]].T
        return np.maximum(times, 0.0)

    def under(self, cut: Cut) -> CutTimes:
        """Return the times of the options under a cut."""
        ranked = cut.of_ranks()
        own = self._of_shards(np.concatenate([cut.segments, cut.messages]))
        every = self._of_shards(ranked.segments) if cut.uneven.any() else own
        longest = own + np.where(own > 0, ranked.floors[:, self.groups], 0.0)
        even = np.where(self.everywhere, np.minimum.reduceat(own, self.first, axis=1), 0.0)
        copies = self.choices.copies[self.rows]
        mean = np.add.reduceat(every * copies, self.first, axis=1) / self.ranks
        peak = np.maximum.reduceat(longest, self.first, axis=1) - even
        peak[peak < NOISE] = 0.0
        floor = np.array([self.floor_of(of_groups) for of_groups in ranked.floors])
        loads = self.choices.loads[self.index]
        weights = np.einsum("nc,nc->n", loads, ranked.even[self.group]) + mean.sum(axis=0)
        # of the ranks that launch nothing no other time is known
        paid = ranked.floors > 0
        paid[: len(cut.uneven)] &= ~np.any(cut.uneven, axis=2)
        matters = peak.any(axis=1) | (floor > 0)
        beyond = (even - mean)[matters]
        beyond[np.abs(beyond) < NOISE] = 0.0
        idles = ~paid[matters][:, self.group]
        stored = Sparse.of(beyond), Sparse.of(peak[matters])
        return CutTimes(cut.constant, weights, *stored, floor[matters], idles)

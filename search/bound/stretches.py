"""Times that options take under a cut, in the stretches between two meetings of all ranks.

The rank that holds the longest shard of a table takes at least as long as that shard, beside its
shards of the tables that every rank has a part of. Ranks that launch anything have at least the
mean, and the floor of a launch. Docs: docs/model.md, chapter 15.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from predictor.cost.loads import Load
from search.bound.choices import BoundChoices, exchange_of
from search.bound.relaxation import Cut

Array = NDArray[np.float64]
Ints = NDArray[np.intp]

NOISE = 1e-12
"""Ms that are a difference of equal times; a solver would take them for entries."""


@dataclass(frozen=True)
class CutTimes:
    """Times of options under a cut in ms.

    A plan takes at least ``constant + sum(weights)`` of its options, plus the excess of the slowest
    rank over the mean rank in every stretch. With ``beyond`` for what every rank has more of than
    the mean one, the excess is at least ``peak + sum(beyond)`` for the peak of any option, and
    ``floor + sum(idle)``.

    Args:
        constant: of the cycle.
        weights: of the mean rank in the whole cycle, ``[choices]``.
        mean: on the mean rank in every stretch, ``[stretches, choices]``.
        even: on every rank at least, likewise.
        peak: beyond that, on the rank with the longest shard and the floor of its launch, likewise.
        floor: least launch of the ranks that launch anything, ``[stretches]``; 0 where none is sure
            to.
        idle: ``beyond`` of what ranks without a launch have; 0 for all else, ``[stretches,
            choices]``.
        per_output: time of each output element that the busiest rank sends, where a stretch is the
            message of an exchange's outputs, ``[stretches, exchanges]``; 0 elsewhere.
    """

    constant: float
    weights: Array
    mean: Array
    even: Array
    peak: Array
    floor: Array
    idle: Array
    per_output: Array

    @cached_property
    def beyond(self) -> Array:
        """Excess of every rank over the mean one, ``[stretches, choices]``; at most 0."""
        beyond = self.even - self.mean
        return np.where(np.abs(beyond) < NOISE, 0.0, beyond)

    def of(self, kept: Ints) -> CutTimes:
        """Keep some of the choices."""
        return replace(
            self,
            weights=self.weights[kept],
            mean=self.mean[:, kept],
            even=self.even[:, kept],
            peak=self.peak[:, kept],
            idle=self.idle[:, kept],
        )

    def peaks(self, shares: Array, first: Ints) -> Array:
        """Peak of every table that mixes its options, ``[stretches, tables]``.

        Args:
            shares: of the choices, which lie table by table.
            first: position of every table's first choice.
        """
        return np.asarray(np.add.reduceat(self.peak * shares, first, axis=1))

    def excess(self, shares: Array, first: Ints, least: Array | None = None) -> Array:
        """Excess of every stretch at least, ``[stretches]``.

        Args:
            least: peaks, and times of the slowest rank, that are certain, ``[2, stretches]``.
        """
        peak, whole = np.zeros((2, len(self.floor))) if least is None else least
        longest = np.maximum(self.peaks(shares, first).max(axis=1), peak) + self.beyond @ shares
        idle, slowest = self.floor + self.idle @ shares, whole - self.mean @ shares
        return np.asarray(np.max([0.0 * idle, longest, idle, slowest], axis=0))

    def at(self, shares: Array, first: Ints, least: Array | None = None) -> float:
        """Least time of a plan that mixes options by these shares."""
        whole = self.constant + float(self.weights @ shares)
        return whole + float(self.excess(shares, first, least).sum())


class OptionTimes:
    """Times of the options of a set of exchanges under any cut.

    Args:
        index: positions in `BoundChoices.all`, table by table.
        group: position of every choice's lookup group in the slopes of cuts, ``[choices]``.
        numbers: of these groups in the scorer.
        floor_of: least of the floors ``[groups]`` that some rank is sure to pay, or 0.
    """

    def __init__(
        self,
        known: BoundChoices,
        index: Ints,
        group: Ints,
        numbers: Sequence[int],
        floor_of: Callable[[Array], float],
    ) -> None:
        self.group, self.floor_of = group, floor_of
        exchanges = [exchange_of(known.scorer.groups[g]) for g in numbers]
        # the groups of every exchange of the space, ``[exchanges, groups]``
        order = sorted(set(known.exchanges))
        self.members = np.array([[name == one for name in exchanges] for one in order])
        self.loads = known.loads[index]
        self.everywhere = known.everywhere[index]
        self.ranks = known.problem.topology.world_size
        self.sizes = sizes = known.sizes[index]
        self.first = np.cumsum([0, *sizes[:-1]])
        rows = np.arange(sizes.sum()) + np.repeat(known.first[index] - self.first, sizes)
        self.shards, self.copies = known.shards[rows], known.copies[rows]
        groups = np.repeat(group, sizes)
        self.rows_of = [(g, np.flatnonzero(groups == g)) for g in np.unique(group).tolist()]
        self.groups = groups

    def _of_shards(self, slopes: Array) -> Array:
        """Times of all shards, ``[stretches, shards]``; of caches that are lent rows at least 0."""
        found = np.empty((len(slopes), len(self.shards)))
        for group, rows in self.rows_of:
            found[:, rows] = slopes[:, group] @ self.shards[rows].T
        return np.maximum(found, 0.0)

    def under(self, cut: Cut) -> CutTimes:
        """Times under a cut."""
        ranked = cut.of_ranks()
        own = self._of_shards(np.concatenate([cut.segments, cut.messages]))
        every = self._of_shards(ranked.segments) if cut.uneven.any() else own
        longest = own + np.where(own > 0, ranked.floors[:, self.groups], 0.0)
        even = np.where(self.everywhere, np.minimum.reduceat(own, self.first, axis=1), 0.0)
        mean = np.add.reduceat(every * self.copies, self.first, axis=1) / self.ranks
        peak = np.maximum.reduceat(longest, self.first, axis=1) - even
        peak[peak < NOISE] = 0.0
        floor = np.array([self.floor_of(of_groups) for of_groups in ranked.floors])
        weights = np.einsum("nc,nc->n", self.loads, ranked.even[self.group]) + mean.sum(axis=0)
        # nothing else is known of ranks that launch nothing
        paid = ranked.floors > 0
        paid[: len(cut.uneven)] &= ~np.any(cut.uneven, axis=2)
        kept = peak.any(axis=1) | (floor > 0)
        mean, even, peak, floor = mean[kept], even[kept], peak[kept], floor[kept]
        idle = np.where(paid[kept][:, self.group] | (np.abs(even - mean) < NOISE), 0.0, even - mean)
        per_output = np.zeros((len(paid), len(self.members)))
        per_output[len(cut.segments) :] = self._per_output(cut.messages)
        return CutTimes(cut.constant, weights, mean, even, peak, floor, idle, per_output[kept])

    def _per_output(self, messages: Array) -> Array:
        """Time of an output element, ``[messages, exchanges]``, of messages of nothing else."""
        outputs = messages[:, :, Load.OUTPUTS]
        others = np.delete(messages, Load.OUTPUTS, axis=2).any(axis=(1, 2))
        found = np.zeros((len(messages), len(self.members)))
        for number, groups in enumerate(self.members):
            if not groups.any():
                continue
            mine = outputs[:, groups]
            alike = ~others & ~outputs[:, ~groups].any(axis=1)
            found[:, number] = np.where(alike, mine.min(axis=1), 0.0)
        return found

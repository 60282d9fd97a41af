"""The time of a plan as the largest of its cycle cuts, each a sum of maxima over the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from predictor.cost.loads import Load
from predictor.model.topology import Topology
from search.model.placements import PlacementModel, Term, weighted
from search.space.option import AllowedPlacements, Option

Array = NDArray[np.float64]

UNITS_PER_MS = 1e5
"""Times are whole steps of 10 ns."""


@dataclass(frozen=True)
class CycleCut:
    """What limits the speed of plans: the cycle of a timeline. Collectives of all ranks part it, so
    every segment between two of them may run on another rank, and each waits for its busiest one.

    ``time >= constant + even . mean load + sum over segments of max over ranks (segment . load)``.

    In every segment a rank also takes the floors of the groups that it launches.

    Args:
        constant: of the cycle in ms.
        even: slopes of what follows from the mean over the ranks, ``[groups, COLUMNS]`` in ms.
        segments: slopes of every segment, ``[segments, groups, COLUMNS]`` in ms.
        floors: of a launch of a group, ``[segments, groups]`` in ms.
        groups: lookup groups of the plan that it was found at. It says nothing of plans that use
            less than these; none where it holds for all plans.
    """

    constant: float
    even: Array
    segments: Array
    floors: Array
    groups: frozenset[int] = frozenset()

    def at(self, loads: Array, launched: NDArray[np.bool_]) -> float:
        """The least time in ms of a plan.

        Args:
            loads: ``[groups, ranks, COLUMNS]``.
            launched: whether a rank has shards of a group, ``[groups, ranks]``.
        """
        times = np.einsum("sgc,grc->sr", self.segments, loads) + self.floors @ launched
        even = float((self.even * loads.mean(axis=1)).sum())
        return self.constant + even + float(times.max(axis=1).sum())

    def is_like(self, other: CycleCut) -> bool:
        """Both are of the same cycle, at loads that make no difference."""
        if self.segments.shape != other.segments.shape:
            return False
        same = np.isclose(self.constant, other.constant) and np.allclose(self.even, other.even)
        return bool(same) and np.allclose(self.segments, other.segments)


@dataclass(frozen=True)
class OptionLoads:
    """What an option puts on ranks.

    Args:
        group: its lookup group, as cuts count them.
        mean: on the mean rank, ``[COLUMNS]``.
        shards: with every shard, ``[shards, COLUMNS]``.
    """

    group: int
    mean: Array
    shards: Array


class CutModel(PlacementModel):
    """Plans, and the time that cuts say they take at least.

    Args:
        options, legal, numbers: see `PlacementModel`.
        loads_of: of an option.
        kept: loads of tables that are not in the model, ``[groups, ranks, COLUMNS]``.
        most_ms: slower plans are none of the model's.
        proving: every number is rounded such that a plan only becomes faster: what has no solution
            has no plan. Numbers are rounded to the nearest otherwise.
        free: ranks whose work is told apart from that of the others.

    Attributes:
        time: the time of the plan in `UNITS_PER_MS`.
        here: what the slowest of the free ranks takes, in every segment of the cuts that hold for
            whatever is chosen.
    """

    def __init__(
        self,
        topology: Topology,
        options: Sequence[Sequence[Option]],
        loads_of: Callable[[Option], OptionLoads],
        kept: Array,
        most_ms: float,
        *,
        proving: bool = False,
        free: frozenset[int] = frozenset(),
        legal: Callable[[Option], AllowedPlacements] | None = None,
        numbers: Sequence[int] | None = None,
        bytes_of: Callable[[Option], tuple[list[int], list[int]]] = lambda option: option.bytes_of,
    ) -> None:
        super().__init__(topology, options, legal, numbers, bytes_of)
        self.loads = {placed.option: loads_of(placed.option) for placed in self.placed}
        self.kept, self.proving, self.free = kept, proving, free
        self.most = math.ceil(most_ms * UNITS_PER_MS)
        self.time = self.model.new_int_var(0, self.most, "")
        self.here: list[cp_model.IntVar] = []
        shards = [loads.shards for loads in self.loads.values()]
        counts = [len(some) for some in shards]
        self._shards = np.concatenate(shards)
        self._groups = np.repeat([loads.group for loads in self.loads.values()], counts)
        self._first = dict(zip(self.loads, np.cumsum([0, *counts]).tolist(), strict=False))
        self._used = lru_cache(self._uses)
        self._launches: dict[tuple[int, int], cp_model.IntVar] = {}
        self._launched_by_kept = kept[..., Load.SHARDS] > 0

    def units(self, ms: float) -> int:
        """A time, rounded."""
        return math.floor(ms * UNITS_PER_MS) if self.proving else round(ms * UNITS_PER_MS)

    def of_options(self, ms: Callable[[Option], float]) -> list[Term]:
        """What the options that are chosen add, whichever ranks they are on."""
        return [(self.units(ms(p.option)), x) for p in self.placed for x in p.chosen]

    def add_cut(self, cut: CycleCut) -> None:
        """No plan that uses the groups of the cut is faster than it says."""
        constant = cut.constant + float((cut.even * self.kept.mean(axis=1)).sum())

        def even(option: Option) -> float:
            loads = self.loads[option]
            return float((cut.even[loads.group] * loads.mean).sum())

        there = np.flatnonzero(self.kept.any(axis=(1, 2))).tolist()
        used = [self._used(group) for group in sorted(cut.groups.difference(there))]
        # a tangent may start below nothing, and what grows with the loads then exceeds the time
        most = math.inf if used else self.most - min(0, self.units(constant))
        terms = [(-1, self.time), *self.of_options(even)]
        for segment, floors in zip(cut.segments, cut.floors, strict=True):
            terms.append((1, self._slowest(segment, floors, most)))
        self.model.add(weighted(terms) <= -self.units(constant)).only_enforce_if(*used)

    def _uses(self, group: int) -> cp_model.IntVar:
        """True where a table of the model is in a lookup group."""
        used = self.model.new_bool_var("")
        for placed in self.placed:
            if self.loads[placed.option].group == group:
                for one in placed.chosen:
                    self.model.add_implication(one, used)
        return used

    def _slowest(self, segment: Array, floors: Array, most: float) -> cp_model.IntVar:
        """What the slowest rank takes in a segment.

        Args:
            most: it takes no more; infinite for a cut that may not hold.
        """
        ms = (self._shards * segment[self._groups]).sum(axis=1).tolist()
        work = [max(0, one) for one in map(self.units, ms)]
        times = np.einsum("gc,grc->r", segment, self.kept) + floors @ self._launched_by_kept
        fixed = [*map(self.units, times.tolist())]
        ranks = self.per_rank(lambda p, shard: work[self._first[p.option] + shard])
        for rank, mine in enumerate(ranks):
            mine += self._floors(floors, rank)
        whole = (sum(c * v.proto.domain[1] for c, v in mine) for mine in ranks)
        ceiling = max(map(sum, zip(fixed, whole, strict=True)))
        least = max(0, *fixed)
        slowest = here = self.model.new_int_var(least, max(least, int(min(most, ceiling))), "")
        if self.free and most < math.inf:
            alone = max(0, *(fixed[rank] for rank in self.free))
            here = self.model.new_int_var(alone, max(least, int(most)), "")
            self.model.add(here <= slowest)
            self.here.append(here)
        for rank, mine in enumerate(ranks):
            if mine:
                limit = here if rank in self.free else slowest
                self.model.add(weighted(mine) + fixed[rank] <= limit)
        if self.proving:  # follows from the rows above, but is seen at once
            every = [term for mine in ranks for term in mine]
            self.model.add(weighted(every) + sum(fixed) <= len(ranks) * slowest)
        return slowest

    def _floors(self, floors: Array, rank: int) -> list[Term]:
        """The floors of what a rank launches."""
        return [
            (self.units(ms), self._launched(group, rank))
            for group, ms in enumerate(floors.tolist())
            if self.units(ms) > 0 and not self._launched_by_kept[group, rank]
        ]

    def _launched(self, group: int, rank: int) -> cp_model.IntVar:
        """Whether a rank has a shard of a lookup group."""
        if (group, rank) not in self._launches:
            self._launches[group, rank] = launched = self.model.new_bool_var("")
            for placed in self.placed:
                loads = self.loads[placed.option]
                # a shard may be empty
                if loads.group != group or not (loads.shards[:, Load.FORWARD_MS] > 0).all():
                    continue
                for unit in placed.units:
                    for ranks, count in unit.placed:
                        if rank in ranks:
                            self.model.add(count <= len(unit.runs) * launched)
        return self._launches[group, rank]

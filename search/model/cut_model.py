"""The time of a plan as the largest of its cycle cuts, each a sum of maxima over the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from predictor.cost.loads import Load
from predictor.model.topology import Topology
from search.model.placements import OptionVariables, PlacementModel, Term, weighted
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
        groups: lookup groups of the plan that it was found at, as it says nothing of others; none
            where it holds for all plans.
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

    Attributes:
        time: the time of the plan in `UNITS_PER_MS`.
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
        legal: Callable[[Option], AllowedPlacements] | None = None,
        numbers: Sequence[int] | None = None,
    ) -> None:
        super().__init__(topology, options, legal, numbers)
        self.loads = {placed.option: loads_of(placed.option) for placed in self.placed}
        self.kept, self.proving = kept, proving
        self.most = math.ceil(most_ms * UNITS_PER_MS)
        self.time = self.model.new_int_var(0, self.most, "")
        self._launches: dict[tuple[int, int], cp_model.IntVar] = {}
        self._launched_by_kept = kept[..., Load.SHARDS] > 0

    def units(self, ms: float) -> int:
        """A time, rounded."""
        return math.floor(ms * UNITS_PER_MS) if self.proving else round(ms * UNITS_PER_MS)

    def of_options(self, ms: Callable[[Option], float]) -> list[Term]:
        """What the options that are chosen add, whichever ranks they are on."""
        return [(self.units(ms(p.option)), x) for p in self.placed for x in p.chosen]

    def add_cut(self, cut: CycleCut) -> None:
        """No plan is faster than the cut says; one of the host alone holds for plans of at least
        the groups that it knows, whose launches it counts."""
        constant = cut.constant + float((cut.even * self.kept.mean(axis=1)).sum())

        def even(option: Option) -> float:
            loads = self.loads[option]
            return float((cut.even[loads.group] * loads.mean).sum())

        terms = [(-1, self.time), *self.of_options(even)]
        # a tangent may start below nothing, and what grows with the loads then exceeds the time
        most = self.most - min(0, self.units(constant))
        for segment, floors in zip(cut.segments, cut.floors, strict=True):
            terms.append((1, self._slowest(segment, floors, most)))
        found = self.model.add(weighted(terms) <= -self.units(constant))
        if not len(cut.segments):
            there = np.flatnonzero(self.kept.any(axis=(1, 2))).tolist()
            found.only_enforce_if(*map(self._used, cut.groups.difference(there)))

    def _used(self, group: int) -> cp_model.IntVar:
        """True where a table of the model is in a lookup group."""
        used = self.model.new_bool_var("")
        for placed in self.placed:
            if self.loads[placed.option].group == group:
                for one in placed.chosen:
                    self.model.add_implication(one, used)
        return used

    def _slowest(self, segment: Array, floors: Array, most: int) -> cp_model.IntVar:
        """What the slowest rank takes in a segment, at most so much."""

        def work(placed: OptionVariables, shard: int) -> int:
            loads = self.loads[placed.option]
            return max(0, self.units(float(segment[loads.group] @ loads.shards[shard])))

        times = np.einsum("gc,grc->r", segment, self.kept) + floors @ self._launched_by_kept
        fixed = [*map(self.units, times.tolist())]
        least = max(0, *fixed)
        slowest = self.model.new_int_var(least, max(least, most), "")
        ranks = self.per_rank(work)
        for rank, mine in enumerate(ranks):
            mine += self._floors(floors, rank)
            if mine:
                self.model.add(weighted(mine) + fixed[rank] <= slowest)
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

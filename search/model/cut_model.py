"""CP-SAT model of a plan's time: the largest of cycle cuts, each a sum of maxima over ranks."""

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
from search.model.cycle_cut import CycleCut
from search.model.placements import PlacementModel, Term, weighted
from search.space.option import AllowedPlacements, Option

Array = NDArray[np.float64]

UNITS_PER_MS = 1e5
"""Integer time units per ms: steps of 10 ns."""


@dataclass(frozen=True)
class OptionLoads:
    """Loads of an option on ranks.

    Args:
        group: lookup group, in the numbering of the cuts.
        mean: load on the mean rank, ``[COLUMNS]``.
        shards: load of every shard, ``[shards, COLUMNS]``.
    """

    group: int
    mean: Array
    shards: Array


class CutModel(PlacementModel):
    """Placement model with a time variable bounded by cuts.

    Args:
        options, legal, numbers: see `PlacementModel`.
        loads_of: returns the loads of an option.
        fixed_loads: loads of tables outside the model, ``[groups, ranks, COLUMNS]``.
        most_ms: time above which plans are excluded.
        proving: round every number so that plans only become faster; then an infeasible model
            proves that no plan exists. Otherwise round to the nearest.
        free: ranks whose time is modelled apart from the others.

    Attributes:
        time: time of the plan in `UNITS_PER_MS`.
        here: time of the slowest free rank in every segment of the unconditional cuts.
    """

    def __init__(
        self,
        topology: Topology,
        options: Sequence[Sequence[Option]],
        loads_of: Callable[[Option], OptionLoads],
        fixed_loads: Array,
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
        self.fixed_loads, self.proving, self.free = fixed_loads, proving, free
        self.most = math.ceil(most_ms * UNITS_PER_MS)
        self.time = self.model.new_int_var(0, self.most, "")
        self.here: list[cp_model.IntVar] = []
        shards = [loads.shards for loads in self.loads.values()]
        counts = [len(shard_loads) for shard_loads in shards]
        self._shards = np.concatenate(shards)
        self._groups = np.repeat([loads.group for loads in self.loads.values()], counts)
        self._first = dict(zip(self.loads, np.cumsum([0, *counts]).tolist(), strict=False))
        self._used = lru_cache(self._uses)
        self._launches: dict[tuple[int, int], cp_model.IntVar] = {}
        self._launched_by_fixed = fixed_loads[..., Load.SHARDS] > 0

    def units(self, ms: float) -> int:
        """Convert a time to integer units."""
        return math.floor(ms * UNITS_PER_MS) if self.proving else round(ms * UNITS_PER_MS)

    def of_options(self, ms: Callable[[Option], float]) -> list[Term]:
        """Return terms that sum a time over the chosen options, on whatever ranks."""
        return [(self.units(ms(p.option)), x) for p in self.placed for x in p.chosen]

    def add_cut(self, cut: CycleCut) -> None:
        """Add a cut for all plans that use its groups."""
        constant = cut.constant + float((cut.even * self.fixed_loads.mean(axis=1)).sum())

        def even(option: Option) -> float:
            loads = self.loads[option]
            return float((cut.even[loads.group] * loads.mean).sum())

        there = np.flatnonzero(self.fixed_loads.any(axis=(1, 2))).tolist()
        used = [self._used(group) for group in sorted(cut.groups.difference(there))]
        # the constant of a tangent may be negative: then its segments may exceed the time
        most = math.inf if used else self.most - min(0, self.units(constant))
        terms = [(-1, self.time), *self.of_options(even)]
        for segment, floors in zip(cut.segments, cut.floors, strict=True):
            terms.append((1, self._slowest(segment, floors, most)))
        self.model.add(weighted(terms) <= -self.units(constant)).only_enforce_if(*used)

    def _uses(self, group: int) -> cp_model.IntVar:
        """Make a variable: true if a table of the model is in a lookup group."""
        used = self.model.new_bool_var("")
        for placed in self.placed:
            if self.loads[placed.option].group == group:
                for chosen in placed.chosen:
                    self.model.add_implication(chosen, used)
        return used

    def _slowest(self, segment: Array, floors: Array, most: float) -> cp_model.IntVar:
        """Make a variable for the time of the slowest rank in a segment.

        Args:
            most: upper bound on it; infinite for a conditional cut.
        """
        ms = (self._shards * segment[self._groups]).sum(axis=1).tolist()
        work = [max(0, units) for units in map(self.units, ms)]
        times = np.einsum("gc,grc->r", segment, self.fixed_loads) + floors @ self._launched_by_fixed
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
        if self.proving:  # implied by the rows above, but speeds up propagation
            every = [term for mine in ranks for term in mine]
            self.model.add(weighted(every) + sum(fixed) <= len(ranks) * slowest)
        return slowest

    def _floors(self, floors: Array, rank: int) -> list[Term]:
        """Return the launch floors of a rank."""
        return [
            (self.units(ms), self._launched(group, rank))
            for group, ms in enumerate(floors.tolist())
            if self.units(ms) > 0 and not self._launched_by_fixed[group, rank]
        ]

    def _launched(self, group: int, rank: int) -> cp_model.IntVar:
        """Make a variable: true if a rank has a shard of a lookup group."""
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

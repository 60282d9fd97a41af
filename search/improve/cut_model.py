"""The plans that differ from a plan in what lies on a few ranks, as a model for CP-SAT."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from ortools.sat.python import cp_model

from search.improve.cycle_cuts import CycleCut
from search.in_use.moves import keep_shards_in_place
from search.objective import Assignment, Objective, apply
from search.placements import OptionVariables, PlacementModel, Term, weighted
from search.reproducible import reproducible_solver, run
from search.space.option import AllowedPlacements, Option
from search.surrogate import Surrogate

UNITS_PER_MS = 1e5
"""Times are whole steps of 10 ns."""
WORK, LEAST_WORK = 0.6, 0.1
"""Deterministic time of CP-SAT for one answer, about seconds on one core, and what one counts at
least: building the model takes time, too."""


class CutModel(PlacementModel):
    """The plans that differ from a plan in what lies on some ranks, under cycle cuts.

    Args:
        base: the plan.
        free: ranks whose tables may change.
        tables: which tables may change, of those that have shards on these ranks.
        cuts: new options are in lookup groups of which one of these knows the costs.
        wide: tables with shards on other ranks, too, may become something else.
    """

    def __init__(
        self,
        objective: Objective,
        surrogate: Surrogate,
        base: Assignment,
        free: frozenset[int],
        tables: Sequence[int],
        cuts: Sequence[CycleCut],
        *,
        wide: bool,
    ) -> None:
        self.surrogate, self.base, self.in_use = surrogate, base, objective.space.in_use
        topology, space = objective.problem.topology, objective.space
        groups = frozenset().union(*(cut.groups for cut in cuts))
        every = frozenset(range(topology.world_size))

        def options(table: int) -> list[Option]:
            """What a table may become: options whose costs some cut knows."""
            now, ranks = base[table]
            if not wide and not every.issubset(ranks) and not free.issuperset(ranks):
                return [now]
            others = (o for o in space.options[table] if o is not now)
            return [now, *(o for o in others if surrogate.shard_loads(o)[0] in groups)]

        def where(option: Option) -> AllowedPlacements:
            """Ranks that are free, and those that the table is on now."""
            legal, able = objective.legal(option), free.union(base[option.table][1])
            units = (
                tuple(a for a in some if able.issuperset(a) or every.issubset(a))
                for some in legal.units
            )
            return AllowedPlacements(tuple(units), legal.same_group)

        super().__init__(topology, [options(t) for t in tables], where, tables)
        if self.in_use is not None:
            self.limit_moves(space, len(set(self.in_use.moved(base)) - set(tables)))
        kept = [choice for t, choice in enumerate(base) if t not in set(tables)]
        self.limit_memory(objective.caps - (objective.memory(kept) if kept else 0.0))
        self.loads = surrogate.loads_on_ranks(kept)
        self.time = self.model.new_int_var(0, 1 << 40, "")
        for cut in cuts:
            self._add_cut(cut)
        self.model.minimize(self.time)

    def _add_cut(self, cut: CycleCut) -> None:
        """No plan is faster than the cut says; a cut of the host alone holds for plans of at least
        its lookup groups, whose launches it counts."""
        constant = cut.constant + float((cut.even * self.loads.mean(axis=1)).sum())
        terms: list[Term] = [(-1, self.time)]
        for placed in self.placed:
            group, loads = self.surrogate.shard_loads(placed.option)
            even = float(cut.even[group] @ loads.sum(axis=0)) / self.topology.world_size
            terms += [(round(even * UNITS_PER_MS), x) for x in placed.chosen]
        terms += [(1, self._slowest(segment)) for segment in cut.segments]
        found = self.model.add(weighted(terms) <= -round(constant * UNITS_PER_MS))
        if not len(cut.segments):
            used = [self._used(group) for group in cut.groups if not self.loads[group].any()]
            found.only_enforce_if(*used)

    def _used(self, group: int) -> cp_model.IntVar:
        """True where a table that may change is in a lookup group."""
        used = self.model.new_bool_var("")
        for placed in self.placed:
            if self.surrogate.shard_loads(placed.option)[0] == group:
                for one in placed.chosen:
                    self.model.add_implication(one, used)
        return used

    def _slowest(self, segment: np.ndarray) -> cp_model.IntVar:
        """What the slowest rank takes in a segment, with what does not change."""

        def work(placed: OptionVariables, shard: int) -> int:
            group, loads = self.surrogate.shard_loads(placed.option)
            return round(float(loads[shard] @ segment[group]) * UNITS_PER_MS)

        fixed = np.rint(np.einsum("gc,grc->r", segment, self.loads) * UNITS_PER_MS).astype(int)
        slowest = self.model.new_int_var(max(0, int(fixed.max())), 1 << 40, "")
        for ms, terms in zip(fixed.tolist(), self.per_rank(work), strict=True):
            if terms:
                self.model.add(weighted(terms) + ms <= slowest)
        return slowest

    def find(self, below_ms: float, seed: int, seconds: float) -> tuple[Assignment | None, float]:
        """A plan that all cuts say to be faster, None if none was found; and the deterministic time
        that took."""
        self.model.add(self.time <= int(below_ms * UNITS_PER_MS))
        solver = reproducible_solver(WORK, seed, seconds)
        status = run(solver, self.model)
        spent = max(LEAST_WORK, solver.response_proto.deterministic_time)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None, spent
        plan = apply(self.base, dict(zip(self.numbers, self.read(solver), strict=True)))
        return keep_shards_in_place(self.in_use, plan), spent

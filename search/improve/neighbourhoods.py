"""Large neighbourhoods: all tables of a few ranks are placed anew, with their options (CP-SAT).

A plan is as slow as the largest of its cycle cuts, each a sum of maxima over ranks
(`search.improve.cycle_cuts`). CP-SAT looks for a plan below a target under the cuts known so far,
where only the tables of a few ranks may change. What it finds is scored on the full timeline; where
that is slower than the cuts said, its own critical cycle joins them and the question is asked again
(Benders 1962; large neighbourhood search: Shaw 1998).

Why: docs/decisions/0028-plans-from-the-bound.md.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
from ortools.sat.python import cp_model

from search.improve.cycle_cuts import critical_cut
from search.in_use.moves import keep_shards_in_place
from search.model.cut_model import CutModel, CycleCut, OptionLoads
from search.objective import Assignment, Objective, apply
from search.reproducible import reproducible_solver, run
from search.space.option import AllowedPlacements, Option
from search.surrogate import Surrogate

GAIN = 1e-3
"""Share by which a plan must be faster than the best one to be looked for."""
FREE = (3, 4, 5)
"""Ranks of a neighbourhood: more where fewer gained nothing."""
TABLES = 24
"""Tables that may change at once, at most."""
CUTS = 8
"""The last so many cuts are in a model."""
WORK, LEAST_WORK = 0.6, 0.1
"""Deterministic time of CP-SAT for one answer, about seconds on one core, and what one counts at
least: building the model takes time, too."""
ASKED = 6
"""Times that one neighbourhood is asked for a faster plan."""
WIDE = 0.5
"""Share of the neighbourhoods in which tables that lie on other ranks, too, may change."""
FAILED, FAILED_OF_ALL = 16, 2
"""Neighbourhoods of one size in a row that gain nothing before they become larger; the second where
all ranks are free, so that only the tables differ."""
PATIENCE, LEAST_PATIENCE, WORTH = 0.5, 2.0, 0.002
"""It ends after this share of its work, at least so much of it, in which the plan did not become
faster by the third."""


class Neighbourhoods:
    """Improves a plan by placing anew what lies on a few ranks, again and again."""

    def __init__(self, objective: Objective, surrogate: Surrogate, seed: int) -> None:
        self.objective, self.surrogate, self.seed = objective, surrogate, seed
        self.random = random.Random(seed)
        self.world = objective.problem.topology.world_size
        for option in objective.space.every_option:  # cuts are over all lookup groups
            surrogate.shard_loads(option)
        self.cuts: list[CycleCut] = []

    def improve(
        self,
        start: Assignment,
        others: Sequence[Assignment],
        work: float,
        stop: Callable[[float], bool] = lambda best: False,
        seconds: Callable[[], float] = lambda: float("inf"),
    ) -> tuple[Assignment, float]:
        """The best plan found and its predicted time in ms.

        Args:
            start: fits, and so does the result.
            others: plans whose critical cycles are known from the start.
            work: deterministic time of CP-SAT, about seconds on one core.
            stop: asked after every one with the best time so far.
            seconds: wall time left.
        """
        best, best_ms = start, float(self.objective.score([start])[0])
        for one in (*others, best):
            self._learn(one)
        gained_ms, left, patience = best_ms, work, max(LEAST_PATIENCE, PATIENCE * work)
        sizes, failed = sorted({min(most, self.world) for most in FREE}), 0
        while left - work <= patience and work > 0 and self.cuts and sizes and not stop(best_ms):
            before = best_ms
            wide = self.random.random() < WIDE
            around = self._neighbourhood(best, sizes[0])
            for _ in range(ASKED):
                plan, spent = self.find(best, best_ms * (1 - GAIN), *around, wide, seconds())
                work -= spent
                if plan is None or not self.objective.fits(plan):
                    break
                ms = float(self.objective.score([plan])[0])
                self._learn(plan)
                if ms < best_ms:
                    best, best_ms = plan, ms
            if best_ms < gained_ms * (1 - WORTH):
                gained_ms, left = best_ms, work
            failed = 0 if best_ms < before else failed + 1
            if failed >= (FAILED if sizes[0] < self.world else FAILED_OF_ALL):
                sizes, failed = sizes[1:], 0
        return best, best_ms

    def _learn(self, plan: Assignment) -> None:
        """Add the cut of a plan."""
        cut = critical_cut(self.objective, plan)
        self.cuts = self.cuts if cut is None else [*self.cuts, cut][-CUTS:]

    def _neighbourhood(self, plan: Assignment, size: int) -> tuple[frozenset[int], list[int]]:
        """Ranks, one of them slow in some segment of the last cut that has any, and tables that lie
        there."""
        segments = next((c.segments for c in reversed(self.cuts) if len(c.segments)), None)
        if segments is None:
            first = self.random.randrange(self.world)
        else:
            times = np.einsum("sgc,grc->sr", segments, self.surrogate.loads_on_ranks(plan))
            beyond = times.max(axis=1) - times.mean(axis=1) + 1e-9
            (first,) = self.random.choices(times.argmax(axis=1).tolist(), beyond.tolist())
        others = self.random.sample([r for r in range(self.world) if r != first], size - 1)
        free = frozenset([first, *others])
        tied = {table for group in self.objective.space.co_locate for table in group}
        tables = [t for t, (_, ranks) in enumerate(plan) if t not in tied and free & set(ranks)]
        if len(tables) > TABLES:
            inside = [t for t in tables if free.issuperset(plan[t][1])]
            rest = [t for t in tables if t not in set(inside)]
            tables = self.random.sample(inside, min(len(inside), TABLES))
            tables += self.random.sample(rest, min(len(rest), TABLES - len(tables)))
        return free, sorted(tables)

    def find(
        self,
        base: Assignment,
        below_ms: float,
        free: frozenset[int],
        tables: Sequence[int],
        wide: bool,
        seconds: float,
    ) -> tuple[Assignment | None, float]:
        """A plan that all cuts say to be as fast as asked for, None if none was found; and the
        deterministic time that took.

        Args:
            base: the plan, from which the new one may differ.
            free: ranks whose tables may change.
            tables: which tables may change, of those that have shards on these ranks.
            wide: tables with shards on other ranks, too, may become something else.
            seconds: wall time left.
        """
        objective, surrogate, space = self.objective, self.surrogate, self.objective.space
        topology, every = objective.problem.topology, frozenset(range(self.world))
        groups = frozenset().union(*(cut.groups for cut in self.cuts))

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

        def loads_of(option: Option) -> OptionLoads:
            group, loads = surrogate.shard_loads(option)
            return OptionLoads(group, loads.sum(axis=0) / self.world, loads)

        kept = [choice for t, choice in enumerate(base) if t not in set(tables)]
        model = CutModel(
            topology,
            [options(table) for table in tables],
            loads_of,
            surrogate.loads_on_ranks(kept),
            below_ms,
            legal=where,
            numbers=tables,
        )
        if space.in_use is not None:
            model.limit_moves(space, len(set(space.in_use.moved(base)) - set(tables)))
        model.limit_memory(objective.caps - (objective.memory(kept) if kept else 0.0))
        for cut in self.cuts:
            model.add_cut(cut)
        model.model.minimize(model.time)
        solver = reproducible_solver(WORK, self.seed, seconds)
        status = run(solver, model.model)
        spent = max(LEAST_WORK, solver.response_proto.deterministic_time)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None, spent
        plan = apply(base, dict(zip(tables, model.read(solver), strict=True)))
        return keep_shards_in_place(space.in_use, plan), spent

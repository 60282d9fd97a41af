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
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from predictor.cost.loads import COLUMNS
from search.improve.cycle_cuts import CycleCut, critical_cut
from search.in_use.moves import keep_shards_in_place
from search.objective import Assignment, Objective, apply
from search.placements import PlacedOption, PlacementModel, Term, shard_bytes, weighted
from search.reproducible import reproducible_solver, run
from search.space.option import AllowedPlacements, Option
from search.surrogate import Surrogate

Array = NDArray[np.float64]

UNITS_PER_MS = 1e5
"""Times are whole steps of 10 ns."""
MEMORY_STEPS = 1 << 30
"""A rank's memory has this many; shards are rounded up."""
GAIN = 1e-3
"""Share by which a plan must be faster than the best one to be looked for."""
FREE = (3, 4, 5)
"""Ranks of a neighbourhood: more where fewer gained nothing."""
TABLES = 24
"""Tables that may change at once, at most."""
CUTS = 8
"""The last so many cuts are in a model."""
ASKED = 6
"""Times that one neighbourhood is asked for a faster plan."""
WORK = 0.6
"""Deterministic time of CP-SAT for one answer, about seconds on one core."""
LEAST_WORK = 0.1
"""Of an answer: building the model takes time that CP-SAT does not count."""
WIDE = 0.5
"""Share of the neighbourhoods in which tables that lie on other ranks, too, may change."""
FAILED = 16
"""Neighbourhoods of one size in a row that gain nothing before they become larger."""
FAILED_OF_ALL = 2
"""The same where all ranks are free, so that only the tables differ."""
PATIENCE, WORTH = 0.5, 0.002
"""It ends after this share of its work in which the plan did not become faster by the second."""
LEAST_PATIENCE = 2.0
"""The least deterministic time after which it ends so, however little the work."""


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
        self.objective, self.surrogate, self.wide = objective, surrogate, wide
        self.base, self.free = base, free
        self.groups = frozenset().union(*(cut.groups for cut in cuts))
        super().__init__(
            objective.problem.topology, [self._options(t) for t in tables], self._where, tables
        )
        if (limit := objective.space.in_use) is not None:
            moved = set(limit.moved(base)) - set(tables)
            self.limit_moves(objective.space, len(moved))
        kept = [choice for t, choice in enumerate(base) if t not in set(tables)]
        self._limit_memory(objective.memory(kept) if kept else np.zeros_like(objective.caps))
        self.time = self.model.new_int_var(0, 1 << 40, "")
        self.loads = np.zeros((len(objective.scorer.groups), self.topology.world_size, COLUMNS))
        for option, ranks in kept:
            group, loads = surrogate.shard_loads(option)
            np.add.at(self.loads[group], list(ranks), loads)
        for cut in cuts:
            self.add_cut(cut)
        self.model.minimize(self.time)

    def _options(self, table: int) -> list[Option]:
        """What a table may become: options whose costs some cut knows."""
        now, ranks = self.base[table]
        everywhere = len({*ranks}) == self.objective.problem.topology.world_size
        if not self.wide and not everywhere and not self.free.issuperset(ranks):
            return [now]
        return [
            option
            for option in self.objective.space.options[table]
            if option is now or self.surrogate.shard_loads(option)[0] in self.groups
        ]

    def _where(self, option: Option) -> AllowedPlacements:
        """Ranks that are free, and those that the table is on now."""
        legal = self.objective.legal(option)
        able = self.free.union(self.base[option.table][1])
        every = range(self.objective.problem.topology.world_size)
        units = tuple(
            tuple(a for a in alternatives if able.issuperset(a) or set(a).issuperset(every))
            for alternatives in legal.units
        )
        return AllowedPlacements(units, legal.same_group)

    def _limit_memory(self, kept: Array) -> None:
        for kind, caps in enumerate(self.objective.caps):
            unit = max(1.0, float(caps.max()) / MEMORY_STEPS)

            def steps(p: PlacedOption, shard: int, kind: int = kind, unit: float = unit) -> int:
                return int(np.ceil(shard_bytes(p, shard, kind) / unit))

            left = np.floor((caps - kept[kind]) / unit).astype(np.int64).tolist()
            for room, terms in zip(left, self.per_rank(steps), strict=True):
                if terms:
                    self.model.add(weighted(terms) <= room)

    def add_cut(self, cut: CycleCut) -> None:
        """No plan is faster than the cut says; a cut of the host alone holds for plans of at least
        its lookup groups, whose launches it counts."""
        world = self.topology.world_size
        constant = cut.constant + float((cut.even * self.loads.mean(axis=1)).sum())
        terms: list[Term] = [(-1, self.time)]
        for placed in self.placed:
            group, loads = self.surrogate.shard_loads(placed.option)
            even = round(float(cut.even[group] @ loads.sum(axis=0)) / world * UNITS_PER_MS)
            terms += [(even, x) for x in placed.chosen if even]
        for segment in cut.segments:
            fixed = np.rint(np.einsum("gc,grc->r", segment, self.loads) * UNITS_PER_MS)
            slowest = self._slowest(segment, fixed.astype(np.int64).tolist())
            terms.append((1, slowest))
        found = self.model.add(weighted(terms) <= -round(constant * UNITS_PER_MS))
        if not len(cut.segments):
            used = [one for one in map(self._used, cut.groups) if one is not None]
            found.only_enforce_if(*used)

    def _used(self, group: int) -> cp_model.IntVar | None:
        """True where a table that may change is in a lookup group; None if another one is."""
        if self.loads[group].any():
            return None
        used = self.model.new_bool_var("")
        for placed in self.placed:
            if self.surrogate.shard_loads(placed.option)[0] == group:
                for one in placed.chosen:
                    self.model.add_implication(one, used)
        return used

    def _slowest(self, segment: Array, fixed: Sequence[int]) -> cp_model.IntVar:
        """What the slowest rank takes in a segment."""

        def work(placed: PlacedOption, shard: int) -> int:
            group, loads = self.surrogate.shard_loads(placed.option)
            return round(float(loads[shard] @ segment[group]) * UNITS_PER_MS)

        ranks = self.per_rank(work)
        least = max((ms for ms, terms in zip(fixed, ranks, strict=True) if not terms), default=0)
        slowest = self.model.new_int_var(max(0, least), 1 << 40, "")
        for ms, terms in zip(fixed, ranks, strict=True):
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
        return keep_shards_in_place(self.objective.space.in_use, plan), spent


class Neighbourhoods:
    """Improves a plan by placing anew what lies on a few ranks, again and again."""

    def __init__(self, objective: Objective, surrogate: Surrogate, seed: int) -> None:
        self.objective, self.surrogate = objective, surrogate
        self.random = random.Random(seed)
        self.seed = seed
        self.world = objective.problem.topology.world_size
        for option in objective.space.every_option:  # cuts are over all lookup groups
            surrogate.shard_loads(option)
        self.tied = {table for group in objective.space.co_locate for table in group}

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
        cuts: list[CycleCut] = []
        for one in (*others, best):
            cuts = self._learned(cuts, one)
        gained_ms, left, patience = best_ms, work, max(LEAST_PATIENCE, PATIENCE * work)
        sizes, failed = sorted({min(most, self.world) for most in FREE}), 0
        while work > 0 and cuts and sizes and not stop(best_ms):
            before = best_ms
            wide = self.random.random() < WIDE
            free, tables = self._neighbourhood(best, cuts, sizes[0])
            for _ in range(ASKED):
                model = CutModel(
                    self.objective, self.surrogate, best, free, tables, cuts, wide=wide
                )
                plan, spent = model.find(best_ms * (1 - GAIN), self.seed, seconds())
                work -= spent
                if plan is None or not self.objective.fits(plan):
                    break
                ms = float(self.objective.score([plan])[0])
                cuts = self._learned(cuts, plan)
                if ms < best_ms:
                    best, best_ms = plan, ms
            if best_ms < gained_ms * (1 - WORTH):
                gained_ms, left = best_ms, work
            if left - work > patience:
                break
            failed = 0 if best_ms < before else failed + 1
            if failed >= (FAILED if sizes[0] < self.world else FAILED_OF_ALL):
                sizes, failed = sizes[1:], 0
        return best, best_ms

    def _learned(self, cuts: Sequence[CycleCut], plan: Assignment) -> list[CycleCut]:
        """The cuts with that of a plan."""
        cut = critical_cut(self.objective, plan)
        return [*cuts, cut][-CUTS:] if cut is not None else [*cuts]

    def _neighbourhood(
        self, plan: Assignment, cuts: Sequence[CycleCut], size: int
    ) -> tuple[frozenset[int], list[int]]:
        """Ranks, one of them slow in some segment of the last cut that has any, and tables that lie
        there."""
        loads = np.zeros((len(self.objective.scorer.groups), self.world, COLUMNS))
        for option, ranks in plan:
            group, mine = self.surrogate.shard_loads(option)
            np.add.at(loads[group], list(ranks), mine)
        segments = next((c.segments for c in reversed(cuts) if len(c.segments)), None)
        if segments is None:
            first = self.random.randrange(self.world)
        else:
            times = np.einsum("sgc,grc->sr", segments, loads)
            slow = times.argmax(axis=1)
            spread = times.max(axis=1) - times.mean(axis=1)
            first = self.random.choices(slow.tolist(), (spread + 1e-9).tolist())[0]
        others = self.random.sample([r for r in range(self.world) if r != first], size - 1)
        free = frozenset([first, *others])
        tables = [
            t
            for t, (_, ranks) in enumerate(plan)
            if t not in self.tied and not free.isdisjoint(ranks)
        ]
        if len(tables) > TABLES:
            inside = [t for t in tables if free.issuperset(plan[t][1])]
            rest = [t for t in tables if t not in set(inside)]
            tables = self.random.sample(inside, min(len(inside), TABLES))
            tables += self.random.sample(rest, min(len(rest), TABLES - len(tables)))
        return free, sorted(tables)

"""Large neighbourhoods: all tables of a few ranks are placed anew, with their options (CP-SAT).

A plan is as slow as the largest of its cycle cuts, each a sum of maxima over ranks
(`search.improve.cycle_cuts`). CP-SAT minimises the time under the cuts known so far, where only
tables of a few ranks may change. What it finds is scored on the full timeline, and its critical
cycle joins the cuts (Benders 1962; large neighbourhood search: Shaw 1998).

Where several ranks are equally slow, no change to a few of them makes the plan faster. So what the
slowest of the free ranks takes is minimised, too, and the search also goes on from plans that are a
little slower than the best one (record-to-record travel: Dueck 1993).

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

SLOWER = 0.03
"""Share by which a plan may be slower than the best one to go on from."""
FREE = (2, 3, 4, 5)
"""Ranks of a neighbourhood."""
TABLES = (4, 24)
"""Least and most tables that may change at once: CP-SAT is not done with many where memory is full,
and few cannot change much where it is not."""
CUTS, OTHER_CUTS = 8, 3
"""So many cuts are in a model: the last ones of plans with the same exchanges, and with others."""
TIME = 10
"""Weight of the time, against the mean over the cuts of what the free ranks take."""
WORK, BUILDING = 0.3, 0.1
"""Deterministic time of CP-SAT for one answer, about seconds on one core, and what building the
model counts as."""
WIDE = 0.5
"""Share of the neighbourhoods in which tables that lie on other ranks, too, may change."""
JOINED = 0.5
"""Share in which tables may join an exchange that the plan does not have."""


class Neighbourhoods:
    """Improves a plan by placing anew what lies on a few ranks, again and again."""

    def __init__(self, objective: Objective, surrogate: Surrogate, seed: int) -> None:
        self.objective, self.surrogate, self.seed = objective, surrogate, seed
        self.random = random.Random(seed)
        self.world = objective.problem.topology.world_size
        self.groups = {self.surrogate.shard_loads(o)[0] for o in objective.space.every_option}
        self.cuts: dict[frozenset[int], list[CycleCut]] = {}

    def improve(
        self,
        start: Assignment,
        work: float,
        stop: Callable[[float], bool] = lambda best: False,
        seconds: Callable[[], float] = lambda: float("inf"),
    ) -> tuple[Assignment, float]:
        """The best plan found and its predicted time in ms.

        Args:
            start: fits, and so does the result.
            work: deterministic time of CP-SAT, about seconds on one core.
            stop: asked after every one with the best time so far.
            seconds: wall time left.
        """
        now = best = start
        best_ms = float(self.objective.score([start])[0])
        self._learn(start)
        within = self.objective.beside(start)
        while work > 0 and self.cuts and not stop(best_ms):
            limit_ms = best_ms * (1 + SLOWER)
            plan, spent = self.find(now, limit_ms, *self._neighbourhood(now), seconds(), within)
            work -= spent
            if plan is None or plan == now or not self.objective.fits(plan):
                continue
            self._learn(plan)
            ms = float(self.objective.score([plan])[0])
            if ms <= limit_ms:
                now = plan
            if ms < best_ms:
                best, best_ms = plan, ms
        return best, best_ms

    def _learn(self, plan: Assignment) -> None:
        """Add the cut of a plan."""
        cut = critical_cut(self.objective, plan)
        if cut is not None:
            self.cuts[cut.groups] = [*self.cuts.get(cut.groups, []), cut][-CUTS:]

    def _groups_of(self, plan: Assignment) -> frozenset[int]:
        """The lookup groups of a plan."""
        return frozenset(self.surrogate.shard_loads(option)[0] for option, _ in plan)

    def _neighbourhood(self, plan: Assignment) -> tuple[frozenset[int], list[int]]:
        """Ranks, one of them slow in some segment of the plan's last cut, and tables that lie
        there."""
        cuts = self.cuts.get(self._groups_of(plan), [])
        if not cuts or not len(cuts[-1].segments):
            first = self.random.randrange(self.world)
        else:
            times = np.einsum("sgc,grc->sr", cuts[-1].segments, self.surrogate.loads_on_ranks(plan))
            beyond = times.max(axis=1) - times.mean(axis=1) + 1e-9
            (first,) = self.random.choices(times.argmax(axis=1).tolist(), beyond.tolist())
        size = min(self.random.choice(FREE), self.world)
        others = self.random.sample([r for r in range(self.world) if r != first], size - 1)
        free = frozenset([first, *others])
        tied = {table for group in self.objective.space.co_locate for table in group}
        tables = [t for t, (_, ranks) in enumerate(plan) if t not in tied and free & set(ranks)]
        self.random.shuffle(tables)
        tables.sort(key=lambda table: not free.issuperset(plan[table][1]))
        return free, sorted(tables[: self.random.randint(*TABLES)])

    def find(
        self,
        base: Assignment,
        below_ms: float,
        free: frozenset[int],
        tables: Sequence[int],
        seconds: float,
        within: Objective | None = None,
    ) -> tuple[Assignment | None, float]:
        """The best plan under the cuts, None if none was found that is as fast as asked for; and
        the deterministic time that took.

        Args:
            base: the plan, from which the new one may differ.
            free: ranks whose tables may change.
            tables: which tables may change, of those that have shards on these ranks.
            seconds: wall time left.
            within: counts the bytes that shards are placed within; as the plan's own if None.
        """
        objective, surrogate = self.objective, self.surrogate
        space = objective.space.beside([option for option, _ in base])
        counted = within or objective
        topology, every = objective.problem.topology, frozenset(range(self.world))
        own, wide = self._groups_of(base), self.random.random() < WIDE
        groups, rest = own, sorted(self.groups - own)
        if rest and self.random.random() < JOINED:
            groups |= {self.random.choice(rest)}
        cuts: list[CycleCut] = []
        for used, known in self.cuts.items():
            if used <= groups:
                cuts += known[-(CUTS if used == own else OTHER_CUTS) :]
        if not cuts or not tables:
            return None, BUILDING

        def options(table: int) -> list[Option]:
            """What a table may become."""
            now, ranks = base[table]
            if not wide and not every.issubset(ranks) and not free.issuperset(ranks):
                return [now]
            others = (o for o in space.options[table] if o is not now)
            return [now, *(o for o in others if surrogate.shard_loads(o)[0] in groups)]

        def where(option: Option) -> AllowedPlacements:
            """Ranks that are free, those that the table is on now, and whole hosts."""
            legal, able = objective.legal(option), free.union(base[option.table][1])
            units = (
                tuple(a for a in some if able.issuperset(a) or len(a) > 1) for some in legal.units
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
            free=free,
            legal=where,
            numbers=tables,
            bytes_of=counted.bytes_of,
        )
        if space.in_use is not None:
            model.limit_moves(space, len(set(space.in_use.moved(base)) - set(tables)))
        model.limit_memory(counted.caps - (counted.memory(kept) if kept else 0.0))
        for cut in cuts:
            model.add_cut(cut)
        model.model.minimize(TIME * len(cuts) * model.time + sum(model.here))
        solver = reproducible_solver(WORK, self.seed, seconds)
        status = run(solver, model.model)
        spent = BUILDING + solver.response_proto.deterministic_time
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None, spent
        plan = apply(base, dict(zip(tables, model.read(solver), strict=True)))
        return keep_shards_in_place(space.in_use, plan), spent

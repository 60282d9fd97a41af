"""Large neighbourhood search with CP-SAT: the tables of a few ranks are re-optimised.

CP-SAT minimises the time of a plan under the cycle cuts known so far, where only tables of a few
ranks may change. Its plan is scored on the full timeline, and its critical cycle joins the cuts
(Benders 1962; large neighbourhood search: Shaw 1998). The time of the slowest free rank is
minimised, too, and the search also continues from plans that are a little slower than the best
one (record-to-record travel: Dueck 1993).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from ortools.sat.python import cp_model

from search.candidate import Candidate
from search.improve.cycle_cuts import critical_cut
from search.in_use.moves import keep_shards_in_place
from search.model.cut_model import CutModel, OptionLoads
from search.model.cycle_cut import CycleCut
from search.objective import Assignment, Objective, apply
from search.propose.rescue import rescue
from search.reproducible import reproducible_solver, run
from search.space.option import AllowedPlacements, Option
from search.state import State
from search.surrogate import Surrogate

SLOWER = 0.03
"""Fraction by which a plan may be slower than the best one to continue from it."""
FREE, TABLES = (2, 5), (4, 24)
"""Range of ranks and of tables in a neighbourhood: CP-SAT cannot finish large ones where memory is
full, and small ones change little where it is not."""
CUTS = 8
"""Number of cuts in a model: the latest ones whose exchanges its plans have."""
TIME = 10
"""Weight of the iteration time against the mean time of the free ranks over the cuts."""
WORK, BUILDING = 0.3, 0.1
"""Deterministic time of one CP-SAT solve, about seconds on one core, and the time counted for
building its model."""


def propose_by_cpsat(state: State) -> Iterator[Candidate]:
    """Improve the best plan, or any that fits, by large neighbourhood search.

    Large problems are skipped: their models would not be solved.
    """
    tools = state.tools
    starts = list(state.incumbents[:1]) or rescue(tools)[0][:1]
    time_is_up = tools.stop.part(tools.params.annealing_time)
    for start in starts if not tools.is_large else ():
        yield start
        plan, ms = Neighbourhoods(tools.objective, tools.surrogate, tools.seed).improve(
            start.assignment,
            tools.params.cpsat_work,
            lambda best: tools.stop.reached(best, state.proven_ms) or time_is_up(),
            lambda: tools.stop.remaining_s,
        )
        yield Candidate(plan, ms, "cpsat")


class Neighbourhoods:
    """Large neighbourhood search around a plan."""

    def __init__(self, objective: Objective, surrogate: Surrogate, seed: int) -> None:
        self.objective, self.surrogate, self.seed = objective, surrogate, seed
        self.random = random.Random(seed)
        self.world = objective.problem.topology.world_size
        self.groups = sorted({surrogate.group(o) for o in objective.space.every_option})

    def improve(
        self,
        start: Assignment,
        work: float,
        stop: Callable[[float], bool] = lambda best: False,
        seconds: Callable[[], float] = lambda: float("inf"),
    ) -> tuple[Assignment, float]:
        """Return the best plan found and its predicted time in ms.

        Args:
            start: plan that fits; the result fits, too.
            work: deterministic time of CP-SAT, about seconds on one core.
            stop: called after every neighbourhood with the best time so far.
            seconds: returns the wall time left.
        """
        now = best = start
        best_ms = float(self.objective.score([start])[0])
        cuts = [cut for cut in [critical_cut(self.surrogate, start)] if cut is not None]
        within = self.objective.beside(start)
        while work > 0 and cuts and not stop(best_ms):
            limit_ms = best_ms * (1 + SLOWER)
            near = self._neighbourhood(now, cuts[-1])
            plan, spent = self.find(now, cuts, limit_ms, *near, seconds(), within)
            work -= spent
            if plan is None or plan == now or not self.objective.fits(plan):
                continue
            ms, cut = float(self.objective.score([plan])[0]), critical_cut(self.surrogate, plan)
            cuts += [cut] if cut is not None else []
            if ms <= limit_ms:
                now = plan
            if ms < best_ms:
                best, best_ms = plan, ms
        return best, best_ms

    def _neighbourhood(self, plan: Assignment, cut: CycleCut) -> tuple[frozenset[int], list[int]]:
        """Draw ranks, one of them slowest in some segment of a cut, and tables on them."""
        times = np.einsum("sgc,grc->sr", cut.segments, self.surrogate.loads_on_ranks(plan))
        slow = times.argmax(axis=1).tolist() or range(self.world)
        first, size = self.random.choice(slow), min(self.random.randint(*FREE), self.world)
        other_ranks = self.random.sample([r for r in range(self.world) if r != first], size - 1)
        free = frozenset([first, *other_ranks])
        tied = {table for group in self.objective.space.co_locate for table in group}
        tables = [t for t, (_, ranks) in enumerate(plan) if t not in tied and free & set(ranks)]
        self.random.shuffle(tables)
        tables.sort(key=lambda table: not free.issuperset(plan[table][1]))
        return free, sorted(tables[: self.random.randint(*TABLES)])

    def find(
        self,
        base: Assignment,
        cycle_cuts: Sequence[CycleCut],
        below_ms: float,
        free: frozenset[int],
        tables: Sequence[int],
        seconds: float,
        within: Objective,
    ) -> tuple[Assignment | None, float]:
        """Solve one neighbourhood.

        Args:
            base: plan to start from.
            cycle_cuts: cuts known so far.
            below_ms: time that the plan must not exceed.
            free: ranks whose tables may change.
            tables: tables with shards on these ranks that may change.
            seconds: wall time left.
            within: objective with the memory limits of shards.

        Returns:
            The best plan under the cuts, None if none is fast enough; the deterministic time spent.
        """
        objective, group_of = self.objective, self.surrogate.group
        space = objective.space.beside([option for option, _ in base])
        groups = {group_of(option) for option, _ in base} | {self.random.choice(self.groups)}
        cuts = [cut for cut in cycle_cuts if cut.groups <= groups][-CUTS:]
        if not cuts or not tables:
            return None, BUILDING

        def where(option: Option) -> AllowedPlacements:
            """Return placements on free ranks, on the table's present ranks, and on whole hosts."""
            legal, ranks = objective.legal(option), free.union(base[option.table][1])
            units = [[a for a in u if ranks.issuperset(a) or len(a) > 1] for u in legal.units]
            return AllowedPlacements(tuple(map(tuple, units)), legal.same_group)

        def loads_of(option: Option) -> OptionLoads:
            group, loads = self.surrogate.shard_loads(option)
            return OptionLoads(group, loads.sum(axis=0) / self.world, loads)

        offered = [[o for o in space.options[t] if group_of(o) in groups] for t in tables]
        fixed = [choice for t, choice in enumerate(base) if t not in set(tables)]
        model = CutModel(
            objective.problem.topology,
            [list(dict.fromkeys([base[t][0], *o])) for t, o in zip(tables, offered, strict=True)],
            loads_of,
            self.surrogate.loads_on_ranks(fixed),
            below_ms,
            free=free,
            legal=where,
            numbers=tables,
            bytes_of=within.bytes_of,
        )
        if space.in_use is not None:
            model.limit_moves(space, len(set(space.in_use.moved(base)) - set(tables)))
        model.limit_memory(within.caps - (within.memory(fixed) if fixed else 0.0))
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

"""The same kind of search on TorchRec's estimate: the costliest rank is as cheap as possible.

TorchRec rates a plan by the largest sum of shard costs on a rank. Beside TorchRec's planner, which
minimises the same number, this tells what better search is worth; the rest of what shardopt's plans
gain comes from its predictor. The steps:

bound    the smallest rating that memory and options do not rule out   (lab.planners.additive_bound)
options  the bound's own at targets just above it; TorchRec's, which start it warm
ranks    greedy, then moves and swaps of shards                        (search.improve.balance)
tables   on the costliest ranks come back under other options
(lab.planners.additive_moves)

Why: docs/decisions/0026.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lab.planners.additive_bound import AdditiveBound, stack_options
from lab.planners.additive_moves import Array, TableMover
from lab.planners.torchrec_objective import TorchRecObjective
from predictor.model.plan import ShardingPlan
from search.baselines.torchrec_planner import torchrec_plan
from search.improve.balance import Balancer
from search.infeasible import missing_memory
from search.objective import Assignment, Objective
from search.partitioner import GreedyPartitioner
from search.problem import Problem
from search.propose.cpsat import CpSat
from search.propose.feasibility import find_feasible
from search.space.enumerate import enumerate_space
from search.space.filters import prune
from search.space.option import Option, Space
from search.stop import Stop
from search.surrogate import FORWARD, PHASES, Surrogate

TARGETS = (1.0, 1.003, 1.01, 1.03, 1.1, 1.3)
"""Ratings aimed at, over the bound."""
PRESSURES = (1.0, 1.02, 1.1, 1.5)
"""Divisors of the memory that options may take: what fits in total may not fit rank by rank."""
LARGEST = (1.0, 0.5, 0.25, 0.1)
"""Shares of a rank's memory that a shard may take: small shards fit where large ones do not."""
NEAR = 1.02
"""Rating over the bound at which no more starts are tried."""
STARTS = 3
RESTARTS = 2
"""Of `search.improve.balance`, for each of the starts."""
PUTS = 40_000
"""Tables put back at effort 1, shared by descents and shaken starts."""
PUTS_SIZE = 2_000
"""Tables times ranks up to which all of `PUTS` are spent; beyond, each takes longer."""
BALANCE_PUTS = 100
"""What balancing an assignment counts as."""
SHAKEN = (2, 5)
"""Tables that leave their ranks at once, at least and at most."""
CPSAT_WORK = 0.6
"""Deterministic time of CP-SAT at effort 1, about seconds on one core."""
WIDE = 0.01
"""A relative gap above which CP-SAT is asked, too: memory is tight, or tables are few."""
FEASIBILITY_WORK = 10.0
CLOSED = 1e-4
"""A relative gap below which nothing more is tried: the precision of the bound."""


@dataclass(frozen=True)
class AdditivePlan:
    """What came out.

    Args:
        plan: as it would be loaded.
        assignment: the same; options carry their memory as TorchRec counts it.
        rating_ms: the largest sum of shard costs on a rank, which is no iteration time.
        lower_bound_ms: no plan of these options that fits has a smaller one.
        found_by: the start that led to it.
    """

    plan: ShardingPlan
    assignment: Assignment
    rating_ms: float
    lower_bound_ms: float
    found_by: str


def solve_additive(
    problem: Problem, stop: Stop, seed: int, *, extended: bool = True
) -> AdditivePlan:
    """Minimise TorchRec's rating under TorchRec's count of memory.

    Args:
        extended: also the options that shardopt adds; without it, TorchRec's alone.

    Raises:
        InfeasibleError: no plan fits, or a table has no option left.
    """
    return _Search(problem, stop, seed, extended).best()


class _Rated(Surrogate):
    """A surrogate with one phase, TorchRec's cost, so that placer and balancer minimise that."""

    def __init__(self, objective: Objective, torchrec: TorchRecObjective) -> None:
        super().__init__(objective)
        self.torchrec = torchrec

    def exchange(self, option: Option) -> tuple[str, str]:
        """All in one."""
        return ("", "")

    def fixed_ms(self, option: Option) -> float:
        """TorchRec's cost has none."""
        return 0.0

    def _constant_ms(self, option: Option) -> float:
        return 0.0

    def _phases(self, option: Option) -> Array:
        found = np.zeros((option.num_shards, PHASES))
        found[:, FORWARD] = self.torchrec.cost_ms(option)
        return found


class _Search:
    def __init__(self, problem: Problem, stop: Stop, seed: int, extended: bool) -> None:
        self.stop, self.seed = stop, seed
        workload, topology = problem.workload, problem.topology
        device = problem.hardware.device
        torchrec = TorchRecObjective(workload, topology, device)
        space = enumerate_space(workload, topology, device, extended=extended)
        space = torchrec.with_torchrec_memory(space)
        self.space: Space = prune(space, topology)
        self.objective = Objective(problem, self.space)
        self.rated = _Rated(self.objective, torchrec)
        self.torchrec = torchrec
        costs = [[torchrec.cost_ms(o) for o in options] for options in self.space.options]
        memory = [
            [np.array([(m.hbm_bytes, m.ddr_bytes) for m in o.memory], dtype=float) for o in options]
            for options in self.space.options
        ]
        self.flat = [option for options in self.space.options for option in options]
        self.bound = AdditiveBound(
            stack_options(costs, memory, self.objective.caps), topology.world_size
        )
        self.placer = GreedyPartitioner(self.objective, self.rated)
        self.balancer = Balancer(self.objective, self.rated)
        self.mover = TableMover(self.objective, costs)

    def best(self) -> AdditivePlan:
        """The best plan of all starts."""
        lower = self.bound.lower_bound_ms()
        distinct = {plan: name for name, plan in self._starts(lower)}
        starts = sorted(distinct, key=self.mover.rating_ms)[:STARTS]
        found: list[tuple[float, str, Assignment]] = []
        for index, plan in enumerate(starts):
            better = self._improve(plan, lower, index, len(starts))
            found.append((self.mover.rating_ms(better), distinct[plan], better))
            if self._done(found[-1][0], lower):
                break
        rating, name, best = min(found, key=lambda one: one[0])
        if rating > lower * (1 + WIDE) and not self.stop.reached():
            better = self._improve(self._exact(best, rating), lower, STARTS, STARTS)
            if self.mover.rating_ms(better) < rating:
                rating, name, best = self.mover.rating_ms(better), "cpsat", better
        return AdditivePlan(self.objective.sharding_plan(best), best, rating, lower, name)

    def _starts(self, lower: float) -> Iterator[tuple[str, Assignment]]:
        """Plans that fit, at least one."""
        none = True
        for name, plan in (*self._picked(lower), ("torchrec", self._torchrec())):
            if plan is not None:
                none = False
                yield name, plan
            if self.stop.reached():
                break
        if none:
            work = FEASIBILITY_WORK * max(1.0, self.stop.effort)
            left = max(1.0, self.stop.remaining_s)
            found = find_feasible(self.objective, work, self.seed, left)
            if found.assignment is None:
                raise missing_memory(self.objective, found)
            yield "feasibility", found.assignment

    def _picked(self, lower: float) -> Iterator[tuple[str, Assignment | None]]:
        """The options of the bound, placed, at a few targets; with smaller shards, too, unless
        that comes near the bound."""
        best = math.inf
        for largest, target in itertools.product(LARGEST, TARGETS):
            if best <= lower * NEAR:
                return
            plan = None
            for pressure in PRESSURES:
                picked = self.bound.pick(target * lower, pressure, largest).options
                plan = self.placer.place_all([self.flat[i] for i in picked.tolist()])
                if plan is not None or self.stop.reached():
                    break
            if plan is not None:
                best = min(best, self.mover.rating_ms(plan))
            yield f"target {target:g}", plan

    def _torchrec(self) -> Assignment | None:
        """What TorchRec's default planner answers, with the options of this space."""
        problem = self.objective.problem
        device = problem.hardware.device
        theirs = torchrec_plan(problem.workload, problem.topology, device)
        if theirs is None:
            return None
        named = [self.space.option_of(t, plan) for t, plan in enumerate(theirs.tables)]
        found = tuple(
            (option, plan.ranks)
            for option, plan in zip(named, theirs.tables, strict=True)
            if option is not None
        )
        topology = problem.topology
        legal = all(option.is_legal(ranks, topology) for option, ranks in found)
        whole = len(found) == len(theirs.tables) and legal and self.objective.fits(found)
        return found if whole else None

    def _exact(self, best: Assignment, rating: float) -> Assignment:
        """CP-SAT's joint choice of options and ranks, where the model is not too large."""
        # an option with a shard as costly as all of a rank now is in no better plan
        options = [
            [o for o in options if self.torchrec.cost_ms(o) < rating or o is mine]
            for options, (mine, _) in zip(self.space.options, best, strict=True)
        ]
        work, left = CPSAT_WORK * self.stop.effort, self.stop.remaining_s
        solver = CpSat(self.objective, self.rated)
        found = solver.solve(options, work, self.seed, best, time_limit_s=left)
        return best if found is None else found.assignment

    def _improve(self, plan: Assignment, lower: float, index: int, share: int) -> Assignment:
        """Descend, then shake and descend again while puts are left.

        Args:
            index: of the start, so that no two are shaken alike; ``share`` of them have the puts.
        """
        size = len(plan) * self.objective.problem.topology.world_size
        left = self.stop.work(round(PUTS / share * min(1.0, PUTS_SIZE / size)))
        rng = random.Random(f"{self.seed} {index}")
        best, spent = self._descended(plan, left)
        rating = self.mover.rating_ms(best)
        left -= spent
        while left > 0 and not self._done(rating, lower):
            count = rng.randint(*SHAKEN)
            shaken = self.mover.shake(best, rng, count)
            left -= count
            if shaken is None:
                continue
            found, spent = self._descended(shaken, left)
            left -= spent
            if (now := self.mover.rating_ms(found)) < rating:
                best, rating = found, now
        return best

    def _descended(self, plan: Assignment, steps: int) -> tuple[Assignment, int]:
        balanced = self.balancer.balance(plan, self.seed, RESTARTS).assignment
        moved, spent = self.mover.descend(balanced, steps)
        again = self.balancer.balance(moved, self.seed, 0).assignment
        # the 16-norm that both minimise may fall while the maximum rises
        return min((moved, again, plan), key=self.mover.rating_ms), spent + BALANCE_PUTS

    def _done(self, rating: float, lower: float) -> bool:
        return self.stop.reached() or rating <= lower * (1 + CLOSED)

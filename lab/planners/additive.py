"""A search of our kind on TorchRec's estimate: it minimises the costliest rank.

TorchRec rates a plan by the largest sum of shard costs on a rank. Beside TorchRec's planner, which
minimises the same number, this shows the value of better search; the rest of the gain of shardopt's
plans comes from its predictor. The steps:

bound    smallest rating that memory and options do not rule out
options  those that the bound picks at targets just above it; TorchRec's plan as a warm start
ranks    greedy, then moves and swaps of shards                        (lab.planners.balance)
tables   those of the costliest rank get other options
both     jointly, by CP-SAT, where the model is not too large

Why: docs/decisions/0033-baselines.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from lab.planners.balance import balance
from lab.planners.published import TorchRecObjective
from predictor.model.plan import ShardingPlan
from search.baselines.torchrec_planner import torchrec_plan
from search.feasibility import find_feasible, model_size
from search.infeasible import missing_memory
from search.model.placements import PlacementModel, weighted
from search.objective import Assignment, Objective
from search.partitioner import GreedyPartitioner
from search.problem import Problem
from search.reproducible import reproducible_solver, run
from search.space.enumerate import enumerate_space
from search.space.filters import prune
from search.space.option import Choice, Option, Space
from search.stop import Stop
from search.surrogate import FORWARD, PHASES, Surrogate

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

PRECISION = 1e-4
"""Relative width at which the bisection for the rating ends; the bound is its lower end."""
PRICE_STEPS = 24
ROUNDS = 2
"""Rounds in which the dual prices of HBM and host memory are set in turn."""
MAX_PRICE = 2.0**40


@dataclass(frozen=True)
class OptionArrays:
    """Options of all tables, one after another.

    Args:
        cost: of each shard of an option in ms, ``[options]``.
        total: of all of its shards.
        memory: of all of its shards over what all ranks have, ``[options, hbm or ddr]``.
        largest: bytes of the largest shard over the largest rank's, the larger of both kinds.
        starts: first option of every table.
    """

    cost: Array
    total: Array
    memory: Array
    largest: Array
    starts: Ints


class AdditiveBound:
    """Lower bound on the rating, and the options behind it, for ``world`` ranks."""

    def __init__(self, items: OptionArrays, world: int) -> None:
        self.items = items
        self.world = world

    def lower_bound_ms(self) -> float:
        """Return a rating in ms that no plan undercuts."""
        least = float(np.maximum.reduce(np.minimum.reduceat(self.items.cost, self.items.starts)))
        low, high = least, least
        while self._refuted(high):
            low, high = high, 2 * high
            if high > MAX_PRICE * least:
                return low  # the tables do not fit together: any value is a bound
        while high - low > PRECISION * high:
            middle = (low + high) / 2
            low, high = (middle, high) if self._refuted(middle) else (low, middle)
        return low

    def _refuted(self, target: float) -> bool:
        _, total_ms = self.pick(target)
        return total_ms > self.world * target * (1 + 1e-12)

    def pick(
        self, target: float, pressure: float = 1.0, largest: float = 1.0
    ) -> tuple[Ints, float]:
        """Return the options of least cost plus memory price whose shards cost at most ``target``.

        The result is the option of every table in `OptionArrays`, and a lower bound on the total
        cost in ms.

        Args:
            target: at least every table's cheapest shard.
            pressure: divisor of all memory; above 1 the picks leave room, and the total is no
                bound.
            largest: share of a rank's memory that a shard may take, where the table has such an
                option; below 1, the total is no bound.
        """
        allowed = np.where(self.items.cost <= target, 0.0, np.inf)
        small = np.where(self.items.largest <= largest, allowed, np.inf)
        best = np.minimum.reduceat(small, self.items.starts)
        sizes = np.diff(np.append(self.items.starts, len(small)))
        allowed = np.where(np.isfinite(np.repeat(best, sizes)), small, allowed)
        total, room = self.items.total + allowed, 1.0 / pressure
        prices = np.zeros(2)
        for _ in range(ROUNDS):
            for kind in range(2):
                prices[kind] = self._price(total, prices, kind, room)
        options, value = self._least(total, prices)
        return options, value - float(prices.sum()) * room

    def _price(self, total: Array, prices: Array, kind: int, room: float) -> float:
        """Return the smallest dual price of one kind of memory at which the picks fit."""
        low, high = 0.0, float(np.mean(self.items.total))
        trial = prices.copy()

        def fits(price: float) -> bool:
            trial[kind] = price
            options, _ = self._least(total, trial)
            return bool(self.items.memory[options, kind].sum() <= room)

        if fits(0.0):
            return 0.0
        while not fits(high):
            low, high = high, 4 * high
            if high > MAX_PRICE:
                return high
        for _ in range(PRICE_STEPS):
            middle = (low + high) / 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        return high

    def _least(self, total: Array, prices: Array) -> tuple[Ints, float]:
        """Return the cheapest option of every table at these dual prices, and the sum."""
        priced = total + self.items.memory @ prices
        least = np.minimum.reduceat(priced, self.items.starts)
        sizes = np.diff(np.append(self.items.starts, len(priced)))
        first = np.flatnonzero(priced == np.repeat(least, sizes))
        table = np.searchsorted(self.items.starts, first, side="right") - 1
        _, where = np.unique(table, return_index=True)
        return first[where], float(least.sum())


def stack_options(
    costs: Sequence[Sequence[float]], memory: Sequence[Sequence[Array]], caps: Array
) -> OptionArrays:
    """Return the options as arrays.

    Args:
        costs: of each shard of every option, a list a table.
        memory: bytes of every shard, ``[shards, hbm or ddr]``, likewise.
        caps: bytes ``[hbm or ddr, ranks]``.
    """
    everything = np.maximum(caps.sum(axis=1), 1.0)
    flat = [m for table in memory for m in table]
    cost = np.array([c for table in costs for c in table])
    counts = np.array([len(m) for m in flat])
    sums = np.array([m.sum(axis=0) for m in flat]) / everything
    widest = np.maximum(caps.max(axis=1), 1.0)
    largest = np.array([(m / widest).max() for m in flat])
    starts = np.cumsum([0, *map(len, costs)])[:-1]
    return OptionArrays(cost, cost * counts, sums, largest, starts.astype(np.int64))


NORM = 16
GAIN = 1e-9
"""Relative gain below which a change does not count."""
TARGETS = (1.0, 1.003, 1.01, 1.03, 1.1, 1.3)
"""Target ratings over the bound."""
PRESSURES = (1.0, 1.02, 1.1, 1.5)
"""Divisors of total memory: options that fit in total may not fit rank by rank."""
LARGEST = (1.0, 0.5, 0.25, 0.1)
"""Shares of a rank's memory that a shard may take: small shards fit where large ones do not."""
NEAR = 1.02
"""Rating over the bound below which no more starts are tried."""
STARTS = 3
PUTS = 10_000
"""Tables put back in a descent at effort 1."""
WIDE = 0.01
"""Relative gap above which CP-SAT runs too: memory is tight, or tables are few."""
CPSAT_WORK = 0.6
"""Deterministic time of CP-SAT at effort 1, about seconds on one core."""
MAX_VARIABLES = 40_000
"""Limit for CP-SAT: larger models do not improve on their hint in a reasonable budget."""
UNITS_PER_MS = 1e5
"""Time resolution of the integer model: 10 ns."""
FEASIBILITY_WORK = 10.0


@dataclass(frozen=True)
class AdditivePlan:
    """Plan of least rating, with its bound.

    Args:
        plan: as a plan file holds it.
        assignment: the same plan; its options carry TorchRec's count of memory.
        rating_ms: the largest sum of shard costs on a rank; not an iteration time.
        lower_bound_ms: no plan of these options that fits has a smaller rating.
    """

    plan: ShardingPlan
    assignment: Assignment
    rating_ms: float
    lower_bound_ms: float


def solve_additive(
    problem: Problem, stop: Stop, seed: int, *, extended: bool = True
) -> AdditivePlan:
    """Minimise TorchRec's rating under TorchRec's count of memory.

    Args:
        extended: also use the options that shardopt adds to TorchRec's.

    Raises:
        InfeasibleError: no plan fits, or a table has no option left.
    """
    return _Search(problem, stop, seed, extended).best()


class _Rated(Surrogate):
    """Surrogate with TorchRec's cost as its only phase, for placer and balancer to minimise."""

    def __init__(self, objective: Objective, torchrec: TorchRecObjective) -> None:
        super().__init__(objective)
        self.torchrec = torchrec

    def exchange(self, option: Option) -> tuple[str, str]:
        """Return one exchange for all options."""
        return ("", "")

    def phases(self, option: Option) -> Array:
        phases = np.zeros((option.num_shards, PHASES))
        phases[:, FORWARD] = self.torchrec.cost_ms(option)
        return phases


class _Search:
    def __init__(self, problem: Problem, stop: Stop, seed: int, extended: bool) -> None:
        self.stop, self.seed = stop, seed
        workload, topology = problem.workload, problem.topology
        device = problem.hardware.device
        torchrec = TorchRecObjective(workload, topology, device)
        space = enumerate_space(workload, topology, device, extended=extended)
        self.space: Space = prune(torchrec.with_torchrec_memory(space), topology)
        self.objective = Objective(problem, self.space)
        options = self.space.options
        self.flat = [option for table in options for option in table]
        self.cost = {option: torchrec.cost_ms(option) for option in self.flat}
        memory = [
            [np.array([(m.hbm_bytes, m.ddr_bytes) for m in o.memory], dtype=float) for o in table]
            for table in options
        ]
        costs = [[self.cost[o] for o in table] for table in options]
        items = stack_options(costs, memory, self.objective.caps)
        self.bound = AdditiveBound(items, topology.world_size)
        self.rated = _Rated(self.objective, torchrec)
        self.placer = GreedyPartitioner(self.objective, self.rated)
        self.ranked = [
            sorted(table, key=lambda o: (self.cost[o] * o.num_shards, self.cost[o]))
            for table in options
        ]

    def loads(self, plan: Assignment) -> Array:
        """Return the sum of shard costs on every rank in ms, ``[ranks]``."""
        loads = np.zeros(self.objective.problem.topology.world_size)
        for option, ranks in plan:
            np.add.at(loads, list(ranks), self.cost[option])
        return loads

    def rating_ms(self, plan: Assignment) -> float:
        """Return the costliest rank's sum in ms."""
        return float(self.loads(plan).max())

    def best(self) -> AdditivePlan:
        """Return the best plan of all starts."""
        lower = self.bound.lower_bound_ms()
        starts = sorted(dict.fromkeys(self._starts(lower)), key=self.rating_ms)[:STARTS]
        best = min(map(self._improved, starts), key=self.rating_ms)
        if self.rating_ms(best) > lower * (1 + WIDE) and not self.stop.reached():
            best = min(best, self._improved(self._exact(best)), key=self.rating_ms)
        plan = self.objective.sharding_plan(best)
        return AdditivePlan(plan, best, self.rating_ms(best), lower)

    def _starts(self, lower: float) -> Iterator[Assignment]:
        """Yield plans that fit, at least one."""
        found_any = True
        for plan in (*self._picked(lower), self._torchrec()):
            if plan is not None:
                found_any = False
                yield plan
            if self.stop.reached():
                break
        if found_any:
            work = FEASIBILITY_WORK * max(1.0, self.stop.effort)
            remaining_s = max(1.0, self.stop.remaining_s)
            feasible = find_feasible(self.objective, work, self.seed, remaining_s)
            if feasible.assignment is None:
                raise missing_memory(self.objective, feasible)
            yield feasible.assignment

    def _picked(self, lower: float) -> Iterator[Assignment | None]:
        """Place the options of the bound at a few targets, then with smaller shards, until a plan
        comes near the bound."""
        best = math.inf
        for largest, target in itertools.product(LARGEST, TARGETS):
            if best <= lower * NEAR:
                return
            plan = None
            for pressure in PRESSURES:
                picked, _ = self.bound.pick(target * lower, pressure, largest)
                plan = self.placer.place_all([self.flat[i] for i in picked.tolist()])
                if plan is not None or self.stop.reached():
                    break
            if plan is not None:
                best = min(best, self.rating_ms(plan))
            yield plan

    def _torchrec(self) -> Assignment | None:
        """Return the plan of TorchRec's default planner in options of this space, if it fits."""
        problem = self.objective.problem
        baseline = torchrec_plan(problem.workload, problem.topology, problem.hardware.device)
        if baseline is None:
            return None
        named = [self.space.option_of(t, plan) for t, plan in enumerate(baseline.tables)]
        choices = tuple(
            (option, plan.ranks)
            for option, plan in zip(named, baseline.tables, strict=True)
            if option is not None and option.is_legal(plan.ranks, problem.topology)
        )
        whole = len(choices) == len(baseline.tables) and self.objective.fits(choices)
        return choices if whole else None

    def _improved(self, plan: Assignment) -> Assignment:
        balanced = balance(self.objective, self.rated, plan)
        moved = self.descend(balanced, max(1, round(self.stop.effort * PUTS)))
        again = balance(self.objective, self.rated, moved)
        # the 16-norm that both minimise may fall while the maximum rises
        return min((moved, again, balanced, plan), key=self.rating_ms)

    def descend(self, assignment: Assignment, steps: int) -> Assignment:
        """Re-place tables of the costliest rank until none helps, with at most ``steps`` tries."""
        plan = list(assignment)
        tied = {table for group in self.space.co_locate for table in group}
        loads, used = self.loads(assignment), self.objective.memory(assignment)
        while True:
            scale, costliest = float(loads.max()), int(np.argmax(loads))
            best: tuple[float, int, Choice, Array, Array] | None = None
            now = _norm(loads, scale)
            for table, (current, ranks) in enumerate(plan):
                if table in tied or costliest not in ranks:
                    continue
                below, room = loads.copy(), used - self.objective.footprint(current, ranks)
                np.subtract.at(below, list(ranks), self.cost[current])
                for option in self.ranked[table]:
                    if self.cost[option] >= scale:
                        continue
                    if (steps := steps - 1) < 0:
                        return tuple(plan)
                    phases = np.zeros((len(loads), PHASES))
                    phases[:, FORWARD] = below
                    new_ranks = self.placer.best_ranks(option, phases, room)
                    if new_ranks is None:
                        continue
                    after = below.copy()
                    np.add.at(after, list(new_ranks), self.cost[option])
                    norm = _norm(after, scale)
                    if norm < now * (1 - GAIN) and (best is None or norm < best[0]):
                        used_after = room + self.objective.footprint(option, new_ranks)
                        best = (norm, table, (option, new_ranks), after, used_after)
            if best is None:
                return tuple(plan)
            _, table, plan[table], loads, used = best

    def _exact(self, best: Assignment) -> Assignment:
        """Let CP-SAT choose options and ranks jointly; one worker and a deterministic limit make
        it reproducible."""
        # no better plan has an option with a shard as costly as the costliest rank
        rating = self.rating_ms(best)
        options = [
            [o for o in options if self.cost[o] < rating or o is mine]
            for options, (mine, _) in zip(self.space.options, best, strict=True)
        ]
        if model_size(self.objective, options) > MAX_VARIABLES:
            return best
        build = PlacementModel(self.objective.problem.topology, options)
        build.co_locate(self.space)
        build.limit_moves(self.space)
        build.limit_memory(self.objective.caps)
        slowest = build.model.new_int_var(0, 1 << 40, "")
        for terms in build.per_rank(lambda p, _: round(self.cost[p.option] * UNITS_PER_MS)):
            build.model.add(slowest >= weighted(terms))
        build.model.minimize(slowest)
        _hint(build, best)
        work = CPSAT_WORK * self.stop.effort
        solver = reproducible_solver(work, self.seed, self.stop.remaining_s)
        if run(solver, build.model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return best
        return build.read(solver, self.space)


def _hint(build: PlacementModel, plan: Assignment) -> None:
    """Give the model a plan as its warm start."""
    for table, (option, ranks) in enumerate(plan):
        for placed in build.tables[table]:
            mine = placed.option is option
            every = [*placed.chosen, *(x for unit in placed.units for x in unit.counts)]
            values = {x.index: (x, 0) for x in every}
            if mine and len(placed.chosen) == 1:
                values[placed.chosen[0].index] = placed.chosen[0], 1
            for unit, times in zip(placed.units, placed.times(ranks), strict=True) if mine else ():
                values |= {x.index: (x, n) for x, n in zip(unit.counts, times, strict=True)}
            for variable, value in values.values():
                build.model.add_hint(variable, value)


def _norm(loads: Array, scale: float) -> float:
    return float(((loads / scale) ** NORM).sum())

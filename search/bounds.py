"""A lower bound on the predicted iteration time of every plan in a search space.

Every plan uses some set of exchanges (module x sharding type), which fixes the operations of its
graph. For each set, a linear program over fractional plans (each table mixes its options, memory is
pooled over all ranks) is minimised under the cuts of `search.relaxation`, which are added where the
program's optimum violates them (Kelley 1960). The bound is the least over all sets; sets are
refined best first, so only those that could hold the optimum cost time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, combinations

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp

from predictor.batch import BatchPredictor
from predictor.loads import COLUMNS, LAUNCH, LookupGroup, filling_column
from predictor.plan import TablePlan
from search.cache_bound import PRICES, least_sharing_ms
from search.relaxation import Cut, Hulls, Relaxation
from search.result import Problem
from search.space import Option, Space, place

Array = NDArray[np.float64]

TOLERANCE = 1e-4
"""A set is solved when its relaxed time exceeds the program's optimum by less than this share."""
ROUNDING = 1e-9
"""Taken off the bound."""
MAX_SETS = 256
"""More sets of exchanges than this are not told apart; cuts that hold for all of them remain."""
MAX_CUTS = 60
"""Refinements of a set that plans are made of."""
FLOOR_STEPS = 20
"""Refinements of the bound that holds for all sets, where every set starts from."""
GIB = float(1 << 30)


@dataclass(frozen=True)
class _Choice:
    """One option of one table with its load averaged over the ranks, and its memory.

    ``sharing`` is what it fetches at least beyond its load, since tables share UVM caches, at
    several prices of their room.
    """

    table: int
    option: Option
    group: int
    load: Array
    hbm_bytes: int
    ddr_bytes: int
    sharing: Array


class LowerBound:
    """The bound of a problem over a space, refined step by step.

    Args:
        batch: shares its shard loads with the search.
    """

    def __init__(self, problem: Problem, space: Space, batch: BatchPredictor) -> None:
        self.problem = problem
        self.batch = batch
        self.choices = list(self._choices(space))
        self._share_caches()
        self.tables = len(space.options)
        # an exchange's ceiling does not depend on which other exchanges a set has
        self.hulls: dict[str, Hulls] = {}
        self.sets: list[ExchangeSet] = []
        # sets that may still be refined, least bound first; the least bound of the others
        self._open: list[tuple[float, int, ExchangeSet]] | None = None
        self._fathomed = np.inf

    def solve(
        self,
        steps: int,
        upper_ms: float = np.inf,
        stop: Callable[[float], bool] = lambda bound: False,
    ) -> float:
        """The bound in ms after at most ``steps`` more refinements.

        Args:
            upper_ms: a plan with this time is known; sets above it need no more work.
            stop: asked after every step with the bound so far.
        """
        if self._open is None:
            self._begin()
        assert self._open is not None
        for _ in range(steps):
            if not self._open or self.proven_ms >= min(self._fathomed, upper_ms):
                break
            before, index, one = heapq.heappop(self._open)
            bound, done = one.refine()
            bound = max(bound, before)
            if done:
                self._fathomed = min(self._fathomed, bound)
            else:
                heapq.heappush(self._open, (bound, index, one))
            if stop(self.proven_ms):
                break
        return float(min(self.proven_ms, upper_ms) * (1 - ROUNDING))

    @property
    def proven_ms(self) -> float:
        """The least bound of all sets so far."""
        return min(self._fathomed, self._open[0][0] if self._open else np.inf)

    def _begin(self) -> None:
        floor = self._floor()
        self.sets = self._sets()
        self._open = [(floor, i, one) for i, one in enumerate(self.sets)]
        heapq.heapify(self._open)
        self._fathomed = np.inf if self._open else floor

    def promising(self, count: int) -> list[ExchangeSet]:
        """The solved sets with the lowest bounds; fewer, or none, where `solve` saw fewer."""
        seen = [one for one in self.sets if 0 < one.proven < np.inf]
        return sorted(seen, key=lambda one: one.proven)[:count]

    def _floor(self) -> float:
        """A bound that holds whatever the set of exchanges."""
        everything = ExchangeSet(self, self.choices, exact=False)
        bound = 0.0
        for _ in range(FLOOR_STEPS):
            bound, done = everything.refine()
            if done:
                break
        return bound

    def _choices(self, space: Space) -> Iterator[_Choice]:
        world = self.problem.topology.world_size
        for table, options in enumerate(space.options):
            for option in options:
                if option.legal_ranks(self.problem.topology).is_empty:
                    continue
                group, load = self.batch.table(table, self._placed(option))
                yield _Choice(
                    table,
                    option,
                    group,
                    load.sum(axis=0) / world,
                    sum(m.hbm_bytes for m in option.memory),
                    sum(m.ddr_bytes for m in option.memory),
                    np.zeros(1 + PRICES),
                )

    def _share_caches(self) -> None:
        """Enter into the choices what they fetch at least, whatever tables share their caches."""
        world = self.problem.topology.world_size
        for group in {choice.group for choice in self.choices}:
            caches = {
                i: self._caches(c.option) for i, c in enumerate(self.choices) if c.group == group
            }
            cached = [i for i, found in caches.items() if found]
            if cached:
                least = least_sharing_ms([caches[i] for i in cached]) / world
                for i, sharing in zip(cached, least, strict=True):
                    self.choices[i] = replace(self.choices[i], sharing=sharing)

    def _caches(self, option: Option) -> list[Array]:
        """What each shard of an option adds to a UVM cache."""
        plan, shards = self._placed(option), self.batch.shards
        found = (shards.cache_of_shard(option.table, plan, shard) for shard in plan.shards)
        return [cache for cache in found if cache is not None]

    def _placed(self, option: Option) -> TablePlan:
        """A plan of the option; where the shards lie does not change their sum."""
        legal = option.legal_ranks(self.problem.topology)
        return place(option, [r for unit in legal.units for r in unit[0]])

    def _exchange(self, choice: _Choice) -> tuple[str, str]:
        return _exchange_of(self.batch.groups[choice.group])

    def _sets(self) -> list[ExchangeSet]:
        """All sets of exchanges that offer every table an option; none if they are too many."""
        kinds = sorted({self._exchange(c) for c in self.choices})
        if 2 ** len(kinds) > MAX_SETS:
            return []
        found = []
        for kept in chain.from_iterable(combinations(kinds, n) for n in range(1, len(kinds) + 1)):
            choices = [c for c in self.choices if self._exchange(c) in kept]
            if len({c.table for c in choices}) == self.tables:
                found.append(ExchangeSet(self, choices, exact=True))
        return found


def _exchange_of(group: LookupGroup) -> tuple[str, str]:
    return group.module, group.sharding_type


class ExchangeSet:
    """The linear program of one set of exchanges.

    Args:
        choices: of all tables, table by table.
        exact: plans use all of the exchanges; if not, any of them.
    """

    def __init__(self, bound: LowerBound, choices: list[_Choice], *, exact: bool) -> None:
        self.bound = bound
        self.choices = choices
        self.exact = exact
        self.proven = 0.0
        self.relaxation: Relaxation | None = None
        # choices lie table by table
        self.first = np.flatnonzero(np.diff([-1, *(c.table for c in choices)]))
        sizes = np.diff([*self.first, len(choices)])
        self.shares: Array = np.repeat(1.0 / sizes, sizes)
        """What the program's last optimum gives every choice, ``[choices]``; the even mix first."""

    @property
    def options(self) -> list[Option]:
        """The option of every choice."""
        return [choice.option for choice in self.choices]

    def rounded(self) -> list[Option]:
        """The option with the largest share of every table, in the workload's order."""
        parts = np.split(self.shares, self.first[1:])
        best = [first + int(np.argmax(p)) for first, p in zip(self.first, parts, strict=True)]
        return [self.choices[i].option for i in best]

    def without(self, excess: Array) -> ExchangeSet:
        """The set with the choices of least excess of every table, solved.

        Args:
            excess: ``[choices]``.
        """
        least = np.minimum.reduceat(excess, self.first)
        sizes = np.diff([*self.first, len(self.choices)])
        kept = np.flatnonzero(excess <= np.repeat(least, sizes) * (1 + TOLERANCE))
        smaller = ExchangeSet(self.bound, [self.choices[i] for i in kept], exact=self.exact)
        for _ in range(MAX_CUTS):
            if smaller.refine()[1]:
                break
        return smaller

    def _start(self) -> None:
        batch, topology = self.bound.batch, self.bound.problem.topology
        used = sorted({c.group for c in self.choices})
        position = {group: i for i, group in enumerate(used)}
        shape = (len(used), COLUMNS)
        self.loads = np.zeros((len(self.choices), *shape))
        for i, choice in enumerate(self.choices):
            self.loads[i, position[choice.group]] = choice.load
        self.loads[..., LAUNCH] = 0.0
        ceiling = np.maximum.reduceat(self.loads, self.first).sum(axis=0)
        self.group = np.array([position[choice.group] for choice in self.choices])
        self.sharing = np.stack([choice.sharing for choice in self.choices])
        self.memory = np.array([[c.hbm_bytes, c.ddr_bytes] for c in self.choices]).T / GIB
        self.caps = np.array([sum(topology.hbm_cap_bytes), sum(topology.ddr_cap_bytes)]) / GIB
        groups = [batch.groups[g] for g in used]
        certain = [self._is_certain(group, used) for group in used]
        self.relaxation = Relaxation(batch.costs, groups, ceiling, certain, self.bound.hulls)
        self._start_program()

    def _is_certain(self, group: int, groups: list[int]) -> bool:
        """Every plan of the set uses the lookup group: some table has no other, or its exchange
        has no other."""
        key = _exchange_of(self.bound.batch.groups[group])
        alone = sum(_exchange_of(self.bound.batch.groups[g]) == key for g in groups) == 1
        mine = np.array([c.group == group for c in self.choices])
        return (self.exact and alone) or bool(np.logical_and.reduceat(mine, self.first).any())

    def _start_program(self) -> None:
        self.solver = solver = pywraplp.Solver.CreateSolver("GLOP")
        self.share = [solver.NumVar(0.0, 1.0, "") for _ in self.choices]
        self.time = solver.NumVar(0.0, solver.infinity(), "")
        solver.Minimize(self.time)
        for shares in np.split(np.array(self.share, dtype=object), self.first[1:]):
            one = solver.Constraint(1.0, 1.0)
            for share in shares:
                one.SetCoefficient(share, 1.0)
        self.room = [
            self._row(-solver.infinity(), cap, used)
            for cap, used in zip(self.caps.tolist(), self.memory, strict=True)
        ]
        self.cuts: list[pywraplp.Constraint] = []
        self.constants: list[float] = []
        self.weights = np.zeros((0, len(self.choices)))

    def _row(self, low: float, high: float, coefficients: Array) -> pywraplp.Constraint:
        row = self.solver.Constraint(low, high)
        for share, value in zip(self.share, coefficients.tolist(), strict=True):
            row.SetCoefficient(share, value)
        return row

    def refine(self) -> tuple[float, bool]:
        """One step: solve, cut. Returns the bound so far and whether no step will raise it."""
        if self.relaxation is None:
            self._start()
        if not self.cuts:
            self._cut()
        status = self.solver.Solve()
        if status == pywraplp.Solver.INFEASIBLE:
            return np.inf, True  # no fractional plan fits the pooled memory
        if status != pywraplp.Solver.OPTIMAL:
            return self.proven, True
        self.shares = np.array([share.solution_value() for share in self.share])
        self.proven = max(self.proven, self._certified())
        return self.proven, not self._cut()

    def _cut(self) -> bool:
        """Add what the program's optimum violates (or first of all, the even mix)."""
        assert self.relaxation is not None
        now = self.solver.Objective().Value() if self.cuts else -1.0
        loads = self._priced()
        load = np.tensordot(self.shares, loads, axes=1)
        if self.exact:
            cut = self.relaxation.evaluate(load)[1]
            cuts = [] if cut is None else [cut]
        else:
            cuts = self.relaxation.busy(load)
        found = False
        for cut in cuts:
            if cut.constant + float((cut.slope * load).sum()) > now * (1 + TOLERANCE) + 1e-12:
                self._add(cut, loads)
                found = True
        return found

    def _priced(self) -> Array:
        """Loads ``[choices, groups, COLUMNS]`` with what they fetch at least through shared caches,
        at the prices at which the program's last optimum fetches most."""
        if not self.sharing.any():
            return self.loads
        loads, column = self.loads.copy(), filling_column(self.bound.problem.workload)
        for group in range(loads.shape[1]):
            mine = np.flatnonzero(self.group == group)
            price = int(np.argmax(self.shares[mine] @ self.sharing[mine]))
            loads[mine, group, column] += self.sharing[mine, price]
        return loads

    def _add(self, cut: Cut, loads: Array) -> None:
        weights = loads.reshape(len(self.choices), -1) @ cut.slope.ravel()
        row = self._row(cut.constant, self.solver.infinity(), -weights)
        row.SetCoefficient(self.time, 1.0)
        self.cuts.append(row)
        self.constants.append(cut.constant)
        self.weights = np.vstack([self.weights, weights])

    def _certified(self) -> float:
        """The bound that the program's prices prove, whatever the solver's tolerances were.

        For prices of the cuts that sum to one and prices of memory, no plan is faster than the
        priced cuts where every table takes its cheapest option (Lagrange).
        """
        prices = np.array([max(0.0, row.dual_value()) for row in self.cuts])
        if prices.sum() <= 0:
            return 0.0
        rent = np.array([max(0.0, -row.dual_value()) for row in self.room])
        rent, prices = rent / prices.sum(), prices / prices.sum()
        cost = prices @ self.weights + rent @ self.memory
        cheapest = np.minimum.reduceat(cost, self.first).sum()
        return float(prices @ np.array(self.constants) + cheapest - rent @ self.caps)

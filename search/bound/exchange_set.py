"""The linear program of one set of exchanges, cut where the timeline exceeds its optimum."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp

from predictor.cost.loads import LookupGroup, filling_column
from search.bound.busiest import Busiest, Stretch
from search.bound.relaxation import Cut, Relaxation
from search.space.enumerate import Option

if TYPE_CHECKING:
    from search.bound.lower_bound import LowerBound

Array = NDArray[np.float64]
Ints = NDArray[np.intp]

TOLERANCE = 1e-4
"""A set is solved when its relaxed time exceeds the program's optimum by less than this share."""
MAX_CUTS = 60
"""Refinements of a set that plans are made of."""
GIB = float(1 << 30)


def exchange_of(group: LookupGroup) -> tuple[str, str]:
    """Module and sharding type."""
    return group.module, group.sharding_type


class ExchangeSet:
    """The linear program of one set of exchanges.

    Args:
        index: of the choices of `LowerBound`, table by table.
        exact: plans use all of the exchanges; if not, any of them.
        needed: choices that are variables of the program; found out if None. What it proves holds
            for all.
    """

    def __init__(
        self,
        bound: LowerBound,
        index: Ints,
        *,
        exact: bool,
        needed: NDArray[np.bool_] | None = None,
    ) -> None:
        self.bound = bound
        self.index = index
        self.choices = [bound.choices[i] for i in index.tolist()]
        self.exact = exact
        self.proven = 0.0
        self.optimum = -1.0
        self.relaxation: Relaxation | None = None
        # choices lie table by table
        self.first = np.flatnonzero(np.diff([-1, *(c.table for c in self.choices)]))
        self.sizes = np.diff([*self.first, len(index)])
        self.needed = bound.undominated(index) if needed is None else needed
        counts = np.add.reduceat(self.needed, self.first)
        self.shares: Array = self.needed / np.repeat(counts, self.sizes)
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
        kept = excess <= np.repeat(least, self.sizes) * (1 + TOLERANCE)
        smaller = ExchangeSet(self.bound, self.index[kept], exact=self.exact)
        for _ in range(MAX_CUTS):
            if smaller.refine()[1]:
                break
        return smaller

    def _start(self) -> None:
        bound, topology = self.bound, self.bound.problem.topology
        used = sorted(set(bound.groups[self.index].tolist()))
        self.group = np.searchsorted(used, bound.groups[self.index])
        self.members = [np.flatnonzero(self.group == i) for i in range(len(used))]
        self.loads, self.sharing = bound.loads[self.index], bound.sharing[self.index]
        ceiling = np.stack([self._ceiling(mine) for mine in self.members])
        self.memory = bound.needs[self.index].T
        caps = [sum(topology.hbm_cap_bytes) / GIB, sum(topology.ddr_cap_bytes) / GIB]
        if bound.given is not None and bound.given.is_limited:
            caps.append(float(bound.given.max_moves))
        self.caps = np.array(caps)
        groups = [bound.batch.groups[g] for g in used]
        certain = [self._is_certain(group, used) for group in used]
        if self.exact:
            least = np.stack([self._least(mine) for mine in self.members])
            self.relaxation = Relaxation(
                bound.batch.costs, groups, ceiling, certain, bound.hulls, least
            )
        else:
            self.relaxation = Relaxation(bound.batch.costs, groups, ceiling, certain, {})
        self._start_program()

    def _ceiling(self, mine: Ints) -> Array:
        """The most that the tables can put into one lookup group, ``[COLUMNS]``."""
        loads = np.zeros_like(self.loads)
        loads[mine] = self.loads[mine]
        return np.asarray(np.maximum.reduceat(loads, self.first).sum(axis=0))

    def _least(self, mine: Ints) -> Array:
        """Mean load and largest shard of the least option of a lookup group, ``[2, COLUMNS]``."""
        peaks = self.bound.peaks[self.index[mine]]
        return np.stack([self.loads[mine].min(axis=0), peaks.min(axis=0)])

    def _is_certain(self, group: int, groups: list[int]) -> bool:
        """Every plan of the set uses the lookup group: some table has no other, or its exchange
        has no other."""
        key = exchange_of(self.bound.batch.groups[group])
        alone = sum(exchange_of(self.bound.batch.groups[g]) == key for g in groups) == 1
        mine = np.array([c.group == group for c in self.choices])
        return (self.exact and alone) or bool(np.logical_and.reduceat(mine, self.first).any())

    def _start_program(self) -> None:
        self.solver = solver = pywraplp.Solver.CreateSolver("GLOP")
        self.free = np.flatnonzero(self.needed)
        self.share = [solver.NumVar(0.0, 1.0, "") for _ in self.free]
        self.time = solver.NumVar(0.0, solver.infinity(), "")
        solver.Minimize(self.time)
        table = np.repeat(np.arange(len(self.first)), self.sizes)[self.free]
        one = [solver.Constraint(1.0, 1.0) for _ in self.first]
        for share, row in zip(self.share, table.tolist(), strict=True):
            one[row].SetCoefficient(share, 1.0)
        self.room = [
            self.row(-solver.infinity(), cap, used)
            for cap, used in zip(self.caps.tolist(), self.memory, strict=True)
        ]
        self.cuts: list[pywraplp.Constraint] = []
        self.constants: list[float] = []
        self.weights = np.zeros((0, len(self.choices)))
        self.busiest = Busiest(self)

    def row(self, low: float, high: float, coefficients: Array) -> pywraplp.Constraint:
        """A new row of the program with these coefficients ``[choices]`` of the shares."""
        row = self.solver.Constraint(low, high)
        for share, value in zip(self.share, coefficients[self.free].tolist(), strict=True):
            row.SetCoefficient(share, value)
        return row

    def refine(self) -> tuple[float, bool]:
        """One step: solve, cut. Returns the bound so far and whether no step will raise it."""
        if self.relaxation is None:
            self._start()
        if not self.cuts:
            self._cut()
        status = self._solved()
        if status == pywraplp.Solver.INFEASIBLE:
            return np.inf, True  # no fractional plan fits the pooled memory
        if status != pywraplp.Solver.OPTIMAL:
            return self.proven, True
        self.shares[self.free] = [share.solution_value() for share in self.share]
        self.optimum = self.solver.Objective().Value()
        self.proven = max(self.proven, self._certified())
        grown = self.busiest.grow()
        return self.proven, not self._cut() and not grown

    def _solved(self) -> int:
        """The solver's status; where presolving ends in numerical trouble, that of a second try."""
        status = self.solver.Solve()
        if status == pywraplp.Solver.ABNORMAL:
            plain = pywraplp.MPSolverParameters()
            plain.SetIntegerParam(plain.INCREMENTALITY, plain.INCREMENTALITY_OFF)
            plain.SetIntegerParam(plain.PRESOLVE, plain.PRESOLVE_OFF)
            status = self.solver.Solve(plain)
        return int(status)

    def _cut(self) -> bool:
        """Add what the program's optimum violates (or first of all, the even mix)."""
        assert self.relaxation is not None
        loads = self._priced()
        load = np.stack([self.shares[mine] @ loads[mine] for mine in self.members])
        if self.exact:
            cut = self.relaxation.evaluate(load)[1]
            cuts = [] if cut is None else [cut]
        else:
            cuts = self.relaxation.busy(load)
        found = False
        for cut in cuts:
            stretches = self.busiest.stretches(cut, loads)
            at = cut.constant + float((cut.slope * load).sum()) + self.busiest.excess(stretches)
            if at > self.optimum * (1 + TOLERANCE) + 1e-12:
                self._add(cut, loads, stretches)
                found = True
        return found

    def _priced(self) -> Array:
        """Loads ``[choices, COLUMNS]`` with what they fetch at least through shared caches, at the
        prices at which the program's last optimum fetches most."""
        if not self.sharing.any():
            return self.loads
        loads, column = self.loads.copy(), filling_column(self.bound.problem.workload)
        for mine in self.members:
            price = int(np.argmax(self.shares[mine] @ self.sharing[mine]))
            loads[mine, column] += self.sharing[mine, price]
        return loads

    def _add(self, cut: Cut, loads: Array, stretches: list[Stretch]) -> None:
        weights = np.einsum("nc,nc->n", loads, cut.slope[self.group])
        row = self.row(cut.constant, self.solver.infinity(), -weights)
        row.SetCoefficient(self.time, 1.0)
        self.busiest.enter(row, stretches)
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
        scale = float(prices.sum())
        rent, prices = rent / scale, prices / scale
        charged, beyond = self.busiest.priced(prices, scale)
        cost = prices @ self.weights + rent @ self.memory + charged
        cheapest = np.minimum.reduceat(cost, self.first).sum()
        return float(prices @ np.array(self.constants) + cheapest + beyond - rent @ self.caps)

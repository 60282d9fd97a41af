"""Linear program over fractional plans: every table mixes its options, memory is pooled.

It minimises the time under the cuts of `search.bound.stretches`. Rows for the peaks of tables are
added where they are violated. Branches of one exchange set share a program: the excluded options
and certain peaks of a branch are bounds of variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp

from search.bound.stretches import CutTimes

Array = NDArray[np.float64]
Ints = NDArray[np.intp]
Mask = NDArray[np.bool_]

PARAMETERS = "max_number_of_iterations: 20000 use_scaling: false use_dual_simplex: true"
"""Options of GLOP. The iteration limit stops a degenerate program that cycles; the last bound then
stays. Scaling made one cycle (26 tables on 8 ranks, rows of single ranks). New rows and bounds keep
the last solution dual feasible, so the dual simplex takes half the time of the primal (500 tables
on 64 ranks)."""
SURE = 1e-9
"""Margin, as a fraction, by which the proof of infeasibility must exceed all memory."""
VIOLATED = 1e-4
"""Least violation of a row that is added, as a fraction of the time."""
ROWS = 4, 1 / 32
"""Largest number of tables whose peaks a stretch gets rows for at a time: so many, or this fraction
of all tables."""
SET_COEFFICIENT = pywraplp.Constraint.SetCoefficient
SET_UPPER_BOUND = pywraplp.Variable.SetUb
SOLUTION_VALUE = pywraplp.Variable.solution_value


def new_solver() -> pywraplp.Solver:
    """Make a solver of linear programs with an iteration limit."""
    solver = pywraplp.Solver.CreateSolver("GLOP")
    solver.SetSolverSpecificParametersAsString(PARAMETERS)
    return solver


def solve_again(solver: pywraplp.Solver) -> int:
    """Solve a changed program from its last basis; return the status."""
    status = solver.Solve()
    if status not in (pywraplp.Solver.OPTIMAL, pywraplp.Solver.INFEASIBLE):
        # it cycled, or presolving ended in numerical trouble
        plain = pywraplp.MPSolverParameters()
        plain.SetIntegerParam(plain.INCREMENTALITY, plain.INCREMENTALITY_OFF)
        plain.SetIntegerParam(plain.PRESOLVE, plain.PRESOLVE_OFF)
        status = solver.Solve(plain)
    return int(status)


def _price(row: pywraplp.Constraint | None) -> float:
    return max(0.0, row.dual_value()) if row is not None else 0.0


def _at_most(prices: Array, limit: Array | float) -> Array:
    """Return factors <= 1 that bring prices down to a limit."""
    return np.asarray(np.minimum(1.0, limit / np.maximum(prices, np.finfo(float).tiny)))


@dataclass(frozen=True, eq=False)
class Branch:
    """Branch of the plans of an exchange set.

    Args:
        allowed: mask of the choices that its plans may have, ``[choices]``.
        one_of: masks ``[choices]``; its plans have at least one choice of each.
    """

    allowed: Mask
    one_of: tuple[Mask, ...] = ()

    def least(self, times: CutTimes) -> Array:
        """Return the peaks that all plans of the branch have under a cut, ``[stretches]``."""
        least = np.zeros(len(times.floor))
        peak = times.peak if self.one_of else np.zeros(0)
        for choices in self.one_of:
            least = np.maximum(least, peak[:, choices & self.allowed].min(axis=1, initial=np.inf))
        return least


@dataclass(frozen=True)
class _Rows:
    """Rows and variables of a cut in the program.

    Args:
        cut: row of the cut.
        excess, peak: variables of every stretch.
        longest, floor: rows of the excess, by stretch.
        tables: rows of the peak, by stretch and table.
    """

    times: CutTimes
    cut: pywraplp.Constraint
    excess: list[pywraplp.Variable]
    peak: dict[int, pywraplp.Variable] = field(default_factory=dict)
    longest: dict[int, pywraplp.Constraint] = field(default_factory=dict)
    floor: dict[int, pywraplp.Constraint] = field(default_factory=dict)
    tables: dict[tuple[int, int], pywraplp.Constraint] = field(default_factory=dict)


@dataclass(frozen=True)
class Priced:
    """Lower bound proven by dual prices.

    Args:
        bound_ms: no plan of the branch is faster.
        reduced_costs: least excess over it of plans with a choice, ``[choices]`` in ms.
        prices: dual prices of the cuts, ``[cuts]``; they sum to 1.
        peaks: cuts with a price, and the prices of the peaks of their stretches, ``[stretches]``.
    """

    bound_ms: float
    reduced_costs: Array
    prices: Array
    peaks: list[tuple[CutTimes, Array]]


class Program:
    """Linear program that minimises the time over the shares of the choices, under cuts.

    Args:
        first: position of every table's first choice; choices lie table by table.
        memory: memory of every choice, ``[kinds, choices]``.
        caps: memory of all ranks together, ``[kinds]``.

    Attributes:
        shares: shares at the last optimum, ``[choices]``; the even mix before any.
        optimum: last optimum in ms, -1 before any.
    """

    def __init__(self, first: Ints, memory: Array, caps: Array) -> None:
        self.first, self.memory, self.caps = first, memory, caps
        count = memory.shape[1]
        self.sizes = np.diff([*first, count])
        self.table = np.repeat(np.arange(len(first)), self.sizes)
        self.shares: Array = 1.0 / np.repeat(self.sizes, self.sizes)
        self.optimum = -1.0
        self.solver = solver = new_solver()
        # raw handles: through the wrapper objects every coefficient takes six times as long
        self.share = [solver.NumVar(0.0, 1.0, "").this for _ in range(count)]
        self.time = solver.NumVar(0.0, solver.infinity(), "")
        solver.Minimize(self.time)
        shares_sum = [solver.Constraint(1.0, 1.0) for _ in self.first]
        for share, row in zip(self.share, self.table.tolist(), strict=True):
            SET_COEFFICIENT(shares_sum[row].this, share, 1.0)
        self.room = [
            self._row(-solver.infinity(), used, cap)
            for cap, used in zip(caps.tolist(), memory, strict=True)
        ]
        self.cuts: list[_Rows] = []
        self.branch = self.whole = Branch(np.ones(count, dtype=bool))
        self.one_of_rows: dict[int, tuple[Mask, pywraplp.Constraint]] = {}

    def _row(
        self, low: float, coefficients: Array, high: float | None = None, start: int = 0
    ) -> pywraplp.Constraint:
        """Add a row with these coefficients of the shares, of the choices from ``start`` on."""
        row = self.solver.Constraint(low, self.solver.infinity() if high is None else high)
        handle, share = row.this, self.share[start : start + len(coefficients)]
        there = np.flatnonzero(coefficients)
        for at, value in zip(there.tolist(), coefficients[there].tolist(), strict=True):
            SET_COEFFICIENT(handle, share[at], value)
        return row

    def add_cut(self, times: CutTimes, rows: Sequence[tuple[int, int]] = ()) -> None:
        """Add a cut.

        Args:
            rows: stretches and tables whose peaks get a row at once.
        """
        row = self._row(times.constant, -times.weights)
        row.SetCoefficient(self.time, 1.0)
        endless = self.solver.infinity()
        excess = [self.solver.NumVar(0.0, endless, "") for _ in times.floor]
        for variable in excess:
            row.SetCoefficient(variable, -1.0)
        self.cuts.append(_Rows(times, row, excess))
        peak = times.peak
        for stretch, table in rows:
            self._add_row(self.cuts[-1], stretch, table, peak[stretch])

    def enter(self, branch: Branch) -> None:
        """Set the bounds of the program to those of a branch."""
        if branch is self.branch:
            return
        changed = np.flatnonzero(branch.allowed != self.branch.allowed)
        for at, allowed in zip(changed.tolist(), branch.allowed[changed].tolist(), strict=True):
            SET_UPPER_BOUND(self.share[at], float(allowed))
        for _, row in self.one_of_rows.values():
            row.SetLb(0.0)
        for choices in branch.one_of:
            if id(choices) not in self.one_of_rows:
                self.one_of_rows[id(choices)] = choices, self._row(0.0, choices.astype(np.float64))
            self.one_of_rows[id(choices)][1].SetLb(1.0)
        self.branch = branch
        for cut in self.cuts:
            peak = branch.least(cut.times)
            for stretch, variable in cut.peak.items():
                variable.SetLb(float(peak[stretch]))

    def solve(self) -> int:
        """Solve the program; update shares and optimum if the returned status is optimal."""
        status = solve_again(self.solver)
        if status == pywraplp.Solver.OPTIMAL:
            self.shares = np.fromiter(map(SOLUTION_VALUE, self.share), dtype=np.float64)
            self.optimum = self.solver.Objective().Value()
        return status

    def add_rows(self) -> bool:
        """Add the rows that the last optimum violates most; return False if there are none."""
        grown, enough = False, VIOLATED * self.optimum
        # read first: a changed program forgets its solution
        excesses = [np.array(list(map(SOLUTION_VALUE, cut.excess))) for cut in self.cuts]
        for cut, excess in zip(self.cuts, excesses, strict=True):
            times, least = cut.times, self.branch.least(cut.times)
            if times.at(self.shares, self.first, least) > self.optimum + enough:
                grown |= self._add_rows(cut, excess, least, enough)
        return grown

    def _add_rows(self, cut: _Rows, excess: Array, least: Array, enough: float) -> bool:
        times, shares, grown = cut.times, self.shares, False
        most = max(ROWS[0], round(ROWS[1] * len(self.first)))
        peaks = times.peaks(shares, self.first)
        enough /= max(1, len(excess))
        peak, beyond = times.peak, times.beyond
        over = excess - beyond @ shares + enough
        for stretch in np.flatnonzero(np.maximum(peaks.max(axis=1), least) > over).tolist():
            if stretch not in cut.longest:
                self._add_longest(cut, stretch, beyond[stretch], float(least[stretch]))
                grown = True
            for table in np.argsort(-peaks[stretch], kind="stable")[:most].tolist():
                if peaks[stretch, table] > over[stretch] and (stretch, table) not in cut.tables:
                    self._add_row(cut, stretch, table, peak[stretch])
                    grown = True
        idle = times.idle
        for stretch in np.flatnonzero(times.floor + idle @ shares > excess + enough).tolist():
            if stretch not in cut.floor:
                row = self._row(float(times.floor[stretch]), -idle[stretch])
                row.SetCoefficient(cut.excess[stretch], 1.0)
                cut.floor[stretch], grown = row, True
        return grown

    def _add_longest(self, cut: _Rows, stretch: int, beyond: Array, least: float) -> None:
        cut.peak[stretch] = self.solver.NumVar(least, self.solver.infinity(), "")
        row = self._row(0.0, -beyond)
        row.SetCoefficient(cut.excess[stretch], 1.0)
        row.SetCoefficient(cut.peak[stretch], -1.0)
        cut.longest[stretch] = row

    def _add_row(self, cut: _Rows, stretch: int, table: int, peak: Array) -> None:
        """Add the row of a table's peak, given the peaks of all choices in the stretch."""
        if stretch not in cut.longest:
            self._add_longest(cut, stretch, cut.times.beyond[stretch], 0.0)
        first = int(self.first[table])
        row = self._row(0.0, -peak[first : first + self.sizes[table]], start=first)
        row.SetCoefficient(cut.peak[stretch], 1.0)
        cut.tables[stretch, table] = row

    def price(self) -> Priced | None:
        """Prove a bound by the dual prices of the last optimum; None if they prove nothing.

        The Lagrangian bound holds for any non-negative prices, so it does not depend on the
        solver's tolerances: with prices of the cuts that sum to one, no plan of the branch is
        faster than the priced cuts when every table takes its cheapest option.
        """
        prices = np.array([_price(cut.cut) for cut in self.cuts])
        scale = float(prices.sum())
        if scale <= 0:
            return None
        prices /= scale
        dual_prices = np.array([max(0.0, -row.dual_value()) for row in self.room]) / scale
        cost, fixed = dual_prices @ self.memory, -float(dual_prices @ self.caps)
        for choices in self.branch.one_of:
            worth = _price(self.one_of_rows[id(choices)][1]) / scale
            cost, fixed = cost - worth * choices, fixed + worth
        peaks = []
        for cut, price in zip(self.cuts, prices.tolist(), strict=True):
            if price:
                charged, certain, peak = self._price_cut(cut, price, scale)
                cost, fixed = cost + charged, fixed + certain
                peaks.append((cut.times, peak))
        cost = np.where(self.branch.allowed, cost, np.inf)
        cheapest = np.minimum.reduceat(cost, self.first)
        reduced_costs = cost - np.repeat(cheapest, self.sizes)
        return Priced(fixed + float(cheapest.sum()), reduced_costs, prices, peaks)

    def _price_cut(self, cut: _Rows, price: float, scale: float) -> tuple[Array, float, Array]:
        """Return the cost of every choice ``[choices]`` under the priced rows of a cut, the
        constant cost, and the prices of the peaks, ``[stretches]``.

        The prices of the rows that bound a variable from below must not exceed the variable's own
        price in total; they are scaled down, so that the variable drops out of the Lagrangian.
        """
        times = cut.times
        by_table = np.zeros((len(cut.excess), len(self.first)))
        for (stretch, table), row in cut.tables.items():
            by_table[stretch, table] = _price(row) / scale
        rows = np.zeros((2, len(cut.excess)))
        for prices, each in zip(rows, (cut.longest, cut.floor), strict=True):
            for stretch, row in each.items():
                prices[stretch] = _price(row) / scale
        rows *= _at_most(rows.sum(axis=0), price)
        peak, idle = rows
        by_table *= _at_most(by_table.sum(axis=1), peak)[:, None]
        cost = price * times.weights + peak @ times.beyond + idle @ times.idle
        cost = cost + (by_table[:, self.table] * times.peak).sum(axis=0)
        unpriced, least = peak - by_table.sum(axis=1), self.branch.least(times)
        fixed = float(idle @ times.floor + np.maximum(0.0, unpriced) @ least)
        return cost, price * times.constant + fixed, peak

    def is_infeasible(self) -> bool:
        """Return True if it is proven that no shares of the branch fit the memory of all ranks.

        The proof is a set of prices of the rows at which even the cheapest choice of every table
        costs more than the limits allow (Farkas 1902). The prices come from the program that
        exceeds the memory least; the proof is recomputed from them, so it does not depend on the
        solver's tolerances.
        """
        solver, branch = new_solver(), self.branch
        endless = solver.infinity()
        scale = np.maximum(self.caps, 1.0)
        # rows of all plans: coefficients times shares <= limit
        rows = np.vstack([self.memory / scale[:, None], *(-1.0 * each for each in branch.one_of)])
        limits = np.concatenate([self.caps / scale, -np.ones(len(branch.one_of))])
        cheapest = [solver.NumVar(-endless, endless, "") for _ in self.first]
        prices = [solver.NumVar(0.0, 1.0, "") for _ in limits]
        for choice in np.flatnonzero(branch.allowed).tolist():
            row = solver.Constraint(-endless, 0.0)
            row.SetCoefficient(cheapest[self.table[choice]], 1.0)
            for price, used in zip(prices, rows[:, choice].tolist(), strict=True):
                row.SetCoefficient(price, -used)
        objective = solver.Objective()
        objective.SetMaximization()
        for variable in cheapest:
            objective.SetCoefficient(variable, 1.0)
        for price, limit in zip(prices, limits.tolist(), strict=True):
            objective.SetCoefficient(price, -limit)
        if solve_again(solver) != pywraplp.Solver.OPTIMAL:
            return False
        dual_prices = np.array([max(0.0, price.solution_value()) for price in prices])
        cost = np.where(branch.allowed, dual_prices @ rows, np.inf)
        least = float(np.minimum.reduceat(cost, self.first).sum())
        limit = float(dual_prices @ limits)
        return least > limit + SURE * (1.0 + float(dual_prices @ np.abs(limits)))

    def largest(self) -> Ints:
        """Return every table's choice with the largest share."""
        parts = np.split(self.shares, self.first[1:])
        return np.asarray(self.first + [int(np.argmax(part)) for part in parts])

    def within(self, part: float) -> Ints | None:
        """Return `largest` under a tighter memory limit; None if nothing fits.

        The program stays as it is.

        Args:
            part: fraction, in [0, 1], of the memory that the last optimum takes beyond the least
                that the tables need.
        """
        before = self.shares, self.optimum
        try:
            for row, used in zip(self.room, self.memory, strict=True):
                least = float(np.minimum.reduceat(used, self.first).sum())
                row.SetUb(least + part * (float(used @ self.shares) - least))
            return self.largest() if self.solve() == pywraplp.Solver.OPTIMAL else None
        finally:
            for row, cap in zip(self.room, self.caps.tolist(), strict=True):
                row.SetUb(cap)
            self.shares, self.optimum = before

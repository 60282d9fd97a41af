"""A linear program over fractional plans: every table mixes its options, memory is pooled.

Minimises the time under the cuts of `search.bound.stretches`. Rows for the peaks of tables come
where they are violated. Branches of one set of exchanges share a program: which options a branch
leaves out, and which peaks it is sure of, are bounds of variables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp

from search.bound.stretches import CutTimes

Array = NDArray[np.float64]
Ints = NDArray[np.intp]
Mask = NDArray[np.bool_]

PARAMETERS = "max_number_of_iterations: 20000 use_scaling: false use_dual_simplex: true"
"""A degenerate program may go round in circles; then what was proven before stays. Scaled, rows of
single ranks made it do so at 26 tables on 8 ranks. New rows and bounds leave the last solution
feasible for the dual program alone: from there 500 tables on 64 ranks take half the time of the
primal simplex."""
SURE = 1e-9
"""Share by which prices must exceed all memory before a program counts as infeasible."""
VIOLATED = 1e-4
"""Rows that raise a stretch by less than this share of the time are not added."""
ROWS = 4
"""Tables whose peaks a stretch gets rows for at a time."""
SET_COEFFICIENT = pywraplp.Constraint.SetCoefficient
SOLUTION_VALUE = pywraplp.Variable.solution_value
SET_UB = pywraplp.Variable.SetUb


def new_solver() -> pywraplp.Solver:
    """Make a solver of linear programs that ends."""
    solver = pywraplp.Solver.CreateSolver("GLOP")
    solver.SetSolverSpecificParametersAsString(PARAMETERS)
    return solver


def solve_again(solver: pywraplp.Solver) -> int:
    """Solve a program that has changed since it was solved last; return the status."""
    status = solver.Solve()
    if status not in (pywraplp.Solver.OPTIMAL, pywraplp.Solver.INFEASIBLE):
        # it went round in circles, or presolving ended in numerical trouble
        plain = pywraplp.MPSolverParameters()
        plain.SetIntegerParam(plain.INCREMENTALITY, plain.INCREMENTALITY_OFF)
        plain.SetIntegerParam(plain.PRESOLVE, plain.PRESOLVE_OFF)
        status = solver.Solve(plain)
    return int(status)


def _price(row: pywraplp.Constraint | None) -> float:
    return max(0.0, row.dual_value()) if row is not None else 0.0


def _at_most(prices: Array, limit: Array | float) -> Array:
    """Factors, at most 1, that bring prices down to a limit."""
    return np.asarray(np.minimum(1.0, limit / np.maximum(prices, np.finfo(float).tiny)))


@dataclass(frozen=True, eq=False)
class Branch:
    """Plans of a set of exchanges.

    Args:
        able: choices that they may have, ``[choices]``.
        low, high: output elements that the busiest rank of every exchange has at least and at most,
            ``[exchanges]``.
        some: sets of choices, ``[choices]`` each, of which they have at least one.
    """

    able: Mask
    low: Array
    high: Array
    some: tuple[Mask, ...] = ()

    def least(self, times: CutTimes) -> Array:
        """Peaks, and times of the slowest rank, that all plans have under a cut,
        ``[2, stretches]``."""
        peak = np.zeros(len(times.peak))
        for one in self.some:
            peak = np.maximum(peak, times.peak[:, one & self.able].min(axis=1, initial=np.inf))
        return np.stack([peak, (times.per_output * self.low).max(axis=1, initial=0.0)])


@dataclass(frozen=True)
class _Rows:
    """Rows and variables of a cut.

    Args:
        cut: its row.
        excess, peak: variables of every stretch.
        longest, floor, slowest: rows of the excess, by stretch.
        tables: rows of the peak, by stretch and table.
    """

    times: CutTimes
    cut: pywraplp.Constraint
    excess: list[pywraplp.Variable]
    peak: dict[int, pywraplp.Variable] = field(default_factory=dict)
    longest: dict[int, pywraplp.Constraint] = field(default_factory=dict)
    floor: dict[int, pywraplp.Constraint] = field(default_factory=dict)
    slowest: dict[int, pywraplp.Constraint] = field(default_factory=dict)
    tables: dict[tuple[int, int], pywraplp.Constraint] = field(default_factory=dict)


@dataclass(frozen=True)
class Priced:
    """Proof by prices.

    Args:
        bound_ms: no plan of the branch is faster.
        slack: excess over it of plans with a choice, at least, ``[choices]`` in ms.
        prices: of the cuts, which sum to 1.
    """

    bound_ms: float
    slack: Array
    prices: Array


class Program:
    """Minimises the time over the shares of the choices, under cuts that are added to it.

    Args:
        first: position of every table's first choice; choices lie table by table.
        memory: of every choice, ``[kinds, choices]``.
        caps: of all ranks together, ``[kinds]``.
        outputs: elements that the mean rank has of every exchange, ``[exchanges, choices]``.

    Attributes:
        shares: at the last optimum, ``[choices]``; the even mix first.
        optimum: the last one in ms, -1 before any.
    """

    def __init__(self, first: Ints, memory: Array, caps: Array, outputs: Array) -> None:
        self.first, self.memory, self.caps, self.outputs = first, memory, caps, outputs
        count = memory.shape[1]
        self.sizes = np.diff([*first, count])
        self.table = np.repeat(np.arange(len(first)), self.sizes)
        self.shares: Array = 1.0 / np.repeat(self.sizes, self.sizes)
        self.optimum = -1.0
        self.solver = solver = new_solver()
        self.variables = [solver.NumVar(0.0, 1.0, "") for _ in range(count)]
        # handles: with the objects around them every coefficient takes six times as long
        self.share = [variable.this for variable in self.variables]
        self.time = solver.NumVar(0.0, solver.infinity(), "")
        solver.Minimize(self.time)
        one = [solver.Constraint(1.0, 1.0) for _ in self.first]
        for share, row in zip(self.share, self.table.tolist(), strict=True):
            SET_COEFFICIENT(one[row].this, share, 1.0)
        self.room = [
            self._row(-solver.infinity(), used, cap)
            for cap, used in zip(caps.tolist(), memory, strict=True)
        ]
        self.cuts: list[_Rows] = []
        none = np.zeros(len(outputs))
        self.branch = self.whole = Branch(np.ones(count, dtype=bool), none, none + np.inf)
        self.sent: dict[int, pywraplp.Constraint] = {}
        self.some: dict[int, tuple[Mask, pywraplp.Constraint]] = {}

    def _row(
        self, low: float, coefficients: Array, high: float | None = None
    ) -> pywraplp.Constraint:
        """A new row of the program with these coefficients ``[choices]`` of the shares."""
        row = self.solver.Constraint(low, self.solver.infinity() if high is None else high)
        handle, share = row.this, self.share
        there = np.flatnonzero(coefficients)
        for at, value in zip(there.tolist(), coefficients[there].tolist(), strict=True):
            SET_COEFFICIENT(handle, share[at], value)
        return row

    def add_cut(self, times: CutTimes, rows: Sequence[tuple[int, int]] = ()) -> None:
        """Add a cut.

        Args:
            rows: stretches and tables that have a row of their peak at once.
        """
        row = self._row(times.constant, -times.weights)
        row.SetCoefficient(self.time, 1.0)
        endless = self.solver.infinity()
        excess = [self.solver.NumVar(0.0, endless, "") for _ in times.floor]
        for variable in excess:
            row.SetCoefficient(variable, -1.0)
        self.cuts.append(_Rows(times, row, excess))
        for stretch, table in rows:
            self._add_row(self.cuts[-1], stretch, table)

    def enter(self, branch: Branch) -> None:
        """Change the program into that of a branch."""
        if branch is self.branch:
            return
        changed = np.flatnonzero(branch.able != self.branch.able)
        for at, able in zip(changed.tolist(), branch.able[changed].tolist(), strict=True):
            self.variables[at].SetUb(float(able))
        for _, row in self.some.values():
            row.SetLb(0.0)
        for one in branch.some:
            if id(one) not in self.some:
                self.some[id(one)] = one, self._row(0.0, one.astype(np.float64))
            self.some[id(one)][1].SetLb(1.0)
        for number in np.flatnonzero((branch.high < np.inf) | (self.branch.high < np.inf)).tolist():
            if number not in self.sent:
                self.sent[number] = self._row(-np.inf, self.outputs[number] / self._unit(number))
            self.sent[number].SetUb(float(branch.high[number]) / self._unit(number))
        self.branch = branch
        for cut in self.cuts:
            peak, slowest = branch.least(cut.times)
            for stretch, variable in cut.peak.items():
                variable.SetLb(float(peak[stretch]))
            for stretch, row in cut.slowest.items():
                row.SetLb(float(slowest[stretch]))

    def _unit(self, exchange: int) -> float:
        """Outputs that count as one in the program."""
        return max(1.0, float(self.outputs[exchange].max()))

    def solve(self) -> int:
        """The solver's status; if it is optimal, the shares and the optimum are the new ones."""
        status = solve_again(self.solver)
        if status == pywraplp.Solver.OPTIMAL:
            self.shares = np.fromiter(map(SOLUTION_VALUE, self.variables), dtype=np.float64)
            self.optimum = self.solver.Objective().Value()
        return status

    def add_rows(self) -> bool:
        """Add the rows that the last optimum violates the most; False if there are none."""
        grown, enough = False, VIOLATED * self.optimum
        # a program forgets its optimum when it changes
        known = [np.array(list(map(SOLUTION_VALUE, cut.excess))) for cut in self.cuts]
        for cut, excess in zip(self.cuts, known, strict=True):
            times, least = cut.times, self.branch.least(cut.times)
            if times.at(self.shares, self.first, least) > self.optimum + enough:
                grown |= self._add_rows(cut, excess, least, enough)
        return grown

    def _add_rows(self, cut: _Rows, excess: Array, least: Array, enough: float) -> bool:
        times, shares, grown = cut.times, self.shares, False
        peaks = times.peaks(shares, self.first)
        enough /= max(1, len(excess))
        over = excess - times.beyond @ shares + enough
        for stretch in np.flatnonzero(np.maximum(peaks.max(axis=1), least[0]) > over).tolist():
            if stretch not in cut.longest:
                self._add_longest(cut, stretch, float(least[0, stretch]))
                grown = True
            for table in np.argsort(-peaks[stretch], kind="stable")[:ROWS].tolist():
                if peaks[stretch, table] > over[stretch] and (stretch, table) not in cut.tables:
                    self._add_row(cut, stretch, table)
                    grown = True
        idle = times.floor + times.idle @ shares
        slowest = least[1] - times.mean @ shares
        for rows, value, at_least, weights in (
            (cut.floor, idle, times.floor, -times.idle),
            (cut.slowest, slowest, least[1], times.mean),
        ):
            for stretch in np.flatnonzero(value > excess + enough).tolist():
                if stretch not in rows:
                    row = self._row(float(at_least[stretch]), weights[stretch])
                    row.SetCoefficient(cut.excess[stretch], 1.0)
                    rows[stretch], grown = row, True
        return grown

    def _add_longest(self, cut: _Rows, stretch: int, least: float) -> None:
        times = cut.times
        cut.peak[stretch] = self.solver.NumVar(least, self.solver.infinity(), "")
        row = self._row(0.0, -times.beyond[stretch])
        row.SetCoefficient(cut.excess[stretch], 1.0)
        row.SetCoefficient(cut.peak[stretch], -1.0)
        cut.longest[stretch] = row

    def _add_row(self, cut: _Rows, stretch: int, table: int) -> None:
        if stretch not in cut.longest:
            self._add_longest(cut, stretch, 0.0)
        row = self._row(0.0, np.where(self.table == table, -cut.times.peak[stretch], 0.0))
        row.SetCoefficient(cut.peak[stretch], 1.0)
        cut.tables[stretch, table] = row

    def price(self) -> Priced | None:
        """Prove a bound by the prices of the last optimum, whatever the solver's tolerances were;
        None if they prove nothing.

        For prices of the cuts that sum to one, and any of the other rows, no plan of the branch is
        faster than the priced cuts where every table takes its cheapest option (Lagrange).
        """
        prices = np.array([_price(cut.cut) for cut in self.cuts])
        scale = float(prices.sum())
        if scale <= 0:
            return None
        prices /= scale
        rent = np.array([max(0.0, -row.dual_value()) for row in self.room]) / scale
        cost, fixed = rent @ self.memory, -float(rent @ self.caps)
        for number in np.flatnonzero(self.branch.high < np.inf).tolist():
            fee = max(0.0, -self.sent[number].dual_value()) / scale / self._unit(number)
            cost, fixed = cost + fee * self.outputs[number], fixed - fee * self.branch.high[number]
        for one in self.branch.some:
            worth = _price(self.some[id(one)][1]) / scale
            cost, fixed = cost - worth * one, fixed + worth
        for cut, price in zip(self.cuts, prices.tolist(), strict=True):
            if price:
                charged, certain = self._price_cut(cut, price, scale)
                cost, fixed = cost + charged, fixed + certain
        cost = np.where(self.branch.able, cost, np.inf)
        cheapest = np.minimum.reduceat(cost, self.first)
        return Priced(fixed + float(cheapest.sum()), cost - np.repeat(cheapest, self.sizes), prices)

    def _price_cut(self, cut: _Rows, price: float, scale: float) -> tuple[Array, float]:
        """Cost of every choice ``[choices]`` under the priced rows of a cut, and what is certain.

        Rows that raise a variable may not be worth more together than the variable is: then they
        count for less, and the variable costs nothing, however large it is.
        """
        times = cut.times
        by_table = np.zeros((len(cut.excess), len(self.first)))
        for (stretch, table), row in cut.tables.items():
            by_table[stretch, table] = _price(row) / scale
        rows = np.zeros((3, len(cut.excess)))
        for prices, each in zip(rows, (cut.longest, cut.floor, cut.slowest), strict=True):
            for stretch, row in each.items():
                prices[stretch] = _price(row) / scale
        rows *= _at_most(rows.sum(axis=0), price)
        peak, idle, slowest = rows
        by_table *= _at_most(by_table.sum(axis=1), peak)[:, None]
        cost = price * times.weights + peak @ times.beyond + idle @ times.idle
        cost = cost - slowest @ times.mean + (by_table[:, self.table] * times.peak).sum(axis=0)
        left, least = peak - by_table.sum(axis=1), self.branch.least(times)
        fixed = float(idle @ times.floor + slowest @ least[1] + np.maximum(0.0, left) @ least[0])
        return cost, price * times.constant + fixed

    def priced_cuts(self, prices: Array) -> Iterator[tuple[CutTimes, float, Array]]:
        """The cuts that cost something, with that price, and those of the peaks of their stretches,
        ``[stretches]``.

        Args:
            prices: of all cuts, as of `price`.
        """
        scale = sum(_price(cut.cut) for cut in self.cuts)
        for number in np.flatnonzero(prices).tolist():
            cut, peak = self.cuts[number], np.zeros(len(self.cuts[number].excess))
            for stretch, row in cut.longest.items():
                peak[stretch] = _price(row) / scale
            yield cut.times, float(prices[number]), peak

    def is_infeasible(self) -> bool:
        """Whether no shares of the branch fit the memory of all ranks: there are prices of memory,
        and of the sets that some option is from, at which even the cheapest choice of every table
        costs more than all there is (Farkas 1902).

        The prices are those of the program that exceeds the memory least; what they prove is
        computed here, whatever the solver's tolerances were.
        """
        solver, branch = new_solver(), self.branch
        endless = solver.infinity()
        scale = np.maximum(self.caps, 1.0)
        # rows that all plans obey: coefficients times shares are at most a limit
        sent = [(self.outputs[i], branch.high[i]) for i in np.flatnonzero(branch.high < np.inf)]
        parts = [(-1.0 * one, -1.0) for one in branch.some]
        parts += [(each / max(most, 1.0), most / max(most, 1.0)) for each, most in sent]
        rows = np.vstack([self.memory / scale[:, None], *(each for each, _ in parts)])
        limits = np.concatenate([self.caps / scale, [limit for _, limit in parts]])
        cheapest = [solver.NumVar(-endless, endless, "") for _ in self.first]
        prices = [solver.NumVar(0.0, 1.0, "") for _ in limits]
        for choice in np.flatnonzero(branch.able).tolist():
            row = solver.Constraint(-endless, 0.0)
            row.SetCoefficient(cheapest[self.table[choice]], 1.0)
            for price, used in zip(prices, rows[:, choice].tolist(), strict=True):
                row.SetCoefficient(price, -used)
        objective = solver.Objective()
        objective.SetMaximization()
        for one in cheapest:
            objective.SetCoefficient(one, 1.0)
        for price, limit in zip(prices, limits.tolist(), strict=True):
            objective.SetCoefficient(price, -limit)
        if solve_again(solver) != pywraplp.Solver.OPTIMAL:
            return False
        rent = np.array([max(0.0, price.solution_value()) for price in prices])
        cost = np.where(branch.able, rent @ rows, np.inf)
        least = float(np.minimum.reduceat(cost, self.first).sum())
        limit = float(rent @ limits)
        return least > limit + SURE * (1.0 + float(rent @ np.abs(limits)))

    def largest(self) -> Ints:
        """The choice with the largest share of every table."""
        parts = np.split(self.shares, self.first[1:])
        return np.asarray(self.first + [int(np.argmax(part)) for part in parts])

    def within(self, part: float) -> Ints | None:
        """`largest` where less memory may be taken: so much of what the last optimum takes beyond
        the least that the tables need; None if nothing fits. The program stays as it is.

        Args:
            part: 0 to 1.
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

"""A linear program over fractional plans: every table mixes its options, memory is pooled."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp

Array = NDArray[np.float64]
Ints = NDArray[np.intp]

PARAMETERS = "max_number_of_iterations: 20000 use_scaling: false"
"""A degenerate program may go round in circles; then what was proven before stays. Scaled, rows of
single ranks made it do so at 26 tables on 8 ranks."""
DUAL = "use_dual_simplex: true"
"""A new cut leaves the last solution feasible for the dual program alone: from there 500 tables on
64 ranks take half the time of the primal simplex, which went round in circles for minutes at 30
tables on two full hosts. New variables do the opposite."""

SURE = 1e-9
"""Share by which prices must exceed all memory before a program counts as infeasible."""

SET_COEFFICIENT = pywraplp.Constraint.SetCoefficient
SOLUTION_VALUE = pywraplp.Variable.solution_value


def new_solver(*parameters: str) -> pywraplp.Solver:
    """A solver of linear programs that ends."""
    solver = pywraplp.Solver.CreateSolver("GLOP")
    solver.SetSolverSpecificParametersAsString(" ".join([PARAMETERS, *parameters]))
    return solver


def solve_again(solver: pywraplp.Solver) -> int:
    """The status of a program that has grown since it was solved last."""
    status = solver.Solve()
    if status not in (pywraplp.Solver.OPTIMAL, pywraplp.Solver.INFEASIBLE):
        # it went round in circles, or presolving ended in numerical trouble
        plain = pywraplp.MPSolverParameters()
        plain.SetIntegerParam(plain.INCREMENTALITY, plain.INCREMENTALITY_OFF)
        plain.SetIntegerParam(plain.PRESOLVE, plain.PRESOLVE_OFF)
        status = solver.Solve(plain)
    return int(status)


class Program:
    """Minimises the time over the shares of the choices, under cuts that are added to it.

    Args:
        first: position of every table's first choice; choices lie table by table.
        needed: choices that are variables of the program; the shares of others are 0.
        memory: of every choice, ``[kinds, choices]``.
        caps: of all ranks together, ``[kinds]``.

    Attributes:
        shares: what the last optimum gives every choice, ``[choices]``; the even mix first.
        optimum: the last one in ms, -1 before any.
        cuts: rows of the cuts, in the order in which they came.
    """

    def __init__(self, first: Ints, needed: NDArray[np.bool_], memory: Array, caps: Array) -> None:
        self.first, self.memory, self.caps = first, memory, caps
        self.sizes = np.diff([*first, len(needed)])
        counts = np.add.reduceat(needed, first)
        self.shares: Array = needed / np.repeat(counts, self.sizes)
        self.optimum = -1.0
        self.solver = solver = new_solver(DUAL)
        self.free = np.flatnonzero(needed)
        # handles: with the objects around them every coefficient takes six times as long
        self.share = [solver.NumVar(0.0, 1.0, "").this for _ in self.free]
        self.time = solver.NumVar(0.0, solver.infinity(), "")
        solver.Minimize(self.time)
        table = np.repeat(np.arange(len(self.first)), self.sizes)[self.free]
        one = [solver.Constraint(1.0, 1.0) for _ in self.first]
        for share, row in zip(self.share, table.tolist(), strict=True):
            SET_COEFFICIENT(one[row].this, share, 1.0)
        self.room = [
            self.row(-solver.infinity(), cap, used)
            for cap, used in zip(caps.tolist(), memory, strict=True)
        ]
        self.cuts: list[pywraplp.Constraint] = []

    def row(self, low: float, high: float, coefficients: Array) -> pywraplp.Constraint:
        """A new row of the program with these coefficients ``[choices]`` of the shares."""
        row = self.solver.Constraint(low, high)
        handle, values = row.this, coefficients[self.free]
        for share in np.flatnonzero(values).tolist():
            SET_COEFFICIENT(handle, self.share[share], values.item(share))
        return row

    def cut(self, constant: float, weights: Array) -> pywraplp.Constraint:
        """A new cut: ``time >= constant + weights . shares``."""
        row = self.row(constant, self.solver.infinity(), -weights)
        row.SetCoefficient(self.time, 1.0)
        self.cuts.append(row)
        return row

    def solve(self) -> int:
        """The solver's status; if it is optimal, the shares and the optimum are the new ones."""
        status = solve_again(self.solver)
        if status == pywraplp.Solver.OPTIMAL:
            self.shares[self.free] = list(map(SOLUTION_VALUE, self.share))
            self.optimum = self.solver.Objective().Value()
        return status

    def is_infeasible(self) -> bool:
        """No shares fit the memory of all ranks: there are prices of memory at which even the
        cheapest choice of every table costs more than all there is (Farkas 1902).

        The prices are those of the program that exceeds the memory least; what they prove is
        computed here, whatever the solver's tolerances were.
        """
        solver = new_solver()
        endless = solver.infinity()
        cheapest = [solver.NumVar(-endless, endless, "") for _ in self.first]
        scale = np.maximum(self.caps, 1.0)
        prices = [solver.NumVar(0.0, 1.0, "") for _ in scale]
        table = np.repeat(np.arange(len(self.first)), self.sizes)[self.free]
        for choice, at in zip(self.free.tolist(), table.tolist(), strict=True):
            row = solver.Constraint(-endless, 0.0)
            row.SetCoefficient(cheapest[at], 1.0)
            for price, used in zip(prices, self.memory[:, choice] / scale, strict=True):
                row.SetCoefficient(price, -float(used))
        objective = solver.Objective()
        objective.SetMaximization()
        for one in cheapest:
            objective.SetCoefficient(one, 1.0)
        for price, cap in zip(prices, self.caps / scale, strict=True):
            objective.SetCoefficient(price, -float(cap))
        if solve_again(solver) != pywraplp.Solver.OPTIMAL:
            return False
        rent = np.array([max(0.0, price.solution_value()) for price in prices]) / scale
        least = np.minimum.reduceat(rent @ self.memory, self.first).sum()
        return bool(least > float(rent @ self.caps) * (1 + SURE) + SURE)

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
        before = self.shares.copy(), self.optimum
        try:
            for row, used in zip(self.room, self.memory, strict=True):
                least = float(np.minimum.reduceat(used, self.first).sum())
                row.SetUb(least + part * (float(used @ self.shares) - least))
            return self.largest() if self.solve() == pywraplp.Solver.OPTIMAL else None
        finally:
            for row, cap in zip(self.room, self.caps.tolist(), strict=True):
                row.SetUb(cap)
            self.shares, self.optimum = before

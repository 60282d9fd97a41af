"""What one rank can hold that is worth most: a multiple-choice knapsack with several limits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from search.reproducible import reproducible_solver, run

Array = NDArray[np.float64]
Ints = NDArray[np.intp]

STEPS = 1 << 20
"""Sizes are whole steps of the limit, rounded down, and values rounded up: what is proven of the
rounded knapsack holds for the exact one."""
WORK = 0.5
"""Deterministic time of CP-SAT for one knapsack, about seconds on one core."""
GREEDY = 24
"""Orders in which a knapsack is filled greedily."""


@dataclass(frozen=True)
class Knapsack:
    """Items of which at most one a table is taken, within limits.

    Args:
        table: of every item, ``[items]``.
        sizes: as shares of the limits, ``[items, limits]``; each at most 1.
    """

    table: Ints
    sizes: Array

    def fill(self, values: Array) -> list[Ints]:
        """Good fillings, found greedily in several orders; best first, none twice."""
        useful = np.flatnonzero(values > 0)
        sizes, table = self.sizes[useful], self.table[useful]
        rng = np.random.default_rng(len(values))
        weights = rng.dirichlet(np.full(sizes.shape[1], 0.5), GREEDY)
        scores = values[useful] / (sizes @ weights.T + 1e-3).T
        orders = np.argsort(-scores, axis=1, kind="stable")
        left = np.ones((GREEDY, sizes.shape[1]))
        taken = np.zeros((GREEDY, int(self.table.max(initial=0)) + 1), dtype=bool)
        kept = np.zeros(orders.shape, dtype=bool)
        lanes = np.arange(GREEDY)
        for position in range(orders.shape[1]):
            item = orders[:, position]
            ok = (sizes[item] <= left).all(axis=1) & ~taken[lanes, table[item]]
            left -= sizes[item] * ok[:, None]
            taken[lanes, table[item]] |= ok
            kept[lanes, item] = ok
        found = np.unique(kept, axis=0)
        worth = found @ values[useful]
        return [useful[found[i]] for i in np.argsort(-worth, kind="stable")]

    def most(self, values: Array) -> tuple[float, Ints]:
        """A value that no filling exceeds, and the best one found."""
        useful = np.flatnonzero(values > 0)
        if not len(useful):
            return 0.0, useful
        model = cp_model.CpModel()
        taken = [model.new_bool_var("") for _ in useful]
        for one in np.unique(self.table[useful]):
            same = [x for x, t in zip(taken, self.table[useful], strict=True) if t == one]
            if len(same) > 1:
                model.add_at_most_one(same)
        for sizes in np.floor(self.sizes[useful].T * STEPS).astype(np.int64):
            if sizes.sum() > STEPS:
                model.add(cp_model.LinearExpr.weighted_sum(taken, sizes.tolist()) <= STEPS)
        unit = float(values.max()) / STEPS
        worth = np.ceil(values[useful] / unit).astype(np.int64)
        model.maximize(cp_model.LinearExpr.weighted_sum(taken, worth.tolist()))
        solver = reproducible_solver(WORK, 0, float("inf"))
        status = run(solver, model)
        kept = np.zeros(len(useful), dtype=bool)
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            kept[:] = [solver.boolean_value(x) for x in taken]
        return solver.best_objective_bound * unit, useful[kept]

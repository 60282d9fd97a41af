"""The bound of one set of exchanges: a linear program, cut where the timeline exceeds it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp

from predictor.cost.loads import filling_column
from search.bound.choices import BoundChoices, exchange_of
from search.bound.program import Program
from search.bound.rank_excess import CycleSegment, RankExcess
from search.bound.relaxation import Cut, Relaxation
from search.space.option import Option

Array = NDArray[np.float64]
Ints = NDArray[np.intp]

TOLERANCE = 1e-4
"""A set is solved when its relaxed time exceeds the program's optimum by less than this share."""
MAX_CUTS = 60
"""Refinements of a set that plans are made of."""


class ExchangeSet:
    """The bound for plans that use a set of exchanges.

    Args:
        index: positions in `BoundChoices.all`, table by table.
        exact: plans use all of the exchanges; if not, any of them.
        needed: choices that are variables of the program; found out if None. What it proves holds
            for all.
    """

    def __init__(
        self,
        known: BoundChoices,
        index: Ints,
        *,
        exact: bool,
        needed: NDArray[np.bool_] | None = None,
    ) -> None:
        self.known = known
        self.index = index
        self.choices = [known.all[i] for i in index.tolist()]
        self.exact = exact
        self.proven = 0.0
        self.first = np.flatnonzero(np.diff([-1, *(c.table for c in self.choices)]))
        self.needed = known.undominated(index) if needed is None else needed
        self.relaxation: Relaxation | None = None

    @property
    def options(self) -> list[Option]:
        """The option of every choice."""
        return [choice.option for choice in self.choices]

    @property
    def shares(self) -> Array:
        """What the last optimum gives every choice, ``[choices]``."""
        return self.program.shares

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
        kept = excess <= np.repeat(least, self.program.sizes) * (1 + TOLERANCE)
        smaller = ExchangeSet(self.known, self.index[kept], exact=self.exact)
        for _ in range(MAX_CUTS):
            if smaller.refine()[1]:
                break
        return smaller

    def _start(self) -> None:
        known = self.known
        used = sorted(set(known.groups[self.index].tolist()))
        self.group = np.searchsorted(used, known.groups[self.index])
        self.members = [np.flatnonzero(self.group == i) for i in range(len(used))]
        self.loads, self.sharing = known.loads[self.index], known.sharing[self.index]
        ceiling = np.stack([self._ceiling(mine) for mine in self.members])
        groups = [known.scorer.groups[g] for g in used]
        certain = [self._is_certain(group, used) for group in used]
        costs = known.scorer.costs
        if self.exact:
            least = np.stack([self._least(mine) for mine in self.members])
            self.relaxation = Relaxation(costs, groups, ceiling, certain, known.hulls, least)
        else:
            self.relaxation = Relaxation(costs, groups, ceiling, certain, {})
        self.memory = known.needs[self.index].T
        self.program = Program(self.first, self.needed, self.memory, known.caps)
        self.rank_excess = RankExcess(self.program, self.group, known.longest[self.index])
        self.constants: list[float] = []
        self.weights = np.zeros((0, len(self.choices)))

    def _ceiling(self, mine: Ints) -> Array:
        """The most that the tables can put into one lookup group, ``[COLUMNS]``."""
        loads = np.zeros_like(self.loads)
        loads[mine] = self.loads[mine]
        return np.asarray(np.maximum.reduceat(loads, self.first).sum(axis=0))

    def _least(self, mine: Ints) -> Array:
        """Mean load and largest shard of the least option of a lookup group, ``[2, COLUMNS]``."""
        peaks = self.known.peaks[self.index[mine]]
        return np.stack([self.loads[mine].min(axis=0), peaks.min(axis=0)])

    def _is_certain(self, group: int, groups: list[int]) -> bool:
        """Every plan of the set uses the lookup group: some table has no other, or its exchange
        has no other."""
        key = exchange_of(self.known.scorer.groups[group])
        alone = sum(exchange_of(self.known.scorer.groups[g]) == key for g in groups) == 1
        mine = np.array([c.group == group for c in self.choices])
        return (self.exact and alone) or bool(np.logical_and.reduceat(mine, self.first).any())

    def refine(self) -> tuple[float, bool]:
        """One step: solve, cut. Returns the bound so far and whether no step will raise it."""
        if self.relaxation is None:
            self._start()
        if not self.program.cuts:
            self._cut()
        status = self.program.solve()
        if status == pywraplp.Solver.INFEASIBLE:
            return np.inf, True  # no fractional plan fits the pooled memory
        if status != pywraplp.Solver.OPTIMAL:
            return self.proven, True
        self.proven = max(self.proven, self._certified())
        grown = self.rank_excess.add_rows()
        return self.proven, not self._cut() and not grown

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
            segments = self.rank_excess.segments(cut, loads)
            at = cut.constant + float((cut.slope * load).sum())
            at += self.rank_excess.excess_ms(segments)
            if at > self.program.optimum * (1 + TOLERANCE) + 1e-12:
                self._add(cut, loads, segments)
                found = True
        return found

    def _priced(self) -> Array:
        """Loads ``[choices, COLUMNS]`` with what they fetch at least through shared caches, at the
        prices at which the program's last optimum fetches most."""
        if not self.sharing.any():
            return self.loads
        loads, column = self.loads.copy(), filling_column(self.known.problem.workload)
        for mine in self.members:
            price = int(np.argmax(self.shares[mine] @ self.sharing[mine]))
            loads[mine, column] += self.sharing[mine, price]
        return loads

    def _add(self, cut: Cut, loads: Array, segments: list[CycleSegment]) -> None:
        weights = np.einsum("nc,nc->n", loads, cut.slope[self.group])
        self.rank_excess.add_cut(self.program.cut(cut.constant, weights), segments)
        self.constants.append(cut.constant)
        self.weights = np.vstack([self.weights, weights])

    def _certified(self) -> float:
        """The bound that the program's prices prove, whatever the solver's tolerances were.

        For prices of the cuts that sum to one and prices of memory, no plan is faster than the
        priced cuts where every table takes its cheapest option (Lagrange).
        """
        prices = np.array([max(0.0, row.dual_value()) for row in self.program.cuts])
        if prices.sum() <= 0:
            return 0.0
        rent = np.array([max(0.0, -row.dual_value()) for row in self.program.room])
        scale = float(prices.sum())
        rent, prices = rent / scale, prices / scale
        charged, beyond = self.rank_excess.price(prices, scale)
        cost = prices @ self.weights + rent @ self.memory + charged
        cheapest = np.minimum.reduceat(cost, self.first).sum()
        return float(prices @ np.array(self.constants) + cheapest + beyond - rent @ self.known.caps)

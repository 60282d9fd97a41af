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
from dataclasses import dataclass
from itertools import chain, combinations

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp

from predictor.batch import BatchPredictor
from predictor.loads import COLUMNS, Load
from search.relaxation import Cut, Hulls, Relaxation
from search.result import Problem
from search.space import Option, Space, place

Array = NDArray[np.float64]

TOLERANCE = 1e-4
"""A set is solved when its relaxed time exceeds the program's optimum by less than this share."""
SAFETY = 1e-6
"""Taken off the bound: the linear solver's own tolerance."""
MAX_SETS = 256
"""More sets of exchanges than this are not told apart; the compute-bound cut remains."""


@dataclass(frozen=True)
class _Choice:
    """One option of one table with its load averaged over the ranks, and its memory."""

    table: int
    option: Option
    group: int
    load: Array
    hbm_bytes: int
    ddr_bytes: int


class LowerBound:
    """The bound of a problem over a space, refined step by step.

    Args:
        batch: shares its shard loads with the search.
    """

    def __init__(self, problem: Problem, space: Space, batch: BatchPredictor) -> None:
        self.problem = problem
        self.batch = batch
        self.choices = list(self._choices(space))
        self.tables = len(space.options)
        # an exchange's ceiling does not depend on which other exchanges a set has
        self.hulls: dict[str, Hulls] = {}

    def solve(
        self,
        steps: int,
        upper_ms: float = np.inf,
        stop: Callable[[float], bool] = lambda bound: False,
    ) -> float:
        """The bound in ms after at most ``steps`` refinements.

        Args:
            upper_ms: a plan with this time is known; sets above it need no more work.
            stop: asked after every step with the bound so far.
        """
        heap = [(0.0, i, s) for i, s in enumerate(self._sets())]
        heapq.heapify(heap)
        fathomed = np.inf
        for _ in range(steps):
            if not heap:
                break
            _, index, one = heapq.heappop(heap)
            bound, done = one.refine()
            if bound >= upper_ms or (done and not np.isfinite(bound)):
                fathomed = min(fathomed, bound)
                continue
            if done:
                fathomed = min(fathomed, bound)
                if not heap or bound <= heap[0][0]:
                    break
                continue
            heapq.heappush(heap, (bound, index, one))
            if stop(min(fathomed, heap[0][0])):
                break
        left = min((bound for bound, _, _ in heap), default=np.inf)
        return float(min(fathomed, left, upper_ms) * (1 - SAFETY))

    def _choices(self, space: Space) -> Iterator[_Choice]:
        world = self.problem.topology.world_size
        for table, options in enumerate(space.options):
            for option in options:
                legal = option.legal_ranks(self.problem.topology)
                if legal.is_empty:
                    continue
                # where the shards lie does not change their sum
                plan = place(option, [r for unit in legal.units for r in unit[0]])
                group, load = self.batch.table(table, plan)
                yield _Choice(
                    table,
                    option,
                    group,
                    load.sum(axis=0) / world,
                    sum(m.hbm_bytes for m in option.memory),
                    sum(m.ddr_bytes for m in option.memory),
                )

    def _exchange(self, choice: _Choice) -> tuple[str, str]:
        group = self.batch.groups[choice.group]
        return group.module, group.sharding_type

    def _sets(self) -> list[_Set]:
        """All sets of exchanges that offer every table an option."""
        kinds = sorted({self._exchange(c) for c in self.choices})
        if 2 ** len(kinds) > MAX_SETS:
            return [_Set(self, self.choices, exact=False)]
        found = []
        for kept in chain.from_iterable(combinations(kinds, n) for n in range(1, len(kinds) + 1)):
            choices = [c for c in self.choices if self._exchange(c) in kept]
            if len({c.table for c in choices}) == self.tables:
                found.append(_Set(self, choices, exact=True))
        return found


class _Set:
    """The linear program of one set of exchanges."""

    def __init__(self, bound: LowerBound, choices: list[_Choice], *, exact: bool) -> None:
        self.bound = bound
        self.choices = choices
        self.exact = exact
        self.relaxation: Relaxation | None = None
        self.solver: pywraplp.Solver | None = None

    def _start(self) -> None:
        batch = self.bound.batch
        used = sorted({c.group for c in self.choices})
        self.position = {group: i for i, group in enumerate(used)}
        shape = (len(used), COLUMNS)
        self.loads = np.zeros((len(self.choices), *shape))
        for i, choice in enumerate(self.choices):
            self.loads[i, self.position[choice.group]] = choice.load
        self.loads[..., Load.SHARDS] = 0.0
        ceiling = np.zeros(shape)
        for table in range(self.bound.tables):
            mine = [i for i, c in enumerate(self.choices) if c.table == table]
            ceiling += self.loads[mine].max(axis=0)
        groups = [batch.groups[g] for g in used]
        self.relaxation = Relaxation(batch.costs, groups, ceiling, self.bound.hulls)
        self._start_program()

    def _start_program(self) -> None:
        self.solver = pywraplp.Solver.CreateSolver("GLOP")
        solver, topology = self.solver, self.bound.problem.topology
        self.share = [solver.NumVar(0.0, 1.0, "") for _ in self.choices]
        self.time = solver.NumVar(0.0, solver.infinity(), "")
        solver.Minimize(self.time)
        for table in range(self.bound.tables):
            one = solver.Constraint(1.0, 1.0)
            for share, choice in zip(self.share, self.choices, strict=True):
                if choice.table == table:
                    one.SetCoefficient(share, 1.0)
        for cap, attribute in (
            (sum(topology.hbm_cap_bytes), "hbm_bytes"),
            (sum(topology.ddr_cap_bytes), "ddr_bytes"),
        ):
            limit = solver.Constraint(-solver.infinity(), cap / 2**30)
            for share, choice in zip(self.share, self.choices, strict=True):
                limit.SetCoefficient(share, getattr(choice, attribute) / 2**30)

    def refine(self) -> tuple[float, bool]:
        """One step: solve, cut. Returns the bound so far and whether the set is solved."""
        if self.solver is None:
            self._start()
        assert self.solver is not None
        assert self.relaxation is not None
        if self.solver.Solve() != pywraplp.Solver.OPTIMAL:
            return np.inf, True  # no fractional plan fits the pooled memory
        bound = self.solver.Objective().Value()
        shares = np.array([s.solution_value() for s in self.share])
        load = np.tensordot(shares, self.loads, axes=1)
        time, cut = self.relaxation.evaluate(load)
        if cut is None or time <= bound * (1 + TOLERANCE) + 1e-12:
            return bound, True
        self._add(cut)
        if self.solver.Solve() != pywraplp.Solver.OPTIMAL:
            return bound, True
        return self.solver.Objective().Value(), False

    def _add(self, cut: Cut) -> None:
        assert self.solver is not None
        row = self.solver.Constraint(cut.constant, self.solver.infinity())
        row.SetCoefficient(self.time, 1.0)
        for share, weight in zip(self.share, self.loads.reshape(len(self.loads), -1), strict=True):
            row.SetCoefficient(share, -float(weight @ cut.slope.ravel()))

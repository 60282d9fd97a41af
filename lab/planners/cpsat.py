"""CP-SAT chooses option and ranks of every table jointly, minimising sums of phases.

One worker and a deterministic time limit make the result reproducible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from search.objective import Assignment, Objective
from search.placements import PlacedOption, PlacementModel, Term, shard_bytes, weighted
from search.propose.feasibility import model_size
from search.reproducible import reproducible_solver, run
from search.space.option import Option
from search.surrogate import IDS, OUTPUTS, PHASES, Surrogate

UNITS_PER_MS = 1e5
"""Time resolution of the integer model: 10 ns."""
MEMORY_STEPS = 1 << 16
"""Memory resolution: a rank's memory has this many steps. Shards are rounded up."""
MAX_VARIABLES = 40_000
"""Larger models do not improve on their hint within any reasonable budget."""


@dataclass(frozen=True)
class Solution:
    """What the solver found."""

    assignment: Assignment
    surrogate_ms: float


class CpSat:
    """The solver of one problem; `solve` may be called with other options."""

    def __init__(self, objective: Objective, surrogate: Surrogate) -> None:
        self.objective = objective
        self.surrogate = surrogate

    def solve(
        self,
        options: Sequence[Sequence[Option]],
        work: float,
        seed: int,
        hint: Assignment | None = None,
        time_limit_s: float = float("inf"),
    ) -> Solution | None:
        """The best joint choice found.

        Args:
            options: what every table may choose from.
            work: deterministic time of CP-SAT, about seconds on one core.
            hint: an assignment to start from.
            time_limit_s: ceiling on wall time.

        Returns:
            None if the model is too large, infeasible, or nothing was found in time.
        """
        objective = self.objective
        if model_size(objective, options) > MAX_VARIABLES:
            return None
        build = PlacementModel(objective.problem.topology, options)
        build.co_locate(objective.space)
        build.limit_moves(objective.space)
        self._limit_memory(build)
        self._minimize(build)
        if hint is not None:
            build.hint(hint)
        solver = reproducible_solver(work, seed, time_limit_s)
        if run(solver, build.model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        ms = solver.ObjectiveValue() / UNITS_PER_MS
        return Solution(build.read(solver, objective.space), ms)

    def _limit_memory(self, build: PlacementModel) -> None:
        for kind, caps in enumerate(self.objective.caps):
            unit = max(1, int(caps.max()) // MEMORY_STEPS)

            def steps(p: PlacedOption, shard: int, kind: int = kind, unit: int = unit) -> int:
                return -(-shard_bytes(p, shard, kind) // unit)

            for cap, terms in zip(caps.tolist(), build.per_rank(steps), strict=True):
                build.model.add(weighted(terms) <= int(cap // unit))

    def _minimize(self, build: PlacementModel) -> None:
        """The sum of the slowest ranks of all phases, and of what exchanges in use cost."""
        surrogate, model = self.surrogate, build.model
        phases = {
            p.option: np.rint(surrogate.phases(p.option) * UNITS_PER_MS).astype(np.int64)
            for p in build.placed
        }
        exchange = {p.option: surrogate.exchange(p.option) for p in build.placed}
        cost: list[Term] = []
        exchanges = sorted(set(exchange.values()))
        for phase in range(PHASES):
            for one in exchanges if phase in (IDS, OUTPUTS) else (None,):

                def value(
                    placed: PlacedOption,
                    shard: int,
                    phase: int = phase,
                    one: tuple[str, str] | None = one,
                ) -> int:
                    mine = one in (None, exchange[placed.option])
                    return int(phases[placed.option][shard, phase]) if mine else 0

                ranks = [terms for terms in build.per_rank(value) if terms]
                if ranks:
                    slowest = model.new_int_var(0, 1 << 40, "")
                    for terms in ranks:
                        model.add(slowest >= weighted(terms))
                    cost.append((1, slowest))
        used = {one: model.new_bool_var("") for one in exchanges}
        for placed in build.placed:
            model.add(sum(placed.chosen) <= used[exchange[placed.option]])
            constant = round(surrogate.constant_ms(placed.option) * UNITS_PER_MS)
            cost += [(constant, x) for x in placed.chosen if constant]
        fixed = {exchange[p.option]: surrogate.fixed_ms(p.option) for p in reversed(build.placed)}
        cost += [(round(fixed[one] * UNITS_PER_MS), used[one]) for one in exchanges]
        model.minimize(weighted(cost))

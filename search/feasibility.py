"""Does any plan fit? Finds one where memory is tight, or proves that there is none.

CP-SAT places every table under caps that may be exceeded, and minimises by how much. Bytes are
exact. Nothing exceeded is a plan; anything else says what is missing, and whether that is proven.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from ortools.sat.python import cp_model

from search.model.placements import PlacementModel, weighted
from search.objective import Assignment, Objective
from search.problem import Problem
from search.reproducible import reproducible_solver, run
from search.space.option import Choice, Option, Space

MAX_VARIABLES = 200_000
"""Larger models are not built."""
MOST_BYTES = 1 << 50
SOLVED = (cp_model.OPTIMAL, cp_model.FEASIBLE)


@dataclass(frozen=True)
class Feasibility:
    """What is known.

    Args:
        assignment: a plan whose shards fit, or None; its peak may not.
        missing: bytes ``(hbm, ddr)`` by which the best plan found exceeds each rank's caps.
        proven: no plan fits; if False and there is no plan, none was found in the time given.
    """

    assignment: Assignment | None
    missing: tuple[tuple[int, int], ...]
    proven: bool


def find_feasible(
    objective: Objective, work: float, seed: int, time_limit_s: float = float("inf")
) -> Feasibility:
    """Search for any plan whose shards are within the caps, however slow.

    Args:
        work: deterministic time of CP-SAT, about seconds on one core.
        time_limit_s: ceiling on wall time.
    """
    nothing = ((0, 0),) * objective.problem.topology.world_size
    made = _MemoryModel.of(objective)
    if made is None:
        return Feasibility(None, nothing, False)
    over = [made.exceed(kind) for kind in range(2)]
    made.model.minimize(sum(over[0]) + sum(over[1]))
    status, solver = made.solve(work, seed, time_limit_s)
    if status not in SOLVED:
        # constraints alone may exclude each other
        return Feasibility(None, nothing, status == cp_model.INFEASIBLE)
    missing = tuple((solver.value(hbm), solver.value(ddr)) for hbm, ddr in zip(*over, strict=True))
    if missing == nothing:
        return Feasibility(made.read(solver, objective.space), missing, False)
    return Feasibility(None, missing, solver.best_objective_bound > 0.5)


def least_moves(
    objective: Objective, work: float, seed: int, time_limit_s: float = float("inf")
) -> tuple[int, int | None]:
    """How many tables of the plan in use must move until a plan fits.

    Returns:
        The least number that is not excluded, and the number of a plan found, None of none. They
        are equal where the number is proven.
    """
    space, in_use = objective.space, objective.space.in_use
    assert in_use is not None
    forced = sum(choice is None for choice in in_use.choices)
    free = replace(space, in_use=replace(in_use, max_moves=len(space.options)))
    made = _MemoryModel.of(objective.over(free))
    if made is None:
        return forced, None
    made.limit_memory(made.caps)
    made.model.minimize(len(space.options) - sum(made.stays(space)))
    status, solver = made.solve(work, seed, time_limit_s)
    if status not in SOLVED:
        return forced, None
    least = math.ceil(solver.best_objective_bound - 0.5)
    return max(forced, least), round(solver.objective_value)


def can_fit(problem: Problem, space: Space, work: float) -> bool | None:
    """Whether some plan of a space fits, None where that is not known.

    Args:
        work: deterministic time of CP-SAT, about seconds on one core.
    """
    topology = problem.topology
    # all tables in their smallest options against all memory of the ranks together
    least = sum(min(sum(map(sum, option.bytes_of)) for option in some) for some in space.options)
    if least > sum(topology.hbm_cap_bytes) + sum(topology.ddr_cap_bytes):
        return False
    objective = Objective(problem, space)
    made = _MemoryModel.of(objective)
    if made is None:
        return None
    made.limit_memory(made.caps)
    status, solver = made.solve(work)
    if status == cp_model.INFEASIBLE:
        return False
    return True if status in SOLVED and objective.fits(made.read(solver, space)) else None


def least_extra_bytes(
    problem: Problem, space: Space, kind: int, work: float
) -> tuple[int | None, bool]:
    """Bytes that every rank must have more of a kind (0: HBM, 1: DDR) until a plan fits.

    Args:
        space: may hold options that the caps of this kind forbid.

    Returns:
        Bytes that do, None if none were found, and whether fewer are proven not to.
    """
    objective = Objective(problem, space)
    made = _MemoryModel.of(objective)
    if made is None:
        return None, False
    made.limit_memory(made.caps, [1 - kind])
    extra = made.model.new_int_var(0, MOST_BYTES, "")
    for over in made.exceed(kind):
        made.model.add(over <= extra)
    made.model.minimize(extra)
    status, solver = made.solve(work)
    if status not in SOLVED:
        return None, False
    plan, found = made.read(solver, space), round(solver.objective_value)
    short = max(missing[kind] for missing in objective.missing(plan))
    return max(found, short), status == cp_model.OPTIMAL and short <= found


class _MemoryModel(PlacementModel):
    """A model of memory alone, in bytes."""

    def __init__(self, objective: Objective, options: Sequence[Sequence[Option]]) -> None:
        super().__init__(objective.problem.topology, options, bytes_of=objective.bytes_of)
        self.caps = objective.caps
        self.co_locate(objective.space)
        self.divide_right(objective.space)
        self.limit_moves(objective.space)

    @classmethod
    def of(cls, objective: Objective) -> _MemoryModel | None:
        """The model of the options that take least; None if it is too large."""
        in_use = objective.space.in_use
        before = in_use.choices if in_use else (None,) * len(objective.space.options)
        options = [_frugal(*one) for one in zip(objective.space.options, before, strict=True)]
        return cls(objective, options) if model_size(objective, options) <= MAX_VARIABLES else None

    def exceed(self, kind: int) -> list[cp_model.IntVar]:
        """By how many bytes a plan exceeds the cap of every rank."""
        found = []
        for terms, cap in zip(self.used(kind), self.caps[kind].tolist(), strict=True):
            found.append(self.model.new_int_var(0, MOST_BYTES, ""))
            self.model.add(weighted(terms) <= int(cap) + found[-1])
        return found

    def solve(
        self, work: float, seed: int = 0, time_limit_s: float = float("inf")
    ) -> tuple[cp_model.CpSolverStatus, cp_model.CpSolver]:
        """The status of the model, and what has its solution."""
        solver = reproducible_solver(work, seed, time_limit_s)
        return run(solver, self.model), solver


def _frugal(options: Sequence[Option], stays: Choice | None) -> list[Option]:
    """Without options that another of the same placements beats in the memory of every shard; the
    one that the plan in use has remains."""
    return [
        option
        for option in options
        if (stays is not None and option is stays[0])
        or not any(_beats(other, option) for other in options if other is not option)
    ]


def _beats(better: Option, worse: Option) -> bool:
    if (better.sharding_type, better.sizes) != (worse.sharding_type, worse.sizes):
        return False
    a, b = np.array(better.bytes_of), np.array(worse.bytes_of)
    return better.pinned is None and bool((a <= b).all() and (a < b).any())


def model_size(objective: Objective, options: Sequence[Sequence[Option]]) -> int:
    """Variables of a model, about."""
    return int(np.sum([1 + len(objective.legal(o).units[0]) for some in options for o in some]))

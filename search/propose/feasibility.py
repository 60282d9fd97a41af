"""Does any plan fit? Finds one where memory is tight, or proves that there is none.

CP-SAT places every table under caps that may be exceeded, and minimises by how much. Bytes are
exact. Nothing exceeded is a plan; anything else says what is missing, and whether that is proven.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from search.objective import Assignment, Objective
from search.problem import Problem
from search.propose.cpsat import Model
from search.reproducible import reproducible_solver, run
from search.space.option import Choice, Option, Space
from search.surrogate import PHASES, Surrogate, Weights

MAX_VARIABLES = 200_000
"""Larger models are not built."""


@dataclass(frozen=True)
class Feasibility:
    """What is known.

    Args:
        assignment: a plan that fits, or None.
        missing: bytes ``(hbm, ddr)`` by which the best plan found exceeds each rank's caps.
        proven: no plan fits; if False and there is no plan, none was found in the time given.
    """

    assignment: Assignment | None
    missing: tuple[tuple[int, int], ...]
    proven: bool


def find_feasible(
    objective: Objective,
    surrogate: Surrogate,
    work: float,
    seed: int,
    time_limit_s: float = float("inf"),
) -> Feasibility:
    """Search for any plan that fits, however slow.

    Args:
        work: deterministic time of CP-SAT, about seconds on one core.
        time_limit_s: ceiling on wall time.
    """
    world = objective.problem.topology.world_size
    unknown = Feasibility(None, ((0, 0),) * world, False)
    model = _memory_model(objective, surrogate)
    if model is None:
        return unknown
    model.build(timed=False)
    over = [(kind, rank, model.exceed(kind, rank)) for rank in range(world) for kind in range(2)]
    model.model.minimize(sum(variable for _, _, variable in over))
    solver = reproducible_solver(work, seed, time_limit_s)
    status = run(solver, model.model)
    if status == cp_model.INFEASIBLE:
        return Feasibility(None, unknown.missing, True)  # constraints alone exclude each other
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return unknown
    missing = {(kind, rank): solver.value(variable) for kind, rank, variable in over}
    if not any(missing.values()):
        return Feasibility(model.read(solver), unknown.missing, False)
    per_rank = tuple((missing[0, rank], missing[1, rank]) for rank in range(world))
    return Feasibility(None, per_rank, solver.BestObjectiveBound() > 0.5)


def least_moves(
    objective: Objective,
    surrogate: Surrogate,
    work: float,
    seed: int,
    time_limit_s: float = float("inf"),
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
    model = _memory_model(objective.over(free), surrogate)
    if model is None:
        return forced, None
    model.build(timed=False)
    model.limit_memory()
    model.model.minimize(len(space.options) - sum(model.stays()))
    solver = reproducible_solver(work, seed, time_limit_s)
    status = run(solver, model.model)
    lower = max(forced, math.ceil(solver.BestObjectiveBound() - 0.5))
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return forced, None
    return lower, round(solver.ObjectiveValue())


class MemorySurrogate(Surrogate):
    """A surrogate for models of memory alone: nothing takes any time."""

    def _phases(self, option: Option) -> NDArray[np.float64]:
        return np.zeros((option.num_shards, PHASES))

    def _constant_ms(self, option: Option) -> float:
        return 0.0


def can_fit(problem: Problem, space: Space, work: float) -> bool | None:
    """Whether some plan of a space fits, None where that is not known.

    Args:
        work: deterministic time of CP-SAT, about seconds on one core.
    """
    if not _fits_pooled(problem, space):
        return False
    objective = Objective(problem, space)
    model = _memory_model(objective, MemorySurrogate(objective))
    if model is None:
        return None
    model.build(timed=False)
    model.limit_memory()
    status = run(reproducible_solver(work, 0, float("inf")), model.model)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return True
    return False if status == cp_model.INFEASIBLE else None


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
    model = _memory_model(objective, MemorySurrogate(objective))
    if model is None:
        return None, False
    model.build(timed=False)
    model.limit_memory(1 - kind)
    extra = model.model.new_int_var(0, 1 << 50, "")
    for rank in range(problem.topology.world_size):
        model.model.add(model.exceed(kind, rank) <= extra)
    model.model.minimize(extra)
    solver = reproducible_solver(work, 0, float("inf"))
    status = run(solver, model.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None, False
    return round(solver.ObjectiveValue()), status == cp_model.OPTIMAL


def _fits_pooled(problem: Problem, space: Space) -> bool:
    """All tables in their smallest options against all memory of the ranks together."""
    topology = problem.topology
    least = (min(_total(option) for option in table) for table in space.options)
    return sum(least) <= sum(topology.hbm_cap_bytes) + sum(topology.ddr_cap_bytes)


def _total(option: Option) -> int:
    return sum(m.hbm_bytes + m.ddr_bytes for m in option.memory)


def _memory_model(objective: Objective, surrogate: Surrogate) -> Model | None:
    """A model in bytes; None if it is too large."""
    options = [
        _frugal(
            table, None if objective.space.in_use is None else objective.space.in_use.choices[i]
        )
        for i, table in enumerate(objective.space.options)
    ]
    model = Model(objective, surrogate, options, Weights(), memory_unit=1)
    return model if model.size <= MAX_VARIABLES else None


def _frugal(options: Sequence[Option], stays: Choice | None) -> list[Option]:
    """Without options that another of the same placements beats in the memory of every shard; the
    one that the plan in use has remains."""
    kept: list[Option] = []
    for option in options:
        beaten = any(_beats(other, option) for other in options if other is not option)
        if not beaten or (stays is not None and option is stays[0]):
            kept.append(option)
    return kept


def _beats(better: Option, worse: Option) -> bool:
    if (better.sharding_type, better.sizes) != (worse.sharding_type, worse.sizes):
        return False
    if better.pinned is not None:
        return False
    a, b = (
        np.array([(m.hbm_bytes, m.ddr_bytes) for m in option.memory]) for option in (better, worse)
    )
    return bool((a <= b).all() and (a < b).any())

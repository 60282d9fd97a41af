"""Is there any plan that fits? The last resort where memory is tight, and the proof where none is.

CP-SAT places every table under caps that may be exceeded, and minimises by how much. Bytes are
exact. Nothing exceeded is a plan; anything else says what is missing, and whether that is proven.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from search.cpsat import Model, reproducible_solver, run
from search.objective import Assignment, Objective
from search.option import Option
from search.surrogate import Surrogate, Weights

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
    """Search for a plan that fits, whatever its time.

    Args:
        work: deterministic time of CP-SAT, about seconds on one core.
        time_limit_s: ceiling on wall time.
    """
    world = objective.problem.topology.world_size
    unknown = Feasibility(None, ((0, 0),) * world, False)
    options = [_frugal(o) for o in objective.space.options]
    model = Model(objective, surrogate, options, Weights(), memory_unit=1)
    if model.size > MAX_VARIABLES:
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


def _frugal(options: Sequence[Option]) -> list[Option]:
    """Without options that another of the same placements beats in the memory of every shard."""
    kept: list[Option] = []
    for option in options:
        if not any(_beats(other, option) for other in options if other is not option):
            kept.append(option)
    return kept


def _beats(better: Option, worse: Option) -> bool:
    if (better.sharding_type, better.sizes) != (worse.sharding_type, worse.sizes):
        return False
    a, b = (
        np.array([(m.hbm_bytes, m.ddr_bytes) for m in option.memory]) for option in (better, worse)
    )
    return bool((a <= b).all() and (a < b).any())

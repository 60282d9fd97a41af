"""The least time under cuts is the least over every plan, counted one by one."""

from __future__ import annotations

import random

import numpy as np
import pytest
from ortools.sat.python import cp_model

from predictor.cost.loads import Load
from predictor.model.workload import Constraints
from search.improve.cycle_cuts import critical_cut
from search.model.cut_model import UNITS_PER_MS, CutModel, CycleCut, OptionLoads
from search.objective import Assignment, Objective
from search.reproducible import reproducible_solver, run
from search.space.option import Option
from search.surrogate import Surrogate
from tests.search.problems import (
    a_problem,
    a_table,
    a_workload,
    every_plan,
    hosts,
    objective_of,
    random_plan,
)

TYPES = Constraints(sharding_types=("table_wise", "column_wise"), compute_kernels=("fused",))


def setting() -> tuple[Objective, Surrogate, list[CycleCut]]:
    """Three tables on two ranks, and the cuts of plans that use all lookup groups."""
    lookups = (60.0, 55.0, 20.0)
    tables = [a_table(f"t{i}", 200_000, 64, n, constraints=TYPES) for i, n in enumerate(lookups)]
    objective, surrogate = objective_of(a_problem(a_workload(*tables, batch_size=131072), hosts(2)))
    for option in objective.space.every_option:
        surrogate.shard_loads(option)
    rng = random.Random(0)
    found = [critical_cut(objective, random_plan(objective, rng)) for _ in range(24)]
    groups = frozenset(range(len(objective.scorer.groups)))
    cuts = [cut for cut in found if cut is not None and cut.groups == groups and len(cut.segments)]
    assert len(cuts) > 1
    return objective, surrogate, cuts[:3]


def time_under(cuts: list[CycleCut], surrogate: Surrogate, plan: Assignment) -> float:
    loads = surrogate.loads_on_ranks(plan)
    return max(cut.at(loads, loads[..., Load.SHARDS] > 0) for cut in cuts)


@pytest.mark.parametrize("proving", [False, True])
@pytest.mark.parametrize("floor", [0.0, 0.5])
@pytest.mark.parametrize("kept", [0, 1])
def test_the_least_time_is_that_of_the_best_plan(proving: bool, floor: float, kept: int) -> None:
    """With the first table where it is, or free; floors are what a launch takes on a rank."""
    objective, surrogate, cuts = setting()
    topology = objective.problem.topology
    cuts = [
        CycleCut(c.constant, c.even, c.segments, np.full_like(c.floors, floor), c.groups)
        for c in cuts
    ]
    plans = list(every_plan(objective))
    plans = [plan for plan in plans if plan[:kept] == plans[0][:kept]]

    def loads_of(option: Option) -> OptionLoads:
        group, loads = surrogate.shard_loads(option)
        return OptionLoads(group, loads.sum(axis=0) / topology.world_size, loads)

    numbers = range(kept, len(objective.space.options))
    model = CutModel(
        topology,
        [objective.space.options[table] for table in numbers],
        loads_of,
        surrogate.loads_on_ranks(plans[0][:kept]),
        1e6,
        proving=proving,
        numbers=numbers,
    )
    for cut in cuts:
        model.add_cut(cut)
    model.model.minimize(model.time)
    solver = reproducible_solver(60.0, 0, float("inf"))
    assert run(solver, model.model) == cp_model.OPTIMAL
    found_ms = solver.objective_value / UNITS_PER_MS
    best_ms = min(time_under(cuts, surrogate, plan) for plan in plans)
    assert found_ms == pytest.approx(best_ms, abs=1e-3)
    if proving:
        assert found_ms <= best_ms
    mine = model.read(solver)
    assert time_under(cuts, surrogate, (*plans[0][:kept], *mine)) == pytest.approx(
        best_ms, abs=1e-3
    )


def test_slower_plans_than_asked_for_are_none() -> None:
    objective, surrogate, cuts = setting()

    def loads_of(option: Option) -> OptionLoads:
        group, loads = surrogate.shard_loads(option)
        return OptionLoads(group, loads.sum(axis=0) / 2, loads)

    best_ms = min(time_under(cuts, surrogate, plan) for plan in every_plan(objective))
    for share, status in ((0.99, cp_model.INFEASIBLE), (1.01, cp_model.OPTIMAL)):
        options, nothing = objective.space.options, surrogate.loads_on_ranks(())
        model = CutModel(objective.problem.topology, options, loads_of, nothing, share * best_ms)
        for cut in cuts:
            model.add_cut(cut)
        solver = reproducible_solver(60.0, 0, float("inf"))
        assert run(solver, model.model) == status

"""The least time under cuts is the least over every plan, counted one by one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from ortools.sat.python import cp_model

from predictor.cost.loads import Load
from predictor.model.workload import Constraints
from search.improve.cycle_cuts import critical_cut
from search.model.cut_model import UNITS_PER_MS, CutModel, OptionLoads
from search.model.cycle_cut import CycleCut
from search.objective import Assignment, Objective, Ranks
from search.reproducible import reproducible_solver, run
from search.space.option import AllowedPlacements, Option
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


@cache
def setting() -> tuple[Objective, Surrogate, list[CycleCut]]:
    """Three tables on two ranks, and the cuts of plans that use all lookup groups; one of them
    holds for all plans, as the bound's do."""
    lookups = (60.0, 55.0, 20.0)
    tables = [a_table(f"t{i}", 200_000, 64, n, constraints=TYPES) for i, n in enumerate(lookups)]
    objective, surrogate = objective_of(a_problem(a_workload(*tables, batch_size=131072), hosts(2)))
    for option in objective.space.every_option:
        surrogate.shard_loads(option)
    rng = random.Random(0)
    critical = [critical_cut(surrogate, random_plan(objective, rng)) for _ in range(24)]
    groups = frozenset(range(len(objective.scorer.groups)))
    cuts = [
        cut for cut in critical if cut is not None and cut.groups == groups and len(cut.segments)
    ]
    assert len(cuts) > 1
    return objective, surrogate, [replace(cuts[0], groups=frozenset()), *cuts[1:3]]


def time_under(cuts: list[CycleCut], surrogate: Surrogate, plan: Assignment) -> float:
    """A cut says nothing of a plan that does without one of its lookup groups."""
    loads = surrogate.loads_on_ranks(plan)
    launched = loads[..., Load.SHARDS] > 0
    used = set(np.flatnonzero(launched.any(axis=1)).tolist())
    return max((c.at(loads, launched) for c in cuts if c.groups <= used), default=0.0)


def loads_by(surrogate: Surrogate) -> Callable[[Option], OptionLoads]:
    def loads_of(option: Option) -> OptionLoads:
        group, loads = surrogate.shard_loads(option)
        return OptionLoads(group, loads.sum(axis=0) / 2, loads)

    return loads_of


@pytest.mark.parametrize("proving", [False, True])
@pytest.mark.parametrize("floor", [0.0, 0.5])
@pytest.mark.parametrize(("fixed", "free"), [(0, ()), (1, ()), (0, (0,)), (1, (1,))])
def test_the_least_time_is_that_of_the_best_plan(
    proving: bool, floor: float, fixed: int, free: tuple[int, ...]
) -> None:
    """With the first table where it is, or free; floors are what a launch takes on a rank; whether
    the work of some ranks is told apart makes no difference."""
    objective, surrogate, cuts = setting()
    topology = objective.problem.topology
    cuts = [replace(c, floors=np.full_like(c.floors, floor)) for c in cuts]
    plans = list(every_plan(objective))
    plans = [plan for plan in plans if plan[:fixed] == plans[0][:fixed]]

    numbers = range(fixed, len(objective.space.options))
    model = CutModel(
        topology,
        [objective.space.options[table] for table in numbers],
        loads_by(surrogate),
        surrogate.loads_on_ranks(plans[0][:fixed]),
        1e6,
        proving=proving,
        free=frozenset(free),
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
    moved = model.read(solver)
    assert time_under(cuts, surrogate, (*plans[0][:fixed], *moved)) == pytest.approx(
        best_ms, abs=1e-3
    )


def test_slower_plans_than_asked_for_are_none() -> None:
    objective, surrogate, cuts = setting()

    best_ms = min(time_under(cuts, surrogate, plan) for plan in every_plan(objective))
    for share, status in ((0.99, cp_model.INFEASIBLE), (1.01, cp_model.OPTIMAL)):
        options, nothing = objective.space.options, surrogate.loads_on_ranks(())
        model = CutModel(
            objective.problem.topology, options, loads_by(surrogate), nothing, share * best_ms
        )
        for cut in cuts:
            model.add_cut(cut)
        solver = reproducible_solver(60.0, 0, float("inf"))
        assert run(solver, model.model) == status


@pytest.mark.parametrize("fixed", [0, 1])
@pytest.mark.parametrize("constant", [0.0, -20.0])
def test_a_plan_takes_what_the_cuts_say(fixed: int, constant: float) -> None:
    """Whoever launches a group on a rank, it is launched once; a tangent may start below nothing,
    and its segment then takes longer than the plan."""
    objective, surrogate, critical = setting()
    topology, rng = objective.problem.topology, random.Random(1)
    cuts = [replace(c, constant=constant, floors=np.full_like(c.floors, 0.5)) for c in critical]
    for _ in range(12):
        plan = random_plan(objective, rng)
        where = dict(plan[fixed:])

        def only(option: Option, where: dict[Option, Ranks] = where) -> AllowedPlacements:
            return AllowedPlacements(tuple(((rank,),) for rank in where[option]), same_group=False)

        expected = max(0.0, time_under(cuts, surrogate, plan))
        model = CutModel(
            topology,
            [[option] for option in where],
            loads_by(surrogate),
            surrogate.loads_on_ranks(plan[:fixed]),
            expected + 1.0,
            legal=only,
            numbers=range(fixed, len(plan)),
        )
        for cut in cuts:
            model.add_cut(cut)
        model.model.minimize(model.time)
        solver = reproducible_solver(60.0, 0, float("inf"))
        assert run(solver, model.model) == cp_model.OPTIMAL
        assert solver.objective_value / UNITS_PER_MS == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("free", [{0}, {1}, {0, 1}])
def test_what_the_slowest_free_rank_takes_is_told_apart(free: set[int]) -> None:
    """In the segments of the cut that holds for all plans."""
    objective, surrogate, cuts = setting()
    plan = random_plan(objective, random.Random(2))
    where = dict(plan)

    def only(option: Option) -> AllowedPlacements:
        return AllowedPlacements(tuple(((rank,),) for rank in where[option]), same_group=False)

    model = CutModel(
        objective.problem.topology,
        [[option] for option in where],
        loads_by(surrogate),
        surrogate.loads_on_ranks(()),
        time_under(cuts, surrogate, plan) + 1.0,
        free=frozenset(free),
        legal=only,
    )
    for cut in cuts:
        model.add_cut(cut)
    model.model.minimize(sum(model.here))
    solver = reproducible_solver(60.0, 0, float("inf"))
    assert run(solver, model.model) == cp_model.OPTIMAL
    loads = surrogate.loads_on_ranks(plan)
    times = np.einsum("sgc,grc->sr", cuts[0].segments, loads)
    times += cuts[0].floors @ (loads[..., Load.SHARDS] > 0)
    expected = times[:, sorted(free)].max(axis=1).sum()
    assert solver.objective_value / UNITS_PER_MS == pytest.approx(expected, abs=1e-3)

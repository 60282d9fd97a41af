"""One option for every table raises the bound, and never above the best plan."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from ortools.sat.python import cp_model

from predictor.model.plan import ShardingType
from predictor.model.workload import Constraints
from predictor.units import GIB
from search.bound import exchange_set, lower_bound, whole_options
from search.bound.exchange_set import ExchangeSet
from search.bound.lower_bound import LowerBound
from search.bound.whole_options import UNITS_PER_MS
from search.objective import Assignment, Objective
from search.reproducible import run
from search.space.enumerate import whole_space
from tests.quick import quick_first
from tests.search.bound.plans_of_sets import roomy_objective, sets_with_plans
from tests.search.problems import (
    a_problem,
    a_table,
    a_workload,
    every_plan,
    hosts,
    objective_of,
    random_plan,
)


@pytest.fixture(autouse=True)
def _only_whole_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_set, "FEW", 0)
    monkeypatch.setattr(lower_bound, "SMALL", 0)


def scarce() -> Objective:
    """Five tables alike, of which two and three quarters fit into device memory, where they are
    faster."""
    kernels = ("fused", "fused_uvm")
    wants = Constraints(sharding_types=(ShardingType.TABLE_WISE,), compute_kernels=kernels)
    tables = [a_table(f"t{i}", 4_000_000, 64, 20.0, constraints=wants) for i in range(5)]
    workload = a_workload(*tables, batch_size=32768)
    options = whole_space(a_problem(workload, hosts(2, ddr=80 * GIB))).options[0]
    needs = [sum(memory.hbm_bytes for memory in option.memory) for option in options]
    hbm = int(5 * min(needs) + 2.75 * (max(needs) - min(needs))) // 2
    problem = a_problem(workload, hosts(2, hbm=hbm, ddr=80 * GIB))
    return objective_of(problem, whole_space(problem))[0]


def bounds_of(objective: Objective, upper_ms: float) -> tuple[float, float]:
    bound = LowerBound(objective.problem, objective.space, objective.scorer)
    before = bound.solve(3000, upper_ms)
    return before, bound.tighten(3000, upper_ms, 1.0, lambda _: False)


def chosen_in(one: ExchangeSet, plan: Assignment) -> np.ndarray:
    options = [option for option, _ in plan]
    return np.flatnonzero([choice.option in options for choice in one.choices])


@pytest.mark.parametrize("batch_size", [512, 65536])
@pytest.mark.parametrize("seed", quick_first(4, range(16)))
def test_it_stays_below_the_best_plan(seed: int, batch_size: int) -> None:
    """Modules, pipelines, caches, constraints, two hosts."""
    objective = roomy_objective(seed, batch_size)
    best = float(objective.score(list(itertools.islice(every_plan(objective), 5000))).min())
    before, after = bounds_of(objective, 1.5 * best)
    assert before <= after <= best * (1 + 1e-9)


def test_scarce_memory_is_not_shared_between_halves_of_options() -> None:
    objective = scarce()
    plans = [plan for plan in every_plan(objective) if objective.fits(plan)]
    best = float(objective.score(plans).min())
    before, after = bounds_of(objective, 1.5 * best)
    assert before * 1.001 < after <= best * (1 + 1e-9)


@pytest.mark.parametrize("seed", quick_first(4, range(16)))
@pytest.mark.parametrize("alone", [True, False], ids=["sets", "families"])
def test_no_plan_is_faster_than_a_cut_at_its_options(seed: int, alone: bool) -> None:
    """Of its set, and of the family of all plans; also than cuts at the options of others."""
    objective = roomy_objective(seed)
    found = sets_with_plans(objective, seed)
    family = ExchangeSet(found[0][0].known, np.arange(len(found[0][0].known.all)), frozenset())
    while not family.refine()[1]:
        pass
    for one, plan, ms in found:
        solved = one if alone else family
        chosen = chosen_in(solved, plan)
        solved.choose_options(2 * ms, 1.0, np.inf)
        assert solved.whole is not None
        for other in (p for s, p, _ in found if s is one or not alone):
            solved.whole._learn(chosen_in(solved, other), 0.0)
        assert max(times.at(chosen) for times in solved.whole.times) <= ms * (1 + 1e-9)


@pytest.mark.parametrize(("dim", "pooling"), [(512, 600.0), (2048, 1.0)], ids=["work", "message"])
def test_the_longest_shard_counts_in_full_and_no_more(dim: int, pooling: float) -> None:
    wants = Constraints(sharding_types=(ShardingType.TABLE_WISE,), compute_kernels=("fused",))
    tables = [
        a_table("heavy", 50_000, dim, pooling, constraints=wants),
        a_table("light", 1000, 16, 0.1, constraints=wants),
    ]
    workload = a_workload(*tables, batch_size=65536)
    objective, _ = objective_of(a_problem(workload, hosts(8, 4)))
    plans = list(every_plan(objective))
    best = float(objective.score(plans).min())
    (one,) = LowerBound(objective.problem, objective.space, objective.scorer).sets
    while not one.refine()[1]:
        pass
    while not one.is_chosen:
        one.choose_options(2 * best, 1.0, np.inf)
    assert one.whole is not None
    found = max(times.at(chosen_in(one, plans[0])) for times in one.whole.times)
    assert 0.99 * best < found <= best * (1 + 1e-9)


def test_what_is_proven_counts_and_not_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """CP-SAT is stopped at the first plan that it finds, which is not the fastest."""
    objective = scarce()
    plans = [plan for plan in every_plan(objective) if objective.fits(plan)]
    best = float(objective.score(plans).min())
    _, exact = bounds_of(objective, 3 * best)
    found: list[float] = []

    def stopped(solver: cp_model.CpSolver, model: cp_model.CpModel) -> cp_model.CpSolverStatus:
        solver.parameters.stop_after_first_solution = True
        solver.parameters.cp_model_presolve = False
        solver.parameters.search_branching = solver.parameters.FIXED_SEARCH
        solver.parameters.num_violation_ls = 0
        slow = [model.get_int_var_from_proto_index(i) for i in range(1, 10, 2)]
        model.add_decision_strategy(slow, cp_model.CHOOSE_FIRST, cp_model.SELECT_MAX_VALUE)
        status = run(solver, model)
        found.append(solver.objective_value / UNITS_PER_MS)
        return status

    monkeypatch.setattr(whole_options, "run", stopped)
    before, after = bounds_of(objective, 3 * best)
    assert min(found) > 1.01 * exact
    assert before <= after <= exact


def test_a_bound_above_a_known_plan_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that are too long are seen; they are not clipped to the plan."""
    objective = scarce()
    plans = [plan for plan in every_plan(objective) if objective.fits(plan)]
    best = float(objective.score(plans).min())
    monkeypatch.setattr(
        whole_options, "_units", lambda ms: np.floor(2 * np.asarray(ms) * UNITS_PER_MS)
    )
    with pytest.raises(lower_bound.UnsoundBoundError):
        bounds_of(objective, best)


def test_random_plans_of_a_larger_problem() -> None:
    tables = [
        a_table(f"t{i}", 10 ** (4 + i % 4), 32 * (1 + i % 4), 40.0 / (i + 1)) for i in range(10)
    ]
    objective, _ = objective_of(a_problem(a_workload(*tables, batch_size=16384), hosts(8, 4)))
    rng = random.Random(0)
    plans = [random_plan(objective, rng) for _ in range(1000)]
    best = float(objective.score(plans).min())
    before, after = bounds_of(objective, best)
    assert 0 < before <= after <= best
